"""--exact: the same bits at any number of ranks and any ZeRO stage. 24 sequences a step in 4
micro-batches, which most numbers of ranks do not divide, and some exceed."""

import math
from types import SimpleNamespace

import pytest
import torch

from measure.logs import COLUMNS, compare
from tests.support.commands import slow
from tests.support.ranks import ends_after, run
from universal import exact
from universal.batches import Share

COMMON = (
    "--n_layer 1 --n_head 2 --n_embd 36 --seq_len 16 --train_batch_size 24 "
    "--train_micro_batch_size_per_gpu 6 --steps 10 --warmup_steps 3 --eval_interval 2 "
    "--checkpoint_interval 2"
).split()


def train(work, ranks, name, *flags, patch=None):
    names = ("--run_name", name, "--checkpoint_dir", name)
    run(work, ranks, "examples.train_elastic", *COMMON, *flags, *names, patch=patch)


def differences(work, name, last=10):
    assert len(compare(work, "exact_1", name)) == last
    return {gap for column in COLUMNS for gap in compare(work, "exact_1", name, column).values()}


@pytest.fixture(scope="module")
def one_rank(work):
    train(work, 1, "exact_1", "--exact")


@pytest.mark.slow
def test_without_it_the_bits_differ(work):
    """The control: what --exact takes away is there."""
    for ranks in (1, 4):
        train(work, ranks, f"inexact_{ranks}")
    assert 0 < max(compare(work, "inexact_1", "inexact_4").values()) < 1e-5


def gradients(micro_batches):
    torch.manual_seed(0)
    drawn = torch.randn(micro_batches, 999) * torch.logspace(-6, 3, 999)
    # All of them just below a power of two.
    drawn[:, 300:600] = 1.9 + 0.09 * torch.rand(micro_batches, 300)
    return drawn


def sums(monkeypatch, micro_batches, ranks, orders=1):
    """The sum of a parameter's rounded gradients over micro_batches, dealt out to ranks in many
    orders: to all of them as many, some with a weight of 0."""
    drawn = gradients(micro_batches)
    largest = (drawn / micro_batches).abs().amax(0)

    def all_reduce(peak, op):
        torch.maximum(peak, largest, out=peak)

    monkeypatch.setattr(exact.dist, "get_world_size", lambda: ranks)
    monkeypatch.setattr(exact.dist, "all_reduce", all_reduce)
    places = [
        place for rank in range(ranks) for place in Share(micro_batches, 1, ranks, rank, True)
    ]
    for _ in range(orders):
        shares = torch.randperm(len(places)).view(ranks, -1)
        reduced = torch.zeros(999)
        for share in shares:
            parameter = torch.zeros(999, requires_grad=True)
            rounded = exact.round_gradients({"a": parameter}, micro_batches, len(share))
            for m, weight in [places[place] for place in share]:
                parameter.backward(drawn[m] * weight)
            reduced += rounded["a"].total
        yield reduced


@pytest.mark.parametrize("number", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite(monkeypatch, number):
    monkeypatch.setattr(exact.dist, "all_reduce", lambda peak, op: None)
    parameter = torch.zeros(3, requires_grad=True)
    exact.round_gradients({"a": parameter}, micro_batches=1, accumulation=1)
    with pytest.raises(AssertionError, match="exact.py: a gradient is not finite"):
        parameter.backward(torch.tensor([1.0, number, 1.0]))


def test_the_norm_is_rounded_once(monkeypatch):
    monkeypatch.setattr(exact.dist, "all_reduce", lambda gradient: None)
    gradient = gradients(1)[0]
    norm = exact.add_up([SimpleNamespace(total=gradient)])
    assert norm == math.sqrt(sum(number**2 for number in gradient.tolist()))


SLOW = [slow(micro_batches, 10) for micro_batches in (1, 2, 3, 12, 60)]


@pytest.mark.parametrize("micro_batches, orders", [(8, 1), (7, 1), *SLOW])
def test_any_order_of_additions(monkeypatch, micro_batches, orders):
    """On up to twice as many ranks. And the rounding is small: a mean of 8 is off by at most 2^-21
    of the largest gradient of this element, one of 16 by 2^-20."""
    results = []
    for ranks in range(1, 2 * micro_batches + 1):
        results += sums(monkeypatch, micro_batches, ranks, orders)
    assert all(torch.equal(result, results[0]) for result in results)
    drawn = gradients(micro_batches)
    error = (results[0] - drawn.double().mean(0)).abs()
    # Each of the micro_batches shares, of at most 2 / micro_batches of the next power of two above
    # the largest gradient, is rounded to half a grid; 2^-24 more is that of the division.
    power = 2.0 ** max(2, math.ceil(math.log2(micro_batches)))
    assert (error <= 2.0**-24 * (power + 1) * drawn.abs().amax(0)).all()


def divide_as_cuda():
    """A patch: a tensor is divided by a number as CUDA does it, by the reciprocal in float32; for
    four steps."""
    ends_after(4)()
    torch.Tensor.div_ = lambda tensor, number: tensor.mul_(1 / torch.tensor(float(number)))


def step_by_means():
    """A patch: also, ZeRO steps by its own means."""
    divide_as_cuda()
    clip_by = exact.clip_by
    exact.clip_by = lambda engine, norm, fill: clip_by(engine, norm, lambda: None)


@pytest.mark.parametrize("stage", [slow(1), slow(2), 3])
def test_division_on_cuda(work, one_rank, stage):
    """It is not exact for 7 ranks, and that does not matter."""
    train(work, 7, f"cuda_{stage}", "--exact", "--zero_stage", stage, patch=divide_as_cuda)
    assert differences(work, f"cuda_{stage}", last=4) == {0.0}


@pytest.mark.slow
def test_means_on_cuda(work, one_rank):
    """The control: otherwise it would matter."""
    train(work, 7, "means", "--exact", patch=step_by_means)
    assert 0 < max(compare(work, "exact_1", "means").values()) < 1e-5


SCRIPT = """
import deepspeed, torch
from universal import exact
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
for stage, linear, dtype, words in cases:
    net = torch.nn.Linear(8, 8, bias=False)
    config = {"train_batch_size": 1, "bf16": {"enabled": dtype == "bf16"},
              "zero_optimization": {"stage": stage, "memory_efficient_linear": linear},
              "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
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
    """exact.py alone, on an engine that is not train.py's; and what it cannot make exact it
    refuses."""
    (tmp_path / "own.py").write_text(f"cases = {CASES}\n{SCRIPT}")
    run(tmp_path, 1, tmp_path / "own.py")
