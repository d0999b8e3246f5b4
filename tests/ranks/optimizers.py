"""Another optimizer than the one that was saved; optimizers that keep what few keep."""

import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import Adafactor

import universal
from tests.support.case import (
    case,
    check_losses,
    check_restored,
    check_weights_restored,
    convert,
    load,
    on_own_ranks,
    refused,
    restored,
    resumed,
    saved,
    saved_with_losses,
    train_and_save,
)
from tests.support.toy import (
    differences,
    falling,
    make,
    save_of_rank,
    snapshot,
    states_of,
    train,
    truths_of_ranks,
)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@case(saved(optimizer=momentum))
def another_optimizer(stage):
    """Before anything is loaded."""
    engine = make(stage)
    before = snapshot(engine, states=False)
    refused(engine, "of another optimizer: it has", "load_optimizer_states=False")
    assert not differences(before, snapshot(engine, states=False))


def parameters_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


class SliceNorm(torch.optim.Optimizer):
    """Keeps a number that depends on the slice that a rank holds, as LAMB's and Prodigy's kind do;
    AdamW could take the other states."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        for p in parameters_of(self):
            state = self.state[p]
            state["step"] = state.get("step", 0) + 1
            for key in ("exp_avg", "exp_avg_sq"):
                state.setdefault(key, torch.zeros_like(p)).lerp_(p.grad, 0.1)
            state["norm"] = 0.5 * state.get("norm", 0.0) + state["exp_avg"].norm()
            p.sub_(0.01 * state["exp_avg"] / (1e-3 + state["norm"]))


def adafactor(parameters):
    """transformers', in which only the RMS of the weights, kept for nothing, follows the rank."""
    options = {"beta1": 0.9, "clip_threshold": 1e9, "warmup_init": True, "scale_parameter": False}
    return Adafactor(parameters, **options)


@case(saved_with_losses(optimizer=adafactor))
def adafactor_of_transformers(stage):
    """Each step computes its RMS anew, so neither other ranks nor a conversion wants it."""
    convert()
    for tag in ("t", "u"):
        check_losses(resumed(stage, tag, optimizer=adafactor))


def norm_of(engine):
    (state,) = engine.optimizer.optimizer.state.values()
    return state["norm"].item()


def save_norms(stage):
    save_of_rank(norm_of(train_and_save(stage, optimizer=SliceNorm)))


@case(save_norms, quick_ranks=(2, 3))
def numbers_of_a_slice(stage):
    """Kept on the ranks that saved; refused on others, but for the weights."""
    engine = make(stage, optimizer=SliceNorm, seed=5)
    if on_own_ranks():
        load(engine)
        norms = truths_of_ranks()
        assert norm_of(engine) == norms[dist.get_rank()] and norms[0] != norms[1]
    else:
        reason = "norm of the optimizer differs between ranks 0 and 1"
        refused(engine, reason, "on its own ranks only")
        load(engine, load_optimizer_states=False)


class Peculiar(torch.optim.SGD):
    """Counts its steps beside the states, in two places, and has states that are no tensors of the
    masters' dtype."""

    looks = 0

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1, momentum=0.9)

    def step(self, closure=None):
        super().step()
        self.looks += 1
        self.state["k"] = torch.tensor([self.looks])
        for p in parameters_of(self):
            state = self.state[p]
            state.setdefault("sum", torch.zeros_like(p, dtype=torch.float64)).add_(p.grad / 3)
            state["decay"] = np.float64(0.9**self.looks)

    def state_dict(self):
        return super().state_dict() | {"looks": self.looks}

    def load_state_dict(self, state):
        self.looks = state.get("looks", 0)
        super().load_state_dict({key: value for key, value in state.items() if key != "looks"})


def sums_of(engine):
    return [state["sum"].sum().item() for state in states_of(engine.optimizer.optimizer)]


def save_peculiar(stage):
    engine = train_and_save(stage, optimizer=Peculiar)
    save_of_rank(sums_of(engine))
    with pytest.raises(universal.CheckpointError, match="decay, k, looks of the optimizer"):
        universal.convert("t", f"u{dist.get_rank()}")


@case(save_peculiar, quick_ranks=(2, 3))
def peculiar_optimizer(stage):
    engine = resumed(stage, optimizer=Peculiar)
    optimizer = engine.optimizer.optimizer
    assert optimizer.looks == 2 and optimizer.state["k"].tolist() == [2]
    for state in states_of(optimizer):
        assert state["sum"].dtype == torch.float64 and type(state["decay"]) is np.float64, state
    if on_own_ranks():
        assert sums_of(engine) == truths_of_ranks()[dist.get_rank()]


class OfItsRank(torch.optim.SGD):
    """Finds a hyper-parameter on the way, as D-Adaptation and Prodigy do."""

    def __init__(self, parameters):
        super().__init__([{"params": parameters, "d": 1.0}], lr=0.1, momentum=0.9)

    def step(self, closure=None):
        super().step()
        self.param_groups[0]["d"] = 1.0 + dist.get_rank()


def save_and_convert(stage):
    train_and_save(stage, optimizer=torch.optim.ASGD)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        convert(strict=False)


@case(save_and_convert)
def converted_without_a_state(stage):
    """ASGD's eta belongs to no element: a universal checkpoint has no place for it."""
    train(resumed(stage, optimizer=torch.optim.ASGD), 2)
    engine = make(stage, optimizer=torch.optim.ASGD, seed=5)
    refused(engine, "converted without", "eta", "load_optimizer_states=False", tag="u")
    load(engine, "u", load_optimizer_states=False)
    check_weights_restored(engine)


@case(saved(optimizer=torch.optim.Adagrad), quick_stages=(1, 3))
def loaded_twice(stage):
    """DeepSpeed makes Adagrad anew with every load."""
    engine = restored(stage, optimizer=torch.optim.Adagrad)
    train(engine, 2)
    load(engine)
    check_restored(engine)


ELASTIC = {"zero": {"elastic_checkpoint": True}, "optimizer": torch.optim.Adagrad}


@case(saved(scheduler=falling, **ELASTIC), stages=(1, 2))
def elastic_checkpoint_of_adagrad(stage):
    """ZeRO-1 and 2 then save no hyper-parameters. The scheduler sets the rates of an optimizer that
    DeepSpeed has replaced: none is taken."""
    restored(stage, scheduler=falling, **ELASTIC)
