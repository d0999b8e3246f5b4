# SPDX-License-Identifier: MIT
"""What describe() says of a checkpoint: everything but its data."""

from pathlib import Path
from typing import NamedTuple

NEXT_STEPS = "next_steps.csv"  # proof.py writes and reads it, beside the shards


class Parameter(NamedTuple):
    """shape: of the whole parameter. flat: the number of the flat tensor that holds it, which is
    the number of its dict in param_shapes; at ZeRO-3, of its sub-group. group: its parameter group.
    states: {state: Slices, or Joined for several tensor-parallel ranks}, fp32 first. scalars: {key:
    Tensor with its bytes, or plain value}, the rest of its optimizer state, the same for a whole
    flat tensor. how: what a state file says besides the tensor."""

    shape: tuple
    flat: int
    group: int
    states: dict
    scalars: dict
    how: dict


class Problem(NamedTuple):
    """What a conversion would lose. fatal: an error, unless --no_strict is given."""

    fatal: bool
    text: str


class Description(NamedTuple):
    """A ZeRO or universal checkpoint without its data. It can be pickled, to send it to other
    processes.

    stage: 1 (for ZeRO-2, too) or 3; 0 without ZeRO, None for universal folders. optimizer_class: of
    DeepSpeed's optimizer, which is "" if there was PyTorch's alone. ranks: how many data-parallel
    ranks wrote it, or None. tensor, pipeline: the degrees. parameters: {name:
    Parameter}. flats: [[name]], in the order of the flat tensors. kept: {name: Tensor}, the module
    without trained parameters: buffers, frozen parameters, tensors of get_extra_state() or of a
    state_dict hook. extra: names of what is in the module and is not a tensor. frozen: as in the
    model states. param_groups: hyperparameters. uneven: {(flat, key): why}, optimizer states that
    differ by rank or are not cut like the weights. problems: what a conversion would lose. models:
    the model states of each model-parallel rank; optimizer: rank 0's optimizer state; both without
    shards. first: rank 0's file of model states. left: names of files that an earlier save under
    this name left behind."""

    folder: Path
    universal: bool
    stage: int
    optimizer_class: str
    bf16: bool
    ranks: int
    tensor: int
    pipeline: int
    parameters: dict
    flats: list
    kept: dict
    extra: list
    frozen: dict
    param_groups: list
    uneven: dict
    problems: list
    models: list
    optimizer: dict
    first: Path
    left: list
