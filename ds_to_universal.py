# SPDX-License-Identifier: MIT
"""DeepSpeed ZeRO checkpoint -> universal checkpoint.

    python ds_to_universal.py --input_folder checkpoints/global_step100

writes checkpoints/global_step100_universal. The input may be the folder above, Trainer's checkpoint-500 for one.

Input, written by engine.save_checkpoint() on N ranks (ZeRO-1/2, then ZeRO-3):

    mp_rank_00_model_states.pt                         buffers, parameter shapes, schedule, client state
    [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt   rank R's slice of the flattened fp32 weights and moments

    zero_pp_rank_R_mp_rank_00_model_states.pt
    [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt   rank R's slice of every single parameter

Output, the same at every stage, so that it resumes on any number of ranks and at ZeRO 1, 2 and 3:

    zero/<parameter>/fp32.pt, exp_avg.pt, ...          {"param": the whole tensor in its shape, "cat_dim": 0}
    zero/<parameter>/step.pt                           the optimizer's step count
    zero/optimizer_state.pt                            loss scale and parameter groups, no shard
    mp_rank_00_model_states.pt                         as in the input; `module` keeps what no optimizer holds
    zero_pp_rank_0_mp_rank_00_model_states.pt          the same file under the name that ZeRO-3 looks for
    ../latest_universal                                the name of the output folder

A .pt file is a zip archive of one pickle and one stored record per tensor. Conversion only regroups byte ranges of
those records. So it is done without torch, needs nothing but Python, and runs no code of a checkpoint: the pickle's
classes stay names. Each range is read once, checked against the archive's CRC-32 on the way, and written once.

@MAP@
"""

import argparse
import contextlib
import copyreg
import ctypes
import datetime
import errno
import fcntl
import functools
import heapq
import io
import itertools
import math
import os
import pickle
import pickletools
import re
import resource
import shutil
import stat
import struct
import sys
import time
import warnings
import zipfile
import zlib
from array import array
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

__version__ = "1.0"  # of the universal checkpoint tutorial, where this file is explained and tested
__all__ = [
    "CheckpointError", "Description", "Parameter", "Reader", "Scalar", "Slices", "Tensor", "check", "convert", "describe",
    "find_tag", "load", "pickled", "stream", "together", "write_pt",
]  # fmt: skip
if sys.version_info < (3, 10):  # noqa: UP036
    sys.exit("ds_to_universal.py needs Python 3.10 or newer")


class CheckpointError(Exception):
    """What is wrong with the checkpoint or the folders, in one line."""

    def __init__(self, message):
        super().__init__(" ".join(str(message).splitlines()))


@contextlib.contextmanager
def about(path, problem="does not hold what a ZeRO checkpoint does"):
    """What is wrong with a file is said in one line with its name; what is wrong with the system is no damage."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(error if str(path) in str(error) else f"{path}: {error}") from None
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(error.filename or path)) from error
    except MemoryError:
        raise
    except Exception as error:  # a damaged file can fail in any way
        raise CheckpointError(f"{path} {problem}: {type(error).__name__}: {error}") from error


# -----------------------------------------------------------------------------
# 1. a .pt file without torch

STORAGES = "Double:float64 Float:float32 Half:float16 BFloat16:bfloat16 Long:int64 Int:int32 Short:int16 Char:int8"
STORAGES += " Byte:uint8 Bool:bool ComplexDouble:complex128 ComplexFloat:complex64 QInt8:qint8 QUInt8:quint8"
STORAGES += " QInt32:qint32 QUInt4x2:quint4x2 QUInt2x4:quint2x4 Untyped:byte"
DTYPES = dict(pair.split(":") for pair in STORAGES.split())  # {kind of storage: dtype}
KINDS = {dtype: kind for kind, dtype in DTYPES.items()}
CODES = {"float64": "d", "float32": "f", "float16": "e", "int64": "q", "int32": "i", "int16": "h", "int8": "b"}
CODES |= {"uint8": "B", "bool": "?"}
PLAIN = {"torch", "deepspeed", "megatron", "numpy", "__builtin__", "copy_reg", "_codecs", *sys.stdlib_module_names}


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


class Tensor(NamedTuple):
    """A tensor in a pickle. storage: a Record, or Slices where the bytes are to be put together, or bytes."""

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
    """torch._utils._rebuild_tensor_v2; None for what is more than its elements, a conjugated view for one."""
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
    """A class of which we know the name only. Every file has its own: no pickle reaches what another one has read."""


class Stub(metaclass=Named):
    """An instance of such a class. Goes back into a pickle as it came."""

    def __new__(cls, *args):
        build = BUILT.get(f"{cls.__module__}.{cls.__qualname__}")
        built = build(*args) if build else None
        if built is not None:
            return built
        self = object.__new__(cls)
        self.args, self.called, self.state, self.items, self.entries = args, False, None, [], {}
        return self

    def __init__(self, *args):
        self.called = True  # the pickle called the class; it did not only make an instance of it

    def __setstate__(self, state):
        self.state = state

    def __setitem__(self, key, value):
        self.entries[key] = value

    def append(self, value):
        self.items.append(value)

    def __reduce__(self):
        return revived, (type(self), self.args, self.called, self.state, self.items, self.entries)


def named(module, name):
    return Named(name, (Stub,), {"__module__": module, "__qualname__": name})


def revived(cls, *values):
    stub = object.__new__(cls)
    stub.args, stub.called, stub.state, stub.items, stub.entries = values
    return stub


# Python's own pickle, too, takes a description from one process to another.
copyreg.pickle(Named, lambda cls: (named, (cls.__module__, cls.__qualname__)))


class Unpickler(pickle.Unpickler):
    """Reads a pickle, and calls nothing that is not in this file."""

    def __init__(self, data, record):
        super().__init__(io.BytesIO(data))
        self.record, self.found = record, {}

    def find_class(self, module, name):
        if (module, name) not in self.found:
            self.found[module, name] = named(module, name)
            if (module, name) in (("__builtin__", "getattr"), ("builtins", "getattr")):
                self.found[module, name].__new__ = self.attribute
        return self.found[module, name]

    def attribute(self, cls, parent, name):
        """How a pickle names a class inside another one, and Python 3.11.0 to 3.11.3 the member of an enum."""
        if isinstance(parent, Named):
            return self.find_class(parent.__module__, f"{parent.__qualname__}.{name}")
        return Stub.__new__(cls, parent, name)

    def persistent_load(self, pid):
        _, storage, key, _, numel = pid
        kind = storage.__name__.removesuffix("Storage")
        record = self.record(f"data/{key}")
        if record.nbytes != numel * width(DTYPES[kind]):
            raise CheckpointError(f"record {key} has {record.nbytes} bytes, which is not {numel} elements")
        return record._replace(kind=kind)


@functools.lru_cache(2)  # shards are alike
def check_memo(data):
    """A pickle may number what it remembers as it likes, and Python makes room up to the largest number."""
    for code, number, _ in pickletools.genops(data):
        if code.name in ("PUT", "LONG_BINPUT") and number > len(data):
            raise ValueError(f"a pickle of {len(data)} bytes that wants to remember {number} objects")


class Archive:
    """The open file of a zip archive. Its directory is read as far as it is asked for: zipfile takes 5 ms for the 730
    records that a rank of ZeRO-3 writes for nothing but their names."""

    def __init__(self, path, file):
        self.path, self.file, self.records, self.at = str(path), file, {}, 0
        size = os.fstat(file.fileno()).st_size
        tail = self.get(max(0, size - 98), min(size, 98))
        nbytes, start = struct.unpack("<II", tail[-10:-2])
        ends = 22
        if tail[:4] == b"PK\6\6":  # torch always writes the long form, too
            nbytes, start = struct.unpack("<QQ", tail[40:56])
            ends = 98
        self.expect(tail[-22:-18] == b"PK\5\6" and start + nbytes == size - ends)
        self.directory = self.get(start, nbytes)

    def expect(self, condition):
        if not condition:
            raise CheckpointError(f"{self.path} is truncated or damaged")

    def get(self, start, nbytes):
        data = os.pread(self.file.fileno(), nbytes, start)
        self.expect(len(data) == nbytes)
        return data

    def next(self):
        """Read one more entry of the directory."""
        self.expect(self.at < len(self.directory))
        fields = struct.unpack_from("<4s6xH4xIIIHHH8xI", self.directory, self.at)
        mark, packed, crc, _, size, name_size, extra_size, note, offset = fields
        begin = self.at + 46 + name_size
        self.at = begin + extra_size + note
        self.expect(mark == b"PK\1\2" and not packed and self.at <= len(self.directory))
        extra = self.directory[begin : begin + extra_size]
        if 0xFFFFFFFF in (size, offset):  # 32 bits cannot hold it
            long = list(struct.unpack(f"<{struct.unpack_from('<H', extra, 2)[0] // 8}Q", extra[4:]))
            self.expect(extra[:2] == b"\1\0")
            size, _ = (long.pop(0), long.pop(0)) if size == 0xFFFFFFFF else (size, None)
            offset = long.pop(0) if offset == 0xFFFFFFFF else offset
        prefix, _, key = self.directory[begin - name_size : begin].decode().partition("/")
        if prefix not in (Path(self.path).stem, "archive"):  # torch.save writes the file's name into the archive
            raise CheckpointError(f"it was written as {prefix}.pt, and renamed")
        mark, packed, name_size, extra_size = struct.unpack("<4s4xH16xHH", self.get(offset, 30))
        self.expect(mark == b"PK\3\4" and not packed)
        self.records[key] = Record(self.path, offset + 30 + name_size + extra_size, size, crc)

    def record(self, name):
        while name not in self.records:
            self.next()
        return self.records[name]

    def pickle(self):
        record = self.record("data.pkl")
        data = self.get(record.offset, record.nbytes)
        self.expect(zlib.crc32(data) == record.crc)
        return data

    def content(self):
        """(content, names outside what is known)."""
        data = self.pickle()
        if b"/byteorder" in self.directory:
            record = self.record("byteorder")
            if self.get(record.offset, record.nbytes) != b"little":
                raise CheckpointError("it was written on a big-endian machine")
        check_memo(data)
        reader = Unpickler(data, self.record)
        content = reader.load()
        return content, {f"{m}.{name}" for m, name in reader.found if m.split(".")[0] not in PLAIN}


def open_file(path):
    try:  # without O_NONBLOCK it would wait for the writer of a FIFO
        file = open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except IsADirectoryError:
        raise CheckpointError(f"{path} is not a file") from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise CheckpointError(f"{path} is not a file")
    return file


def load(path):
    """(content of a .pt file, names of classes outside torch, deepspeed, megatron, numpy and plain Python). Tensors are
    Tensor, all other objects Stub. Raises CheckpointError, naming the file."""
    with about(path, "is damaged"), open_file(path) as file:
        return Archive(path, file).content()


class Pickler:
    """Writes a pickle of protocol 2, as torch.save does. It looks nothing up: the names in it are those that were read.
    No call within a call, so that nothing is nested too deeply; `storages` collects what tensors refer to."""

    def __init__(self):
        self.data, self.memo, self.storages = bytearray(b"\x80\2"), {}, {}

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
        """Append a value; what is inside it is yielded, and written before this goes on."""
        key = value if type(value) is str else id(value)
        kind = type(value)
        if key in self.memo:
            self.data += b"j" + struct.pack("<I", self.memo[key])
        elif value is None or kind in (bool, int, float):
            self.data += pickle.dumps(value, 2)[2:-1]
        elif kind is str:
            text = value.encode("utf-8", "surrogatepass")
            self.data += b"X" + struct.pack("<I", len(text)) + text
            self.remember(key)
        elif kind in (bytes, bytearray):
            self.data += b"B" + struct.pack("<I", len(value)) if kind is bytes else b"\x96" + struct.pack("<Q", len(value))
            self.data += value
        elif isinstance(value, Named):
            yield from self.write_name(value.__module__, value.__qualname__, key)
        elif kind is Record:
            yield from self.write_storage(value, value.kind, value.nbytes)
        elif kind is Tensor:
            yield from self.write_tensor(value)
        elif kind in (tuple, set, frozenset):
            self.data += b"\x8f(" if kind is set else b"("
            yield from value
            if key in self.memo:  # it holds itself, by a list say, which has written it
                self.data += b"1j" + struct.pack("<I", self.memo[key])
            else:
                self.data += {tuple: b"t", set: b"\x90", frozenset: b"\x91"}[kind]
                self.remember(key)
        elif kind is Size:
            yield from self.write_name("torch", "Size")
            self.data += b"("
            yield from value
            self.data += b"t\x85R"
        elif kind in (list, dict, OrderedDict):
            if kind is OrderedDict:
                yield from self.write_name("collections", "OrderedDict")
            self.data += {list: b"]", dict: b"}", OrderedDict: b")R"}[kind]
            self.remember(key)
            yield from self.write_inside(value if kind is list else [], {} if kind is list else value)
        elif isinstance(value, Stub):
            yield from self.write_stub(value)
        else:
            raise CheckpointError(f"{value!r} cannot be written: no pickle holds it")

    def write_inside(self, items, entries):
        if items:
            self.data += b"("
            yield from items
            self.data += b"e"
        if entries:
            self.data += b"("
            yield from itertools.chain.from_iterable(entries.items())
            self.data += b"u"

    def write_name(self, module, name, key=None):
        outer, _, inner = name.rpartition(".")
        if outer:  # protocol 2 has no name for a class in a class
            self.data += b"c__builtin__\ngetattr\n("
            yield from self.write_name(module, outer)
            yield inner
            self.data += b"tR"
        else:
            self.data += f"c{module}\n{name}\n".encode()
        if key:
            self.remember(key)

    def write_stub(self, stub):
        yield type(stub)
        self.data += b"("
        yield from stub.args
        self.data += b"tR" if stub.called else b"t\x81"
        self.remember(id(stub))
        yield from self.write_inside(stub.items, stub.entries)
        if stub.state is not None:
            yield stub.state
            self.data += b"b"

    def write_tensor(self, tensor):
        kind = KINDS.get(tensor.dtype, "Untyped")
        yield from self.write_name("torch._utils", f"_rebuild_tensor_v{3 if kind == 'Untyped' else 2}")
        self.data += b"("
        if type(tensor.storage) is Record:
            yield tensor.storage
        else:
            yield from self.write_storage(tensor.storage, kind, nbytes_of(tensor.storage))
        yield tensor.offset
        for numbers in (tensor.size, tensor.stride):
            self.data += b"("
            yield from numbers
            self.data += b"t"
        yield tensor.requires_grad
        yield from self.write_name("collections", "OrderedDict")
        self.data += b")R"
        if kind == "Untyped":
            yield from self.write_name("torch", tensor.dtype)
        self.data += b"tR"
        self.remember(id(tensor))

    def write_storage(self, storage, kind, nbytes):
        key = id(storage) if type(storage) is bytes else storage  # two views of one storage stay that
        number = self.storages.setdefault(key, (len(self.storages), storage))[0]
        self.data += b"("
        yield "storage"
        yield from self.write_name("torch.storage" if kind == "Untyped" else "torch", f"{kind}Storage")
        yield str(number)
        yield "cpu"
        yield nbytes // width(DTYPES[kind])
        self.data += b"tQ"


def pickled(content):
    """(pickle, [what the tensors' bytes are made of]): what write_pt() makes a file of."""
    pickler = Pickler()
    data = pickler.dump(content)
    return data, [storage for _, storage in pickler.storages.values()]


def write_pt(path, data, storages, reader):
    """Write a .pt file around a pickle, with all sizes and positions in 64 bits. Returns its size in bytes."""
    contents = {"data.pkl": data, "byteorder": b"little", "version": b"3\n"}
    contents |= {f"data/{key}": storage for key, storage in enumerate(storages)}
    directory = b""
    with about(path), open(path, "xb", buffering=CHUNK) as file:
        for name, content in contents.items():
            name, nbytes, position = os.fsencode(path.stem) + f"/{name}".encode(), nbytes_of(content), file.tell()
            padding = -(position + 54 + len(name)) % 64  # torch aligns records, to map them
            file.write(bytes(54 + len(name) + padding))  # the header is known after its record
            crc = 0
            for chunk, own in stream(content, reader):
                file.write(chunk)
                crc = crc_join(crc, own, len(chunk))
            end = file.tell()
            fields = struct.pack("<HHHHHIII", 45, 0x800, 0, 0, 0x21, crc, FULL, FULL)
            extra = struct.pack("<HHQQHH", 1, 16, nbytes, nbytes, 0x4246, padding) + bytes(padding)
            file.seek(position)
            file.write(b"PK\3\4" + fields + struct.pack("<HH", len(name), len(extra)) + name + extra)
            file.seek(end)
            extra = struct.pack("<HHQQQ", 1, 24, nbytes, nbytes, position)
            directory += b"PK\1\2" + struct.pack("<H", 45) + fields
            directory += struct.pack("<HHHHHII", len(name), len(extra), 0, 0, 0, 0, FULL) + name + extra
        start, count = file.tell(), len(contents)
        tail = b"PK\6\6" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, count, count, len(directory), start)
        tail += b"PK\6\7" + struct.pack("<IQI", 0, start + len(directory), 1)
        tail += b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, 0xFFFF, 0xFFFF, FULL, FULL, 0)
        file.write(directory + tail)
        return file.tell()


