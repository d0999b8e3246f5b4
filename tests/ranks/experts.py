"""Lives of models with experts, natively parallel ones of deepspeed.moe: play("save", ...) trains
and saves, play("load", ...) loads into an engine of another seed, compares all that it holds with
what was saved, and trains on."""

import json
import os
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.utils import groups
from torch import nn

import universal
from tests.support import toy
from tests.support.toy import (
    begin,
    differences,
    falling,
    gathered,
    in_turn,
    make,
    read_truth,
    same,
    save_truth,
)

BATCH = 24  # rows of a step
TOKENS = 5  # of a row
WIDTH = 8
SAVED = 3  # the step after which a life saves
STEPS = 6


class Life(NamedTuple):
    """How an engine is made. net: arguments of Net."""

    stage: int = 2
    ep_size: int | tuple = 2
    net: dict = {}
    zero: dict = {}
    data_first: bool = False
    dtype: str = "fp32"
    accumulate: str | None = None
    frozen: str | None = None
    max_group_size: int | None = None


class Expert(nn.Module):
    def __init__(self, buffer):
        super().__init__()
        self.up = nn.Linear(WIDTH, 11)
        self.down = nn.Linear(11, WIDTH, bias=False)
        self.register_buffer("scale", torch.ones(3) if buffer else None)

    def forward(self, x):
        y = self.down(torch.tanh(self.up(x)))
        return y if self.scale is None else y * self.scale.mean()


class Net(nn.Module):
    """experts: the number of each layer's experts."""

    def __init__(self, ep_size, experts=(4, 4), buffer=False):
        super().__init__()
        self.inputs = nn.Linear(WIDTH, WIDTH)
        self.outputs = nn.Linear(WIDTH, WIDTH)
        self.moe = nn.ModuleList()
        sizes = ep_size if isinstance(ep_size, tuple) else [ep_size] * len(experts)
        for count, size in zip(experts, sizes, strict=True):
            layer = MoE(
                WIDTH,
                Expert(buffer),
                num_experts=count,
                ep_size=size,
                capacity_factor=1.0,
                min_capacity=0,
                drop_tokens=False,
                use_rts=False,
            )
            self.moe.append(layer)

    def forward(self, x, targets):
        x = self.inputs(x)
        balance = 0.0
        for layer in self.moe:
            y, layer_balance, _ = layer(x)
            x = x + y
            balance = balance + layer_balance
        return (self.outputs(x) - targets).float().pow(2).mean() + 0.01 * balance


def global_name(model, name, data_first):
    """The name of a tensor on one rank with all experts. Written without a look at universal's."""
    words = name.split(".")
    if "deepspeed_experts" in words:
        at = words.index("deepspeed_experts") + 1
        layer = model.get_submodule(".".join(words[: words.index("deepspeed_moe")]))
        rank = dist.get_rank()
        place = rank % layer.ep_size
        if data_first:
            place = rank // (dist.get_world_size() // layer.ep_size)
        words[at] = str(place * layer.num_local_experts + int(words[at]))
    return ".".join(words)


