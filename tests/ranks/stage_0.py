"""Without ZeRO and with it: cases of every kind of engine into every other one, a kind being a
stage and a precision, and what else there is to say."""

import functools
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import fused_adam
from deepspeed.runtime import engine as deepspeed_engine
from models import Shaped
from optimizers import momentum
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import universal
from tests.support import toy
from tests.support.case import Case, case, convert, load, printed, refused
from tests.support.toy import (
    BF16,
    BF16_OPTIMIZER,
    Net,
    differences,
    falling,
    make,
    read_truth,
    save_truth,
    split_groups,
    torch_optimizer,
    train,
)

FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}}
PRECISIONS = {
    "fp32": {},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "bf16": BF16,
    "flat bf16": BF16,  # FP16_Optimizer
    "bf16 summed in fp32": BF16_OPTIMIZER,
    "fp16": FP16,
    "flat fp16": FP16,
}
ENGINES = [(0, precision) for precision in PRECISIONS if "summed" not in precision]
ENGINES += [(stage, precision) for stage in (1, 2, 3) for precision in ("fp32", "bf16", "fp16")]
ENGINES += [(1, "autocast"), (1, "bf16 summed in fp32")]
KINDS = {f"{stage} {precision}": (stage, precision) for stage, precision in ENGINES}
SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
STEPS = (3, 4, 5)  # those after the save


def adamw(parameters):
    """With weight decay for matrices alone."""
    matrices = {"params": [p for p in parameters if p.dim() == 2], "weight_decay": 0.1}
    return torch.optim.AdamW([matrices, {"params": [p for p in parameters if p.dim() < 2]}], 0.01)


def engine_of(kind, seed, net=Net, optimizer=adamw, **options):
    """With a frozen layer, a buffer, and two parameter groups."""
    stage, precision = KINDS[kind]
    get_accelerator().is_fp16_supported = lambda: True
    fused = torch.optim.AdamW if precision.startswith("flat") else deepspeed_engine.FusedAdam
    options |= PRECISIONS[precision]
    with mock.patch.object(deepspeed_engine, "FusedAdam", fused):
        return make(stage, net, optimizer, seed, clip=1.0, scheduler=falling, **options)


def snapshot(engine, states=True):
    """toy.snapshot(), with what each class of loss scaler has."""
    truth = toy.snapshot(engine, states)
    scale = truth["scale"] or {}
    return truth | {"scale": {key: scale.get(key) for key in SCALE}}


def save(kind, folder=".", **options):
    Path(folder).mkdir(exist_ok=True)
    engine = engine_of(kind, seed=1, **options)
    for step in range(3):
        train(engine, step)
    engine.save_checkpoint(folder, tag="t", client_state={"word": kind})
    save_truth(snapshot(engine), f"{folder}/truth.pt")
    save_truth([train(engine, step) for step in STEPS], f"{folder}/losses.pt")


def saved(kind, **options):
    return lambda stage: save(kind, **options)


def loaded(kind, folder=".", tag="t", told=None, **options):
    """An engine of another seed that has loaded. told: options of load_checkpoint()."""
    engine = engine_of(kind, seed=5, **options)
    universal.load_checkpoint(engine, folder, tag, **told or {})
    return engine


def load_into(source, kind, stage):
    """Every state is that which was saved, and the loss goes on."""
    engine = engine_of(kind, seed=5)
    train(engine, 7)
    assert load(engine)["word"] == source
    check(engine, source, kind)


def convert_into(source, kind, stage):
    """The same, of what our converter makes of it; the config says load_universal."""
    convert(check=True)
    engine = engine_of(kind, seed=5, checkpoint={"load_universal": True})
    assert load(engine, "u")["word"] == source
    check(engine, source, kind)


def check(engine, source, kind):
    now = snapshot(engine)
    truth = rounded(read_truth(), now)
    if not ("fp16" in source and "fp16" in kind):
        del truth["scale"]
    assert not differences(truth, now), differences(truth, now)
    assert len([name for name in truth if name.endswith(" exp_avg")]) == 5
    limit = 1e-6 if source.endswith("fp32") and kind.endswith(" fp32") else 2e-2
    assert loss_gap(engine) <= limit


