# SPDX-License-Identifier: MIT
"""Types of a rank's part of the optimizer, in flat tensors, and what compares tensors."""

from typing import Any, NamedTuple

import torch

# Of a loss scaler, what the config sets.
PACE = ("scale_window", "min_scale", "min_loss_scale", "delayed_shift", "consecutive_hysteresis")


class Fragment(NamedTuple):
    """The part of a parameter that lies in this rank's partition, as DeepSpeed calls it.

    start: its first element in the parameter. offset: its first element in the flat tensor.

    Fragment("a.weight", start=24, offset=0, numel=276)  # the rank before has the first 24
                                                         # elements, at the end of its partition
    """

    name: str
    start: int
    offset: int
    numel: int

    def within(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.offset : self.offset + self.numel]


class FlatTensor(NamedTuple):
    """This rank's partition of the master weights of a parameter group; at ZeRO-3, of a sub-group.

    names: of all parameters of the group, whichever rank they lie on.
    """

    tensor: torch.Tensor
    param_group: int
    names: list[str]
    fragments: list[Fragment]


class Partition(NamedTuple):
    """A rank's part of a parameter at ZeRO-3: in `tensor`, the elements from `start` on."""

    tensor: torch.Tensor
    start: int
    numel: int


class NewShard(NamedTuple):
    """The optimizer's shard that a rank is to load. masters, states: of each flat tensor.

    param_groups: hyperparameters; "params" are numbers of flat tensors. extra_states, extra_keys:
    as in OptimizerState. settings: those of SETTINGS that are to be loaded.
    """

    masters: list[torch.Tensor]
    states: list[dict[str, Any]]
    param_groups: list[dict]
    extra_states: dict
    extra_keys: dict
    settings: dict


def full_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of a parameter or buffer, also where ZeRO-3 has left an empty tensor."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def is_same_bits(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two flat tensors of one dtype have the same bits; so NaN equals NaN."""
    dtype = {2: torch.int16, 4: torch.int32}.get(tensor.element_size(), torch.uint8)
    return torch.equal(tensor.view(dtype), other.view(dtype))


def is_same_live(a: Any, b: Any) -> bool:
    """Whether both are torch's tensors, and are the same."""
    if not (torch.is_tensor(a) and torch.is_tensor(b)):
        return False
    same = (a.dtype, a.shape) == (b.dtype, b.shape)
    return same and is_same_bits(*(tensor.detach().cpu().flatten() for tensor in (a, b)))


def is_alike(target: torch.Tensor | None, shape: tuple, dtype: str) -> bool:
    """Whether a tensor of this shape and dtype can be copied into the target; no quantized one."""
    if target is None or full_shape(target) != shape:
        return False
    if hasattr(getattr(target, "ds_tensor", None), "ds_quant_scale"):
        return False  # DeepSpeed would copy numbers into its codes
    return target.is_floating_point() == getattr(torch, dtype).is_floating_point
