# SPDX-License-Identifier: MIT
"""Compare the module's weights with their masters: are the files of the same step?"""

import itertools
from collections.abc import Iterator
from types import NoneType

from universal.checkpoint.describe import BETWEEN_SAVES, paths_of, text_of_steps
from universal.checkpoint.module_states import modules_of_layers
from universal.checkpoint.rounded import has_values_of
from universal.checkpoint.types import Checkpoint, Limit
from universal.errors import CheckpointError
from universal.files.joined import Joined
from universal.files.schema import expect
from universal.files.sources import ByteReader
from universal.files.torch_file import Tensor, load, tensor_of


def compares_weights(checkpoint: Checkpoint) -> bool:
    """Whether check_same_step() must read: the optimizer is of another step than the module, or
    counts none, and files are of different times. In one save a script may have set the weights."""
    if checkpoint.is_universal:  # which has both
        return False
    if doubts := [p.text for p in checkpoint.problems if p.limit is Limit.DOUBT]:
        counts = [parameter.scalars.get("step") for parameter in checkpoint.parameters.values()]
        if text_of_steps(checkpoint.model_states, checkpoint.model, counts) in doubts:
            return True
    if counts_steps(checkpoint):
        return False
    times = sorted(path.stat().st_mtime for path in paths_of(checkpoint))
    gaps = (after - before for before, after in itertools.pairwise(times))
    return max(gaps, default=0) > BETWEEN_SAVES


def counts_steps(checkpoint: Checkpoint) -> bool:
    """Whether the optimizer counts steps: under that name, or a number of it is the module's."""
    scalars = [parameter.scalars for parameter in checkpoint.parameters.values()]
    known = [*checkpoint.optimizer.param_groups, *scalars]
    if any("step" in of_one for of_one in known):
        return True
    model = checkpoint.model
    step = model["global_steps"] - model["skipped_steps"]
    numbers = [value for of_one in known for value in of_one.values()]
    return any(type(number) in (int, float) and number == step for number in numbers)


def check_same_step(checkpoint: Checkpoint) -> None:
    """Raises CheckpointError unless model states and shards are of the same step."""
    if compares_weights(checkpoint) and any(weights_set(checkpoint)):
        text = f"{checkpoint.folder}: model states and shards are of different steps"
        if not counts_steps(checkpoint):
            text += " (if a script has set the weights, run `touch` on all of its files)"
        if left_over := checkpoint.left_over:
            text += f"; older ones may be in the way: {', '.join(left_over)}"
        raise CheckpointError(text)


def weights_set(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """Yields the name and the value of each weight that is not its masters, rounded. Compares some
    elements of each rank's slice."""
    reader = ByteReader()
    for rank, module in enumerate(saved_modules(checkpoint)):
        for name, parameter in checkpoint.parameters.items():
            weight = tensor_of(module.get(name))
            masters = parameter.states["fp32"]
            if isinstance(masters, Joined):
                masters = masters.parts[rank]
            if weight is None or weight.numel != masters.numel:  # at ZeRO-3 it is empty
                continue
            if not has_values_of(weight, masters, reader):
                yield name, weight


def saved_modules(checkpoint: Checkpoint) -> list[dict]:
    """Returns the module that each tensor-parallel rank saved, as {name: value}, with weights."""
    path = checkpoint.model_states
    degree = checkpoint.layout.tensor if checkpoint.layout else 1
    paths = [
        path.with_name(path.name.replace("_rank_00_", f"_rank_{i:02d}_")) for i in range(degree)
    ]
    models = [expect(load(path), {"module": (NoneType, dict)}, path) for path in paths]
    modules = [model["module"] for model in models]
    return modules_of_layers(checkpoint.folder, degree, ()) if None in modules else modules
