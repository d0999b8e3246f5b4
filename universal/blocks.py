# SPDX-License-Identifier: MIT
"""A tensor that is joined from blocks of several parts, such as those of tensor-parallel ranks. Needs
nothing but Python 3.10."""

import functools
import heapq
import itertools
import operator
import zlib
from array import array
from typing import NamedTuple

from universal.byte_ranges import CHUNK, width
from universal.errors import CheckpointError
from universal.torch_file import whole

ROWS = 1 << 16  # elements read at a time if several ranks hold parts or copies


class Joined(NamedTuple):
    """A state of a parameter of which tensor-parallel ranks hold parts. blocks: (rank, shape,
    strides and first element in its part, strides and first element in the whole); None if the
    whole is the mean of the parts."""

    name: str
    parts: tuple  # Slices
    blocks: tuple
    numel: int

    @property
    def dtype(self):
        return self.parts[0].dtype

    def chunks(self, reader):
        """Yields (bytes of the whole, their CRC-32), in order."""
        left = self.numel * width(self.dtype)
        for chunk in self.mean(reader) if self.blocks is None else self.in_order(reader):
            chunk = chunk[:left]  # a vocabulary may be padded
            yield chunk, zlib.crc32(chunk)
            left -= len(chunk)
        if left:
            raise CheckpointError(
                f"the shards of {self.name} do not cover its elements exactly once"
            )

    def read(self, reader, rank, start, numel):
        data = bytearray(numel * width(self.dtype))
        reader.read_slices(memoryview(data), self.parts[rank], start)
        return data

    def mean(self, reader):
        """The mean, in the same order and precision as PyTorch's."""
        code = {"float32": "f", "float64": "d"}[self.dtype]
        count = len(self.parts)
        for start in range(0, self.numel, ROWS):
            numel = min(ROWS, self.numel - start)
            parts = (
                array(code, bytes(self.read(reader, rank, start, numel))) for rank in range(count)
            )
            total = functools.reduce(
                lambda sums, part: array(code, map(operator.add, sums, part)), parts
            )
            yield array(code, (value / count for value in total)).tobytes()

    def in_order(self, reader):
        end = 0
        last = b""
        joined = bytearray()
        for place, rank, here, numel in runs(self.blocks):
            data = self.read(reader, rank, here, numel)
            if place == end:
                joined += data
                last = data
                end += numel
            elif place + numel != end or len(data) != len(last):
                raise CheckpointError(
                    f"the shards of {self.name} do not cover its elements exactly once"
                )
            elif data != last:  # several ranks hold it
                raise CheckpointError(f"{self.name} differs on tensor-parallel rank {rank}")
            if len(joined) >= CHUNK:
                yield joined
                joined = bytearray()
        yield joined


def runs(blocks):
    """Yields (place in the whole, rank, place in its part, elements) for runs of elements that are
    contiguous in both, in the order of the whole."""

    def of(rank, shape, stride, here, full_stride, there):
        dims = list(zip(shape, stride, full_stride, strict=True))
        run = 1
        while dims and (dims[-1][0] == 1 or dims[-1][1:] == (run, run)):
            run *= dims.pop()[0]
        for index in itertools.product(*(range(n) for n, _, _ in dims)) if 0 not in shape else ():
            place = there + sum(i * full for i, (_, _, full) in zip(index, dims, strict=True))
            mine = here + sum(i * own for i, (_, own, _) in zip(index, dims, strict=True))
            for done in range(0, run, ROWS):
                yield place + done, rank, mine + done, min(ROWS, run - done)

    return heapq.merge(*(of(*block) for block in blocks))


def cut_along(dim, size, widths):
    """The blocks of a tensor that consists of one or more sub-tensors along dim, each cut by
    itself: widths[sub][rank]."""
    blocks = []
    strides = whole("", b"", size).stride
    at = 0
    in_part = [0] * len(widths[0])
    for sub in widths:
        for rank, n in enumerate(sub):
            mine = [sum(w[rank] for w in widths) if d == dim else m for d, m in enumerate(size)]
            stride = whole("", b"", mine).stride
            block = [n if d == dim else m for d, m in enumerate(size)]
            blocks.append(
                (rank, block, stride, in_part[rank] * stride[dim], strides, at * strides[dim])
            )
            in_part[rank] += n
            at += n
    return tuple(blocks)
