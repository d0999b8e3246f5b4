"""Engines that save, train ten steps more, and are trained again from that save, with a fault or
without: proof_engines.py first MODEL..., then proof_engines.py again FAULT...

FAULTS says what each fault changes after the load, and what the proof must say of it.
"""

import sys
from collections.abc import Callable
from typing import NamedTuple

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from toy import begin, in_turn, make

import universal
from universal import proof

SAVED = 2  # the step of the save
WIDTH = 6


class Model(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.first = nn.Linear(WIDTH, 8)
        self.dropout = nn.Dropout(dropout)
        self.second = nn.Linear(8, 1)
        self.register_buffer("shift", torch.ones(1))

    def forward(self, x):
        hidden = self.first(x + self.frozen(x)).tanh()
        return (self.second(self.dropout(hidden)) - self.shift).pow(2).mean()


def two_groups(parameters):
    groups = [{"params": parameters[:2], "weight_decay": 0.1}, {"params": parameters[2:]}]
    return torch.optim.AdamW(groups, lr=0.01)


class Kind(NamedTuple):
    """Of an engine."""

    stage: int = 1
    dropout: float = 0.0
    dtype: str = "fp32"


KINDS = {
    "plain": Kind(),
    "stage3": Kind(stage=3),
    "dropout": Kind(stage=2, dropout=0.5),
    "bf16": Kind(stage=2, dtype="bf16"),
}


def engine_of(kind: Kind, seed: int) -> deepspeed.DeepSpeedEngine:
    precision = {} if kind.dtype == "fp32" else {kind.dtype: {"enabled": True}}
    return make(
        kind.stage, lambda: Model(kind.dropout), two_groups, seed, batch=12, clip=1.0, **precision
    )


def micro_batches(engine, step):
    """This rank's, of 12 samples that belong to the step."""
    generator = torch.Generator().manual_seed(step)
    samples = torch.randn(12, 1, WIDTH, generator=generator)
    return samples.chunk(dist.get_world_size())[dist.get_rank()]


def train(engine, steps, batches=micro_batches):
    for step in steps:
        for x in batches(engine, step):
            loss = engine(x.to(next(engine.module.parameters()).dtype))
            engine.backward(loss)
            engine.step()


# --------------------------------------------------------------------------------------------------
# faults


def states_of(engine):
    return engine.optimizer.optimizer.state.values()


def scale_states(key, factor):
    def change(engine):
        for state in states_of(engine):
            state[key].mul_(factor)

    return change


def forget_steps(engine):
    list(states_of(engine))[1]["step"].fill_(0)


def other_rate(engine):
    engine.optimizer.param_groups[1]["lr"] *= 1.5


def other_decay(engine):
    engine.optimizer.param_groups[0]["weight_decay"] = 0.0


def other_frozen(engine):
    engine.module.frozen.weight.data.mul_(1.001)


def other_buffer(engine):
    engine.module.shift += 1e-3


def other_samples(engine, step):
    return micro_batches(engine, step + 1)


def same_samples_on_each_rank(engine, step):
    return torch.randn(12, 1, WIDTH, generator=torch.Generator().manual_seed(step)).chunk(
        dist.get_world_size()
    )[0]


class Fault(NamedTuple):
    """change: to the engine, after the load. says: a part of the line."""

    says: str
    change: Callable = lambda engine: None
    batches: Callable = micro_batches
    kind: str = "plain"


FIRST, NEXT = SAVED + 1, SAVED + 2
FAULTS = {
    "none": Fault(f"universal: steps {FIRST} to {SAVED + 10}, trained before on 4 ranks, now on"),
    "bf16": Fault(f"universal: steps {FIRST} to {SAVED + 10}, trained before", kind="bf16"),
    "stage3": Fault(f"universal: steps {FIRST} to {SAVED + 10}, trained before", kind="stage3"),
    "exp_avg": Fault(f"WARNING: step {NEXT}", scale_states("exp_avg", 0)),
    "exp_avg_sq": Fault(f"WARNING: step {NEXT}", scale_states("exp_avg_sq", 2)),
    "step": Fault(f"WARNING: step {NEXT}", forget_steps),
    "rate": Fault(
        f"WARNING: step {FIRST}, trained before on 4 ranks: the learning rate", other_rate
    ),
    "decay": Fault(f"WARNING: step {NEXT}", other_decay),
    "frozen": Fault(f"WARNING: step {FIRST}", other_frozen),
    "buffer": Fault(f"WARNING: step {FIRST}", other_buffer),
    "samples": Fault(f"WARNING: step {FIRST}", batches=other_samples),
    "same_samples": Fault(f"WARNING: step {FIRST}", batches=same_samples_on_each_rank),
    "dropout": Fault(f"NOTE: step {FIRST}", kind="dropout"),
}


def play_first(name):
    engine = engine_of(KINDS[name], seed=1)
    torch.manual_seed(dist.get_rank())
    train(engine, range(1, SAVED + 1))
    engine.save_checkpoint(".", tag="t")
    train(engine, range(SAVED + 1, SAVED + 13))


def play_again(name):
    fault = FAULTS[name]
    if dist.get_rank() == 0:
        print(f"== {name}", flush=True)
    engine = engine_of(KINDS[fault.kind], seed=2)
    engine.load_checkpoint(f"../{fault.kind}", tag="t")
    torch.manual_seed(dist.get_rank())
    fault.change(engine)
    train(engine, range(SAVED + 1, SAVED + 13), fault.batches)


if __name__ == "__main__":
    begin()
    universal.install()
    assert proof
    phase, *names = sys.argv[1:]
    in_turn(names, {"first": play_first, "again": play_again}[phase])
