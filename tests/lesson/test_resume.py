"""The loss does not notice a resume: at the same number of ranks not by a bit, at another by the last digits. And the
comparison can fail: every way of getting it wrong that we know of is tried, and seen."""

import functools
import os
import shutil
from pathlib import Path

import pytest
import torch
from helpers import fp16_is

import data
import model
import universal
from harness.ranks import compare, launch, read_log, run

SIZE = ("--n_embd", 32, "--seq_len", 16, "--train_batch_size", 24, "--train_micro_batch_size_per_gpu")
SHORT = [(1, "fp32", 20), (2, "bf16", 20), (3, "fp32", 20)]
LONG = [
    pytest.param((stage, dtype, 200), marks=pytest.mark.slow) for stage in (1, 2, 3) for dtype in ("fp32", "bf16")
]  # fmt: skip
RUNS = pytest.mark.parametrize("kind", [*SHORT, *LONG], ids=lambda kind: "zero{}-{}-{}".format(*kind))


def record_rows(name):
    """A patch: every sequence that passes through the model in training is written down, by run and rank."""

    def patch():
        forward = model.GPT.forward

        def recorded(self, inputs, targets, **options):
            if self.training:
                rows = torch.cat([inputs, targets[:, -1:]], dim=1).tolist()
                with open(f"{name}.rows.{os.environ['RANK']}", "a") as file:
                    file.writelines(f"{row}\n" for row in rows)
            return forward(self, inputs, targets, **options)

        model.GPT.forward = recorded

    return patch


def as_on_a_gpu():
    torch.serialization.location_tag = lambda storage: "cuda:0"


@pytest.fixture(scope="module")
def saved(work):
    """saved(stage, dtype, steps): a run on 4 ranks, with a checkpoint after half of the steps; that one, converted.
    Returns (the run's name, its flags). What ZeRO-2 saves says that it was on a GPU."""

    @functools.cache
    def train(stage, dtype, steps):
        name = f"zero{stage}_{dtype}_{steps}"
        micro = 6 if stage == 3 else 2  # as small that 3 and 6 ranks divide the batch; at ZeRO-3 that takes its time
        flags = (*SIZE, micro, "--zero_stage", stage, "--dtype", dtype, "--steps", steps, "--checkpoint_dir", name)
        patch = as_on_a_gpu if stage == 2 else record_rows(name)
        run(work, 4, "train.py", *flags, "--run_name", name, "--checkpoint_interval", steps // 2, patch=patch)
        tag = work / name / f"global_step{steps // 2}"
        universal.convert(tag, f"{tag}_universal")
        return name, (*flags, "--checkpoint_interval", 1000, "--resume", "--checkpoint_tag", tag.name)

    return lambda stage, dtype="fp32", steps=20: train(stage, dtype, steps)


def as_universal(flags):
    return (*flags[:-1], f"{flags[-1]}_universal", "--universal_checkpoint")


def assert_identical(work, name, resumed, steps):
    for column, every in (("loss", 1), ("val_loss", 10), ("lr", 1), ("grad_norm", 1)):
        gaps = compare(work, name, resumed, column)
        assert list(gaps) == list(range(steps // 2 + every, steps + 1, every))
        assert set(gaps.values()) == {0.0}, (column, {s: g for s, g in gaps.items() if g})


@RUNS
def test_same_ranks_zero_checkpoint(work, saved, kind):
    """A ZeRO checkpoint on as many ranks as wrote it: every step after it is the same, every bit."""
    name, flags = saved(*kind)
    out = run(work, 4, "train.py", *flags, "--run_name", f"{name}_4")
    assert f"resumed from {name}/{flags[-1]}: optimizer at step {kind[2] // 2}" in out
    assert_identical(work, name, f"{name}_4", kind[2])


@RUNS
def test_same_ranks_universal_checkpoint(work, saved, kind):
    """The same through a universal checkpoint."""
    name, flags = saved(*kind)
    run(work, 4, "train.py", *as_universal(flags), "--run_name", f"{name}_uc4")
    assert_identical(work, name, f"{name}_uc4", kind[2])


@RUNS
def test_half_the_ranks(work, saved, kind):
    """The ZeRO checkpoint of 4 ranks on 2, without a conversion: 1e-5 in fp32, 1e-2 in bf16."""
    name, flags = saved(*kind)
    out = run(work, 2, "train.py", *flags, "--run_name", f"{name}_2")
    assert f"24 = {'6 per rank x 2' if kind[0] == 3 else '2 per rank x 6'} accumulation steps x 2 ranks" in out
    for column in ("loss", "val_loss"):
        gaps = compare(work, name, f"{name}_2", column)
        assert max(gaps) == kind[2] and max(gaps.values()) <= (1e-5 if "fp32" in name else 1e-2)


def test_a_machine_without_a_gpu_reads_what_a_gpu_saved(work, saved):
    """The tests above have, at ZeRO-2: only the file itself is left to look at."""
    name, flags = saved(2, "bf16")
    assert b"cuda:0" in (work / name / flags[-1] / "mp_rank_00_model_states.pt").read_bytes()


def test_half_the_ranks_universal_checkpoint(work, saved):
    name, flags = saved(3)
    run(work, 2, "train.py", *as_universal(flags), "--run_name", f"{name}_uc2")
    assert max(compare(work, name, f"{name}_uc2").values()) <= 1e-5


@pytest.mark.parametrize(
    "before, after, ranks",
    [
        (1, 3, 3),
        (1, 2, 6),
        (3, 1, 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(1, 1, 12), (3, 3, 1), (1, 2, 3)]),
    ],
)
def test_any_ranks_at_any_stage(work, saved, before, after, ranks):
    """Fewer and more ranks, dividing or not, and another ZeRO stage in one step."""
    name, flags = saved(before)
    resumed = f"{name}_on_{ranks}_zero{after}"
    run(work, ranks, "train.py", *flags, "--zero_stage", after, "--run_name", resumed)
    gaps = compare(work, name, resumed)
    assert list(gaps) == list(range(11, 21)) and max(gaps.values()) <= 1e-5


@pytest.mark.parametrize("stage", [3, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 2))])
def test_offload(work, stage):
    """With the optimizer, at ZeRO-3 the parameters too, in CPU memory; without a tag, the newest is taken."""
    name = f"offload{stage}"
    flags = (*SIZE, 6, "--offload", "--zero_stage", stage, "--steps", 8, "--checkpoint_dir", name)
    run(work, 4, "train.py", *flags, "--run_name", name, "--checkpoint_interval", 3)
    run(work, 2, "train.py", *flags, "--run_name", f"{name}_2", "--checkpoint_interval", 1000, "--resume")
    gaps = compare(work, name, f"{name}_2")
    assert list(gaps) == [7, 8] and max(gaps.values()) <= 1e-5


