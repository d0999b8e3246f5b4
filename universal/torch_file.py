# SPDX-License-Identifier: MIT
"""Read and write the .pt files of torch.save() without torch, and without running code in them.

Such a file is a zip archive of one pickle and one stored record per tensor. load() returns the
content, with every tensor as a place in the file; write_pt() makes a file from places in others;
Reader reads each byte once and remembers its CRC-32, and check() compares that with the archive's.
This file knows nothing of DeepSpeed, and needs nothing but Python 3.10."""

import contextlib
import copyreg
import errno
import functools
import heapq
import io
import itertools
import math
import operator
import os
import pickle
import pickletools
import re
import resource
import struct
import zipfile
import zlib
from array import array
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple


class CheckpointError(Exception):
    """Says in one line what is wrong with the checkpoint or the folders."""

    def __init__(self, message):
        super().__init__(" ".join(str(message).splitlines()))


@contextlib.contextmanager
def about(path, problem="does not hold what a ZeRO checkpoint does"):
    """Turn what is wrong with a file into one line with its name. Errors of the system are not
    damage, and pass through."""
    try:
        yield
    except CheckpointError as error:
        said = (os.path.dirname(path) or str(path)) in str(error)
        raise CheckpointError(error if said else f"{path}: {error}") from None
    except OSError as error:
        if error.errno == errno.EINVAL:  # a damaged directory gives an impossible place in the file
            raise CheckpointError(f"{path} {problem}: {error}") from error
        raise OSError(error.errno, error.strerror, str(error.filename or path)) from error
    except MemoryError:
        raise
    except Exception as error:  # a damaged file can fail in any way
        raise CheckpointError(f"{path} {problem}: {type(error).__name__}: {error}") from error


# -----------------------------------------------------------------------------
# 1. what is in a pickle

STORAGES = "Double:float64 Float:float32 Half:float16 BFloat16:bfloat16 Long:int64 Int:int32 Short:int16 Char:int8"
STORAGES += " Byte:uint8 Bool:bool ComplexDouble:complex128 ComplexFloat:complex64 QInt8:qint8 QUInt8:quint8"
STORAGES += " QInt32:qint32 QUInt4x2:quint4x2 QUInt2x4:quint2x4 Untyped:byte"
DTYPES = dict(pair.split(":") for pair in STORAGES.split())  # {kind of storage: dtype}
KINDS = {dtype: kind for kind, dtype in DTYPES.items()}


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


class Tensor(NamedTuple):
    """storage: a Record, bytes, or an object with chunks() that yields them. dtype: "float32",
    "uint16"."""

    storage: object
    offset: int
    size: tuple
    stride: tuple
    requires_grad: bool
    dtype: str


class Size(tuple):
    """torch.Size"""

    __slots__ = ()


def typed_tensor(storage, offset, size, stride, requires_grad, hooks, metadata=None):
    """torch._utils._rebuild_tensor_v2; None for what is more than its elements, such as a
    conjugated view."""
    if not hooks and not metadata:
        return Tensor(storage, offset, size, stride, requires_grad, DTYPES[storage.kind])


def untyped_tensor(storage, offset, size, stride, requires_grad, hooks, dtype, metadata=None):
    """torch._utils._rebuild_tensor_v3, for the dtypes that have no storage class."""
    if not hooks and not metadata:
        return Tensor(storage, offset, size, stride, requires_grad, dtype.__name__)


BUILT = {
    "collections.OrderedDict": OrderedDict,
    "torch.Size": Size,
    "torch._utils._rebuild_tensor_v2": typed_tensor,
    "torch._utils._rebuild_tensor_v3": untyped_tensor,
}


class Named(type):
    """A class of which we know only the name. Every file makes its own, so that no pickle reaches
    what another one has read."""


class Stub(metaclass=Named):
    """An instance of such a class. Goes back into a pickle as it came."""

    def __new__(cls, *args):
        build = BUILT.get(f"{cls.__module__}.{cls.__qualname__}")
        built = build(*args) if build else None
        return stub(cls, args) if built is None else built

    def __init__(self, *args):
        self.called = True  # the pickle called the class, instead of only making an instance of it

    def __setstate__(self, state):
        self.state = state

    def __setitem__(self, key, value):
        self.entries[key] = value

    def append(self, value):
        self.items.append(value)

    def __reduce__(self):
        return stub, (type(self), self.args, self.called, self.state, self.items, self.entries)


def named(module, name):
    return Named(name, (Stub,), {"__module__": module, "__qualname__": name})


