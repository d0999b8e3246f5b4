# SPDX-License-Identifier: MIT
"""Whether a learning rate schedule goes on as it was when the checkpoint was saved.

What a schedule was made of, such as the total number of steps, is mostly in no checkpoint: another
batch or number of epochs makes another schedule, in silence.
"""

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch

from universal.load.collective import say
from universal.load.engine import Engine


def say_changed_rate(engine: Engine, saved_rates: Sequence[Any], step: int) -> None:
    """Say it, if the schedule now gives the next step another rate than it did at the save.

    engine: with its scheduler's state restored. saved_rates: the learning rate of each parameter
    group, in the checkpoint. step: the next one.
    """
    scheduler = engine.engine.lr_scheduler
    # For Adagrad, DeepSpeed has replaced the optimizer whose rates it sets.
    if getattr(scheduler, "optimizer", None) is not engine.torch_optimizer:
        return
    if text := changed_rate(scheduler, saved_rates, step):
        say(text)


def changed_rate(scheduler: Any, saved_rates: Sequence[Any], step: int) -> str | None:
    """What say_changed_rate() says; None if the rates are the same, or cannot be computed."""
    rates = None
    with contextlib.suppress(Exception):  # of a script's own schedule
        saved_rates = [*map(float, saved_rates)]
        rates = rates_of(scheduler, saved_rates)
    if rates is None or len(rates) != len(saved_rates):
        return None
    for rate, saved in zip(rates, saved_rates, strict=True):
        if not is_nearly(rate, saved):
            digits = 1 if f"{rate:.1e}" != f"{saved:.1e}" else 6
            return (
                f"the schedule gives step {step} a rate of {rate:.{digits}e}; it was "
                f"{saved:.{digits}e} when it was saved: has the number of steps changed?"
            )
    return None


def rates_of(scheduler: Any, saved_rates: Sequence[float]) -> list[float] | None:
    """The rate that the schedule, as it was made now, gives each group at its place.

    None where it cannot be computed, or goes on from the saved rate whatever that is.
    """
    if hasattr(scheduler, "last_batch_iteration"):  # DeepSpeed's, which save nothing else
        has_begun = scheduler.last_batch_iteration >= 0
        return [float(rate) for rate in scheduler.get_lr()] if has_begun else None
    last_rates = [float(rate) for rate in scheduler.get_last_lr()]
    if isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):  # its functions are not saved
        factors = [function(scheduler.last_epoch) for function in scheduler.lr_lambdas]
        rates = [base * factor for base, factor in zip(scheduler.base_lrs, factors, strict=True)]
        # The last rate of the schedule is saved, too: somebody may have changed that of the group.
        return None if are_same(rates, last_rates) else rates
    # Others of torch save all numbers that they are made of. Then each rate follows from the last.
    if are_same(last_rates, saved_rates) or not hasattr(scheduler, "_get_closed_form_lr"):
        return None
    return [float(rate) for rate in scheduler._get_closed_form_lr()]


def are_same(rates: Sequence[float], others: Sequence[float]) -> bool:
    return len(rates) == len(others) and all(map(is_nearly, rates, others))


def is_nearly(rate: float, other: float) -> bool:
    """But for rounding: torch's schedules multiply the last rate."""
    return math.isclose(rate, other, rel_tol=1e-6, abs_tol=1e-12)
