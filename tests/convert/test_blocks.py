"""Elements that are joined from parts, or lie with any strides, against torch: random tensors, read
from any element to any other, also a few bytes at a time; and many of them at once, in threads."""

import io
import itertools
import os
import random
import sys
import zlib

import pytest
import torch

from universal.errors import CheckpointError
from universal.files import joined as blocks
from universal.files import sources
from universal.files.sources import ByteReader, Extent, Record
from universal.files.torch_file import Tensor
from universal.load import reader

DTYPES = (torch.float32, torch.uint8, torch.bfloat16, torch.float64, torch.complex128)


@pytest.fixture(params=[1 << 24, 32])
def most(request, monkeypatch):
    monkeypatch.setattr(blocks, "MOST_BYTES", request.param)


def bytes_of(tensor):
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def saved(path, tensors):
    """The Extents of contiguous tensors, in one file."""
    extents = []
    with open(path, "wb") as file:
        for tensor in tensors:
            data = bytes_of(tensor).numpy().tobytes()
            record = Record(str(path), file.tell(), len(data), zlib.crc32(data))
            dtype = str(tensor.dtype).removeprefix("torch.")
            extents.append(Extent(dtype, record, 0, tensor.numel()))
            file.write(data)
    return extents


def check(draw, source, wanted):
    """That some elements are read as they are wanted, and found to be whole."""
    begin = draw.randint(0, wanted.numel() - 1)
    end = draw.randint(begin + 1, wanted.numel())
    buffer = bytearray((end - begin) * wanted.element_size())
    reader = ByteReader()
    reader.read_elements(memoryview(buffer), source, begin)
    reader.check()
    part = wanted.flatten()[begin:end]
    assert bytes(buffer) == bytes_of(part).numpy().tobytes(), (source, begin, end)


def test_any_strides(tmp_path, most):
    for number in range(100):
        draw = random.Random(number)
        size = tuple(draw.randint(1, 5) for _ in range(draw.randint(0, 4)))
        stride = tuple(draw.choice([0, 1, 2, 3, 7, 20]) for _ in size)
        span = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        base = torch.randint(1 << 20, (span,)).to(draw.choice(DTYPES))
        (extent,) = saved(tmp_path / "x", [base])
        view = Tensor(extent, 0, size, stride, False, extent.dtype)
        check(draw, blocks.strided("x", view), base.as_strided(size, stride))


def cut(draw, whole, dim, subs):
    """(the parts of some ranks, the Blocks that join them)."""
    ranks = draw.randint(1, 4)
    widths = []
    for n in subs:
        places = [0, *sorted(draw.randint(0, n) for _ in range(ranks - 1)), n]
        widths.append([b - a for a, b in itertools.pairwise(places)])
    split = [
        sub.split(of_sub, dim) for sub, of_sub in zip(whole.split(subs, dim), widths, strict=True)
    ]
    parts = [torch.cat(of_rank, dim) for of_rank in zip(*split, strict=True)]
    return parts, blocks.blocks_along(dim, tuple(whole.shape), widths)


def test_cut_and_cut_again(tmp_path, most):
    """The whole, and what each of other ranks has of it, from what some have saved."""
    for number in range(100):
        draw = random.Random(number)
        shape = [draw.randint(1, 6) for _ in range(draw.randint(1, 4))]
        dim = draw.randrange(len(shape))
        subs = [draw.randint(1, 5) for _ in range(draw.randint(1, 3))]
        shape[dim] = sum(subs)
        whole = torch.randint(1 << 20, shape).to(draw.choice(DTYPES))
        parts, saved_blocks = cut(draw, whole, dim, subs)
        sources = tuple(saved(tmp_path / "x", parts))
        joined = blocks.Joined("x", sources, saved_blocks, whole.numel())
        check(draw, joined, whole)
        others, blocks_of_others = cut(draw, whole, dim, subs)
        for rank, part in enumerate(others):
            own = [block for block in blocks_of_others if block.part == rank]
            if part.numel():
                source = blocks.part_of(joined, tuple(shape), own, part.numel())
                check(draw, source, part)


