"""Engines that save, train some steps more, and are trained again from that save, with a fault or
without: play("first", KIND...), then play("again", FAULT...).

FAULTS says what each fault changes after the load, and what the proof must say of it.
"""

import random
from collections.abc import Callable
from typing import NamedTuple

import numpy
import torch
import torch.distributed as dist
from torch import nn

import universal
from tests.support.helpers import fp16_is
from tests.support.toy import begin, in_turn, is_rank_0, make, two_groups
from universal import batches, exact

SAVED = 2  # the step of the save
WIDTH = 6
BATCH = 10


# --------------------------------------------------------------------------------------------------
# 1. a model, its samples, and the ways to train it


class Model(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.first = nn.Linear(WIDTH, 8)
        self.dropout = nn.Dropout(dropout)
        self.second = nn.Linear(8, 1)
        self.register_buffer("shift", torch.ones(1))
        self.has_autocast = False

    def forward(self, samples, attention_mask=None, labels=0):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.has_autocast):
            loss = self.loss(samples, attention_mask).float()
        return loss + torch.as_tensor(labels).float().mean()

    def loss(self, samples, attention_mask):
        if isinstance(samples, dict):
            samples = samples["samples"]
        samples = torch.as_tensor(samples, dtype=self.first.weight.dtype)
        if attention_mask is not None:  # the mean of a sample is that of its own part
            samples = samples * attention_mask / attention_mask.sum(1, keepdim=True)
            samples = nn.functional.pad(samples, (0, WIDTH - samples.size(1)))
        hidden = self.first(samples + self.frozen(samples)).tanh()
        return (self.second(self.dropout(hidden)) - self.shift).pow(2).mean()


def drawn(engine, step):
    """The micro-batches of the step."""
    generator = torch.Generator().manual_seed(step)
    samples = torch.randn(BATCH, WIDTH, generator=generator)
    return samples.split(engine.train_micro_batch_size_per_gpu())


def dealt_out(engine, parts):
    """This rank's, each with the weight of its loss."""
    return [(parts[m], weight) for m, weight in batches.share(engine)]


def micro_batches(engine, step):
    return dealt_out(engine, drawn(engine, step))


def other_samples(engine, step):
    return micro_batches(engine, step + 1)


def other_byte(engine, step):
    """Of one sample, which rank 1 has."""
    parts = drawn(engine, step)
    parts[4].view(torch.uint8)[0, 3] ^= 1
    return dealt_out(engine, parts)


def weights_of_1(engine, step):
    """As if the mean were that of this rank's losses, those of no weight among them."""
    return [(samples, float(weight > 0)) for samples, weight in micro_batches(engine, step)]


def usual(engine, samples, weight):
    engine.backward(weight * engine(samples))


def loss_of_one_row(engine, samples, weight):
    engine.backward(weight * engine(samples).reshape(1))


def share_of_loss(engine, samples, weight):
    """As accelerate and Trainer do."""
    loss = weight * engine(samples) / engine.gradient_accumulation_steps()
    engine.backward(loss, scale_wrt_gas=False)


def by_position(engine, samples, weight):
    engine.backward(weight * engine(samples) / engine.gradient_accumulation_steps(), False, False)


def own_autocast(engine, samples, weight):
    engine.module.has_autocast = True
    usual(engine, samples, weight)


def loss_backward(engine, samples, weight):
    (weight * engine(samples)).backward()


def two_losses(engine, samples, weight):
    """ZeRO would reduce the gradients of the first twice."""
    loss = weight * engine(samples)
    with engine.no_sync():
        engine.backward(loss, retain_graph=True)
    engine.backward(loss * 0.5)


def dictionary(engine, samples, weight):
    usual(engine, {"samples": samples}, weight)


def named(engine, samples, weight):
    engine.backward(weight * engine(samples=samples))


def no_tensor(engine, samples, weight):
    usual(engine, samples.tolist(), weight)


def evaluated(engine, samples, weight):
    engine.eval()
    engine(samples + 1)
    engine.train()
    with torch.no_grad():
        engine(samples + 2)
    usual(engine, samples, weight)


