"""Weights without the optimizer's states; engines without an optimizer, or without ZeRO."""

import math
from pathlib import Path

import deepspeed
import torch
from deepspeed.utils import safe_get_full_optimizer_state
from torch.optim.lr_scheduler import CosineAnnealingLR

from tests.support.case import (
    case,
    check_same_state,
    check_weights_restored,
    load,
    refused,
    restored,
    resumed,
    saved,
    train_and_save,
)
from tests.support.toy import (
    BF16,
    Net,
    is_rank_0,
    make,
    read_truth,
    save_truth,
    snapshot,
    train,
    two_groups,
)


def save_and_go_on(stage):
    engine = train_and_save(stage)
    train(engine, 2)
    engine.save_checkpoint(".", tag="latest one")


@case(save_and_go_on)
def weights_alone(stage):
    """Not those of `latest`, and in fp32; the optimizer is a new one."""
    for to, options, steps in (
        (stage, {"load_optimizer_states": False}, 2),
        (4 - stage, {"load_module_only": True}, 0),
    ):
        engine = resumed(to, told=options, clip=0.125)
        check_weights_restored(engine)
        assert engine.optimizer.clip_grad == 0.125
        assert engine.global_steps == steps
        states = engine.optimizer.optimizer.state.values()
        assert not any(state.get("exp_avg", torch.zeros(1)).any() for state in states)


@case(stages=(1, 2))
def states_after_weights_alone(stage):
    """DeepSpeed's functions find those of the first step."""
    engine = resumed(stage, told={"load_module_only": True})
    train(engine, 2)
    assert safe_get_full_optimizer_state(engine.module.a.weight, "exp_avg").any()


def cosine(optimizer):
    """Each rate is computed from the one before."""
    return CosineAnnealingLR(optimizer, 10)


@case(saved(scheduler=cosine))
def a_schedule_with_weights_alone(stage):
    engine = resumed(stage, told={"load_optimizer_states": False}, scheduler=cosine)
    for step in (2, 3):
        assert math.isclose(engine.get_lr()[0], 0.005 * (1 + math.cos(math.pi * step / 10)))
        train(engine, step)


@case()
def weights_of_other_groups(stage):
    engine = resumed(stage, told={"load_module_only": True}, optimizer=two_groups)
    check_weights_restored(engine)


class Wider(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(4))


@case()
def a_buffer_of_another_shape(stage):
    refused(make(stage, Wider), "size mismatch for calls")


def save_without_shards(stage):
    train_and_save(stage)
    if is_rank_0():
        for path in Path("t").glob("*_optim_states.pt"):
            path.unlink()


@case(save_without_shards)
def without_shards(stage):
    """Which a copy has left out: what the line says brings the weights."""
    for told in ({}, {"load_module_only": True}):
        if stage == 3:
            refused(make(stage), "no *_optim_states.pt: copy them, as at ZeRO-3 they", **told)
            continue
        line = 'begin with its weights: "module" in mp_rank_00_model_states.pt'
        refused(make(stage), line, **told)

        def begun():
            net = Net()
            net.load_state_dict(read_truth("t/mp_rank_00_model_states.pt")["module"])
            return net

        check_weights_restored(make(stage, begun, seed=5))


def save_restarted(stage):
    train_and_save(stage)
    engine = resumed(stage, told={"load_optimizer_states": False})
    train(engine, 2)
    engine.save_checkpoint(".", tag="u", client_state={"step": 3})
    save_truth(snapshot(engine))


@case(save_restarted)
def restarted(stage):
    """Weights alone, trained on and saved: the optimizer has counted other steps than the model."""
    restored(stage, "u")


@case(stages=(3,))
def states_on_the_gpu(stage):
    """offload_optimizer.ratio below 1: a second optimizer, which DeepSpeed neither saves nor
    loads."""
    engine = make(stage, seed=5)
    # In truth an AdamW; an engine on CPUs never steps with it.
    engine.optimizer.backup_optimizer = None
    refused(engine, "offload_optimizer.ratio")
    load(engine, load_optimizer_states=False)


@case(stages=(3,))
def evaluation(stage):
    """An engine without an optimizer, which DeepSpeed has at ZeRO-3 alone."""
    for options in ({}, {"load_module_only": True}, {"load_optimizer_states": False}):
        engine = resumed(stage, told=options, optimizer=None)
        truth = read_truth()
        for name, p in engine.module.named_parameters():
            with deepspeed.zero.GatheredParameters([p]):
                assert torch.equal(p, truth[name]), name


def save_without_an_optimizer(stage):
    engine = make(0, optimizer=None)
    save_truth(engine.module.state_dict())
    engine.save_checkpoint(".", tag="t")


@case(save_without_an_optimizer, stages=(1,))
def no_optimizer(stage):
    """Nor ZeRO: an engine that evaluates, say."""
    check_same_state(resumed(0, optimizer=None).module)


def save_in_bf16(stage):
    make(0, **BF16).save_checkpoint(".", tag="t")


@case(save_in_bf16, stages=(1,))
def weights_alone_without_zero(stage):
    """In bf16 the masters follow the weights, or the first step would bring the initial ones
    back."""
    told = {"load_optimizer_states": False}
    optimizer = resumed(0, told=told, **BF16).optimizer
    for masters, weights in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True):
        assert all(torch.equal(m.to(w), w) for m, w in zip(masters, weights, strict=True))