def test_copies_are_compared(tmp_path):
    """A part that differs is named, and a hole is seen; without copies one part is read alone."""
    whole = torch.rand(4, 6)
    extents = tuple(saved(tmp_path / "x", [whole, whole + 1]))
    copies = tuple(blocks.Block(i, (4, 6), (6, 1), 0, (6, 1), 0) for i in (0, 1))
    joined = blocks.Joined("x", extents, copies, 24)
    draw = random.Random(0)
    with pytest.raises(CheckpointError, match="x differs on tensor-parallel rank 1"):
        check(draw, joined, whole)
    check(draw, joined.without_copies(), whole)
    half = joined._replace(blocks=(copies[0]._replace(shape=(4, 3)),))
    with pytest.raises(CheckpointError, match="do not cover its elements exactly once"):
        ByteReader().read_elements(memoryview(bytearray(96)), half)


def test_a_block_that_goes_beyond_a_row(tmp_path):
    """As a map of every element may say: it is no box of columns."""
    whole = torch.rand(3, 4)
    places = ((2, 2, 3), (1, 3, 0), (1, 2, 5), (1, 3, 9))  # rows, columns, first element
    parts = [whole.as_strided(place[:2], (4, 1), place[2]) for place in places]
    joining = tuple(
        blocks.Block(i, (rows, columns), (columns, 1), 0, (4, 1), first)
        for i, (rows, columns, first) in enumerate(places)
    )
    joined = blocks.Joined("x", tuple(saved(tmp_path / "x", parts)), joining, 12)
    own = blocks.Block(1, (3, 2), (2, 1), 0, (4, 1), 0)
    for seed in range(20):
        draw = random.Random(seed)
        check(draw, joined, whole)
        check(draw, blocks.part_of(joined, (3, 4), [own], 6), whole[:, :2])


@pytest.mark.parametrize("short", [False, True], ids=["", "short answers"])
def test_many_at_once(tmp_path, monkeypatch, short):
    """In any order, also from storage that answers with less than it was asked for; and a byte that
    was read wrong is noticed, though another reading of it is right."""
    preadv = os.preadv
    wrong = []

    def read(fd, buffers, offset):
        count = preadv(fd, [buffers[0][:7]] if short else buffers, offset)
        end = offset + count
        for buffer in buffers:
            if wrong and offset <= wrong[0] < min(offset + len(buffer), end):
                buffer[wrong.pop() - offset] ^= 4
            offset += len(buffer)
        return count

    monkeypatch.setattr(os, "preadv", read)
    for number in range(30):
        draw = random.Random(number)
        for name in ("LARGEST_READ", "GAP_BYTES", "MOST_BUFFERS"):
            monkeypatch.setattr(sources, name, draw.choice([8, 40, 1000]))
        tensors = [torch.rand(draw.randint(1, 60)) for _ in range(8)]
        extents = saved(tmp_path / "x", tensors)
        fetching = reader.TensorReader()
        pairs = []
        for _ in range(30):
            i = draw.randrange(8)
            numel = len(tensors[i])
            block = blocks.Block(0, (numel,), (1,), 0, (1,), 0)
            joined = blocks.Joined("x", (extents[i],), (block,), numel)
            start = draw.randrange(numel)
            pairs.append((torch.zeros(draw.randint(1, numel - start)), tensors[i][start:]))
            fetching.request(pairs[-1][0], draw.choice([extents[i], extents[i], joined]), start)
        if is_wrong := draw.random() < 0.5:
            wrong.append(extents[i].record.offset + 4 * start)
        fetching.fetch()
        if is_wrong:
            with pytest.raises(CheckpointError, match="is damaged"):
                fetching.check()
        else:
            fetching.check()
            assert all(torch.equal(filled, wanted[: len(filled)]) for filled, wanted in pairs)


class HungUp(io.StringIO):
    def isatty(self):
        return True

    def write(self, text):
        raise OSError(5, "Input/output error")


@pytest.mark.parametrize("stream", [HungUp(), None])
def test_a_bar_stops_nothing(tmp_path, monkeypatch, stream):
    """On a terminal that hangs up, or without one."""
    monkeypatch.setattr(reader, "LONG_SECONDS", 0)
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    fetching = reader.TensorReader()
    (extent,) = saved(tmp_path / "x", [torch.rand(1000)])
    fetching.request(torch.empty(1000), extent)
    fetching.fetch(progress=True)
    assert not fetching.requests
