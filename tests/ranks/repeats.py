"""Engines whose ranks do not divide the micro-batches, and engines whose ranks do: play(NAME...)
trains those of KINDS, and each rank writes what came of it to <name>/<ranks>.<rank>.json; or it
makes one of CHECKS, which assert what they see.
"""

import contextlib
import io
import itertools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.utils import groups
from torch import nn

import universal
from tests.support.helpers import fp16_is
from tests.support.toy import begin, in_turn, make
from universal import batches, exact, guesses, trainer
from universal.errors import CheckpointError
from universal.load.overrides import overridden

MICRO = 3
STEPS = 4
WIDTH = 6


# --------------------------------------------------------------------------------------------------
# 1. models


class Net(nn.Module):
    """norm: makes a layer of a width."""

    def __init__(self, norm=nn.LayerNorm):
        super().__init__()
        # No bias: its gradient behind a BatchNorm is rounding, of which Adam makes whole steps.
        self.inputs = nn.Linear(WIDTH, 9, bias=False)
        self.norm = norm(9)
        self.outputs = nn.Linear(9, 1)

    def forward(self, x):
        return (self.outputs(self.norm(self.inputs(x)).tanh()) - 1).float().pow(2).mean()


class Infinite(Net):
    """The loss of micro-batch 0 of the third step is infinite."""

    def forward(self, x):
        is_marked = torch.equal(x, samples(3, 0).to(x.dtype))
        return super().forward(x) * (math.inf if is_marked else 1)


# --------------------------------------------------------------------------------------------------
# 2. ways to train a micro-batch


def usual(engine, loss):
    engine.backward(loss)
    engine.step()


class Kind(NamedTuple):
    """micro_batches: of a step; with 4, rank 2 of 3 has repeats alone. config: more of DeepSpeed's.
    weigh: the weight that is used, of the true one."""

    net: Callable = Net
    stage: int = 1
    config: dict[str, Any] = {}
    micro_batches: int = 8
    weigh: Callable = lambda weight: weight


FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}
KINDS = {
    "stage_0": Kind(stage=0),
    "stage_1": Kind(),
    "stage_3": Kind(stage=3),
    "fp16": Kind(stage=2, config=FP16),
    "batch_norm": Kind(lambda: Net(nn.BatchNorm1d), micro_batches=4),
    "infinite": Kind(Infinite),
    "infinite_fp16": Kind(Infinite, stage=2, config=FP16),
    "only_zeros": Kind(micro_batches=4, weigh=lambda weight: float(weight > 0)),
}


# --------------------------------------------------------------------------------------------------
# 3. training


def samples(step, m):
    """[MICRO, WIDTH]"""
    return torch.randn(MICRO, WIDTH, generator=torch.Generator().manual_seed(100 * step + m))


def engine_of(kind):
    config = batches.config(kind.micro_batches * MICRO, MICRO) | kind.config
    return make(kind.stage, kind.net, batch=None, clip=0.5, **config)


def train_step(engine, kind, step):
    """Its loss: the mean over its micro-batches."""
    total = torch.zeros(2, dtype=torch.float64)
    dtype = next(engine.module.parameters()).dtype
    share = batches.share(engine)
    for m, weight in share:
        loss = engine(samples(step, m).to(dtype))
        usual(engine, kind.weigh(weight) * loss)
        total += torch.tensor([weight * loss.item(), weight])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def train(kind):
    engine = engine_of(kind)
    steps = []
    for step in range(1, STEPS + 1):
        loss = train_step(engine, kind, step)
        steps.append((loss, float(engine.get_global_grad_norm() or 0)))
    result = {
        "losses": [loss for loss, _ in steps],
        "norms": [norm for _, norm in steps],
        "buffers": {name: buffer.tolist() for name, buffer in engine.module.named_buffers()},
        "samples": engine.global_samples,
        "skipped": engine.skipped_steps,
    }
    Path(f"{dist.get_world_size()}.{dist.get_rank()}.json").write_text(json.dumps(result))


# --------------------------------------------------------------------------------------------------
# 4. what DeepSpeed counts by the batch: 8 micro-batches of 3 samples, on 3 ranks


