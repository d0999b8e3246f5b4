"""Every kind of engine that DeepSpeed can build on a CPU, saved and loaded: `make engines`.

    python -m measure.engines --output out/engines.txt [words of a row's name...]

2 ranks train for 3 steps, save, and go on for 4. Another engine loads that: DeepSpeed alone on 2
ranks, and through universal.install() on 2, 1 and 3. A number is the largest difference of the next
4 losses to those of the run that went on; a letter is an error, or a warning beside a number. Needs
g++ for DeepSpeed's own Adam.

Every number comes from processes of its own.
"""

import contextlib
import functools
import io
import json
import multiprocessing
import os
import re
import shutil
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder, PinMemoryBuilder
from deepspeed.pipe import PipelineModule
from torch import nn

import universal.load.loader
from measure import options
from measure.logs import brief, write_table
from tests.support import ROOT, toy
from tests.support.ranks import deepspeed, last_error, launch, run

WORK = ROOT / "runs" / "engines"
BATCH = 12
SAVED = 3  # steps before the save
STEPS = 7
LIMIT = 300  # seconds, of a launch
BUILD = 1800  # of DeepSpeed's extensions in C++, once
SILENCE = 40  # seconds that a rank waits for another


class Column(NamedTuple):
    ranks: int
    through_install: bool


COLUMNS = {
    "DeepSpeed alone": Column(2, False),
    "2 ranks": Column(2, True),
    "1 rank": Column(1, True),
    "3 ranks": Column(3, True),
}


