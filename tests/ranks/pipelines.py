"""Pipelines: what of their layers is frozen, tied, or folded; and those that were saved without
ZeRO, of which no file says which stage has which layers."""

import itertools
import operator
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
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
from tests.support.files import flip
from tests.support.toy import BF16, differences, is_rank_0, make, save_of_rank, truths_of_ranks
from universal.inspect import look
from universal.load.hooks import overridden

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


FOLDED = getattr(deepspeed.pipe, "DualPipeVModule", PipelineModule)  # an older one has none
MIXED = [LINEAR, LayerSpec(nn.Linear, 8, 8, bias=False), LINEAR]


def save_folded(stage):
    for tag, layers in (("alike", ALIKE), ("mixed", MIXED)):
        engine = train_and_save_pipeline(pipeline(2, *layers, zero=0, kind=FOLDED), tag)
        save_of_rank(moments_of(engine), tag)


@case(save_folded, stages=(0,), quick_ranks=(2,))
def a_folded_pipeline_without_zero(stage):
    """Of DualPipeV, a rank has layers of both ends, which plain stages do not."""
    if not on_own_ranks():
        return
    for tag, layers in (("alike", ALIKE), ("mixed", MIXED)):
        engine = pipeline(2, *layers, zero=0, kind=FOLDED, seed=5)
        load(engine, tag)
        truth = truths_of_ranks(tag)[dist.get_rank()]
        assert not differences(truth, moments_of(engine)), tag
    if FOLDED is not PipelineModule:
        engine = pipeline(2, *MIXED, zero=0)
        refused(engine, "nothing tells which stage had which parameters: it loads", tag="mixed")


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
    engine = partly_frozen(2, zero=stage)
    for tag, rank in (("two saves", 1), ("t", 1), ("t", 0)):
        train_pipeline(engine)
        axis = f"model_{rank:02}"
        with overridden(engine.module.topology(), get_rank_repr=lambda rank, axis=axis: axis):
            engine.save_checkpoint(".", tag=tag)
    engine.save_checkpoint(".", tag="two saves")
    save_of_rank(state_of(engine))
    if stage:
        convert()


@case(save_partly_frozen, stages=(0, 1), quick_stages=(0, 1), quick_ranks=(2, 3))
def frozen_layers_of_a_pipeline(stage):
    """They are in the files of the layers."""
    truth = operator.or_(*truths_of_ranks())
    for tag, stages in itertools.product("tu" if stage else "t", degrees()):
        engine = partly_frozen(stages, zero=stage, seed=5)
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


def tied_by_function(stages, which, kind=None, **options):
    """which: of layers 0 and 2, which are one module; each stage builds its own with what is
    frozen. DeepSpeed saves nothing of a layer with a forward_fn. kind: of layer 0, if another."""
    begin, end = (
        TiedLayerSpec("tied", kind, 8, forward_fn=call if name in which else None)
        for name, kind in (("begin", kind or PartlyFrozen), ("end", PartlyFrozen))
    )
    return pipeline(stages, begin, LayerSpec(nn.Linear, 8, 8), end, **options)


def save_tied_by_function(stage):
    for which in TIED_BY_FUNCTION:
        engine = tied_by_function(1 if which == "end" else 2, which, zero=stage)
        train_pipeline(engine)
        if which == "apart" and dist.get_rank():
            engine.module.tied_modules["tied"].scale += 1
        engine.save_checkpoint(".", tag=which)
        save_of_rank(state_of(engine), which)


TIED_BY_FUNCTION = ("begin", "end", "apart", "begin, end")


@case(save_tied_by_function, stages=(0, 1), quick_stages=(0, 1), quick_ranks=(2, 3))
def tied_layers_with_a_function(stage):
    for which, stages in itertools.product(TIED_BY_FUNCTION, degrees()):
        engine = tied_by_function(stages, which, zero=stage, seed=5)
        words = {
            "apart": stages == 1 and "0.scale and 2.scale are of one tied layer, and differ",
            "begin": stages == 2 and "not in the checkpoint (2): tied_modules.tied.bias",
            "begin, end": "in the module" if stage else "trained",
        }.get(which)
        if words:
            refused(engine, words, tag=which)
            continue
        load(engine, which)
        truth = truths_of_ranks(which)[dist.get_rank() if which == "apart" else 0]
        state = state_of(engine)
        assert not differences({name: truth[name] for name in state if name in truth}, state), which
    if on_own_ranks():
        load(tied_by_function(2, "apart", kind=Frozen, zero=stage), "apart")
        assert printed("tied_modules.tied.weight is trained in one pipeline stage and frozen in")


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