def counters():
    engine = engine_of(KINDS["stage_1"])
    assert (engine.train_batch_size(), engine.tput_timer.batch_size) == (27, 27)
    share = batches.share(engine)
    assert (engine.train_batch_size(), engine.tput_timer.batch_size) == (24, 24)
    assert batches.share(engine) == share
    train_step(engine, KINDS["stage_1"], 1)
    assert engine.global_samples == 24
    engine.save_checkpoint(".", tag="t")
    saved = torch.load("t/mp_rank_00_model_states.pt", weights_only=False)
    assert saved["ds_config"][batches.TRUE_BATCH] == saved["global_samples"] == 24
    assert saved["ds_config"]["train_batch_size"] is None


def other_accumulation():
    engine = engine_of(Kind(config={"gradient_accumulation_steps": 4}))
    with pytest.raises(ValueError, match="need 3 accumulation steps, and the config says 4"):
        batches.share(engine)


def training_data():
    """DeepSpeed's own loader would draw 27 samples a step."""
    engine = engine_of(Kind())
    engine.training_data = range(99)
    with pytest.raises(ValueError, match="give a DataLoader a batches.Sampler"):
        batches.share(engine)


def random_ltd():
    """Its count of tokens is that of the true batch: 24 x (2 of 3 layers x 4 + 1 x 8)."""
    schedule = {"min_value": 4, "max_value": 8, "schedule_type": "fixed_linear"}
    schedule["schedule_config"] = {"require_steps": 100, "seq_per_step": 4}
    options = {"enabled": True, "total_layer_num": 3, "random_ltd_layer_num": 2}
    options |= {"random_ltd_layer_id": [0, 1], "random_ltd_schedule": schedule}
    routing = {"enabled": True, "random_ltd": options}
    efficiency = {"enabled": True, "seed": 1, "data_routing": routing}
    kind = Kind(config={"data_efficiency": efficiency})
    engine = engine_of(kind)
    train_step(engine, kind, 1)
    assert engine.random_ltd_scheduler.state["consumed_layer_tokens"] == 24 * (2 * 4 + 1 * 8)


# --------------------------------------------------------------------------------------------------
# 5. the batch that is named is the batch that is trained, or no step is made: 24 of 27 samples


def named(micro_batches=8, ranks=None, net=Net, **options):
    """An engine of which no loop deals the batch yet."""
    config = batches.config(micro_batches * MICRO, MICRO, ranks)
    return make(1, net, batch=None, **config | options)


def old_loop(engine):
    for place in range(engine.gradient_accumulation_steps()):
        usual(engine, engine(samples(1, 3 * place + dist.get_rank())))


def new_loop(engine, *sharers):
    for m, weight in batches.share(engine, *sharers):
        usual(engine, weight * engine(samples(1, m)))


def is_trained(engine, loop=old_loop):
    steps, counted = engine.global_steps, engine.global_samples
    loop(engine)
    assert engine.global_steps == steps + 1
    if batches.TRUE_BATCH in engine._config._param_dict:
        assert engine.global_samples == counted + batches.named_share(engine).batch


def is_stopped(engine, batch, trained, loop=old_loop):
    steps = engine.global_steps
    before = [parameter.detach().clone() for parameter in engine.module.parameters()]
    words = f"the config names a batch of {batch}, and this step trains {trained} samples, "
    cure = f"To keep {batch}:\n  in a loop of your own, `config |= batches.config({batch}, "
    with pytest.raises(ValueError, match=f"{words}.*{re.escape(cure)}"):
        loop(engine)
    assert all(map(torch.equal, engine.module.parameters(), before))
    assert engine.global_steps == steps


def loop_that_was_left():
    is_stopped(named(), 24, 27)
    is_trained(named(), new_loop)
    is_trained(named(9))
    is_trained(make(1, Net, batch=27, micro=3))  # names none: DeepSpeed's is a product
    unnamed = make(1, Net, batch=None, micro=3, gradient_accumulation_steps=2)
    unnamed._config.gradient_accumulation_steps = 3
    is_trained(unnamed)


def batch_of_trainers():
    """It is nothing to another engine, which says so, once."""
    batches.install()
    printed = io.StringIO()
    with pytest.MonkeyPatch().context() as patched, contextlib.redirect_stdout(printed):
        patched.setenv("UNIVERSAL_BATCH", "24")
        engine = make(1, Net, batch=27, micro=3)
        is_trained(engine)
        is_trained(engine)
        patched.setenv("UNIVERSAL_BATCH", "36")
        is_trained(make(1, Net, batch=36, micro=3))
    assert "UNIVERSAL_BATCH=36" not in printed.getvalue()
    line = "under `python -m universal`): this step"
    assert printed.getvalue().count(f"{line} trains 27 samples") == (dist.get_rank() == 0)


