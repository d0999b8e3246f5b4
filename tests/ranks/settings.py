"""What a new config changes of a run is said before the first step, and holds at every stage; what
parameter groups keep stays as it was."""

import functools
from pathlib import Path

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.data_pipeline.data_routing.basic_layer import RandomLayerTokenDrop
from deepspeed.utils import groups
from torch import nn

import universal
from tests.support.case import (
    PRINTED,
    case,
    check_restored,
    load,
    printed,
    resumed,
    saved,
    saved_with_losses,
)
from tests.support.helpers import fp16_is
from tests.support.toy import (
    BF16,
    Net,
    adam,
    falling,
    is_rank_0,
    make,
    read_truth,
    save_truth,
    train,
)
from universal.diff import diff
from universal.load.overrides import overridden

NOTE = "NOTE: other settings than at the save: "


def said_nothing():
    return NOTE not in PRINTED.getvalue()


@case(saved(clip=0.5), stages=(1, 2, 3), quick_stages=(1, 3))
def clipping(stage):
    """The gradient, of a norm above 0.1, is cut to that of the new config."""
    engine = make(stage, seed=5, clip=0.1, optimizer=lambda ps: torch.optim.SGD(ps, lr=1.0))
    load(engine, load_optimizer_states=False)
    assert said_nothing()  # a new run
    engine = make(stage, seed=5, clip=0.01)
    load(engine)
    assert printed(f"{NOTE}gradient_clipping is 0.01 from now on (was 0.5)\n")
    assert engine.optimizer.clip_grad == engine.gradient_clipping() == 0.01
    engine = make(stage, seed=6, clip=0.5)
    PRINTED.truncate(0)
    load(engine)
    assert said_nothing() and engine.optimizer.clip_grad == 0.5


def of_before(path, stage):
    """Make it a file that DeepSpeed 0.18.9 has saved, whose config does not say how to clip."""
    states = torch.load(path, weights_only=False)
    if "ds_config" in states:
        states["ds_version"] = "0.18.9"
        del states["ds_config"]["gradient_clipping"]
    torch.save(states, path)


def save_of_before(stage):
    saved_with_losses(clip=0.0)(stage)
    if is_rank_0():
        for path in Path("t").glob("*model_states.pt"):
            of_before(path, stage)
    dist.barrier()


@case(save_of_before, stages=(1, 3), quick_stages=(1, 3))
def default_of_before(stage):
    """DeepSpeed clips to 1 since 0.19.3: a run of before, which no config clips, goes on so."""
    engine = make(stage, seed=5, clip=1.0)
    del engine.config["gradient_clipping"]
    load(engine)
    assert said_nothing() and engine.optimizer.clip_grad == engine.gradient_clipping() == 0
    engine = make(stage, seed=5, clip=1.0)
    load(engine)
    assert printed(f"{NOTE}gradient_clipping is 1.0 from now on (was 0.0)\n")
    assert engine.optimizer.clip_grad == 1.0


def fp16(**more):
    fp16_is(True)()
    return {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2} | more}


@case(lambda stage: saved(**fp16())(stage), quick_stages=(1, 3))
def pace_of_the_loss_scale(stage):
    """The scale is the saved one, and grows at the pace of the new config."""
    engine = make(stage, seed=5, **fp16(loss_scale_window=1000, initial_scale_power=4))
    load(engine)
    scaler = engine.optimizer.loss_scaler
    assert (scaler.cur_scale, scaler.cur_iter, scaler.scale_window) == (2**8, 2, 1000)
    assert printed(f"{NOTE}fp16.loss_scale_window is 1000 from now on (was 2)\n")


ADAM = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "torch_adam": True}}


@case(saved(optimizer=ADAM, scheduler=falling), quick_stages=(1, 3))
def what_groups_keep(stage):
    params = {"lr": 0.02, "weight_decay": 0.2, "torch_adam": True, "adam_w_mode": False}
    engine = make(stage, seed=5, optimizer={"type": "Adam", "params": params})
    load(engine)
    [group] = engine.optimizer.param_groups
    kept = {"lr": 0.01 * (1 / 3), "weight_decay": 0.1, "decoupled_weight_decay": True}
    assert group | kept == group
    assert printed(
        f"{NOTE}optimizer.params.lr stays 0.01 (0.02 in the config); decoupled_weight_decay stays "
        "True (False here); weight_decay stays 0.1 (0.2 here); without a scheduler the learning "
        "rate stays 0.00333333\n"
    )


SCHEDULES = {
    "WarmupLR": {"warmup_max_lr": 0.1, "warmup_num_steps": 9, "warmup_type": "linear"},
    "OneCycle": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 5},
}


def scheduled(stage, name, seed=1):
    kind = getattr(lr_schedules, name)
    return make(stage, seed=seed, scheduler=functools.partial(kind, **SCHEDULES[name]))