def stub(cls, args, called=False, state=None, items=(), entries=()):
    made = object.__new__(cls)
    made.args = args
    made.called = called
    made.state = state
    made.items = list(items)
    made.entries = dict(entries)
    return made


# So that Python's own pickle can take a description from one process to another.
copyreg.pickle(Named, lambda cls: (named, (cls.__module__, cls.__qualname__)))


def tensor_of(value):
    """The Tensor, also for a parameter or a tensor with attributes; None for what is not a
    tensor."""
    if not isinstance(value, Stub) or not value.args:
        return value if isinstance(value, Tensor) else None
    name = type(value).__qualname__
    if name in ("_rebuild_parameter", "_rebuild_parameter_with_state"):
        return tensor_of(value.args[0])
    if name == "_rebuild_from_type_v2":
        rebuild, _, arguments, _ = value.args
        return tensor_of(rebuild(*arguments))


def begin_of(tensor, needed):
    """(record, byte in it) where a tensor without gaps begins; checks that it has the `needed`
    elements."""
    record = tensor.storage
    size = width(tensor.dtype)
    follow = 1
    numel = math.prod(tensor.size)
    if (
        min(tensor.offset, *tensor.size, 0) < 0
        or needed > numel
        or (tensor.offset + numel) * size > record.nbytes
    ):
        raise CheckpointError(f"{record.path} holds fewer elements than its description says")
    for n, stride in zip(reversed(tensor.size), reversed(tensor.stride), strict=True):
        if stride != follow and n != 1 and numel:
            raise CheckpointError(
                f"{record.path} has gaps between the elements of a tensor that must have none"
            )
        follow *= n
    return record, tensor.offset * size


