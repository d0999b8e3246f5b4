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
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from universal.errors import CheckpointError

try:
    from zlib_ng.zlib_ng import crc32  # four times as fast
except ImportError:
    from zlib import crc32

CHUNK = 1 << 20
SHORT_BYTES = 1 << 14  # bytes; below this it is faster to continue a CRC than to join two
ZEROS = memoryview(bytes(SHORT_BYTES))
LARGEST_READ = 1 << 22  # bytes of one read
GAP_BYTES = 1 << 16  # bytes between two places; to read them, too, is faster than to read twice
MOST_BUFFERS = 1000  # in one read; the system takes 1024
READERS = 8  # for a disk or a server that is slow to answer
OpenFile = Callable[[str], BinaryIO]


@functools.cache
def width(dtype: str) -> int:
    """Bytes of an element: float8_e4m3fn 1, complex64 8, bool 1."""
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1


# --------------------------------------------------------------------------------------------------
# 1. where elements are


class Source(Protocol):
    """The places in files where a tensor's elements are, in the order of their indices. Extent is
    the simplest."""

    dtype: str  # "float32", as in Tensor
    numel: int

    def reads(self, buffer: memoryview, start: int) -> Iterator["ReadItem"]:
        """Yields what fills the buffer with elements from `start` on, in their order. In place of
        ReadItems, a source that must collect elements one by one, or compute them, yields what has
        their buffer and their run()."""


class Record(NamedTuple):
    """The bytes of one storage in a file. offset: in the file, in bytes.

    crc: their CRC-32; None if none was saved. kind: "Float" of torch.FloatStorage. content: the
    bytes, if they are of one number, which was read with the file's directory.
    """

    path: str
    offset: int
    nbytes: int
    crc: int | None
    kind: str = "Untyped"
    content: bytes | None = None

    dtype = "byte"

    @property
    def numel(self) -> int:
        return self.nbytes

    def reads(self, buffer: memoryview, start: int) -> Iterator["ReadItem"]:
        for position in range(0, len(buffer), LARGEST_READ):
            yield ReadItem(buffer[position : position + LARGEST_READ], self, start + position)


class ReadItem(NamedTuple):
    """A buffer to be filled with the bytes of a record, from `start` on."""

    buffer: memoryview
    record: Record
    start: int

    @property
    def offset(self) -> int:
        """The offset in the file."""
        return self.record.offset + self.start

    @property
    def end(self) -> int:
        return self.offset + len(self.buffer)

    def __str__(self):
        return f"{self.record.path}, bytes {self.offset} to {self.end}"

    def fill(self, reader: "ByteReader") -> None:
        fill(reader.opened, [self.buffer], self.record.path, self.offset)

    def run(self, reader: "ByteReader") -> int:
        """Fill the buffer, and have the reader remember it. Returns the CRC-32 of its bytes."""
        self.fill(reader)
        return reader.remember(*self)


class Extent(NamedTuple):
    """Elements that follow each other in one record, from `byte_offset` on."""

    dtype: str
    record: Record
    byte_offset: int
    numel: int

    def part(self, start: int, numel: int) -> "Extent":
        byte_offset = self.byte_offset + start * width(self.dtype)
        return Extent(self.dtype, self.record, byte_offset, numel)

    def parts(self, start: int, numel: int) -> Iterator[tuple["Extent", int, int]]:
        """Yields (Extent, first element in it, how many), as Slices.parts() does."""
        yield self, start, numel

    def reads(self, buffer: memoryview, start: int) -> Iterator[ReadItem]:
        return self.record.reads(buffer, self.byte_offset + start * width(self.dtype))


class RecordsOfFile(NamedTuple):
    """Records of a file that are like those of rank 0's, in the same order: 4 bytes for each, since
    a description has them for each frozen parameter and rank.

    offsets: of the records, as numbers of 8 bytes; b"" where they are those of rank 0's. crcs: as
    numbers of 4 bytes; None if none was saved.
    """

    path: str
    offsets: bytes
    crcs: bytes | None


class ExtentsOfRanks(NamedTuple):
    """The Extents of a tensor in the files of all ranks.

    first: the Extent of rank 0. number: of the tensor, in each file. files: from packed_extents().
    """

    first: Extent
    number: int
    files: tuple[RecordsOfFile | tuple[Extent, ...], ...]

    def __getitem__(self, rank: int) -> Extent:
        file = self.files[rank]
        if not isinstance(file, RecordsOfFile):
            return file[self.number]
        record = self.first.record._replace(path=file.path, content=None)
        if file.offsets:
            (offset,) = struct.unpack_from("=Q", file.offsets, 8 * self.number)
            record = record._replace(offset=offset)
        if file.crcs:
            (crc,) = struct.unpack_from("=I", file.crcs, 4 * self.number)
            record = record._replace(crc=crc)
        return self.first._replace(record=record)


