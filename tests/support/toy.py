"""A small engine, a step of it, and a snapshot of everything that it holds."""

import logging
import os
import warnings
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn
from torch.utils._pytree import tree_flatten

RARE_DTYPES = {
    "complex": torch.complex64,
    "double_complex": torch.complex128,
    "float8": torch.float8_e4m3fn,
    "uint16": torch.uint16,
    "uint32": torch.uint32,
    "uint64": torch.uint64,
    "halves": torch.float16,
}


BF16 = {"bf16": {"enabled": True}}
TORCH_ADAMW = {"type": "AdamW", "params": {"torch_adam": True}}  # no build of C++
BF16_OPTIMIZER = BF16 | {"data_types": {"grad_accum_dtype": "fp32"}}  # DeepSpeed's class of it


def begin(**options):
    """As the launchers' ranks begin, but quietly. options: of init_distributed()."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(**options)


def is_rank_0():
    return dist.get_rank() == 0


def gathered(value):
    """Those of all ranks."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


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
        if is_rank_0():
            with open("ended", "a") as file:
                file.write(f"{name}\n")
    dist.barrier()  # a rank that left at once would cut off one still connecting


# --------------------------------------------------------------------------------------------------
# 1. an engine, and a step of it


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 7)
        self.b = nn.Linear(7, 5, bias=False)
        self.norm = nn.LayerNorm(7)
        self.frozen = nn.Linear(8, 4).requires_grad_(False)
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, x):
        # Once for every micro-batch, so a step's losses depend on the rank: a little.
        self.calls += self.training
        return self.b(self.norm(self.a(x))).pow(2).mean() + self.frozen(x).mean() * 0.1


class ExtraState(nn.Module):
    """What a module's state has beside parameters and plain buffers: extra state, as
    TransformerEngine's modules have, a tensor that comes by a hook, as bitsandbytes', and buffers
    of rare dtypes."""

    def __init__(self, dtypes):
        super().__init__()
        self.extra = torch.randn(3)
        self.scb = torch.randn(4)
        for name, dtype in dtypes.items():
            bytes_without_nan = torch.randint(64, (4 * dtype.itemsize,), dtype=torch.uint8)
            self.register_buffer(name, bytes_without_nan.view(dtype))

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


def falling(optimizer):
    """A schedule whose rate at a step is the base rate / (step + 1)."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))


def split_groups(parameters, count):
    """So many parameter groups that differ in their hyper-parameters; none is empty."""
    shares = [parameters[i::count] for i in range(count)]
    return [
        {"params": share, "lr": 1e-2 / (i + 1), "weight_decay": 0.1 * i}
        for i, share in enumerate(shares)
        if share
    ]


def two_groups(parameters):
    return torch.optim.AdamW(split_groups(parameters, 2))


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
    mpu=None,
    **more,
):
    """An engine. optimizer: makes it of the trained parameters; or DeepSpeed does, of what its
    config says; or None. zero: more of zero_optimization. more: of DeepSpeed's config."""
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
        "zero_optimization": {"stage": stage} | (zero or {}),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    parts = dict(model=model, optimizer=made, model_parameters=trained, lr_scheduler=scheduler)
    return deepspeed.initialize(**parts, config=config | more, mpu=mpu)[0]


def forward(engine, number, width=8):
    """The loss of a micro-batch."""
    x = torch.randn(1, width, generator=torch.Generator().manual_seed(number))
    return engine(x.to(next(engine.module.parameters()).dtype))


def train(engine, step, micro_batches=None, forward=forward):
    """An optimizer step; its loss, over all ranks. micro_batches: so many, of a step's share."""
    share = engine.gradient_accumulation_steps()
    group = engine.seq_data_parallel_group
    start = dist.get_rank(group) * share
    total = torch.zeros((), dtype=torch.float64)
    for i in range(start, start + (micro_batches or share)):
        loss = forward(engine, 100 * step + i)
        engine.backward(loss)
        engine.step()
        total += loss.detach()
    dist.all_reduce(total, group=group)
    return total.item() / (share * dist.get_world_size(group))


