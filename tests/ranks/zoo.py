"""Trains a small odd model with DeepSpeed: zoo.py '[{"name": "a", "stage": 1, "optimizer": "AdamW"}, ...]', job by job.

A job trains 6 steps and, after the third, saves <name>/global_step3 and <name>/truth.pt: what the live engine held.
With "load" it goes on from <name>/<load> instead, in a model of another seed; "how": by our loader, or by DeepSpeed's
universal one, "stock", or by that and "mend"; with "again" it saves that as <name>/<label>_again. Losses go to
<name>/<label>.json.
"""

import json
import os
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn
from toy import begin

import universal

SAVED, STEPS, BATCH = 3, 6, 12
KEYS = ["a-b", "with space", "brackets[0]", "plus+", "ünï", "sla/sh", "star*", "quote'\"", "back\\slash"]
STATES = {
    "AdamW": ["exp_avg", "exp_avg_sq"],
    "amsgrad": ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"],
    "momentum": ["momentum_buffer"],
    "SGD": [],
    "Adagrad": ["sum"],
    "RMSprop": ["square_avg", "momentum_buffer", "grad_avg"],
    "Lion": ["exp_avg"],
    "Muon": ["momentum_buffer", "exp_avg", "exp_avg_sq"],  # the one for matrices, the others for the rest
    "CPUAdam": ["exp_avg", "exp_avg_sq"],
    "FusedAdam": ["exp_avg", "exp_avg_sq"],
}


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            a, b = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                update = m.lerp(p.grad, 1 - a).sign() + group["weight_decay"] * p
                p.sub_(group["lr"] * update)
                m.lerp_(p.grad, 1 - b)


def make_optimizer(name, groups):
    return {
        "AdamW": lambda: torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.7)),
        "amsgrad": lambda: torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.7), amsgrad=True),
        "momentum": lambda: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
        "SGD": lambda: torch.optim.SGD(groups, lr=1e-2),
        "Adagrad": lambda: torch.optim.Adagrad(groups, lr=1e-2),
        "RMSprop": lambda: torch.optim.RMSprop(groups, lr=1e-3, momentum=0.9, centered=True),
        "Lion": lambda: Lion(groups, lr=1e-3),
        "CPUAdam": lambda: deepspeed.ops.adam.DeepSpeedCPUAdam(groups, lr=1e-2, betas=(0.9, 0.7)),
        "FusedAdam": lambda: deepspeed.ops.adam.FusedAdam(groups, lr=1e-2, betas=(0.9, 0.7)),
    }[name]()


class Odd(nn.Module):
    """What a module's state has beside parameters and buffers: extra state, as TransformerEngine's modules have, and a
    tensor that comes by a hook, as bitsandbytes'. And buffers of the types that few have."""

    def __init__(self):
        super().__init__()
        self.extra, self.scb = torch.randn(3), torch.randn(4)
        self.register_buffer("angles", torch.polar(torch.ones(4), torch.randn(4)))
        self.register_buffer("scale", torch.randn(4).to(torch.float8_e4m3fn))
        self.register_buffer("table", torch.randint(0, 99, (4,)).to(torch.uint16))

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}SCB"] = self.scb

    def _load_from_state_dict(self, state, prefix, *args):
        self.scb = state.pop(f"{prefix}SCB", self.scb)
        super()._load_from_state_dict(state, prefix, *args)


class Zoo(nn.Module):
    def __init__(self, scalar, keys):
        super().__init__()
        self.first, self.tied = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(8, 5).requires_grad_(False)
        self.frozen.weight = nn.Parameter(torch.randn(5, 12)[:, :8], requires_grad=False)  # not contiguous
        self.norm = self.same_norm = nn.BatchNorm1d(7, affine=False)
        self.odd_module = Odd()
        self.rows = nn.Parameter(torch.randn(9, 7))  # what is normalised belongs to no batch, hence to no rank
        self.single = nn.Parameter(torch.randn(1))
        self.unused = nn.Parameter(torch.randn(2, 3))
        self.scalar = nn.Parameter(torch.randn(())) if scalar else None
        self.odd = nn.ParameterDict({key: torch.randn(1 + i % 3) for i, key in enumerate(keys)})
        self.register_buffer("mask", torch.rand(5) < 0.7)
        self.register_buffer("scratch", torch.randn(4), persistent=False)

    def forward(self, x, y):
        out = self.frozen(self.tied(self.first(x).relu())).tanh() * self.mask
        rest = self.norm(self.rows.float()).pow(3).mean() + sum(p.cos().mean() for p in self.odd.values()) / len(
            self.odd
        )
        rest = rest + (0 if self.scalar is None else self.scalar)
        return (out.mean(-1) * self.single + rest - y).float().pow(2).mean()


def groups_of(model, count):
    """Parameter groups that differ in their hyper-parameters. Frozen parameters belong to none."""
    taken = [p for p in model.parameters() if p.requires_grad]
    cuts = [taken[i::count] for i in range(count)]
    return [{"params": cut, "lr": 1e-2 / (i + 1), "weight_decay": 0.1 * i} for i, cut in enumerate(cuts)]