FULL = 0xFFFFFFFF  # the size or position stands in 64 bits elsewhere

# -----------------------------------------------------------------------------
# 2. bytes, read once

CHUNK = 1 << 18
SHORT = 1 << 14  # bytes below which it is quicker to sum twice than to join sums


def keep_open():
    """opened(path): an open file. As many stay open as half of what the system lets this process open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return functools.lru_cache(max(4, min(soft // 2, 1 << 14)))(open_file)


def fill(opened, buffer, record, start):
    """Read as many bytes of a record as the buffer has."""
    file = opened(record.path)  # held while it is read: the cache may let go of it in another thread
    done = 0
    while done < len(buffer):
        try:
            got = os.preadv(file.fileno(), [buffer[done:] if done else buffer], record.offset + start + done)
        except OSError as error:
            raise OSError(error.errno, error.strerror, record.path) from error
        if not got:
            raise CheckpointError(f"{record.path} became shorter while it was read")
        done += got


class Reader:
    """Reads records, and remembers what of them: spans is {record: [start, end, CRC-32, start, ...]}."""

    def __init__(self, opened=None):
        self.opened, self.spans = opened or keep_open(), {}

    def read_into(self, buffer, record, start):
        """Fill the buffer from a record. Returns the CRC-32 of these bytes."""
        fill(self.opened, buffer, record, start)
        nbytes, crc = len(buffer), zlib.crc32(buffer)
        spans = self.spans.get(record)
        if spans is None:
            self.spans[record] = [start, start + nbytes, crc]
        elif spans[-2] != start:
            spans += (start, start + nbytes, crc)
        else:
            spans[-1] = zlib.crc32(buffer, spans[-1]) if nbytes < SHORT else crc_join(spans[-1], crc, nbytes)
            spans[-2] += nbytes
        return crc

    def read(self, record, start, nbytes):
        data = bytearray(nbytes)
        self.read_into(memoryview(data), record, start)
        return data


class Slices(NamedTuple):
    """Where a parameter lies in the flat tensors of its ranks: a formula, not a list of pieces.

    ZeRO-1/2   origin: where it begins in the group laid end to end; share: elements of a rank; base: 0
    ZeRO-3     origin: 0; share: ceil(numel / ranks); base: where it begins in the flat tensor of every rank
    """

    dtype: str
    records: tuple  # of every rank
    begins: tuple  # the byte in each record where the flat tensor begins
    origin: int
    share: int
    base: int
    numel: int

    def cut(self, start=0, numel=None):
        """(record, its first byte, bytes) of the elements from `start` on, in order."""
        size, left = width(self.dtype), self.numel - start if numel is None else numel
        rank, within = divmod(self.origin + start, self.share or 1)
        while left:
            run = min(self.share - within, left)
            yield self.records[rank], self.begins[rank] + (self.base + within) * size, run * size
            left -= run
            rank += 1
            within = 0


def nbytes_of(content):
    if isinstance(content, Record):
        return content.nbytes
    return len(content) if isinstance(content, bytes) else content.numel * width(content.dtype)


def stream(content, reader):
    """(bytes, their CRC-32) of bytes, of a Record, of Slices or of what is Joined, a chunk at a time: use it before the
    next one is asked for."""
    if isinstance(content, bytes):
        yield content, zlib.crc32(content)
        return
    if isinstance(content, Joined):
        yield from ((chunk, zlib.crc32(chunk)) for chunk in content.chunks(reader))
        return
    pieces = [(content, 0, content.nbytes)] if isinstance(content, Record) else content.cut()
    buffer, filled, crc = memoryview(bytearray(min(CHUNK, nbytes_of(content)))), 0, 0
    for record, start, nbytes in pieces:
        end = start + nbytes
        while start < end:
            part = buffer[filled : filled + end - start]
            own = reader.read_into(part, record, start)
            crc = crc_join(crc, own, len(part)) if len(part) >= SHORT else zlib.crc32(part, crc)
            start += len(part)
            filled += len(part)
            if filled == len(buffer):
                yield buffer, crc
                filled, crc = 0, 0
    yield buffer[:filled], crc


class Part(io.RawIOBase):
    """The bytes of Slices as a file that is read from its start to its end, a row of a tensor at a time."""

    def __init__(self, slices, reader):
        self.pieces, self.reader, self.piece = slices.cut(), reader, (None, 0, 0)

    def readable(self):
        return True

    def readinto(self, buffer):
        record, start, nbytes = self.piece
        if not nbytes:
            record, start, nbytes = next(self.pieces, (None, 0, 0))
        part = memoryview(buffer)[:nbytes]
        if nbytes:
            self.reader.read_into(part, record, start)
        self.piece = record, start + len(part), nbytes - len(part)
        return len(part)


def crc_multiply(a, b):
    """Two polynomials modulo that of CRC-32, bits reversed."""
    product = 0
    while a:
        if a & 0x80000000:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ (0xEDB88320 if b & 1 else 0)
    return product


@functools.lru_cache(4096)
def crc_table(nbytes):
    """What nbytes more make of a CRC-32: times x^(8 nbytes), for all 16 values of each of its 8 half-bytes."""
    table, column, power = [[0] for _ in range(8)], 0x80000000, 0x00800000
    while nbytes:
        if nbytes & 1:
            column = crc_multiply(power, column)
        power = crc_multiply(power, power)
        nbytes >>= 1
    for bit in range(31, -1, -1):
        part = table[bit // 4]
        part[:] = [value ^ column * b for value in part for b in (0, 1)]
        column = (column >> 1) ^ (0xEDB88320 if column & 1 else 0)
    return table


def crc_join(first, second, nbytes):
    """CRC-32 of A + B from those of A and of B, B being nbytes long: every byte is summed once for two files."""
    if not first:
        return second
    a, b, c, d, e, f, g, h = crc_table(nbytes)
    return (
        a[first & 15] ^ b[first >> 4 & 15] ^ c[first >> 8 & 15] ^ d[first >> 12 & 15]
        ^ e[first >> 16 & 15] ^ f[first >> 20 & 15] ^ g[first >> 24 & 15] ^ h[first >> 28] ^ second
    )  # fmt: skip


def checksum(opened, record, start, end, crc=0):
    buffer = memoryview(bytearray(max(0, min(CHUNK, end - start))))
    for at in range(start, end, CHUNK):
        part = buffer[: end - at]
        fill(opened, part, record, at)
        crc = zlib.crc32(part, crc)
    return crc


def check(record, spans, opened):
    """The record is what its archive's CRC-32 says. spans: what readers, in whichever process, have read of it, start,
    end and CRC-32 one after the other. What nobody read, padding, is read here. Raises CheckpointError."""
    at, crc, spans = 0, 0, sorted(set(zip(*[iter(spans)] * 3, strict=True)))
    for start, end, own in [*spans, (record.nbytes, record.nbytes, 0)]:
        if start < at:  # views that share elements: their sums do not add up to the record's
            if any(checksum(opened, record, *span) != again for *span, again in spans):
                raise CheckpointError(f"{record.path} is damaged, or was read wrong: a tensor is not the same twice")
            crc = checksum(opened, record, 0, record.nbytes)
            break
        crc = crc_join(checksum(opened, record, at, start, crc), own, end - start)
        at = end
    if crc != record.crc:
        raise CheckpointError(f"{record.path} is damaged: a tensor does not match the checksum saved with it")

# -----------------------------------------------------------------------------
# 3. one data-parallel checkpoint: what is where, no tensor is read

MISSING = object()


class Scalar(NamedTuple):
    """A tensor of one element, read: a step count."""

    dtype: str
    shape: tuple
    data: bytes

    @property
    def value(self):
        return struct.unpack(f"<{CODES[self.dtype]}", self.data)[0]

    @property
    def numel(self):
        return 1


class Parameter(NamedTuple):
    """shape: of the whole. flat: the number of the flat tensor, that is of the dict in param_shapes, which holds it; of
    a ZeRO-3 sub-group, then. group: its parameter group. states: {state: Slices, or Joined of several tensor-parallel
    ranks}, fp32 first. scalars: {key: Scalar or plain value}, what else its optimizer state has, the same for all of a
    flat tensor. how: what a state file says beside the tensor."""

    shape: tuple
    flat: int
    group: int
    states: dict
    scalars: dict
    how: dict


class Problem(NamedTuple):
    """What a conversion would lose. fatal: without --no_strict it is refused."""

    fatal: bool
    text: str


class Description(NamedTuple):
    """A ZeRO or universal checkpoint without its data. Python's own pickle takes it to other processes; plain() is all
    of it that is small.

    stage: 1, 2 or 3; BF16_Optimizer says 0, universal folders None. ranks: data-parallel ones that wrote it, or None.
    tensor, pipeline: degrees. parameters: {name: Parameter}. flats: [[name]], in the order of the flat tensors. kept:
    {name: Tensor} of the module without trained parameters: buffers, frozen parameters, tensors of get_extra_state() or
    of a state_dict hook. extra: names in the module of what is no tensor. frozen, shared: as in the model states.
    param_groups: hyper-parameters. uneven: {(flat, key): why}, states of the optimizer that differ by rank or are not
    cut like the weights. problems: what a conversion would lose. strangers: {class outside what is known: file}.
    models: model states of each model-parallel rank, optimizer: rank 0's optimizer state; both without shards.
    """

    folder: Path
    universal: bool
    stage: int
    bf16: bool
    ranks: int
    tensor: int
    pipeline: int
    parameters: dict
    flats: list
    kept: dict
    extra: list
    frozen: dict
    shared: dict
    param_groups: list
    uneven: dict
    problems: list
    strangers: dict
    models: list
    optimizer: dict

    def plain(self):
        return self._replace(models=[], optimizer={})


def find_tag(folder):
    """The folder with a checkpoint's files: this one, or in it the one that its `latest` names, or the only one."""
    folder = Path(folder)
    if any(folder.glob("*_optim_states.pt")):
        return folder
    if (folder / "latest").is_file():
        return folder / os.fsdecode((folder / "latest").read_bytes().strip())
    tags = {path.parent for path in folder.glob("*/*_optim_states.pt")}
    if len(tags) > 1:
        names = ", ".join(sorted(tag.name for tag in tags))
        raise CheckpointError(f"{folder} holds several checkpoints, and no `latest` that names one: {names}")
    return tags.pop() if tags else folder