def packed_extents(
    extents: Sequence[Extent], firsts: Sequence[Extent]
) -> RecordsOfFile | tuple[Extent, ...]:
    """The same extents, all of one file; as RecordsOfFile, if they are like rank 0's."""
    kinds, kinds_there = (
        [
            (of.dtype, of.byte_offset, of.numel, of.record.nbytes, of.record.kind)
            + (of.record.crc is None,)
            for of in of_rank
        ]
        for of_rank in (extents, firsts)
    )
    if not extents or kinds != kinds_there:
        return tuple(extents)
    records = [extent.record for extent in extents]
    offsets = array("Q", [record.offset for record in records])
    if offsets == array("Q", [first.record.offset for first in firsts]):
        offsets = array("Q")
    crcs = None
    if records[0].crc is not None:
        crcs = array("I", [record.crc for record in records]).tobytes()
    return RecordsOfFile(records[0].path, offsets.tobytes(), crcs)


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
    """Returns an open_file() that leaves files open: half as many as this process may still open.

    The other half is for what else it opens, such as a socket for each of a thousand ranks.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    rest = soft - len(os.listdir("/dev/fd"))
    return functools.lru_cache(max(4, min(rest // 2, 1 << 14)))(open_file)


def fill(opened, buffers, path, offset):
    """Read a file from `offset` on into buffers, one after the other."""
    file = opened(path)  # hold it while reading: in another thread, the cache may drop it
    buffers = [buffer for buffer in buffers if len(buffer)]
    while buffers:
        try:
            nbytes = os.preadv(file.fileno(), buffers, offset)
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from error
        if not nbytes:
            raise CheckpointError(f"{path} became shorter while it was read")
        offset += nbytes
        while buffers and nbytes >= len(buffers[0]):
            nbytes -= len(buffers.pop(0))
        if nbytes:
            buffers[0] = buffers[0][nbytes:]


class ByteReader:
    """Reads records, and keeps the CRC-32 of each span of bytes that it has read.

    spans: {record: [start, end, CRC-32, start, end, CRC-32, ...]}, flat because there are many.
    """

    def __init__(self, opened: OpenFile | None = None):
        self.opened = opened or keep_open()
        self.spans = {}

    def remember(self, buffer, record, start):
        """Add these bytes of a record to the spans that were read. Returns their CRC-32."""
        crc = crc32(buffer)
        spans = self.spans.setdefault(record, [start, start, 0])
        if spans[-2] != start:
            spans += (start, start, 0)
        spans[-1] = append_crc(spans[-1], buffer, crc)
        spans[-2] += len(buffer)
        return crc

    def read_elements(self, buffer: memoryview, source: Source, start: int = 0) -> int:
        """Fill the buffer with elements of a source, from `start` on. Returns their CRC-32."""
        crc = 0
        for item in source.reads(buffer, start):
            crc = append_crc(crc, item.buffer, item.run(self))
        return crc

    def read_in_threads(
        self,
        requests: Iterable[tuple[memoryview, Source, int]],
        show: Callable[[int], Any] = lambda nbytes: None,
    ) -> None:
        """Read elements of many sources in threads; places near each other in one read.

        requests: (buffer, source, first element). show: called with the bytes of each read.
        """
        items = []
        for buffer, source, start in requests:
            items += source.reads(buffer, start)
        plain = [item for item in items if isinstance(item, ReadItem)]
        jobs = [[item] for item in items if not isinstance(item, ReadItem)]

        def work(job, reader):
            read_merged(job, reader) if isinstance(job[0], ReadItem) else job[0].run(reader)
            return sum(len(item.buffer) for item in job)

        for nbytes in self.in_threads([*jobs, *merged(plain)], work, READERS):
            show(nbytes)

    def in_threads(
        self, jobs: Iterable[Any], work: Callable[[Any, "ByteReader"], Any], threads: int
    ) -> Iterator[Any]:
        """Yields what work(job, reader) returns for each job. Each has a reader of its own, whose
        spans are added to this one's."""

        def do(job):
            reader = ByteReader(self.opened)
            return work(job, reader), reader.spans

        with ThreadPoolExecutor(threads) as pool:
            for result, spans in pool.map(do, jobs):
                for record, more in spans.items():
                    self.spans.setdefault(record, array("Q")).extend(more)
                yield result

    def read(self, source: Source, start: int, numel: int) -> bytearray:
        """The bytes of `numel` elements of a source, from `start` on."""
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
            yield chunk, self.read_elements(chunk, source, start)

    def check(self) -> None:
        """Compare all that was read with the saved checksums. Raises CheckpointError."""
        check_all(self.spans, self.opened)


