"""The loss does not notice a resume: at the same number of ranks not by a bit, at another by the
last digits. And the comparison can fail: every way of getting it wrong that we know of is tried,
and seen."""

import functools
import os
import sys

import pytest

import train
import universal
from measure.logs import compare, read_log, steps
from tests.support.commands import slow
from tests.support.helpers import record_rows, rows_of_steps
from tests.support.ranks import run

# With the size of a micro-batch behind it.
SIZE = "--n_embd 32 --seq_len 16 --train_batch_size 24 --train_micro_batch_size_per_gpu"
ONE, TWO, THREE = (1, "fp32"), (2, "bf16"), (3, "fp32")
SLOW = [slow(1, "bf16"), slow(2, "fp32"), slow(3, "bf16")]
STEPS = 8  # the last has a validation loss, and no other one


@pytest.fixture(scope="module")
def saved(work):
    """saved(stage, dtype): a run on 4 ranks, with a checkpoint after half of the steps; that one,
    converted. Returns (the run's name, its flags)."""

    @functools.cache
    def train(stage, dtype):
        name = f"zero{stage}_{dtype}"
        # 12 or 4 micro-batches. At ZeRO-3 they take their time.
        micro = 6 if stage == 3 else 2
        flags = (
            f"{SIZE} {micro} --zero_stage {stage} --dtype {dtype} --steps {STEPS} "
            f"--checkpoint_dir {name} --checkpoint_interval {STEPS // 2}"
        ).split()
        run(work, 4, "train.py", *flags, "--run_name", name, patch=record_rows(name))
        tag = work / name / f"global_step{STEPS // 2}"
        universal.convert(tag, f"{tag}_universal")
        resume = f"--checkpoint_interval 1000 --resume --checkpoint_tag {tag.name}"
        return name, [*flags, *resume.split()]

    return train


@pytest.fixture(scope="module")
def halved(work, saved):
    """halved(stage, dtype): the ZeRO checkpoint of 4 ranks on 2. Returns (run, resumed run,
    what it prints)."""

    @functools.cache
    def resume(*kind):
        name, flags = saved(*kind)
        resumed = f"{name}_2"
        out = run(work, 2, "train.py", *flags, "--run_name", resumed, patch=record_rows(resumed))
        return name, resumed, out

    return resume


