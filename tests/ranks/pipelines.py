"""Pipelines: what of their layers is frozen, or tied; those that were saved without ZeRO; stages
without a parameter group."""

import itertools
import operator

import deepspeed
import pytest
import stage_0
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from routes import (
    pipeline,
    save_pipeline,
    state_of,
    train_and_save_pipeline,
    train_pipeline,
)
from torch import nn

import universal
from tests.support.case import (
    PRINTED,
    case,
    convert,
    degrees,
    load,
    on_own_ranks,
    printed,
    refused,
)
from tests.support.toy import (
    BF16,
    differences,
    falling,
    is_rank_0,
    read_truth,
    save_of_rank,
    save_truth,
    truths_of_ranks,
)
from universal.load.overrides import overridden

LINEAR = LayerSpec(nn.Linear, 8, 8)


def save_pipelines_without_zero(stage):
    pipeline(2, LINEAR, zero=0, **BF16).save_checkpoint(".", tag="bf16")
    engine = save_pipeline(LINEAR, LINEAR, zero=0)
    save_of_rank(state_of(engine))


@case(save_pipelines_without_zero, stages=(0,), quick_ranks=(2, 3))
def pipelines_without_zero(stage):
    """They go on by DeepSpeed's own loader, on the stages that saved them; else by no means."""
    if on_own_ranks():
        engine = pipeline(2, LINEAR, LINEAR, zero=0, seed=5)
        load(engine)
        truth = truths_of_ranks()[dist.get_rank()]
        assert not differences(truth, state_of(engine))
        engine = pipeline(2, LINEAR, zero=0, **BF16)
        refused(engine, "bf16: without ZeRO, DeepSpeed loads no states of BF16", tag="bf16")
        load(engine, "bf16", load_optimizer_states=False)
    refused(pipeline(1, LINEAR, LINEAR, zero=0), "t was saved by 2 model-parallel")
    refused(pipeline(1, LINEAR, LINEAR, zero=1), "was saved without ZeRO")


FOLDED = getattr(deepspeed.pipe, "DualPipeVModule", None)  # an older DeepSpeed has none
ALIKE = [LayerSpec(nn.Linear, 8, 8, bias=False)] * 3


def save_folded(stage):
    for tag, kind in (("plain", PipelineModule), ("folded", FOLDED)):
        engine = train_and_save_pipeline(pipeline(2, *ALIKE, kind=kind or PipelineModule), tag)
        save_of_rank(state_of(engine), tag)


@case(save_folded, stages=(1,), quick_ranks=(2,))
def a_folded_pipeline(stage):
    """Under DualPipeV a rank has layers of both ends, which no file says."""
    if not FOLDED or not on_own_ranks():
        return
    line = "under DualPipeV a rank has a pipeline stage of either end: it loads on its own ranks"
    refused(pipeline(2, *ALIKE, kind=FOLDED), line, tag="plain")
    engine = pipeline(2, *ALIKE, kind=FOLDED, seed=5)
    load(engine, "folded")
    assert not differences(truths_of_ranks("folded")[dist.get_rank()], state_of(engine))
    engine = pipeline(1, *ALIKE, seed=5)
    load(engine, "folded")
    assert not differences(operator.or_(*truths_of_ranks("folded")), state_of(engine))


class Shift(nn.Module):
    """Has a buffer, and what is neither a parameter nor a tensor."""

    def __init__(self):
        super().__init__()
        self.register_buffer("by", torch.randn(8))
        self.note = torch.randn(1).item()

    def forward(self, x):
        return x + self.by

    def get_extra_state(self):
        return {"note": self.note}

    def set_extra_state(self, state):
        self.note = state["note"]


def partly_frozen(stages, **options):
    """Layers 0 and 4 are one module. Of all but the last, parts are frozen, and of layer 1 all,
    under the names of what is tied. Layers 5 and 6 begin with the same numbers."""
    tied = TiedLayerSpec("tied", PartlyFrozen, 8)
    layers = [tied, LayerSpec(Frozen, 8), LayerSpec(PartlyFrozen, 8), LayerSpec(Shift), tied]
    padded = [TiedLayerSpec("padded", Padded), LayerSpec(Padded, is_frozen=True)]
    return pipeline(stages, *layers, *padded, **options)


class Padded(nn.Module):
    """Like an embedding's padding, the zeros stay."""

    def __init__(self, is_frozen=False):
        super().__init__()
        weight = torch.cat([torch.zeros(8, 8), torch.rand(8, 8)])
        self.weight = nn.Parameter(weight, requires_grad=not is_frozen)

    def forward(self, x):
        return x @ self.weight[8:]


class PartlyFrozen(nn.Linear):
    def __init__(self, width):
        super().__init__(width, width)
        self.bias.requires_grad_(False)
        self.register_buffer("scale", torch.rand(width))

    def forward(self, x):
        return super().forward(x) * self.scale


class Frozen(PartlyFrozen):
    def __init__(self, width):
        super().__init__(width)
        self.weight.requires_grad_(False)