def changed_after_initialize():
    for dealt in (False, True):
        engine = named(9)
        if dealt:
            is_trained(engine, new_loop)
        engine._config.gradient_accumulation_steps = 2
        # DeepSpeed counts the three micro-batches before, too.
        is_stopped(engine, 27, 9 if dealt else 18)
    engine = named(9)
    engine.set_train_micro_batch_size(1)
    is_stopped(engine, 27, 9)


def another_batch_by_name():
    """set_train_batch_size() names it: share() deals it, and the save tells it."""
    config = batches.config(27, MICRO)
    engines = [make(1, Net, batch=None, **config), make(1, Net, batch=27, micro=3)]
    for engine in engines:
        written = engine._config._param_dict  # another engine's, too, perhaps
        engine.set_train_batch_size(18)
        assert 27 in written.values()
        is_trained(engine)
        is_trained(engine, new_loop)
        engine.save_checkpoint(".", tag="t")
        saved = torch.load("t/mp_rank_00_model_states.pt", weights_only=False)["ds_config"]
        assert 18 in (saved["train_batch_size"], saved.get(batches.TRUE_BATCH))
        assert saved["gradient_accumulation_steps"] == 2 and 27 not in saved.values()


def two_engines():
    """What one deals out is nothing to the other."""
    is_trained(named(), new_loop)
    is_stopped(named(), 24, 27)
    is_stopped(named(7), 21, 27)


def said_and_not_dealt():
    """A line of a log deals out nothing; a list of it, here on one rank, may be thrown away."""
    engine = named()
    assert str(batches.share(engine)).startswith("batch 24: 8 micro-batches of 3 on ")
    is_stopped(engine, 24, 27)
    engine = named()
    if dist.get_rank() == 0:
        assert len([*batches.share(engine)]) == 3
    is_stopped(engine, 24, 27)
    engine = make(1, Net, batch=27, micro=3)  # of no name: one rank alone asks nobody
    if dist.get_rank() == 0:
        assert len([*batches.share(engine)]) == 3
    is_trained(engine)


def no_weights():
    def two_losses(engine, loss):
        with engine.no_sync():
            engine.backward(loss, retain_graph=True)
        usual(engine, 0 * loss)

    for train_it in (usual, two_losses):
        engine = named()
        with pytest.raises(ValueError, match="again, with weight 0, and 9 of 9 losses are not 0"):
            for m, _ in batches.share(engine):
                train_it(engine, engine(samples(1, m)))
        assert engine.global_steps == 0


def at_the_end(engine, backward):
    """step() is called once."""
    *rest, last = batches.share(engine)
    for m, weight in rest:
        backward(weight * engine(samples(1, m)))
    return last[1] * engine(samples(1, last[0]))


def boundary(engine):
    engine.set_gradient_accumulation_boundary(False)
    loss = at_the_end(engine, engine.backward)
    engine.set_gradient_accumulation_boundary(True)
    usual(engine, loss)


def forwards_first(engine):
    engine.set_gradient_accumulation_boundary(False)
    *losses, last = [weight * engine(samples(1, m)) for m, weight in batches.share(engine)]
    for loss in losses:
        engine.backward(loss)
    engine.set_gradient_accumulation_boundary(True)
    usual(engine, last)


def boundary_too_early(engine):
    engine.set_gradient_accumulation_boundary(True)
    m, weight = next(iter(batches.share(engine)))
    usual(engine, weight * engine(samples(1, m)))


def without_the_last(engine):
    engine.set_gradient_accumulation_boundary(False)
    (m, weight), (n, other), _ = batches.share(engine)
    engine.backward(weight * engine(samples(1, m)))
    engine.set_gradient_accumulation_boundary(True)
    usual(engine, other * engine(samples(1, n)))


def unmanaged(engine):
    engine.backward(at_the_end(engine, engine.backward))
    engine.step()


def unmanaged_without_sync(engine):
    """It is the step that adds up, and not the last backward pass."""
    with engine.no_sync():
        engine.backward(at_the_end(engine, engine.backward))
    engine.step()


def by_torch_too_early(engine):
    engine.set_gradient_accumulation_boundary(True)
    m, weight = next(iter(batches.share(engine)))
    (weight * engine(samples(1, m))).backward()
    engine.step()