def save_scheduled(stage):
    for name in SCHEDULES:
        engine = scheduled(stage, name)
        for step in range(3):
            train(engine, step)
        engine.save_checkpoint(".", name)
        save_truth(engine.get_lr(), f"{name}.pt")


@case(save_scheduled, quick_stages=(1, 3))
def rates_of_deepspeeds_schedules(stage):
    """They go on where a load takes the scheduler without the optimizer's states."""
    for name in SCHEDULES:
        engine = scheduled(stage, name, seed=5)
        load(engine, name, load_optimizer_states=False)
        rates = [group["lr"] for group in engine.optimizer.param_groups]
        assert rates == read_truth(f"{name}.pt") and rates[0] > 0.01
    if is_rank_0():
        first, second = SCHEDULES
        assert diff(first, first)["same"] and not diff(first, second)["same"]


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.a(x).view(2, 4)).pow(3).mean()


@case(saved(net=Normed, micro=2), stages=(2,))
def micro_batch(stage):
    micro = 12 // dist.get_world_size()
    load(make(stage, seed=5, net=Normed, micro=micro))
    assert printed(f"NOTE: BatchNorm sees {micro} samples (was 2)\n")


class Averaged(Net):
    """With a running mean that bf16 would round."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.linspace(1.0001, 20.003, 16))


@case(saved(net=Averaged, **BF16), stages=(2, 3), quick_stages=(2, 3))
def rounded_buffers(stage):
    """A line says which; it restores nothing "bit by bit"."""
    mean = Averaged().mean
    engine = resumed(stage, net=Averaged, **BF16)
    assert torch.equal(engine.module.mean.cpu(), mean) and "rounded" not in PRINTED.getvalue()
    engine = make(stage, Averaged, seed=5, **BF16 | {"data_types": {"buffer_dtype": "bf16"}})
    load(engine)
    assert printed("NOTE: rounded, as this engine has them in fewer bits (")
    assert printed("mean (bfloat16)")
    assert torch.equal(engine.module.mean.cpu(), mean.bfloat16())


def save_with_curriculum(stage):
    saved()(stage)
    if is_rank_0():
        for path in Path("t").glob("*model_states.pt"):
            states = torch.load(path, weights_only=False)
            sampling = {"curriculum_learning": {"enabled": True}}
            states["ds_config"]["data_efficiency"] = {"data_sampling": sampling}
            torch.save(states, path)
    dist.barrier()


@case(save_with_curriculum, stages=(2,), quick_stages=(2,))
def curriculum(stage):
    load(make(stage, seed=5))
    assert printed("WARNING: no file holds the random numbers of DeepSpeed's curriculum sampler")


@case(lambda stage: None, stages=(1,), quick_stages=(1,))
def mesh_of_sequence_parallelism(stage):
    """Its ranks would write the same files: no save and no load."""
    universal.install()
    net = Net()
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
    config["zero_allow_untested_optimizer"] = True
    with overridden(groups, mesh_device=None):
        engine, *_ = deepspeed.initialize(
            model=net,
            optimizer=adam(net.parameters()),
            mesh_param=(1, dist.get_world_size()),
            config=config,
        )
        with pytest.raises(universal.CheckpointError, match="mesh_param makes a mesh"):
            engine.save_checkpoint(".", "t")
        with pytest.raises(universal.CheckpointError, match="mesh_param makes a mesh"):
            universal.load_checkpoint(engine, ".", "t")


SCHEDULE = {"min_value": 8, "max_value": 8, "schedule_type": "fixed_linear"}
SCHEDULE["schedule_config"] = {"require_steps": 1, "seq_per_step": 8}
LTD = {"enabled": True, "total_layer_num": 1, "random_ltd_layer_num": 1}
LTD |= {"random_ltd_layer_id": [0], "random_ltd_schedule": SCHEDULE}
RANDOM_LTD = {"data_efficiency": {"data_routing": {"enabled": True, "random_ltd": LTD}}}


class Counting(nn.Linear):
    """A layer with a buffer."""

    def __init__(self):
        super().__init__(8, 7)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x):
        self.seen += 1
        return super().forward(x)


class Counted(Net):
    def __init__(self):
        super().__init__()
        self.a = Counting()


def wrap_layer(engine):
    """As DeepSpeed's convert_to_random_ltd() does, which wants an engine."""
    engine.module.a = RandomLayerTokenDrop(engine.module.a)


@case(saved(net=Counted, change=wrap_layer, **RANDOM_LTD), quick_stages=(1, 3))
def layers_of_random_ltd(stage):
    """No name in the checkpoint tells that they are wrapped."""
    engine = make(stage, Counted, seed=5, **RANDOM_LTD)
    wrap_layer(engine)
    load(engine)
    check_restored(engine)
