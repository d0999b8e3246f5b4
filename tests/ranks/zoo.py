"""Trains a small odd model with DeepSpeed: zoo.py '[{"name": "a", "stage": 1, "optimizer":
"AdamW"}, ...]', job by job.

A job trains 6 steps and, after the third, saves <name>/global_step3 and <name>/truth.pt: what the
live engine held. With "load" it goes on from <name>/<load> instead, in a model of another seed;
"how": by our loader, or by DeepSpeed's universal one, "stock", or by that and "mend"; with "again"
it saves that as <name>/<label>_again. Losses go to <name>/<label>.json."""

import json
import os
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from toy import RARE_DTYPES, ExtraState, begin, make, save_truth, snapshot, split_groups

import universal

SAVED, STEPS, BATCH = 3, 6, 12
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
    "Muon": [
        "momentum_buffer",
        "exp_avg",
        "exp_avg_sq",
    ],  # the one for matrices, the others for the rest
    "CPUAdam": ["exp_avg", "exp_avg_sq"],
}
DTYPES = {
    name: dtype for name, dtype in RARE_DTYPES.items() if name != "double_complex"
}  # safetensors has no place for it
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


class Zoo(nn.Module):
    def __init__(self, keys):
        super().__init__()
        self.first, self.tied = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(8, 5).requires_grad_(False)
        self.frozen.weight = nn.Parameter(
            torch.randn(5, 12)[:, :8], requires_grad=False
        )  # not contiguous
        self.norm = self.same_norm = nn.BatchNorm1d(7, affine=False)
        self.odd_module = ExtraState(DTYPES)
        self.rows = nn.Parameter(
            torch.randn(9, 7)
        )  # what is normalised belongs to no batch, hence to no rank
        self.single = nn.Parameter(torch.randn(1))
        self.unused = nn.Parameter(torch.randn(2, 3))
        self.odd = nn.ParameterDict({key: torch.randn(1 + i % 3) for i, key in enumerate(keys)})
        self.register_buffer("mask", torch.rand(5) < 0.7)
        self.register_buffer("scratch", torch.randn(4), persistent=False)
        for p in self.parameters():
            p.use_muon = p.dim() == 2

    def forward(self, x, y):
        out = self.frozen(self.tied(self.first(x).relu())).tanh() * self.mask
        rest = torch.stack([p.cos().mean() for p in self.odd.values()]).mean()
        rest = rest + self.norm(self.rows.float()).pow(3).mean()
        return (out.mean(-1) * self.single + rest - y).float().pow(2).mean()


def states_of(p):
    """Muon's states are one for matrices, two for the rest; DeepSpeed can gather them at ZeRO-3
    alone."""
    return (
        [] if not hasattr(p, "ds_id") else STATES["Muon"][:1] if p.use_muon else STATES["Muon"][1:]
    )


def work(
    name,
    stage,
    optimizer,
    dtype="fp32",
    groups=1,
    keys=KEYS,
    load=None,
    label="losses",
    zero=None,
    accumulate=None,
    how="ours",
    empty=0,
    options=None,
    again=False,
):
    rank, ranks, folder = dist.get_rank(), dist.get_world_size(), Path(name)

    def make_it(trained):
        kind, options = OPTIMIZERS[optimizer]
        return kind(split_groups(trained, groups) + [{"params": []}] * empty, lr=1e-2, **options)

    if optimizer == "Muon":  # DeepSpeed makes it, and its groups
        make_it = {"type": "Muon", "params": {"lr": 1e-2, "weight_decay": 0.1}}
    engine = make(
        stage,
        lambda: Zoo(keys),
        make_it,
        2 if load else 1,
        zero,
        BATCH,
        BATCH // ranks,
        clip=1.0,
        scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(
            o, lambda step: min(1, (step + 1) / STEPS)
        ),
        bf16={"enabled": dtype == "bf16"},
        data_types={"grad_accum_dtype": accumulate},
        checkpoint={"load_universal": how != "ours"},
    )

    states = not options and (
        states_of if optimizer == "Muon" else True
    )  # a new optimizer has none
    if load and how != "ours":
        assert engine.load_checkpoint(folder, tag=load)[0] is not None
        if how == "mend":
            universal.mend(engine, folder / load)
    elif load:
        _, client_state = universal.load_checkpoint(engine, folder, load, **(options or {}))
        assert client_state["word"] == "client state"
        opened = {os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
        assert not [
            path for path in opened if path.endswith(".pt")
        ]  # another checkpoint may get this path
    if load:
        save_truth(snapshot(engine, states), folder / f"{label}.pt")
        if again:
            engine.save_checkpoint(folder, tag=f"{label}_again")
    losses = []
    for step in range(SAVED if load else 0, STEPS):
        x = torch.randn(BATCH, 9, generator=torch.Generator().manual_seed(step))
        x, y = x[rank::ranks, :8], x[rank::ranks, 8]
        loss = engine(
            x.to(engine.device, torch.bfloat16 if dtype == "bf16" else torch.float32),
            y.to(engine.device),
        )
        engine.backward(loss)
        engine.step()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append(mean.item() / ranks)
        if not load and step + 1 == SAVED:
            engine.save_checkpoint(
                folder, tag=f"global_step{SAVED}", client_state={"word": "client state"}
            )
            save_truth(snapshot(engine, states), folder / "truth.pt")
    if rank == 0:
        (folder / f"{label}.json").write_text(json.dumps(losses))
    engine.destroy()


if __name__ == "__main__":
    torch.compiler.set_stance("force_eager")  # Muon's arithmetic would be compiled for minutes
    begin()
    for job in json.loads(sys.argv[1]):
        work(**job)
    dist.barrier()