def fp16_on_cpu():
    """Take the device check away, and start from a loss scale that overflows and later grows again."""
    import deepspeed

    fp16_is(True)()
    initialize, scaling = deepspeed.initialize, {"initial_scale_power": 24, "hysteresis": 1, "loss_scale_window": 8}
    deepspeed.initialize = lambda config, **rest: initialize(config=config | {"fp16": config["fp16"] | scaling}, **rest)


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_fp16_loss_scale(work, stage):
    """The dynamic loss scale goes on where it was, and the optimizer's count stays behind by the skipped steps."""
    name = f"fp16_{stage}"
    flags = (*SIZE, 6, "--dtype", "fp16", "--zero_stage", stage, "--steps", 30, "--checkpoint_dir", name)
    run(work, 4, "train.py", *flags, "--run_name", name, "--checkpoint_interval", 20, patch=fp16_on_cpu)
    resume = ("--resume", "--checkpoint_tag", "global_step20", "--run_name", f"{name}_4")
    out = run(work, 4, "train.py", *flags, *resume, patch=fp16_on_cpu)
    assert "optimizer at step" in out and "optimizer at step 20" not in out
    scales = read_log(work, name, "loss_scale")["loss_scale"]
    assert scales[20] < 2**24 and len(set(scales.values())) > 3
    for column in ("loss", "loss_scale"):
        assert set(compare(work, name, f"{name}_4", column).values()) == {0.0}


def test_log_goes_on_under_the_same_name(tmp_path, monkeypatch):
    """A run resumed under its own name keeps its rows up to there, but for half a row that a killed run has left."""
    monkeypatch.chdir(tmp_path)
    row = {"lr": 0.1, "grad_norm": 1.0, "tokens_per_second": 1.0, "seconds": 1.0, "layout": "2 x 3 x 4"}
    log = data.Log("same")
    for step in range(1, 6):
        log.write(step=step, loss=1 / step, **row)
    with open("logs/same.csv", "a") as file:
        file.write("6,0.1")
    log = data.Log("same", done=4)
    log.write(step=5, loss=0.5, **row)
    assert read_log(tmp_path, "same")["loss"] == {1: 1.0, 2: 0.5, 3: 1 / 3, 4: 0.25, 5: 0.5}
    data.Log("same")
    assert not read_log(tmp_path, "same")["loss"]  # from the start


