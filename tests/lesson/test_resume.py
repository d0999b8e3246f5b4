"""The loss does not notice a resume: at the same number of ranks not by a bit, at another by the last digits. And the
comparison can fail: every way of getting it wrong that we know of is tried, and seen."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from helpers import fp16_is

import data
import model
import universal
from harness.ranks import compare, read_log, run

SHAPE = ("--n_embd", 32, "--seq_len", 16, "--warmup_steps", 20)


def options(stage, dtype, folder, batch=24, micro=6, steps=20):
    return (
        *SHAPE, "--zero_stage", stage, "--dtype", dtype, "--checkpoint_dir", folder, "--steps", steps,
        "--train_batch_size", batch, "--train_micro_batch_size_per_gpu", micro,
    )  # fmt: skip


UNIVERSAL = ("--resume", "--universal_checkpoint", "--checkpoint_interval", 1000)


SHORT = [(1, "fp32", 20), (2, "bf16", 20), (3, "fp32", 20)]
LONG = [
    pytest.param((stage, dtype, 200), marks=pytest.mark.slow) for stage in (1, 2, 3) for dtype in ("fp32", "bf16")
]  # fmt: skip


@pytest.fixture(scope="module", params=[*SHORT, *LONG], ids=lambda p: f"zero{p[0]}-{p[1]}-{p[2]}")
def baseline(request, work):
    """20 or 200 steps on 4 ranks, with a ZeRO checkpoint in the middle, converted. Returns (name, options, steps)."""
    stage, dtype, steps = request.param
    name = f"zero{stage}_{dtype}_{steps}"
    common = options(stage, dtype, name, steps=steps)
    run(work, 4, "train.py", *common, "--run_name", name, "--checkpoint_interval", steps // 2)
    tag = work / name / f"global_step{steps // 2}"
    universal.convert(tag, tag.with_name(f"{tag.name}_universal"))
    return name, common, steps


def assert_identical(work, name, resumed, steps):
    for column, every in (("loss", 1), ("val_loss", 10), ("lr", 1), ("grad_norm", 1)):
        gaps = compare(work, name, resumed, column)
        assert list(gaps) == list(range(steps // 2 + every, steps + 1, every))
        assert set(gaps.values()) == {0.0}, (column, {s: g for s, g in gaps.items() if g})


def test_same_ranks_zero_checkpoint(work, baseline):
    """A ZeRO checkpoint on the ranks that wrote it: every step after it is the same, every bit."""
    name, common, steps = baseline
    resume = ("--resume", "--checkpoint_tag", f"global_step{steps // 2}", "--checkpoint_interval", 1000)
    run(work, 4, "train.py", *common, *resume, "--run_name", f"{name}_zero")
    assert_identical(work, name, f"{name}_zero", steps)


def test_same_ranks_universal_checkpoint(work, baseline):
    """The same through a universal checkpoint."""
    name, common, steps = baseline
    out = run(work, 4, "train.py", *common, *UNIVERSAL, "--run_name", f"{name}_uc4")
    assert_identical(work, name, f"{name}_uc4", steps)
    assert f"step {steps // 2}, weight decay 0.1, 0, loss scale 1" in out


def test_half_the_ranks(work, baseline):
    """On 2 ranks, with twice the accumulation steps: 1e-5 in fp32, 1e-2 in bf16."""
    name, common, steps = baseline
    out = run(work, 2, "train.py", *common, *UNIVERSAL, "--run_name", f"{name}_uc2")
    assert "24 = 6 per rank x 2 accumulation steps x 2 ranks" in out
    for column in ("loss", "val_loss"):
        gaps = compare(work, name, f"{name}_uc2", column)
        assert max(gaps) == steps
        assert max(gaps.values()) <= (1e-5 if "fp32" in name else 1e-2), max(gaps.values())


SLOWER = [pytest.param(*change, marks=pytest.mark.slow) for change in [(4, 1), (1, 4)]]


def from_another(work, name, before, after, saving, going):
    """Save on `before` ranks, go on on `after`; other steps than those would do. Returns the differences."""
    if not (work / name).exists():
        run(work, before, "train.py", *saving, "--run_name", name, "--checkpoint_interval", 4)
        universal.convert(work / name / "global_step4", work / name / "global_step4_universal")
    resumed = f"{name}_to_{after}_{going[going.index('--zero_stage') + 1]}"
    tag = ("--checkpoint_tag", "global_step4_universal")
    run(work, after, "train.py", *going, *UNIVERSAL, *tag, "--run_name", resumed)
    return compare(work, name, resumed)


@pytest.mark.parametrize("before, after", [(2, 4), (4, 3), (4, 8), *SLOWER])
def test_up_and_odd(work, before, after):
    """Any number of ranks to any other, dividing or not."""
    common = options(1, "fp32", f"from{before}", batch=24, micro=1, steps=10)
    gaps = from_another(work, f"from{before}", before, after, common, common)
    assert list(gaps) == list(range(5, 11)) and max(gaps.values()) <= 1e-5


@pytest.mark.parametrize("before, after", [(1, 3), (3, 1), (2, 3), pytest.param(1, 2, marks=pytest.mark.slow)])
def test_other_stage(work, before, after):
    """A universal checkpoint does not know the ZeRO stage it came from."""
    saving, going = (options(stage, "fp32", f"stage{before}", steps=10) for stage in (before, after))
    gaps = from_another(work, f"stage{before}", 4, 4, saving, going)
    assert len(gaps) == 6 and max(gaps.values()) <= 1e-5


@pytest.mark.parametrize("stage", [3, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 2))])
def test_offload(work, stage):
    """With the optimizer, at ZeRO-3 the parameters too, in CPU memory."""
    name = f"offload{stage}"
    common = (*options(stage, "fp32", name, steps=8), "--offload")
    run(work, 4, "train.py", *common, "--run_name", name, "--checkpoint_interval", 4)
    universal.convert(work / name / "global_step4", work / name / "global_step4_universal")
    for ranks, limit in ((4, 0.0), (2, 1e-5)):
        run(work, ranks, "train.py", *common, *UNIVERSAL, "--run_name", f"{name}_uc{ranks}")
        assert max(compare(work, name, f"{name}_uc{ranks}").values()) <= limit


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
    common = options(stage, "fp16", name, steps=30)
    run(work, 4, "train.py", *common, "--run_name", name, "--checkpoint_interval", 20, patch=fp16_on_cpu)
    universal.convert(work / name / "global_step20", work / name / "global_step20_universal")
    out = run(work, 4, "train.py", *common, *UNIVERSAL, "--run_name", f"{name}_uc", patch=fp16_on_cpu)
    scales = read_log(work, name, "loss_scale")["loss_scale"]
    assert f"loss scale {scales[20]:g}" in out and scales[20] < 2**24 and "optimizer at step 20" not in out
    assert len(set(scales.values())) > 3
    for column in ("loss", "loss_scale"):
        assert set(compare(work, name, f"{name}_uc", column).values()) == {0.0}


def test_log_goes_on_under_the_same_name(work):
    """A run resumed under its own name keeps its rows, does no step twice and leaves none out."""
    common = options(1, "fp32", "same_name", steps=20)
    run(work, 2, "train.py", *common, "--run_name", "same_name", "--checkpoint_interval", 8)
    before = read_log(work, "same_name")
    run(work, 2, "train.py", *common, "--run_name", "same_name", "--resume", "--checkpoint_tag", "global_step8")
    after = read_log(work, "same_name")
    assert list(after["loss"]) == list(range(1, 21)) and after == before


# -----------------------------------------------------------------------------
# each sequence exactly once


SLOW = [pytest.param(*other, marks=pytest.mark.slow) for other in [(1, 1), (1, 2), (1, 4), (3, 1), (3, 3), (3, 4)]]


@pytest.mark.parametrize("stage, ranks", [(1, 3), (3, 2), *SLOW])
def test_every_sequence_once(work, stage, ranks):
    """Over ranks and micro-batches, the model sees the global batch of the step: each row once, none twice."""

    def record():
        forward = model.GPT.forward

        def recorded(self, inputs, targets, **options):
            if self.training:
                rows = torch.cat([inputs, targets[:, -1:]], dim=1).tolist()
                with open(f"rows.{os.environ['RANK']}", "a") as file:
                    file.writelines(f"{row}\n" for row in rows)
            return forward(self, inputs, targets, **options)

        model.GPT.forward = recorded

    folder = work / f"rows{ranks}_{stage}"
    folder.mkdir()
    common = options(stage, "fp32", "unused", batch=24, micro=2, steps=3)
    run(folder, ranks, "train.py", *common, "--run_name", "rows", patch=record)
    seen = [Path(folder, f"rows.{rank}").read_text().splitlines() for rank in range(ranks)]
    train, _, _ = data.load_data(None, 16)
    for step in (1, 2, 3):
        inputs, targets = data.global_batch(train, 1337, step, 24, 16)
        wanted = [str(row) for row in torch.cat([inputs, targets[:, -1:]], dim=1).tolist()]
        share = 24 // ranks
        got = [row for rows in seen for row in rows[(step - 1) * share : step * share]]
        assert len(set(wanted)) == 24  # the step has 24 different sequences, so counting them means something
        assert sorted(got) == sorted(wanted)
    assert sum(len(rows) for rows in seen) == 3 * 24


def test_data_differ_at_every_step():
    train, _, _ = data.load_data(None, 16)
    steps = [data.global_batch(train, 1337, step, 24, 16)[0] for step in range(1, 50)]
    assert len({tuple(batch.flatten().tolist()) for batch in steps}) == 49


# -----------------------------------------------------------------------------
# negative controls: what the comparison above must catch, and does


@pytest.fixture(scope="module")
def short(work):
    common = options(1, "fp32", "short", steps=20)
    run(work, 4, "train.py", *common, "--run_name", "short", "--checkpoint_interval", 12)
    universal.convert(work / "short" / "global_step12", work / "short" / "global_step12_universal")
    run(work, 2, "train.py", *common, *UNIVERSAL, "--run_name", "short_right")
    assert max(compare(work, "short", "short_right").values()) <= 1e-5
    return common


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
def test_mistake_is_seen(work, short, mistake):
    name = f"short_{mistake.__name__}"
    run(work, 2, "train.py", *short, *UNIVERSAL, "--run_name", name, patch=mistake)
    assert max(compare(work, "short", name).values()) > 1e-4


def test_lost_moment_is_seen(work, short):
    """One exp_avg of 28 is zero: the loss of the first step is the same, the next ones are not."""
    shutil.copytree(work / "short", work / "short_broken")
    file = work / "short_broken" / "global_step12_universal" / "zero" / "blocks.0.up.weight" / "exp_avg.pt"
    content = torch.load(file)
    content["param"].zero_()
    torch.save(content, file)
    run(work, 2, "train.py", *short, "--checkpoint_dir", "short_broken", *UNIVERSAL, "--run_name", "short_no_moment")
    gaps = compare(work, "short", "short_no_moment")
    assert gaps[13] <= 1e-6 and max(gaps.values()) > 1e-4


def test_half_the_accumulation_is_seen(work, short):
    """2 ranks with the accumulation steps of 4 take half the batch. train.py refuses; made to go on, it is off."""
    shutil.copytree(work / "short", work / "short_half")
    for file in (work / "short_half" / "global_step12_universal").glob("*_model_states.pt"):
        state = torch.load(file)
        state["run"]["train_batch_size"] = 12
        torch.save(state, file)
    half = (*short, "--checkpoint_dir", "short_half", "--train_batch_size", 12)
    out = run(work, 2, "train.py", *half, *UNIVERSAL, "--run_name", "short_half")
    assert "12 = 6 per rank x 1 accumulation steps x 2 ranks" in out
    assert max(compare(work, "short", "short_half").values()) > 1e-4