def compact(tensor):
    """The tensor with only the part of its storage that it spans, not the whole storage behind a
    view."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.size, tensor.stride, strict=True))
    numel = last + 1 if all(tensor.size) else 0
    flat = tensor._replace(size=(numel,), stride=(1,))
    return tensor._replace(storage=Slices.of(flat), offset=0)


def whole(dtype, storage, shape):
    """A contiguous tensor."""
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return Tensor(storage, 0, tuple(shape), stride, False, dtype)


# -----------------------------------------------------------------------------
# 2. reading a file


class Unpickler(pickle.Unpickler):
    """Reads a pickle, and calls only what is in this file."""

    def __init__(self, data, records):
        super().__init__(io.BytesIO(data))
        self.records = records
        self.found = {}

    def find_class(self, module, name):
        if (module, name) not in self.found:
            self.found[module, name] = named(module, name)
            if name == "getattr" and module in ("__builtin__", "builtins"):
                self.found[module, name].__new__ = self.attribute
        return self.found[module, name]

    def attribute(self, cls, parent, name):
        """How a pickle names a class inside another class, and how Python 3.11.0 to 3.11.3 names a
        member of an enum."""
        if isinstance(parent, Named):
            return self.find_class(parent.__module__, f"{parent.__qualname__}.{name}")
        return Stub.__new__(cls, parent, name)

    def persistent_load(self, pid):
        _, storage, key, _, numel = pid
        kind = storage.__name__.removesuffix("Storage")
        record = self.records[f"data/{key}"]
        if record.nbytes != numel * width(DTYPES[kind]):
            raise CheckpointError(
                f"record {key} has {record.nbytes} bytes, which is not {numel} elements"
            )
        return record._replace(kind=kind)


@functools.lru_cache(2)  # shards are alike
def check_memo(data):
    """Refuse large memo numbers: a pickle may choose any, and Python would make room up to the
    largest."""
    for code, number, _ in pickletools.genops(data):
        if code.name in ("PUT", "LONG_BINPUT") and number > len(data):
            raise ValueError(
                f"a pickle of {len(data)} bytes that wants to remember {number} objects"
            )


def open_file(path):
    try:
        return open(path, "rb", buffering=0)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise CheckpointError(
            f"{path} is {'missing' if error.errno == errno.ENOENT else 'not a file'}"
        ) from None


def load(path):
    """The content of a .pt file: tensors become Tensor, other objects Stub. Raises CheckpointError,
    naming the file."""
    path = Path(path)
    records = {}
    with about(path, "is damaged"), open_file(path) as file, zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            prefix, _, name = info.filename.partition("/")
            if prefix not in (
                path.stem,
                "archive",
            ):  # torch.save writes the file's name into the archive
                raise CheckpointError(f"it was written as {prefix}.pt, and renamed")
            header = os.pread(file.fileno(), 30, info.header_offset)
            mark, name_size, extra_size = struct.unpack("<4s22xHH", header)
            if mark != b"PK\3\4" or info.compress_type or info.file_size != info.compress_size:
                raise CheckpointError(f"{path} is damaged: {name} is not stored as torch.save does")
            begin = info.header_offset + 30 + name_size + extra_size
            records[name] = Record(str(path), begin, info.file_size, info.CRC)
        if "byteorder" in records and archive.read(f"{prefix}/byteorder") != b"little":
            raise CheckpointError("it was written on a big-endian machine")
        data = archive.read(f"{prefix}/data.pkl")  # zipfile compares it with its checksum
        check_memo(data)
        return Unpickler(data, records).load()


# -----------------------------------------------------------------------------
# 3. writing a file

own_name = functools.cache(named)


class Pickler:
    """Writes a pickle of protocol 2, as torch.save does. It imports nothing: its names are those
    that were read. It does not recurse, so no nesting is too deep; `storages` collects what tensors
    refer to."""

    def __init__(self):
        self.data = bytearray(b"\x80\2")
        self.memo = {}
        self.storages = {}
        self.made = []

    def dump(self, content):
        todo = [self.write(content)]
        while todo:
            inner = next(todo[-1], self)
            if inner is self:
                todo.pop()
            else:
                todo.append(self.write(inner))
        return bytes(self.data + b".")

    def remember(self, key):
        self.memo[key] = len(self.memo)
        self.data += b"r" + struct.pack("<I", self.memo[key])

    def write(self, value):
        """Append a value; yields what is inside it, which is written before this continues."""
        kind = type(value)
        key = value if kind is str else id(value)
        if key in self.memo:
            self.data += b"j" + struct.pack("<I", self.memo[key])
        elif value is None or kind in (bool, int, float):
            self.data += pickle.dumps(value, 2)[2:-1]
        elif kind is str:
            text = value.encode("utf-8", "surrogatepass")
            self.data += b"X" + struct.pack("<I", len(text)) + text
            self.remember(key)
        elif kind is Named:
            yield from self.write_name(value)
        elif kind in (list, dict):
            self.data += b"]" if kind is list else b"}"
            self.remember(key)
            yield from self.write_inside(*((value, {}) if kind is list else ([], value)))
        elif kind is tuple:
            self.data += b"("
            yield from value
            if key in self.memo:  # it contains itself, through a list say, and is already written
                self.data += b"1j" + struct.pack("<I", self.memo[key])
            else:
                self.data += b"t"
                self.remember(key)
        elif kind in (Record, Storage):
            yield from self.write_storage(value)
        elif stands_for := self.stub_of(value):
            self.made.append(stands_for)  # otherwise another object may get its id
            yield from self.write_stub(stands_for, key)
        else:
            raise CheckpointError(
                f"{value!r} cannot be written: torch.save does not write {kind.__name__} like that"
            )

    def stub_of(self, value):
        """The call that makes a value."""
        if isinstance(value, Stub):
            return value
        if isinstance(value, Size):
            return stub(own_name("torch", "Size"), (tuple(value),), True)
        if isinstance(value, OrderedDict):
            return stub(own_name("collections", "OrderedDict"), (), True, entries=value)
        if isinstance(value, Tensor):
            kind = KINDS.get(value.dtype, "Untyped")
            storage = (
                value.storage if isinstance(value.storage, Record) else Storage(value.storage, kind)
            )
            arguments = (storage, *value[1:5], OrderedDict())
            version = 2
            if kind == "Untyped":
                arguments = (*arguments, own_name("torch", value.dtype))
                version = 3
            return stub(own_name("torch._utils", f"_rebuild_tensor_v{version}"), arguments, True)

    def write_inside(self, items, entries):
        if items:
            self.data += b"("
            yield from items
            self.data += b"e"
        if entries:
            self.data += b"("
            yield from itertools.chain.from_iterable(entries.items())
            self.data += b"u"

    def write_name(self, cls):
        outer, _, inner = cls.__qualname__.rpartition(".")
        if outer:  # protocol 2 has no name for a class in a class
            yield own_name("__builtin__", "getattr")
            self.data += b"("
            yield own_name(cls.__module__, outer)
            yield inner
            self.data += b"tR"
        else:
            self.data += f"c{cls.__module__}\n{inner}\n".encode()
        self.remember(id(cls))

    def write_stub(self, value, key):
        yield type(value)
        self.data += b"("
        yield from value.args
        self.data += b"tR" if value.called else b"t\x81"
        self.remember(key)
        yield from self.write_inside(value.items, value.entries)
        if value.state is not None:
            yield value.state
            self.data += b"b"

    def write_storage(self, storage):
        content, kind = storage if isinstance(storage, Storage) else (storage, storage.kind)
        key = (
            id(content) if isinstance(content, bytes) else content
        )  # two views of one storage still share it
        number, _ = self.storages.setdefault(key, (len(self.storages), content))
        self.data += b"("
        yield "storage"
        yield own_name("torch.storage" if kind == "Untyped" else "torch", f"{kind}Storage")
        yield str(number)
        yield "cpu"
        yield nbytes_of(content) // width(DTYPES[kind])
        self.data += b"tQ"


class Storage(NamedTuple):
    """The source of a storage's bytes, and the kind of storage."""

    content: object
    kind: str