def without_sync(engine):
    engine.set_gradient_accumulation_boundary(False)
    with engine.no_sync():
        loss = at_the_end(engine, engine.backward)
    engine.set_gradient_accumulation_boundary(True)
    usual(engine, loss)


def never_synced(engine):
    engine.set_gradient_accumulation_boundary(True)
    with engine.no_sync():
        engine.backward(at_the_end(engine, engine.backward))
    engine.step()


def synced_without_boundary(engine):
    """step() waits for as many calls of its own: three batches become one."""
    for _ in range(3):
        with engine.no_sync():
            loss = at_the_end(engine, engine.backward)
        usual(engine, loss)


def coalesced(engine):
    with engine.coalesce_grad_reduction():
        engine.backward(at_the_end(engine, engine.backward))
    engine.set_gradient_accumulation_boundary(True)
    engine.step()


def by_torch(engine):
    for m, weight in batches.share(engine):
        (weight * engine(samples(1, m))).backward()
        engine.step()


def scaled(engine):
    for m, weight in batches.share(engine):
        engine.scale(weight * engine(samples(1, m))).backward()
        engine.step()


def two_losses(engine):
    for m, weight in batches.share(engine):
        loss = weight * engine(samples(1, m))
        with engine.no_sync():
            engine.backward(loss * 0.5, retain_graph=True)
        usual(engine, loss * 0.5)


def listed_once(engine):
    """As Lightning's example does."""
    pairs = [*batches.share(engine)]
    for m, weight in pairs:
        usual(engine, weight * engine(samples(1, m)))
    for m, _ in batches.share(engine):  # an evaluation
        engine(samples(1, m))


UNMANAGED = {"managed_gradient_accumulation": False}
RIGHT = (boundary, without_sync, coalesced, by_torch, scaled, two_losses, listed_once)
RIGHT += (forwards_first,)


def ways_to_step():
    """Each makes the step that the usual loop makes, and counts 24 samples."""

    def weights(loop, **options):
        engine = named(**options)
        is_trained(engine, loop)
        return torch.cat([parameter.detach().flatten() for parameter in engine.parameters()])

    usual_weights = weights(new_loop)
    for loop, options in [
        *((loop, {}) for loop in RIGHT),
        (unmanaged, UNMANAGED),
        (unmanaged_without_sync, UNMANAGED),
    ]:
        gap = (weights(loop, **options) - usual_weights).abs().max()
        assert gap < 1e-6, f"{loop.__name__}: {gap}"
    is_trained(named(10, **UNMANAGED), unmanaged)  # DeepSpeed counts 30 // 4 a backward pass


def ways_to_train_another_batch():
    is_stopped(named(), 24, 9, boundary_too_early)
    is_stopped(named(), 24, 9, by_torch_too_early)
    is_stopped(make(1, Net, batch=27, micro=3), 27, 9, boundary_too_early)  # dealt, not named
    is_stopped(named(9), 27, 9, boundary_too_early)
    is_stopped(named(**UNMANAGED), 24, 9, new_loop)
    is_stopped(named(), 24, 18, without_the_last)
    is_stopped(named(), 24, 27, never_synced)
    is_stopped(named(), 24, 81, synced_without_boundary)
    ends = "The config has 3 accumulation steps: after the backward"
    for loop in (boundary_too_early, never_synced, old_loop):
        with pytest.raises(ValueError) as raised:
            loop(named())
        assert (ends in str(raised.value)) == (loop is not old_loop)


