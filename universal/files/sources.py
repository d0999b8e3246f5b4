# SPDX-License-Identifier: MIT
"""Read ranges of bytes in files, each once, and check them against checksums.

A Record is a stored run of bytes with the CRC-32 that was saved with it. A Source says where the
elements of a tensor are. A ByteReader reads, and remembers the CRC-32 of what it has read; check()
compares that with the records' own.
"""

import functools
import os
import re
import resource
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from universal.errors import CheckpointError

CHUNK = 1 << 20
SHORT = 1 << 14  # bytes; below this it is faster to continue a CRC than to join two
OpenFile = Callable[[str], BinaryIO]


@functools.cache
def width(dtype: str) -> int:
    """Bytes of an element: float8_e4m3fn 1, complex64 8, bool 1."""
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1


# --------------------------------------------------------------------------------------------------
# 1. where elements are


class Source(Protocol):
    """Where the elements of a tensor are, in the order of their indices. Extent is the simplest.

    A source whose elements are not stored as they are, such as a mean of several parts, has no
    ranges(), but read_into(buffer, start, reader), which fills the buffer and returns the CRC-32 of
    its bytes, or None.
    """

    dtype: str  # "float32", as in Tensor
    numel: int

    def ranges(self, start: int, numel: int) -> Iterator["ByteRange"]:
        """The bytes of elements from `start` on, in the order of the elements."""


class Record(NamedTuple):
    """The bytes of one storage in a file. kind: Float, for torch.FloatStorage.

    crc: None, if none was saved.
    """

    path: str
    offset: int
    nbytes: int
    crc: int | None
    kind: str = "Untyped"

    dtype = "byte"

    @property
    def numel(self) -> int:
        return self.nbytes

    def ranges(self, start: int, numel: int) -> Iterator["ByteRange"]:
        yield ByteRange(self, start, numel)


class ByteRange(NamedTuple):
    """Bytes of a record, from `start` on."""

    record: Record
    start: int
    nbytes: int


class Extent(NamedTuple):
    """Elements that follow each other in one record, from a byte of it on."""

    dtype: str
    record: Record
    byte_offset: int
    numel: int

    def part(self, start: int, numel: int) -> "Extent":
        byte_offset = self.byte_offset + start * width(self.dtype)
        return Extent(self.dtype, self.record, byte_offset, numel)

    def ranges(self, start: int, numel: int) -> Iterator[ByteRange]:
        part = self.part(start, numel)
        yield ByteRange(self.record, part.byte_offset, nbytes_of(part))


def nbytes_of(content: bytes | Source) -> int:
    """The size of bytes, or of what a source reads."""
    if isinstance(content, bytes | memoryview):
        return len(content)
    return content.numel * width(content.dtype)


# --------------------------------------------------------------------------------------------------
# 2. reading


def open_file(path: str | Path) -> BinaryIO:
    try:
        return open(path, "rb", buffering=0)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except IsADirectoryError:
        raise CheckpointError(f"{path} is not a file") from None


