# SPDX-License-Identifier: MIT
"""Compare what was read from two files: tensors are the same if each of their bytes is."""

import itertools
from collections.abc import Iterator
from typing import Any

from universal.files.joined import strided
from universal.files.sources import ByteReader, Extent, Record, nbytes_of, width
from universal.files.torch_file import (
    Stub,
    StubType,
    Tensor,
    has_gaps,
    tensor_of,
    trim_storage,
)


def is_same(a: Any, b: Any) -> bool:
    """Whether two values are the same, whatever files they are in. NaN is NaN, and 3 is 3.0.

    Raises: CheckpointError, if a tensor that has to be read is damaged.
    """
    pending = [(a, b)]
    compared = set()
    while pending:
        a, b = pending.pop()
        pair = id(a), id(b)
        if a is b or pair in compared:  # a list may contain itself
            continue
        if isinstance(a, (dict, list, Stub)):
            compared.add(pair)
        parts = pairs_within(a, b)
        if parts is None:
            return False
        pending += parts
    return True


def pairs_within(a, b):
    """The pairs of inner values that are still to be compared; None if a and b differ already."""
    tensors = tensor_of(a), tensor_of(b)
    if None not in tensors:
        return [] if is_same_tensor(*tensors) else None
    if isinstance(a, Record) and isinstance(b, Record):  # of a storage; of two files
        return [] if None not in (a.crc, b.crc) and (a.nbytes, a.crc) == (b.nbytes, b.crc) else None
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() == b.keys():
            return [(a[key], b[key]) for key in a]
        flat = [[*itertools.chain(*of.items())] for of in (a, b)]  # keys may be objects
        return [*zip(*flat, strict=True)] if len(a) == len(b) else None
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        same = len(a) == len(b) and isinstance(a, Tensor) == isinstance(b, Tensor)
        return [*zip(a, b, strict=True)] if same else None
    if isinstance(a, Stub) and isinstance(b, Stub):
        contents = [(type(x), arguments_of(x), x.state, x.items, x.entries) for x in (a, b)]
        return [*zip(*contents, strict=True)]
    if isinstance(a, StubType) and isinstance(b, StubType):
        names = [(x.__module__, x.__qualname__) for x in (a, b)]
        return [] if names[0] == names[1] else None
    numbers = all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in (a, b))
    equal = (numbers or type(a) is type(b)) and (a == b or a != a and b != b)
    return [] if equal else None


def arguments_of(stub):
    """The arguments of an object; those of a set in an order that no process decides."""
    is_set = type(stub).__qualname__ in ("set", "frozenset")
    if is_set and stub.args and isinstance(stub.args[0], list):
        return sorted(stub.args[0], key=repr)
    return stub.args


def is_same_tensor(a: Tensor, b: Tensor) -> bool:
    """Whether both have the same dtype, shape and bytes."""
    if (a.dtype, a.size) != (b.dtype, b.size):
        return False
    if 0 in a.size:
        return True
    checksums = checksum_of(a), checksum_of(b)
    if None not in checksums:  # so gigabytes need not be read
        return checksums[0] == checksums[1]
    readers = ByteReader(), ByteReader()
    chunks = zip(bytes_of(a, readers[0]), bytes_of(b, readers[1]), strict=True)
    same = all(first == second for first, second in chunks)
    for reader in readers:
        reader.check()
    return same


def checksum_of(tensor):
    """The saved checksum of a tensor's bytes; None if no checksum is of exactly these bytes."""
    extent = tensor.storage
    if isinstance(extent, Record):
        extent = Extent(tensor.dtype, extent, 0, extent.nbytes // width(tensor.dtype))
    if not isinstance(extent, Extent) or has_gaps(tensor):
        return None
    is_all = nbytes_of(extent) == extent.record.nbytes and extent.numel == tensor.numel
    return extent.record.crc if is_all else None


def bytes_of(tensor: Tensor, reader: ByteReader) -> Iterator[bytes]:
    """Yields a tensor's bytes in the order of its indices, in chunks."""
    if isinstance(tensor.storage, bytes):
        yield tensor.storage
        return
    if isinstance(tensor.storage, Record):
        tensor = trim_storage(tensor)
    for chunk, _ in reader.chunks(strided("a tensor", tensor)):
        yield bytes(chunk)


def holds_elements(value: Any, numels: set[int]) -> bool:
    """Whether a value contains, at any depth, a tensor with one of these numbers of elements."""
    pending = [value]
    seen = set()
    while pending:
        value = pending.pop()
        if tensor := tensor_of(value):
            if tensor.numel in numels:
                return True
        elif isinstance(value, (dict, list, tuple, Stub)) and id(value) not in seen:
            seen.add(id(value))
            if isinstance(value, Stub):
                value = [value.args, value.state, value.items, value.entries]
            pending += value.values() if isinstance(value, dict) else value
    return False
