"""Gradient accumulation: five layouts, one curve; each sequence once; and the traps, seen."""

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import ROOT

import data
import model
from demos import traps
from harness.ranks import compare, launch, read_log, run

LAYOUTS = {  # run: (script, ranks, micro-batch, accumulation steps)
    "no_grad_accu_pt": ("grad_accu_pt.py", 1, 32, 1),
    "grad_accu_4_pt": ("grad_accu_pt.py", 1, 8, 4),
    "no_grad_accu_ds": ("grad_accu_ds.py", 1, 32, 1),
    "grad_accu_4_ds": ("grad_accu_ds.py", 1, 8, 4),
    "grad_accu_2_ds_ws2": ("grad_accu_ds.py", 2, 8, 2),
}


def record_rows():
    """Every sequence that passes through the model, by rank."""
    forward = model.GPT.forward

    def recorded(self, inputs, targets):
        with open(f"rows.{os.environ['RANK']}", "a") as file:
            file.writelines(f"{row}\n" for row in torch.cat([inputs, targets[:, -1:]], dim=1).tolist())
        return forward(self, inputs, targets)

    model.GPT.forward = recorded


def rows_by_step(folder, ranks, steps):
    """[sorted rows of step 1, of step 2, ...] over all ranks; None where they do not divide into steps."""
    files = [Path(folder, f"rows.{rank}") for rank in range(ranks)]
    seen = [file.read_text().splitlines() for file in files]
    for file in files:
        file.unlink()
    share = len(seen[0]) // steps
    return [sorted(row for rows in seen for row in rows[s * share : (s + 1) * share]) for s in range(steps)]


def wanted_rows(steps):
    train, _, _ = data.load_data()
    wanted = []
    for step in range(1, steps + 1):
        inputs, targets = data.global_batch(train, 1337, step, 32, 32)
        wanted.append(sorted(str(row) for row in torch.cat([inputs, targets[:, -1:]], dim=1).tolist()))
        assert len(set(wanted[-1])) > 28  # hardly any two are the same, so counting them means something
    return wanted


@pytest.mark.parametrize("edits", [{}, traps.TOKENS], ids=["equal", "ragged"])
def test_five_layouts_one_curve(tmp_path, edits):
    """PyTorch and DeepSpeed, one batch of 32 or 4 micro-batches or 2 on 2 ranks: 1e-5 over 20 steps, and each of the 32
    sequences of a step passes through the model once. The same curve for sequences of unequal length, each micro-batch
    weighted by its tokens."""
    for name, (script, ranks, micro, accumulation) in LAYOUTS.items():
        (tmp_path / script).write_text(traps.edited(script, edits.get(script, [])))
        arguments = ("--steps", 20, "--run_name", name, "--train_micro_batch_size_per_gpu", micro)
        patch = None if edits else record_rows
        out = run(tmp_path, ranks, tmp_path / script, *arguments, "--train_batch_size", 32, patch=patch)
        assert f"32 = {micro} per rank x {accumulation} accumulation steps x {ranks} ranks" in out
        for column in ("loss", "grad_norm"):
            gaps = compare(tmp_path, "no_grad_accu_pt", name, column)
            assert len(gaps) == 20 and max(gaps.values()) <= 1e-5, (name, column, max(gaps.values()))
        assert edits or rows_by_step(tmp_path, ranks, 20) == wanted_rows(20)
    losses = list(read_log(tmp_path, "no_grad_accu_pt")["loss"].values())
    assert losses[0] > 5.5 and losses[-1] < 4.5  # it learns, so the curves had something to disagree about


def test_feeding_everything_every_time_matches_and_is_seen(tmp_path):
    """A loop that feeds the whole batch in every micro-step has the same curve. Only the count of rows tells."""
    edits = [("rows = slice(m * micro, (m + 1) * micro)", "rows = slice(0, batch)")]
    (tmp_path / "everything.py").write_text(traps.edited("grad_accu_pt.py", edits))
    run(tmp_path, 1, "grad_accu_pt.py", "--run_name", "right", "--steps", 20)
    command = (tmp_path / "everything.py", "--steps", 20, "--run_name", "everything")
    run(tmp_path, 1, *command, "--train_micro_batch_size_per_gpu", 8, patch=record_rows)
    assert max(compare(tmp_path, "right", "everything").values()) <= 1e-5
    assert rows_by_step(tmp_path, 1, 20) != wanted_rows(20)


