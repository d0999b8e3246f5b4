# SPDX-License-Identifier: MIT
"""A tensor that is joined from blocks of several parts, such as those of tensor-parallel ranks.

A block is a box of elements that lies somewhere in a part and somewhere in the whole, with strides
of its own in each. The whole is read in its own order: so blocks are broken up into runs of
elements that are contiguous in both, and the runs of all blocks are merged. Needs only Python 3.10.
"""

import functools
import heapq
import itertools
import math
import operator
import zlib
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from universal.byte_ranges import CHUNK, Reader, width
from universal.errors import CheckpointError
from universal.torch_file import Tensor, contiguous_strides

PER_READ = 1 << 16  # elements read at a time if several ranks hold parts or copies
CODES = {"float32": "f", "float64": "d"}  # of the module array
AVERAGED = CODES.keys()


class Block(NamedTuple):
    """A box of elements in a part, and in the whole. Strides and offsets are in elements."""

    part: int
    shape: tuple
    stride: tuple
    offset: int
    whole_stride: tuple
    whole_offset: int

    def fits(self, source: Any) -> bool:
        """Whether the source of its part has all of its elements."""
        if not len(self.shape) == len(self.stride) == len(self.whole_stride):
            return False
        last = self.offset + dot([n - 1 for n in self.shape], self.stride)
        return 0 in self.shape or last < source.numel


class Run(NamedTuple):
    """Elements that are contiguous in the whole and in a part. In this order runs are merged."""

    whole_offset: int
    part: int
    offset: int
    numel: int


class Joined(NamedTuple):
    """A source (byte_ranges.py) whose elements are in several parts, which are sources themselves.

    blocks: None if the whole is the mean of the parts. numel: of the whole, which may be less than
    the blocks hold, for a vocabulary may be padded.
    """

    name: str
    parts: tuple
    blocks: tuple[Block, ...] | None
    numel: int

    @property
    def dtype(self) -> str:
        return self.parts[0].dtype

    def chunks(self, reader: Reader) -> Iterator[tuple[bytes, int]]:
        """Yields (bytes of the whole, their CRC-32), in order. Raises CheckpointError."""
        left = self.numel * width(self.dtype)
        for chunk in self.mean(reader) if self.blocks is None else self.in_order(reader):
            chunk = chunk[:left]
            yield chunk, zlib.crc32(chunk)
            left -= len(chunk)
        if left:
            raise self.not_covered()

    def not_covered(self):
        return CheckpointError(f"the shards of {self.name} do not cover its elements exactly once")

    def mean(self, reader):
        """The mean, in the same order and precision as PyTorch's."""
        code = CODES[self.dtype]
        count = len(self.parts)
        for start in range(0, self.numel, PER_READ):
            numel = min(PER_READ, self.numel - start)
            parts = [array(code, bytes(reader.read(part, start, numel))) for part in self.parts]
            total = functools.reduce(
                lambda sums, part: array(code, map(operator.add, sums, part)), parts
            )
            yield array(code, (value / count for value in total)).tobytes()

    def in_order(self, reader):
        """The elements in the order of the whole; where several parts have them, they are equal."""
        end = 0
        last_data = b""
        joined = bytearray()
        for run in heapq.merge(*map(runs, self.blocks)):
            data = reader.read(self.parts[run.part], run.offset, run.numel)
            if run.whole_offset == end:
                joined += data
                last_data = data
                end += run.numel
            elif run.whole_offset + run.numel != end or len(data) != len(last_data):
                raise self.not_covered()
            elif data != last_data:
                raise CheckpointError(f"{self.name} differs on tensor-parallel rank {run.part}")
            if len(joined) >= CHUNK:
                yield joined
                joined = bytearray()
        yield joined


def in_order_of_indices(name: str, tensor: Tensor) -> Joined:
    """The source of a tensor of any strides, which may be a view."""
    strides = contiguous_strides(tensor.size)
    block = Block(0, tensor.size, tensor.stride, tensor.offset, strides, 0)
    return Joined(name, (tensor.storage,), (block,), math.prod(tensor.size))


def runs(block):
    """Yields the Runs of a block, in the order of the whole."""
    if 0 in block.shape:
        return
    dims = list(zip(block.shape, block.stride, block.whole_stride, strict=True))
    numel = 1  # of a run
    while dims and (dims[-1][0] == 1 or dims[-1][1:] == (numel, numel)):
        numel *= dims.pop()[0]
    strides = [stride for _, stride, _ in dims]
    whole_strides = [stride for _, _, stride in dims]
    for index in itertools.product(*(range(n) for n, _, _ in dims)):
        offset = block.offset + dot(index, strides)
        whole_offset = block.whole_offset + dot(index, whole_strides)
        for start in range(0, numel, PER_READ):
            yield Run(
                whole_offset + start, block.part, offset + start, min(PER_READ, numel - start)
            )


def dot(index, strides):
    return sum(map(operator.mul, index, strides))


def blocks_along(
    dim: int, shape: Sequence[int], widths: Sequence[Sequence[int]]
) -> tuple[Block, ...]:
    """The blocks of a tensor of sub-tensors that lie along a dimension and are each cut by itself.

    widths: widths[sub][part] is how much of a sub-tensor a part has along the dimension.
    """
    blocks = []
    whole_stride = contiguous_strides(shape)
    strides = [
        contiguous_strides(resized(shape, dim, sum(of_part)))
        for of_part in zip(*widths, strict=True)
    ]
    starts = [0] * len(strides)
    whole_start = 0
    for of_sub in widths:
        for part, size in enumerate(of_sub):
            block = Block(
                part=part,
                shape=resized(shape, dim, size),
                stride=strides[part],
                offset=starts[part] * strides[part][dim],
                whole_stride=whole_stride,
                whole_offset=whole_start * whole_stride[dim],
            )
            blocks.append(block)
            starts[part] += size
            whole_start += size
    return tuple(blocks)


def resized(shape: Sequence, dim: int, size: Any) -> tuple:
    """The shape with another size in one dimension."""
    return (*shape[:dim], size, *shape[dim + 1 :])