def save_partly_frozen(stage):
    """Over a save of a tensor-parallel rank more, whose files of layers stay."""
    engine = partly_frozen(2)
    for tag, rank in (("two saves", 1), ("t", 1), ("t", 0)):
        train_pipeline(engine)
        axis = f"model_{rank:02}"
        with overridden(engine.module.topology(), get_rank_repr=lambda rank, axis=axis: axis):
            engine.save_checkpoint(".", tag=tag)
    engine.save_checkpoint(".", tag="two saves")
    save_of_rank(state_of(engine))
    convert()


@case(save_partly_frozen, stages=(1,), quick_ranks=(2, 3))
def frozen_layers_of_a_pipeline(stage):
    """They are in the files of the layers."""
    truth = operator.or_(*truths_of_ranks())
    for tag, stages in itertools.product("tu", degrees()):
        engine = partly_frozen(stages, seed=5)
        load(engine, tag)
        state = state_of(engine)
        assert state.keys() <= truth.keys()
        lost = differences({name: truth[name] for name in state}, state)
        assert not lost, (tag, stages, lost)
    assert printed("left over from before, and ignored: layer_00-model_01-model_states.pt")
    refused(engine, "layer_00-model_states.pt, which are of two saves", tag="two saves")
    assert "left as it is" not in PRINTED.getvalue()


def call(layer, x):
    return layer(x)


def tied_by_function(stages, which, **options):
    """which: of layers 0 and 2, which are one module; each stage builds its own with what is
    frozen. DeepSpeed saves nothing of a layer with a forward_fn."""
    begin, end = (
        TiedLayerSpec("tied", PartlyFrozen, 8, forward_fn=call if name in which else None)
        for name in ("begin", "end")
    )
    return pipeline(stages, begin, LayerSpec(nn.Linear, 8, 8), end, **options)


def save_tied_by_function(stage):
    for which in TIED_BY_FUNCTION:
        engine = tied_by_function(1 if which == "end" else 2, which)
        train_pipeline(engine)
        if which == "apart" and dist.get_rank():
            engine.module.tied_modules["tied"].scale += 1
        engine.save_checkpoint(".", tag=which)
        save_of_rank(state_of(engine), which)


TIED_BY_FUNCTION = ("begin", "end", "apart", "begin, end")


@case(save_tied_by_function, stages=(1,))
def tied_layers_with_a_function(stage):
    for which, stages in itertools.product(TIED_BY_FUNCTION, degrees()):
        engine = tied_by_function(stages, which, seed=5)
        unsaved = "not in the checkpoint (2): tied_modules.tied.bias"
        words = {
            "apart": stages == 1 and "0.scale and 2.scale are of one tied layer, and differ",
            "begin": stages == 2 and unsaved,
            "end": stages == 2 and unsaved,
            "begin, end": "in the module",
        }.get(which)
        if words:
            refused(engine, words, tag=which)
            continue
        load(engine, which)
        truth = truths_of_ranks(which)[dist.get_rank() if which == "apart" else 0]
        state = state_of(engine)
        assert not differences({name: truth[name] for name in state if name in truth}, state), which


class Both(nn.Sequential):
    """Has parameters of both groups."""

    def __init__(self):
        super().__init__(nn.Linear(8, 8, bias=False), nn.LayerNorm(8))


# Before a layer of matrices alone: a stage has one group, and DeepSpeed drops the empty one.
APART = [LayerSpec(nn.LayerNorm, 8)]
LAYERS = {"apart": APART, "every group": [LayerSpec(Both)] * 2}
GROUPS = {"optimizer": stage_0.adamw, "scheduler": falling}


def save_groups(_):
    pipeline(1, *APART, **GROUPS).save_checkpoint(".", tag="one stage")
    for tag, layers in LAYERS.items():
        engine = train_and_save_pipeline(pipeline(2, *layers, **GROUPS), tag)
        save_truth([train_pipeline(engine).item() for _ in range(2)], f"{tag}.losses")


def check_groups(stages, tag, tolerance):
    engine = pipeline(stages, *LAYERS[tag], **GROUPS, seed=5)
    load(engine, tag)
    gaps = [abs(train_pipeline(engine).item() - loss) for loss in read_truth(f"{tag}.losses")]
    assert max(gaps) <= tolerance, gaps


@case(save_groups, stages=(1,), quick_ranks=(2, 3))
def a_stage_without_a_parameter_group(stage):
    """Its only group has the number of another one: on the same stages, or not at all."""
    cure = "give each stage a parameter of every group"
    refused(pipeline(1, *APART, **GROUPS), f"has another: {cure}: it loads on its own", tag="apart")
    if on_own_ranks():
        check_groups(2, "apart", 0)
        refused(pipeline(2, *APART, **GROUPS), f"; {cure}", tag="one stage")
    if is_rank_0():
        with pytest.raises(universal.CheckpointError, match=cure):
            universal.convert("apart", "u")
    for stages in degrees():
        check_groups(stages, "every group", 1e-6)
