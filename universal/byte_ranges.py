# SPDX-License-Identifier: MIT
"""Read ranges of bytes in files, each once, and check them against checksums.

A Record is a stored run of bytes with the CRC-32 that was saved with it. Slices say where the
elements of a tensor lie in one or more records. Reader reads, and remembers the CRC-32 of what it
has read; check() compares that with the records' own. Needs nothing but Python 3.10."""

import errno
import functools
import os
import re
import resource
import zlib
from typing import NamedTuple

from universal.errors import CheckpointError

CHUNK = 1 << 20


SHORT = 1 << 14  # bytes; below this it is faster to continue a CRC than to join two


@functools.cache
def width(dtype):
    """Bytes of an element: float8_e4m3fn 1, complex64 8, bool 1."""
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1


class Record(NamedTuple):
    """The bytes of one storage in an archive. kind: Float, for torch.FloatStorage."""

    path: str
    offset: int
    nbytes: int
    crc: int
    kind: str = "Untyped"

    def chunks(self, reader):
        return Slices("byte", (self,), (0,), 0, self.nbytes, 0, self.nbytes).chunks(reader)


# --------------------------------------------------------------------------------------------------
# 1. where elements are


class Slices(NamedTuple):
    """Where a parameter lies in the flat tensors of its ranks: a formula, not a list of pieces.

    ZeRO-1/2   origin: where it begins in the group laid end to end; share: elements of a rank;
    base: 0 ZeRO-3     origin: 0; share: ceil(numel / ranks); base: where it begins in the flat
    tensor of every rank"""

    dtype: str
    records: tuple  # of every rank
    begins: tuple  # the byte in each record where the flat tensor begins
    origin: int
    share: int
    base: int
    numel: int

    def cut(self, start=0, numel=None):
        """(record, its first byte, bytes) of the elements from `start` on, in order."""
        size = width(self.dtype)
        left = self.numel - start if numel is None else numel
        rank, within = divmod(self.origin + start, self.share or 1)
        while left:
            run = min(self.share - within, left)
            yield self.records[rank], self.begins[rank] + (self.base + within) * size, run * size
            left -= run
            rank += 1
            within = 0

    def chunks(self, reader):
        """Yields (bytes, their CRC-32), one chunk at a time: use a chunk before you ask for the
        next."""
        rows = CHUNK // width(self.dtype)
        buffer = memoryview(bytearray(min(CHUNK, nbytes_of(self))))
        for start in range(0, self.numel, rows):
            chunk = buffer[: min(rows, self.numel - start) * width(self.dtype)]
            yield chunk, reader.read_slices(chunk, self, start)


def nbytes_of(content):
    if isinstance(content, Record):
        return content.nbytes
    return len(content) if isinstance(content, bytes) else content.numel * width(content.dtype)


# --------------------------------------------------------------------------------------------------
# 2. reading


def open_file(path):
    try:
        return open(path, "rb", buffering=0)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise CheckpointError(
            f"{path} is {'missing' if error.errno == errno.ENOENT else 'not a file'}"
        ) from None


def keep_open():
    """Returns opened(path), which returns an open file. Keeps open up to half as many as the system
    allows this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return functools.lru_cache(max(4, min(soft // 2, 1 << 14)))(open_file)


def fill(opened, buffer, record, start):
    """Read as many bytes of a record as the buffer has."""
    file = opened(record.path)  # hold it while reading: in another thread, the cache may drop it
    done = 0
    while done < len(buffer):
        try:
            got = os.preadv(file.fileno(), [buffer[done:]], record.offset + start + done)
        except OSError as error:
            raise OSError(error.errno, error.strerror, record.path) from error
        if not got:
            raise CheckpointError(f"{record.path} became shorter while it was read")
        done += got


class Reader:
    """Reads records, and remembers what it has read: spans is {record: [start, end, CRC-32, start,
    ...]}."""

    def __init__(self, opened=None):
        self.opened = opened or keep_open()
        self.spans = {}

    def read_into(self, buffer, record, start):
        """Fill the buffer from a record. Returns the CRC-32 of these bytes."""
        fill(self.opened, buffer, record, start)
        crc = zlib.crc32(buffer)
        spans = self.spans.setdefault(record, [start, start, 0])
        if spans[-2] != start:
            spans += (start, start, 0)
        spans[-1] = sum_on(spans[-1], buffer, crc)
        spans[-2] += len(buffer)
        return crc

    def read_slices(self, buffer, slices, start=0):
        """Fill the buffer with elements of Slices, from `start` on. Returns the CRC-32 of these
        bytes."""
        done = 0
        crc = 0
        for record, first, nbytes in slices.cut(start, len(buffer) // width(slices.dtype)):
            part = buffer[done : done + nbytes]
            crc = sum_on(crc, part, self.read_into(part, record, first))
            done += nbytes
        return crc

    def check(self):
        """Check that what was read is what was saved."""
        check_all(self.spans, self.opened)


# --------------------------------------------------------------------------------------------------
# 3. checksums


def crc_multiply(a, b):
    """The product of two polynomials modulo CRC-32's, with reversed bits."""
    product = 0
    while a:
        if a & 0x80000000:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ (0xEDB88320 if b & 1 else 0)
    return product


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


def crc_join(first, second, nbytes):
    """The CRC-32 of A + B from those of A and of B, which has nbytes: so each byte is summed once,
    though two files need it."""
    return crc_multiply(first, crc_power(nbytes)) ^ second


def sum_on(crc, data, own):
    """The CRC-32 of something with CRC-32 `crc`, followed by data with CRC-32 `own`."""
    return zlib.crc32(data, crc) if len(data) < SHORT else crc_join(crc, own, len(data))


def checksum(opened, record, start, end, crc=0):
    buffer = memoryview(bytearray(max(0, min(CHUNK, end - start))))
    for at in range(start, end, CHUNK):
        part = buffer[: end - at]
        fill(opened, part, record, at)
        crc = zlib.crc32(part, crc)
    return crc


def check(record, spans, opened):
    """Check a record against its archive's CRC-32. spans: what readers in any process have read of
    it, as start, end and CRC-32 in turn. What nobody has read (padding) is read here. Raises
    CheckpointError."""
    at = 0
    crc = 0
    spans = sorted(set(zip(*[iter(spans)] * 3, strict=True)))
    for start, end, own in [*spans, (record.nbytes, record.nbytes, 0)]:
        if start < at:  # views that share elements: their CRCs do not join to the record's
            if any(checksum(opened, record, *span) != again for *span, again in spans):
                raise CheckpointError(
                    f"{record.path} is damaged, or was read wrong: a tensor is not the same twice"
                )
            crc = checksum(opened, record, 0, record.nbytes)
            break
        crc = crc_join(checksum(opened, record, at, start, crc), own, end - start)
        at = end
    if crc != record.crc:
        raise CheckpointError(
            f"{record.path} is damaged: a tensor does not match the checksum saved with it"
        )


def check_all(spans, opened, rank=0, ranks=1):
    """Compare the records in {record: what was read of it}, or this process's share of them, with
    their checksums."""
    for record in sorted(spans)[rank::ranks]:
        check(record, spans[record], opened)
