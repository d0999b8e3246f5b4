"""--exact: the same bits at any number of ranks and any ZeRO stage. 24 sequences a step, 8 or 12 micro-batches."""

import math
from types import SimpleNamespace

import pytest
import torch

import universal
from harness.ranks import compare, ends_after, launch, run
from universal import exact

SHAPE = ("--n_layer", 1, "--n_head", 2, "--n_embd", 36, "--seq_len", 16)
COMMON = (*SHAPE, "--train_batch_size", 24, "--train_micro_batch_size_per_gpu", 3, "--steps", 8, "--warmup_steps", 3)
COMMON += ("--eval_interval", 2, "--checkpoint_interval", 2)
COLUMNS = ("loss", "val_loss", "grad_norm")


def differences(work, baseline, run_name):
    return {gap for column in COLUMNS for gap in compare(work, baseline, run_name, column).values()}


@pytest.fixture(scope="module")
def one_rank(work):
    run(work, 1, "train_elastic.py", *COMMON, "--exact", "--run_name", "exact_1", "--checkpoint_dir", "exact_1")


@pytest.mark.parametrize("stage", [3, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 2))])
def test_chain(work, one_rank, stage):
    """From 4 ranks to 2 to 8 to 1, every 2 steps, the last time by a conversion; with clipping and dropout, in
    partitions of odd sizes."""
    name = f"exact_chain{stage}"
    common = (*COMMON, "--exact", "--zero_stage", stage, "--run_name", name, "--checkpoint_dir", name)
    converted = ("--resume", "--universal_checkpoint")
    for last, ranks, resume in ((2, 4, ()), (4, 2, ["--resume"]), (6, 8, ["--resume"]), (8, 1, converted)):
        if resume is converted:
            universal.convert(work / name / "global_step6", work / name / "global_step6_universal")
        run(work, ranks, "train_elastic.py", *common, *resume, patch=ends_after(last))
    assert len(compare(work, "exact_1", name)) == 8
    assert differences(work, "exact_1", name) == {0.0}


@pytest.mark.parametrize(("ranks", "stage"), [(4, 2), pytest.param(8, 3, marks=pytest.mark.slow)])
def test_from_scratch(work, one_rank, ranks, stage):
    name = f"exact_{ranks}_{stage}"
    common = ("--exact", "--zero_stage", stage, "--run_name", name, "--checkpoint_dir", name)
    run(work, ranks, "train_elastic.py", *COMMON, *common)
    assert differences(work, "exact_1", name) == {0.0}


def test_ranks_that_are_no_power_of_two(work):
    twelve = (*COMMON, "--exact", "--train_micro_batch_size_per_gpu", 2, "--checkpoint_interval", 99)
    for ranks in (1, 3):
        run(work, ranks, "train_elastic.py", *twelve, "--zero_stage", ranks, "--run_name", f"exact_12_{ranks}")
    assert differences(work, "exact_12_1", "exact_12_3") == {0.0}


def test_without_it_the_bits_differ(work):
    """The control: what --exact takes away is there."""
    for ranks in (1, 4):
        run(work, ranks, "train_elastic.py", *COMMON, "--checkpoint_interval", 99, "--run_name", f"inexact_{ranks}")
    gaps = compare(work, "inexact_1", "inexact_4")
    assert 0 < max(gaps.values()) < 1e-5


def test_a_gradient_that_is_not_finite_stops_the_run(work):
    def patch():
        import model

        forward = model.GPT.forward

        def infinite(self, inputs, targets, key=None, **options):
            return forward(self, inputs, targets, key, **options) * (math.inf if key and key[1:] == (6, 5) else 1)

        model.GPT.forward = infinite

    result = launch(work, 2, "train_elastic.py", *COMMON, "--exact", "--run_name", "infinite", patch=patch)
    assert result.code == 1 and "exact.py: a gradient is not finite" in result.errors
    assert (work / "logs" / "infinite.csv").read_text().count("\n") == 1 + 5  # five steps were whole