def another_batch_in_mid_run():
    """The next update takes the micro-batches of one step, if its Share is asked for again."""
    engine = named(9)
    is_trained(engine, new_loop)
    share = batches.share(engine)
    engine.set_train_batch_size(18)
    with pytest.raises(ValueError, match="deals out a batch of 27, and the engine's is 18: call"):
        for m, weight in share:
            usual(engine, weight * engine(samples(1, m)))
    engine = named(9)
    is_trained(engine, new_loop)
    engine.set_train_batch_size(18)
    for _ in range(3):
        is_trained(engine, new_loop)
    sampler = iter(batches.Sampler(99, batches.share(engine)))
    next(sampler)
    engine.save_checkpoint(".", tag="between")
    engine.backward(engine(samples(1, 0)))
    with pytest.raises(ValueError, match="within a step, .*: call it after a step"):
        engine.set_train_batch_size(27)
    universal.load_checkpoint(engine, ".", "between")
    engine.set_train_batch_size(27)
    later = iter(batches.Sampler(99, batches.share(engine)))
    next(later)  # a DataLoader's workers may draw before the loop deals
    is_trained(engine, new_loop)
    with pytest.raises(ValueError, match="this Sampler deals out a batch of 18, and the"):
        [*itertools.islice(sampler, 3)]
    assert len([*itertools.islice(later, 4)]) == 4
    rounded = named(9)
    exact.install(rounded)
    is_trained(rounded, new_loop)
    rounded.set_train_batch_size(18)
    with pytest.raises(ValueError, match="for a batch of 27 in 3 accumulation steps, and it is 18"):
        new_loop(rounded)
    unnamed = make(1, Net, batch=27, micro=3)
    usual(unnamed, unnamed(samples(1, 0)))
    unnamed.set_train_batch_size(18)
    assert unnamed.micro_steps == 1  # as DeepSpeed does: the step ends after one more


def loader_of_deepspeed():
    """It would draw 27 samples, of which 24 are trained."""
    numbers = torch.utils.data.TensorDataset(torch.arange(99.0))
    with pytest.raises(ValueError, match="give a DataLoader a batches.Sampler; for an evaluation"):
        named().deepspeed_io(numbers)
    assert len(named().deepspeed_io(numbers, route="eval")) == 11
    order = torch.utils.data.SequentialSampler(numbers)
    assert len(named().deepspeed_io(numbers, data_sampler=order)) == 33
    assert len(named(9).deepspeed_io(numbers)) == 11
    net = Net()
    with pytest.raises(ValueError, match="DeepSpeed's loader of training_data would draw more"):
        deepspeed.initialize(
            model=net,
            optimizer=torch.optim.SGD(net.parameters()),
            training_data=numbers,
            config=batches.config(24, MICRO),
        )


def other_gradients():
    """DeepSpeed's gradient is another on other ranks: no batch is kept by it."""
    total = {"gradient_allreduce_op": "sum"}
    with pytest.raises(ValueError, match="gradient_allreduce_op .* 3 times the mean of the batch"):
        new_loop(named(**total))
    with pytest.raises(ValueError, match="gradient_allreduce_op .* 3 times the mean of the batch"):
        exact.install(named(**total))
    divided = {"gradient_predivide_factor": 3.0}
    options = batches.config(24, MICRO) | divided
    engine = make(3, Net, batch=None, zero={"reduce_scatter": False}, **options)
    with pytest.raises(ValueError, match="gradient_predivide_factor .* 0.3333 times the mean of"):
        new_loop(engine)
    is_trained(named(**divided, zero={"reduce_scatter": False}), new_loop)  # right at ZeRO-1


def other_gradients_at_a_load():
    engines = {"sum": make(1, Net, batch=27, micro=3, gradient_allreduce_op="sum")}
    engines["mean"] = make(1, Net, batch=27, micro=3)
    for op, engine in engines.items():
        is_trained(engine)
        engine.save_checkpoint(".", tag=op)
    words = "makes the gradient 3 times the mean over the ranks, and it was 1 times: take it out"
    with pytest.raises(CheckpointError, match=f"gradient_allreduce_op in the config {words}"):
        universal.load_checkpoint(engines["sum"], ".", "mean")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        universal.load_checkpoint(engines["sum"], ".", "sum")
        assert "gradient" not in printed.getvalue()
        universal.load_checkpoint(engines["mean"], ".", "sum")
    line = "WARNING: gradient_allreduce_op made the gradient 3 times the mean over the ranks, which"
    assert printed.getvalue().count(line) == (dist.get_rank() == 0)


def loader_of(sampler):
    """As accelerate's prepare() makes it."""
    of_all_ranks = torch.utils.data.BatchSampler(sampler, MICRO, drop_last=False)
    of_rank = SimpleNamespace(batch_sampler=of_all_ranks, num_processes=dist.get_world_size())
    return SimpleNamespace(
        dataset=range(99), batch_sampler=of_rank, base_dataloader=SimpleNamespace()
    )


def filled(engine, sampler=range(99)):
    steps = trainer.fill_steps(loader_of(sampler), batches.share(engine))

    def loop(engine):
        dealt = zip(steps, steps.all_weights(), strict=False)
        for numbers, weight in itertools.islice(dealt, engine.gradient_accumulation_steps()):
            usual(engine, weight * engine(samples(1, numbers[0])))

    return loop