class Net(nn.Module):
    """Matrices, vectors and a buffer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.norm = nn.LayerNorm(32)
        self.second = nn.Linear(32, 16, bias=False)
        self.third = nn.Linear(16, 16)
        self.register_buffer("scale", torch.rand(()))

    def forward(self, x):
        hidden = self.norm(self.first(x)).relu()
        return (self.second(hidden) + self.third(x) * self.scale).float().pow(2).mean()


class Experts(Net):
    def __init__(self):
        super().__init__()
        self.experts = MoE(16, nn.Linear(16, 16), num_experts=2, min_capacity=0)

    def forward(self, x):
        return super().forward(x + self.experts(x[None])[0][0])


class MixedDtypes(Net):
    def __init__(self):
        super().__init__()
        self.second = self.second.bfloat16()

    def forward(self, x):
        hidden = self.norm(self.first(x)).relu().to(self.second.weight.dtype)
        return (self.second(hidden).float() + self.third(x) * self.scale).pow(2).mean()


def mean_square(out, _):
    return out.float().pow(2).mean()


def pipeline():
    layers = [nn.Linear(16, 16, bias=False) for _ in range(3)]
    return PipelineModule(layers, num_stages=dist.get_world_size(), loss_fn=mean_square)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


class Kind(NamedTuple):
    """An engine. more, zero: of DeepSpeed's config, and of its zero_optimization. optimizer: makes
    one, or is what the config says of it. before(model), after(engine): what else is done to it.
    zero_init: whether the model is made in zero.Init."""

    stage: int
    more: dict[str, Any] = {}
    zero: dict[str, Any] = {}
    net: Callable = Net
    optimizer: Any = adamw
    before: Callable = nn.Module.train
    after: Callable = str
    scheduler: Callable | None = None
    zero_init: bool = False


BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
IMMEDIATE = {"bf16": {"enabled": True, "immediate_grad_update": True}} | SUMS
MASTERS = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
CPU = {"device": "cpu"}
NVME = {"device": "nvme", "nvme_path": "nvme"}  # any folder
HALF_ON_CPU = {"offload_optimizer": CPU | {"ratio": 0.5}}
SUPER_OFFLOAD = {"offload_optimizer": CPU | {"super_offload": True}}
ADAMW = {"type": "AdamW", "params": {"lr": 0.01}}
MUON = {"type": "Muon", "params": {"lr": 0.01, "torch_adam": True}}
WHOLE = {"reduce_scatter": False}  # as Muon wants it
MOMENTUM_IN_MEMORY = WHOLE | {"save_muon_momentum_buffer_in_memory": True}
ONE_CYCLE = {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 4}
TOP_K = {
    "topk_ratio": 0.25,
    "select_strategy": "step",
    "select_interval": 4,
    "update_interval": 4,
    "full_warm_up_rounds": 0,
    "overlap_step": False,
}
ZENFLOW = {"zenflow": TOP_K, "offload_optimizer": CPU, "overlap_comm": True}
NOT_SERIALIZED = {"checkpoint": {"checkpoint_serialization": False}}


def lambda_lr(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))


def adamw_of_experts(parameters):
    group = {"params": parameters, "name": "all"}
    return adamw(split_params_into_different_moe_groups_for_optimizer(group))


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def whole_modules(model):
    deepspeed.utils.set_z3_leaf_modules(model, [nn.LayerNorm])


def compiled(engine):
    engine.compile(backend="eager")


def written_by(kind, **more):
    return {"checkpoint": {"writer": {"type": kind, **more}}}


def kinds(ranks):
    """Returns the Kind of each row."""
    rows = {}
    for stage in range(4):
        rows |= {
            f"ZeRO-{stage}": Kind(stage),
            f"ZeRO-{stage}, bf16": Kind(stage, BF16),
            f"ZeRO-{stage}, fp16": Kind(stage, FP16),
            f"ZeRO-{stage}, torch_autocast": Kind(stage, AUTOCAST),
            f"ZeRO-{stage}, Muon": Kind(stage, zero=WHOLE, optimizer=MUON),
        }
    for stage in (1, 2, 3):
        offload = Kind(stage, zero={"offload_optimizer": CPU})
        zenflow = Kind(stage, BF16, ZENFLOW, optimizer=ADAMW)
        rows |= {
            f"ZeRO-{stage}, masters and states in bf16": Kind(stage, {"bf16": MASTERS}),
            f"ZeRO-{stage}, offload_optimizer": offload,
            f"ZeRO-{stage}, offload_optimizer, DeepSpeed's Adam": offload._replace(optimizer=ADAMW),
            f"ZeRO-{stage}, ZenFlow": zenflow,
        }
    return rows | {
        "ZeRO-1, bf16 summed in fp32": Kind(1, BF16 | SUMS),
        "ZeRO-1, bf16 summed in fp32, Muon": Kind(1, BF16 | SUMS, WHOLE, optimizer=MUON),
        "ZeRO-1, immediate_grad_update": Kind(1, IMMEDIATE),
        "ZeRO-3, Muon, its momentum in memory": Kind(3, zero=MOMENTUM_IN_MEMORY, optimizer=MUON),
        "ZeRO-3, zero.Init": Kind(3, zero_init=True),
        "ZeRO-3, hpZ": Kind(3, zero={"zero_hpz_partition_size": ranks}),
        "ZeRO-3, sub_group_size": Kind(3, zero={"sub_group_size": 100}),
        "ZeRO-3, leaf modules": Kind(3, before=whole_modules),
        "ZeRO-3, offload_param": Kind(3, zero={"offload_optimizer": CPU, "offload_param": CPU}),
        "ZeRO-3, offload_optimizer.ratio": Kind(3, zero=HALF_ON_CPU, optimizer=ADAMW),
        "ZeRO-3, offload_param to NVMe": Kind(3, zero={"offload_param": NVME}),
        "ZeRO-3, offload_optimizer to NVMe": Kind(3, zero={"offload_optimizer": NVME}),
        "ZeRO-3, SuperOffload": Kind(3, BF16, SUPER_OFFLOAD, optimizer=ADAMW),
        "ZeRO-3, MiCS": Kind(3, zero={"mics_shard_size": 1}),
        "ZeRO-3, quantized weights": Kind(3, BF16, {"zero_quantized_weights": True}),
        "ZeRO-2, round_robin_gradients": Kind(2, zero={"round_robin_gradients": True}),
        "ZeRO-2, elastic_checkpoint": Kind(2, zero={"elastic_checkpoint": True}),
        "ZeRO-2, engine.compile()": Kind(2, after=compiled),
        "ZeRO-1, float64": Kind(1, before=nn.Module.double),
        "ZeRO-1, modules of two dtypes": Kind(1, net=MixedDtypes),
        "ZeRO-3, modules of two dtypes": Kind(3, net=MixedDtypes),
        "ZeRO-1, LambdaLR": Kind(1, scheduler=lambda_lr),
        "ZeRO-1, OneCycle": Kind(1, {"scheduler": {"type": "OneCycle", "params": ONE_CYCLE}}),
        "ZeRO-2, SGD with momentum": Kind(2, optimizer=momentum),
        "ZeRO-2, Adagrad": Kind(2, optimizer=torch.optim.Adagrad),
        "ZeRO-0, OneBitAdam": Kind(0, optimizer={"type": "OneBitAdam", "params": {"lr": 0.01}}),
        "ZeRO-0, Lamb": Kind(0, optimizer={"type": "Lamb", "params": {"lr": 0.01}}),
        "ZeRO-0, hybrid engine": Kind(0, {"hybrid_engine": {"enabled": True}}),
        "ZeRO-3, python writer": Kind(3, written_by("python")),
        "ZeRO-3, fast writer": Kind(3, written_by("fast")),
        "ZeRO-3, decoupled writer": Kind(3, written_by("python", decoupled=True)),
        "ZeRO-1, python writer": Kind(1, written_by("python")),
        "ZeRO-2, checkpoint_serialization false": Kind(2, NOT_SERIALIZED),
        "ZeRO-1, pipeline": Kind(1, net=pipeline),
        "ZeRO-0, pipeline": Kind(0, net=pipeline),
        "ZeRO-0, pipeline, bf16": Kind(0, BF16, net=pipeline),
        "ZeRO-0, progressive layer drop": Kind(0, {"progressive_layer_drop": {"enabled": True}}),
        "ZeRO-0, sparse gradients": Kind(0, {"sparse_gradients": True}),
        "ZeRO-2, experts": Kind(2, net=Experts, optimizer=adamw_of_experts),
    }


def build(kind, seed):
    """The engine of a kind."""

    def net():
        of_zero = {"train_batch_size": BATCH, "zero_optimization": {"stage": kind.stage}}
        with deepspeed.zero.Init(config_dict_or_path=of_zero, enabled=kind.zero_init):
            model = kind.net()
        kind.before(model)
        for parameter in model.parameters():
            parameter.use_muon = parameter.dim() == 2
        return model

    config = {"batch": BATCH, "clip": 1.0, "scheduler": kind.scheduler, "zero": kind.zero}
    engine = toy.make(kind.stage, net, kind.optimizer, seed, **config, **kind.more)
    kind.after(engine)
    return engine


def train(engine, steps):
    """The losses of these steps. The samples belong to the step, whatever the ranks."""
    if not isinstance(engine.module, PipelineModule):
        forward = functools.partial(toy.forward, width=16)
        return [toy.train(engine, step, forward=forward) for step in steps]
    losses = []
    for step in steps:
        x = torch.randn(BATCH, 1, 16, generator=torch.Generator().manual_seed(step))
        x = x.to(next(engine.module.parameters()).dtype)
        losses.append(engine.train_batch((row, row) for row in x).item())
    return losses


def build_extensions():
    """Builds DeepSpeed's extensions in a rank of its own, before all else: it takes minutes,
    once."""
    for builder in (CPUAdamBuilder(), PinMemoryBuilder(), AsyncIOBuilder()):
        if builder.is_compatible():  # NVMe wants libaio
            builder.load(verbose=False)


def begin():
    """Prepares a rank, once."""
    os.environ |= {"CROSS_RANK": "0", "CROSS_SIZE": "1"}  # DeepSpeed's writers ask for them
    get_accelerator().is_fp16_supported = lambda: True
    torch.compiler.set_stance("force_eager")  # Muon's arithmetic would be compiled for minutes
    toy.begin(timeout=timedelta(seconds=SILENCE))


@contextlib.contextmanager
def without_children():
    """The processes that this block has started end with it; a decoupled writer's would live on."""
    try:
        yield
    finally:
        for child in multiprocessing.active_children():
            child.terminate()
            child.join()