def states_of(p, optimizer, stage):
    """The optimizer states that DeepSpeed can gather of a parameter. Muon's are one for matrices, two for the rest."""
    if optimizer != "Muon":
        return STATES[optimizer]
    return [] if stage < 3 else STATES["Muon"][:1] if p.use_muon else STATES["Muon"][1:]


def dump_truth(engine, path, optimizer, stage):
    """What rank 0 sees of the live engine: whole parameters, whole states, step counts, module."""
    if stage < 3:  # DeepSpeed looks for the states after the first group's first step: other groups have none then
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    truth = {"states": {}, "frozen": {}, "module": {}}
    for name, p in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([p], enabled=stage == 3):
            truth["module" if p.requires_grad else "frozen"][name] = p.detach().cpu().clone()
        if p.requires_grad:
            truth["states"][name] = {"fp32": safe_get_full_fp32_param(p).cpu()}
            for key in states_of(p, optimizer, stage):
                truth["states"][name][key] = safe_get_full_optimizer_state(p, key).cpu()
    truth["buffers"] = {name: b.cpu().clone() for name, b in engine.module.named_buffers()}
    truth["extra"] = {
        key: t.clone() for key, t in engine.module.state_dict().items() if "SCB" in key or "_extra" in key
    }
    groups = engine.optimizer.optimizer.param_groups
    truth["groups"] = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    truth["steps"] = [state["step"] for state in engine.optimizer.optimizer.state.values() if "step" in state]
    truth["scheduler"] = engine.lr_scheduler.state_dict()
    truth["counters"] = (engine.global_steps, engine.skipped_steps, engine.micro_steps, engine.global_samples)
    truth["scale"] = vars(engine.optimizer.loss_scaler) if hasattr(engine.optimizer, "loss_scaler") else None
    if dist.get_rank() == 0:
        torch.save(truth, path)
    dist.barrier()


def work(
    name, stage, optimizer, dtype="fp32", groups=1, scalar=False, keys=KEYS, load=None, label="losses", zero=None,
    accumulate=None, how="ours", empty=0, options=None, wider=0, rename=False,
    again=False,
):  # fmt: skip
    torch.manual_seed(2 if load else 1)
    rank, ranks, folder = dist.get_rank(), dist.get_world_size(), Path(name)
    config = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // ranks,
        "zero_optimization": {"stage": stage} | (zero or {}),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "data_types": {"grad_accum_dtype": accumulate},
        "bf16": {"enabled": dtype == "bf16"},
        "checkpoint": {"load_universal": how != "ours"},
    }
    model = Zoo(scalar, keys)
    if wider:
        model.rows = nn.Parameter(torch.randn(9, wider))
    if rename:
        model.renamed = model.rows
        del model.rows
    for p in model.parameters():
        p.use_muon = p.dim() == 2
    if optimizer == "Muon":  # DeepSpeed makes it, and its groups
        config["optimizer"] = {"type": "Muon", "params": {"lr": 1e-2, "weight_decay": 0.1}}
        made, trained = None, groups_of(model, 1)[0]["params"]
    else:
        made, trained = make_optimizer(optimizer, groups_of(model, groups) + [{"params": []}] * empty), None
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=made, model_parameters=trained, config=config,
        lr_scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: min(1, (step + 1) / STEPS)),
    )  # fmt: skip
    if load and how != "ours":
        assert engine.load_checkpoint(folder, tag=load)[0] is not None
        if how == "mend":
            universal.mend(engine, folder / load)
    elif load:
        try:
            options = {"load_dir": folder, "tag": load} | (options or {})
            _, client_state = universal.load_checkpoint(engine, **options)
        except universal.CheckpointError as error:
            (folder / f"{label}.refused.{rank}").write_text(str(error))
            return engine.destroy()
        assert client_state["word"] == "client state"
        held = {os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
        assert not [path for path in held if path.endswith(".pt")]  # another checkpoint may get this path
    if load:
        dump_truth(engine, folder / f"{label}.pt", optimizer, stage)
        if again:
            engine.save_checkpoint(folder, tag=f"{label}_again")
    losses = []
    for step in range(SAVED if load else 0, STEPS):
        x = torch.randn(BATCH, 9, generator=torch.Generator().manual_seed(step))
        x, y = x[rank::ranks, :8], x[rank::ranks, 8]
        loss = engine(x.to(engine.device, torch.bfloat16 if dtype == "bf16" else torch.float32), y.to(engine.device))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append(mean.item() / ranks)
        if not load and step + 1 == SAVED:
            engine.save_checkpoint(folder, tag=f"global_step{SAVED}", client_state={"word": "client state"})
            dump_truth(engine, folder / "truth.pt", optimizer, stage)
    if rank == 0:
        (folder / f"{label}.json").write_text(json.dumps(losses))
    engine.destroy()


if __name__ == "__main__":
    torch.compiler.set_stance("force_eager")  # Muon's arithmetic would be compiled for minutes
    begin()
    for job in json.loads(sys.argv[1]):
        work(**job)
    dist.barrier()
