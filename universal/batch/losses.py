# SPDX-License-Identifier: MIT
"""Finds out what a loss of Hugging Face's Trainer is: a mean of its micro-batch, or a sum that is
divided by the tokens of the whole step. It asks once, with twice the number of tokens."""

import contextlib
import copy
import functools
import math
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from universal.load.ask import keeping_generators
from universal.load.collective import say
from universal.load.overrides import overridden

NUMBER = "num_items_in_batch"
ROUTER = "router_aux_loss_coef"  # transformers' name for the weight of a router's loss
CLOSE = 1e-5  # by how much equal losses differ, relative


class LossKind(NamedTuple):
    """What a loss is.

    takes_mean: whether it is a mean of its micro-batch, whatever num_items_in_batch is. routers:
    what has the weight of a router's loss that is added to a loss which is no mean.
    """

    takes_mean: bool
    routers: list[Any] = []


def kind_of_loss(
    trainer: Any, compute_loss: Callable, model: torch.nn.Module, args: tuple, options: dict
) -> LossKind | None:
    """Find out what the loss of a micro-batch is, on all ranks together.

    args, options: of compute_loss(), after the model. Returns None while the losses are 0 or not
    finite. Raises ValueError if a part of the loss has to be weighed, and cannot be told apart.
    """
    scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
    if scaled is not None or options.get(NUMBER) is None:
        return LossKind(takes_mean=not scaled)
    ask = functools.partial(ask_loss, trainer, compute_loss, model, args, options)
    routers = routers_of(model)
    asked = [ask([]), ask(routers), ask(routers), ask(routers, 2), ask(routers, across=False)]
    sums = trainer.accelerator.gather(torch.stack(asked)[None]).sum(dim=0).tolist()
    with_routers, loss, again, halved, of_rank = sums
    if not loss or not math.isfinite(loss):
        return None
    rounding = CLOSE * abs(loss) + 4 * abs(again - loss)
    ranks, count = trainer.args.world_size, trainer.step_count
    follows_ranks = ranks == 1 or abs(of_rank - loss) > rounding
    undivided = 2 * halved - loss
    if abs(undivided - loss) <= rounding:
        times = count if follows_ranks else count / ranks
        if times != 1:
            say(
                f"NOTE: the loss is a mean that takes no {NUMBER}: it counts once in a step, and "
                f"with Trainer alone {times:g} times"
            )
        return LossKind(takes_mean=True)
    check_sum(type(trainer).__name__, loss, halved, abs(undivided) <= rounding, follows_ranks)
    if abs(with_routers - loss) <= rounding:
        return LossKind(takes_mean=False)
    say(
        f"NOTE: the router's loss counts once in a step, and with Trainer alone {count} times, as "
        "often as there are micro-batches"
    )
    return LossKind(takes_mean=False, routers=routers)


def check_sum(name, loss, halved, is_divided, follows_ranks):
    """Raises ValueError if a sum is not divided by the tokens of all ranks, or DeepSpeed's mean of
    the ranks divides it once more. name: of the trainer. halved: with twice the tokens."""
    if not is_divided:
        raise ValueError(
            f"{name}'s loss is {loss:.6g}, and {halved:.6g} with twice the {NUMBER}: neither a "
            "mean nor a sum that is divided by it. Let compute_loss() divide a mean in it by "
            "self.current_gradient_accumulation_steps"
        )
    if not follows_ranks:
        raise ValueError(
            f"{name}'s loss is divided by the {NUMBER} of all ranks, and does not follow "
            "average_tokens_across_devices: let compute_loss() multiply it by "
            "self.accelerator.num_processes where that is set, as Trainer's does"
        )


def routers_of(model: torch.nn.Module) -> list[Any]:
    """The modules and configs that have the weight of a router's loss: a mixture takes it from
    itself, and TRL before 1.15 from the config of its text."""
    owners = [*model.modules()]
    configs = [part.config for part in owners if hasattr(part, "config")]
    texts = [config.get_text_config() for config in configs if hasattr(config, "get_text_config")]
    different = {id(owner): owner for owner in [*owners, *configs, *texts]}
    return [owner for owner in different.values() if getattr(owner, "__dict__", {}).get(ROUTER)]


def ask_loss(trainer, compute_loss, model, args, options, routers, times=1, across=True):
    """The loss [] of a micro-batch without that of its routers, if the numbers by which it may be
    divided were so many times as large. Nothing of it remains.

    across: whether it may be multiplied by the ranks, as DeepSpeed divides by them.
    """
    asked = copy.copy(trainer)
    # Its metrics are its own.
    kept = {name: copy.deepcopy(v) for name, v in vars(trainer).items() if is_of_numbers(v)}
    vars(asked).update(kept)
    asked.current_gradient_accumulation_steps *= times
    bound = getattr(compute_loss, "__func__", None)
    ask = types.MethodType(bound, asked) if bound else compute_loss
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with (
        torch.no_grad(),
        keeping_generators(trainer.args.device),
        times_router_loss(routers, 0),
        overridden(trainer.args, average_tokens_across_devices=across),
    ):
        result = ask(model, *map(copy.copy, args), **options | {NUMBER: options[NUMBER] * times})
        for buffer, before in buffers:
            buffer.copy_(before)
    return (result[0] if isinstance(result, tuple) else result).float()


def is_of_numbers(value: Any) -> bool:
    """Whether a value is a collection of numbers, as a trainer's metrics are."""
    return isinstance(value, dict | list | deque) and all(
        isinstance(leaf, int | float | str) for leaf in tree_leaves(value)
    )


@contextlib.contextmanager
def times_router_loss(routers: list[Any], factor: float) -> Iterator[None]:
    """Multiply the weights of these routers' losses in this block."""
    with contextlib.ExitStack() as stack:
        for router in routers:
            weight = getattr(router, ROUTER) * factor
            stack.enter_context(overridden(router, **{ROUTER: weight}))
        yield