def find_shards(folder):
    """The optimizer shards as {model-parallel rank: {data-parallel rank: path}}."""
    shards = {}
    for path in sorted(folder.glob("*_optim_states.pt")):
        match = re.fullmatch(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt", path.name)
        if match is None:
            raise CheckpointError(f"{path} is not the optimizer shard of a ZeRO checkpoint of dense layers")
        rank, mp_rank = map(int, match.groups())
        others = shards.setdefault(mp_rank, {})
        if rank in others:
            raise CheckpointError(f"{path} and {others[rank].name} are both the shard of rank {rank}")
        others[rank] = path
    if not shards:
        raise CheckpointError(f"{folder} holds no *_optim_states.pt: it is not a ZeRO checkpoint")
    if (folder / "offloaded_tensors").exists():
        raise CheckpointError(f"{folder} has NVMe-offloaded states, which are not converted")
    return shards


def tensor_of(value):
    """The Tensor, also of a parameter and of a tensor with attributes; None for what is no tensor."""
    if not isinstance(value, Stub) or not value.args:
        return value if isinstance(value, Tensor) else None
    name = type(value).__qualname__
    if name in ("_rebuild_parameter", "_rebuild_parameter_with_state"):
        return tensor_of(value.args[0])
    if name == "_rebuild_from_type_v2":
        rebuild, _, arguments, _ = value.args
        return tensor_of(rebuild(*arguments))


def begin_of(tensor, needed):
    """(record, byte in it) where a tensor without gaps begins, of which `needed` elements are there."""
    record, size, follow = tensor.storage, width(tensor.dtype), 1
    numel = math.prod(tensor.size)
    if min(tensor.offset, *tensor.size, 0) < 0 or needed > numel or (tensor.offset + numel) * size > record.nbytes:
        raise CheckpointError(f"{record.path} holds fewer elements than its description says")
    for n, stride in zip(reversed(tensor.size), reversed(tensor.stride), strict=True):
        if stride != follow and n != 1 and numel:
            raise CheckpointError(f"{record.path} has gaps between the elements of a tensor that must have none")
        follow *= n
    return record, tensor.offset * size


def compact(tensor):
    """The tensor with the part of its storage that it spans: what stands behind a view does not follow it."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.size, tensor.stride, strict=True))
    numel = last + 1 if all(tensor.size) else 0
    record, begin = begin_of(tensor._replace(size=(numel,), stride=(1,)), numel)
    return tensor._replace(storage=Slices(tensor.dtype, (record,), (begin,), 0, numel, 0, numel), offset=0)


def whole(dtype, storage, shape):
    """A contiguous tensor."""
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return Tensor(storage, 0, tuple(shape), stride, False, dtype)


def is_stage_3(optimizer):
    return "fp32_flat_groups" in optimizer


def flat_groups(optimizer):
    """The fp32 slices, in a shard of any stage."""
    flats = optimizer["fp32_flat_groups" if is_stage_3(optimizer) else "single_partition_of_fp32_groups"]
    return [tensor_of(flat) for flat in flats]


def base_optimizer(optimizer):
    """The state of PyTorch's optimizer, in a shard of any stage."""
    base = optimizer["optimizer_state_dict" if is_stage_3(optimizer) else "base_optimizer_state"]
    if isinstance(base, list):  # elastic_checkpoint: states alone, without padding and hyper-parameters
        step = {"step": optimizer["base_optimizer_state_step"]} if "base_optimizer_state_step" in optimizer else {}
        base = {"state": dict(enumerate(base)), "param_groups": [step | {"params": [i]} for i in range(len(base))]}
    return base


def slice_size(optimizer, group):
    """How many elements of a group are in the slice of one rank, at ZeRO-1/2, padding included."""
    size = flat_groups(optimizer)[group].size[0]
    return size + (optimizer["group_paddings"][group] if "zero_stage" in optimizer else 0)  # BF16_Optimizer saves it


def places(optimizer, group, shapes, ranks):
    """({name: (origin, share, base, numel) as in Slices}, elements of the group) in shapes {name: shape}.

    ZeRO-1/2: a group's parameters are laid end to end and cut into one slice per rank. The shard says so, too, but with
    round_robin_gradients it is wrong. ZeRO-3: every parameter is cut by itself, ceil(numel / ranks) elements per rank.
    """
    counts, found, at = optimizer["partition_count"], {}, 0
    if not isinstance(counts, int) and counts[group] != ranks:
        raise ValueError(f"group {group} is cut for {counts[group]} ranks and not for {ranks}")
    paddings = (optimizer.get("param_alignment_paddings") or {group: None})[group] or [0] * len(shapes)
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        numel = math.prod(shape)
        if is_stage_3(optimizer):
            found[name] = 0, math.ceil(numel / ranks), at, numel
            at += math.ceil(numel / ranks)
        else:
            found[name] = at, slice_size(optimizer, group), 0, numel
            at += numel + padding
    return found, at


def check_slices(optimizer, group, rank, ranks, found, end, round_robin):
    """Raise ValueError where the slice of this rank is not cut like that. Returns how many elements it must hold."""
    if is_stage_3(optimizer):
        if flat_groups(optimizer)[group].size[0] != end:
            raise ValueError(f"group {group} is not cut for {ranks} ranks")
        return end
    size = slice_size(optimizer, group)
    begin = rank * size
    if end > ranks * size:
        raise ValueError(f"group {group} has {end} elements, its slices have fewer")
    wanted = {}
    for name, (at, share, _, numel) in found.items():
        first, last = max(at, begin), min(at + numel, begin + size)
        if share != size:
            raise CheckpointError(f"group {group} has a slice of another size")
        if first < last:
            wanted[name] = {"start": first - begin, "numel": last - first}
    said = {name: place.state for name, place in optimizer["param_slice_mappings"][group].items()}
    if said != wanted and not round_robin:
        name = next(name for name in (*wanted, *said) if said.get(name) != wanted.get(name))
        raise ValueError(f"{name} is not where param_slice_mappings says")
    return max(0, min(end - begin, size))


def flat_states(optimizer, group, needed, opened):
    """({state: (dtype, record, begin)}, {key: Scalar or value}, {key of what is not cut like the weights}) of a group, or
    ZeRO-3 sub-group, of one shard. A state of every element is as long as the fp32 slice; torch keeps padding."""
    flat, size = flat_groups(optimizer)[group], flat_groups(optimizer)[group].size[0]
    longest = size if is_stage_3(optimizer) else slice_size(optimizer, group)
    states, scalars, odd = {"fp32": (flat.dtype, *begin_of(flat, needed))}, {}, set()
    for key, value in base_optimizer(optimizer)["state"].get(group, {}).items():
        tensor = tensor_of(value)
        if tensor is None or math.prod(tensor.size) == 1 and (not tensor.size or key == "step" or size > 1):
            scalars[key] = scalar(value, opened)
        elif key not in states and key != "step" and len(tensor.size) == 1 and size <= tensor.size[0] <= longest:
            states[key] = tensor.dtype, *begin_of(tensor, needed)
        else:
            odd.add(key)
    return states, scalars, odd


def scalar(value, opened):
    """A tensor of one element, read and checked; any other value as it is."""
    tensor, reader = tensor_of(value), Reader(opened)
    if tensor is None:
        return value
    record, begin = begin_of(tensor, 1)
    data = reader.read(record, begin, width(tensor.dtype))
    check(record, reader.spans[record], opened)
    return Scalar(tensor.dtype, tensor.size, bytes(data))


def number(step):
    return step.value if isinstance(step, Scalar) else step


class DataParallel(NamedTuple):
    """One model-parallel rank, put together over its data-parallel ranks."""

    model: dict  # rank 0's; `module` cut down to what no optimizer holds
    optimizer: dict  # rank 0's
    parameters: dict
    uneven: dict
    problems: list
    strangers: dict


def describe_ranks(folder, mp_rank, shards, pool, opened):
    low = min(shards)
    with about(shards[low]):
        content, strange = load(shards[low])
        first = content["optimizer_state_dict"]
        count = first["partition_count"]
        count = range(count if isinstance(count, int) else max(count)).stop  # a TypeError for what is no number
    for missing in (r for r in range(count) if r not in shards):
        name = shards[low].name.replace(f"_rank_{low}_", f"_rank_{missing}_", 1)
        raise CheckpointError(f"{folder / name} is missing")
    if max(shards) >= count:
        raise CheckpointError(f"{shards[max(shards)]} is one too many: {shards[low].name} says {count} ranks")
    strangers = dict.fromkeys(strange, shards[low])
    prefixes = [f"zero_pp_rank_{r}_" for r in range(count)] if is_stage_3(first) else [""]
    paths = [folder / f"{prefix}mp_rank_{mp_rank:02d}_model_states.pt" for prefix in prefixes]
    model, frozen, strange = read_models(paths, shards[low], count, pool)
    strangers |= dict.fromkeys(strange, paths[0])
    if list(folder.glob("layer_*_expert_*")) or model.get("ds_autoep_layers"):
        raise CheckpointError(f"{folder} has experts, which are not converted: DeepSpeed's own converter does AutoEP's")
    with about(shards[low]):
        groups = [places(first, i, names, count) for i, names in enumerate(model["param_shapes"])]
        config = model["ds_config"] if isinstance(model["ds_config"], dict) else {}  # older versions: a file's path
        round_robin = (config.get("zero_optimization") or {}).get("round_robin_gradients")

    def read_shard(rank):
        """[(states, scalars, odd) of every group] of a rank."""
        path, optimizer = shards[rank], first
        with about(path):
            if rank != low:
                optimizer = load(path)[0]["optimizer_state_dict"]
            if len(flat_groups(optimizer)) != len(groups):
                raise CheckpointError(f"{path} has another number of parameter groups than {paths[0].name}")
            found = []
            for i, (names, end) in enumerate(groups):
                needed = check_slices(optimizer, i, rank, count, names, end, round_robin)
                found.append(flat_states(optimizer, i, needed, opened))
            return found

    ranks = list(pool.map(read_shard, range(count)))
    with about(shards[low]):
        parameters, uneven = put_together(shards, ranks, groups, model["param_shapes"], base_optimizer(first))
    problems = lost_states(shards[low], uneven, parameters) + other_steps(paths[0], model, parameters)
    with about(paths[0]):
        if model["module"] is not None:
            model["module"], lost = module_of(model, frozen, parameters, count)
            # The other tensor-parallel ranks have the same names, but only here shared_params says which are tied.
            if lost and not mp_rank:
                problem = f"{paths[0]}: no parameter group holds {', '.join(lost)}, and DeepSpeed saved nothing of it"
                problems.append(Problem(True, problem))
            model["frozen_param_fragments"] = None
    return DataParallel(model, first, parameters, uneven, problems, strangers)


def put_together(shards, ranks, groups, shapes, base):
    """({name: Parameter}, {(group, key): why it is uneven}) from what the shards of all ranks hold."""
    parameters, uneven = {}, {}
    group_of = {flat: i for i, group in enumerate(base["param_groups"]) for flat in group["params"]}
    for i, (names, _) in enumerate(groups):
        (states, scalars, odd), flats = ranks[0][i], {}
        uneven |= {(i, key): "is not cut like the weights" for key in sorted(odd, key=str)}
        for rank, found in enumerate(ranks):
            if found[i][0].keys() != states.keys():
                raise CheckpointError(f"{shards[rank]} has other optimizer states than {shards[0].name}")
            mine, theirs = (number(held.get("step")) for held in (found[i][1], scalars))
            if mine != theirs:
                raise CheckpointError(f"{shards[rank]} is at optimizer step {mine}, {shards[0].name} at {theirs}")
            for key in {**scalars, **found[i][1]}:
                if found[i][1].get(key, MISSING) != scalars.get(key, MISSING):
                    uneven[i, key] = f"differs between ranks 0 and {rank}"
            uneven |= {(i, key): "is not cut like the weights" for key in sorted(found[i][2] - odd, key=str)}
        for key, (dtype, *_) in states.items():
            dtypes, records, begins = zip(*(found[i][0][key] for found in ranks), strict=True)
            if other := [rank for rank, kind in enumerate(dtypes) if kind != dtype]:
                raise CheckpointError(f"{shards[other[0]]}: {key} of group {i} is not what it is in {shards[0].name}")
            flats[key] = dtype, records, begins
        for name, place in names.items():
            own = {key: Slices(*flat, *place) for key, flat in flats.items()}
            parameters[name] = Parameter(tuple(shapes[i][name]), i, group_of.get(i), own, scalars, {"cat_dim": 0})
    return parameters, uneven


def lost_states(path, uneven, parameters):
    """What of the optimizer's states belongs to no single element."""
    keys = {key for p in parameters.values() for key, value in p.scalars.items() if value is not None and key != "step"}
    lost = ", ".join(sorted({str(key) for key in keys} | {str(key) for _, key in uneven}))
    text = f"{path}: {lost} of the optimizer: a universal checkpoint has no place for what belongs to no single element"
    return [Problem(True, text)] if lost else []


def other_steps(path, model, parameters):
    """The ranks agree on the step, the module may be of another: after a start with the weights alone, for one."""
    with about(path):
        wanted = model["global_steps"] - model["skipped_steps"]
    steps = {number(p.scalars.get("step")) for p in parameters.values()} - {None, wanted}
    return [Problem(False, f"{path} is of step {wanted}, the optimizer of step {sorted(steps)}")] if steps else []


def read_models(paths, shard, count, pool):
    """(rank 0's model states, [{frozen parameter: Tensor} of every rank] or None, names outside what is known)."""
    with about(paths[0], "is damaged"), open_file(paths[0]) as file:
        archive = Archive(paths[0], file)
        like = archive.pickle()
        model, strange = archive.content()
        keys = {record.offset: key for key, record in archive.records.items()}

    def read_model(path):
        with about(path, "is damaged"), open_file(path) as file:
            archive = Archive(path, file)
            alike = archive.pickle() == like  # most are, and then only the records are others
            state = model if alike else archive.content()[0]
            with about(path):
                for key in ("param_shapes", "buffer_names", "frozen_param_shapes", "global_steps"):
                    if state.get(key) != model.get(key):
                        raise CheckpointError(f"{path} has other {key} than {paths[0].name}")
                names = state.get("frozen_param_shapes") or {}
                found = {name: tensor_of(state["frozen_param_fragments"][name]) for name in names}
                for name, part in found.items() if alike else ():
                    record = archive.record(keys[part.storage.offset])
                    archive.expect(record.nbytes == part.storage.nbytes)
                    found[name] = part._replace(storage=record._replace(kind=part.storage.kind))
        return found

    with about(paths[0]):
        if model["dp_world_size"] != count:
            raise CheckpointError(f"{paths[0]} is of {model['dp_world_size']} ranks, {shard.name} of {count}")
    # Where it is not cut, `module` has the frozen parameters as they are.
    return model, list(pool.map(read_model, paths)) if "zero_pp_rank_" in paths[0].name else None, strange


def module_of(model, frozen, parameters, count):
    """({name: tensor}, names of what was not saved) of what no optimizer holds: buffers, frozen parameters, whole, and
    what get_extra_state() or a hook of state_dict() has added. frozen: of every rank at ZeRO-3."""
    module, kept, lost = model["module"], {}, []
    if not isinstance(module, dict):
        raise TypeError(f"module is {type(module).__name__}")
    shapes = (model.get("frozen_param_shapes") or {}) if frozen else {}
    for name, shape in shapes.items():
        numel, parts = math.prod(shape), [held[name] for held in frozen]
        share = math.prod(parts[0].size)
        if share * count < numel or any(math.prod(part.size) != share for part in parts):
            raise CheckpointError(f"{numel - share * count} elements of the frozen {name} are missing")
        records, begins = zip(*(begin_of(part, share) for part in parts), strict=True)
        slices = Slices(parts[0].dtype, records, begins, 0, share, 0, numel)
        kept[name] = whole(parts[0].dtype, slices, shape)
    accounted = {*parameters, *(model.get("shared_params") or {}), *kept}
    for name in sorted({*model["buffer_names"], *module} - accounted):
        tensor = tensor_of(module[name])
        # Of what is neither trained nor frozen nor a buffer, a parameter in no group, ZeRO-3 saves the name alone.
        if frozen and tensor and 0 in tensor.size and name not in model["buffer_names"]:
            lost.append(name)
        else:
            kept[name] = compact(tensor) if tensor else module[name]
    return kept, lost

# -----------------------------------------------------------------------------
# 4. tensor and pipeline parallelism; describe()

ROWS = 1 << 16  # elements that are read at a time where several ranks hold parts, or copies


class Joined(NamedTuple):
    """A state of a parameter whose tensor-parallel ranks hold parts. blocks: (rank, shape, strides and first element in
    its part, strides and first element in the whole); None where the whole is the mean of the parts."""

    name: str
    parts: tuple  # Slices
    blocks: tuple
    numel: int

    @property
    def dtype(self):
        return self.parts[0].dtype

    def chunks(self, reader):
        """The bytes of the whole, in order."""
        files = [io.BufferedReader(Part(part, reader), CHUNK) for part in self.parts]
        left = self.numel * width(self.dtype)
        for chunk in self.mean(files) if self.blocks is None else self.in_order(files, reader):
            yield chunk[:left]  # a vocabulary may be padded
            left -= min(left, len(chunk))
        if left:
            raise CheckpointError(f"the shards of {self.name} do not cover its elements exactly once")

    def mean(self, files):
        """In the order and the precision of PyTorch's."""
        code = {"float32": "f", "float64": "d"}[self.dtype]
        for _ in range(0, self.numel, ROWS):
            total, *others = (array(code, file.read(ROWS * width(self.dtype))) for file in files)
            for other in others:
                total = array(code, (a + b for a, b in zip(total, other, strict=True)))
            yield array(code, (value / len(files) for value in total)).tobytes()

    def in_order(self, files, reader):
        """Every rank's part is read from its start to its end, too, unless a map permutes it."""
        at, size, end, last, joined = [0] * len(files), width(self.dtype), 0, b"", bytearray()
        for place, rank, here, numel in runs(self.blocks):
            if here == at[rank]:
                data = files[rank].read(numel * size)
                at[rank] += numel
            else:
                data = b"".join(reader.read(*piece) for piece in self.parts[rank].cut(here, numel))
            if place == end:
                joined += data
                last = data
                end += numel
            elif place + numel != end or len(data) != len(last):
                raise CheckpointError(f"the shards of {self.name} do not cover its elements exactly once")
            elif data != last:  # several ranks hold it
                raise CheckpointError(f"{self.name} differs on tensor-parallel rank {rank}")
            if len(joined) >= CHUNK:
                yield joined
                joined = bytearray()
        yield joined


def runs(blocks):
    """(place in the whole, rank, place in its part, elements) of what follows each other in both, in the order of the
    whole."""

    def of(rank, shape, stride, here, full_stride, there):
        dims, run = list(zip(shape, stride, full_stride, strict=True)), 1
        while dims and (dims[-1][0] == 1 or dims[-1][1:] == (run, run)):
            run *= dims.pop()[0]
        for index in itertools.product(*(range(n) for n, _, _ in dims)) if 0 not in shape else ():
            place = there + sum(i * full for i, (_, _, full) in zip(index, dims, strict=True))
            mine = here + sum(i * own for i, (_, own, _) in zip(index, dims, strict=True))
            for done in range(0, run, ROWS):
                yield place + done, rank, mine + done, min(ROWS, run - done)

    return heapq.merge(*(of(*block) for block in blocks))


def cut_along(dim, size, widths):
    """The blocks of a tensor that is one, or several side by side along dim, and each is cut by itself:
    widths[sub][rank]."""
    blocks, strides = [], whole("", b"", size).stride
    at, in_part = 0, [0] * len(widths[0])
    for sub in widths:
        for rank, n in enumerate(sub):
            mine = [sum(w[rank] for w in widths) if d == dim else m for d, m in enumerate(size)]
            stride = whole("", b"", mine).stride
            block = [n if d == dim else m for d, m in enumerate(size)]
            blocks.append((rank, block, stride, in_part[rank] * stride[dim], strides, at * strides[dim]))
            in_part[rank] += n
            at += n
    return tuple(blocks)


class TensorParallel:
    """How tensor-parallel ranks cut a parameter: what the universal_checkpoint_info in the checkpoint says.

    Its entries are DeepSpeed's (deepspeed/checkpoint/constants.py), most of them lists of regular expressions."""

    LISTS = ("tp_replicated_parameter_patterns", "parameter_to_average_patterns", "vocabulary_parameter_patterns",
             "parameter_with_row_parallelism_patterns", "parameter_with_2_sub_params_cat_dim_0")  # fmt: skip

    def __init__(self, info, degree, folder):
        self.info, self.degree, self.folder, self.unused, self.problems = info or {}, degree, folder, set(), []
        if degree > 1 and not info:
            raise CheckpointError(
                f"{folder} has {degree} tensor-parallel ranks and no universal_checkpoint_info, which says how they "
                "are cut: it must be in the client state when the checkpoint is saved"
            )
        self.affine = self.info.get("affine_map") or {"params": {}}
        if self.affine.get("version", 1) > 1:
            raise CheckpointError(f"{folder}: affine map of version {self.affine['version']}, and only 1 is known")
        rows, subs = "parameter_with_row_parallelism_patterns", self.info.get("parameter_with_sub_params", [])
        if degree > 1:
            self.unused = {pattern for key in self.LISTS for pattern in self.info.get(key, [])}
            self.unused |= {pattern for sub in subs for pattern in sub["patterns"]}
        elif info and not (self.info.get(rows) or self.affine["params"]):
            text = f"{folder}: universal_checkpoint_info names no row-parallel weights ({rows}): if the model has some, "
            self.problems = [Problem(False, text + "the result is wrong on more than one tensor-parallel rank")]

    def match(self, patterns, name):
        matched = [pattern for pattern in patterns if re.match(pattern, name)]
        self.unused -= set(matched)
        if len(matched) > 1:
            raise CheckpointError(f"{self.folder}: {name} matches more than one pattern: {', '.join(matched)}")
        return matched[0] if matched else None

    def tied(self, name):
        return self.match(self.info.get("pipeline_replicated_parameter_patterns", []), name)

    def how_cut(self, name, shapes):
        """(shape of the whole, blocks or None for a mean, what the loader needs to cut it again) of the parameter that
        has these shapes on its ranks. One rank's is whole, and still the file says how more ranks would cut it."""
        found = {key: self.match(self.info.get(key, []), name) for key in self.LISTS}
        sub = next((s for s in self.info.get("parameter_with_sub_params", []) if self.match(s["patterns"], name)), None)
        affine = self.match(self.affine["params"], name)
        two = found["parameter_with_2_sub_params_cat_dim_0"]
        if self.match(self.info.get("autotp_unsupported_parameter_patterns") or {}, name):
            raise CheckpointError(f"{self.folder}: DeepSpeed did not record how {name} is cut")
        # AutoTP publishes a map of every element for layers that no category describes: bigcode's, codegen's, shared QK.
        # So the map comes first.
        if affine:
            shape, blocks = self.affine_blocks(name, self.affine["params"][affine])
            return shape, blocks, {}
        # Each rank has the whole: they are compared, and one is taken.
        if found["tp_replicated_parameter_patterns"]:
            stride = whole("", b"", shapes[0]).stride
            return shapes[0], tuple((rank, shapes[0], stride, 0, stride, 0) for rank in range(self.degree)), {}
        # Each rank has the whole, and computed it by itself: a LayerNorm that is not kept alike, for one.
        if found["parameter_to_average_patterns"]:
            return shapes[0], None, {}
        # Q, K and V in one matrix, or a gate and its value: each is cut by itself, so a rank has a part of every one.
        if sub and not two:
            return self.sub_parameters(name, shapes, sub)
        # What is left is cut along one dimension: its rows at the input of a layer, elsewhere the first.
        dim = 1 if found["parameter_with_row_parallelism_patterns"] and not two else 0
        size = [sum(s[d] for s in shapes) if d == dim else n for d, n in enumerate(shapes[0])]
        parts, how = (2, {"cat_dim": 0, "param_n_sub_params": 2}) if two else (1, {"cat_dim": dim})
        blocks = cut_along(dim, size, parts * [[s[dim] // parts for s in shapes]]) if size else ()
        # A vocabulary was padded until the ranks divided it.
        if found["vocabulary_parameter_patterns"]:
            return (self.info["original_vocab_size"], *size[1:]), blocks, how | {"vocab_tensor": True}
        return tuple(size), blocks, how

    def affine_blocks(self, name, entry):
        blocks = []
        for rank, shard in entry["ranks"].items():
            for piece in shard["pieces"]:
                if piece.get("scale", 1.0) != 1.0:
                    raise CheckpointError(
                        f"{self.folder}: {name} is stored scaled, its optimizer state cannot be converted"
                    )
                (there, full_stride), (here, stride) = piece["source"], piece["dest"]
                blocks.append((int(rank), piece["shape"], stride, here, full_stride, there))
        return tuple(entry["logical_shape"]), tuple(blocks)

    def sub_parameters(self, name, shapes, sub):
        dim, spec = sub["partition_dim"], sub["shape"][sub["partition_dim"]]
        total = sum(math.prod(shape) for shape in shapes)
        if isinstance(spec, int):  # before version 0.4: the number of sub-parameters of one size
            spec = (sum(shape[dim] for shape in shapes) // spec,) * spec
        widths = [[size // self.degree] * self.degree for size in spec]
        if self.info.get("universal_checkpoint_version", 0.0) >= 0.4:
            widths = self.info["sub_param_shard_widths"][self.match(sub["patterns"], name)]
        if [sum(width) for width in widths] != list(spec):
            raise CheckpointError(f"{self.folder}: the widths of {name}, {widths}, do not make up its sizes {spec}")
        size = [sum(n) if isinstance(n, (tuple, list)) else n for n in sub["shape"]]
        size[dim] = sum(spec)
        if -1 in size:
            size[size.index(-1)] = total // -math.prod(size)
        if math.prod(size) != total:
            raise CheckpointError(f"{self.folder}: {name} has {total} elements, which do not make up {size}")
        described = Stub.__new__(named("deepspeed.checkpoint.universal_checkpoint", "SubparamShape"))
        shape = tuple(spec if d == dim else n for d, n in enumerate(sub["shape"]))
        described.state = {"patterns": sub["patterns"], "shape": shape, "partition_dim": dim}
        return tuple(size), cut_along(dim, size, widths), {"sub_param_shape": described}

    def join(self, name, parts):
        """One Parameter from those of the tensor-parallel ranks."""
        if self.degree == 1 and not self.info:
            return parts[0]
        shape, blocks, how = self.how_cut(name, [part.shape for part in parts])
        states, numel = {}, math.prod(shape)
        for key in parts[0].states:
            slices = tuple(part.states[key] for part in parts)
            if len({part.dtype for part in slices}) > 1 or numel > sum(part.numel for part in slices):
                raise CheckpointError(f"{self.folder}: the shards of {name} do not cover its elements exactly once")
            if self.degree == 1 and not self.affine["params"]:
                states[key] = slices[0]._replace(numel=numel)
            else:
                states[key] = Joined(f"{key} of {name}", slices, blocks, numel)
        return parts[0]._replace(shape=shape, states=states, how=how)


def stage_of(optimizer):
    stage = optimizer.get("zero_stage", 0)
    if isinstance(stage, Named):  # as Python 3.11.0 to 3.11.3 pickle the member of an enum
        return {"gradients": 2, "weights": 3}.get(stage.__qualname__.rpartition(".")[2], 1)
    return 3 if is_stage_3(optimizer) else int(stage.args[0] if isinstance(stage, Stub) else stage)


def describe(folder, workers=4):
    """The Description of the ZeRO or universal checkpoint in a folder. Reads no tensor but the scalars of the optimizer,
    runs no code. Raises CheckpointError where files are missing, damaged, or not of one checkpoint."""
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} does not exist")
    with ThreadPoolExecutor(workers) as pool:
        if (folder / "zero").is_dir():
            return describe_universal(folder, pool)
        shards, opened = find_shards(folder), keep_open()
        ranks = [describe_ranks(folder, mp, shards[mp], pool, opened) for mp in sorted(shards)]
    with about(folder):
        model, optimizer = ranks[0].model, ranks[0].optimizer
        degrees = model.get("checkpoint_parallel_dimensions") or {}
        pipeline = degrees.get("pp_degree") or (1 if model["module"] is not None else len(shards))
        tensor = degrees.get("tp_degree") or len(shards) // pipeline
        if sorted(shards) != list(range(tensor * pipeline)):
            names = ", ".join(f"mp_rank_{mp:02d}" for mp in sorted(shards))
            raise CheckpointError(f"{folder} should have {tensor} tensor x {pipeline} pipeline ranks, and has {names}")
        parameters, problems = join_ranks(folder, ranks, tensor, model.get("universal_checkpoint_info"))
        return described(
            folder, [rank.model for rank in ranks], optimizer, parameters, base_optimizer(optimizer)["param_groups"],
            universal=False, stage=stage_of(optimizer), bf16=shards[0][0].name.startswith("bf16_"), ranks=len(shards[0]),
            tensor=tensor, pipeline=pipeline, uneven=dict(item for rank in ranks for item in rank.uneven.items()),
            problems=[problem for rank in ranks for problem in rank.problems] + problems,
            strangers=dict(item for rank in reversed(ranks) for item in rank.strangers.items()),
        )  # fmt: skip


def described(folder, models, optimizer, parameters, groups, **facts):
    module = models[0]["module"] or {}
    return Description(
        folder=folder, parameters=parameters, models=models, optimizer=optimizer, param_groups=groups,
        flats=[list(names) for names in models[0]["param_shapes"]],
        kept={name: tensor for name, tensor in module.items() if isinstance(tensor, Tensor)},
        extra=[name for name, thing in module.items() if not isinstance(thing, Tensor)],
        frozen=models[0].get("frozen_param_shapes") or {}, shared=models[0].get("shared_params") or {}, **facts,
    )  # fmt: skip


def join_ranks(folder, ranks, tensor, info):
    """({name: Parameter}, problems) from every model-parallel rank, the tensor-parallel ones of a stage side by side."""
    for rank in ranks:
        if rank.model["global_steps"] != ranks[0].model["global_steps"]:
            raise CheckpointError(f"{folder}: its model-parallel ranks are of different steps")
        if len(rank.model["param_shapes"]) != len(ranks[0].model["param_shapes"]):  # the loader takes them by number
            raise CheckpointError(f"{folder}: a pipeline stage lacks a parameter group that others have")
    joined, cuts = {}, TensorParallel(info, tensor, folder)
    for stage in range(0, len(ranks), tensor):
        parts = [rank.parameters for rank in ranks[stage : stage + tensor]]
        if any(part.keys() != parts[0].keys() for part in parts):
            raise CheckpointError(f"{folder}: tensor-parallel ranks of stage {stage} hold different parameters")
        for name in parts[0]:
            if name not in joined:
                joined[name] = cuts.join(name, [part[name] for part in parts])
            elif not cuts.tied(name):
                raise CheckpointError(f"{folder}: {name} is in two pipeline stages and is not declared as tied")
    if cuts.unused:
        text = f"{folder}: universal_checkpoint_info has patterns that match no parameter: "
        cuts.problems.append(Problem(True, text + ", ".join(sorted(cuts.unused))))
    return joined, cuts.problems


def describe_universal(folder, pool):
    """Of our converter or DeepSpeed's, which leaves weights in `module`, and at ZeRO-3 rank 0's part of frozen ones, its
    whole shard in optimizer_state.pt, and tensors without their shape."""
    paths = sorted(folder.glob("mp_rank_*_model_states.pt")) or sorted(folder.glob("*_model_states.pt"))
    if not paths:
        raise CheckpointError(f"{folder} holds no *_model_states.pt: it is not a checkpoint of DeepSpeed")
    models, opened, file = [load(path)[0] for path in paths], keep_open(), folder / "zero" / "optimizer_state.pt"
    with about(file):
        optimizer, strange = load(file)
        base = base_optimizer(optimizer) if is_stage_3(optimizer) else {"state": {}}
        common = {key: scalar(value, opened) for key, value in base["state"].get(0, {}).items() if key == "step"}
        groups = optimizer.get("param_groups") or optimizer["optimizer_state_dict"]["param_groups"]
        group_of = {flat: i for i, group in enumerate(groups) for flat in group["params"]}

    def read_parameter(name, flat):
        place, states, scalars, how, shape = folder / "zero" / file_name(name), {}, common, {}, None
        for path in [place / "fp32.pt", *sorted(set(place.glob("*.pt")) - {place / "fp32.pt"})]:
            with about(path):
                content = load(path)[0]
                if path.stem == "step":
                    scalars = {"step": scalar(content, opened)}
                    continue
                how = {key: value for key, value in content.items() if key != "param"} if type(content) is dict else how
                tensor = tensor_of(content["param"] if type(content) is dict else content)
                (record, begin), numel = begin_of(tensor, 0), math.prod(tensor.size)
                states[path.stem] = Slices(tensor.dtype, (record,), (begin,), 0, numel, 0, numel)
                shape = tensor.size if path.stem == "fp32" else shape
        return name, Parameter(tuple(shape), flat, group_of.get(flat), states, scalars, how)

    with about(paths[0]):
        names = {name: flat for model in models for flat, names in enumerate(model["param_shapes"]) for name in names}
        parameters = dict(pool.map(read_parameter, names, names.values()))
        for model in models:
            frozen, module = model.get("frozen_param_shapes") or {}, model["module"] or {}
            gone = {*parameters, *(model.get("shared_params") or {})}
            gone |= {n for n in frozen.keys() & module.keys() if tuple(module[n].size) != tuple(frozen[n])}
            pairs = ((name, tensor_of(module[name]) or module[name]) for name in module if name not in gone)
            model["module"] = {name: compact(t) if isinstance(t, Tensor) else t for name, t in pairs}
    return described(
        folder, models, optimizer, parameters, groups, universal=True, stage=None, bf16=None, ranks=None, tensor=1,
        pipeline=1, uneven={}, problems=[], strangers=dict.fromkeys(strange, file),
    )  # fmt: skip

# -----------------------------------------------------------------------------
# 5. what the result consists of


def file_name(name):
    """A name from the checkpoint as part of a path, in UTF-8 whatever the locale; it must not lead elsewhere."""
    plain = isinstance(name, str) and name == os.path.normpath(name) and "\0" not in name
    if not plain or name in (".", "..") or name.startswith(("../", "/")):
        raise CheckpointError(f"{name!r} is the name of a parameter or a state, and cannot be that of a file")
    return os.fsdecode(name.encode())


@functools.lru_cache(4096)
def state_pickle(dtype, shape, *how):
    """The pickle of a state file. Layers are alike, and so are the states of each: few have to be made."""
    blank = Slices(dtype, (), (), 0, 0, 0, math.prod(shape))
    return pickled({"param": whole(dtype, blank, shape)} | dict(how))[0]


def as_tensor(value):
    return whole(value.dtype, value.data, value.shape) if isinstance(value, Scalar) else value


def global_state(description):
    """zero/optimizer_state.pt: what the loaders of ZeRO-1/2 and of ZeRO-3 each ask for, without a shard."""
    groups = description.param_groups
    shards = ("base_optimizer_state", "param_slice_mappings", "single_partition_of_fp32_groups", "fp32_flat_groups")
    state = {key: value for key, value in description.optimizer.items() if key not in shards}
    steps = (p.scalars.get("step") for p in description.parameters.values())
    step = next((step for step in steps if step is not None), groups[0].get("step"))
    state["param_groups"] = groups
    # The loader of ZeRO-3 gives every group what the first one says. Where the groups differ it had better say nothing.
    shared = {key: value for key, value in groups[0].items() if all(group.get(key) == value for group in groups)}
    state["optimizer_state_dict"] = {"state": {0: {"step": as_tensor(step)}}, "param_groups": [shared]}
    if version := description.models[0].get("ds_version"):  # ZeRO-1/2 asks for it, ZeRO-3 does not save it
        state.setdefault("ds_version", version)
    return state


def files_of(description):
    """{path below the output folder: (pickle, what its tensors are made of)}."""
    files, steps = {}, {}
    for name, parameter in description.parameters.items():
        folder = f"zero/{file_name(name)}"
        for key, source in parameter.states.items():
            if "/" in file_name(key):
                raise CheckpointError(f"{key!r} is a state's name that leads to another folder")
            data = state_pickle(source.dtype, parameter.shape, *parameter.how.items())
            files[f"{folder}/{file_name(key)}.pt"] = data, [source]
        step = parameter.scalars.get("step")
        if step is not None:
            if id(step) not in steps:  # most parameters share theirs
                steps[id(step)] = pickled(as_tensor(step))
            files[f"{folder}/step.pt"] = steps[id(step)]
    files["zero/optimizer_state.pt"] = pickled(global_state(description))
    return files | {f"mp_rank_{i:02d}_model_states.pt": pickled(model) for i, model in enumerate(description.models)}


def jobs_of(files):
    """The files in lists of some megabytes, side by side in the shards: what follows is read on, and summed on."""
    job, size = [], 0
    for name, (_, sources) in files.items():
        job.append(name)
        size += sum(map(nbytes_of, sources))
        if size > 16 * CHUNK:
            yield job
            job, size = [], 0
    yield job


# -----------------------------------------------------------------------------
# 6. publishing: nothing has its final name before it is on the disk


def beside(output, what):
    return output.with_name(f".{output.name}.{what}")


def check_output(source, output):
    """The output is new, or a universal checkpoint and nothing else, and does not hold the source."""
    entry = re.compile(r"zero|(zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt|layer_.*_model_states\.pt")
    if source == output or output in source.parents:
        raise CheckpointError(f"{output} is not a universal checkpoint but holds the input: name another output folder")
    if output.name == "latest_universal":
        raise CheckpointError(f"{output} is the name of the file that points to the output: name another output folder")
    if (output.parent / "latest_universal").is_dir():
        raise CheckpointError(f"{output.parent / 'latest_universal'} is a folder, where a file has to go")
    if output.exists():
        others = [path.name for path in output.iterdir() if not entry.fullmatch(path.name)] if output.is_dir() else []
        if others or not (output / "zero" / "optimizer_state.pt").is_file():
            held = f": it holds {min(others)}" if others else ""
            raise CheckpointError(f"{output} exists and is not a universal checkpoint{held}: it is left as it is")


@contextlib.contextmanager
def locked(folder, made):
    """Keeps other conversions out of the folder, which this one has just made, or found."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"another conversion to the same folder is running: it writes to {folder}") from None
        except OSError as error:  # a file system without locks: the folder itself is one
            if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
                raise
            if not made:
                text = f"{folder} belongs to another conversion that runs, or was killed; if so: rm -r '{folder}'"
                raise CheckpointError(text) from None
        if not os.path.samestat(os.fstat(lock), os.stat(folder)):
            raise CheckpointError(f"another conversion has just replaced {folder}")
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def unfinished(output):
    """The empty folder beside the output to write into; gone in the end unless it was published. Sweeps away what a
    killed conversion has left."""
    folder, prefix, made = beside(output, "unfinished"), beside(output, "replaced.").name, True
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        made = False
    with locked(folder, made):
        mine = os.stat(folder)
        found = [path for path in output.parent.iterdir() if path.name.startswith(prefix)]
        olds = sorted(path for path in found if path.name.removeprefix(prefix).isdecimal())
        if olds and not output.exists():
            olds.pop().rename(output)
        for left in (*olds, *folder.iterdir()):
            shutil.rmtree(left, ignore_errors=True) if left.is_dir() and not left.is_symlink() else left.unlink()
        try:
            yield folder
        finally:
            if folder.exists() and os.path.samestat(mine, os.stat(folder)):
                shutil.rmtree(folder, ignore_errors=True)
                beside(output, "pointer").unlink(missing_ok=True)


def publish(folder, output):
    """Write everything to the disk, give the finished folder its final name, and let `latest_universal` point to it.
    Whenever this is interrupted, the output is the old one or the new one, and whole; or, for a moment, the old one
    stands beside its place, and the next conversion brings it back."""
    old, pointer = beside(output, f"replaced.{time.time_ns()}"), beside(output, "pointer")
    pointer.write_bytes(os.fsencode(output.name))
    sync(folder)
    if output.exists():
        output.rename(old)
    folder.rename(output)
    pointer.rename(output.with_name("latest_universal"))
    sync(output.parent)
    shutil.rmtree(old, ignore_errors=True)
    if old.exists():
        warnings.warn(f"{old}: the former {output.name}, which could not be removed", stacklevel=2)


def sync(folder):
    """All that was written to the file system of this folder is on the disk."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if libc.syncfs(descriptor):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(folder))
    finally:
        os.close(descriptor)


def verify(path):
    """Read a finished file back: its bytes have the checksums of what was to be written."""
    with about(path, "was not written as it should be: nothing is published"), zipfile.ZipFile(path) as archive:
        if record := archive.testzip():
            raise CheckpointError(f"{path} is not what the checkpoint holds ({record}): nothing is published")


# -----------------------------------------------------------------------------
# 7. convert(); several processes


def alone(value):
    """gather() of the only process."""
    return [value]


@contextlib.contextmanager
def together(gather):
    """Of several processes none goes on unless all do: each raises what one of them did."""
    problem = None
    try:
        yield
    except Exception as error:
        known = isinstance(error, (CheckpointError, OSError, MemoryError))
        problem = error if known or gather is alone else CheckpointError(f"{type(error).__name__}: {error}")
    problem = next((p for p in gather(problem) if p is not None), None)
    if problem is not None:
        raise problem


def convert(
    input_folder, output_folder=None, num_extract_workers=4, num_merge_workers=2, *,
    strict=True, check=False, progress=False, rank=0, ranks=1, gather=alone,
):  # fmt: skip
    """Convert the ZeRO checkpoint in input_folder, or in the folder below it that find_tag() finds, into a universal
    checkpoint at output_folder: without a name, the input's with _universal behind it.

    check reads the finished files back before they are published. strict=False goes on without what a universal
    checkpoint cannot hold, with a warning. Several processes share the work as rank of ranks; gather(value) returns the
    values of all of them. Raises CheckpointError when the input is not a whole ZeRO checkpoint, or the output is
    something else's folder; OSError when a disk fails. Nothing has then appeared at output_folder.
    Returns {"source", "parameters", "bytes", "files", "seconds"}; source is the folder of the tag.
    """
    began, opened = time.perf_counter(), keep_open()
    with contextlib.ExitStack() as stack:
        with together(gather):
            source = find_tag(input_folder)
            output = Path(os.path.realpath(output_folder or default_output(source)))
            if rank == 0:
                check_output(Path(os.path.realpath(source)), output)
            folder = beside(output, "unfinished")
            show(progress, f"describing {source}")
            description = describe(source, num_extract_workers)
            complain(description, strict)
            with about(source / "*_optim_states.pt"):
                files = files_of(description)
            if rank == 0:
                stack.enter_context(unfinished(output))
                for parent in {os.path.dirname(name) for name in files}:
                    os.makedirs(folder / parent, exist_ok=True)
        show(progress, f"writing {len(files)} files")
        with together(gather):
            mine = list(jobs_of(files))[rank::ranks]
            spans = write_files(folder, files, mine, opened, num_merge_workers, progress)
            if rank:
                sync(folder)  # its machine's part; publish() does rank 0's
        spans = merged(gather(spans))
        with together(gather):
            check_all(sorted(spans)[rank::ranks], spans, opened)
        with together(gather):
            if rank == 0:
                show(progress, f"publishing {output}")
                for name in files if check else ():
                    verify(folder / name)
                link_second_names(folder)
                publish(folder, output)
    nbytes = sum(nbytes_of(source) for _, sources in files.values() for source in sources)
    done = {"source": source, "parameters": len(description.parameters), "bytes": nbytes}
    return done | {"files": len(files) + len(description.models), "seconds": time.perf_counter() - began}


def default_output(source):
    return f"{os.path.abspath(source)}_universal"


def complain(description, strict):
    """What a conversion would lose is refused, or named in a warning; so is what is only odd."""
    if description.universal:
        raise CheckpointError(f"{description.folder} is a universal checkpoint already")
    if strangers := description.strangers:
        text = f"{next(iter(strangers.values()))}: it names {', '.join(sorted(strangers))}, which is none of torch's, "
        warnings.warn(f"{text}DeepSpeed's, Megatron's, numpy's or Python's. It is handed on, not run", stacklevel=3)
    for problem in description.problems:
        if problem.fatal and strict:
            raise CheckpointError(f"{problem.text} (--no_strict goes on without it)")
        warnings.warn(problem.text, stacklevel=3)


def write_files(folder, files, jobs, opened, workers, progress):
    """{record: what was read of it}, as check() takes it."""

    def write_job(job):
        reader = Reader(opened)
        for name in job:
            write_pt(folder / name, *files[name], reader)
        return job, reader.spans

    sizes = {name: sum(map(nbytes_of, sources)) for job in jobs for name in job for sources in files[name][1:]}
    spans = {}
    with ThreadPoolExecutor(workers) as pool, bar(sum(sizes.values()), progress) as show_more:
        for job, found in pool.map(write_job, jobs):
            show_more(sum(sizes[name] for name in job))
            for record, more in found.items():
                spans.setdefault(record, array("Q")).extend(more)
    return spans


def check_all(records, spans, opened):
    for record in records:
        check(record, spans[record], opened)


def merged(everyone):
    """The spans of all processes as one."""
    first, *others = everyone
    for record, more in itertools.chain(*(other.items() for other in others)):
        first.setdefault(record, array("Q")).extend(more)
    return first


def link_second_names(folder):
    for path in folder.glob("mp_rank_*_model_states.pt"):
        second = path.with_name(f"zero_pp_rank_0_{path.name}")
        try:
            os.link(path, second)
        except OSError:  # a file system without links
            shutil.copyfile(path, second)


def show(progress, text):
    if progress and sys.stderr.isatty():
        print(f"ds_to_universal.py: {text}", file=sys.stderr)


@contextlib.contextmanager
def bar(total, progress):
    """A function that moves a progress bar, where there are a terminal and tqdm, which comes with DeepSpeed."""
    shown = None
    with contextlib.suppress(ImportError):
        if progress and sys.stderr.isatty():
            from tqdm import tqdm

            shown = tqdm(total=total, unit="B", unit_scale=True)
    with shown or contextlib.nullcontext():
        yield shown.update if shown else lambda nbytes: None


# -----------------------------------------------------------------------------
# 8. the command line


def launched(distributed, local_rank):
    """(rank, ranks) of this process if a launcher started it, or --distributed asks for it: a platform or a training
    script, too, leaves RANK and WORLD_SIZE behind."""
    names = "RANK", "WORLD_SIZE"
    if not distributed and local_rank is None and "TORCHELASTIC_RUN_ID" not in os.environ:
        names = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"
    try:
        rank, ranks = (int(os.environ[name]) for name in names)
    except KeyError as error:
        if distributed:
            raise CheckpointError(f"--distributed needs {error} in the environment, as launchers set it") from None
        return 0, 1
    except ValueError as error:
        raise CheckpointError(f"{' and '.join(names)} in the environment are not numbers: {error}") from None
    return rank, ranks


def meet(rank, ranks, output, seconds):
    """gather() for processes that a launcher has started: by torch.distributed, at MASTER_ADDR or, where the launcher
    names none, through a file beside the output, which all must see."""
    import torch.distributed as dist

    where = "env://"
    if "MASTER_ADDR" not in os.environ:
        output.parent.mkdir(parents=True, exist_ok=True)
        job = "_".join(os.environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
        where = f"file://{beside(output, f'meeting.{job}')}"
    try:
        store = next(dist.rendezvous(where, rank, ranks, timeout=datetime.timedelta(seconds=seconds)))[0]
        store.set(f"rank {rank}", "is here")
        store.wait([f"rank {other}" for other in range(ranks)], datetime.timedelta(seconds=seconds))
    except Exception as error:
        problem = f"rank {rank} of {ranks}: not all processes came to {where} within {seconds} s"
        raise CheckpointError(f"{problem}: {str(error).splitlines()[0]}") from None
    # From here on a process waits for as long as another one writes; one that ends is noticed at once.
    day = datetime.timedelta(days=1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=day)

    def gather(value):
        values = [None] * ranks
        try:
            dist.all_gather_object(values, value)
        except RuntimeError:
            raise CheckpointError("another process of this conversion is gone: nothing is published") from None
        return values

    return gather


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arg, hidden = parser.add_argument, argparse.SUPPRESS
    arg("--version", action="version", version=__version__)
    arg("--input_folder", required=True, help="ZeRO checkpoint, the folder with the *_states.pt files; or the one "
        "above it, where `latest` says which, or there is no other")  # fmt: skip
    arg("--output_folder", help="universal checkpoint to write; default: <the folder with the files>_universal")
    arg("--num_extract_workers", type=int, default=4, help="threads that open shards")
    arg("--num_merge_workers", type=int, default=2, help="threads that write parameters")
    arg("--no_strict", dest="strict", action="store_false", help="go on without what the result cannot hold")
    arg("--verify", dest="check", action="store_true", help="read the result back before it is published")
    arg("--distributed", action="store_true", help="share the work with the other processes that RANK and WORLD_SIZE "
        "tell of; torchrun, deepspeed and srun need no flag")  # fmt: skip
    arg("--timeout", type=float, default=300, metavar="SECONDS", help="how long several processes wait to meet")
    arg("--inject_missing_state", action="store_true", help="accepted, as DeepSpeed's converter does; not needed here")
    arg("--keep_temp_folder", action="store_true", help="accepted; there is none")
    arg("--local_rank", type=int, help=hidden)  # the deepspeed launcher passes it
    arg("--safetensors", help=hidden)
    for flag in ("--trust", "--any_step"):  # of version 1.0; what they permitted needs no permission now
        arg(flag, action="store_true", help=hidden)
    for flag in ("--drop_states", "--unused_patterns"):
        arg(flag, dest="strict", action="store_false", help=hidden)
    args = parser.parse_args()
    if min(args.num_extract_workers, args.num_merge_workers) < 1:
        parser.error("--num_extract_workers and --num_merge_workers are at least 1")
    return args


def main():
    args, rank, code = parse_arguments(), 0, 0
    for stream_ in (sys.stdout, sys.stderr):
        stream_.reconfigure(errors="backslashreplace")
    with contextlib.suppress(ValueError, OSError):  # every shard stays open, if the system permits it
        resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)

    def say(kind, text):
        if not rank:
            print(f"ds_to_universal.py: {kind}: {' '.join(str(text).splitlines())}", file=sys.stderr, flush=True)

    warnings.showwarning = lambda message, *rest: say("warning", message)
    warnings.simplefilter("always", UserWarning)
    try:
        if args.safetensors:
            raise CheckpointError("--safetensors is a command of its own now: python ds_to_safetensors.py INPUT FILE")
        rank, ranks = launched(args.distributed, args.local_rank)
        output = args.output_folder or default_output(find_tag(args.input_folder))
        gather = meet(rank, ranks, Path(os.path.realpath(output)), args.timeout) if ranks > 1 else alone
        done = convert(
            args.input_folder, output, args.num_extract_workers, args.num_merge_workers,
            strict=args.strict, check=args.check, progress=not rank, rank=rank, ranks=ranks, gather=gather,
        )  # fmt: skip
        gather(None)
    except CheckpointError as error:
        code = 2
        say("error", error)
    except (OSError, MemoryError) as error:
        code = 1
        say("error", error if str(error) else "out of memory")
    except KeyboardInterrupt:
        code = 130
    if code:
        if rank:  # rank 0 says it, and the launcher must not end it before it has
            time.sleep(5)
        sys.stdout.flush()
        os._exit(code) if rank else sys.exit(code)
    if not rank:
        rate = done["bytes"] / done["seconds"] / 1e9
        print(
            f"{done['source']} -> {output}: {done['parameters']} parameters, {done['bytes']:,} bytes, {done['files']} "
            f"files in {done['seconds']:.2f} s, {rate:.2f} GB/s"
        )


if __name__ == "__main__":
    main()