@pytest.mark.parametrize("uneven", [False, True], ids=["equal", "ragged"])
def test_accumulated_gradient_is_the_full_gradient(uneven):
    """In float64 the sum of the shares' gradients is the gradient of the whole batch, to 1e-12."""
    torch.manual_seed(0)
    gpt = model.GPT(dropout=0.0).double()
    # the loss is float32 by design; here it must not be
    gpt_loss = lambda x, y: torch.nn.functional.cross_entropy(logits(gpt, x).flatten(0, 1), y.flatten())  # noqa: E731
    train, _, _ = data.load_data()
    inputs, targets = data.global_batch(train, 1337, 1, 32, 32)
    if uneven:
        targets = traps.ragged(targets, 1337, 1)
        assert len(set((targets >= 0).sum(dim=1).tolist())) > 10
    gpt_loss(inputs, targets).backward()
    full = [p.grad.clone() for p in gpt.parameters()]
    for micro in (16, 8, 1):
        gpt.zero_grad()
        for m in range(32 // micro):
            rows = slice(m * micro, (m + 1) * micro)
            share = traps.share_of_tokens(targets, rows)
            (gpt_loss(inputs[rows], targets[rows]) * share).backward()
        largest = max((p.grad - f).abs().max().item() for p, f in zip(gpt.parameters(), full, strict=True))
        assert largest <= 1e-12
    assert max(f.abs().max().item() for f in full) > 1e-2


def logits(gpt, inputs):
    x = gpt.wte(inputs) + gpt.wpe(torch.arange(inputs.size(1)))
    for block in gpt.blocks:
        x = block(x)
    return gpt.lm_head(gpt.ln_f(x))


@pytest.mark.parametrize(
    "trap, low, high, ratio",
    [
        ("no trap", 0, 1e-5, 1),
        ("not divided, AdamW", 1e-5, 1e-3, 4),  # Adam divides the factor away: nothing to see in the loss ...
        ("not divided, AdamW, clipping", 1e-2, 1, 4),  # ... until something compares the gradient with a constant
        ("not divided, SGD", 0.1, 100, 4),
        ("a step at every micro-batch", 1e-1, 10, 0.25),
        ("no trap, ragged", 0, 1e-5, 1),
        ("mean of means, ragged", 1e-3, 1, 1),
        ("no trap, ragged, DeepSpeed, 2 ranks", 0, 1e-5, 1),
        ("mean of means, ragged, DeepSpeed, 2 ranks", 1e-3, 1, 1),
    ],
)
def test_trap(tmp_path, monkeypatch, trap, low, high, ratio):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [])
    monkeypatch.setattr(traps, "start", lambda ranks, path, arguments: run(tmp_path, ranks, path.resolve(), *arguments))
    gap, norms = traps.measure(trap, 100 if "AdamW" in trap else 20)  # with AdamW it is not seen before
    assert low <= gap <= high
    # A micro-batch's gradient is only about as long as the batch's, on whatever text Python's library has.
    rel = 0.3 if trap.startswith("a step") else 0.05 if trap.startswith("mean") else 1e-4
    assert norms == pytest.approx(ratio, rel=rel)


def test_the_pair_is_alike():
    """The two scripts differ where PyTorch and DeepSpeed do: in set-up, in the two lines of a micro-batch that call the
    model or its engine, and in what they do after the last one. All else is the same lines in the same order."""
    pt, ds = ((ROOT / f"grad_accu_{kind}.py").read_text().splitlines() for kind in ("pt", "ds"))
    code = "\n".join(pt).split('"""', 2)[2].replace("or DeepSpeed's engine does", "").lower()
    assert "deepspeed" not in code and "distributed" not in code and "engine" not in code
    ours = r"import deepspeed|distributed|dist\.|engine|config|leave|rank, ranks = |local_rank|shm_comm"
    theirs = r"rank, ranks = 0, 1|device|loss = model\(|\(loss / accumulation\)\.backward|clip_grad_norm_|optimizer\."
    for line in difflib.ndiff(pt, ds):
        allowed = {"+": ours, "-": theirs}.get(line[0])
        assert allowed is None or re.search(allowed, line), line


def test_grad_accu_pt_is_plain_pytorch(tmp_path):
    """What it imports does not import DeepSpeed."""
    (tmp_path / "spy.py").write_text(
        f"import runpy, sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv = ['grad_accu_pt.py', '--steps', '1']\n"
        f"runpy.run_path({str(ROOT / 'grad_accu_pt.py')!r}, run_name='__main__')\n"
        "sys.exit(any('deepspeed' in name for name in sys.modules))\n"
    )
    assert subprocess.run([sys.executable, "spy.py"], cwd=tmp_path, timeout=100).returncode == 0
    assert (tmp_path / "logs" / "grad_accu_pt.csv").exists()


@pytest.mark.parametrize("script, ranks", [("grad_accu_pt.py", 1), ("grad_accu_ds.py", 2)])
def test_batch_that_does_not_divide(tmp_path, script, ranks):
    result = launch(tmp_path, ranks, script, "--train_batch_size", 32, "--train_micro_batch_size_per_gpu", 12)
    assert result.code == 2 and result.out == "" and not (tmp_path / "logs").exists()
    assert result.errors.count("\n") == 1
    assert f"{script}: error: a batch of 32 does not divide into micro-batches of 12 on {ranks} ranks" in result.errors
    assert {1: "24 or 36;", 2: "24 or 48;"}[ranks] in result.errors


def test_a_step_of_a_distributed_sampler():
    """As the README says: the same samples on any number of ranks, and what is skipped at a resume is what was done.
    The control skips as many batches as the ranks before did."""
    length, batch, micro, epoch, done = 24 * 5, 24, 2, 3, 2

    def steps(ranks, skip):
        found = [set() for _ in range(length // batch)]
        for rank in range(ranks):
            sampler = torch.utils.data.DistributedSampler(range(length), ranks, rank, drop_last=True)
            sampler.set_epoch(epoch)
            batches = list(torch.utils.data.DataLoader(range(length), micro, sampler=sampler))[skip:]
            accumulation = batch // micro // ranks
            for i, rows in enumerate(batches):
                found[i // accumulation] |= {*rows.tolist()}
        return [step for step in found if step]

    wanted = steps(4, 0)
    assert len(wanted) == 5 and all(len(step) == batch for step in wanted) and len(set.union(*wanted)) == length
    for ranks in (1, 2, 3, 6):
        assert steps(ranks, done * (batch // micro // ranks)) == wanted[done:]
        assert steps(ranks, done * 3) != wanted[done:]