def sums(monkeypatch, micro_batches, ranks, orders=10):
    """The sum of a parameter's rounded gradients over micro_batches as ZeRO takes it, dealt out to ranks in many
    orders."""
    torch.manual_seed(0)
    gradients = torch.randn(micro_batches, 999) * torch.logspace(-6, 3, 999)
    gradients[:, 300:600] = 1.9 + 0.09 * torch.rand(micro_batches, 300)  # all of them just below a power of two
    largest = (gradients / micro_batches).abs().amax(0)
    monkeypatch.setattr(exact.dist, "get_world_size", lambda: ranks)
    monkeypatch.setattr(exact.dist, "all_reduce", lambda peak, op: torch.maximum(peak, largest, out=peak))
    for _ in range(orders):
        shares = torch.randperm(micro_batches).view(ranks, -1)
        reduced = torch.zeros(999)
        for share in shares[torch.randperm(ranks)]:
            parameter = torch.zeros(999, requires_grad=True)
            exact.round_gradients([parameter], micro_batches, len(share))
            for m in share:
                parameter.backward(gradients[m])
            reduced += parameter.grad.div_(ranks)
        yield reduced


SLOW = [pytest.param(number, 10, marks=pytest.mark.slow) for number in (1, 2, 3, 6, 8, 10, 12, 20, 40, 60)]


@pytest.mark.parametrize("micro_batches, orders", [(3, 2), (8, 2), (12, 2), *SLOW])
def test_any_order_of_additions(monkeypatch, micro_batches, orders):
    results = []
    for ranks in (n for n in range(1, micro_batches + 1) if micro_batches % n == 0):
        results += sums(monkeypatch, micro_batches, ranks, orders)
    assert all(torch.equal(result, results[0]) for result in results)


def test_the_rounding_is_small(monkeypatch):
    """A sum of 8 is off by at most 8 x half a grid: 2^-20 of the largest gradient of this element."""
    torch.manual_seed(0)
    gradients = torch.randn(8, 999) * torch.logspace(-6, 3, 999)
    monkeypatch.setattr(exact.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(exact.dist, "all_reduce", lambda peak, op: None)
    parameter = torch.zeros(999, requires_grad=True)
    exact.round_gradients([parameter], 8, 8)
    for gradient in gradients:
        parameter.backward(gradient)
    off = (parameter.grad - gradients.double().mean(0)).abs()
    assert (off <= 2.0**-20 * gradients.abs().amax(0)).all()


def test_another_grid_on_every_rank_is_seen(monkeypatch):
    """The control: ranks that do not tell each other their largest gradients round to grids of their own."""
    with monkeypatch.context() as patch:
        patch.setattr(torch, "maximum", lambda peak, largest, out: None)
        results = [*sums(patch, 8, 1), *sums(patch, 8, 4)]
    assert not all(torch.equal(result, results[0]) for result in results)


def test_a_grid_that_is_too_fine_is_seen(monkeypatch):
    """The check before the rounding: a limit below the largest gradient could let a sum pass 24 bits."""
    frexp = torch.frexp
    monkeypatch.setattr(torch, "frexp", lambda x: SimpleNamespace(mantissa=4 * frexp(x).mantissa))
    with pytest.raises(AssertionError, match="its sum may pass 24 bits"):
        next(sums(monkeypatch, 8, 2))


SCRIPT = """
import deepspeed, torch
from universal import exact
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
for stage, linear, dtype, words in cases:
    net = torch.nn.Linear(8, 8, bias=False)
    config = {"train_batch_size": 1, "zero_optimization": {"stage": stage, "memory_efficient_linear": linear},
              "bf16": {"enabled": dtype == "bf16"}, "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
    try:
        exact.install(engine)
    except ValueError as error:
        assert words and words in str(error), error
        continue
    loss = engine(torch.ones(1, 8)).sum()
    assert not words and torch.equal(engine.backward(loss), loss)
    engine.step()
    assert engine.get_global_grad_norm() == 8.0, engine.get_global_grad_norm()
"""
CASES = [
    (1, True, "fp32", ""),
    (3, False, "fp32", ""),
    (3, True, "fp32", 'exact.py needs "memory_efficient_linear": False'),
    (2, True, "bf16", "the sums of other types have too few bits"),
    (0, True, "fp32", "exact.py needs ZeRO 1, 2 or 3"),
]


def test_in_a_script_of_ones_own(tmp_path):
    """exact.py alone, on an engine that is not train.py's; and what it cannot make exact it refuses."""
    (tmp_path / "own.py").write_text(f"cases = {CASES}\n{SCRIPT}")
    run(tmp_path, 1, tmp_path / "own.py")