def loss_gap(engine):
    losses = [train(engine, step) for step in STEPS]
    return max(abs(a - b) for a, b in zip(losses, read_truth("losses.pt"), strict=True))


def rounded(truth, now):
    """The truth in the precision of another engine: its weights are masters, rounded."""
    truth = {name: truth.get(f"{name} fp32", value) for name, value in truth.items()}
    return {
        name: value.to(now[name].dtype) if torch.is_tensor(value) and name in now else value
        for name, value in truth.items()
    }


# --------------------------------------------------------------------------------------------------
# every kind into every other one, but for those that both have ZeRO

QUICK = (  # each class of DeepSpeed's optimizers, and each precision, in both directions
    "0 fp32 to 3 fp32",
    "0 autocast to 2 fp32",
    "0 flat bf16 to 1 bf16 summed in fp32",
    "0 bf16 to 0 flat fp16",
    "0 fp16 to 1 fp16",
    "1 fp16 to 0 flat fp16",
    "2 bf16 to 0 fp32",
    "3 fp32 to 0 bf16",
    "0 fp32 converted to 3 fp32",
    "0 flat bf16 converted to 1 bf16",
)


def all_pairs():
    cases = {}
    for source in KINDS:
        for kind in KINDS:
            without_zero = [name.startswith("0") for name in (source, kind)]
            if any(without_zero):
                add_pair(cases, f"{source} to {kind}", load_into, source, kind)
            if without_zero == [True, False]:
                add_pair(cases, f"{source} converted to {kind}", convert_into, source, kind)
    return cases


def add_pair(cases, name, play, source, kind):
    quick = (0,) * (name in QUICK)
    play = functools.partial(play, source, kind)
    cases[name] = Case(saved(source), play, (0,), quick, quick_ranks=(3,))


# --------------------------------------------------------------------------------------------------
# what else there is to say

of_stage_0 = functools.partial(case, stages=(0,))
SOURCES = ("0 fp32", "0 flat bf16", "2 bf16")


def save_sources(stage):
    for kind in SOURCES:
        save(kind, kind)


@of_stage_0(save_sources)
def weights_alone(stage):
    """From a checkpoint without ZeRO into stages that have it, and back."""
    for source, kind in (
        ("0 fp32", "1 fp32"),
        ("0 fp32", "3 fp32"),
        ("0 flat bf16", "3 bf16"),
        ("2 bf16", "0 bf16"),
        ("2 bf16", "0 fp32"),
    ):
        for options in ({"load_optimizer_states": False}, {"load_module_only": True}):
            now = snapshot(loaded(kind, source, told=options))
            truth = rounded(read_truth(f"{source}/truth.pt"), now)
            kept = {name: truth[name] for name in truth if "exp_avg" not in name}
            lost = {*differences(kept, now)}
            assert lost <= {"groups", "steps", "scale", "scheduler", "counters"}, (source, lost)


@of_stage_0(save_sources)
def evaluation(stage):
    """An engine that has no optimizer, nor ZeRO."""
    for source in SOURCES:
        engine = make(0, optimizer=None, seed=5)
        universal.load_checkpoint(engine, source, "t")
        truth = read_truth(f"{source}/truth.pt")
        if source == "2 bf16":  # of a shard, the masters
            truth = {name: truth.get(f"{name} fp32", value) for name, value in truth.items()}
        for name, value in engine.module.state_dict().items():
            assert torch.equal(value, truth[name].float()), (source, name)


def save_again(stage):
    """Tags of step 2 with ZeRO, over which step 3 is saved without."""
    for kind in ("1 fp32", "3 fp32"):
        engine = engine_of(kind, seed=2)
        for step in range(2):
            train(engine, step)
        engine.save_checkpoint(kind, tag="t")
        save("0 fp32", kind)


@of_stage_0(save_again)
def saved_again(stage):
    """The newest save counts, whether or not the tag is named."""
    for kind in ("1 fp32", "3 fp32"):
        for tag, to in (("t", "0 fp32"), (None, "1 fp32")):
            now = snapshot(loaded(to, kind, tag))
            lost = differences(read_truth(f"{kind}/truth.pt"), now)
            assert not {*lost} - {"scale"}, (kind, to, lost)


