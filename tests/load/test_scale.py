"""What a load sends and computes for each rank that saved stays small."""

import os
import pickle
import zlib

import pytest
import torch

from universal.errors import CheckpointError
from universal.files import sources, torch_file
from universal.files.sources import (
    SHORT_BYTES,
    Extent,
    ExtentsOfRanks,
    Record,
    RecordsOfFile,
    join_crcs,
    packed_extents,
)
from universal.files.torch_file import number_in, read_scalar


def extents_of(rank, numel=10, begin=0):
    """Of 50 tensors in a file."""
    return [
        Extent(
            "float32", Record(f"rank_{rank}.pt", 64 * i + begin, 4 * numel, 9 * i + rank), 0, numel
        )
        for i in range(50)
    ]


def restored(of_ranks):
    """What a pickle keeps of all ranks' extents, and its bytes."""
    files = tuple(packed_extents(extents, of_ranks[0]) for extents in of_ranks)
    data = pickle.dumps([ExtentsOfRanks(first, i, files) for i, first in enumerate(of_ranks[0])])
    tensors = pickle.loads(data)
    return [[tensor[rank] for tensor in tensors] for rank in range(len(of_ranks))], len(data)


def test_extents_of_ranks():
    """They are those that went in, after a pickle, too, and a rank of a parameter costs 4 bytes, or
    12 where the places differ; records that are not alike stay as they are."""
    for begin, most in ((0, 6), (1, 14)):
        sizes = []
        for ranks in (100, 200):
            of_ranks = [extents_of(rank, begin=begin * rank) for rank in range(ranks)]
            same, nbytes = restored(of_ranks)
            assert same == of_ranks
            sizes.append(nbytes)
        assert (sizes[1] - sizes[0]) / (50 * 100) < most
    unchecked = [[of._replace(record=of.record._replace(crc=None)) for of in extents_of(1)]]
    longer = [extents_of(3), extents_of(1, numel=9), extents_of(0)]
    for of_ranks in (unchecked + unchecked, unchecked + longer, longer):
        assert restored(of_ranks)[0] == of_ranks
    assert not isinstance(packed_extents(longer[1], longer[0]), RecordsOfFile)


def test_joined_crcs():
    """The CRC-32 of A + B from those of A and B, at lengths on either side of where another way
    is faster."""
    first = os.urandom(1000)
    for nbytes in (0, 1, 100, SHORT_BYTES - 1, SHORT_BYTES, SHORT_BYTES + 1, 5 * SHORT_BYTES):
        second = os.urandom(nbytes)
        joined = join_crcs(zlib.crc32(first), zlib.crc32(second), nbytes)
        assert joined == zlib.crc32(first + second)


def test_a_file_is_opened_once(tmp_path, monkeypatch):
    """Its scalars are read with its directory; damage in one is named."""
    opened = []
    monkeypatch.setattr(
        torch_file, "open_file", lambda path: opened.append(path) or sources.open_file(path)
    )
    path = tmp_path / "scalars.pt"
    torch.save({f"{i}": torch.tensor(1234.5 + i) for i in range(9)}, path)
    content = torch_file.load(path)
    assert [number_in(read_scalar(content[f"{i}"])) for i in range(9)] == [
        1234.5 + i for i in range(9)
    ]
    assert opened == [path]
    data = path.read_bytes()
    number = torch.tensor(1234.5).numpy().tobytes()
    path.write_bytes(data.replace(number, bytes([number[0] ^ 1]) + number[1:]))
    with pytest.raises(CheckpointError, match=f"{path} is damaged"):
        read_scalar(torch_file.load(path)["0"])
    view = torch.arange(5.0)[3]
    torch.save(view, path)
    assert number_in(read_scalar(torch_file.load(path))) == 3