@pytest.mark.parametrize("stage, dtype", [ONE, slow(*TWO), slow(*THREE), *SLOW])
def test_same_ranks_zero_checkpoint(work, saved, stage, dtype):
    """A ZeRO checkpoint on as many ranks as wrote it: every step after it is the same, every
    bit."""
    name, flags = saved(stage, dtype)
    out = run(work, 4, "train.py", *flags, "--run_name", f"{name}_4")
    assert f"resumed from {name}/{flags[-1]} at step {STEPS // 2}\n" in out
    steps = range(STEPS // 2 + 1, STEPS + 1)
    for column in ("loss", "lr", "grad_norm", "val_loss"):
        wanted = steps[-1:] if column == "val_loss" else steps
        assert compare(work, name, f"{name}_4", column) == dict.fromkeys(wanted, 0.0), column
    assert len({*read_log(work, name, "lr")["lr"].values()}) == STEPS


@pytest.mark.parametrize("stage, dtype", [ONE, TWO, slow(*THREE), *SLOW])
def test_half_the_ranks(work, saved, halved, stage, dtype):
    """The ZeRO checkpoint of 4 ranks on 2, without a conversion: 1e-5 in fp32, 1e-2 in bf16."""
    name, resumed, out = halved(stage, dtype)
    count, size, steps = (4, 6, 2) if stage == 3 else (12, 2, 6)
    share = f"{count} micro-batches of {size} on 2 ranks, {steps} accumulation steps each"
    assert f"batch 24: {share}\n" in out
    for column in ("loss", "val_loss"):
        gaps = compare(work, name, resumed, column)
        assert max(gaps) == STEPS and max(gaps.values()) <= (1e-5 if dtype == "fp32" else 1e-2)
    in_fp32, _ = saved(*ONE)
    assert dtype == "fp32" or max(compare(work, in_fp32, name).values()) > 1e-4


CHANGES = [
    (1, 3, 5, "zero"),
    slow(3, 1, 3, "universal"),
    slow(3, 3, 7, "zero"),
    slow(1, 2, 7, "zero"),
    slow(3, 3, 2, "universal"),
    slow(1, 1, 12, "zero"),
]


@pytest.mark.parametrize("before, after, ranks, checkpoint", CHANGES)
def test_any_ranks_at_any_stage(work, saved, before, after, ranks, checkpoint):
    """Fewer and more ranks, and another ZeRO stage in one step; also from a universal checkpoint.
    Where the ranks do not divide the micro-batches, 5 do 12, 3 do 4, 7 do 4."""
    name, flags = saved(before, "fp32")
    resumed = f"{name}_on_{ranks}_zero{after}"
    if checkpoint == "universal":
        flags = (*flags[:-1], f"{flags[-1]}_universal", "--universal_checkpoint")
    run(work, ranks, "train.py", *flags, "--zero_stage", after, "--run_name", resumed)
    gaps = compare(work, name, resumed)
    assert list(gaps) == list(range(STEPS // 2 + 1, STEPS + 1)) and max(gaps.values()) <= 1e-5


@pytest.mark.parametrize("stage", [3, slow(1), slow(2)])
def test_offload(work, stage):
    """With the optimizer, at ZeRO-3 the parameters too, in CPU memory; without a tag, the newest is
    taken."""
    name = f"offload{stage}"
    flags = f"{SIZE} 12 --offload --zero_stage {stage} --steps 8 --checkpoint_dir {name}".split()
    run(work, 2, "train.py", *flags, "--run_name", name, "--checkpoint_interval", 3)
    resume = f"--run_name {name}_1 --checkpoint_interval 1000 --resume".split()
    run(work, 1, "train.py", *flags, *resume)
    gaps = compare(work, name, f"{name}_1")
    assert list(gaps) == [7, 8] and max(gaps.values()) <= 1e-5


def test_log_goes_on_under_the_same_name(tmp_path, monkeypatch):
    """A run resumed under its own name keeps its rows up to there, but for half a row that a killed
    run has left: "1" of a row of step 13 is no row of step 1."""
    monkeypatch.chdir(tmp_path)
    log = train.open_log("same", done=0)
    for step in range(1, 6):
        log.writerow({"step": step, "loss": 1 / step, "ranks": 4})
    with open("logs/same.csv", "a") as file:
        file.write("1")
    log = train.open_log("same", done=4)
    log.writerow({"step": 5, "loss": 0.5, "ranks": 4})
    assert read_log(tmp_path, "same")["loss"] == {1: 1.0, 2: 0.5, 3: 1 / 3, 4: 0.25, 5: 0.5}
    assert steps(tmp_path, "same") == [1, 2, 3, 4, 5]
    train.open_log("same", done=0)
    assert not steps(tmp_path, "same")


# -----------------------------------------------------------------------------
# the data


def test_every_sequence_once(work, halved):
    """Over ranks and micro-batches, the model sees the global batch of each step: each row once,
    none twice."""
    name, resumed, _ = halved(*ONE)
    rows = rows_of_steps(work, name, 4, 24, 2, STEPS)
    assert [len(of_step) for of_step in rows] == [24] * STEPS
    # Hardly any two are the same, so counting them means something.
    assert len({row for of_step in rows for row in of_step}) > 0.8 * STEPS * 24
    assert rows_of_steps(work, resumed, 2, 24, 2, STEPS // 2) == rows[STEPS // 2 :]


# -----------------------------------------------------------------------------
# negative controls: what the comparison above must catch, and does


def off_by_one():
    import train  # each rank's own

    batch = train.micro_batch
    train.micro_batch = lambda args, text, step, m: batch(args, text, step + 1, m)


def dropout_by_rank():
    import train

    derive = train.derive_seed

    def by_rank(*key):
        if len(key) == 5:
            key = (*key[:2], os.environ["RANK"], *key[3:])
        return derive(*key)

    train.derive_seed = by_rank


def half_the_accumulation():
    """2 ranks with the accumulation steps of 4 take half the batch. train.py refuses; made to go
    on, it is off."""
    import train

    sys.argv += ["--train_batch_size", "12"]
    train.check_run = lambda *_: None


MISTAKES = [
    (off_by_one, 1),
    (dropout_by_rank, 1),
    slow(half_the_accumulation, 2),
]


@pytest.mark.parametrize("mistake, ranks", MISTAKES)
def test_mistake_is_seen(work, saved, mistake, ranks):
    name, flags = saved(*ONE)
    run(work, ranks, "train.py", *flags, "--run_name", mistake.__name__, patch=mistake)
    assert max(compare(work, name, mistake.__name__).values()) > 1e-4