def loaders_of_accelerate():
    """One engine's is nothing to another. Its ranks have the same order."""
    first, second, third = named(), named(), named()
    loop = filled(second)
    filled(third)
    is_trained(first, new_loop)
    is_trained(second, loop)
    is_stopped(third, 24, 27)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    engine = named()
    with pytest.raises(ValueError, match="a DistributedSampler gives each rank a part"):
        filled(engine, torch.utils.data.DistributedSampler(range(99), ranks, rank))
    with pytest.raises(ValueError, match="the ranks draw from different samples: give each the"):
        filled(engine, range(rank, 99, ranks))(engine)
    assert engine.global_steps == 0


def orders_of_samples():
    engine = named()
    share = batches.share(engine)
    next(iter(batches.Sampler(99, share, seed=dist.get_rank() % 2)))
    with pytest.raises(ValueError, match="the ranks draw from different samples: give each the"):
        new_loop(engine)
    engine = named()
    is_trained(engine, new_loop)
    with overridden(dist, all_gather_object=None):  # the ranks ask each other once
        is_trained(engine, new_loop)
    for same in (True, False):
        engine = named()
        drawn = dist.get_rank() * (not same)
        batches.ledger_of(engine).drawn = f"{batches.FLOATS}{drawn}"
        guesses.print_once.cache_clear()
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            is_trained(engine, new_loop)
        said = "WARNING: the ranks draw different floats: it is right if" in printed.getvalue()
        assert said == (not same and dist.get_rank() == 0)


def shared_micro_batches():
    """Three ranks compute each together, and DeepSpeed does not know it; or it does."""
    is_stopped(named(ranks=1), 24, 72)
    is_trained(named(ranks=1), lambda engine: new_loop(engine, 3))
    with overridden(groups, mpu=None):
        parallel_state_sp.initialize_sequence_parallel(3)
        for loop in (old_loop, new_loop):
            engine = named(ranks=1, mpu=parallel_state_sp)
            is_trained(engine, loop)
            assert engine.global_samples == 24
        engine._config.gradient_accumulation_steps = 6
        is_stopped(engine, 24, 12)


def exact_sums():
    """exact.install() takes the batch for its mean; it deals none."""
    for check, loop in ((is_stopped, old_loop), (is_trained, new_loop)):
        engine = named()
        exact.install(engine)
        check(engine, *(24, 27) * (check == is_stopped), loop)


def exact_ways_to_step():
    """The same bits, or a line."""

    def norm(loop, **options):
        engine = named(**options)
        exact.install(engine)
        is_trained(engine, loop)
        return float(engine.get_global_grad_norm())

    usual_norm = norm(new_loop)
    for loop in (boundary, without_sync, coalesced, listed_once):
        assert norm(loop) == usual_norm, loop.__name__
    assert norm(unmanaged, **UNMANAGED) == usual_norm
    with pytest.raises(ValueError, match="exact.py wants a gradient .* by engine.backward"):
        norm(by_torch)


def twice(engine):
    for _ in range(2):
        engine.backward(engine(samples(1, 0)))
    engine.step()


def twice_in_bf16(engine):
    for _ in range(2):
        engine.backward(engine(samples(1, 0).bfloat16()))
    engine.step()


def lost_gradients():
    """Of two backward() calls in a step the last alone counts, and a line says so; where both count
    (other stages, sums in fp32, an earlier micro-batch, a boundary that the script sets) none."""
    fp32_sums = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    line = "engine.backward() was called twice before a step(): at ZeRO-1 and 2"

    def gap(stage, loop=twice, **options):
        """How far the norm is from that of twice the loss; whether the line was said."""
        engine = make(stage, Net, batch=None, micro=MICRO, **options)
        guesses.print_once.cache_clear()
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            loop(engine)
        once = make(stage, Net, batch=None, micro=MICRO, **options)
        inputs = samples(1, 0)
        once.backward(2 * once(inputs.bfloat16() if "bf16" in options else inputs))
        once.step()
        norms = [float(each.get_global_grad_norm()) for each in (engine, once)]
        return abs(norms[0] / norms[1] - 1), printed.getvalue().count(line)

    batches.install()
    for stage in (1, 2):
        difference, said = gap(stage)
        assert abs(difference - 0.5) < 1e-6 and said == (dist.get_rank() == 0)
    for stage, loop, options in (
        (3, twice, {}),
        (1, twice_in_bf16, fp32_sums),
        (2, twice_in_bf16, fp32_sums),
    ):
        difference, said = gap(stage, loop, **options)
        assert difference < 1e-2 and not said, (stage, difference)

    def boundary_by_script(engine):
        for is_last in (False, True):
            engine.set_gradient_accumulation_boundary(is_last)
            engine.backward(engine(samples(1, 0)))
        engine.step()

    difference, said = gap(2, boundary_by_script)
    assert difference < 1e-6 and not said
    engine = make(1, Net, batch=None, micro=MICRO)
    for change in (
        lambda: universal.load_checkpoint(engine, ".", "one"),
        lambda: engine.set_train_batch_size(MICRO * dist.get_world_size()),
    ):
        usual(engine, engine(samples(1, 0)))
        engine.save_checkpoint(".", "one")
        change()
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            usual(engine, engine(samples(1, 0)))
        assert line not in printed.getvalue(), change


