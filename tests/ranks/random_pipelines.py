"""Random pipelines, with tied layers and layers that tensor-parallel ranks cut, saved on one
layout, and loaded on another, by random_layouts.failures_of().

As in random_layouts.py every element has a value that says which one of the whole it is."""

import random
from typing import NamedTuple

import stage_0
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import ProcessTopology
from deepspeed.utils import groups
from random_layouts import check, fill, values_of
from torch import nn

import universal
from universal.load.engine import Engine

LAYOUTS = [  # pipeline x tensor x data
    *[(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)],
    *[(4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 4, 1)],
]
AXES = (("pipe", "data", "model"), ("model", "pipe", "data"))  # of a topology, which numbers ranks
KINDS = ("1 fp32", "1 fp16", "1 bf16")
ROWS = 8  # of every weight, so that shapes tell nothing


OPTIMIZERS = {
    "two groups": stage_0.adamw,
    "adam": torch.optim.AdamW,
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9),
    "no states": lambda ps: torch.optim.SGD(ps, lr=0.01),
}


class Plan(NamedTuple):
    """layers: "plain", "buffer", or the key of a tied one. saved, loaded: of LAYOUTS. kinds,
    methods: of the engines that save and load, and how they share out layers. axes: of AXES."""

    layers: list
    optimizer: str
    saved: tuple
    loaded: tuple
    kinds: tuple
    methods: tuple
    axes: tuple = AXES[0]


# Tied layer b comes first in the pipeline, and last in the second stage.
TURNED = Plan(
    layers=["plain", "b", "plain", "plain", "plain", "a", "b", "plain"],
    optimizer="adam",
    saved=(2, 1, 1),
    loaded=(1, 1, 2),
    kinds=("1 fp32", "1 fp32"),
    methods=("uniform", "uniform"),
)


def plan(seed):
    if seed == 0:
        return TURNED
    if seed == 7:
        return TURNED._replace(saved=(2, 2, 1), kinds=("1 fp32", "1 fp32"), axes=AXES[1])
    draw = random.Random(seed)
    kinds = [draw.choice(["plain", "buffer", "a", "b"]) for _ in range(draw.randint(3, 8))]
    return Plan(
        layers=["plain", *kinds, "plain", "plain", "plain"],
        optimizer=draw.choice(list(OPTIMIZERS)),
        saved=draw.choice(LAYOUTS),
        loaded=draw.choice(LAYOUTS),
        kinds=(draw.choice(KINDS), draw.choice(KINDS)),
        methods=(draw.choice(METHODS), draw.choice(METHODS)),
        axes=draw.choice(AXES),
    )


METHODS = ("uniform", "parameters", "type:Layer")


class Layer(nn.Module):
    """Tensor-parallel ranks cut the weight by its rows, and all have the bias."""

    def __init__(self, degree):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(ROWS // degree, 4))
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return x * (1 + self.weight.mean() + self.bias.mean())


class Buffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("by", torch.ones(4))

    def forward(self, x):
        return x + self.by.to(x.dtype)


INFO = {
    "universal_checkpoint_version": 0.2,
    "pipeline_replicated_parameter_patterns": ["tied_modules"],
    "tp_replicated_parameter_patterns": [r".*\.bias"],
}


def engine_of(plan, side):
    stages, degree, data = (plan.saved, plan.loaded)[side]
    sizes = {"pipe": stages, "model": degree, "data": data}

    def spec(kind):
        if kind == "buffer":
            return LayerSpec(Buffer)
        if kind == "plain":
            return LayerSpec(Layer, degree)
        return TiedLayerSpec(kind, Layer, degree, tied_weight_attr=["weight", "bias"])

    def net():
        module = PipelineModule(
            [spec(kind) for kind in plan.layers],
            topology=ProcessTopology(plan.axes, [sizes[axis] for axis in plan.axes]),
            loss_fn=lambda out, _: out.float().pow(2).mean(),
            partition_method=plan.methods[side],
            seed_layers=False,
        )
        module.universal_checkpoint_info = INFO
        return module

    groups.mpu = None
    optimizer = OPTIMIZERS[plan.optimizer]
    return stage_0.engine_of(plan.kinds[side], side, net, optimizer, batch=4)


def step(engine):
    x = torch.ones(1, 4, dtype=next(engine.module.parameters()).dtype)
    engine.train_batch((x, x) for _ in range(99))


def oracle(engine):
    """What this rank has of a state: parts of the values of random_layouts."""
    view = Engine(engine)

    def part_of(name, key):
        if not name.endswith("weight"):
            return values_of(name, key, (4,))
        return values_of(name, key, (ROWS, 4)).chunk(view.layout().tensor)[view.tensor_rank]

    return part_of


def save(plan):
    engine = engine_of(plan, 0)
    step(engine)
    fill(engine, oracle(engine))
    engine.module.apply(lambda m: m.by.fill_(7) if isinstance(m, Buffer) else None)
    engine.save_checkpoint(".", tag="t", client_state={"layers": plan.layers})


def load(plan):
    engine = engine_of(plan, 1)
    _, client_state = universal.load_checkpoint(engine, ".", tag="t")
    assert client_state["layers"] == plan.layers
    keys = check(engine, oracle(engine))
    assert len(keys) == {"momentum": 2, "no states": 1}.get(plan.optimizer, 3), keys
    assert all((buffer == 7).all() for buffer in engine.module.buffers())
    step(engine)
