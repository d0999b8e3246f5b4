"""Gradient accumulation: five layouts, one curve; each sequence once; and the traps, seen."""

import difflib
import re
import subprocess
import sys

import pytest
import torch
from helpers import ROOT, each_row_once, record_rows

from measure.ranks import compare, launch, read_log, run

LAYOUTS = {  # run: (script, ranks, micro-batch, accumulation steps)
    "no_grad_accu_pt": ("grad_accu_pt.py", 1, 32, 1),
    "grad_accu_4_pt": ("grad_accu_pt.py", 1, 8, 4),
    "no_grad_accu_ds": ("grad_accu_ds.py", 1, 32, 1),
    "grad_accu_4_ds": ("grad_accu_ds.py", 1, 8, 4),
    "grad_accu_2_ds_ws2": ("grad_accu_ds.py", 2, 8, 2),
}
STEPS = range(1, 21)


def train(folder, ranks, script, name, micro):
    arguments = (
        "--steps",
        len(STEPS),
        "--train_batch_size",
        32,
        "--train_micro_batch_size_per_gpu",
        micro,
    )
    return run(folder, ranks, script, *arguments, "--run_name", name, patch=record_rows(name))


@pytest.fixture(scope="module")
def trained(work):
    """What the five print."""
    return {
        name: train(work, ranks, script, name, micro)
        for name, (script, ranks, micro, _) in LAYOUTS.items()
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_five_layouts_one_curve(work, trained, name):
    """PyTorch and DeepSpeed, one batch of 32 or 4 micro-batches or 2 on 2 ranks: 1e-5 over 20
    steps, and each of the 32 sequences of a step passes through the model once."""
    _, ranks, micro, accumulation = LAYOUTS[name]
    assert (
        f"32 = {micro} per rank x {accumulation} accumulation steps x {ranks} ranks"
        in trained[name]
    )
    for column in ("loss", "grad_norm"):
        gaps = compare(work, "no_grad_accu_pt", name, column)
        assert len(gaps) == 20 and max(gaps.values()) <= 1e-5
    assert each_row_once(work, name, ranks, STEPS, 32, 32)
    losses = list(read_log(work, name)["loss"].values())
    assert (
        losses[0] > 5.5 and losses[-1] < 4.5
    )  # it learns, so the curves had something to disagree about


def test_feeding_everything_every_time_matches_and_is_seen(work, trained):
    """A loop that feeds the whole batch in every micro-step has the same curve. Only the count of
    rows tells."""
    source = (ROOT / "grad_accu_pt.py").read_text()
    share = "rows = slice(m * micro, (m + 1) * micro)"
    assert source.count(share) == 1
    (work / "everything.py").write_text(source.replace(share, "rows = slice(0, batch)"))
    train(work, 1, work / "everything.py", "everything", 8)
    assert max(compare(work, "no_grad_accu_pt", "everything").values()) <= 1e-5
    assert not each_row_once(work, "everything", 1, STEPS, 32, 32)


def rows_of(table):
    """{trap: (largest difference of the loss, ratio of the gradients' norms)}."""
    found = re.findall(r"^(\S.*?) +(\d\.\de\S+) +x (\d\.\d+)$", table, re.M)
    return {trap: (float(gap), float(ratio)) for trap, gap, ratio in found}


@pytest.mark.slow
def test_traps(tmp_path):
    """As in the table: rounding stays rounding, and what is more than that stays within a factor of
    5."""
    command = [sys.executable, "-m", "measure.traps"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    now, table = rows_of(done.stdout), rows_of((ROOT / "assets" / "traps.txt").read_text())
    assert now.keys() == table.keys() and len(now) == 9, done.stderr
    for trap, (gap, ratio) in table.items():
        assert now[trap][0] <= 1e-5 if gap <= 1e-5 else 0.2 <= now[trap][0] / gap <= 5, trap
        assert now[trap][1] == pytest.approx(
            ratio, rel=0.3 if trap.startswith("a step") else 0.05
        ), trap


def test_the_pair_is_alike():
    """The two scripts differ where PyTorch and DeepSpeed do: in set-up, in the two lines of a
    micro-batch that call the model or its engine, and in what they do after the last one. All else
    is the same lines in the same order."""
    pt, ds = ((ROOT / f"grad_accu_{kind}.py").read_text().splitlines() for kind in ("pt", "ds"))
    ours = r"import deepspeed|distributed|dist\.|engine|config|leave|rank, ranks = |local_rank|shm_comm"
    theirs = r"rank, ranks = 0, 1|device|loss = model\(|\(loss / accumulation\)\.backward|clip_grad_norm_|optimizer\."
    for line in difflib.ndiff(pt, ds):
        allowed = {"+": ours, "-": theirs}.get(line[0])
        assert allowed is None or re.search(allowed, line), line


def test_grad_accu_pt_is_plain_pytorch():
    """What it imports does not import DeepSpeed."""
    code = "import runpy, sys; sys.argv += ['--help']\ntry: runpy.run_path('grad_accu_pt.py')\n"
    code += "finally: print([name for name in sys.modules if 'deepspeed' in name])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert (
        done.returncode == 0
        and "--train_batch_size" in done.stdout
        and done.stdout.endswith("\n[]\n")
    ), done.stderr


@pytest.mark.parametrize(
    "script, ranks, nearest", [("grad_accu_pt.py", 1, 36), ("grad_accu_ds.py", 2, 48)]
)
def test_batch_that_does_not_divide(tmp_path, script, ranks, nearest):
    result = launch(
        tmp_path, ranks, script, "--train_batch_size", 32, "--train_micro_batch_size_per_gpu", 12
    )
    assert result.code == 2 and result.out == "" and not (tmp_path / "logs").exists()
    assert result.errors.count("\n") == 1 and f"24 or {nearest};" in result.errors
    assert (
        f"{script}: error: a batch of 32 does not divide into micro-batches of 12 on {ranks} ranks"
        in result.errors
    )


def test_a_step_of_a_distributed_sampler():
    """As the README says: the same samples on any number of ranks, and what is skipped at a resume
    is what was done. The control skips as many batches as the ranks before did."""
    length, batch, micro, epoch, done = 24 * 5, 24, 2, 3, 2

    def steps(ranks, skip):
        found = [set() for _ in range(length // batch)]
        for rank in range(ranks):
            sampler = torch.utils.data.DistributedSampler(
                range(length), ranks, rank, drop_last=True
            )
            sampler.set_epoch(epoch)
            batches = list(torch.utils.data.DataLoader(range(length), micro, sampler=sampler))[
                skip:
            ]
            accumulation = batch // micro // ranks
            for i, rows in enumerate(batches):
                found[i // accumulation] |= {*rows.tolist()}
        return [step for step in found if step]

    wanted = steps(4, 0)
    assert (
        len(wanted) == 5
        and all(len(step) == batch for step in wanted)
        and len(set.union(*wanted)) == length
    )
    for ranks in (1, 2, 3, 6):
        assert steps(ranks, done * (batch // micro // ranks)) == wanted[done:]
        assert steps(ranks, done * 3) != wanted[done:]
