"""Pipelines that were saved without ZeRO: no file says which stage has which layers."""

from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from optimizers import momentum
from routes import Shaped, pipeline, pipeline_stages, save_pipeline, state_of, train_pipeline
from torch import nn

from tests.support.case import PRINTED, case, load, printed, refused
from tests.support.files import flip
from tests.support.toy import differences, make
from universal.inspect import look

BF16 = {"enabled": True}
LINEAR = LayerSpec(nn.Linear, 8, 8)
ALIKE = [LayerSpec(nn.Linear, 8, 8, bias=False)] * 3  # no shape tells their order


def backwards(parameters):
    return torch.optim.AdamW(parameters[::-1], lr=0.01)


def save_pipelines_without_zero(stage):
    pipeline(2, LINEAR, zero=0, bf16=BF16).save_checkpoint(".", tag="bf16")
    engine = save_pipeline(LINEAR, LINEAR, zero=0)
    engine.save_checkpoint(".", tag="lacking")
    engine.save_checkpoint(".", tag="damaged")
    torch.save(state_of(engine), f"truth.{dist.get_rank()}")
    engine = pipeline(2, *ALIKE, zero=0, optimizer=backwards)
    train_pipeline(engine)
    engine.save_checkpoint(".", tag="backwards")
    dist.barrier()
    if dist.get_rank() == 0:
        Path("lacking/mp_rank_01_model_states.pt").unlink()
        flip(Path("damaged/layer_01-model_states.pt"))


@case(save_pipelines_without_zero, stages=(0,), quick_stages=(0,), quick_ranks=(2, 3))
def pipelines_without_zero(stage):
    """In bf16, DeepSpeed itself reads nothing of what it saves."""
    truth = torch.load("truth.0") | torch.load("truth.1")
    for zero in (0, 1):
        for stages in pipeline_stages():
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
    if dist.get_world_size() == 2:
        load(pipeline(2, *ALIKE, zero=0, optimizer=backwards), "backwards")
        assert printed("WARNING: the order of the parameters of the optimizer is not known")
    refused(
        make(0, lambda: Shaped(2, 8)), "nothing that is trained has the same name on both sides"
    )
    engine = pipeline(1, LINEAR, zero=0, bf16=BF16)
    refused(engine, "of BF16_Optimizer without ZeRO, which saves no shapes", tag="bf16")
    if dist.get_rank() == 0:
        facts = look(".", "t")["tags"]["t"]
        assert facts["own_ranks_only"] is None and facts["layout"]["pipeline"] == 2
        assert "only an engine tells" in str(facts["notes"])
        for tag, file in (("lacking", "mp_rank_01"), ("damaged", "layer_01")):
            facts = look(".", tag)["tags"][tag]
            assert file in f"{facts['problem']} {facts['unread_damage']}"


FOLDED = getattr(deepspeed.pipe, "DualPipeVModule", PipelineModule)  # an older one has none
MIXED = [LINEAR, LayerSpec(nn.Linear, 8, 8, bias=False), LINEAR]


def save_folded(stage):
    for tag, layers in (("alike", ALIKE), ("mixed", MIXED)):
        engine = pipeline(2, *layers, zero=0, kind=FOLDED)
        train_pipeline(engine)
        engine.save_checkpoint(".", tag=tag)
        torch.save(moments_of(engine), f"{tag}.{dist.get_rank()}")


@case(save_folded, stages=(0,), quick_stages=(0,), quick_ranks=(2,))
def a_folded_pipeline_without_zero(stage):
    """Of DualPipeV, a rank has layers of both ends, which plain stages do not."""
    if dist.get_world_size() != 2:
        return
    for tag, layers in (("alike", ALIKE), ("mixed", MIXED)):
        engine = pipeline(2, *layers, zero=0, kind=FOLDED, seed=5)
        load(engine, tag)
        assert not differences(torch.load(f"{tag}.{dist.get_rank()}"), moments_of(engine)), tag
    if FOLDED is not PipelineModule:
        engine = pipeline(2, *MIXED, zero=0)
        refused(engine, "nothing tells which stage had which parameters: it loads", tag="mixed")


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
        engine = ordered(tag, stages)
        train_pipeline(engine)
        engine.save_checkpoint(".", tag=tag)
        torch.save(moments_of(engine), f"{tag}.{dist.get_rank()}")


@case(save_ordered, stages=(0,), quick_stages=(0,), quick_ranks=(2,))
def alike_layers_of_a_pipeline_without_zero(stage):
    """No file tells the order of their moments: the engine does, or a line says that it is a guess;
    if two orders are as likely, there is an error."""
    guess = "no file says in which order the optimizer of a pipeline stage had its parameters"
    for tag, (_, _, saved_stages) in ORDERED.items():
        truth = torch.load(f"{tag}.0") | torch.load(f"{tag}.1")
        for stages in pipeline_stages():
            PRINTED.truncate(0)
            engine = ordered(tag, stages)
            if stages > saved_stages and tag != "layers":
                refused(engine, "nothing tells which stage had which parameters", tag=tag)
                continue
            load(engine, tag)
            moments = moments_of(engine)
            assert not differences({name: truth[name] for name in moments}, moments), (tag, stages)
            assert printed(guess) == (stages > saved_stages or dist.get_rank() > 0), (tag, stages)
