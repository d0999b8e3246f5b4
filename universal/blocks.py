# SPDX-License-Identifier: MIT
"""A tensor that is joined from blocks of several parts, such as those of tensor-parallel ranks.

A block is a box of elements that lies somewhere in a part and somewhere in the whole, with strides
of its own in each. Blocks are broken up into runs of elements that are contiguous in both, so any
elements of the whole can be read from the parts; and the other way round: read from the other side,
the same blocks are what a part has of the whole. Needs only Python 3.10.
"""

import bisect
import functools
import itertools
import operator
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from universal.byte_ranges import Reader, width
from universal.errors import CheckpointError
from universal.torch_file import contiguous_strides

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
        return 0 in self.shape or self.last < source.numel

    def spans(self, source: Any) -> bool:
        """Whether it reaches from the first element of its part to the last."""
        return 0 not in self.shape and self.offset == 0 and self.last + 1 == source.numel

    @property
    def is_in_place(self) -> bool:
        """Whether its elements lie in the part as in the whole."""
        return (self.stride, self.offset) == (self.whole_stride, self.whole_offset)

    @property
    def last(self) -> int:
        """Its last element in the part."""
        return self.offset + dot([n - 1 for n in self.shape], self.stride)


class Run(NamedTuple):
    """Elements that are contiguous in the whole and in a part. In this order runs are merged."""

    whole_offset: int
    part: int
    offset: int
    numel: int


class Joined(NamedTuple):
    """A source (byte_ranges.py) whose elements are in several parts, which are sources themselves.

    So is a whole of the parts of tensor-parallel ranks, and such a rank's part of a whole: then
    that is the only one of the `parts` (part_of()).

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

    def read_into(self, buffer: memoryview, start: int, reader: Reader) -> None:
        """Fill the buffer with elements of the whole, from `start` on. Raises CheckpointError.

        Where several parts have an element, they must have the same one.
        """
        size = width(self.dtype)
        stop = start + len(buffer) // size
        if self.blocks is None:
            buffer[:] = self.mean(start, stop - start, reader)
            return
        end = start  # of what is filled
        for run in runs_within(self.blocks, start, stop):
            part = self.parts[run.part]
            place = buffer[(run.whole_offset - start) * size :][: run.numel * size]
            if run.whole_offset == end:
                reader.read_elements(place, part, run.offset)
                end += run.numel
            elif run.whole_offset + run.numel > end:
                raise self.not_covered()
            elif reader.read(part, run.offset, run.numel) != place:
                raise CheckpointError(f"{self.name} differs on tensor-parallel rank {run.part}")
        if end != stop:
            raise self.not_covered()

    def is_one_view(self) -> bool:
        """Whether this is a tensor with gaps, or with its dimensions in another order."""
        if self.blocks is None or len(self.blocks) != 1 or not hasattr(self.parts[0], "numel"):
            return False
        return self.blocks[0].spans(self.parts[0])

    def not_covered(self):
        return CheckpointError(f"the shards of {self.name} do not cover its elements exactly once")

    def mean(self, start, numel, reader):
        """The mean, in the same order and precision as PyTorch's."""
        code = CODES[self.dtype]
        count = len(self.parts)
        parts = [array(code, bytes(reader.read(part, start, numel))) for part in self.parts]
        total = functools.reduce(
            lambda sums, part: array(code, map(operator.add, sums, part)), parts
        )
        return array(code, (value / count for value in total)).tobytes()


class Padded(NamedTuple):
    """A source with zeros after another's elements, such as a vocabulary padded to divide."""

    source: Any

    @property
    def dtype(self) -> str:
        return self.source.dtype

    def read_into(self, buffer: memoryview, start: int, reader: Reader) -> None:
        held = max(0, self.source.numel - start) * width(self.dtype)
        if held:
            reader.read_elements(buffer[:held], self.source, start)
        buffer[held:] = bytes(len(buffer[held:]))


def part_of(whole: Any, blocks: Sequence[Block], numel: int) -> Joined:
    """The source of a part, of which these blocks are all, in a whole. numel: of the part."""
    name = getattr(whole, "name", "a parameter")
    return Joined(name, (Padded(whole),), tuple(map(inverted, blocks)), numel)


def inverted(block):
    """The block with part and whole in each other's place."""
    return Block(
        part=0,
        shape=block.shape,
        stride=block.whole_stride,
        offset=block.whole_offset,
        whole_stride=block.stride,
        whole_offset=block.offset,
    )


@functools.lru_cache(256)  # the layers of a model are alike
def runs_of(blocks):
    """(the Runs of all blocks in the order of the whole, elements of the longest)."""
    in_order = sorted(itertools.chain(*map(runs, blocks)))
    return in_order, max((run.numel for run in in_order), default=0)


def runs_within(blocks, start, stop):
    """Yields the Runs of these blocks, or parts of them, between two elements of the whole."""
    in_order, longest = runs_of(blocks)
    first = bisect.bisect_left(in_order, (start - longest,))
    for whole_offset, part, offset, numel in itertools.islice(in_order, first, None):
        if whole_offset >= stop:
            return
        begin = max(whole_offset, start)
        end = min(whole_offset + numel, stop)
        if begin < end:
            yield Run(begin, part, offset + begin - whole_offset, end - begin)


def runs(block):
    """Yields the Runs of a block."""
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
        yield Run(block.whole_offset + dot(index, whole_strides), block.part, offset, numel)


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
