# SPDX-License-Identifier: MIT
"""Read the .pt files that torch.save() wrote before version 1.6, without a zip archive.

It does so today, too, where DeepSpeed's config says "checkpoint_serialization": false. Such a file
is five pickles (a magic number, a version, the machine, the content, the keys of the storages) and
then the storages, end to end and without checksums.
"""

import os
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from universal.errors import CheckpointError
from universal.files.schema import expect
from universal.files.sources import Record

MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the first pickle
COUNT = 8  # bytes before each storage: the number of its elements


def is_unzipped(file: BinaryIO) -> bool:
    """Whether torch wrote the file, opened just now, like that."""
    return file.read(len(MAGIC)) == MAGIC


def load_unzipped(
    path: Path, unpickle: Callable[[bytes, Callable[[str, int], Record]], Any]
) -> Any:
    """The content of such a file.

    unpickle: of a pickle, and of a function that returns the Record of a storage's key and size.
    """
    with open(path, "rb") as file:
        _, _, machine, content, keys = [next_pickle(file) for _ in range(5)]
        begin = file.tell()
        end = os.fstat(file.fileno()).st_size
    machine = expect(unpickle(machine, no_storage), {"little_endian": bool}, path)
    if not machine["little_endian"]:
        raise CheckpointError("it was written on a big-endian machine")
    sizes = {}

    def measure(key, nbytes):
        sizes[key] = nbytes
        return Record(str(path), 0, nbytes, None)

    unpickle(content, measure)
    records = {}
    for key in expect(unpickle(keys, no_storage), [str], path):
        records[key] = Record(str(path), begin + COUNT, sizes[key], None)
        begin += COUNT + sizes[key]
    if begin > end:
        raise CheckpointError(f"{path} is cut off")
    return unpickle(content, lambda key, _: records[key])


def no_storage(key, _):
    raise CheckpointError(f"storage {key} is where none can be")


def next_pickle(file: BinaryIO) -> bytes:
    """The bytes of the pickle that begins here."""
    begin = file.tell()
    end = 1 + max(position for _, _, position in pickletools.genops(file))
    file.seek(begin)
    return file.read(end - begin)
