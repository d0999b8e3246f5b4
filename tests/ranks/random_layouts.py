"""Random models whose parameters are cut in every way that a universal_checkpoint_info can say,
saved on one layout and loaded on another: failures_of(names, folder), also for the engines of
random_engines.py and random_pipelines.py.

The oracle cuts with torch's chunk(), split() and cat(), and knows nothing of blocks. Before a save,
every element of the masters and states gets a value that says which one of the whole it is; after a
load, every rank compares what it has with the same values, cut for its layout."""

import importlib
import math
import random
import zlib
from typing import NamedTuple

import torch
from layouts import reset_mesh
from torch import nn

import universal
from tests.support.helpers import run_all
from tests.support.toy import begin, in_turn, is_rank_0, make
from universal.load.engine import Engine

LAYOUTS = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)]  # tensor x data
OF_ONE_DEGREE = ("widths", "affine")  # which one degree's info says, and no other's
KINDS = (
    "column vector row halves subs columns_of_subs vocabulary replicated averaged widths affine"
).split()
OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "amsgrad": lambda ps: torch.optim.AdamW(ps, amsgrad=True),
    "momentum": lambda ps: torch.optim.SGD(ps, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, momentum=0.5, centered=True),
}


class Whole(NamedTuple):
    """A parameter. sizes: of its sub-parameters, or along which dimension it is cut."""

    name: str
    kind: str
    shape: tuple
    sizes: list


class Plan(NamedTuple):
    """saved, loaded: (tensor, data) parallel ranks, with a stage of ZeRO each. silent: the loading
    model says nothing of its cuts, and the checkpoint does. converted: what is loaded is its
    conversion."""

    seed: int
    parameters: list
    optimizer: str
    groups: int
    bf16: bool
    saved: tuple
    loaded: tuple
    stages: tuple
    silent: bool
    converted: bool


def plan(seed):
    draw = random.Random(seed)
    silent = draw.random() < 0.25
    kinds = [kind for kind in KINDS if not (silent and kind in OF_ONE_DEGREE)]
    parameters = []
    for i, kind in enumerate(draw.sample(kinds, draw.randint(4, len(kinds)))):
        parameters.append(random_parameter(draw, f"p{i}_{kind}", kind))
    optimizer = draw.choice(list(OPTIMIZERS))
    stages = (draw.choice([1, 2, 3]), draw.choice([1, 2, 3]))
    return Plan(
        seed=seed,
        parameters=parameters,
        optimizer=optimizer,
        groups=1 if optimizer == "adagrad" else draw.choice([1, 2]),  # DeepSpeed makes it anew
        bf16=draw.random() < 0.3 and optimizer != "adagrad",
        saved=draw.choice(LAYOUTS),
        loaded=draw.choice(LAYOUTS),
        stages=stages,
        silent=silent,
        converted=draw.random() < 0.2,
    )


def random_parameter(draw, name, kind):
    a, b = 4 * draw.randint(1, 3), 4 * draw.randint(1, 4)
    sizes = [4 * draw.randint(1, 3) for _ in range(draw.randint(2, 4))]
    total = sum(sizes)
    shapes = {"vector": (a,), "halves": (2 * a, b)}
    shapes |= {"subs": (total, b), "columns_of_subs": (a, total)}
    shape = shapes.get(kind, (a, b))
    if kind == "widths":
        sizes = [draw.randint(4, 9) for _ in range(3)]
        shape = (sum(sizes), b)
    elif kind == "affine":
        sizes = draw.randint(0, 1)
        shape = (draw.randint(4, 11), draw.randint(4, 11))
    elif kind == "vocabulary":
        shape = (draw.randint(5, 30), b)
    return Whole(name, kind, shape, sizes)


# --------------------------------------------------------------------------------------------------
# 1. what a model says of its cuts, and the oracle


