# SPDX-License-Identifier: MIT
"""Find out which stage of a pipeline has which layers, where it was saved without ZeRO.

No file says that, nor in which order a stage's optimizer had the parameters. The layers of a stage
are consecutive. The order is one that all stages of the engine have: that of the layers, or of the
names. In it a stage has as many parameters as its optimizer, of the shapes of their states, and of
the values of their masters, if those are saved.
"""

import functools
from collections import Counter
from pathlib import Path

from universal.checkpoint.module_states import modules_of_layers
from universal.checkpoint.order import (
    ORDER,
    NeedsEngine,
    SavedRank,
    Told,
    beginning,
    has_values_of,
    is_filled,
    stepping,
    trained_weights,
)
from universal.checkpoint.types import Problem
from universal.errors import CheckpointError
from universal.files.joined import Joined
from universal.files.sources import OpenFile
from universal.files.torch_file import has_gaps, tensor_of, verify

UNTOLD = "is not known: no ZeRO, and nothing tells which stage had which parameters"


def split_pipeline(
    folder: Path, ranks: list[SavedRank], tensor: int, told: Told | None, opened: OpenFile
) -> tuple[list[SavedRank], list[Problem]]:
    """(the ranks with names and weights of their stages, [a Problem of their order, if that is a
    guess, and of each parameter that stages do not share]).

    tensor: degree of tensor parallelism. If nothing tells the stages, or they may be several, all
    parameters are in the first one, without states. Raises: NeedsEngine, CheckpointError.
    """
    if told is None:
        raise NeedsEngine(
            "a pipeline saved it without ZeRO: which parameters a stage has trained, only an "
            "engine tells: load it without converting it"
        )
    ranks = stage_by_stage(ranks, tensor, told)
    buffers = {name for rank in ranks for name in rank.model["buffer_names"]}
    modules = modules_of_layers(folder, tensor, ())
    if len({frozenset(module) for module in modules}) != 1 or len(modules) != tensor:
        raise CheckpointError(f"{folder} lacks files of layers: {tensor} of each were saved")
    weights = [trained_weights(module, buffers) for module in modules]
    names = [[*of_group] for of_group in told.by_group()]
    homes = {name: homes_of(name, told.tied, weights[0]) for of_group in names for name in of_group}
    ranks = [
        rank._replace(weights=weights_by_name(homes, weights[i % tensor]))
        for i, rank in enumerate(ranks)
    ]
    if not any(homes.values()):
        return ranks, []
    ways = ways_of(ranks, tensor, names, homes, told, opened)
    if not ways:  # say, of what is frozen the optimizer of the one has nothing
        ranks = [rank._replace(groups=trained_groups(rank)) for rank in ranks]
        ways = ways_of(ranks, tensor, names, homes, told, opened)
    untied = [name for name in homes if len(homes[name]) > 1 and name not in told.shared]
    if not ways or any(stages != ways[0] for stages in ways):
        for path in folder.glob("*_states.pt"):
            verify(path)  # weights that differ from their masters may be damaged
        known = [[name for name in of_group if homes[name]] for of_group in names]
        problems = [problem_of_untied(folder, name) for name in untied if len(ranks) > tensor]
        return without_places(ranks, tensor, known), problems
    copies = Counter(name for of_stage in ways[0] for of_group in of_stage for name in of_group)
    problems = [problem_of_untied(folder, name) for name in untied if copies[name] > 1]
    ranks = [rank._replace(names=ways[0][i // tensor]) for i, rank in enumerate(ranks)]
    if any(is_order_a_guess(rank, told, opened) for rank in ranks[::tensor]):
        problems.append(problem_of_guess(folder))
    return ranks, problems


def stage_by_stage(ranks, tensor, told):
    """The ranks, those of a pipeline stage side by side."""
    stages = range(len(ranks) // tensor if told.is_model_first else 1)
    return [rank for stage in stages for rank in ranks[stage :: len(stages)]]


def problem_of_guess(folder):
    text = (
        f"WARNING: {folder}: no file says in which order the optimizer of a pipeline stage had its "
        "parameters: it is taken to be that of this engine's stages"
    )
    return Problem(False, text)


def trained_groups(rank):
    return [stepping(group, rank.groups) for group in rank.groups]


def without_places(ranks, tensor, names):
    """The ranks, with all parameters in the first stage, and no states."""
    ranks = [rank._replace(groups=[], lost={(None, ORDER): UNTOLD}) for rank in ranks]
    return [rank._replace(names=names) for rank in ranks[:tensor]] + ranks[tensor:]


def homes_of(name, tied, weights):
    """The numbers of the layers that have a parameter; several, if they are tied; none, if no file
    has it: DeepSpeed saves nothing of a tied layer with a forward_fn."""
    if not is_tied(name):
        return {int(name.split(".")[0])} if name in weights else set()
    _, key, rest = name.split(".", 2)
    layers = {layer for layer in tied if tied[layer] == key}
    return layers if any(f"{layer}.{rest}" in weights for layer in layers) else set()


def is_tied(name: str) -> bool:
    """Whether this is the name of a parameter that several layers of a pipeline share."""
    return name.startswith("tied_modules.")


def problem_of_untied(folder: Path, name: str) -> Problem:
    """What is said of a parameter that several stages have, and each trains for itself."""
    text = f"{folder}: {name} is in two pipeline stages and is not declared as tied"
    return Problem(True, text, of_ranks=True)


def weights_by_name(homes, weights):
    """{name: Tensor}, in a tied parameter's name, too."""
    by_name = {}
    for name, layers in homes.items():
        rest = name.split(".", 2)[2] if is_tied(name) else name.partition(".")[2]
        entries = [f"{layer}.{rest}" for layer in sorted(layers)]
        if saved := [weights[entry] for entry in entries if entry in weights]:
            by_name[name] = saved[0]
    return by_name


def without_tied(
    module: dict, rank: int, parameters: dict, told: Told | None, opened: OpenFile
) -> dict:
    """The entries of the files of layers, without a tied parameter's under its layers' numbers.

    A layer of its own may have entries of the same names. Files do not tell which layers are tied:
    an engine does, or else the values. rank: the tensor-parallel one that saved the entries.
    """
    parts = {}
    for name in filter(is_tied, parameters):
        masters = parameters[name].states["fp32"]
        parts[name] = masters.parts[rank] if isinstance(masters, Joined) else masters

    def is_of_tied(entry):
        number, rest = entry.split(".", 1)
        if told and told.tied:
            return f"tied_modules.{told.tied.get(int(number))}.{rest}" in parts
        weight = tensor_of(module[entry])
        if weight is None or has_gaps(weight):
            return False
        same_key = [name for name in parts if name.split(".", 2)[2] == rest]
        return any(has_values_of(weight, parts[name], opened) for name in same_key)

    return {entry: value for entry, value in module.items() if not is_of_tied(entry)}


# --------------------------------------------------------------------------------------------------
# the order of the parameters


def ways_of(ranks, tensor, names, homes, told, opened):
    """[[[name]] by group of each stage], of every way in which the stages may have the parameters.

    homes: {name: numbers of its layers}.
    """
    stages = [ranks[i : i + tensor] for i in range(0, len(ranks), tensor)]
    if told.is_folded:
        by_rank = [[[*of_group] for of_group in stage] for stage in told.stages]
        way = [names for i, names in enumerate(by_rank) if names not in by_rank[:i]]
        if len(way) == len(stages) and all(
            are_of_groups(of_stage, rank, opened)
            for of_stage, stage in zip(way, stages, strict=True)
            for rank in stage
        ):
            return [way]
    numbers = sorted(set().union(*homes.values()))
    ways = []
    for arranged in orders_of_engine(told, homes):
        names_of = functools.partial(names_of_layers, names, homes, arranged)

        def fit(stage, layers, names_of=names_of):
            return all(are_of_groups(names_of(layers), rank, opened) for rank in stage)

        splits = splits_of(stages, numbers, fit)
        ways += [[names_of(layers) for layers in split] for split in splits]
    return ways


def names_of_layers(names, homes, arranged, layers):
    """[[name]] of the groups of a stage with these layers. DeepSpeed drops empty ones."""
    groups = [[name for name in of_group if homes[name] & {*layers}] for of_group in names]
    return [arranged(of_group, homes, {*layers}) for of_group in groups if of_group]


def orders_of_engine(told, homes):
    """[a function that arranges names], of each order that all stages of the engine have."""
    lists = [
        [name for name in of_group if homes[name]] for stage in told.stages for of_group in stage
    ]
    orders = []
    if all(are_by_layer(of_group, homes) for of_group in lists):
        orders.append(by_layer)
    if all(of_group == sorted(of_group) for of_group in lists):
        orders.append(by_name)
    return orders


def by_layer(names, homes, layers):
    """As the module of a stage has them: first those that are tied."""
    return sorted(names, key=lambda name: (not is_tied(name), min(homes[name] & layers)))


def by_name(names, homes, layers):
    return sorted(names)


def are_by_layer(names, homes):
    """Whether tied parameters come first, and the others in the order of their layers."""
    keys = [(not is_tied(name), 0 if is_tied(name) else min(homes[name])) for name in names]
    return keys == sorted(keys)


def is_order_a_guess(rank, told, opened):
    """Whether parameters that look alike to the optimizer are of several stages of the engine:
    those of one stage are in the engine's own order."""
    of_engine = [of_group.keys() for stage in told.stages for of_group in stage]
    for names, group in zip(rank.names, rank.groups, strict=True):
        if not any(stepped.masters or stepped.state for stepped in group):
            continue
        alike = {}
        for name in names:
            weight = rank.weights[name]
            values = beginning(weight, opened) if group[0].masters else b""
            alike.setdefault((weight.size, values), set()).add(name)
        if not all(any(same <= of_stage for of_stage in of_engine) for same in alike.values()):
            return True
    return False


def are_of_groups(names, rank, opened):
    """Whether parameters, by group, may be those of a rank's optimizer."""
    if len(names) != len(rank.groups):
        return False
    groups = zip(names, rank.groups, strict=True)
    return all(is_filled(rank.weights, of_group, group, opened) for of_group, group in groups)


def splits_of(stages, layers, fit):
    """Yields [layers of each stage], consecutive ones, of every way in which they fit."""
    if not stages:
        if not layers:
            yield []
        return
    for end in range(len(layers) + 1):
        if fit(stages[0], layers[:end]):
            for rest in splits_of(stages[1:], layers[end:], fit):
                yield [layers[:end], *rest]