def of_all(_):
    """Of all parameters of the net that was made last, the frozen ones among them."""
    return torch.optim.AdamW(Remembered.last.parameters())


class Remembered(Net):
    def __init__(self):
        super().__init__()
        Remembered.last = self


@of_stage_0(saved("0 fp32", net=Remembered, optimizer=of_all))
def frozen_parameters_given(stage):
    """The optimizer has numbers for them, and no states."""
    for kind, net, optimizer in (
        ("3 fp32", Net, torch.optim.AdamW),
        ("0 fp32", Remembered, of_all),
    ):
        check(loaded(kind, net=net, optimizer=optimizer), "0 fp32", kind)
    convert()


def reversed_adamw(parameters):
    return adamw([*reversed(parameters)])


TWINS = ("0 flat bf16", "0 bf16")


class Twins(Net):
    """Has two layers of one shape."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.Sequential(torch.nn.LayerNorm(7), torch.nn.LayerNorm(7))


def save_twins(stage):
    for kind in TWINS:
        save(kind, kind, net=Twins)


@of_stage_0(save_twins)
def another_order(stage):
    """Where masters are saved, their values tell which parameter is where."""
    for source in TWINS:
        for kind in (source, "1 bf16", "3 bf16"):
            now = snapshot(loaded(kind, source, net=Twins, optimizer=reversed_adamw))
            kept = {n: v for n, v in read_truth(f"{source}/truth.pt").items() if n != "scale"}
            lost = differences(rounded(kept, now), now)
            assert not lost, (source, kind, lost)


@of_stage_0(lambda stage: save("0 fp32", "reversed", optimizer=reversed_adamw))
def an_order_that_does_not_fit(stage):
    """Without masters, nothing tells another one: DeepSpeed's loader would say nothing."""
    loaded("0 fp32", "reversed")
    assert printed("WARNING: the order of the parameters of the optimizer is not known")
    with pytest.raises(universal.CheckpointError, match="is not known.*on its own ranks only"):
        loaded("1 fp32", "reversed")


def of_all_in_groups(_):
    return adamw([*Remembered.last.parameters()])


class Thawed(Remembered):
    def __init__(self):
        super().__init__()
        self.frozen.requires_grad_(True)


class Wrapped(Remembered):
    def __init__(self):
        super().__init__()
        self.a = checkpoint_wrapper(self.a)


class Empty(Remembered):
    def __init__(self):
        super().__init__()
        self.a.none = torch.nn.Parameter(torch.zeros(0, 3))

    def forward(self, x):
        return super().forward(x) + self.a.none.sum()


class Longer(Remembered):
    def __init__(self):
        super().__init__()
        self.a.extra = torch.nn.Linear(8, 3)

    def forward(self, x):
        return super().forward(x) + self.a.extra(x).pow(2).mean()


CHANGED = {  # the model that saves, the one that loads, and the optimizer of both
    "given": (Remembered, Remembered, of_all_in_groups),
    "wrapped": (Wrapped, Wrapped, torch.optim.AdamW),
    "empty": (Empty, Empty, torch.optim.AdamW),
    "thawed": (Remembered, Thawed, of_all),
    "frozen": (Thawed, Remembered, of_all),
    "gone": (Longer, Remembered, torch.optim.AdamW),
    "new": (Remembered, Longer, torch.optim.AdamW),
}


def save_changed(stage):
    for name, (net, _, optimizer) in CHANGED.items():
        save("0 fp32", name, net=net, optimizer=optimizer)


@of_stage_0(save_changed)
def changed_models(stage):
    """Each parameter has its own state, whatever the others are."""
    for name, (saved_net, net, optimizer) in CHANGED.items():
        truth = read_truth(f"{name}/truth.pt")
        # At ZeRO-3 DeepSpeed cannot tell the states of what has no elements.
        for kind in ("0 fp32", "1 fp32", "3 fp32")[: 2 if name == "empty" else 3]:
            told = {"load_module_strict": net is saved_net}
            now = snapshot(loaded(kind, name, told=told, net=net, optimizer=optimizer))
            shared = {
                n: truth[n] for n in now if torch.is_tensor(truth.get(n)) and truth[n].numel()
            }
            assert not differences(shared, now), (name, kind, differences(shared, now))
            assert len([n for n in shared if n.endswith(" exp_avg")]) >= 5


