"""Cases of tests/load/test_whole_and_refused.py: `whole_and_refused.py save STAGE CASE...` on 2
ranks, then `... load STAGE CASE...` on as many or others, each case in a folder of its name.

A case is a function that saves and a function that loads. They assert what they see; the test is
that they end."""

import contextlib
import io
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from toy import (
    ExtraState,
    Net,
    begin,
    differences,
    in_turn,
    make,
    read_truth,
    save_truth,
    snapshot,
    train,
)

import universal

CASES = {}
PRINTED = io.StringIO()  # by this rank, in this case


class Case(NamedTuple):
    """save(stage) runs on 2 ranks; load(stage) on each of these numbers of ranks."""

    save: Callable[[int], None]
    load: Callable[[int], None]
    stages: tuple[int, ...]
    ranks: tuple[int, ...]


def case(save, stages=(1, 3), ranks=(3,)):
    """The function below is the part of a case that loads what save(stage) has saved."""

    def add(load):
        CASES[load.__name__] = Case(save, load, stages, ranks)
        return load

    return add


def saved(tag="t", exclude_frozen_parameters=False, **options):
    """A save(stage): an engine with these options trains two steps, and saves itself as `tag`. What
    it holds is in truth.pt."""

    def save(stage):
        engine = make(stage, **options)
        for step in (0, 1):
            train(engine, step)
        engine.save_checkpoint(
            ".",
            tag=tag,
            client_state={"step": 2},
            exclude_frozen_parameters=exclude_frozen_parameters,
        )
        save_truth(snapshot(engine))

    return save


def load(engine, tag="t", **options):
    path, client_state = universal.load_checkpoint(engine, ".", tag, timeout=60, **options)
    assert path == tag and client_state["step"] == 2


def restored(stage, tag="t", load_module_strict=True, **options):
    """An engine of another seed that has loaded `tag`, and holds what was saved."""
    engine = make(stage, seed=5, **options)
    load(engine, tag, load_module_strict=load_module_strict)
    wrong = differences(read_truth(), snapshot(engine))
    assert not wrong, wrong
    return engine


def refused(engine, *parts, **options):
    """load_checkpoint() refuses, in one line that has these parts and is the same on all ranks."""
    lines = [None] * dist.get_world_size()
    line = None
    try:
        universal.load_checkpoint(engine, ".", **{"tag": "t", "timeout": 60} | options)
    except universal.CheckpointError as error:
        line = str(error)
    dist.all_gather_object(lines, line)
    assert line and "\n" not in line and set(lines) == {line}, lines
    assert all(part in line for part in parts), (line, parts)
    assert "damaged" not in line, line


def printed(line):
    """Whether rank 0 has printed a line that has this part."""
    return dist.get_rank() or line in PRINTED.getvalue()


# --------------------------------------------------------------------------------------------------
# What modules do with their state


class Forgetful(nn.Module):
    """Resets what a state that it loads does not name, as detectron2's frozen BatchNorm does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.randn(8))

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        state_dict.setdefault(f"{prefix}mean", torch.zeros_like(self.mean))
        super()._load_from_state_dict(state_dict, prefix, *rest)


class ForgetfulChild(Net):
    """Its parent has an extra state, whose name comes after the child's."""

    def __init__(self):
        super().__init__()
        self.parent = PassesOn()
        self.parent.add_module("0", Forgetful())


@case(saved(net=ForgetfulChild))
def children_that_reset(stage):
    restored(stage, net=ForgetfulChild)


class PassesOn(ExtraState):
    """A layer that does nothing, and has extra state."""

    def __init__(self):
        super().__init__({})

    def forward(self, x):
        return x


class Wrapped(Net):
    """torch's checkpoint_wrapper, which Accelerate uses, gives names to parameters that it takes
    back in state_dict()."""

    def __init__(self):
        super().__init__()
        block = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), PassesOn())
        block[0].bias.requires_grad_(False)
        self.block = checkpoint_wrapper(block)

    def forward(self, x):
        return super().forward(self.block(torch.cat([x, x + 1])))


class Inner(nn.Module):
    """Saves and loads itself as the model inside, so that others can read its files."""

    def __init__(self):
        super().__init__()
        self.model = Net()
        self.model.block = PassesOn()

    def forward(self, x):
        return self.model(x)

    def state_dict(self, *args, **options):
        return self.model.state_dict(*args, **options)

    def load_state_dict(self, state, strict=True):
        self.model.load_state_dict(state, strict)


def check_renamed(stage, net):
    """A model whose state_dict() has other names than its parameters comes back: from its ranks'
    files, from a conversion, and at another stage."""
    restored(stage, net=net)
    if dist.get_rank() == 0:
        universal.convert("t", "u")
    dist.barrier()
    restored(stage, "u", net=net)
    restored(4 - stage, net=net)


