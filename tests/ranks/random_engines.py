"""Random models, optimizers and ZeRO options, saved on some ranks and loaded on others or on the
same: outcomes_of(seeds, folder).

An engine is wrong when load_checkpoint() returns and anything it holds is not what was saved:
weights, masters, states, frozen parameters, buffers, extra state, hyper-parameters, step counts,
scheduler, counters, client state; when the losses of two more steps are others; or when the proof
finds one of ten that is. wanted() says which of them must load."""

import contextlib
import functools
import io
import random
import re
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import universal
from tests.support import toy
from tests.support.helpers import run_all
from tests.support.toy import (
    RARE_DTYPES,
    ExtraState,
    begin,
    differences,
    falling,
    in_turn,
    is_rank_0,
    make,
    read_truth,
    save_truth,
    snapshot,
    split_groups,
)

OPTIMIZERS = {
    "AdamW": {},
    "Adam": {"amsgrad": True},
    "SGD": {"momentum": 0.9},
    "Adagrad": {},
    "RMSprop": {"centered": True},
    "Adadelta": {},
    "Adamax": {},
    "RAdam": {},
    "NAdam": {},
    "ASGD": {},
    "Rprop": {},
}
NAMES = ["w", "a-b", "x[0]", "y+", "ünï", "sla/sh", "s p"]
# It is trained with samples of 5 numbers.
train = functools.partial(toy.train, forward=functools.partial(toy.forward, width=5))


# --------------------------------------------------------------------------------------------------
# 1. what the engine of a seed is, and what is done with it


class Side(NamedTuple):
    """How it is cut, where it is saved or where it is loaded. zero: more of zero_optimization."""

    stage: int
    ranks: int
    zero: dict


class Plan(NamedTuple):
    """later: another checkpoint is saved after it. converted: what is loaded is its conversion.
    options: of load_checkpoint()."""

    seed: int
    saved: Side
    loaded: Side
    optimizer: str
    groups: int
    bf16: bool
    parts: list[str]
    shapes: list[list[int]]
    tag: str
    later: bool
    converted: bool
    options: dict


def plan(seed):
    draw = random.Random(seed)
    stages = [(1, 1), (2, 2), (3, 3), *((a, b) for a in (1, 2, 3) for b in (1, 2, 3))]
    stage, to = draw.choice(stages)
    ranks = draw.randint(1, 4)
    optimizer = draw.choice(["AdamW"] * 6 + list(OPTIMIZERS))
    other_ranks = draw.choice([ranks, 1, 2, 3, 4])
    # DeepSpeed makes Adagrad anew, and of one group.
    groups = 1 if optimizer == "Adagrad" else draw.randint(1, 3)
    bf16 = draw.random() < 0.3
    parts = [part for part in ("shared", "frozen", "tied", "extra") if draw.random() < 0.5]
    shapes = [
        [draw.choice([1, 2, 3, 5, 8]) for _ in range(draw.randint(1, 3))]
        for _ in range(draw.randint(1, 5))
    ]
    zero = draw_zero_options(draw, stage)
    other_zero = draw_zero_options(draw, to)
    tag = draw.choice(["t", "epoch1/step2", "a tag"])
    later = draw.random() < 0.5
    converted = draw.random() < 0.2
    options = [{}] * 6 + [{"load_optimizer_states": False}, {"load_module_only": True}]
    return Plan(
        seed=seed,
        saved=Side(stage, ranks, zero),
        loaded=Side(to, other_ranks, other_zero),
        optimizer=optimizer,
        groups=groups,
        bf16=bf16,
        parts=parts,
        shapes=shapes,
        tag=tag,
        later=later,
        converted=converted,
        options=draw.choice(options),
    )


def draw_zero_options(draw, stage):
    if stage == 3:
        return {
            "sub_group_size": draw.choice([10**9, 1, 20]),
            "stage3_param_persistence_threshold": draw.choice([0, 10, 10**5]),
        }
    return {
        "round_robin_gradients": draw.random() < 0.3,
        "elastic_checkpoint": draw.random() < 0.2,
    }


def wanted(plan):
    """The one outcome that is right: all load but those of the two optimizers that keep what
    belongs to no single element, where they were to be converted."""
    convertible = plan.optimizer not in ("ASGD", "NAdam")
    return "right" if convertible or not plan.converted else "not converted"


# --------------------------------------------------------------------------------------------------
# 2. what its ranks do


class Model(nn.Module):
    def __init__(self, parts, shapes):
        super().__init__()
        weights = {name: torch.randn(shape) for name, shape in zip(NAMES, shapes, strict=False)}
        self.weights = nn.ParameterDict(weights)
        if "tied" in parts:
            self.again = nn.ParameterDict({"w": self.weights["w"]})
        if "frozen" in parts:
            self.frozen = nn.Parameter(torch.randn(4, 9)[:, 2:7], requires_grad=False)
        if "shared" in parts:
            self.norm = self.same = nn.BatchNorm1d(3, affine=False)
        if "extra" in parts:
            self.extra = ExtraState(RARE_DTYPES)

    def forward(self, x):
        x = x.flatten()
        total = sum((p * x[i % len(x)]).sin().mean() for i, p in enumerate(self.weights.values()))
        if hasattr(self, "frozen"):
            total = total * (1 + self.frozen.float().cos().mean())
        if hasattr(self, "norm"):  # the same on every rank, as it looks at nothing of the batch
            element = self.weights["w"].float().flatten()[:1]
            total = total + self.norm(element.expand(4, 3) + torch.eye(4, 3)).pow(3).mean()
        return total.float().pow(2)