# -----------------------------------------------------------------------------
# the data


@pytest.mark.parametrize("ranks, first", [(4, 1), (2, 11)])
def test_every_sequence_once(work, saved, ranks, first):
    """Over ranks and micro-batches, the model sees the global batch of each step: each row once, none twice."""
    name, flags = saved(1)
    if ranks == 2:
        name = f"{name}_2rows"
        run(work, 2, "train.py", *flags, "--run_name", name, patch=record_rows(name))
    seen = [Path(work, f"{name}.rows.{rank}").read_text().splitlines() for rank in range(ranks)]
    train, _, _ = data.load_data(None, 16)
    share = 24 // ranks
    for step in range(first, 21):
        inputs, targets = data.global_batch(train, 1337, step, 24, 16)
        wanted = [str(row) for row in torch.cat([inputs, targets[:, -1:]], dim=1).tolist()]
        got = [row for rows in seen for row in rows[(step - first) * share : (step - first + 1) * share]]
        assert len(set(wanted)) > 20  # hardly any two are the same, so counting them means something
        assert sorted(got) == sorted(wanted)
    assert sum(map(len, seen)) == (21 - first) * 24


def test_data_differ_at_every_step():
    train, _, _ = data.load_data(None, 16)
    steps = [data.global_batch(train, 1337, step, 24, 16)[0] for step in range(1, 50)]
    assert len({tuple(batch.flatten().tolist()) for batch in steps}) == 49


# -----------------------------------------------------------------------------
# negative controls: what the comparison above must catch, and does


def off_by_one():
    batch = data.global_batch
    data.global_batch = lambda text, seed, step, *sizes: batch(text, seed, step + 1, *sizes)


def data_by_rank_count():
    batch = data.global_batch
    data.global_batch = lambda text, seed, *rest: batch(text, seed + int(os.environ["WORLD_SIZE"]), *rest)


def dropout_by_rank():
    derive = model.derive_seed
    model.derive_seed = lambda *key: derive(*key[:2], os.environ["RANK"], *key[3:]) if len(key) == 5 else derive(*key)


@pytest.mark.parametrize("mistake", [off_by_one, data_by_rank_count, dropout_by_rank])
def test_mistake_is_seen(work, saved, mistake):
    name, flags = saved(1)
    run(work, 1, "train.py", *flags, "--run_name", mistake.__name__, patch=mistake)
    assert max(compare(work, name, mistake.__name__).values()) > 1e-4


def test_lost_moment_is_seen(work, saved):
    """One exp_avg of 28 is zero: the loss of the first step is the same, the next ones are not."""
    name, flags = saved(1)
    shutil.copytree(work / name, work / "broken")
    file = work / "broken" / "global_step10_universal" / "zero" / "blocks.0.up.weight" / "exp_avg.pt"
    content = torch.load(file)
    content["param"].zero_()
    torch.save(content, file)
    run(work, 1, "train.py", *as_universal(flags), "--checkpoint_dir", "broken", "--run_name", "no_moment")
    gaps = compare(work, name, "no_moment")
    assert gaps[11] <= 1e-6 and max(gaps.values()) > 1e-4


def test_half_the_accumulation_is_seen(work, saved):
    """2 ranks with the accumulation steps of 4 take half the batch. train.py refuses; made to go on, it is off."""
    name, flags = saved(1)
    shutil.copytree(work / name, work / "half")
    file = work / "half" / "global_step10" / "mp_rank_00_model_states.pt"
    state = torch.load(file)
    state["run"]["train_batch_size"] = 12
    torch.save(state, file)
    half = ("--checkpoint_dir", "half", "--train_batch_size", 12, "--run_name", "half")
    out = run(work, 2, "train.py", *flags, *half)
    assert "12 = 2 per rank x 3 accumulation steps x 2 ranks" in out
    assert max(compare(work, name, "half").values()) > 1e-4


def test_deepspeed_alone(work, saved):
    """--stock: DeepSpeed refuses other ranks; its universal loader, at ZeRO-3, goes on with another loss."""
    name, flags = saved(3)
    refused = launch(work, 2, "train.py", *flags, "--stock", "--run_name", "refused", grace=20)
    assert "world size of 4 but the current world size is 2" in refused.errors
    run(work, 2, "train.py", *as_universal(flags), "--stock", "--run_name", "stock")
    assert max(compare(work, name, "stock").values()) > 1e-4