def keep_open() -> OpenFile:
    """open_file() that keeps up to half as many files open as this process may still open.

    It may have a socket for each of a thousand ranks.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    rest = soft - len(os.listdir("/dev/fd"))
    return functools.lru_cache(max(4, min(rest // 2, 1 << 14)))(open_file)


def fill(opened, buffer, record, start):
    """Read as many bytes of a record as the buffer has."""
    file = opened(record.path)  # hold it while reading: in another thread, the cache may drop it
    done = 0
    while done < len(buffer):
        try:
            nbytes = os.preadv(file.fileno(), [buffer[done:]], record.offset + start + done)
        except OSError as error:
            raise OSError(error.errno, error.strerror, record.path) from error
        if not nbytes:
            raise CheckpointError(f"{record.path} became shorter while it was read")
        done += nbytes


class ByteReader:
    """Reads records, and remembers what it has read.

    spans: {record: [start, end, CRC-32, start, end, CRC-32, ...]}, flat because there are many.
    """

    def __init__(self, opened: OpenFile | None = None):
        self.opened = opened or keep_open()
        self.spans = {}

    def read_bytes(self, buffer: memoryview, record: Record, start: int) -> int:
        """Fill the buffer from a record. Returns the CRC-32 of these bytes."""
        fill(self.opened, buffer, record, start)
        crc = zlib.crc32(buffer)
        spans = self.spans.setdefault(record, [start, start, 0])
        if spans[-2] != start:
            spans += (start, start, 0)
        spans[-1] = append_crc(spans[-1], buffer, crc)
        spans[-2] += len(buffer)
        return crc

    def read_elements(self, buffer: memoryview, source: Source, start: int = 0) -> int | None:
        """Fill the buffer with elements of a source, from `start` on.

        Returns their CRC-32, if it is known without another look at them.
        """
        if hasattr(source, "read_into"):
            return source.read_into(buffer, start, self)
        done = 0
        crc = 0
        for part in source.ranges(start, len(buffer) // width(source.dtype)):
            target = buffer[done : done + part.nbytes]
            crc = append_crc(crc, target, self.read_bytes(target, part.record, part.start))
            done += part.nbytes
        return crc

    def read(self, source: Source, start: int, numel: int) -> bytearray:
        """Elements of a source, from `start` on."""
        data = bytearray(numel * width(source.dtype))
        self.read_elements(memoryview(data), source, start)
        return data

    def chunks(self, source: Source) -> Iterator[tuple[memoryview, int]]:
        """Yields (bytes of a source, their CRC-32). Use a chunk before you ask for the next."""
        size = width(source.dtype)
        per_chunk = CHUNK // size
        buffer = memoryview(bytearray(min(CHUNK, source.numel * size)))
        for start in range(0, source.numel, per_chunk):
            chunk = buffer[: min(per_chunk, source.numel - start) * size]
            crc = self.read_elements(chunk, source, start)
            yield chunk, zlib.crc32(chunk) if crc is None else crc

    def check(self) -> None:
        """Check that what was read is what was saved. Raises CheckpointError."""
        check_all(self.spans, self.opened)


def portions(items: Iterable[Any], size_of: Callable[[Any], int], size: int) -> Iterator[list]:
    """The items in lists of about `size` bytes, each the work of one thread."""
    portion = []
    nbytes = 0
    for item in items:
        portion.append(item)
        nbytes += size_of(item)
        if nbytes >= size:
            yield portion
            portion = []
            nbytes = 0
    if portion:
        yield portion


# --------------------------------------------------------------------------------------------------
# 3. checksums


def check_all(
    spans: dict[Record, Iterable[int]], opened: OpenFile, rank: int = 0, ranks: int = 1
) -> None:
    """Compare what was read of records, or this process's share of them, with their checksums.

    spans: as of a ByteReader, or of several. Raises: CheckpointError.
    """
    for record in sorted(spans)[rank::ranks]:
        check_record(record, spans[record], opened)


def check_record(record, spans, opened):
    """Check a record against its archive's CRC-32; read what nobody has read of it, the padding."""
    if record.crc is None:
        return
    crc = 0
    checked = 0
    triples = sorted(set(zip(spans[::3], spans[1::3], spans[2::3], strict=True)))
    for start, end, crc_of_span in [*triples, (record.nbytes, record.nbytes, 0)]:
        if start < checked:  # two need these elements: their CRCs do not join to the record's
            check_again(record, start, end, crc_of_span, opened)
            continue
        crc = checksum(opened, record, checked, start, crc)
        crc = join_crcs(crc, crc_of_span, end - start)
        checked = end
    if crc != record.crc:
        raise CheckpointError(
            f"{record.path} is damaged: a tensor does not match the checksum saved with it"
        )


def check_again(record, start, end, crc, opened):
    """Read a span once more, and compare."""
    if checksum(opened, record, start, end) != crc:
        raise CheckpointError(
            f"{record.path} is damaged, or was read wrong: a tensor is not the same twice"
        )


def checksum(opened: OpenFile, record: Record, start: int, end: int, crc: int = 0) -> int:
    """The CRC-32 of bytes of a record, continued from `crc`."""
    buffer = memoryview(bytearray(max(0, min(CHUNK, end - start))))
    for position in range(start, end, CHUNK):
        chunk = buffer[: end - position]
        fill(opened, chunk, record, position)
        crc = zlib.crc32(chunk, crc)
    return crc


def append_crc(crc: int, data: bytes, crc_of_data: int) -> int:
    """The CRC-32 of something with this `crc` and of the data that follow it."""
    if len(data) < SHORT:
        return zlib.crc32(data, crc)
    return join_crcs(crc, crc_of_data, len(data))


def join_crcs(first: int, second: int, nbytes: int) -> int:
    """The CRC-32 of A + B from those of A and of B, which has nbytes.

    So each byte is summed once, though two files need it.
    """
    return crc_multiply(first, crc_power(nbytes)) ^ second


@functools.lru_cache(4096)
def crc_power(nbytes):
    """x^(8 nbytes): multiply a CRC-32 by this to append nbytes zero bytes."""
    power = 0x80000000
    factor = 0x00800000
    while nbytes:
        if nbytes & 1:
            power = crc_multiply(power, factor)
        factor = crc_multiply(factor, factor)
        nbytes >>= 1
    return power


def crc_multiply(a, b):
    """The product of two polynomials modulo CRC-32's, with reversed bits."""
    product = 0
    while a:
        if a & 0x80000000:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ (0xEDB88320 if b & 1 else 0)
    return product