def padded(engine, samples, weight):
    """To the longest of the micro-batch."""
    lengths = 2 + (samples[:, 0] * 100).long() % (WIDTH - 2)
    mask = torch.arange(lengths.max()) < lengths[:, None]
    samples = samples[:, : lengths.max()].where(mask, torch.tensor(7.0))
    engine.backward(weight * engine(samples, attention_mask=mask.long()))


def labels_behind_a_constant(engine, samples, weight):
    engine.backward(weight * engine(torch.ones_like(samples), labels=samples))


def hardly_any_samples(engine, samples, weight):
    """The loss does not show them."""
    usual(engine, samples * 1e-3, weight)


def numpys_draws(engine, samples, weight):
    engine.backward(weight * engine(samples) * (1 + numpy.random.rand()))


def draws_of_one_rank(engine, samples, weight):
    loss = engine(samples)
    if dist.get_rank() == 1:
        loss = loss * (1 + random.random())
    engine.backward(weight * loss)


GENERATOR = torch.Generator()


def draws_of_its_own(engine, samples, weight):
    GENERATOR.manual_seed(dist.get_rank() + dist.get_world_size())
    engine.backward(weight * engine(samples) * (1 + torch.rand((), generator=GENERATOR)))


def late_dropout(engine, samples, weight):
    engine.module.dropout.p = 0.5 if engine.global_steps > SAVED else 0.0
    torch.manual_seed(dist.get_rank() + dist.get_world_size())
    usual(engine, samples, weight)


def seeded_dropout(engine, samples, weight):
    """By the micro-batch, as train.py does."""
    torch.manual_seed(samples.view(torch.int32).sum())
    usual(engine, samples, weight)


BY_RANK = (numpys_draws, draws_of_one_rank, draws_of_its_own, late_dropout)


class Kind(NamedTuple):
    """Of an engine, and of its training. steps: after the save. micro: samples of a micro-batch, at
    first and again. exact: the weights are 1 and 0, as exact.py takes the mean."""

    train: Callable = usual
    stage: int = 1
    dropout: float = 0.0
    dtype: str = "fp32 alone"
    steps: int = 3
    micro: tuple[int, int] = (1, 1)
    exact: bool = False


KINDS = {
    "plain": Kind(steps=12),
    "stage3": Kind(stage=3),
    "dropout": Kind(stage=2, dropout=0.5),
    "bf16": Kind(stage=2, dtype="bf16"),
    "fp16": Kind(stage=2, dtype="fp16"),
    "loss_of_one_row": Kind(loss_of_one_row),
    "share_of_loss": Kind(share_of_loss, stage=2),
    "by_position": Kind(by_position),
    "own_autocast": Kind(own_autocast, dtype="bf16 in the model alone"),
    "communication": Kind(dtype="communication_data_type"),
    "loss_backward": Kind(loss_backward),
    "two_losses": Kind(two_losses),
    "dictionary": Kind(dictionary),
    "named": Kind(named),
    "no_tensor": Kind(no_tensor),
    "evaluated": Kind(evaluated),
    "exact": Kind(stage=2, exact=True),
    "padded": Kind(padded, micro=(1, 2)),
    "labels": Kind(labels_behind_a_constant, micro=(1, 2)),
    "hardly_any_samples": Kind(hardly_any_samples, stage=2, dtype="bf16"),
    "seeded_dropout": Kind(seeded_dropout, dropout=0.5),
    **{draws.__name__: Kind(draws) for draws in BY_RANK},
    "autocast": Kind(dtype="torch_autocast"),  # the last one: later engines would have it, too
}


def engine_of(kind, micro, seed):
    precision = {kind.dtype: {"enabled": True}} if " " not in kind.dtype else {}
    if kind.dtype == "communication_data_type":
        precision = {kind.dtype: "bf16"}
    if kind.dtype == "torch_autocast":
        precision[kind.dtype]["dtype"] = "bfloat16"
    engine = make(
        kind.stage,
        lambda: Model(kind.dropout),
        two_groups,
        seed,
        batch=None,
        clip=1.0,
        **batches.config(BATCH, micro),
        **precision,
    )
    if kind.exact:
        exact.install(engine)
    return engine


