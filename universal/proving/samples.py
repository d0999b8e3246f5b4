# SPDX-License-Identifier: MIT
"""Digests of the samples of a step, and of the random numbers that a forward pass draws."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import deepspeed
import numpy
import torch

# Views of elements as integers, by their bytes.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# How many places along each dimension of a sample are all looked at, by the number of dimensions;
# of each doubling behind them as many as of the one before.
PLACES = {1: 2**14, 2: 2**6}
PLACES_OF_MORE = 4  # 768 of an image of 3 x 224 x 224


def tensors_in(value, name="") -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors in nested arguments, each with the innermost key that leads to it."""
    if torch.is_tensor(value):
        yield name, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from tensors_in(part, key)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part, name)


def scrambled(numbers: torch.Tensor | int) -> torch.Tensor | int:
    """Hash each number of an int64 tensor; 0 stays 0. Products wrap around."""
    numbers = (numbers ^ (numbers >> 29)) * 0x5851F42D4C957F2D
    numbers = (numbers ^ (numbers >> 32)) * 0x2545F4914F6CDD1D
    return numbers ^ (numbers >> 29)


def sampled_places(size, most, device):
    """The places to look at along a dimension: of a longer one the same, and more behind them."""
    parts = [torch.arange(min(size, most), device=device)]
    begin, step = most, 2
    while begin < size:
        parts.append(torch.arange(begin, min(size, 2 * begin), step, device=device))
        begin, step = 2 * begin, 2 * step
    return torch.cat(parts)


def hashes(samples: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Hash each row of a tensor [B, ...]. Returns numbers below 2**32, as [B].

    Padding with zeros, or with the -100 of labels, at the end of a dimension changes nothing. mask:
    0 for other padding, whose length the micro-batch decides; used if samples are [B, T], as it is.
    """
    rows = samples.detach().reshape(len(samples), *samples.shape[1:] or [1])
    if rows.is_complex():
        rows = torch.view_as_real(rows)
    most = PLACES.get(rows.dim() - 1, PLACES_OF_MORE)
    looked_at = [sampled_places(size, most, rows.device) for size in rows.shape[1:]]
    hashed_places = torch.zeros((), dtype=torch.long, device=rows.device)
    for places in looked_at:
        hashed_places = scrambled(hashed_places.unsqueeze(-1) + places + 1)
    index = ...
    if hashed_places.shape != rows.shape[1:]:
        index = (slice(None), *torch.meshgrid(*looked_at, indexing="ij"))
    numbers = rows[index].contiguous().view(INTEGERS[rows.element_size()]).long()
    if not rows.is_floating_point():
        numbers = numbers.masked_fill(numbers == -100, 0)
    if mask is not None and mask.shape == samples.shape and rows.dim() == 2:
        hashed_places = scrambled((mask.long().cumsum(1) * mask.bool())[index])
    sums = (numbers * hashed_places).flatten(1).sum(1)
    return scrambled(sums) & 0xFFFFFFFF


def generator_states() -> list:
    """Returns the states of the default generators: torch's, the device's, numpy's and Python's.
    Generators that a script creates are not seen."""
    device = deepspeed.accelerator.get_accelerator()
    of_torch = [torch.get_rng_state(), device.get_rng_state().cpu()]
    _, keys, *position = numpy.random.get_state()
    of_numpy = (keys.tobytes(), *position)
    return [*(state.numpy().tobytes() for state in of_torch), of_numpy, random.getstate()]


@dataclass
class ForwardPass:
    """A forward pass that waits for its loss.

    digests: hashes [rows] of each tensor that has a row for each sample, mixed with those before
    it. others: a hash [1] of all other tensors; None without any. states: of the generators before
    this pass; None once they have been compared. draws: a hash of those that changed; else None.
    """

    digests: list = field(default_factory=list)
    others: torch.Tensor | None = None
    states: list | None = None
    draws: int | None = None
