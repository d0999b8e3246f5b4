# SPDX-License-Identifier: MIT
"""Read and write the .pt files of torch.save() without torch, and without running code in them.

Such a file is a zip archive of one pickle and one stored record per tensor. load() returns the
content, with every tensor as a place in the file; write_pt() makes a file from places in others.
This file knows nothing of DeepSpeed, and needs nothing but Python 3.10."""

import copyreg
import functools
import io
import itertools
import math
import os
import pickle
import pickletools
import struct
import zipfile
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

from universal.byte_ranges import SHORT, Reader, Record, Slices, nbytes_of, open_file, sum_on, width
from universal.errors import CheckpointError, about

# --------------------------------------------------------------------------------------------------
# 1. what is in a pickle


STORAGES = "Double:float64 Float:float32 Half:float16 BFloat16:bfloat16 Long:int64 Int:int32 Short:int16 Char:int8"
STORAGES += " Byte:uint8 Bool:bool ComplexDouble:complex128 ComplexFloat:complex64 QInt8:qint8 QUInt8:quint8"
STORAGES += " QInt32:qint32 QUInt4x2:quint4x2 QUInt2x4:quint2x4 Untyped:byte"


DTYPES = dict(pair.split(":") for pair in STORAGES.split())  # {kind of storage: dtype}


KINDS = {dtype: kind for kind, dtype in DTYPES.items()}


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


own_name = functools.cache(named)


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


def slices_of(tensor):
    """The Slices of a whole tensor that is in one record, without gaps."""
    numel = math.prod(tensor.size)
    record, begin = begin_of(tensor, numel)
    return Slices(tensor.dtype, (record,), (begin,), 0, numel, 0, numel)


def compact(tensor):
    """The tensor with only the part of its storage that it spans, not the whole storage behind a
    view."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.size, tensor.stride, strict=True))
    numel = last + 1 if all(tensor.size) else 0
    flat = tensor._replace(size=(numel,), stride=(1,))
    return tensor._replace(storage=slices_of(flat), offset=0)


def whole(dtype, storage, shape):
    """A contiguous tensor."""
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return Tensor(storage, 0, tuple(shape), stride, False, dtype)


# --------------------------------------------------------------------------------------------------
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


# --------------------------------------------------------------------------------------------------
# 3. writing a file


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
