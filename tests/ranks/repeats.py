"""Engines whose ranks do not divide the micro-batches, and engines whose ranks do: play(NAME...)
trains those of KINDS, and each rank writes what came of it to <name>/<ranks>.<rank>.json; or it
makes one of CHECKS, which assert what they see.
"""

import contextlib
import io
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.utils import groups
from torch import nn

from tests.support.helpers import fp16_is
from tests.support.toy import begin, in_turn, make
from universal import batches, exact
from universal.load.hooks import overridden

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


def share_of_loss(engine, loss):
    """As accelerate and Trainer do."""
    engine.backward(loss / engine.gradient_accumulation_steps(), scale_wrt_gas=False)
    engine.step()


class Kind(NamedTuple):
    """micro_batches: of a step; with 4, rank 2 of 3 has repeats alone. config: more of DeepSpeed's.
    weigh: the weight that is used, of the true one."""

    net: Callable = Net
    stage: int = 1
    train: Callable = usual
    config: dict[str, Any] = {}
    micro_batches: int = 8
    weigh: Callable = lambda weight: weight


FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}
KINDS = {
    "stage_0": Kind(stage=0),
    "stage_1": Kind(),
    "stage_2": Kind(stage=2),
    "stage_3": Kind(stage=3),
    "fp16": Kind(stage=2, config=FP16),
    "batch_norm": Kind(lambda: Net(nn.BatchNorm1d), micro_batches=4),
    "share_of_loss": Kind(stage=2, train=share_of_loss),
    "infinite": Kind(Infinite),
    "infinite_fp16": Kind(Infinite, stage=2, config=FP16),
    "no_weights": Kind(micro_batches=4, weigh=lambda weight: 1.0),
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
        kind.train(engine, kind.weigh(weight) * loss)
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
    batches.DEALT.clear()
    config = batches.config(micro_batches * MICRO, MICRO, ranks)
    return make(1, net, batch=None, **config | options)


def old_loop(engine):
    for place in range(engine.gradient_accumulation_steps()):
        usual(engine, engine(samples(1, 3 * place + dist.get_rank())))


def new_loop(engine, *sharers):
    for m, weight in batches.share(engine, *sharers):
        usual(engine, weight * engine(samples(1, m)))


def is_trained(engine, loop=old_loop):
    steps = engine.global_steps
    loop(engine)
    assert engine.global_steps == steps + 1


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
    batches.watch_batches()
    printed = io.StringIO()
    with pytest.MonkeyPatch().context() as patched, contextlib.redirect_stdout(printed):
        patched.setenv("UNIVERSAL_BATCH", "24")
        engine = make(1, Net, batch=27, micro=3)
        is_trained(engine)
        is_trained(engine)
    line = "UNIVERSAL_BATCH=24 is for Trainers under `python -m universal` alone: this step"
    assert printed.getvalue().count(f"{line} trains 27 samples") == (dist.get_rank() == 0)


def changed_after_initialize():
    for dealt in (False, True):
        engine = named(9)
        if dealt:
            is_trained(engine, new_loop)
        engine._config.gradient_accumulation_steps = 2
        is_stopped(engine, 27, 18)
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
    """As actor and critic: one loop deals for both. Another batch has a loop of its own."""
    first = named()
    is_trained(first, new_loop)
    second = make(1, Net, batch=None, **batches.config(24, MICRO))
    is_trained(second)
    is_stopped(make(1, Net, batch=None, **batches.config(21, MICRO)), 21, 27)


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
        engine._config.gradient_accumulation_steps = 9
        is_stopped(engine, 24, 27)


def exact_sums():
    """exact.install() takes the batch for its mean; it deals none."""
    for check, loop in ((is_stopped, old_loop), (is_trained, new_loop)):
        engine = named()
        exact.install(engine)
        check(engine, *(24, 27) * (check == is_stopped), loop)


CHECKS = (counters, other_accumulation, training_data, random_ltd, batch_of_trainers)
CHECKS += (loop_that_was_left, changed_after_initialize, another_batch_by_name, two_engines)
CHECKS += (shared_micro_batches, exact_sums)


def play(*names):
    checks = {check.__name__: check for check in CHECKS}
    fp16_is(True)()
    begin()
    in_turn(names, lambda name: checks[name]() if name in checks else train(KINDS[name]))
