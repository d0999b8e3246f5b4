"""What a load sends and computes for each rank that saved stays small."""

import os
import pickle
import zlib

import pytest
import torch

from universal.errors import CheckpointError
from universal.files import sources, torch_file
from universal.files.sources import SHORT, Extent, Record, join_crcs, packed_extents
from universal.files.torch_file import number_in, read_scalar


def extents_of(ranks, numel=10):
    return [
        Extent("float32", Record(f"rank_{i}.pt", 64 * i, 4 * numel, i, "Float"), 0, numel)
        for i in range(ranks)
    ]


def test_extents_of_ranks():
    """They are those that went in, after a pickle, too, and a rank of a parameter costs 12 bytes;
    records that are not alike stay as they are."""
    sizes = []
    for ranks in (100, 200):
        parameters = [packed_extents(extents_of(ranks)) for _ in range(50)]
        data = pickle.dumps(parameters)
        assert [[of[i] for i in range(ranks)] for of in pickle.loads(data)] == 50 * [
            extents_of(ranks)
        ]
        sizes.append(len(data))
    assert (sizes[1] - sizes[0]) / (50 * 100) < 13
    assert len({packed_extents(extents_of(3)), packed_extents(extents_of(3))}) == 1
    different = [*extents_of(3), *extents_of(1, numel=9)]
    assert packed_extents(different) == tuple(different)
    unchecked = [of._replace(record=of.record._replace(crc=None)) for of in extents_of(3)]
    packed = packed_extents(unchecked)
    assert [packed[i] for i in range(3)] == unchecked
    assert packed_extents([*extents_of(3), unchecked[0]]) == (*extents_of(3), unchecked[0])


def test_joined_crcs():
    """The CRC-32 of A + B from those of A and B, at lengths on either side of where another way
    is faster."""
    first = os.urandom(1000)
    for nbytes in (0, 1, 100, SHORT - 1, SHORT, SHORT + 1, 5 * SHORT):
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