def pickled(content):
    """(pickle, [sources of the tensors' bytes]), for write_pt()."""
    pickler = Pickler()
    data = pickler.dump(content)
    return data, [storage for _, storage in pickler.storages.values()]


def write_pt(path, data, storages, reader):
    """Write a .pt file around a pickle. Its storages are bytes, or have chunks(reader). Raises
    OSError and, if a source cannot be read, CheckpointError."""
    with about(path), open(path, "xb", buffering=SHORT) as file:
        write_archive(file, path.stem, data, storages, reader)


def write_archive(file, stem, data, storages, reader):
    """The same, into an open file, on a disk or in memory."""
    contents = {"data.pkl": data, "byteorder": b"little", "version": b"3\n"}
    contents |= {f"data/{key}": storage for key, storage in enumerate(storages)}
    with zipfile.ZipFile(
        file, "w"
    ) as archive:  # writes the directory; archive.open() would checksum all bytes again
        for name, content in contents.items():
            info = zipfile.ZipInfo(f"{stem}/{name}")
            info.CRC = 0
            info.file_size = info.compress_size = nbytes_of(content)
            info.header_offset = file.tell()
            padding = (
                -(info.header_offset + len(info.FileHeader()) + 4) % 64
            )  # torch aligns records, to map them
            info.extra = struct.pack("<HH", 0x4246, padding) + bytes(padding)
            file.write(info.FileHeader())
            for chunk, crc in (
                [(content, zlib.crc32(content))]
                if type(content) is bytes
                else content.chunks(reader)
            ):
                file.write(chunk)
                info.CRC = sum_on(info.CRC, chunk, crc)
            archive.start_dir = file.tell()
            file.seek(info.header_offset)
            file.write(info.FileHeader())  # with the checksum
            file.seek(archive.start_dir)
            archive.filelist.append(info)


def packed(content):
    """The bytes of a .pt file with this content; its tensors are read and checked."""
    file = io.BytesIO()
    reader = Reader()
    write_archive(file, "packed", *pickled(content), reader)
    reader.check()
    return file.getvalue()


# -----------------------------------------------------------------------------
# 4. bytes, read once

CHUNK = 1 << 20
SHORT = 1 << 14  # bytes; below this it is faster to continue a CRC than to join two


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

    @classmethod
    def of(cls, tensor):
        """The Slices of a whole tensor that is in one record, without gaps."""
        numel = math.prod(tensor.size)
        record, begin = begin_of(tensor, numel)
        return cls(tensor.dtype, (record,), (begin,), 0, numel, 0, numel)


def nbytes_of(content):
    if isinstance(content, Record):
        return content.nbytes
    return len(content) if isinstance(content, bytes) else content.numel * width(content.dtype)


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


def verify(path):
    """Read a file, and check that every record has the checksum saved with it."""
    with about(path, "is damaged"), zipfile.ZipFile(path) as archive:
        if record := archive.testzip():
            raise CheckpointError(f"{path} is damaged: {record} does not match its checksum")


CODES = {
    "float64": "d",
    "float32": "f",
    "float16": "e",
    "int64": "q",
    "int32": "i",
    "int16": "h",
    "int8": "b",
}
CODES |= {"uint8": "B", "bool": "?"}


def number(value):
    """The number in a one-element tensor that scalar() has read; any other value unchanged."""
    return (
        struct.unpack(f"<{CODES[value.dtype]}", value.storage)[0]
        if isinstance(value, Tensor)
        else value
    )


def scalar(value, opened):
    """A one-element tensor with its bytes, read and checked; any other value unchanged."""
    tensor = tensor_of(value)
    if tensor is None or math.prod(tensor.size) != 1:
        return value
    reader = Reader(opened)
    data = bytearray(width(tensor.dtype))
    reader.read_into(memoryview(data), *begin_of(tensor, 1))
    reader.check()
    return whole(tensor.dtype, bytes(data), tensor.size)