def initialize(model, seed, data_first):
    """Every tensor by its global name, so that no expert is like another."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        name = global_name(model, name, data_first)
        key = sum(ord(letter) * 31**i for i, letter in enumerate(name)) % 2**31
        generator = torch.Generator().manual_seed(key + seed)
        scale = 0.6 if tensor.dim() > 1 else 0.1
        tensor.data.copy_(torch.randn(tensor.shape, generator=generator) * scale)


def param_groups(trained, max_group_size):
    """Matrices decay, vectors do not; DeepSpeed splits off the experts."""
    matrices = [parameter for parameter in trained if parameter.dim() > 1]
    vectors = [parameter for parameter in trained if parameter.dim() == 1]
    kinds = [
        {"params": matrices, "name": "matrices", "weight_decay": 0.1, "lr": 1e-2},
        {"params": vectors, "name": "vectors", "weight_decay": 0.0, "lr": 5e-3},
    ]
    options = {"max_group_size": max_group_size} if max_group_size else {}
    split = split_params_into_different_moe_groups_for_optimizer(kinds, **options)
    return [group for group in split if group["params"]]


def forget_experts():
    """Those of another engine."""
    for name in ("EXPERT_PARALLEL", "EXPERT_DATA_PARALLEL"):
        getattr(groups, f"_{name}_GROUP").clear()
        getattr(groups, f"_{name}_GROUP_RANKS").clear()


def make_engine(life, seed):
    forget_experts()

    def net():
        model = Net(life.ep_size, **life.net)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not (life.frozen and life.frozen in name))
        initialize(model, seed, life.data_first)
        return model

    return make(
        life.stage,
        net,
        lambda trained: torch.optim.AdamW(param_groups(trained, life.max_group_size)),
        zero=life.zero,
        batch=BATCH,
        micro=2,
        clip=0.05,
        scheduler=falling,
        use_data_before_expert_parallelism=life.data_first,
        bf16={"enabled": life.dtype == "bf16"},
        data_types={"grad_accum_dtype": life.accumulate},
    )


def snapshot(engine, life):
    """All that the ranks hold, by global names. What several ranks hold must be equal on all."""
    state = toy.snapshot(engine)
    groups = state.pop("groups")
    del state["scale"], state["scheduler"]  # the latter has an entry for each group
    settings = {(g["lr"], g["weight_decay"], g["initial_lr"]) for g in groups}
    everything = {"hyperparameters": sorted(settings)}
    own = {}
    for key, value in state.items():
        name, space, kind = key.partition(" ")
        # DeepSpeed looks for masters and states in wrong places with round_robin_gradients.
        if not (kind and life.zero.get("round_robin_gradients")):
            own[global_name(engine.module, name, life.data_first) + space + kind] = value
    for of_rank in gathered(own):
        for key, value in of_rank.items():
            assert same(everything.setdefault(key, value), value), f"ranks differ in {key}"
    return everything


def forward(engine, number):
    generator = torch.Generator().manual_seed(number)
    micro = engine.train_micro_batch_size_per_gpu()
    rows = torch.randn(micro, TOKENS, 2 * WIDTH, generator=generator)
    dtype = next(engine.module.parameters()).dtype
    return engine(*rows.to(dtype).split(WIDTH, dim=-1))


def train(engine, steps):
    """The losses of these steps, over all ranks."""
    return [toy.train(engine, step, forward=forward) for step in steps]


def save(life):
    """Train, save, and train on. truth.pt gets the state, and the losses that follow."""
    engine = make_engine(life, seed=1)
    train(engine, range(SAVED))
    engine.save_checkpoint(".", tag="t", client_state={"word": "hello"})
    truth = snapshot(engine, life)
    losses = train(engine, range(SAVED, STEPS))
    save_truth([truth, losses])
    engine.destroy()


def load(life):
    """Returns what load_checkpoint() refused with; or the names that differ, and the loss's gap."""
    engine = make_engine(life, seed=77)
    try:
        _, client_state = universal.load_checkpoint(engine, ".", "t", timeout=60)
    except universal.CheckpointError as error:
        return {"refused": str(error)}
    assert client_state["word"] == "hello"
    truth, wanted = read_truth()
    state = snapshot(engine, life)
    differing = sorted({*differences(truth, state), *(state.keys() - truth.keys())})
    losses = train(engine, range(SAVED, STEPS))
    gap = max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True))
    engine.destroy()
    return {"differences": differing, "gap": gap}


def play(act, lives):
    """On each rank. lives: {name: (folder, Life)}. An outcome goes to NAME.RANK.json."""
    begin()
    top = os.getcwd()

    def play_life(name):
        folder, life = lives[name]
        os.makedirs(Path(top, folder), exist_ok=True)
        os.chdir(Path(top, folder))
        outcome = act(life)
        Path(top, f"{name}.{dist.get_rank()}.json").write_text(json.dumps(outcome))

    in_turn(lives, play_life)
