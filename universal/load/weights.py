# SPDX-License-Identifier: MIT
"""Weights of the module that are not the optimizer's masters, rounded: a script has set them.

So are an average that was swapped in before a save, and what a script clamps after each step.
ZeRO-1 and 2 save the module's weights beside the masters. Both are restored.
"""

import functools
from collections.abc import Iterable
from typing import Any

import torch

from universal.checkpoint.same_step import weights_set
from universal.checkpoint.types import Checkpoint
from universal.errors import CheckpointError
from universal.files.joined import strided
from universal.files.schema import expect
from universal.files.torch_file import Tensor, load, tensor_of, trim_storage
from universal.load.collective import ProcessGroup, say
from universal.load.engine import Engine
from universal.load.flat import full_shape, is_same_bits
from universal.load.reader import Damaged, TensorReader

PORTION = 1 << 18  # elements that are compared at a time: so few stay in a processor's cache


def set_weights(
    engine: Engine, plan: Any, load_states: bool, group: ProcessGroup
) -> dict[str, torch.Tensor]:
    """Returns {trained parameter: value in the module} of those that are not their masters.

    plan: reshard.Plan, whose masters become these weights unless load_states. Raises: Damaged.
    """
    checkpoint, states = plan.checkpoint, plan.states
    path = path_of_weights(engine, checkpoint, plan.own_file)
    if path is None or engine.is_pipeline():
        say_if_left_out(checkpoint, group)
        return {}
    weights = saved_weights(engine, checkpoint, plan.own_file, checkpoint.parameters.keys(), group)
    (names,) = group.unions(names_set(engine, weights, states))
    if not names:
        return {}
    values = {}
    damaged = set()
    for name in sorted(names & weights.keys()):
        reader = TensorReader()
        values[name] = reader.empty(name, weights[name])
        reader.fetch()
        if not is_undamaged(reader):
            damaged.add(name)
    (damaged,) = group.unions(damaged)
    if damaged == names:  # as far as one knows, nobody has set them
        say(
            f"WARNING: {path} is damaged where {len(names)} of the module's weights are not the "
            f"optimizer's masters ({min(names)}): the masters are taken"
        )
        return {}
    if damaged:
        raise Damaged(
            f"{path} is damaged: {min(damaged)} does not match its checksum, and a script has set "
            f"{min(names - damaged)}, so that its masters will not do"
        )
    if not load_states:
        for fragment, masters in fragments_of(engine, states):
            if fragment.name in values:
                end = fragment.start + fragment.numel
                masters.copy_(values[fragment.name].flatten()[fragment.start : end])
    say(
        f"{len(names)} of the module's weights were not the optimizer's masters ({min(names)}): "
        "they are restored as they were saved"
    )
    return values


def say_if_left_out(checkpoint: Checkpoint, group: ProcessGroup) -> None:
    """Warn if a script has set weights that no rank has whole. Call it on all ranks."""
    if checkpoint.stage == 3 or checkpoint.is_universal:  # which have none
        return
    if names := group.on_rank_0(lambda: [name for name, _ in weights_set(checkpoint)]):
        say(
            f"WARNING: {len(names)} of the module's weights are not the optimizer's masters "
            f"({min(names)}): the masters are taken, as what a script has set is restored on "
            "data-parallel ranks and on their own tensor-parallel ones alone"
        )


def saved_weights(
    engine: Engine,
    checkpoint: Checkpoint,
    own_file: bool,
    names: Iterable[str],
    group: ProcessGroup,
) -> dict[str, Tensor]:
    """Returns {name: Tensor} of these trained parameters in the saved module, as far as this rank
    has them whole. own_file: whether it has the file that it would save. Call it on all ranks."""
    path = path_of_weights(engine, checkpoint, own_file)
    if path is None:
        return {}
    look = functools.partial(weights_in, path, names)
    return {
        name: tensor
        for name, tensor in (look() if own_file else group.on_rank_0(look)).items()
        if name in engine.parameters and tensor.size == full_shape(engine.parameters[name])
    }


def path_of_weights(engine, checkpoint, own_file):
    """The file with the trained weights that this rank has, whole; None if there is none."""
    if checkpoint.stage == 3:
        return None
    if own_file:
        return engine.own_file(checkpoint.folder)
    same = checkpoint.is_data_parallel and engine.is_data_parallel()
    return checkpoint.model_states if same else None


def weights_in(path, names):
    """Returns {name: Tensor} of the weights of these names in model states."""
    module = expect(load(path), dict, path).get("module") or {}
    tensors = {name: tensor_of(module.get(name)) for name in names}
    return {name: trim_storage(tensor) for name, tensor in tensors.items() if tensor}


def fragments_of(engine, states):
    """Yields each of this rank's fragments with its masters in the states."""
    for flat, state in zip(engine.flats, states, strict=True):
        for fragment in flat.fragments:
            yield fragment, fragment.within(state["fp32"])


def names_set(engine, weights, states):
    """The names of weights that are not their masters, rounded, where this rank has these."""
    names = set()
    reader = TensorReader()
    for fragment, masters in fragments_of(engine, states):
        if fragment.name in weights:
            source = strided(fragment.name, weights[fragment.name])
            if not is_rounded_from(masters, source, fragment.start, reader):
                names.add(fragment.name)
    return names


def is_rounded_from(masters, source, start, reader):
    """Whether a source's elements, from `start` on, are the masters, rounded."""
    for portion in masters.split(PORTION):
        saved = torch.empty(len(portion), dtype=getattr(torch, source.dtype), device="cpu")
        read_unchecked(reader, saved, source, start)
        if not is_same_bits(saved, portion.to(saved.dtype)):
            return False
        start += len(portion)
    return True


def read_unchecked(reader, tensor, source, start):
    """Fill a tensor. What equals the masters needs no checksum, and is read in half the time."""
    for item in source.reads(memoryview(tensor.view(torch.uint8).numpy()), start):
        item.fill(reader)


def is_undamaged(reader):
    try:
        reader.check()
    except CheckpointError:
        return False
    return True