def train(engine, kind, steps, dealt=micro_batches):
    for step in steps:
        for samples, weight in dealt(engine, step):
            kind.train(engine, samples, weight)
            engine.step()


# --------------------------------------------------------------------------------------------------
# 2. faults


def states_of(engine):
    return list(engine.optimizer.optimizer.state.values())


def no_fault(engine):
    pass


def no_momentum(engine):
    for state in states_of(engine):
        state["exp_avg"].zero_()


def other_rate(engine):
    engine.optimizer.param_groups[1]["lr"] *= 1.5


def other_scale(engine):
    engine.optimizer.loss_scaler.cur_scale *= 2


def other_buffer(engine):
    engine.module.shift += 1e-3


def no_dropout(engine):
    engine.module.dropout.p = 0.0


class Fault(NamedTuple):
    """change: to the engine, after the load. dealt: the micro-batches then. says: a part of the
    line, as a pattern."""

    says: str
    change: Callable = no_fault
    dealt: Callable = micro_batches
    kind: str = "plain"


FIRST = f"WARNING: step {SAVED + 1}, trained before on 2 ranks: the"
NOTE = f"NOTE: step {SAVED + 1}, trained before on 2 ranks: the loss was"
SECOND = f"WARNING: step {SAVED + 2}, trained before on 2 ranks: the"
FAULTS = {
    "momentum": Fault(f"{SECOND} loss was", no_momentum),
    "rate": Fault(f"{FIRST} learning rate of group 1 was 0.005, and is 0.0075", other_rate),
    "scale": Fault(f"{FIRST} loss scale was", other_scale, kind="fp16"),
    "buffer": Fault(f"{FIRST} loss was", other_buffer),
    "byte": Fault("other samples than before", dealt=other_byte),
    "weights_of_1": Fault(f"{FIRST} loss was 0.26678", dealt=weights_of_1),
    "unknown_samples": Fault(r"and is [\d.]+: docs/", dealt=other_samples, kind="no_tensor"),
    "dropout_by_rank": Fault(NOTE, kind="dropout"),
    "no_dropout": Fault("other random numbers were drawn;", no_dropout, kind="dropout"),
    "labels_of_others": Fault("other samples", dealt=other_samples, kind="labels"),
    "samples_unseen": Fault("other samples", dealt=other_samples, kind="hardly_any_samples"),
    "late_dropout": Fault(f"NOTE: step {SAVED + 2}, trained before", kind="late_dropout"),
    "numpys_draws": Fault(NOTE, kind="numpys_draws"),
    "draws_of_one_rank": Fault(NOTE, kind="draws_of_one_rank"),
    "draws_of_its_own": Fault("of the same samples: docs/", kind="draws_of_its_own"),
    "buffer_and_seeded_dropout": Fault(
        "of the same samples: docs/", other_buffer, kind="seeded_dropout"
    ),
}
SOUND = [kind for kind in KINDS if kind != "dropout" and kind not in FAULTS]
FAULTS |= {kind: Fault("the loss differs by at most", kind=kind) for kind in SOUND}


# --------------------------------------------------------------------------------------------------
# 3. what every rank does


def play_first(name):
    kind = KINDS[name]
    engine = engine_of(kind, kind.micro[0], seed=1)
    torch.manual_seed(dist.get_rank())
    train(engine, kind, range(1, SAVED + 1))
    engine.save_checkpoint(".", tag="t")
    train(engine, kind, range(SAVED + 1, SAVED + 1 + kind.steps))


def play_again(name):
    fault = FAULTS[name]
    kind = KINDS[fault.kind]
    if is_rank_0():
        print(f"== {name}", flush=True)
    engine = engine_of(kind, kind.micro[1], seed=2)
    engine.load_checkpoint(f"../{fault.kind}", tag="t")
    torch.manual_seed(dist.get_rank())
    fault.change(engine)
    steps = 2 if name != fault.kind else kind.steps
    train(engine, kind, range(SAVED + 1, SAVED + 1 + steps), fault.dealt)


def play(phase, *names):
    fp16_is(True)()
    begin()
    universal.install()
    in_turn(names, {"first": play_first, "again": play_again}[phase])
