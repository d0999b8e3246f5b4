"""A schedule that now gives the next step another rate than when it was saved is named before that
step; one that goes on as it was is not."""

import functools

import pytest
import torch
from deepspeed.runtime.lr_schedules import (
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiplicativeLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

import universal
from tests.support import toy
from tests.support.ranks import run
from tests.support.toy import two_groups
from universal.load.schedules import changed_rate

SAVED = 50  # of the steps below, all but its last ones


def linear(optimizer, steps):
    """As transformers' get_linear_schedule_with_warmup()."""
    return LambdaLR(optimizer, lambda step: min(step / 20, max(0.0, (steps - step) / (steps - 20))))


# {name: (the schedule for so many steps, whether their number changes the rate of step 51)}. All
# that the others need is in their states.
DEEPSPEED = {
    "LRRangeTest": lambda optimizer, steps: LRRangeTest(optimizer, 1e-3, steps),
    "OneCycle": lambda optimizer, steps: OneCycle(optimizer, 1e-4, 1e-3, 0.1, steps // 2),
    "WarmupLR": lambda optimizer, steps: WarmupLR(optimizer, 0, 1e-3, steps),
    "WarmupDecayLR": lambda optimizer, steps: WarmupDecayLR(optimizer, steps, 0, 1e-3, 20),
    "WarmupCosineLR": lambda optimizer, steps: WarmupCosineLR(optimizer, steps, 0, 20),
}
CLOSED_FORMS = {
    "StepLR": lambda optimizer, steps: StepLR(optimizer, steps // 4),
    "MultiStepLR": lambda optimizer, steps: MultiStepLR(optimizer, [steps // 4, steps // 2]),
    "LinearLR": lambda optimizer, steps: LinearLR(optimizer, 1.0, 0.1, steps),
    "ExponentialLR": lambda optimizer, steps: ExponentialLR(optimizer, 0.1 ** (1 / steps)),
    "PolynomialLR": lambda optimizer, steps: PolynomialLR(optimizer, steps),
    "CosineAnnealingLR": lambda optimizer, steps: CosineAnnealingLR(optimizer, steps),
}
OTHERS = {
    "OneCycleLR": lambda optimizer, steps: OneCycleLR(optimizer, 1e-3, steps),
    "MultiplicativeLR": lambda optimizer, steps: MultiplicativeLR(optimizer, lambda _: 0.99),
    "WarmRestarts": lambda optimizer, steps: CosineAnnealingWarmRestarts(optimizer, steps),
    "ReduceLROnPlateau": lambda optimizer, _: ReduceLROnPlateau(optimizer),
    "SequentialLR": lambda optimizer, steps: SequentialLR(
        optimizer, [linear(optimizer, steps), linear(optimizer, steps)], [steps // 2]
    ),
}


def optimizer_of(rates=(1e-3, 1e-2)):
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups)


def trained(make, steps, count=SAVED):
    """A schedule after so many steps, and the rates of its optimizer's groups."""
    optimizer = optimizer_of()
    scheduler = make(optimizer, steps)
    for _ in range(count):
        optimizer.step()
        scheduler.step(*[1.0] * isinstance(scheduler, ReduceLROnPlateau))
    return scheduler, [group["lr"] for group in optimizer.param_groups]


def resumed(make, steps, saved_steps, edit=1.0):
    """What is said of a schedule for so many steps that resumes from one for saved_steps.

    edit: by what the script multiplied the groups' rates before it saved.
    """
    saved, rates = trained(make, saved_steps)
    scheduler = make(optimizer_of(), steps)
    scheduler.load_state_dict(saved.state_dict())
    return changed_rate(scheduler, [edit * rate for rate in rates], SAVED + 1)


@pytest.mark.parametrize("name", DEEPSPEED)
def test_deepspeeds(name):
    assert resumed(DEEPSPEED[name], 80, saved_steps=80) is None
    assert "the schedule gives step 51 a rate of" in resumed(DEEPSPEED[name], 120, saved_steps=80)


def test_lambda():
    """In the words of the page; whatever the script has made of the groups' rates, too."""
    text = resumed(linear, 120, saved_steps=80)
    assert text == (
        "the schedule gives step 51 a rate of 7.0e-04; it was 5.0e-04 when it was saved: has the "
        "number of steps changed?"
    )
    assert resumed(linear, 80, saved_steps=80) is None
    assert resumed(linear, 80, saved_steps=80, edit=0.5) is None
    assert "a rate of 5.000000e-04; it was 4.999" in resumed(linear, 80, saved_steps=79.999)


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_closed_forms(name):
    """Their states have all that they are made of; a script can also make them anew at a step."""
    make = CLOSED_FORMS[name]
    assert resumed(make, 120, saved_steps=80) is None
    _, rates = trained(make, 80)
    again, _ = trained(make, 80)
    assert changed_rate(again, rates, SAVED + 1) is None
    another, _ = trained(make, 120)
    assert "has the number of steps changed?" in changed_rate(another, rates, SAVED + 1)


@pytest.mark.parametrize("name", ["ExponentialLR", "CosineAnnealingLR"])
def test_edited_on_the_way(name):
    """A script has halved the rates: such a schedule goes on from there, also after a resume."""
    saved, _ = trained(CLOSED_FORMS[name], 80, count=25)
    groups = saved.optimizer.param_groups
    for group in groups:
        group["lr"] /= 2
    for _ in range(25):
        saved.optimizer.step()
        saved.step()
    again = CLOSED_FORMS[name](optimizer_of(), 80)
    again.load_state_dict(saved.state_dict())
    assert changed_rate(again, [group["lr"] for group in groups], SAVED + 1) is None


@pytest.mark.parametrize("name", OTHERS)
def test_others(name):
    assert resumed(OTHERS[name], 120, saved_steps=120) is None
    assert resumed(OTHERS[name], 160, saved_steps=120) is None


def test_silence():
    """Where a rate cannot be computed, there is none, or the schedule has not begun."""
    scheduler, rates = trained(linear, 80)
    assert changed_rate(None, rates, 51) is None
    assert changed_rate(object(), rates, 51) is None
    assert changed_rate(scheduler, [None, None], 51) is None
    assert changed_rate(scheduler, rates[:1], 51) is None
    assert changed_rate(WarmupLR(optimizer_of(), 0, 1e-3, 80), [1.0, 1.0], 1) is None
    scheduler.lr_lambdas = [lambda _: 1 / 0] * 2
    assert changed_rate(scheduler, rates, 51) is None


# --------------------------------------------------------------------------------------------------
# in engines


def engines(steps):
    """Yields (name, an engine with a schedule for so many steps)."""
    toy.begin()
    for name, (stage, make, optimizer) in CASES.items():
        scheduler = functools.partial(make, steps=steps)
        yield name, toy.make(stage, optimizer=optimizer, scheduler=scheduler)


def save():
    for name, engine in engines(80):
        for step in range(SAVED):
            toy.train(engine, step)
        engine.save_checkpoint("saved", tag=name)


def resume(steps):
    for name, engine in engines(steps):
        universal.load_checkpoint(engine, "saved", tag=name)


CASES = {
    "linear 1": (1, linear, two_groups),
    "linear 3": (3, linear, two_groups),
    "WarmupDecayLR 0": (0, DEEPSPEED["WarmupDecayLR"], two_groups),
    "WarmupDecayLR 2": (2, DEEPSPEED["WarmupDecayLR"], toy.adam),
    "WarmupCosineLR 3": (3, DEEPSPEED["WarmupCosineLR"], two_groups),
    "CosineAnnealingLR 1": (1, CLOSED_FORMS["CosineAnnealingLR"], two_groups),
}


def test_engines(tmp_path):
    """On other ranks: a line for each, but for the one whose state has all."""
    run(tmp_path, 2, save)
    assert "the schedule gives" not in run(tmp_path, 1, resume, 80)
    said = run(tmp_path, 1, resume, 120)
    lines = [line for line in said.splitlines() if "the schedule gives step 51 a rate of" in line]
    assert len(lines) == len(CASES) - 1, said