def play(column, name):
    """Plays a row on a rank. Without a column, it trains and saves."""
    begin()
    if column and COLUMNS[column].through_install:
        universal.install()
    printed = io.StringIO()
    folder = WORK / re.sub(r"[^\w.-]+", "_", name)
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    with contextlib.redirect_stdout(printed), without_children():
        losses = losses_of(kinds(dist.get_world_size())[name], column)
    warned = re.findall(r"universal: (WARNING: no.*)", printed.getvalue())
    dist.barrier()
    if dist.get_rank() == 0:
        (WORK / "outcome").write_text(json.dumps([losses, warned]))


def losses_of(kind, column):
    """Returns the losses of the steps after the save, of an engine that has saved or one that has
    loaded."""
    engine = build(kind, seed=2 if column else 1)
    if column:
        path, _ = engine.load_checkpoint(".", tag="t")
        assert path, "nothing was loaded"
    else:
        train(engine, range(SAVED))
        engine.save_checkpoint(".", tag="t")
    losses = train(engine, range(SAVED, STEPS))
    engine.destroy()
    return losses


def outcome(ranks, column, name):
    """Returns the losses and the warnings of a row, or the error. Each has processes of its own,
    because engines leave something behind that others stumble over."""
    (WORK / "outcome").unlink(missing_ok=True)
    result = launch(WORK, ranks, play, column, name, limit=LIMIT, grace=10)
    if (WORK / "outcome").exists():
        return json.loads((WORK / "outcome").read_text())
    error = brief(last_error(result.err))
    print(column or "save", name, error, sep=": ", flush=True)
    return error


def measure(names):
    """Returns the table: for each row and column the difference, or the error, and warnings."""
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    rows = {}
    for name in names:
        saved = outcome(2, None, name)
        rows[name] = dict.fromkeys(COLUMNS, [saved])
        if isinstance(saved, list):
            for column, (ranks, _) in COLUMNS.items():
                rows[name][column] = cell(saved, outcome(ranks, column, name))
    return rows


def cell(saved, loaded):
    if isinstance(loaded, str):
        return [loaded]
    wanted, _ = saved
    losses, warned = loaded
    gap = max(abs(a - b) for a, b in zip(losses, wanted, strict=True))
    return [gap, *warned]


def main():
    parser = options.parser(__doc__, "out/engines.txt")
    parser.add_argument("words", nargs="*")
    args = parser.parse_args()
    run(ROOT, 1, build_extensions, limit=BUILD)
    names = [name for name in kinds(2) if all(word in name for word in args.words)]
    print(write_table(args.output, "engine", measure(names)))


if __name__ == "__main__":
    main()