@case(saved(net=Wrapped))
def renamed_by_a_wrapper(stage):
    check_renamed(stage, Wrapped)


@case(saved(net=Inner))
def renamed_by_the_model(stage):
    check_renamed(stage, Inner)


class Scales:
    """What the codes of 4-bit weights are scaled by, as bitsandbytes' QuantState."""

    def __init__(self, absmax, offset):
        self.absmax = absmax
        self.offset = offset

    @classmethod
    def from_dict(cls, state, device):
        return cls(state["absmax"].to(device), state["quant_state.offset"].item())


class Linear4(nn.Module):
    """As bitsandbytes' Linear4bit: it saves the scales, and does not load them."""

    def __init__(self, scales=True):
        super().__init__()
        self.weight = nn.Parameter(torch.randint(255, (8, 4), dtype=torch.uint8), False)
        self.scales = Scales(torch.rand(4), torch.rand(1).item())
        if scales:
            self.weight.quant_state = self.scales

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = self.scales.absmax
        offset = torch.tensor(self.scales.offset, dtype=torch.float64)
        destination[f"{prefix}weight.quant_state.offset"] = offset

    def forward(self, x):
        return x @ (self.weight * self.scales.absmax - self.scales.offset)


class Adapter(Net):
    """Trains beside a frozen matrix of 4 bits."""

    def __init__(self, **options):
        super().__init__()
        self.base = Linear4(**options)

    def forward(self, x):
        return super().forward(x) + self.base(x).mean()


def scales_of(engine):
    return vars(engine.module.base.scales)


def of_a_quantized_model(**options):
    def save(stage):
        saved(net=Adapter, **options)(stage)
        torch.manual_seed(1)
        save_truth(vars(Adapter().base.scales), "scales.pt")

    return save


@case(of_a_quantized_model(), ranks=(2, 3))
def codes_and_scales(stage):
    """Both come back, though the module takes no scales."""
    truth = read_truth("scales.pt")
    for strict in (True, False):
        scales = scales_of(restored(stage, load_module_strict=strict, net=Adapter))
        assert (
            torch.equal(scales["absmax"], truth["absmax"]) and scales["offset"] == truth["offset"]
        )
    assert "left as it is" not in PRINTED.getvalue()


@case(of_a_quantized_model())
def codes_whose_scales_nobody_takes(stage):
    """Of another package: they are wrong with the scales of another model, and right with their
    own."""
    for strict in (True, False):
        engine = make(stage, lambda: Adapter(scales=False), seed=5)
        refused(engine, "no module takes base.weight.absmax", load_module_strict=strict)
    load(make(stage, lambda: Adapter(scales=False), seed=1))


@case(of_a_quantized_model(exclude_frozen_parameters=True))
def scales_without_their_codes(stage):
    """As of PEFT under a Trainer, which saves no frozen weights: the scales stay those of the codes
    in the model."""
    engine = make(stage, Adapter, seed=5)
    initial = dict(scales_of(engine))
    load(engine, load_module_strict=False)
    assert scales_of(engine) == initial
    assert printed("base.weight.absmax, base.weight.quant_state.offset: left as it is")
    load(make(stage, Adapter, seed=1), load_module_strict=False)


def quantized_by_bitsandbytes():
    from bitsandbytes.nn import Linear4bit

    net = Adapter()
    net.base = Linear4bit(8, 64, bias=False, quant_type="nf4", compute_dtype=torch.float32)
    return net.to("cpu")  # which quantizes


def of_bitsandbytes(stage):
    saved(net=quantized_by_bitsandbytes)(stage)
    engine = make(stage, quantized_by_bitsandbytes)
    state = engine.module.base.state_dict()
    save_truth({name: state[name] for name in state if name.startswith("weight.")}, "scales.pt")
    save_truth(engine.module.base(torch.ones(1, 8)), "output.pt")


@case(of_bitsandbytes, stages=(), ranks=(2, 3))
def bitsandbytes(stage):
    """The package itself, whose scales are quantized, too."""
    engine = restored(stage, net=quantized_by_bitsandbytes)
    state = engine.module.base.state_dict()
    wrong = differences(read_truth("scales.pt"), state)
    assert not wrong, wrong
    assert torch.equal(engine.module.base(torch.ones(1, 8)), read_truth("output.pt"))
    assert "left as it is" not in PRINTED.getvalue()


if __name__ == "__main__":
    begin()
    phase, stage, *names = sys.argv[1:]

    def play(name):
        PRINTED.seek(0)
        PRINTED.truncate()
        with contextlib.redirect_stdout(PRINTED):
            getattr(CASES[name], phase)(int(stage))

    in_turn(names, play)