def engine_of(plan, side, seed):
    def make_optimizer(parameters):
        groups = split_groups(parameters, plan.groups)
        return getattr(torch.optim, plan.optimizer)(groups, **OPTIMIZERS[plan.optimizer])

    return make(
        side.stage,
        lambda: Model(plan.parts, plan.shapes),
        make_optimizer,
        seed,
        side.zero,
        bf16={"enabled": plan.bf16},
        clip=1.0,
        scheduler=falling,
    )


def save(plan):
    """What came of it: "saved", or the line that says why it is not converted."""
    engine = engine_of(plan, plan.saved, seed=1)
    for step in (0, 1):
        train(engine, step)
    client_state = {"word": plan.seed, "rare": torch.ones(2, dtype=torch.uint16)}
    engine.save_checkpoint(".", tag=plan.tag, client_state=client_state)
    save_truth(snapshot(engine))
    losses = [train(engine, 2)]
    if plan.later:
        engine.save_checkpoint(".", tag="a later one")
    save_truth([*losses, train(engine, 3)], "losses.pt")
    train_on(engine)
    if plan.converted and is_rank_0():
        try:
            universal.convert(plan.tag, "universal")
        except universal.CheckpointError as error:
            return f"not converted: {error}"
    return "saved"


def train_on(engine):
    """To the tenth step after the save, the last that is proved."""
    for step in range(4, 12):
        train(engine, step)


def load(plan):
    """What came of it: "right", what is wrong, or why it was refused."""
    engine = engine_of(plan, plan.loaded, seed=2)
    train(engine, 9)
    expected = "universal" if plan.converted else plan.tag
    tag = expected if plan.converted or plan.later or plan.seed % 2 else None
    try:
        path, client_state = universal.load_checkpoint(engine, ".", tag, **plan.options)
    except universal.CheckpointError as error:
        return f"refused: {error}"
    wrong = differences(comparable(plan, read_truth()), snapshot(engine))
    if path != expected:
        wrong.append(path)
    if client_state["word"] != plan.seed or client_state["rare"].tolist() != [1, 1]:
        wrong.append("client state")
    if not plan.options:
        losses = zip((2, 3), read_truth("losses.pt"), strict=True)
        gap = max(abs(train(engine, step) - loss) for step, loss in losses)
        if gap > (0 if plan.saved == plan.loaded else 2e-2 if plan.bf16 else 1e-5):
            wrong.append(f"loss {gap}")
        train_on(engine)
    return f"WRONG: {wrong}" if wrong else "right"


def comparable(plan, truth):
    """What must be as it was. DeepSpeed misreads the masters and states of a live engine with
    round_robin_gradients."""
    masters = {name for name in truth if name.endswith(" fp32")}
    states = {name for name in truth if " " in name.replace("s p", "")} - masters
    left_out = set()
    if any(side.zero.get("round_robin_gradients") for side in (plan.saved, plan.loaded)):
        left_out |= masters | states
    if plan.options:  # the optimizer is a new one
        left_out |= states | {"groups", "steps", "counters", "scheduler"}
    return {name: value for name, value in truth.items() if name not in left_out}


def play(phase, *seeds):
    """What every rank does."""

    def play_engine(seed):
        job = plan(int(seed))
        with contextlib.redirect_stdout(io.StringIO()) as said:
            outcome = {"save": save, "load": load}[phase](job)
        proofs = re.findall("^.*trained before.*$", said.getvalue(), re.M)
        if is_rank_0() and phase == "load" and outcome == "right" and not job.options:
            (proof,) = proofs
            outcome = "right" if "the loss differs by at most" in proof else f"WRONG: {proof}"
        Path(f"{phase}.{dist.get_rank()}").write_text(outcome)

    begin()
    universal.install()
    in_turn(seeds, play_engine)


# --------------------------------------------------------------------------------------------------
# 3. what came of it


def outcome_of(folder, phase, failed):
    """What came of a phase for one engine."""
    if failed:
        return f"FAILED: {failed.strip().splitlines()[-1]}"
    outcomes = {path.read_text() for path in folder.glob(f"{phase}.*")}
    if phase == "save":  # rank 0 converts
        outcomes = outcomes - {"saved"} or outcomes
    if len(outcomes) > 1:
        return f"FAILED: not all ranks say the same: {outcomes}"
    return outcomes.pop()


def outcomes_of(seeds, folder):
    """{seed: what came of it}. All engines of a number of ranks are saved in one launch, and loaded
    in one."""
    outcomes = {}
    left = {str(seed): plan(seed) for seed in seeds}
    for phase, side in (("save", "saved"), ("load", "loaded")):
        for ranks in (1, 2, 3, 4):
            names = [name for name in left if getattr(left[name], side).ranks == ranks]
            failed = run_all(folder, ranks, play, phase, names=names)
            for name in names:
                outcomes[int(name)] = outcome_of(folder / name, phase, failed.get(name))
        left = {name: job for name, job in left.items() if outcomes[int(name)] == "saved"}
    return outcomes
