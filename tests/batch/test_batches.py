"""universal/batches.py: the global batch is the same on any number of ranks, and so is the loss;
what is computed again with a weight of 0 changes nothing else."""

import contextlib
import itertools
import json
import math
import re
from types import SimpleNamespace

import pytest
from repeats import CHECKS, KINDS, STEPS, play

from measure.machines import BATCH
from tests.support.helpers import run_all
from universal import batches
from universal.batches import Sampler, Share

# --------------------------------------------------------------------------------------------------
# shares


def shares(batch, micro_batch, ranks):
    return [Share(batch, micro_batch, ranks, rank) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", range(1, 15))
def test_each_micro_batch_has_its_weight_once(ranks):
    """As many places on every rank; what is computed again comes last, and never on rank 0."""
    for micro_batches in range(1, 13):
        of_ranks = shares(2 * micro_batches, 2, ranks)
        accumulation = math.ceil(micro_batches / ranks)
        assert {len(list(share)) for share in of_ranks} == {accumulation}
        numbers, weights = zip(*itertools.chain(*of_ranks), strict=True)
        assert list(numbers[:micro_batches]) == list(range(micro_batches))
        assert {*numbers[micro_batches:]} <= {*range(micro_batches)}
        repeats = accumulation * ranks - micro_batches
        weight = accumulation * ranks / micro_batches
        assert list(weights) == [weight] * micro_batches + [0.0] * repeats
        for share in of_ranks:
            assert share.weighted == sum(weight > 0 for _, weight in share)
            assert share.repeats == repeats
        assert of_ranks[0].weighted == accumulation


def test_what_a_start_prints():
    share = "batch 256: 4 micro-batches of 64 on 4 ranks, 1 accumulation step each"
    assert str(Share(256, 64, 4)) == share
    assert re.search(BATCH.format(r"\d+"), share)[1] == "4"  # as measure/ waits for it
    assert (
        str(Share(64, 64, 1)) == "batch 64: 1 micro-batch of 64 on 1 rank, 1 accumulation step each"
    )
    assert str(Share(256, 64, 3)).endswith(
        "on 3 ranks, 2 accumulation steps each; 2 of these 6 are repeats, with weight 0"
    )


def test_the_order_of_samples_is_a_contract():
    """Between runs, whatever Python and package they have: that of a digest."""
    order = [*itertools.islice(Sampler(8, Share(8, 4, 1)), 2)]
    assert order == [[1, 0, 6, 2], [4, 5, 3, 7]]
    assert batches.derive_seed(0, -1) != batches.derive_seed(0, -2)


@pytest.mark.parametrize("batch, micro_batch, fitting", [(10, 4, 2), (3, 4, 3), (0, 4, 1)])
def test_a_batch_that_is_no_multiple(batch, micro_batch, fitting):
    words = f"a batch of {batch} does not divide into .* of {micro_batch}, .* of {fitting}$"
    with pytest.raises(ValueError, match=words):
        Share(batch, micro_batch, 2)


def test_config(monkeypatch):
    expected = {
        "train_batch_size": None,
        "train_micro_batch_size_per_gpu": 64,
        "gradient_accumulation_steps": 2,
        "universal_train_batch_size": 256,
    }
    assert batches.config(256, 64, ranks=3) == expected
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert batches.config(256, 64) == expected
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(ValueError, match="WORLD_SIZE is not set: start a launcher, or name"):
        batches.config(256, 64)


# --------------------------------------------------------------------------------------------------
# a DataLoader's samples


def steps_of(samples, batch, ranks, steps, begin=1, **options):
    """The samples of each step that have a weight, over all ranks."""
    streams = []
    for share in shares(batch, 2, ranks):
        sampler = Sampler(samples, share, **options)
        sampler.set_step(begin)
        streams.append((share, iter(sampler)))
    drawn = []
    for _ in range(steps):
        places = [(next(stream), weight) for share, stream in streams for _, weight in share]
        assert {len(indices) for indices, _ in places} == {2}
        drawn.append([index for indices, weight in places if weight for index in indices])
    return drawn


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
def test_each_sample_once_an_epoch(shuffle, drop_last):
    """In one order on any number of ranks, and from any step on. 23 samples, 8 a step."""
    options = {"shuffle": shuffle, "drop_last": drop_last, "seed": 5}
    steps = steps_of(23, 8, 1, 12, **options)
    for ranks in (2, 3, 4, 5, 7):
        assert steps_of(23, 8, ranks, 12, **options) == steps
        assert steps_of(23, 8, ranks, 4, begin=9, **options) == steps[8:]
    stream = list(itertools.chain(*steps))
    length = 16 if drop_last else 23
    epochs = [stream[begin : begin + length] for begin in range(0, 96 - length, length)]
    for epoch in epochs:
        assert len(set(epoch)) == length and set(epoch) <= set(range(23))
    assert (epochs[0] != epochs[1]) == shuffle
    if not shuffle:
        assert epochs[0] == list(range(length))
    assert (steps_of(23, 8, 1, 12, **options | {"seed": 6}) != steps) == shuffle


def test_too_few_samples():
    with pytest.raises(ValueError, match="7 samples do not fill a batch of 8"):
        Sampler(7, Share(8, 2, 3))
    assert next(iter(Sampler(7, Share(8, 2, 3), drop_last=False, shuffle=False))) == [0, 1]


# --------------------------------------------------------------------------------------------------
# engines


@pytest.fixture(scope="module")
def failures(work):
    """{(name, ranks): error}"""
    checks = [check.__name__ for check in CHECKS]
    return {
        (name, ranks): error
        for ranks, names in ((2, KINDS), (3, [*KINDS, *checks]))
        for name, error in run_all(work, ranks, play, names=[*names]).items()
    }


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_check(failures, check):
    assert not failures.get((check, 3)), failures[check, 3]


def test_stages_of_a_pipeline():
    """Those between draw no samples. The others see no backward pass: their config counts."""
    share = Share(18, 2, 2)  # of 9 micro-batches one is computed again
    stage = SimpleNamespace(is_first_stage=lambda: False, is_last_stage=lambda: False)
    batches.check_batch(stage, share, batches.Ledger(), 0)
    stage.is_last_stage = lambda: True
    ledger = batches.Ledger(dealt=share.key)
    for steps, right in ((5, True), (4, False)):
        stage.gradient_accumulation_steps = lambda steps=steps: steps
        with contextlib.nullcontext() if right else pytest.raises(ValueError, match="trains 16"):
            batches.check_batch(stage, share, ledger, 0)


@pytest.mark.parametrize(
    "change, factor",
    [({}, 1 / 3), ({"prescale_gradients": True}, 1), ({"zero_optimization": True}, 1)],
)
def test_what_the_gradient_is_of_the_mean(change, factor):
    """At ZeRO-3 without reduce_scatter DeepSpeed divides twice, but where it prescales."""
    config = {"gradient_predivide_factor": 3, "zero_optimization": {"stage": 3}}
    config["zero_optimization"]["reduce_scatter"] = False
    assert batches.gradient_factor(config | change, 3)[0] == factor


class Pair:
    """What rank 0 has seen on 2 ranks, which divide the micro-batches, and on 3, which do not."""

    def __init__(self, work, failures, name):
        for ranks in (2, 3):
            assert not failures.get((name, ranks)), failures[name, ranks]
        self.even, self.uneven = (
            SimpleNamespace(**json.loads((work / name / f"{ranks}.0.json").read_text()))
            for ranks in (2, 3)
        )

    def gap(self, what, steps=range(STEPS)):
        """The largest difference of losses or norms, as a share of the value."""
        values = zip(getattr(self.even, what), getattr(self.uneven, what), strict=True)
        return max(abs(a - b) / (a or 1) for i, (a, b) in enumerate(values) if i in steps)


@pytest.fixture
def pair(work, failures):
    return lambda name: Pair(work, failures, name)


INFINITE = [name for name in KINDS if name.startswith("infinite")]
SAME = [name for name in KINDS if name not in (*INFINITE, "only_zeros")]


def rounding(name):
    return 1e-3 if "fp16" in name else 1e-6


@pytest.mark.parametrize("name", SAME)
def test_the_loss_is_the_same(pair, name):
    """And so are gradient norms, numbers of samples, and what rank 0 has in its buffers, which is
    what ZeRO-1 and 2 save: its micro-batches are the same on both, and none is a repeat."""
    both = pair(name)
    assert both.gap("losses") < rounding(name) and both.gap("norms") < rounding(name)
    assert both.even.samples == both.uneven.samples == STEPS * KINDS[name].micro_batches * 3
    for buffer, values in both.even.buffers.items():
        assert both.uneven.buffers[buffer] == pytest.approx(values, abs=1e-6)


def test_wrong_weights_are_seen(pair):
    """The control: the mean over 6 losses, not 4, which clipping and Adam hide from the loss."""
    assert pair("only_zeros").gap("norms") == pytest.approx(1 / 3, rel=1e-3)


@pytest.mark.parametrize("name", INFINITE)
def test_an_infinite_loss(pair, name):
    """0 times infinity is not a number, which the printed mean shows. DeepSpeed skips the step as
    it would have done."""
    both = pair(name)
    assert both.even.losses[2] == math.inf and math.isnan(both.uneven.losses[2])
    assert both.even.skipped == both.uneven.skipped == 1
    assert both.gap("losses", steps=(0, 1, 3)) < rounding(name)