# --------------------------------------------------------------------------------------------------
# 2. what it holds, and what of it is not as it was


def snapshot(engine, states=True):
    """Everything that the engine holds, whole: {"a.weight": tensor, "a.weight fp32": ..., "groups":
    ...}. states: whether those of the optimizer, too; or a function that
    names a parameter's."""
    optimizer = torch_optimizer(engine)
    scalars = [
        {k: float(v) for k, v in state.items() if is_scalar(v)} for state in states_of(optimizer)
    ]
    counters = [engine.global_steps, engine.skipped_steps, engine.global_samples]
    counters.append(engine.micro_steps % engine.gradient_accumulation_steps())
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    scaler = scaler or getattr(engine.optimizer, "loss_scale_config", None)  # without ZeRO
    return {
        **module_state(engine.module),
        **parameters_and_states(engine, states),
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
        "steps": [known for i, known in enumerate(scalars) if known and known not in scalars[:i]],
        "scale": scaler and vars(scaler),
        "scheduler": engine.lr_scheduler and engine.lr_scheduler.state_dict(),
        "counters": counters,
    }


def torch_optimizer(engine):
    """It is inside DeepSpeed's, but without ZeRO in fp32."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def states_of(optimizer):
    """Of its parameters; some optimizers keep something beside them."""
    return [state for state in optimizer.state.values() if isinstance(state, dict)]


def is_elementwise(value):
    return isinstance(value, torch.Tensor) and value.dim() > 0


def is_scalar(value):
    return isinstance(value, int | float | torch.Tensor) and not is_elementwise(value)


def module_state(module):
    """Buffers, and what modules add to their state."""
    state = module.state_dict()
    added = {name: state[name] for name in state if "SCB" in name or "_extra" in name}
    return {name: buffer.clone() for name, buffer in module.named_buffers()} | added


def parameters_and_states(engine, states):
    if engine.zero_optimization_stage() == 0:
        return whole_states(engine)
    known = states_of(engine.optimizer.optimizer)
    if engine.zero_optimization_stage() < 3:
        # DeepSpeed looks for the states once, and not again after a load of its own.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    keys = sorted({key for state in known for key in state if is_elementwise(state[key])})
    tensors = {}
    for name, p in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([p], enabled=hasattr(p, "ds_id")):
            tensors[name] = p.detach().clone()
        if p.requires_grad:
            # None of a parameter without elements.
            tensors[f"{name} fp32"] = safe_get_full_fp32_param(p)
            for key in states(p) if callable(states) else keys * states:
                tensors[f"{name} {key}"] = safe_get_full_optimizer_state(p, key)
    return tensors


def whole_states(engine):
    """Without ZeRO, where each rank has all: the tensors that its optimizer saves."""
    tensors = dict(engine.module.named_parameters())
    saved, _ = tree_flatten(engine.optimizer.state_dict())
    tensors |= {f"{i} state": value for i, value in enumerate(saved) if torch.is_tensor(value)}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def save_truth(truth, path="truth.pt"):
    """Rank 0 saves it; then it is there for all."""
    if is_rank_0():
        torch.save(truth, path)
    dist.barrier()


def save_of_rank(truth, name="truth"):
    torch.save(truth, f"{name}.{dist.get_rank()}")


def truths_of_ranks(name="truth"):
    """What two have saved."""
    return [read_truth(f"{name}.{rank}") for rank in (0, 1)]


def read_truth(path="truth.pt"):
    return torch.load(path, weights_only=False)


def differences(truth, now):
    """The names of what is not as it was saved."""
    return [name for name in truth if not same(truth[name], now.get(name))]


def same(a, b):
    """Whether they are equal; of tensors every bit, the dtype and the shape."""
    if not isinstance(a, torch.Tensor):
        return not isinstance(b, torch.Tensor) and a == b
    if not isinstance(b, torch.Tensor) or (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    a, b = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (a, b))
    return torch.equal(a, b)
