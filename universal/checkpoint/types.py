# SPDX-License-Identifier: MIT
"""What is known of a checkpoint without reading its tensors."""

import math
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from universal.files.sources import Source
from universal.files.torch_file import Tensor

NEXT_STEPS = "next_steps.csv"  # next_steps.py writes and reads it, beside the shards

# What DeepSpeed's optimizer saves besides tensors and hyperparameters.
SETTINGS = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
UNSAVED = {  # what DeepSpeed saves in no file
    "ZenFlow": "no file holds the gradients that ZenFlow defers, nor all of its moments",
    "SuperOffload": (
        "no file holds the optimizer's states, which SuperOffload keeps in another process"
    ),
}


def kind_with_unsaved(zero_config: dict) -> str | None:
    """The key of UNSAVED that a config's zero_optimization asks for; None if all is saved."""
    if zero_config.get("zenflow") is not None:
        return "ZenFlow"
    offload = zero_config.get("offload_optimizer")
    has_super = isinstance(offload, dict) and offload.get("super_offload")
    return "SuperOffload" if has_super else None


class Parameter(NamedTuple):
    """A trained parameter: its shape, and where its optimizer states are.

    group_number: of its parameter group in the optimizer. states: by name, "fp32", the masters,
    first. scalars: {name: value, or Tensor with its bytes}, the rest of its optimizer state, which
    all parameters of a flat tensor share.
    """

    shape: tuple
    group_number: int | None
    states: dict[str, Source]
    scalars: dict


class Layout(NamedTuple):
    """How ranks cut a checkpoint. DeepSpeed's own loader restores it on this layout alone.

    optimizer_kind: the class of DeepSpeed's optimizer: one for ZeRO-1 and 2, one for ZeRO-3, and
    one for bf16 with fp32 sums; or a key of UNSAVED. shards: the number of data-parallel ranks,
    each with a shard. is_bf16: whether the weights are, as the files' names tell. tensor, pipeline:
    the degrees.
    """

    optimizer_kind: str
    shards: int
    is_bf16: bool
    tensor: int
    pipeline: int

    def in_words(self, unit: str = "") -> str:
        """The number of ranks in words: 8 (tensor 2 x data 4)."""
        degrees = {"tensor": self.tensor, "pipeline": self.pipeline, "data": self.shards}
        product = " x ".join(f"{name} {n}" for name, n in degrees.items() if n > 1)
        shared = f" ({product})" if self.tensor * self.pipeline > 1 else ""
        number = math.prod(degrees.values())
        return f"{number}{unit.removesuffix('s') if number == 1 else unit}{shared}"


class OptimizerState(NamedTuple):
    """What the optimizer's state holds besides the states of parameters.

    param_groups: hyperparameters. extra_states: entries of its "state" that belong to no parameter.
    extra_keys: entries beside "state" and "param_groups". settings: those of SETTINGS. left_out:
    names of states that the converter had no place for.
    """

    param_groups: list[dict]
    extra_states: dict
    extra_keys: dict
    settings: dict = {}
    left_out: list | None = None


class Limit(IntEnum):
    """Who loses what a Problem names. From UNSAVED on, a load takes it on the ranks that saved it,
    by DeepSpeed's own loader, and on no others; the least one is told."""

    DOUBT = 0  # nobody, or all: a load says it
    FILES = 1  # all but a rank with the very file that it saved, unless the user accepts it
    UNSAVED = 2  # all, also the ranks that saved
    RANKS = 3  # all but the ranks that saved
    STATE = 4  # the same, with the optimizer's states
    NUMBER = 5  # the same, if the optimizer reads it


class Problem(NamedTuple):
    """What a load or a conversion would lose. state: its name in the optimizer, if it is there."""

    limit: Limit
    text: str
    state: Any = None


class Checkpoint(NamedTuple):
    """A checkpoint without its data. It can be pickled, to send it to other processes.

    stage: of ZeRO, 1 to 3. It and layout are None for a universal checkpoint, which is not cut.
    parameters: by name. module: other tensors of the module's state: buffers, frozen parameters,
    those of get_extra_state() or of a state_dict hook. model_states: rank 0's file. left_over:
    names of what an earlier save left in the folder. problems: what a load or a conversion loses.
    models: the model states of every model-parallel rank; their `module` has no trained parameters.
    Once it is sent to all ranks, these are rank 0's, as a rank's own objects, without a tensor.
    shard: the optimizer states of rank 0, as they were pickled. ranks_differ: whether a rank has
    saved another client state, or another value of a buffer, than rank 0.
    """

    folder: Path
    stage: int | None
    layout: Layout | None
    parameters: dict[str, Parameter]
    module: dict[str, Tensor]
    optimizer: OptimizerState
    model_states: Path
    left_over: list[str]
    problems: list[Problem]
    models: list[dict]
    shard: dict
    ranks_differ: bool = False

    @property
    def model(self) -> dict:
        """The model states of rank 0."""
        return self.models[0]

    @property
    def is_universal(self) -> bool:
        return self.layout is None

    @property
    def is_data_parallel(self) -> bool:
        """Whether nothing but ZeRO cuts the parameters."""
        return self.layout is None or self.layout.tensor * self.layout.pipeline == 1