class Strided(Net):
    """A weight that is a part of a larger tensor."""

    def __init__(self):
        super().__init__()
        self.a.weight = torch.nn.Parameter(torch.randn(7, 11)[:, 2:10])


@of_stage_0(saved("0 fp32", net=Strided))
def strided_weights(stage):
    for kind, net in {"1 fp32": Net, "3 fp32": Net, "0 fp32": Strided}.items():
        check(loaded(kind, net=net), "0 fp32", kind)


@of_stage_0(saved("0 fp32"))
def moments_of_zero(stage):
    """The control: without the moments, states and losses are far from those that were saved."""
    for kind in ("0 fp32", "3 fp32"):
        engine = loaded(kind)
        for state in torch_optimizer(engine).state.values():
            state["exp_avg"].zero_()
        truth = read_truth()
        lost = {*differences(truth, snapshot(engine))} - {"scale"}
        assert lost == {name for name in truth if name.endswith(" exp_avg")}
        assert loss_gap(engine) > 1e-3


def fused(parameters):
    """DeepSpeed's FusedAdam, which "AdamW" is on a GPU, with what its CUDA kernel does."""

    def multi_tensor_adam(_, __, tensors, lr, beta1, beta2, eps, step, *modes_and_decay):
        *_, decay = modes_and_decay
        for gradient, weights, mean, square in zip(*tensors, strict=True):
            mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
            square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            root = (square / (1 - beta2**step)).sqrt() + eps
            weights.sub_(lr * (mean / (1 - beta1**step) / root + decay * weights))

    kernels = SimpleNamespace(load=lambda: SimpleNamespace(multi_tensor_adam=multi_tensor_adam))
    with mock.patch.object(fused_adam, "FusedAdamBuilder", lambda: kernels):
        return fused_adam.FusedAdam(adamw(parameters).param_groups)


@of_stage_0(saved("0 fp32", optimizer=fused))
def steps_in_last_state(stage):
    """FusedAdam counts those of a group in its last parameter's state alone."""
    for kind, optimizer in (("0 fp32", fused), ("1 fp32", fused), ("3 fp32", adamw)):
        engine = loaded(kind, optimizer=optimizer)
        steps = {float(state["step"]) for state in torch_optimizer(engine).state.values()}
        assert steps == ({0.0, 3.0} if kind == "0 fp32" else {3.0}), steps
        assert loss_gap(engine) <= 1e-6
    convert()


class Uneven(torch.optim.AdamW):
    """Parameters have taken different numbers of steps."""

    def step(self, closure=None):
        super().step()
        for i, state in enumerate(self.state.values()):
            state["step"] = torch.tensor(float(i))


def uneven(parameters):
    return Uneven(adamw(parameters).param_groups)


def three_groups(parameters):
    return torch.optim.AdamW(split_groups(parameters, 3))


@of_stage_0(saved("0 fp32"))
def other_engines(stage):
    """Another model, another optimizer, other groups."""
    for kind in ("0 fp32", "0 bf16", "1 fp32", "3 bf16"):
        refused(
            engine_of(kind, 5, lambda: Shaped(4, 7)), "b.weight is (4, 7) here, and (5, 7) in the"
        )
        refused(engine_of(kind, 5, optimizer=momentum), "of another optimizer: it has")
        refused(engine_of(kind, 5, optimizer=three_groups), "load_optimizer_states=False")


@of_stage_0(saved("0 fp32", optimizer=uneven))
def steps_of_parameters(stage):
    """ZeRO has one count for a whole group."""
    refused(engine_of("1 fp32", 5), "step of the optimizer differs between parameters")
    states = loaded("0 fp32", optimizer=uneven).optimizer.state.values()
    steps = [state["step"].item() for state in states]
    assert sorted(steps) == [0, 1, 2, 3, 4], steps
