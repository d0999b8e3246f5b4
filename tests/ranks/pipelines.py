"""Pipelines that were saved without ZeRO: no file says which stage has which layers."""

import operator
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from optimizers import momentum
from routes import (
    Scaling,
    pipeline,
    save_pipeline,
    state_of,
    train_and_save_pipeline,
    train_pipeline,
)
from torch import nn

from tests.support.case import PRINTED, case, degrees, load, on_own_ranks, printed, refused
from tests.support.files import flip
from tests.support.toy import BF16, differences, is_rank_0, make, save_of_rank, truths_of_ranks
from universal.inspect import look

LINEAR = LayerSpec(nn.Linear, 8, 8)
ALIKE = [LayerSpec(nn.Linear, 8, 8, bias=False)] * 3  # no shape tells their order


def backwards(parameters):
    return torch.optim.AdamW(parameters[::-1], lr=0.01)


def save_pipelines_without_zero(stage):
    pipeline(2, LINEAR, zero=0, **BF16).save_checkpoint(".", tag="bf16")
    engine = save_pipeline(LINEAR, LINEAR, zero=0)
    engine.save_checkpoint(".", tag="lacking")
    engine.save_checkpoint(".", tag="damaged")
    save_of_rank(state_of(engine))
    engine = pipeline(2, *ALIKE, zero=0, optimizer=backwards)
    train_and_save_pipeline(engine, "backwards")
    dist.barrier()
    if is_rank_0():
        Path("lacking/mp_rank_01_model_states.pt").unlink()
        flip(Path("damaged/layer_01-model_states.pt"))


@case(save_pipelines_without_zero, stages=(0,), quick_ranks=(2, 3))
def pipelines_without_zero(stage):
    """In bf16, DeepSpeed itself reads nothing of what it saves."""
    truth = operator.or_(*truths_of_ranks())
    for zero in (0, 1):
        for stages in degrees():
            engine = pipeline(stages, LINEAR, LINEAR, zero=zero, seed=5)
            refused(engine, "mp_rank_01_model_states.pt", tag="lacking")
            refused(engine, "layer_01-model_states.pt is damaged", tag="damaged")
            load(engine)
            state = state_of(engine)
            assert not differences({name: truth[name] for name in state}, state)
            train_pipeline(engine)
            other = pipeline(stages, LINEAR, LINEAR, zero=zero, optimizer=momentum)
            refused(other, "of another optimizer: it has")
    engine = pipeline(1, *ALIKE, zero=0, optimizer=backwards)
    untold = "nothing tells which stage had which parameters: it loads on its own ranks only"
    refused(engine, untold, tag="backwards")
    load(engine, "backwards", load_optimizer_states=False)
    if on_own_ranks():
        load(pipeline(2, *ALIKE, zero=0, optimizer=backwards), "backwards")
        assert printed("WARNING: the order of the parameters of the optimizer is not known")
    refused(
        make(0, lambda: Scaling(2, 8)), "nothing that is trained has the same name on both sides"
    )
    engine = pipeline(1, LINEAR, zero=0, **BF16)
    refused(engine, "of BF16_Optimizer without ZeRO, which saves no shapes", tag="bf16")
    if is_rank_0():
        facts = look(".", "t")["tags"]["t"]
        assert facts["own_ranks_only"] is None and facts["layout"]["pipeline"] == 2
        assert "only an engine tells" in str(facts["notes"])
        for tag, file in (("lacking", "mp_rank_01"), ("damaged", "layer_01")):
            facts = look(".", tag)["tags"][tag]
            assert file in f"{facts['problem']} {facts['unread_damage']}"


def by_name(parameters):
    return torch.optim.AdamW([parameters[i] for i in sorted(range(len(parameters)), key=str)], 0.01)


# (what a pipeline of 20 layers is made of, by what optimizer, on how many stages it was saved).
ORDERED = {
    "names": ([LayerSpec(nn.Linear, 8, 8, bias=False)] * 19, by_name, 2),
    "names or layers": ([LayerSpec(nn.Linear, 8, 8, bias=False)] * 19, by_name, 1),
    "layers": ([LayerSpec(nn.Linear, 8, 8)] * 19, "adam", 1),
}


def ordered(tag, stages, zero=0):
    layers, optimizer, _ = ORDERED[tag]
    options = {} if optimizer == "adam" else {"optimizer": optimizer}
    return pipeline(stages, *layers, zero=zero, seed=5, **options)


def moments_of(engine):
    """By the names of parameters."""
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    state = engine.optimizer.state
    return {names[parameter]: state[parameter]["exp_avg"] for parameter in state}


def save_ordered(stage):
    for tag, (_, _, stages) in ORDERED.items():
        engine = train_and_save_pipeline(ordered(tag, stages), tag)
        save_of_rank(moments_of(engine), tag)


@case(save_ordered, stages=(0,), quick_ranks=(2,))
def alike_layers_of_a_pipeline_without_zero(stage):
    """No file tells the order of their moments: the engine does, or a line says that it is a guess;
    if two orders are as likely, there is an error."""
    guess = "no file says in which order the optimizer of a pipeline stage had its parameters"
    for tag, (_, _, saved_stages) in ORDERED.items():
        truth = operator.or_(*truths_of_ranks(tag))
        for stages in degrees():
            PRINTED.truncate(0)
            engine = ordered(tag, stages)
            if stages > saved_stages and tag != "layers":
                refused(engine, "nothing tells which stage had which parameters", tag=tag)
                continue
            load(engine, tag)
            moments = moments_of(engine)
            assert not differences({name: truth[name] for name in moments}, moments), (tag, stages)
            assert printed(guess) == (stages > saved_stages or dist.get_rank() > 0), (tag, stages)
