"""A model of all kinds of parameters and buffers, with every optimizer: play(jobs) trains it, saves
it, and goes on from what was saved."""

import json
import os
from pathlib import Path
from typing import NamedTuple

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import universal
from tests.support.toy import (
    RARE_DTYPES,
    ExtraState,
    begin,
    falling,
    is_rank_0,
    make,
    save_truth,
    snapshot,
    split_groups,
)

SAVED = 3  # the step after which a job saves
STEPS = 6
BATCH = 12
TAG = f"global_step{SAVED}"
KEYS = [
    "a-b",
    "with space",
    "brackets[0]",
    "plus+",
    "ünï",
    "sla/sh",
    "star*",
    "quote'\"",
    "back\\slash",
]
STATES = {
    "AdamW": ["exp_avg", "exp_avg_sq"],
    "amsgrad": ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"],
    "momentum": ["momentum_buffer"],
    "SGD": [],
    "Adagrad": ["sum"],
    "RMSprop": ["square_avg", "momentum_buffer", "grad_avg"],
    "Muon": ["momentum_buffer", "exp_avg", "exp_avg_sq"],
    "CPUAdam": ["exp_avg", "exp_avg_sq"],
}
ADAM = {"betas": (0.9, 0.7)}
OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, ADAM),
    "amsgrad": (torch.optim.AdamW, ADAM | {"amsgrad": True}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "SGD": (torch.optim.SGD, {}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "CPUAdam": (deepspeed.ops.adam.DeepSpeedCPUAdam, ADAM),
}


class Job(NamedTuple):
    """A training that saves <name>/global_step3 after step SAVED, and what the engine holds as
    <name>/truth.pt.

    load: a tag below <name>, from which a model of another seed goes on instead. What it holds then
    is in <name>/<label>.pt, and with save_again it is saved as <name>/<label>_again. stock: by
    DeepSpeed's own universal loader. The losses after step SAVED are in <name>/<label>.json.
    accumulate: the dtype in which gradients are summed. fresh: the optimizer's states are not
    loaded.
    """

    name: str
    stage: int
    optimizer: str = "AdamW"
    dtype: str = "fp32"
    accumulate: str | None = None
    groups: int = 1
    empty_groups: int = 0
    keys: list = KEYS
    zero: dict = {}
    load: str | None = None
    stock: bool = False
    fresh: bool = False
    save_again: bool = False
    label: str = "losses"

    def make_optimizer(self, parameters):
        kind, options = OPTIMIZERS[self.optimizer]
        groups = split_groups(parameters, self.groups) + [{"params": []}] * self.empty_groups
        return kind(groups, lr=1e-2, **options)

    def states(self, parameter):
        """What the optimizer keeps of a parameter, and DeepSpeed can gather."""
        if self.fresh:
            return []
        if self.optimizer != "Muon":
            return STATES[self.optimizer]
        if not hasattr(parameter, "ds_id"):  # before ZeRO-3, DeepSpeed cannot
            return []
        return STATES["Muon"][:1] if parameter.use_muon else STATES["Muon"][1:]


class Zoo(nn.Module):
    def __init__(self, keys):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(8, 5).requires_grad_(False)
        not_contiguous = torch.randn(5, 12)[:, :8]
        self.frozen.weight = nn.Parameter(not_contiguous, requires_grad=False)
        self.norm = self.same_norm = nn.BatchNorm1d(7, affine=False)
        self.additions = ExtraState(RARE_DTYPES)
        # What is normalised belongs to no batch, hence to no rank.
        self.rows = nn.Parameter(torch.randn(9, 7))
        self.single = nn.Parameter(torch.randn(1))
        self.unused = nn.Parameter(torch.randn(2, 3))
        small = {key: torch.randn(1 + i % 3) for i, key in enumerate(keys)}
        self.small = nn.ParameterDict(small)
        self.register_buffer("mask", torch.rand(5) < 0.7)
        self.register_buffer("scratch", torch.randn(4), persistent=False)
        for p in self.parameters():
            p.use_muon = p.dim() == 2

    def forward(self, x, y):
        out = self.frozen(self.tied(self.first(x).relu())).tanh() * self.mask
        rest = torch.stack([p.cos().mean() for p in self.small.values()]).mean()
        rest = rest + self.norm(self.rows.float()).pow(3).mean()
        return (out.mean(-1) * self.single + rest - y).float().pow(2).mean()


def engine_of(job):
    optimizer = job.make_optimizer
    if job.optimizer == "Muon":  # DeepSpeed makes it, and its groups
        optimizer = {"type": "Muon", "params": {"lr": 1e-2, "weight_decay": 0.1}}
    return make(
        job.stage,
        lambda: Zoo(job.keys),
        optimizer,
        seed=2 if job.load else 1,
        zero=job.zero,
        batch=BATCH,
        micro=BATCH // dist.get_world_size(),
        clip=1.0,
        scheduler=falling,
        bf16={"enabled": job.dtype == "bf16"},
        data_types={"grad_accum_dtype": job.accumulate},
        checkpoint={"load_universal": job.stock},
    )


def load(engine, job):
    folder = Path(job.name)
    if job.stock:
        assert engine.load_checkpoint(folder, tag=job.load)[0] is not None
    else:
        options = {"load_optimizer_states": not job.fresh}
        _, client_state = universal.load_checkpoint(engine, folder, job.load, **options)
        assert client_state["word"] == "client state"
        # Another checkpoint may get the path of an open file.
        opened = {os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
        assert not [path for path in opened if path.endswith(".pt")]
    save_truth(snapshot(engine, job.states), folder / f"{job.label}.pt")
    if job.save_again:
        engine.save_checkpoint(folder, tag=f"{job.label}_again")


def train(engine, step):
    """The mean loss of all ranks, each of which has every N-th row of N ranks."""
    rows = torch.randn(BATCH, 9, generator=torch.Generator().manual_seed(step))
    rows = rows[dist.get_rank() :: dist.get_world_size()]
    dtype = engine.module.single.dtype
    loss = engine(rows[:, :8].to(dtype), rows[:, 8])
    engine.backward(loss)
    engine.step()
    total = loss.detach().double()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def work(job):
    engine = engine_of(job)
    folder = Path(job.name)
    if job.load:
        load(engine, job)
    else:
        for step in range(SAVED):
            train(engine, step)
        engine.save_checkpoint(folder, tag=TAG, client_state={"word": "client state"})
        save_truth(snapshot(engine, job.states), folder / "truth.pt")
    losses = [train(engine, step) for step in range(SAVED, STEPS)]
    if is_rank_0():
        (folder / f"{job.label}.json").write_text(json.dumps(losses))
    engine.destroy()


def play(*jobs):
    torch.compiler.set_stance("force_eager")  # Muon's arithmetic would be compiled for minutes
    begin()
    for job in jobs:
        work(job)
    dist.barrier()
