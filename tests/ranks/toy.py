"""What the scripts of this folder share: a small engine, odd things that a module may hold, how an
engine trains, and everything that it holds."""

import logging
import os
import warnings
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

KINDS = {
    "complex": torch.complex64,
    "double_complex": torch.complex128,
    "float8": torch.float8_e4m3fn,
}
KINDS |= {
    "uint16": torch.uint16,
    "uint32": torch.uint32,
    "uint64": torch.uint64,
    "halves": torch.float16,
}


def begin():
    """As the launchers' ranks begin, but quietly."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()


def in_turn(names, play):
    """play(name) for each, in a folder of its name. `ended` gets the names that all ranks have come
    to the end of: helpers.run_all() reads it."""
    top = Path.cwd()
    for name in names:
        Path(name).mkdir(exist_ok=True)
        os.chdir(name)
        play(name)
        os.chdir(top)
        dist.barrier()
        if dist.get_rank() == 0:
            with open("ended", "a") as file:
                file.write(f"{name}\n")
    dist.barrier()  # a rank that left at once would cut off one still connecting


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(8, 7), nn.Linear(7, 5, bias=False), nn.LayerNorm(7)
        self.frozen = nn.Linear(8, 4).requires_grad_(False)
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, x):
        self.calls += (
            self.training
        )  # once for every micro-batch, so a step's losses depend on the rank: a little
        return self.b(self.norm(self.a(x))).pow(2).mean() + self.frozen(x).mean() * 0.1


class Odd(nn.Module):
    """What a module's state has beside parameters and plain buffers: extra state, as
    TransformerEngine's modules have, a tensor that comes by a hook, as bitsandbytes', and buffers
    of the types that few have, `kinds`."""

    def __init__(self, kinds):
        super().__init__()
        self.extra, self.scb = torch.randn(3), torch.randn(4)
        for name, kind in kinds.items():
            bytes_without_nan = torch.randint(64, (4 * kind.itemsize,), dtype=torch.uint8)
            self.register_buffer(name, bytes_without_nan.view(kind))

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


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def cut(parameters, count):
    """So many parameter groups that differ in their hyper-parameters."""
    cuts = [parameters[i::count] for i in range(count)]
    return [
        {"params": cut, "lr": 1e-2 / (i + 1), "weight_decay": 0.1 * i}
        for i, cut in enumerate(cuts)
        if cut
    ]


def make(
    stage,
    net=Net,
    optimizer=adam,
    seed=1,
    zero=None,
    batch=12,
    micro=1,
    clip=0.0,
    scheduler=None,
    **more,
):
    """optimizer: makes it of the trained parameters; or DeepSpeed does, of what its config says; or
    None."""
    torch.manual_seed(seed)
    model = net()
    trained = [p for p in model.parameters() if p.requires_grad]
    made = optimizer(trained) if callable(optimizer) else None
    if isinstance(optimizer, dict):
        more["optimizer"] = optimizer
    config = {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_clipping": clip,
    }
    config |= {"zero_optimization": {"stage": stage} | (zero or {})}
    config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False} | more
    parts = dict(model=model, optimizer=made, model_parameters=trained, lr_scheduler=scheduler)
    return deepspeed.initialize(**parts, config=config)[0]


def train(engine, step, micro_batches=None, width=8):
    """An optimizer step; its loss, over all ranks."""
    count, total = engine.gradient_accumulation_steps(), torch.zeros((), dtype=torch.float64)
    dtype = next(engine.module.parameters()).dtype
    for i in range(dist.get_rank() * count, dist.get_rank() * count + (micro_batches or count)):
        x = torch.randn(1, width, generator=torch.Generator().manual_seed(100 * step + i))
        loss = engine(x.to(dtype))
        engine.backward(loss)
        engine.step()
        total += loss.detach()
    dist.all_reduce(total)
    return total.item() / 12


def is_slice(value):
    return isinstance(value, torch.Tensor) and value.dim() > 0


def held(engine, states=True):
    """Everything that the engine holds, whole: {"a.weight": tensor, "a.weight fp32": ..., "groups":
    ...}. states: of which parameters those of the optimizer, too: a function of a parameter that
    returns their names, or of all or none."""
    found = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    found |= {
        key: value
        for key, value in engine.module.state_dict().items()
        if "SCB" in key or "_extra" in key
    }
    optimizer = engine.optimizer.optimizer
    known = list(optimizer.state.values())
    if (
        engine.zero_optimization_stage() < 3
    ):  # DeepSpeed looks for the states once, and not again after a load
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    keys = (
        sorted({key for state in known for key, value in state.items() if is_slice(value)})
        if states
        else []
    )
    for name, p in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([p], enabled=hasattr(p, "ds_id")):
            found[name] = p.detach().clone()
        if p.requires_grad:
            found[f"{name} fp32"] = safe_get_full_fp32_param(
                p
            )  # None of a parameter without elements
            for key in states(p) if callable(states) else keys:
                found[f"{name} {key}"] = safe_get_full_optimizer_state(p, key)
    found["groups"] = [
        {k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups
    ]
    scalars = [
        {k: float(v) for k, v in state.items() if not is_slice(v) and v is not None}
        for state in known
    ]
    found["steps"] = [
        of_one for i, of_one in enumerate(scalars) if of_one and of_one not in scalars[:i]
    ]
    found["scale"] = (
        vars(engine.optimizer.loss_scaler) if hasattr(engine.optimizer, "loss_scaler") else None
    )
    found["scheduler"] = engine.lr_scheduler and engine.lr_scheduler.state_dict()
    found["counters"] = [engine.global_steps, engine.skipped_steps, engine.global_samples]
    found["counters"].append(engine.micro_steps / engine.gradient_accumulation_steps())
    return found


def keep(thing, path):
    """Rank 0 saves it; then it is there for all."""
    if dist.get_rank() == 0:
        torch.save(thing, path)
    dist.barrier()


def same(a, b):
    if not isinstance(a, torch.Tensor):
        return a == b
    if not isinstance(b, torch.Tensor) or (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(
        a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
    )