def uneven(size, ranks):
    return [size // ranks + (i < size % ranks) for i in range(ranks)]


def info_of(parameters, degree):
    """The universal_checkpoint_info of a model of this tensor-parallel degree."""
    names = {kind: [f"^{p.name}$" for p in parameters if p.kind == kind] for kind in KINDS}
    info = {
        "universal_checkpoint_version": 0.4 if names["widths"] else 0.2,
        "tp_replicated_parameter_patterns": names["replicated"],
        "parameter_to_average_patterns": names["averaged"],
        "parameter_with_row_parallelism_patterns": names["row"],
        "parameter_with_2_sub_params_cat_dim_0": names["halves"],
        "vocabulary_parameter_patterns": names["vocabulary"],
        "parameter_with_sub_params": [],
        "sub_param_shard_widths": {},
        "affine_map": {"version": 1, "params": {}},
    }
    for name, kind, shape, sizes in parameters:
        pattern = f"^{name}$"
        if kind == "vocabulary":
            info["original_vocab_size"] = shape[0]
        if kind in ("subs", "columns_of_subs", "widths"):
            dim = int(kind == "columns_of_subs")
            declared = [tuple(sizes) if i == dim else n for i, n in enumerate(shape)]
            entry = {"patterns": [pattern], "shape": declared, "partition_dim": dim}
            info["parameter_with_sub_params"].append(entry)
            info["sub_param_shard_widths"][pattern] = [
                uneven(n, degree) if kind == "widths" else [n // degree] * degree for n in sizes
            ]
        if kind == "affine":
            info["affine_map"]["params"][pattern] = affine_map(shape, sizes, degree)
    return info


def affine_map(shape, dim, degree):
    widths = uneven(shape[dim], degree)
    ranks = {}
    for rank, size in enumerate(widths):
        box = [size if i == dim else n for i, n in enumerate(shape)]
        offset = sum(widths[:rank]) * (shape[1] if dim == 0 else 1)
        place = {"source": [offset, [shape[1], 1]], "dest": [0, [box[1], 1]]}
        piece = {"shape": box, "scale": 1.0} | place
        ranks[str(rank)] = {"shape": box, "pieces": [piece]}
    return {"logical_shape": list(shape), "ranks": ranks}


def values_of(name, key, shape):
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {key}".encode()))
    return torch.rand(shape, generator=generator) + 0.1


def part_of(parameter, key, degree, rank, saved, keeps):
    """The oracle: what this rank of `degree` has of a state that `saved` ranks have saved.

    keeps: whether what belongs to a rank of this degree alone, such as padding, is kept."""
    name, kind, shape, sizes = parameter
    whole = values_of(name, key, shape)
    keeps = keeps and degree == saved
    if kind == "averaged":
        of_ranks = [values_of(name, f"{key} of {i}", shape) for i in range(saved)]
        return of_ranks[rank] if keeps else sum(of_ranks[1:], of_ranks[0]) / saved
    if kind == "replicated":
        return whole
    if kind == "row":
        return whole.chunk(degree, 1)[rank]
    if kind == "halves":
        return torch.cat([half.chunk(degree)[rank] for half in whole.chunk(2)])
    if kind in ("subs", "columns_of_subs"):
        dim = int(kind == "columns_of_subs")
        subs = whole.split(sizes, dim)
        return torch.cat([sub.chunk(degree, dim)[rank] for sub in subs], dim)
    if kind == "widths":
        subs = whole.split(sizes)
        return torch.cat([sub.split(uneven(len(sub), degree))[rank] for sub in subs])
    if kind == "affine":
        return whole.split(uneven(shape[sizes], degree), sizes)[rank]
    if kind == "vocabulary":
        rows = -(-shape[0] // (3 * degree)) * 3  # of a rank
        padding = (rows * degree - shape[0], *shape[1:])
        own = values_of(name, f"{key} padding", padding) if keeps else torch.zeros(padding)
        return torch.cat([whole, own]).chunk(degree)[rank]
    return whole.chunk(degree)[rank]


# --------------------------------------------------------------------------------------------------
# 2. what its ranks do


class Model(nn.Module):
    def __init__(self, parameters, degree, rank, silent):
        super().__init__()
        for parameter in parameters:
            shape = part_of(parameter, "fp32", degree, rank, degree, True).shape
            self.register_parameter(parameter.name, nn.Parameter(torch.randn(shape)))
        if not silent:
            self.universal_checkpoint_info = info_of(parameters, degree)

    def forward(self, x):
        return sum((p.float() ** 2).mean() for p in self.parameters()) * x.float().mean()


def engine_of(plan, side):
    degree, _ = plan.loaded if side else plan.saved
    mpu = reset_mesh(degree)
    rank = mpu.get_tensor_model_parallel_rank() if mpu else 0

    def optimizer(parameters):
        count = -(-len(parameters) // plan.groups)
        parts = [parameters[i : i + count] for i in range(0, len(parameters), count)]
        return OPTIMIZERS[plan.optimizer]([{"params": part} for part in parts])

    return make(
        plan.stages[side],
        lambda: Model(plan.parameters, degree, rank, side and plan.silent),
        optimizer,
        seed=side,
        batch=4,
        bf16={"enabled": plan.bf16},
        mpu=mpu,
    )


def step(engine):
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(torch.ones(1)))
        engine.step()


def fragments_of(engine):
    """Yields (key, what this rank has of a state of a parameter, its Fragment)."""
    view = Engine(engine)
    for flat in view.flats:
        states = {"fp32": flat.tensor.detach()} | dict(sorted(view.state_of(flat).items()))
        for key, value in states.items():
            if torch.is_tensor(value) and value.numel() == flat.tensor.numel() and key != "step":
                for fragment in flat.fragments:
                    yield key, fragment.within(value.view(-1)), fragment


def fill(engine, oracle):
    """Give every element of masters and states the value that oracle(name, key) has for it."""
    for key, values, fragment in fragments_of(engine):
        part = oracle(fragment.name, key).flatten()
        values.copy_(part[fragment.start : fragment.start + fragment.numel])
    Engine(engine).masters_to_weights()


def check(engine, oracle):
    """That they have these values, and the weights follow the masters. Returns the keys."""
    keys = set()
    for key, values, fragment in fragments_of(engine):
        part = oracle(fragment.name, key).flatten()[
            fragment.start : fragment.start + fragment.numel
        ]
        assert torch.equal(values, part), (key, fragment, values[:5], part[:5])
        if key == "fp32":
            weights = Engine(engine).weights_of(fragment)
            assert torch.equal(weights, part.to(weights.dtype)), fragment
        keys.add(key)
    return keys


def oracle_of(plan, engine, keeps=True):
    """oracle(name, key): what this rank has of a state of a parameter."""
    view = Engine(engine)
    ranks = view.layout().tensor, view.tensor_rank, plan.saved[0]
    parameters = {parameter.name: parameter for parameter in plan.parameters}
    return lambda name, key: part_of(parameters[name], key, *ranks, keeps)


def save(plan):
    engine = engine_of(plan, 0)
    step(engine)
    fill(engine, oracle_of(plan, engine))
    engine.save_checkpoint(".", tag="t", client_state={"seed": plan.seed})
    if plan.converted and is_rank_0():
        universal.convert("t", "u", strict=False)


def load(plan):
    engine = engine_of(plan, 1)
    _, client_state = universal.load_checkpoint(engine, ".", tag="u" if plan.converted else "t")
    assert client_state["seed"] == plan.seed
    keys = check(engine, oracle_of(plan, engine, not plan.converted))
    assert not Engine(engine).flats or len(keys) > 1
    step(engine)


def module_and_plan(name):
    """name: such as "random_engines 3"."""
    name, seed = name.split()
    module = importlib.import_module(name)
    return module, module.plan(int(seed))


def play(phase, *names):
    """What every rank does."""

    def play_seed(name):
        module, plan = module_and_plan(name)
        getattr(module, phase)(plan)

    begin()
    in_turn(names, play_seed)


def failures_of(names, folder):
    """{name: error} of those that were not loaded as they were saved."""
    failures = {}
    for phase, side in (("save", "saved"), ("load", "loaded")):
        for ranks in (1, 2, 3, 4):
            plans = {name: module_and_plan(name)[1] for name in names if name not in failures}
            chosen = [name for name in plans if math.prod(getattr(plans[name], side)) == ranks]
            failures |= run_all(folder, ranks, play, phase, names=chosen)
    return failures