def merged(pending: Iterable[ReadItem]) -> Iterator[list[ReadItem]]:
    """Yields places near each other in a file, in their order, to be read at once."""
    places = []
    for place in sorted(pending, key=lambda place: (place.record.path, place.offset)):
        if places and not (
            place.record.path == places[0].record.path
            and 0 <= place.offset - places[-1].end <= GAP_BYTES
            and place.end - places[0].offset <= LARGEST_READ
            and 2 * len(places) < MOST_BUFFERS
        ):
            yield places
            places = []
        places.append(place)
    if places:
        yield places


def read_merged(places: list[ReadItem], reader: ByteReader) -> None:
    """Fill the buffers of these places in one read. What lies between two of them is dropped."""
    offset = places[0].offset
    gap = memoryview(bytearray(GAP_BYTES))
    buffers = []
    end = offset
    for place in places:
        buffers += [gap[: place.offset - end], place.buffer]
        end = place.end
    fill(reader.opened, buffers, places[0].record.path, offset)
    for place in places:
        reader.remember(*place)


# --------------------------------------------------------------------------------------------------
# 3. checksums


def check_all(spans: dict[Record, Iterable[int]], opened: OpenFile) -> None:
    """Compare what was read with the records' checksums. Raises CheckpointError.

    spans: of one ByteReader, or of several.
    """
    for record in sorted(spans):
        check_record(record, spans[record], opened)


def check_record(record, spans, opened):
    """Compare a record with its CRC-32. Bytes that nobody has read, such as padding, are read."""
    if record.crc is None:
        return
    crc = 0
    checked = 0
    triples = sorted(set(zip(spans[::3], spans[1::3], spans[2::3], strict=True)))
    for start, end, crc_of_span in [*triples, (record.nbytes, record.nbytes, 0)]:
        if start < checked:  # it was read for two tensors, so its CRC does not join the others
            if checksum(opened, record, start, end) != crc_of_span:
                raise CheckpointError(
                    f"{record.path} is damaged, or was read wrong: a tensor is not the same twice"
                )
            continue
        crc = checksum(opened, record, checked, start, crc)
        crc = join_crcs(crc, crc_of_span, end - start)
        checked = end
    if crc != record.crc:
        raise CheckpointError(
            f"{record.path} is damaged: a tensor does not match the checksum saved with it"
        )


def checksum(opened: OpenFile, record: Record, start: int, end: int, crc: int = 0) -> int:
    """The CRC-32 of a record's bytes from `start` to `end`, continued from `crc`."""
    buffer = memoryview(bytearray(max(0, min(CHUNK, end - start))))
    for position in range(start, end, CHUNK):
        chunk = buffer[: end - position]
        fill(opened, [chunk], record.path, record.offset + position)
        crc = crc32(chunk, crc)
    return crc


def append_crc(crc: int, data: bytes, crc_of_data: int) -> int:
    """The CRC-32 of bytes that have this `crc` and of the data that follow them."""
    if len(data) < SHORT_BYTES:
        return crc32(data, crc)
    return join_crcs(crc, crc_of_data, len(data))


def join_crcs(first: int, second: int, nbytes: int) -> int:
    """The CRC-32 of A + B, from those of A and of B. nbytes: of B.

    So a byte that two files need is summed once.
    """
    if (
        nbytes < SHORT_BYTES
    ):  # zeros shift the first CRC to its place, 50 times as fast as a product
        zeros = ZEROS[:nbytes]
        return crc32(zeros, first) ^ crc_of_zeros(nbytes) ^ second
    return crc_multiply(first, crc_power(nbytes)) ^ second


@functools.lru_cache(4096)
def crc_of_zeros(nbytes):
    return crc32(ZEROS[:nbytes])


@functools.lru_cache(4096)
def crc_power(nbytes):
    """Returns x^(8 nbytes): multiply a CRC-32 by this to append nbytes zero bytes."""
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
