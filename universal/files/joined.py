# SPDX-License-Identifier: MIT
"""A tensor that is joined from blocks of several parts, such as those of tensor-parallel ranks.

A block is a box of elements with two places: in a part, and in the whole tensor. It is read either
way: the whole from the parts of all ranks, or one rank's part from the whole.
"""

import functools
import itertools
import operator
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from universal.errors import CheckpointError
from universal.files.sources import SHORT_BYTES, ByteReader, Record, Source, crc32, width
from universal.files.torch_file import Tensor, contiguous_strides, has_gaps, trim_storage

ARRAY_CODES = {"float32": "f", "float64": "d"}  # of the module array
AVERAGED = ARRAY_CODES.keys()
FORMATS = {1: "B", 2: "H", 4: "I", 8: "Q"}  # of the module struct, by bytes
MOST_BYTES = 1 << 24  # bytes that are read at a time; a multiple of any element's


class Block(NamedTuple):
    """A box of elements, in a part and in the whole. Strides and offsets are in elements.

    Block(part=1, shape=(4, 3), stride=(3, 1), offset=0, whole_stride=(6, 1), whole_offset=3)
    # a part of 4 x 3 is the right half of a matrix of 4 x 6
    """

    part: int
    shape: tuple
    stride: tuple
    offset: int
    whole_stride: tuple
    whole_offset: int

    def fits(self, source: Source) -> bool:
        """Whether the part's source reaches as far, and no two elements share a place."""
        if not len(self.shape) == len(self.stride) == len(self.whole_stride):
            return False
        if 0 in self.shape:
            return True
        once = is_once(self.shape, self.stride) and is_once(self.shape, self.whole_stride)
        return once and self.offset + reach(self.shape, self.stride) <= source.numel

    @property
    def is_in_place(self) -> bool:
        """Whether offset and strides are the same in the part and in the whole."""
        return (self.stride, self.offset) == (self.whole_stride, self.whole_offset)

    def rows(self, start: int, stop: int) -> "Block | None":
        """The rows with elements of the whole from `start` to `stop`, perhaps with others, too.

        None if there are none. The block must come from in_order().
        """
        block = self
        while True:
            n, *shape = block.shape
            stride, whole_stride = block.stride[0], block.whole_stride[0]
            row = reach(shape, block.whole_stride[1:])
            first = max(0, (start - block.whole_offset - row) // whole_stride + 1)
            n = min(n, -((block.whole_offset - stop) // whole_stride)) - first
            if n <= 0:
                return None
            block = block._replace(
                shape=(n, *shape),
                offset=block.offset + first * stride,
                whole_offset=block.whole_offset + first * whole_stride,
            )
            if n > 1 or not shape:
                return block
            block = block._replace(
                shape=block.shape[1:], stride=block.stride[1:], whole_stride=block.whole_stride[1:]
            )


class Computed(NamedTuple):
    """A buffer that is no copy of bytes in a file. fill: fills it by a ByteReader."""

    buffer: memoryview
    fill: Callable[[ByteReader], None]

    def __str__(self):
        return f"{len(self.buffer)} bytes, computed"

    def run(self, reader: ByteReader) -> int:
        """Fill the buffer. Returns the CRC-32 of its bytes."""
        self.fill(reader)
        return crc32(self.buffer)


class Target(NamedTuple):
    """A buffer for elements of the whole, from `start` on. filled: 1 for each that was read."""

    elements: memoryview
    start: int
    filled: bytearray

    def take(self, box: Block, part: Source, reader: ByteReader, unit: int) -> bool:
        """Read a block of a part. Returns False if an element was read before and differs.

        unit: the bytes of what shapes, strides and offsets count.
        """
        *shape, count = box.shape
        *strides, stride = box.stride
        *whole_strides, whole_stride = box.whole_stride
        data = memoryview(bytearray(reach(box.shape, box.stride) * unit))
        reader.read_elements(data, part, box.offset * unit // width(part.dtype))
        data = data.cast(FORMATS[unit])
        for index in itertools.product(*map(range, shape)):
            offset = dot(index, strides)
            place = box.whole_offset - self.start + dot(index, whole_strides)
            first = max(0, -(place // whole_stride))
            numel = min(count, -((place - len(self.elements)) // whole_stride)) - first
            if numel <= 0:  # this row lies outside
                continue
            row = data[offset + first * stride :: stride][:numel]
            begin = place + first * whole_stride
            places = slice(begin, begin + (numel - 1) * whole_stride + 1, whole_stride)
            if 1 in self.filled[places] and self.elements[places] != row:
                return False
            self.elements[places] = row
            self.filled[places] = b"\1" * numel
        return True


class Joined(NamedTuple):
    """A Source that reads its elements from several parts, which are Sources, too.

    For example a parameter, from the parts of tensor-parallel ranks; or one rank's part of it
    (part_of()).

    blocks: all that the parts have; None if the whole is the mean of the parts. numel: of the
    whole; the blocks hold more if a vocabulary is padded.
    """

    name: str
    parts: tuple[Source, ...]
    blocks: tuple[Block, ...] | None
    numel: int

    @property
    def dtype(self) -> str:
        return self.parts[0].dtype

    def reads(self, buffer: memoryview, start: int) -> Iterator[Computed]:
        yield Computed(buffer, functools.partial(self.fill, buffer, start))

    def fill(self, buffer: memoryview, start: int, reader: ByteReader) -> None:
        """Fill the buffer with elements of the whole, from `start` on.

        Raises: CheckpointError, if parts differ in an element, or none has it.
        """
        size = width(self.dtype)
        if self.blocks is None:
            buffer[:] = self.mean(start, len(buffer) // size, reader)
            return
        unit = min(size, 8)
        target = Target(
            buffer.cast(FORMATS[unit]), start * size // unit, bytearray(len(buffer) // unit)
        )
        for block in self.blocks:
            if 0 not in block.shape:
                for box in boxes(in_order(block, size // unit), target, unit):
                    if not target.take(box, self.parts[block.part], reader, unit):
                        reader.check()  # damage is another reason
                        raise CheckpointError(
                            f"{self.name} differs on tensor-parallel rank {block.part}"
                        )
        if 0 in target.filled:
            raise CheckpointError(
                f"the shards of {self.name} do not cover its elements exactly once"
            )

    def without_copies(self) -> "Joined":
        """A Joined that reads what several parts have from one alone, and does not compare."""
        places = {
            (block.shape, block.whole_stride, block.whole_offset): block
            for block in reversed(self.blocks or ())
        }
        return self._replace(blocks=self.blocks and tuple(places.values()))

    def mean(self, start: int, numel: int, reader: ByteReader) -> bytes:
        """The mean of the parts, as bytes, added in PyTorch's order and precision."""
        code = ARRAY_CODES[self.dtype]
        count = len(self.parts)
        parts = [array(code, bytes(reader.read(part, start, numel))) for part in self.parts]
        total = functools.reduce(
            lambda sums, part: array(code, map(operator.add, sums, part)), parts
        )
        return array(code, (value / count for value in total)).tobytes()


class Padded(NamedTuple):
    """A Source with zeros after another's elements, such as a padded vocabulary."""

    source: Source

    @property
    def dtype(self) -> str:
        return self.source.dtype

    def reads(self, buffer: memoryview, start: int) -> Iterator[Any]:
        nbytes = max(0, self.source.numel - start) * width(self.dtype)
        rest = buffer[nbytes:]

        def zeros(reader):
            rest[:] = bytes(len(rest))

        if nbytes:  # to read nothing, behind the end of a record, would be damage
            yield from self.source.reads(buffer[:nbytes], start)
        yield Computed(rest, zeros)


def strided(name: str, tensor: Tensor) -> Source:
    """A Source of a tensor's elements in the order of their indices, whatever its strides are.

    The storage must be a Record, or trimmed by trim_storage().
    """
    if isinstance(tensor.storage, Record):  # of bytes, whatever they stand for
        tensor = trim_storage(tensor)
    if not has_gaps(tensor):
        return tensor.storage
    strides = contiguous_strides(tensor.size)
    block = Block(0, tensor.size, tensor.stride, tensor.offset, strides, 0)
    return Joined(name, (tensor.storage,), (block,), tensor.numel)


def part_of(whole: Source, shape: tuple, blocks: Sequence[Block], numel: int) -> Joined:
    """A Source that reads one part from the whole tensor.

    shape: of the whole. blocks: all that the part has. numel: of the part.
    """
    name = getattr(whole, "name", "a parameter")
    ends = [block.whole_offset + reach(block.shape, block.whole_stride) for block in blocks]
    if max(ends) > whole.numel:
        whole = Padded(whole)
    of_whole = getattr(whole, "blocks", None) or ()
    # Read from the saved parts themselves: through the whole it would be row by row, twice.
    if of_whole and all(is_box(block, shape) for block in (*of_whole, *blocks)):
        common = [overlap(block, box) for block in of_whole for box in blocks]
        return Joined(name, whole.parts, tuple(filter(None, common)), numel)
    return Joined(name, (whole,), tuple(map(inverted, blocks)), numel)


def is_box(block, shape):
    """Whether a block is a range of indices in each dimension of a whole of this shape."""
    if block.whole_stride != contiguous_strides(shape):
        return False
    ends = map(operator.add, indices(block.whole_offset, block.whole_stride), block.shape)
    return all(map(operator.le, list(ends)[1:], shape[1:]))


def inverted(block):
    """The block with part and whole exchanged."""
    return Block(
        part=0,
        shape=block.shape,
        stride=block.whole_stride,
        offset=block.whole_offset,
        whole_stride=block.stride,
        whole_offset=block.offset,
    )


def overlap(block, box):
    """The intersection of a saved block with the box that a rank needs; None if it is empty.

    As a Block from the saved part into the rank's part, which takes the place of the whole.
    """
    begins = indices(block.whole_offset, block.whole_stride)
    box_begins = indices(box.whole_offset, box.whole_stride)
    starts = list(map(max, begins, box_begins))
    ends = map(operator.add, begins, block.shape)
    box_ends = map(operator.add, box_begins, box.shape)
    shape = tuple(map(operator.sub, map(min, ends, box_ends), starts))
    if any(n <= 0 for n in shape):
        return None
    return Block(
        part=block.part,
        shape=shape,
        stride=block.stride,
        offset=block.offset + dot(map(operator.sub, starts, begins), block.stride),
        whole_stride=box.stride,
        whole_offset=box.offset + dot(map(operator.sub, starts, box_begins), box.stride),
    )


def indices(offset, strides):
    """The indices of the element at this offset in a contiguous tensor of these strides."""
    index = []
    for stride in strides:
        i, offset = divmod(offset, stride or 1)
        index.append(i)
    return index


@functools.lru_cache(4096)  # the layers of a model are alike
def in_order(block: Block, units: int = 1) -> Block:
    """The same block, with its dimensions sorted as in the whole, and merged where possible.

    units: how many of the units in which the result counts make an element.
    """
    dims = [(units, 1, 1)]  # (size, stride, stride in the whole), from the last on
    of_block = zip(block.shape, block.stride, block.whole_stride, strict=True)
    for dim in sorted(of_block, key=operator.itemgetter(2)):
        dim = (dim[0], dim[1] * units, dim[2] * units)
        n, stride, whole_stride = dims[-1]
        if n == 1 < dim[0]:
            dims[-1] = dim
        elif dim[1:] == (n * stride, n * whole_stride):
            dims[-1] = (n * dim[0], stride, whole_stride)
        elif dim[0] > 1:
            dims.append(dim)
    if dims[0][1] == 0:  # no slice has the same element twice
        dims.insert(0, (1, 1, 1))
    shape, stride, whole_stride = zip(*reversed(dims), strict=True)
    return Block(
        part=block.part,
        shape=shape,
        stride=stride,
        offset=block.offset * units,
        whole_stride=whole_stride,
        whole_offset=block.whole_offset * units,
    )


def boxes(block: Block, target: Target, unit: int) -> Iterator[Block]:
    """Yields portions of a block, each read at once. Short gaps between rows are read, too."""
    rows = block.rows(target.start, target.start + len(target.elements))
    if rows is None:
        return
    count, *shape = rows.shape
    stride = rows.stride[0]
    gap = stride - reach(shape, rows.stride[1:])
    step = max(1, MOST_BYTES // (max(stride, 1) * unit)) if gap * unit < SHORT_BYTES else 1
    for first in range(0, count, step):
        yield rows._replace(
            shape=(min(step, count - first), *shape),
            offset=rows.offset + first * stride,
            whole_offset=rows.whole_offset + first * rows.whole_stride[0],
        )


def reach(shape: Sequence[int], stride: Sequence[int]) -> int:
    """The number of elements from the first of a box to its last, with those between."""
    return 1 + dot([n - 1 for n in shape], stride)


def is_once(shape, strides):
    """Whether every element of a box has a place of its own."""
    end = 1
    for stride, n in sorted(zip(strides, shape, strict=True)):
        if n > 1 and stride < end:
            return False
        end += (n - 1) * stride
    return True


def dot(index, strides):
    return sum(map(operator.mul, index, strides))


def blocks_along(
    dim: int, shape: Sequence[int], widths: Sequence[Sequence[int]]
) -> tuple[Block, ...]:
    """The blocks of a tensor made of sub-tensors along a dimension, each of which is cut by itself.

    shape: of the whole. widths: widths[sub][part] is the size of the part's share of a sub-tensor.
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