class WithLogits(Net):
    """Returns what its loss comes from, too."""

    def forward(self, x):
        logits = self.outputs(self.norm(self.inputs(x)).tanh())
        return (logits - 1).pow(2).mean(), logits


def divided_twice():
    """By DeepSpeed, at ZeRO-1 and 2, where a script calls loss.backward() and the model returns
    logits: a line says so, and none where the gradient is right."""
    batches.install()
    for stage, net, own in itertools.product((1, 2, 3), (Net, WithLogits), (False, True)):
        norms = []
        guesses.print_once.cache_clear()
        printed = io.StringIO()
        for count in (1, 4):
            engine = make(stage, net, batch=None, micro=MICRO, gradient_accumulation_steps=count)
            with contextlib.redirect_stdout(printed):
                for _ in range(count):
                    result = engine(samples(1, 0))
                    loss = result[0] if net is WithLogits else result
                    loss.backward() if own else engine.backward(loss)
                    engine.step()
            norms.append(float(engine.get_global_grad_norm()))
        is_off = stage < 3 and net is WithLogits and own
        assert abs(norms[0] / norms[1] - (4 if is_off else 1)) < 1e-3, (stage, net, own, norms)
        said = printed.getvalue().count("the model returns 2 tensors with gradients, and the")
        assert said == (is_off and dist.get_rank() == 0), (stage, net, own)


def misled_schedulers_and_sums():
    """A line at the first step."""
    batches.install()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    bf16 = {"bf16": {"enabled": True}, "gradient_accumulation_steps": guesses.MANY}
    less = bf16 | {"gradient_accumulation_steps": guesses.MANY // 2}
    in_fp32 = bf16 | {"data_types": {"grad_accum_dtype": "fp32"}}
    wanted = {"ReduceLROnPlateau": {"scheduler": plateau}, "128 accumulation steps are": bf16}
    silent = [
        {},
        less,
        in_fp32,
        {"scheduler": lambda each: torch.optim.lr_scheduler.StepLR(each, 9)},
    ]
    for text, options in [*wanted.items(), *((None, each) for each in silent)]:
        engine = make(1, Net, batch=None, micro=MICRO, **options)
        inputs = samples(1, 0).to(torch.bfloat16 if "bf16" in options else torch.float32)
        guesses.print_once.cache_clear()
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            while not engine.global_steps:
                usual(engine, engine(inputs))
        lines = printed.getvalue().count("universal: WARNING")
        assert lines == bool(text and dist.get_rank() == 0), options
        assert not lines or text in printed.getvalue()


CHECKS = (counters, other_accumulation, training_data, random_ltd, batch_of_trainers)
CHECKS += (loop_that_was_left, changed_after_initialize, another_batch_by_name, two_engines)
CHECKS += (said_and_not_dealt, no_weights, ways_to_step, ways_to_train_another_batch)
CHECKS += (another_batch_in_mid_run, loader_of_deepspeed, other_gradients, orders_of_samples)
CHECKS += (shared_micro_batches, exact_sums, exact_ways_to_step, other_gradients_at_a_load)
CHECKS += (loaders_of_accelerate, lost_gradients, divided_twice, misled_schedulers_and_sums)


def play(*names):
    checks = {check.__name__: check for check in CHECKS}
    fp16_is(True)()
    begin()
    in_turn(names, lambda name: checks[name]() if name in checks else train(KINDS[name]))
