"""Without ZeRO and with it: what goes on, and what a line refuses. A kind of engine is a stage
and a precision."""

from pathlib import Path
from unittest import mock

import pytest
import torch
from deepspeed.runtime import engine as deepspeed_engine
from torch import nn

import universal
from tests.support.case import case, convert, printed, refused
from tests.support.helpers import fp16_is
from tests.support.toy import (
    BF16,
    Net,
    differences,
    falling,
    make,
    read_truth,
    save_truth,
    snapshot,
    train,
)

FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}}
PRECISIONS = {
    "fp32": {},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "bf16": BF16,
    "flat bf16": BF16,  # FP16_Optimizer
    "fp16": FP16,
    "flat fp16": FP16,
}
STEPS = (3, 4, 5)  # those after the save


def adamw(parameters):
    """With weight decay for matrices alone."""
    matrices = {"params": [p for p in parameters if p.dim() == 2], "weight_decay": 0.1}
    return torch.optim.AdamW([matrices, {"params": [p for p in parameters if p.dim() < 2]}], 0.01)


def engine_of(kind, seed, net=Net, optimizer=adamw, **options):
    """With a frozen layer, a buffer, and two parameter groups."""
    stage, _, precision = kind.partition(" ")
    fp16_is(True)()
    fused = torch.optim.AdamW if precision.startswith("flat") else deepspeed_engine.FusedAdam
    options |= PRECISIONS[precision]
    with mock.patch.object(deepspeed_engine, "FusedAdam", fused):
        return make(int(stage), net, optimizer, seed, clip=1.0, scheduler=falling, **options)


def save(kind, folder="."):
    Path(folder).mkdir(exist_ok=True)
    engine = engine_of(kind, seed=1)
    for step in range(3):
        train(engine, step)
    engine.save_checkpoint(folder, tag="t", client_state={"word": kind})
    save_truth(snapshot(engine), f"{folder}/truth.pt")
    save_truth([train(engine, step) for step in STEPS], f"{folder}/losses.pt")


def loaded(kind, folder=".", **told):
    """An engine of another seed that has loaded. told: options of load_checkpoint()."""
    engine = engine_of(kind, seed=5)
    universal.load_checkpoint(engine, folder, "t", **told)
    return engine


def check(engine, kind, folder="."):
    truth, now = read_truth(f"{folder}/truth.pt"), snapshot(engine)
    assert not differences(truth, now), differences(truth, now)
    assert len([name for name in truth if name.endswith((" exp_avg", " state"))]) >= 5
    losses = enumerate(read_truth(f"{folder}/losses.pt"), STEPS[0])
    gap = max(abs(train(engine, step) - loss) for step, loss in losses)
    assert gap <= (1e-6 if kind.endswith(" fp32") else 2e-2)


# --------------------------------------------------------------------------------------------------

SOURCES = ("0 fp32", "0 autocast", "0 bf16", "0 flat bf16", "0 fp16", "0 flat fp16")


def save_sources(stage):
    for kind in (*SOURCES, "2 bf16", "3 fp32"):
        save(kind, kind)


@case(save_sources, stages=(0,))
def without_zero(stage):
    """It goes on without ZeRO, on any number of ranks; with it, a line says what to do instead."""
    engine = engine_of("2 bf16", 5)
    for kind in SOURCES:
        told = f"{kind}/t was saved without ZeRO: resume it without ZeRO, which any number of"
        refused(engine, told, tag=None, folder=kind)
        check(loaded(kind, kind), kind, kind)
        assert printed("NOTE: without ZeRO no file tells which parameter an optimizer's state is")
    told = "set zero_optimization.stage to 1, 2 or 3"
    refused(engine_of("0 fp32", 5), told, folder="3 fp32", load_optimizer_states=False)
    engine = engine_of("0 fp32", 5, lambda: torch.compile(Net(), backend="eager"))
    told = "torch.compile() names them: give DeepSpeed the model without it"
    refused(engine, told, folder="0 fp32", load_module_strict=False)
    path = "0 fp32/t/mp_rank_00_model_states.pt"
    weights = torch.load(path, weights_only=False)["module"]
    engine = engine_of("1 fp32", 5, net=lambda: with_weights(weights))
    assert not differences(weights, engine.module.state_dict())


def with_weights(weights):
    net = Net()
    net.load_state_dict(weights)
    return net


@case(lambda stage: save("2 bf16"), stages=(0,))
def from_zero(stage):
    """Weights alone, as DeepSpeed itself."""
    engine = engine_of("0 bf16", 5)
    told = "t was saved with ZeRO, and this engine runs without it: set zero_optimization.stage"
    refused(engine, told, tag=None)
    check(loaded("2 bf16"), "2 bf16")
    engine = loaded("0 bf16", load_optimizer_states=False)
    weights = engine.module.state_dict()
    truth = read_truth()
    assert all(torch.equal(weights[name], truth[name]) for name in weights)
    convert()
    refused(engine_of("0 bf16", 5), "u was saved with ZeRO", tag="u")
    refused(engine_of("0 bf16", 5), "u was saved with ZeRO", tag="u", load_optimizer_states=False)


def refused_at_the_save(engine, **client_state):
    """The save raises one line with the key."""
    [key] = client_state
    with pytest.raises(universal.CheckpointError, match=f"client_state.'{key}'. would take"):
        engine.save_checkpoint(".", "t", client_state)


@case(lambda stage: None, stages=(0, 1), quick_stages=(0, 1))
def a_client_state_in_the_place_of_the_engines_own(stage):
    """It is refused at the save, but for what is the same, or is in no load's way."""
    universal.install()
    engine = engine_of(f"{stage} fp32", seed=1)
    train(engine, 0)
    second = torch.optim.Adam(nn.Linear(2, 2).parameters(), 5e-4).state_dict()
    refused_at_the_save(engine, global_steps=999)
    refused_at_the_save(engine, lr_scheduler={"last_epoch": 7})
    states = {"global_steps": 1, "lr_scheduler": engine.lr_scheduler.state_dict(), "step": 1}
    if stage:
        states["optimizer"] = second
    else:
        refused_at_the_save(engine, optimizer=second)
        states["optimizer"] = engine.optimizer.state_dict()
    engine.save_checkpoint(".", "t", states)
    loaded = engine_of(f"{stage} fp32", seed=5)
    _, client_state = universal.load_checkpoint(loaded, ".", "t")
    assert client_state["step"] == loaded.global_steps == 1
    assert not differences(snapshot(engine), snapshot(loaded))


@case(lambda stage: save("2 bf16"), stages=(0,))
def an_evaluation(stage):
    """An engine in bf16 without an optimizer takes the weights of ZeRO."""
    options = PRECISIONS["bf16"]
    engine = make(0, optimizer=None, seed=5, **options)
    universal.load_checkpoint(engine, ".", "t")
    weights, truth = engine.module.state_dict(), read_truth()
    assert all(torch.equal(weights[name], truth[name]) for name in weights)
