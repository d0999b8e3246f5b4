# SPDX-License-Identifier: MIT
"""DeepSpeed ZeRO checkpoint -> universal checkpoint.

    python ds_to_universal.py --input_folder checkpoints/global_step100

writes checkpoints/global_step100_universal. The input may be the folder above, Trainer's checkpoint-500 for one. With
--safetensors model.safetensors it writes the weights alone, which transformers and others read.

Input, written by engine.save_checkpoint() on N ranks (ZeRO-1/2, then ZeRO-3):

    mp_rank_00_model_states.pt                         buffers, parameter shapes, schedule, client state
    [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt   rank R's slice of the flattened fp32 weights and moments

    zero_pp_rank_R_mp_rank_00_model_states.pt
    [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt   rank R's slice of every single parameter

Output, the same at every stage, so that it resumes on any number of ranks and at ZeRO 1, 2 and 3:

    zero/<parameter>/fp32.pt, exp_avg.pt, ...          {"param": the whole tensor in its shape, "cat_dim": 0}
    zero/<parameter>/step.pt                           the optimizer's step count
    zero/optimizer_state.pt                            loss scale and parameter groups, no shard
    mp_rank_00_model_states.pt                         as in the input; `module` keeps buffers and frozen parameters
    zero_pp_rank_0_mp_rank_00_model_states.pt          the same file under the name that ZeRO-3 looks for
    ../latest_universal                                the name of the output folder

A .pt file is a zip archive of one pickle and one stored record per tensor. Conversion only regroups byte ranges of
those records. So it is done without torch, needs nothing but Python, and runs no code of a checkpoint: the pickle's
classes stay names. Each range is read once, checked against the archive's CRC-32 on the way, and written once.

In this file: pickles without their code; the bytes of records; one data-parallel checkpoint; tensor and pipeline
parallelism; writing; publishing; the weights alone; several processes, and the command line.
"""

import argparse
import bisect
import collections
import contextlib
import copyreg
import ctypes
import errno
import fcntl
import functools
import gc
import io
import itertools
import json
import math
import operator
import os
import pickle
import pickletools
import platform
import re
import resource
import secrets
import shutil
import socket
import stat
import struct
import sys
import threading
import time
import types
import warnings
import weakref
import zlib
from array import array
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import connection
from pathlib import Path

__version__ = "1.0"  # of the universal checkpoint tutorial, where this file is explained and tested
if sys.version_info < (3, 10):  # noqa: UP036
    sys.exit("ds_to_universal.py needs Python 3.10 or newer")


class CheckpointError(Exception):
    """What is wrong with the checkpoint or the folders, in one line."""

    def __init__(self, message):
        super().__init__(" ".join(str(message).splitlines()))


# -----------------------------------------------------------------------------
# what is inside a pickle, without its code

SIZES = {16: "ComplexDouble", 8: "Double Long ComplexFloat", 4: "Float Int", 2: "Half BFloat16 Short"}
SIZES |= {1: "Char Byte Bool Untyped"}
ELEMENT_SIZE = {f"{kind}Storage": size for size, kinds in SIZES.items() for kind in kinds.split()}
# What DeepSpeed writes, and what people keep in a client state: to load it runs no code of a stranger.
HARMLESS = """
torch device Tensor float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 uint16 uint32 uint64 bool complex32
torch complex64 complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu
torch._utils _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_sparse_tensor
torch.nn.parameter Parameter
torch.serialization _get_layout
torch.storage UntypedStorage
deepspeed.runtime.fp16.loss_scaler LossScaler DynamicLossScaler
deepspeed.runtime.zero.config ZeroStageEnum
deepspeed.utils.tensor_fragment fragment_address
deepspeed.checkpoint.universal_checkpoint SubparamShape
megatron.core.enums|megatron.model.enums ModelType
numpy dtype ndarray
numpy._core.multiarray|numpy.core.multiarray scalar _reconstruct
numpy.random._pickle __randomstate_ctor __generator_ctor __bit_generator_ctor
numpy.random._mt19937 MT19937
numpy.random._pcg64 PCG64
numpy.random.bit_generator SeedSequence __pyx_unpickle_SeedSequence
argparse Namespace
types SimpleNamespace
pathlib|pathlib._local Path PosixPath PurePath PurePosixPath
collections defaultdict Counter deque
datetime date time datetime timedelta timezone
_codecs encode
builtins|__builtin__ set frozenset bytes bytearray range xrange complex slice int float list dict
"""
KNOWN = (line.split() for line in HARMLESS.strip().splitlines())
KNOWN = {f"{module}.{name}" for modules, *names in KNOWN for module in modules.split("|") for name in names}
KNOWN |= {f"torch.{kind}" for kind in ELEMENT_SIZE}


class Fixed(type):
    """Of a class that files share: the BUILD of a pickle sets attributes of whatever it is told to."""

    def __setattr__(cls, name, value):
        raise TypeError(f"{name} of {cls.__name__} cannot be set")


class Opaque(metaclass=Fixed):
    """An instance of a class of which we know the name only. Pickles back as it came."""

    def __new__(cls, *args):
        self = super().__new__(cls)
        self.args, self.called, self.state, self.list, self.dict = args, False, None, [], {}
        return self

    def __init__(self, *args):
        self.called = True  # the pickle called the class; it did not only make an instance of it

    def __setstate__(self, state):
        self.state = state

    def __setitem__(self, key, value):
        self.dict[key] = value

    def append(self, value):
        self.list.append(value)

    def __reduce_ex__(self, protocol):
        make = (type(self), self.args) if self.called else (copyreg.__newobj__, (type(self), *self.args))
        return *make, self.state, iter(self.list) if self.list else None, iter(self.dict.items()) if self.dict else None


@functools.cache
def opaque(module, name):
    return Fixed(name, (Opaque,), {"__module__": module, "__qualname__": name})


def is_opaque(cls):
    return isinstance(cls, Fixed) and issubclass(cls, Opaque) and cls is not Opaque


# Python's own pickle, too, takes a description from one process to another.
copyreg.pickle(Fixed, lambda cls: (opaque, (cls.__module__, cls.__qualname__)) if is_opaque(cls) else cls.__qualname__)


class Size(tuple, metaclass=Fixed):
    """torch.Size"""


class Record:
    """The bytes of one tensor storage in one archive. `seen` collects what was read of it: start, length and CRC-32,
    one after the other."""

    __slots__ = ("path", "offset", "nbytes", "crc", "seen")

    def __init__(self, path, offset, nbytes, crc):
        self.path, self.offset, self.nbytes, self.crc, self.seen = path, offset, nbytes, crc, array("Q")

    def __reduce__(self):
        return Record, (self.path, self.offset, self.nbytes, self.crc)


# A storage is made of byte ranges: pieces of (record, start, length), the record also plain bytes.
Storage = collections.namedtuple("Storage", "kind pieces")
Tensor = collections.namedtuple("Tensor", "storage offset size stride requires_grad")


def builder(build):
    """What a pickle calls: a class of its own, which cannot be changed, for the function."""
    return Fixed("builder", (), {"__new__": lambda cls, *args: build(*args)})


PARAMETER = builder(lambda data, *rest: data)
BUILT = {
    "collections.OrderedDict": collections.OrderedDict,
    "torch.Size": Size,
    "torch._utils._rebuild_tensor_v2": builder(lambda storage, at, size, *rest: Tensor(storage, at, size, *rest[:2])),
    "torch._utils._rebuild_parameter": PARAMETER,
    "torch._utils._rebuild_parameter_with_state": PARAMETER,
    # a tensor with attributes of its own, which nobody needs
    "torch._tensor._rebuild_from_type_v2": builder(lambda rebuild, kind, arguments, state: rebuild(*arguments)),
}


def cut(tensor, start=0, numel=None):
    """The pieces of elements start .. start + numel of a contiguous tensor that came from one record."""
    total, follow = math.prod(tensor.size), 1
    numel = total if numel is None else numel
    width = ELEMENT_SIZE[tensor.storage.kind]
    ((record, base, available),) = tensor.storage.pieces
    begin, nbytes = (tensor.offset + start) * width, numel * width
    if min(tensor.offset, start, numel, *tensor.size) < 0 or start + numel > total or begin + nbytes > available:
        raise CheckpointError(f"{record.path} holds fewer elements than its description says")
    for n, stride in zip(reversed(tensor.size), reversed(tensor.stride), strict=True):
        if stride != follow and n != 1 and total:
            raise CheckpointError(f"{record.path} has gaps between the elements of a tensor that must have none")
        follow *= n
    return [(record, base + begin, nbytes)]


def whole(kind, pieces, shape):
    """A contiguous tensor made of pieces."""
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return Tensor(Storage(kind, pieces), 0, tuple(shape), stride, False)


def compact(tensor):
    """The tensor with the part of its storage that it spans: what stands behind a view does not follow it."""
    if not isinstance(tensor, Tensor):
        return tensor
    last = sum((n - 1) * stride for n, stride in zip(tensor.size, tensor.stride, strict=True))
    span = tensor._replace(size=(last + 1 if all(tensor.size) else 0,), stride=(1,))
    return tensor._replace(storage=Storage(tensor.storage.kind, cut(span)), offset=0)


def in_memory(tensor):
    """A one-element tensor, a step count, with its bytes read."""
    ((record, start, nbytes),) = cut(tensor, 0, 1)
    data = bytes(read_range(record, start, nbytes))
    if not record.seen:
        record.seen.extend((start, nbytes, zlib.crc32(data)))
        check_record(record)
    return whole(tensor.storage.kind, [(data, 0, nbytes)], tensor.size)


ENUMS = {f"{module}.ModelType" for module in ("megatron.core.enums", "megatron.model.enums")}
ENUMS |= {"deepspeed.runtime.zero.config.ZeroStageEnum"}


class Unpickler(pickle.Unpickler):
    def __init__(self, data, record, trust):
        super().__init__(io.BytesIO(data))
        self.record, self.trust, self.unknown = record, trust, []

    def find_class(self, module, name):
        path = f"{module}.{name}"
        if path in BUILT:
            return BUILT[path]
        if path in ("__builtin__.getattr", "builtins.getattr"):
            me = weakref.ref(self)  # or this class, which is garbage in a circle, would keep the file open
            return builder(lambda parent, name: me().attribute(parent, name))
        if path not in KNOWN and path not in self.unknown:
            self.unknown.append(path)
        return opaque(module, name)

    def attribute(self, parent, name):
        """getattr: how a pickle names a class inside another one, and Python 3.11.0 to 3.11.3 the member of an enum."""
        path = f"{parent.__module__}.{parent.__qualname__}" if is_opaque(parent) else "__builtin__.getattr"
        if (path not in ENUMS or name.startswith("_")) and "__builtin__.getattr" not in self.unknown:
            self.unknown.append("__builtin__.getattr")
        if is_opaque(parent):
            return opaque(parent.__module__, f"{parent.__qualname__}.{name}")
        return opaque("__builtin__", "getattr")(parent, name)

    def persistent_load(self, pid):
        _, storage_class, key, _, numel = pid
        record = self.record(f"data/{key}")
        if record.nbytes != numel * ELEMENT_SIZE[storage_class.__name__]:
            raise CheckpointError(f"record {key} has {record.nbytes} bytes, which is not {numel} elements")
        return Storage(storage_class.__name__, [(record, 0, record.nbytes)])

    def content(self):
        try:
            content, problem = self.load(), None
        except Exception as error:  # perhaps because of what is not known
            content, problem = None, error
        if self.unknown and not self.trust:
            raise CheckpointError(
                f"it refers to {', '.join(self.unknown)}, which no ZeRO checkpoint needs; --trust takes them over: "
                "they are not executed here, but will be when the result is loaded"
            )
        if problem:
            raise problem
        return content


@functools.lru_cache(2)  # shards are alike
def check_memo(data):
    """A pickle may number what it remembers as it likes, and Python makes room up to the largest number."""
    for code, number, _ in pickletools.genops(data):
        if code.name in ("PUT", "LONG_BINPUT") and number > len(data):
            raise ValueError(f"a pickle of {len(data)} bytes that wants to remember {number} objects")


class Archive:
    """A .pt file: a zip archive of one pickle and one stored record per tensor. Its directory is read as far as it is
    asked for."""

    def __init__(self, path):
        self.path, self.file, self.entries, self.records, self.at = path, open_shard(path), {}, {}, 0
        self.stem, size = Path(path).stem, os.fstat(self.file.fileno()).st_size
        self.expect(size >= 22)
        tail, ends = self.get(max(0, size - 98), min(size, 98)), 22
        nbytes, start = struct.unpack("<II", tail[-10:-2])
        if tail[-42:-38] == b"PK\6\7" and tail[:4] == b"PK\6\6":
            (nbytes, start), ends = struct.unpack("<QQ", tail[40:56]), 98
        self.expect(tail[-22:-18] == b"PK\5\6" and start + nbytes == size - ends)
        self.directory = self.get(start, nbytes)

    def expect(self, condition):
        if not condition:
            raise CheckpointError(f"{self.path} is truncated or damaged")

    def get(self, start, nbytes):
        """Bytes of the file, all of them."""
        data = os.pread(self.file.fileno(), nbytes, start)
        while 0 < len(data) < nbytes and (more := os.pread(self.file.fileno(), nbytes - len(data), start + len(data))):
            data += more
        self.expect(len(data) == nbytes)
        return data

    def find(self, name):
        """(start of its header, size, CRC-32) of a record."""
        while name not in self.entries:
            self.expect(self.at < len(self.directory))
            fields = struct.unpack_from("<4s6xH4xIIIHHH8xI", self.directory, self.at)
            mark, packed, crc, stored, size, name_size, extra_size, note, offset = fields
            begin = self.at + 46 + name_size
            self.at = begin + extra_size + note
            self.expect(mark == b"PK\1\2" and not packed and self.at <= len(self.directory))
            far, at = [], begin
            while at + 4 <= begin + extra_size:  # sizes and offsets that 32 bits cannot hold
                kind, length = struct.unpack_from("<HH", self.directory, at)
                if kind == 1:
                    far = list(struct.unpack_from(f"<{length // 8}Q", self.directory, at + 4))
                at += 4 + length
            size, stored, offset = (far.pop(0) if n == 0xFFFFFFFF and far else n for n in (size, stored, offset))
            self.expect(size == stored)
            prefix, _, key = self.directory[begin - name_size : begin].decode().partition("/")
            if prefix not in (self.stem, "archive"):  # torch.save writes the file's name into the archive
                raise CheckpointError(f"it was written as {prefix}.pt, and renamed")
            self.entries[key] = offset, size, crc
        return self.entries[name]

    def record(self, name):
        if name not in self.records:
            offset, size, crc = self.find(name)
            mark, packed, name_size, extra_size = struct.unpack("<4s4xH16xHH", self.get(offset, 30))
            self.expect(mark == b"PK\3\4" and not packed)
            self.records[name] = Record(self.path, offset + 30 + name_size + extra_size, size, crc)
        return self.records[name]

    def pickle(self):
        record = self.record("data.pkl")
        data = self.get(record.offset, record.nbytes)
        self.expect(zlib.crc32(data) == record.crc)
        return data

    def content(self, trust):
        data = self.pickle()
        if b"/byteorder" in self.directory:
            record = self.record("byteorder")
            if self.get(record.offset, record.nbytes) != b"little":
                raise CheckpointError("it was written on a big-endian machine")
        check_memo(data)
        return Unpickler(data, self.record, trust).content()


@contextlib.contextmanager
def reading(path):
    """What is wrong with a file is said in one line with its name; what is wrong with the system is no damage."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}" if str(path) not in str(error) else error) from None
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    except MemoryError:
        raise
    except Exception as error:  # a damaged archive or pickle can fail in any way
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def load(path, trust=False):
    """The content of a .pt file, its tensors as byte ranges. Raises CheckpointError, naming the file."""
    with reading(path):
        return Archive(path).content(trust)


# -----------------------------------------------------------------------------
# the bytes of records

CHUNK = 1 << 20


def most_files():
    """How many shards are kept open: half of what the system lets a process open, after asking for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1 << 14 if hard == resource.RLIM_INFINITY else min(hard, 1 << 14)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(soft, wanted) // 2


class Shard(io.FileIO):
    """A file that is closed when nobody uses it any more; its place in a cache may go before that."""

    def __del__(self):
        self.close()


def open_shard(path):
    try:  # without O_NONBLOCK it would wait for the writer of a FIFO
        file = Shard(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except IsADirectoryError:
        raise CheckpointError(f"{path} is not a file") from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        raise CheckpointError(f"{path} is not a file")
    return file


OPENING = threading.Lock()


@functools.lru_cache(None)
def opened(path):
    with OPENING:  # while one thread closes what was open, the others would open as many
        if opened.cache_info().currsize >= most_files():
            opened.cache_clear()
        return open_shard(path)


def read_into(buffer, record, start):
    """Fill the buffer, or some of it, from a record. Returns the number of bytes."""
    if isinstance(record, bytes):
        buffer[:] = record[start : start + len(buffer)]
        return len(buffer)
    file = opened(record.path)  # held while it is read: the cache may let go of it in another thread
    with named(file):
        got = os.preadv(file.fileno(), [buffer], record.offset + start)
    if not got:
        raise CheckpointError(f"{record.path} became shorter while it was read")
    return got


def read_range(record, start, nbytes):
    data = memoryview(bytearray(nbytes))
    done = 0
    while done < nbytes:
        done += read_into(data[done:], record, start + done)
    return data


def joined(pieces):
    return b"".join(read_range(*piece) for piece in pieces)


def same(a, b):
    """Whether two sequences of pieces hold the same bytes."""
    a, b = (pieces if isinstance(pieces, Ranges) else Ranges(pieces) for pieces in (a, b))
    spans = ((at, min(CHUNK, a.nbytes - at)) for at in range(0, a.nbytes, CHUNK))
    return a.nbytes == b.nbytes and all(joined(a.cut(*span)) == joined(b.cut(*span)) for span in spans)


class Ranges:
    """A long sequence of pieces, as arrays: 8 to 24 bytes a piece, whatever is shared. Parts are found by bisection."""

    def __init__(self, pieces=(), *, records=None, starts=None, sizes=None):
        if type(pieces) is Ranges:
            self.__dict__ |= pieces.__dict__
            return
        if records is None:
            columns = list(zip(*pieces, strict=True)) or ((), (), ())
            records, starts, sizes = list(columns[0]), array("Q", columns[1]), array("Q", columns[2])
        self.records, self.starts, self.sizes, self.nbytes = records, starts, sizes, sum(sizes)

    def __getstate__(self):
        return {key: value for key, value in self.__dict__.items() if key != "ends"}

    def __iter__(self):
        return (piece for piece in zip(self.records, self.starts, self.sizes, strict=True) if piece[2])

    @functools.cached_property
    def ends(self):
        return array("Q", itertools.accumulate(self.sizes))

    def cut(self, start, nbytes):
        """The pieces of some of the bytes."""
        if not start and nbytes == self.nbytes:
            yield from self
            return
        i = bisect.bisect_right(self.ends, start)
        while nbytes:
            size = self.sizes[i]
            skip = start - (self.ends[i] - size)
            part = min(size - skip, nbytes)
            if part:
                yield self.records[i], self.starts[i] + skip, part
            start, nbytes, i = start + part, nbytes - part, i + 1


class Strided(Ranges):
    """Pieces in stripes, kept as the steps between them. A section is (count, [(ranges, start, step, nbytes), ...]):
    its segments one after the other, and that `count` times, each time a step further on in each of the ranges."""

    def __init__(self, sections):
        self.sections = sections
        self.widths = [sum(segment[3] for segment in segments) for _, segments in sections]
        sizes = (count * width for (count, _), width in zip(sections, self.widths, strict=True))
        self.ends = array("Q", itertools.accumulate(sizes))
        self.nbytes = self.ends[-1] if self.ends else 0

    def __iter__(self):
        return self.cut(0, self.nbytes)

    def cut(self, start, nbytes):
        at = bisect.bisect_right(self.ends, start)
        while nbytes:
            (count, segments), width = self.sections[at], self.widths[at]
            row, skip = divmod(start - (self.ends[at] - count * width), width)
            for i in range(row, count):
                for ranges, first, step, size in segments:
                    if skip >= size:
                        skip -= size
                        continue
                    part = min(size - skip, nbytes)
                    if part:
                        yield from ranges.cut(first + i * step + skip, part)
                    start, nbytes, skip = start + part, nbytes - part, 0
                if not nbytes:
                    return
            at += 1


def crc_multiply(a, b):
    """Two polynomials modulo that of CRC-32, bits reversed."""
    product = 0
    while a:
        if a & 0x80000000:
            product ^= b
        a, b = (a << 1) & 0xFFFFFFFF, (b >> 1) ^ (0xEDB88320 if b & 1 else 0)
    return product


@functools.lru_cache(4096)
def crc_table(nbytes):
    """What nbytes more make of a CRC-32: times x^(8 nbytes), for all 16 values of each of its 8 half-bytes."""
    table, column, power = [[0] for _ in range(8)], 0x80000000, 0x00800000
    while nbytes:
        if nbytes & 1:
            column = crc_multiply(power, column)
        power, nbytes = crc_multiply(power, power), nbytes >> 1
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


def checksum(record, start, nbytes, crc=0):
    for at in range(start, start + nbytes, CHUNK):
        crc = zlib.crc32(read_range(record, at, min(CHUNK, start + nbytes - at)), crc)
    return crc


def check_record(record):
    """The record is what its archive's CRC-32 says. What no file took of it, padding, is read here."""
    at, crc, seen = 0, 0, set(zip(*[iter(record.seen)] * 3, strict=True))
    for start, nbytes, piece in [*sorted(seen), (record.nbytes, 0, 0)]:
        if start < at:  # views that share elements: their sums do not add up to the record's
            if any(checksum(record, first, n) != again for first, n, again in seen):
                raise CheckpointError(f"{record.path} is damaged, or was read wrong: a tensor is not the same twice")
            crc = checksum(record, 0, record.nbytes)
            break
        crc = checksum(record, at, start - at, crc)
        crc, at = crc_join(crc, piece, nbytes), start + nbytes
    if crc != record.crc:
        raise CheckpointError(f"{record.path} is damaged: a tensor does not match the checksum saved with it")


# -----------------------------------------------------------------------------
# reading a checkpoint


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


CHECKS = {  # what `strict` can be without, one by one
    "steps": ("--any_step", "goes on, if the optimizer was started anew in mid-run"),
    "states": ("--drop_states", "leaves them out"),
    "patterns": ("--unused_patterns", "goes on without them"),
}


def complain(check, strict, problem):
    """An error where this check is wanted, a warning where it is not. strict: the names of the wanted ones, or True."""
    flag, effect = CHECKS[check]
    if strict is True or strict and check in strict:
        raise CheckpointError(f"{problem} ({flag} {effect}; --no_strict permits that and more)")
    warnings.warn(f"{problem}: {flag} {effect}", stacklevel=3)


def flat_states(optimizer, group, size):
    """({state: flat tensor}, step or None, {what has no place: value}) of a parameter group, or ZeRO-3 sub-group, of
    one shard. A state of the optimizer that belongs to every element is as long as the fp32 slice; torch keeps padding."""
    fp32 = flat_groups(optimizer)[group]
    base = base_optimizer(optimizer)["state"].get(group, {})
    states, lost, step = {"fp32": fp32}, {}, None
    for key, value in base.items():
        if key == "step" and (not isinstance(value, Tensor) or math.prod(value.size) == 1):
            step = in_memory(value) if isinstance(value, Tensor) else value
        elif key not in ("fp32", "step") and isinstance(value, Tensor) and len(value.size) == 1 and (
            fp32.size[0] <= value.size[0] <= size
        ):  # fmt: skip
            states[key] = value
        elif value is not None:
            one = isinstance(value, Tensor) and math.prod(value.size) == 1
            lost[key] = number(in_memory(value)) if one else value if not isinstance(value, Tensor) else None
    return states, step, lost


def flat_groups(optimizer):
    """The fp32 slices, in a shard of any stage."""
    return optimizer["fp32_flat_groups" if "fp32_flat_groups" in optimizer else "single_partition_of_fp32_groups"]


def base_optimizer(optimizer):
    """The state of PyTorch's optimizer, in a shard of any stage. With elastic_checkpoint it is a list of the groups'
    states, without padding, and the hyper-parameters are not saved."""
    base = optimizer["optimizer_state_dict" if "fp32_flat_groups" in optimizer else "base_optimizer_state"]
    if not isinstance(base, list):
        return base
    step = {"step": optimizer["base_optimizer_state_step"]} if "base_optimizer_state_step" in optimizer else {}
    groups = [{"params": [i]} | step for i in range(len(base))]
    return {"state": dict(enumerate(base)), "param_groups": groups}


def number(step):
    """The value of a step count, a tensor in memory or a number."""
    if not isinstance(step, Tensor):
        return step
    code = {"FloatStorage": "<f", "DoubleStorage": "<d", "IntStorage": "<i", "LongStorage": "<q"}.get(step.storage.kind)
    return struct.unpack(code, step.storage.pieces[0][0])[0] if code else bytes(step.storage.pieces[0][0])


@contextlib.contextmanager
def blame(path):
    """Whatever a file lacks that it should hold is said in one line with its name."""
    try:
        yield
    except (CheckpointError, OSError, MemoryError):
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path} does not hold what a ZeRO checkpoint does: {type(error).__name__}: {error}"
        ) from error


def slice_size(optimizer, group):
    """How many elements of a group are in the slice of one rank, at ZeRO-1/2, padding included."""
    size = optimizer["single_partition_of_fp32_groups"][group].size[0]
    return size + (optimizer["group_paddings"][group] if "zero_stage" in optimizer else 0)  # BF16_Optimizer saves it


def expert_layers(model):
    """{parameter: its layer} of the experts of AutoEP, of which every rank holds as many, in the order of the ranks."""
    layers = model.get("ds_autoep_layers") or []
    for layer in layers:
        held = [rank["experts"] for rank in (layer.get("expert_placement") or {"ranks": []})["ranks"]]
        total, local = layer["num_experts"], layer["num_local_experts"]
        even = [list(range(at, at + local)) for at in range(0, total, local)]
        if total != local * layer["ep_size"] or held and held != even:
            raise CheckpointError(f"the experts of {layer['expert_key_prefix']} are not spread evenly over the ranks")
    return {f"{layer['expert_key_prefix']}.{weight}": layer for layer in layers for weight in ("w1", "w2", "w3")}


def expert_teams(layer, count, config):
    """The ranks that hold the same experts, and cut their states among each other; the first experts' ranks first."""
    size, rest = divmod(count, layer["ep_size"])
    if rest:
        raise ValueError(f"{count} ranks cannot hold the experts in {layer['ep_size']} parts")
    if config.get("use_data_before_expert_parallelism"):
        return [range(at, at + size) for at in range(0, count, size)]
    return [range(part, count, layer["ep_size"]) for part in range(layer["ep_size"])]


class Layout:
    """Where the parameters of a group lie in the slices of its ranks. teams: those ranks; of experts, the ranks of each
    part of them, as each has a slice of its own part alone.

    ZeRO-1/2: a group's parameters are laid end to end and cut into one slice per rank. The shard says so, too, but with
    round_robin_gradients it is wrong. ZeRO-3: every parameter is cut by itself, ceil(numel / ranks) elements per rank.
    """

    def __init__(self, optimizer, group, shapes, teams):
        self.teams, self.ranks, self.stage3, at = teams, len(teams[0]), "fp32_flat_groups" in optimizer, 0
        counts, ranks = optimizer["partition_count"], self.ranks
        if not isinstance(counts, int) and counts[group] != ranks:
            raise ValueError(f"group {group} is cut for {counts[group]} ranks and not for {ranks}")
        alignment = (optimizer.get("param_alignment_paddings") or {group: None})[group] or [0] * len(shapes)
        self.places = {}  # name: (where it begins, its elements), at ZeRO-3 (where in every slice, its elements)
        for (name, shape), padding in zip(shapes.items(), alignment, strict=True):
            numel = math.prod(shape)
            self.places[name] = at, numel
            at += math.ceil(numel / ranks) if self.stage3 else numel + padding
        self.end, self.size = at, at if self.stage3 else slice_size(optimizer, group)

    def fragment(self, name):
        """(first rank, starts in the slices of it and the next ranks, elements there)."""
        at, numel = self.places[name]
        if self.stage3:
            share = math.ceil(numel / self.ranks)
            full, rest = divmod(numel, share) if numel else (0, 0)
            sizes = array("Q", [share]) * full + array("Q", [rest, *[0] * self.ranks])[: self.ranks - full]
            return 0, array("Q", [at]) * self.ranks, sizes
        ranks = range(at // self.size, math.ceil((at + numel) / self.size)) if numel else range(0)
        cuts = [max(at, rank * self.size) for rank in ranks] + [at + numel]
        starts = array("Q", (start - rank * self.size for start, rank in zip(cuts, ranks, strict=False)))
        return ranks.start, starts, array("Q", (b - a for a, b in itertools.pairwise(cuts)))

    def check(self, rank, optimizer, group, states, round_robin):
        """The shard of this rank is cut like this, and its states hold the elements."""
        fp32 = states["fp32"]
        team = next(team for team in self.teams if rank in team)
        if self.stage3 and fp32.size[0] != self.end:
            raise ValueError(f"group {group} is not cut for {self.ranks} ranks")
        if self.stage3 and len(self.teams) > 1:
            told = optimizer["ds_zero_partition_groups"][group]["partition_ranks"]
            if list(told) != list(team):
                raise ValueError(f"group {group} is cut for the ranks {told} and not for {list(team)}")
        rank = team.index(rank)
        for flat in states.values():
            cut(flat, 0, self.end if self.stage3 else max(0, min(self.end - rank * self.size, self.size)))
        if self.stage3 or round_robin:
            return
        if self.end > self.ranks * self.size:
            raise ValueError(f"group {group} has {self.end} elements, its slices have fewer")
        said = {name: place.state for name, place in optimizer["param_slice_mappings"][group].items()}
        begin, wanted = rank * self.size, {}
        for name, (at, numel) in self.places.items():
            first, last = max(at, begin), min(at + numel, begin + self.size)
            if first < last:
                wanted[name] = {"start": first - begin, "numel": last - first}
        if said != wanted:
            name = next(name for name in (*wanted, *said) if said.get(name) != wanted.get(name))
            raise ValueError(f"{name} is not where param_slice_mappings says")


def alone(value):
    """share() of the only process."""
    return [value]


def read_data_parallel(folder, mp_rank, shards, pool, trust, strict, rank=0, ranks=1, share=alone):
    """The checkpoint of one model-parallel rank, put together over its data-parallel ranks: descriptions in memory,
    tensors as byte ranges. Of several processes, rank of ranks, each reads some of the shards.

    Returns (model, optimizer, parameters): rank 0's model states, `module` cut down to buffers and whole frozen
    parameters; rank 0's optimizer state; {name: {"shape", "step", "states": {state: (kind, pieces)}}}.
    """
    with together(share):
        low = min(shards)
        with blame(shards[low]):
            first = load(shards[low], trust)["optimizer_state_dict"]
            stage3, count = "fp32_flat_groups" in first, first["partition_count"]
            count = range(count if isinstance(count, int) else max(count)).stop  # a TypeError for what is no number
        for missing in (r for r in range(count) if r not in shards):
            name = shards[low].name.replace(f"_rank_{low}_", f"_rank_{missing}_", 1)
            raise CheckpointError(f"{folder / name} is missing")
        if max(shards) >= count:
            raise CheckpointError(f"{shards[max(shards)]} is one too many: {shards[low].name} says {count} ranks")
        prefixes = [f"zero_pp_rank_{r}_" for r in range(count)] if stage3 else [""]
        paths = [folder / f"{prefix}mp_rank_{mp_rank:02d}_model_states.pt" for prefix in prefixes]
        with reading(paths[0]):
            archive = Archive(paths[0])
            like, model = archive.pickle(), archive.content(trust)
            keys = {id(record): key for key, record in archive.records.items()}
        with blame(paths[0]):
            shapes, parameters = model["param_shapes"], {}
            for group in shapes:
                parameters |= {name: {"shape": tuple(s), "step": None, "states": {}} for name, s in group.items()}
            if model["dp_world_size"] != count:
                raise CheckpointError(f"{paths[0]} is of {model['dp_world_size']} ranks, {shards[low].name} of {count}")
            experts = expert_layers(model)
            config = model["ds_config"] if isinstance(model["ds_config"], dict) else {}  # older versions: a file's path
            round_robin = (config.get("zero_optimization") or {}).get("round_robin_gradients")
        if not experts and list(folder.glob("layer_*_expert_*")):
            raise CheckpointError(f"{folder} has experts that are not AutoEP's: they are not converted")
        with blame(shards[low]):
            layouts = []
            for group, names in enumerate(shapes):
                parts = [experts[name] for name in names if name in experts]
                teams = [expert_teams(layer, count, config) for layer in parts] or [[range(count)]]
                if any(other != teams[0] for other in teams) or parts and len(parts) < len(names):
                    raise ValueError(f"group {group} holds not only experts in {len(teams[0])} parts")
                layouts.append(Layout(first, group, names, teams[0]))

        def read_shard(i):
            """What a shard holds: [({state: (kind, record, start)}, step) of every group]."""
            path = shards[i]
            with blame(path):
                optimizer = first if i == low else load(path, trust)["optimizer_state_dict"]
                if len(flat_groups(optimizer)) != len(shapes):
                    raise CheckpointError(f"{path} has another number of parameter groups than {paths[0].name}")
                groups, lost = [], []
                for group, layout in enumerate(layouts):
                    if not stage3 and slice_size(optimizer, group) != layout.size:
                        raise CheckpointError(f"{path}: group {group} has a slice of another size")
                    states, step, without = flat_states(optimizer, group, layout.size)
                    layout.check(i, optimizer, group, states, round_robin)
                    groups.append(({key: (t.storage.kind, *cut(t, 0, 0)[0][:2]) for key, t in states.items()}, step))
                    lost.append(without)
                return groups, lost

        def read_model(i):
            """The frozen fragments in the model states of a rank: {name: (kind, record, start, elements)}."""
            path, state, found = paths[i], model, {}
            with reading(path):
                archive = Archive(path)
                alike = archive.pickle() == like  # most are, and then only the records are others
                if not alike:
                    state = archive.content(trust)
            with blame(path):
                for key in ("param_shapes", "buffer_names", "frozen_param_shapes", "global_steps"):
                    if state.get(key) != model.get(key):
                        raise CheckpointError(f"{path} has other {key} than {paths[0].name}")
                for name, layer in expert_layers(state).items():
                    if i not in expert_teams(layer, count, config)[layer["ep_rank"]]:
                        raise CheckpointError(f"{path}: rank {i} should not hold part {layer['ep_rank']} of {name}")
                for name in state.get("frozen_param_shapes") or {}:
                    part = state["frozen_param_fragments"][name]
                    ((record, start, _),) = cut(part)
                    if alike:
                        record, wanted = archive.record(keys[id(record)]), record.nbytes
                        archive.expect(record.nbytes == wanted)
                    found[name] = part.storage.kind, record, start, math.prod(part.size)
            return found

        mine = range(rank, count, ranks)
        optimizers = dict(zip(mine, pool.map(read_shard, mine), strict=True))
        models = dict(zip(mine, pool.map(read_model, mine), strict=True)) if stage3 else {}
    for others, more in share((optimizers, models)):
        optimizers |= others
        models |= more
    every = [optimizers[r] for r in range(count)]
    for i, (group, layout) in itertools.product(range(1, count), enumerate(layouts)):
        ours, theirs = every[i][1][group], every[0][1][group]
        for key in ours.keys() & theirs.keys():
            if ours[key] != theirs[key]:  # a norm of its slice, say
                apart = f"{shards[i]}: {key} of the optimizer is {ours[key]}, in {shards[low].name} it is {theirs[key]}"
                for name in layout.places:
                    parameters[name]["apart"] = apart
    lost = sorted({str(name) for _, groups in every for group in groups for name in group})
    if lost:
        problem = f"{shards[low]}: {', '.join(lost)} of the optimizer: a universal checkpoint has no place for"
        complain("states", strict, f"{problem} what belongs to no single element")
    with blame(shards[low]):
        merge(shards, layouts, [groups for groups, _ in every], parameters)
        check_steps(shards, [groups for groups, _ in every], paths[0], model, strict)
        for name, layer in experts.items():
            local, *shape = parameters[name]["shape"]
            if local != layer["num_local_experts"]:
                raise ValueError(f"{name} has {local} experts, its layer {layer['num_local_experts']}")
            how = {"cat_dim": 0, "is_expert_param": True, "ep_num_experts": layer["num_experts"]}
            parameters[name] |= {"shape": (layer["num_experts"], *shape), "how": how}
    with blame(paths[0]):
        if model["module"] is not None:
            frozen = [models[r] for r in range(count)] if stage3 else None
            model["module"] = module_of(paths[0], model, frozen, parameters, strict, mp_rank)
            model["frozen_param_fragments"] = None
    return model, first, parameters


def merge(shards, layouts, every, parameters):
    """Every state of every parameter as pieces, which the states of a parameter share as far as they can."""
    for group, layout in enumerate(layouts):
        flats, sizes = {}, {}
        for key in every[0][group][0]:
            columns = [groups[group][0].get(key) for groups in every]
            if None in columns or len({kind for kind, _, _ in columns}) > 1:
                rank = next(r for r, column in enumerate(columns) if column is None or column[0] != columns[0][0])
                raise CheckpointError(f"{shards[rank]}: {key} of group {group} is not what it is in {shards[0].name}")
            kinds, records, begins = zip(*columns, strict=True)
            flats[key] = kinds[0], list(records), begins
        for rank, groups in enumerate(every):
            if groups[group][0].keys() != flats.keys():
                raise CheckpointError(f"{shards[rank]} has other optimizer states than {shards[0].name}")
        for name in layout.places:
            first, offsets, numels = layout.fragment(name)
            parameter, starts, last = parameters[name], {}, first + len(numels)
            parameter["step"] = every[0][group][1]
            for team, (key, (kind, records, begins)) in itertools.product(layout.teams, flats.items()):
                ours = slice(team[first:last].start, team[first:last].stop, team.step)
                width, begin = ELEMENT_SIZE[kind], begins[ours]
                if (width, begin) not in starts:
                    if len(set(begin)) == len(set(offsets)) == 1:
                        places = array("Q", [begin[0] + offsets[0] * width]) * len(begin)
                    else:
                        places = array("Q", (b + at * width for b, at in zip(begin, offsets, strict=True)))
                    if (alike := (width, numels.tobytes())) not in sizes:
                        sizes[alike] = array("Q", (n * width for n in numels))
                    starts[width, begin] = places, sizes[alike]
                held = records if len(numels) == len(records) else records[ours]
                places, nbytes = starts[width, begin]
                pieces = Ranges(records=held, starts=places, sizes=nbytes)
                if team is not layout.teams[0]:  # the next experts
                    pieces = Ranges([*parameter["states"][key][1], *pieces])
                parameter["states"][key] = kind, pieces


def module_of(path, model, frozen, parameters, strict, mp_rank):
    """What no optimizer holds: {name: tensor} of the buffers, and of the frozen parameters, whole. frozen: of every
    rank at ZeRO-3, where each has a part; elsewhere `module` has them like the buffers."""
    module, whole_ones = model["module"], {}
    if not isinstance(module, dict):
        raise TypeError(f"module is {type(module).__name__}")
    shapes = (model.get("frozen_param_shapes") or {}) if frozen else {}
    for name, shape in shapes.items():
        left, pieces = math.prod(shape), []
        for part in frozen:
            kind, record, start, numel = part[name]
            numel = min(left, numel)
            pieces, left = [*pieces, (record, start, numel * ELEMENT_SIZE[kind])], left - numel
        if left:
            raise CheckpointError(f"{path}: {left} elements of the frozen {name} are missing")
        whole_ones[name] = whole(frozen[0][name][0], Ranges(pieces), shape)
    accounted = {*parameters, *(model.get("shared_params") or {}), *whole_ones}
    for layer in model.get("ds_autoep_layers") or ():  # the router has a second name, that of the model's own
        inside = f"{layer['module_path']}."
        routers = {name.removeprefix(f"{inside}router.") for name in parameters if name.startswith(f"{inside}router.")}
        names = (name for name in module if name.startswith(inside))
        accounted |= {name for name in names if name.removeprefix(inside).partition(".")[2] in routers}
    kept = {*model["buffer_names"], *(name for name in module if name not in accounted)}
    if frozen:  # of a parameter that is in no group ZeRO-3 saves the name alone; what has elements is something else
        lost = {name for name in kept - {*model["buffer_names"]} if isinstance(module[name], Tensor)}
        lost = {name for name in lost if 0 in module[name].size and not name.endswith("_extra_state")}
        if lost and not mp_rank:  # the others have the same names, but only here shared_params says which are tied
            problem = f"{path}: no parameter group holds {', '.join(sorted(lost))}"
            complain("states", strict, f"{problem}, and DeepSpeed saved nothing of it")
        kept -= lost
    return {name: compact(module[name]) for name in sorted(kept)} | whole_ones


def check_steps(shards, every, path, model, strict):
    """All files are of one step."""
    steps = [[number(step) for _, step in groups] for groups in every]
    for rank, counted in enumerate(steps):
        if counted != steps[0]:
            raise CheckpointError(f"{shards[rank]} is at optimizer step {counted}, {shards[0].name} at {steps[0]}")
    with blame(path):
        wanted = model["global_steps"] - model["skipped_steps"]
    counted = {step for step in steps[0] if step is not None}
    if counted - {wanted}:
        problem = f"{path} is of step {wanted}, the optimizer of step {sorted(counted)}: they were not saved together"
        complain("steps", strict, problem)


# -----------------------------------------------------------------------------
# tensor and pipeline parallelism


def blocks_along(dim, size, widths):
    """Where the shards of a tensor lie in it. It is one, or several side by side along dim, and each is cut by itself:
    widths[sub][rank]. Returns [(rank, shape, strides and offset in the shard, strides and offset in the whole)]."""
    blocks, strides = [], whole("", [], size).stride
    at, in_shard = 0, [0] * len(widths[0])
    for sub in widths:
        for rank, width in enumerate(sub):
            mine = [sum(w[rank] for w in widths) if d == dim else n for d, n in enumerate(size)]
            stride = whole("", [], mine).stride
            block = [width if d == dim else n for d, n in enumerate(size)]
            blocks.append((rank, block, stride, in_shard[rank] * stride[dim], strides, at * strides[dim]))
            in_shard[rank], at = in_shard[rank] + width, at + width
    return blocks


def collapsed(shape, stride, full_stride):
    """([(count, step in the shard, step in the whole) of every dimension that remains], elements that follow each other
    in both)."""
    dims = []
    for n, step, full_step in zip(shape, stride, full_stride, strict=True):
        if dims and dims[-1][1:] == (n * step, n * full_step):
            n *= dims.pop()[0]
        if n != 1:
            dims.append((n, step, full_step))
    return (dims[:-1], dims[-1][0]) if dims and dims[-1][1:] == (1, 1) else (dims, 1)


def stripes(blocks, levels=1):
    """Blocks in the order of the whole: [(count, [segments], [copies of a segment, on other ranks])], a segment being
    (rank, offset in its shard, step there, elements), and the number of elements. A section has `count` rows, in which
    segment follows on segment. None if they do not cover the whole exactly once."""
    found, sections, end = [], [], 0
    for rank, shape, stride, start, full_stride, there in blocks:
        outer, inner = collapsed(shape, stride, full_stride)
        outer, rows = (outer[:-1], outer[-1:]) if levels else (outer, [])
        count, step, full_step = rows[0] if rows else (1, 0, inner)
        for index in itertools.product(*(range(n) for n, _, _ in outer)) if 0 not in shape else ():
            at = there + sum(i * dim[2] for i, dim in zip(index, outer, strict=True))
            here = start + sum(i * dim[1] for i, dim in zip(index, outer, strict=True))
            found.append((at, count, full_step, inner, rank, here, step))
    for at, count, full_step, inner, *segment in sorted(found):
        last = sections[-1] if sections else None
        if last and last["begin"] <= at < last["begin"] + last["row"] and count == last["count"]:
            if at == last["at"] and inner == last["inner"] and full_step == last["row"]:
                last["copies"].append(((*last["segments"][-1],), (*segment, inner)))
                continue
            if at != last["filled"] or full_step != last["row"]:
                break
        elif at == end and (not last or last["filled"] == last["begin"] + last["row"]):
            last = {"begin": at, "row": full_step, "count": count, "segments": [], "copies": []}
            sections.append(last)
            end = at + count * full_step
        else:
            break
        last |= {"at": at, "inner": inner, "filled": at + inner}
        last["segments"].append((*segment, inner))
    else:
        if not sections or sections[-1]["filled"] == sections[-1]["begin"] + sections[-1]["row"]:
            return sections, end
    return stripes(blocks, 0) if levels else (None, 0)


class TensorParallel:
    """Puts the shards of tensor-parallel ranks together, by the universal_checkpoint_info that the checkpoint carries.

    The names of its entries, and what each does, are DeepSpeed's (deepspeed/checkpoint/constants.py). Every layout is a
    permutation of byte ranges, except the average.
    """

    LISTS = ("tp_replicated_parameter_patterns", "parameter_to_average_patterns", "vocabulary_parameter_patterns")
    LISTS += ("parameter_with_row_parallelism_patterns", "parameter_with_2_sub_params_cat_dim_0")

    def __init__(self, info, degree, folder):
        self.info, self.degree, self.folder, self.unused = info or {}, degree, folder, set()
        if degree > 1 and not info:
            raise CheckpointError(
                f"{folder} has {degree} tensor-parallel ranks and no universal_checkpoint_info, which says how they "
                "are cut: it must be in the client state when the checkpoint is saved"
            )
        self.version = self.info.get("universal_checkpoint_version", 0.0)
        self.affine = self.info.get("affine_map") or {"params": {}, "version": 1}
        if self.affine.get("version", 1) > 1:
            raise CheckpointError(f"{folder}: affine map of version {self.affine['version']}, and only 1 is known")
        # One rank's parameters are whole, and still the file says how more ranks would cut them.
        self.described = any(self.info.get(key) for key in (*self.LISTS, "parameter_with_sub_params"))
        rows = "parameter_with_row_parallelism_patterns"
        if degree == 1 and info and not (self.info.get(rows) or self.affine["params"] or "ds_autoep_layers" in info):
            warnings.warn(
                f"{folder}: universal_checkpoint_info names no row-parallel weights ({rows}): if the model has some, "
                "the result is wrong on more than one tensor-parallel rank",
                stacklevel=2,
            )
        if degree > 1:
            self.unused = {pattern for key in self.LISTS for pattern in self.info.get(key, [])}
            self.unused |= {p for sub in self.info.get("parameter_with_sub_params", []) for p in sub["patterns"]}

    def match(self, patterns, name):
        matched = [pattern for pattern in patterns if re.match(pattern, name)]
        self.unused -= set(matched)
        if len(matched) > 1:
            raise CheckpointError(f"{self.folder}: {name} matches more than one pattern: {', '.join(matched)}")
        return matched[0] if matched else None

    def tied(self, name):
        return self.match(self.info.get("pipeline_replicated_parameter_patterns", []), name)

    def merge(self, name, shards):
        """One parameter from its shards, in the order of the tensor-parallel ranks."""
        if "how" in shards[0]:  # experts
            return shards[0]
        if self.degree == 1 and not self.described:
            return shards[0] | {"how": {"cat_dim": 0}}
        found = {key: self.match(self.info.get(key, []), name) for key in self.LISTS}
        sub = next((s for s in self.info.get("parameter_with_sub_params", []) if self.match(s["patterns"], name)), None)
        if self.match(self.info.get("autotp_unsupported_parameter_patterns") or {}, name):
            raise CheckpointError(f"{self.folder}: DeepSpeed did not record how {name} is cut")
        two = found["parameter_with_2_sub_params_cat_dim_0"]
        shapes, how = [shard["shape"] for shard in shards], {}
        pattern = self.match(self.affine["params"], name)
        if pattern:
            shape, blocks = self.affine_blocks(name, self.affine["params"][pattern])
        elif found["tp_replicated_parameter_patterns"]:
            shape = shapes[0]
            stride = whole("", [], shape).stride
            blocks = [(rank, shape, stride, 0, stride, 0) for rank in range(self.degree)]
        elif found["parameter_to_average_patterns"]:
            return self.average(shards)
        elif sub and not two:
            shape, blocks, how = self.sub_parameters(name, shapes, sub)
        else:
            dim = 1 if found["parameter_with_row_parallelism_patterns"] and not two else 0
            shape = tuple(sum(s[d] for s in shapes) if d == dim else n for d, n in enumerate(shapes[0]))
            parts, how = (2, {"cat_dim": 0, "param_n_sub_params": 2}) if two else (1, {"cat_dim": dim})
            blocks = blocks_along(dim, shape, parts * [[s[dim] // parts for s in shapes]])
        states = self.put_together(name, shards, shape, blocks)
        if found["vocabulary_parameter_patterns"]:
            shape = (self.info["original_vocab_size"], *shape[1:])
            for key, (kind, pieces) in states.items():
                states[key] = kind, Ranges(pieces.cut(0, math.prod(shape) * ELEMENT_SIZE[kind]))
            how["vocab_tensor"] = True
        return {"shape": shape, "step": shards[0]["step"], "states": states, "how": how}

    def put_together(self, name, shards, shape, blocks):
        """The states of a parameter in the order of the whole; what several ranks hold is compared."""
        sections, end = stripes(blocks)
        if sections is None or end != math.prod(shape):
            raise CheckpointError(f"{self.folder}: the shards of {name} do not cover its elements exactly once")
        states = {}
        for key, (kind, _) in shards[0]["states"].items():
            width, ranges = ELEMENT_SIZE[kind], [shard["states"][key][1] for shard in shards]

            def strided(count, segments, width=width, ranges=ranges):
                return count, [(ranges[rank], at * width, step * width, n * width) for rank, at, step, n in segments]

            for section in sections:
                for original, copy in section["copies"]:
                    a, b = (Strided([strided(section["count"], [segment])]) for segment in (original, copy))
                    if not same(a, b):
                        raise CheckpointError(
                            f"{self.folder}: {key} of {name} differs on tensor-parallel rank {copy[0]}"
                        )
            states[key] = (kind, Strided([strided(section["count"], section["segments"]) for section in sections]))
        return states

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
        return tuple(entry["logical_shape"]), blocks

    def sub_parameters(self, name, shapes, sub):
        dim, spec = sub["partition_dim"], sub["shape"][sub["partition_dim"]]
        total = sum(math.prod(shape) for shape in shapes)
        if isinstance(spec, int):  # before version 0.4: the number of sub-parameters of one size
            spec = (sum(shape[dim] for shape in shapes) // spec,) * spec
        widths = [[size // self.degree] * self.degree for size in spec]
        if self.version >= 0.4:
            widths = self.info["sub_param_shard_widths"][self.match(sub["patterns"], name)]
        if [sum(width) for width in widths] != list(spec):
            raise CheckpointError(f"{self.folder}: the widths of {name}, {widths}, do not make up its sizes {spec}")
        size = [sum(n) if isinstance(n, (tuple, list)) else n for n in sub["shape"]]
        size[dim] = sum(spec)
        if -1 in size:
            size[size.index(-1)] = total // -math.prod(size)
        if math.prod(size) != total:
            raise CheckpointError(f"{self.folder}: {name} has {total} elements, which do not make up {size}")
        description = opaque("deepspeed.checkpoint.universal_checkpoint", "SubparamShape")
        described = description.__new__(description)
        shape = [spec if d == dim else n for d, n in enumerate(sub["shape"])]
        described.state = {"patterns": sub["patterns"], "shape": tuple(shape), "partition_dim": dim}
        return tuple(size), blocks_along(dim, size, widths), {"sub_param_shape": described}

    def average(self, shards):
        """The mean of the shards, in the order and the precision of PyTorch's."""
        states = {}
        for key, (kind, _) in shards[0]["states"].items():
            code = {"FloatStorage": "f", "DoubleStorage": "d"}[kind]
            total, *others = (array(code, joined(shard["states"][key][1])) for shard in shards)
            for other in others:
                total = array(code, map(operator.add, total, other))
            content = array(code, (value / len(shards) for value in total)).tobytes()
            states[key] = (kind, [(content, 0, len(content))])
        return shards[0] | {"states": states, "how": {}}


def read(folder, workers, trust=False, strict=True, **team):
    """The whole checkpoint: (model states of every model-parallel rank, rank 0's optimizer state, parameters), where
    parameters is {name: {"shape", "step", "states": {state: (kind, pieces)}, "how": what the loader needs to cut it}}.
    """
    share = team.get("share", alone)
    with together(share):
        if not folder.is_dir():
            raise CheckpointError(f"{folder} does not exist")
        if (folder / "zero").is_dir():
            raise CheckpointError(f"{folder} is a universal checkpoint already")
        shards = find_shards(folder)
    with ThreadPoolExecutor(workers) as pool:
        parts = [read_data_parallel(folder, mp, shards[mp], pool, trust, strict, **team) for mp in sorted(shards)]
    models, optimizers, parameters = zip(*parts, strict=True)
    with blame(folder):
        if len(models) > 1 and any(model.get("ds_autoep_layers") for model in models):
            raise CheckpointError(f"{folder} has experts and model-parallel ranks, which are not converted together")
        degrees = models[0].get("checkpoint_parallel_dimensions") or {}
        pipeline = degrees.get("pp_degree") or (1 if models[0]["module"] is not None else len(shards))
        tensor = degrees.get("tp_degree") or len(shards) // pipeline
        if sorted(shards) != list(range(tensor * pipeline)):
            names = ", ".join(f"mp_rank_{mp:02d}" for mp in sorted(shards))
            raise CheckpointError(f"{folder} should have {tensor} tensor x {pipeline} pipeline ranks, and has {names}")
        for model in models:
            if model["global_steps"] != models[0]["global_steps"]:
                raise CheckpointError(f"{folder}: its model-parallel ranks are of different steps")
            if len(model["param_shapes"]) != len(models[0]["param_shapes"]):  # the loader takes groups by their number
                raise CheckpointError(f"{folder}: a pipeline stage lacks a parameter group that others have")
        merged, merger = {}, TensorParallel(models[0].get("universal_checkpoint_info"), tensor, folder)
        for stage in range(pipeline):
            ranks = parameters[stage * tensor : (stage + 1) * tensor]
            if any(rank.keys() != ranks[0].keys() for rank in ranks):
                raise CheckpointError(f"{folder}: tensor-parallel ranks of stage {stage} hold different parameters")
            for name in ranks[0]:
                if name in merged and not merger.tied(name):
                    raise CheckpointError(f"{folder}: {name} is in two pipeline stages and is not declared as tied")
                if name not in merged:
                    merged[name] = merger.merge(name, [rank[name] for rank in ranks])
        if merger.unused:
            problem = f"{folder}: universal_checkpoint_info has patterns that match no parameter: "
            complain("patterns", strict, problem + ", ".join(sorted(merger.unused)))
    return models, optimizers[0], merged


# -----------------------------------------------------------------------------
# writing

ZIP64 = 0xFFFFFFFF  # sizes and positions from here on take 64 bits


class Workspace(threading.local):
    """One buffer per thread: what a conversion needs of memory, whatever the size of the tensors."""

    def __init__(self):
        self.buffer = memoryview(bytearray(CHUNK))


WORKSPACE = Workspace()


def copy(pieces, file, change=memoryview):
    """Append the pieces to a file, changed, through the buffer of this thread. Returns their CRC-32."""
    buffer, filled, crc, spans = WORKSPACE.buffer, 0, 0, {}
    for record, start, nbytes in rows_together(pieces) if isinstance(pieces, Strided) else pieces:
        done, piece = 0, 0
        while done < nbytes:
            if filled == CHUNK:
                write_all(file, change(buffer))
                filled = 0
            part = buffer[filled : min(CHUNK, filled + nbytes - done)]
            got = read_into(part, record, start + done)
            piece = zlib.crc32(part[:got], piece)
            filled, done = filled + got, done + got
        crc = crc_join(crc, piece, nbytes)
        if isinstance(record, Record):
            first, size, before = spans.get(record, (start, 0, 0))
            if first + size != start:
                record.seen.extend((first, size, before))
                first, size, before = start, 0, 0
            spans[record] = first, size + nbytes, crc_join(before, piece, nbytes)
    for record, span in spans.items():
        record.seen.extend(span)
    write_all(file, change(buffer[:filled]))
    return crc


def rows_together(strided):
    """The pieces of stripes; where the rows are short, and follow each other in their shards, many of them as one."""
    at = 0
    for (count, segments), width in zip(strided.sections, strided.widths, strict=True):
        if count == 1 or width > CHUNK >> 4 or any(step != size for _, _, step, size in segments):
            yield from strided.cut(at, count * width)
            at += count * width
            continue
        at, step = at + count * width, min(8192, CHUNK // width)
        for row in range(0, count, step):
            rows, columns = min(step, count - row), []
            for ranges, first, _, size in segments:
                column = bytearray()
                for record, start, nbytes in ranges.cut(first + row * size, rows * size):
                    data = read_range(record, start, nbytes)
                    if isinstance(record, Record):
                        record.seen.extend((start, nbytes, zlib.crc32(data)))
                    column += data
                columns.append(struct.iter_unpack(f"{size}s", column))
            yield b"".join(part for parts in zip(*columns, strict=True) for (part,) in parts), 0, rows * width


def gather(batch):
    """The bytes of each of several Ranges that lie side by side in the same records: every record is read once."""
    starts, sizes = (zip(*(getattr(ranges, column) for ranges in batch), strict=True) for column in ("starts", "sizes"))
    rows, splits = [], {}
    for record, begins, lengths in zip(batch[0].records, starts, sizes, strict=True):
        split = splits.get((begins, lengths))
        if split is None:  # the gap before each piece, and the piece
            ends = [begins[0], *map(operator.add, begins, lengths)]
            spans = zip(begins, ends, lengths, strict=False)
            split = splits[begins, lengths] = struct.Struct("".join(f"{b - end}x{n}s" for b, end, n in spans))
        data = read_range(record, begins[0], split.size)
        if data:
            record.seen.extend((begins[0], split.size, zlib.crc32(data)))
        rows.append(split.unpack(data))
    return [b"".join(pieces) for pieces in zip(*rows, strict=True)]


def batches_of(files):
    """The files in lists of those to write together: where pieces are small, those that lie side by side in the same
    records; elsewhere each by itself."""
    small, batches = {}, []
    for name, (_, storages) in files.items():
        ranges = storages[0].pieces if len(storages) == 1 else None
        if type(ranges) is Ranges and len(ranges.records) > 1 and ranges.nbytes < len(ranges.records) << 15:
            small.setdefault(id(ranges.records), []).append((ranges.starts[0], name, ranges))
        else:
            batches.append([name])
    for found in small.values():
        end, room = -1, 0
        for start, name, ranges in sorted(found, key=lambda entry: entry[:2]):
            pieces, nbytes = len(ranges.records), ranges.nbytes
            if not 0 <= start - end <= 4096 or room < pieces * 50 + nbytes:
                batches.append([])
                room = 4 * CHUNK
            batches[-1].append(name)
            room -= pieces * 50 + nbytes
            end = start + ranges.sizes[0]
    return batches


def write_all(file, data):
    with named(file):
        while len(data):
            data = data[file.write(data) :]


@contextlib.contextmanager
def named(file):
    """An error of the disk says which file it hit."""
    try:
        yield file
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file.name)) from error


class Pickler(pickle._Pickler):
    """Writes Opaque, Size, Storage and Tensor back as what they stand for; collects the storages. Of classes and
    functions it writes names it has read, and looks none up."""

    def __init__(self, file):
        super().__init__(file, 2)
        self.storages, self.keys = [], {}

    def save_global(self, obj, name=None):
        if is_opaque(obj) and "." in obj.__qualname__:  # protocol 2 has no name for a class in a class
            outer, name = obj.__qualname__.rsplit(".", 1)
            self.save_reduce(opaque("__builtin__", "getattr"), (opaque(obj.__module__, outer), name), obj=obj)
            return
        if not is_opaque(obj) and obj is not collections.OrderedDict and obj is not Size:
            raise CheckpointError(f"{obj!r} cannot be written: a pickle gave it another meaning")
        module, name = ("torch", "Size") if obj is Size else (obj.__module__, obj.__qualname__)
        self.write(pickle.GLOBAL + f"{module}\n{name}\n".encode())
        self.memoize(obj)

    def persistent_id(self, obj):
        if isinstance(obj, Storage):
            pieces = obj.pieces if isinstance(obj.pieces, list) and len(obj.pieces) == 1 else [(obj, 0, 0)]
            place = (obj.kind, id(pieces[0][0]), *pieces[0][1:])  # two views of one storage stay that
            if place not in self.keys:
                self.keys[place] = len(self.storages)
                self.storages.append(obj)
            module = "torch.storage" if obj.kind == "UntypedStorage" else "torch"
            numel = nbytes_of(obj) // ELEMENT_SIZE[obj.kind]
            return "storage", opaque(module, obj.kind), str(self.keys[place]), "cpu", numel

    def reducer_override(self, obj):
        if isinstance(obj, (type, types.FunctionType)):  # or pickle's own save_global would look it up
            return obj.__qualname__
        if isinstance(obj, Size):
            return Size, (tuple(obj),)
        if isinstance(obj, Tensor):
            return opaque("torch._utils", "_rebuild_tensor_v2"), (*obj, collections.OrderedDict())
        return NotImplemented


def nbytes_of(storage):
    pieces = storage.pieces
    return pieces.nbytes if isinstance(pieces, Ranges) else sum(nbytes for _, _, nbytes in pieces)


def pickled(content):
    """(pickle, the storages that it refers to): what a file is made of."""
    file, limit = io.BytesIO(), sys.getrecursionlimit()
    pickler = Pickler(file)
    try:
        sys.setrecursionlimit(max(limit, 20_000))  # it takes several calls for each level of a list in a list
        pickler.dump(content)
    except RecursionError:
        raise CheckpointError("the checkpoint holds something that is nested too deeply to be written") from None
    finally:
        sys.setrecursionlimit(limit)
    return file.getvalue(), pickler.storages


@functools.lru_cache(4096)
def state_pickle(kind, shape, *how):
    """The pickle of a state file. Layers are alike, and so are the states of each: few have to be made."""
    blank = [(None, 0, math.prod(shape) * ELEMENT_SIZE[kind])]
    return pickled({"param": whole(kind, blank, shape)} | dict(how))[0]


def write(path, content):
    """Write a .pt file, content as pickled() gives it. Returns its size."""
    data, storages = content
    small = [("data.pkl", data), ("byteorder", b"little"), ("version", b"3\n")]
    records = [*small, *((f"data/{key}", storage) for key, storage in enumerate(storages))]
    position, directory = 0, b""
    ahead, at = b"", 0  # not yet written, and where it begins: a header is known after its record only
    with open(path, "xb", buffering=0) as file:
        for name, data in records:
            name = os.fsencode(path.stem) + f"/{name}".encode()
            size = len(data) if isinstance(data, bytes) else nbytes_of(data)
            big = size >= ZIP64
            extra = struct.pack("<HHQQ", 1, 16, size, size) if big else b""
            padding = -(position + 30 + len(name) + len(extra) + 4) % 64  # torch aligns records, to map them
            extra += struct.pack("<HH", 0x4246, padding) + bytes(padding)
            start = position + 30 + len(name) + len(extra)
            if isinstance(data, bytes):
                crc = zlib.crc32(data)
            else:
                file.seek(start)
                crc = copy(data.pieces, file)
            sizes = (0xFFFFFFFF, 0xFFFFFFFF) if big else (size, size)
            fields = struct.pack("<HHHHHIII", 45 if big else 20, 0x800, 0, 0, 0x21, crc, *sizes)
            ahead += b"PK\3\4" + fields + struct.pack("<HH", len(name), len(extra)) + name + extra
            if isinstance(data, bytes):
                ahead += data
            else:
                file.seek(at)
                write_all(file, memoryview(ahead))
                ahead, at = b"", start + size
            far = ([size, size] if big else []) + ([position] if position >= ZIP64 else [])
            extra = struct.pack(f"<HH{len(far)}Q", 1, 8 * len(far), *far) if far else b""
            directory += b"PK\1\2" + struct.pack("<H", 45) + fields
            directory += struct.pack("<HHHHHI", len(name), len(extra), 0, 0, 0, 0)
            directory += struct.pack("<I", 0xFFFFFFFF if position >= ZIP64 else position) + name + extra
            position = start + size
        end = b"PK\6\6" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, *2 * [len(records)], len(directory), position)
        end += b"PK\6\7" + struct.pack("<IQI", 0, position + len(directory), 1)
        size, where = len(directory), min(position, 0xFFFFFFFF)
        end += b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, *2 * [min(len(records), 0xFFFF)], size, where, 0)
        file.seek(at)
        write_all(file, memoryview(ahead + directory + end))
        return file.tell()


def global_state(optimizer, parameters):
    """zero/optimizer_state.pt: what the loaders of ZeRO-1/2 and of ZeRO-3 each ask for, without a shard."""
    groups = base_optimizer(optimizer)["param_groups"]
    shards = ("base_optimizer_state", "param_slice_mappings", "single_partition_of_fp32_groups", "fp32_flat_groups")
    state = {key: value for key, value in optimizer.items() if key not in shards}
    step = next((p["step"] for p in parameters.values() if p["step"] is not None), groups[0].get("step"))
    state["param_groups"] = groups
    # The loader of ZeRO-3 gives every group what the first one says. Where the groups differ it had better say nothing.
    shared = {key: value for key, value in groups[0].items() if all(group.get(key) == value for group in groups)}
    state["optimizer_state_dict"] = {"state": {0: {"step": step}}, "param_groups": [shared]}
    kept = {"step", *(key for parameter in parameters.values() for key in parameter["states"])}
    held = base_optimizer(optimizer)["state"].values()
    state["left_out"] = sorted({str(key) for of_one in held for key in of_one if of_one[key] is not None} - kept)
    state.setdefault("ds_version", "0.19.8")  # ZeRO-1/2 asks for it, ZeRO-3 does not save it
    return state


def file_name(name):
    """A name from the checkpoint as part of a path, in UTF-8 whatever the locale; it must not lead elsewhere."""
    plain = isinstance(name, str) and name == os.path.normpath(name) and "\0" not in name
    if not plain or name in (".", "..") or name.startswith(("../", "/")):
        raise CheckpointError(f"{name!r} is the name of a parameter or a state, and cannot be that of a file")
    return os.fsdecode(name.encode())


def files_of(models, optimizer, parameters):
    """{path below the output folder: (pickle, storages)}."""
    files, steps = {}, {}
    for name, parameter in parameters.items():
        folder = f"zero/{file_name(name)}"
        for key, (kind, pieces) in parameter["states"].items():
            if "/" in file_name(key):
                raise CheckpointError(f"{key!r} is a state's name that leads to another folder")
            data = state_pickle(kind, parameter["shape"], *parameter["how"].items())
            files[f"{folder}/{file_name(key)}.pt"] = data, [Storage(kind, pieces)]
        if (step := parameter["step"]) is not None:
            if id(step) not in steps:  # most parameters share theirs
                steps[id(step)] = pickled(step)
            files[f"{folder}/step.pt"] = steps[id(step)]
    files["zero/optimizer_state.pt"] = pickled(global_state(optimizer, parameters))
    return files | {f"mp_rank_{mp_rank:02d}_model_states.pt": pickled(model) for mp_rank, model in enumerate(models)}


# -----------------------------------------------------------------------------
# publishing

HOST = re.sub(r"[^\w-]", "-", platform.node())
DAY = 86400


def exchange(a, b):
    """Swap two folders in one step, where the system can. Returns whether it did."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        return libc.renameat2(-100, os.fsencode(a), -100, os.fsencode(b), 2) == 0  # AT_FDCWD, RENAME_EXCHANGE
    except (OSError, AttributeError):
        return False


def beside(output, what):
    return output.with_name(f".{output.name}.{what}")


def publish(folder, output, plan):
    """Write everything to the disk, give the finished folder its final name, and let `latest_universal` point to it.
    Whenever this is interrupted, the output is the old one or the new one, and whole. plan: {file: its size}."""
    old, pointer = beside(output, "replaced"), beside(output, "pointer")
    pointer.write_bytes(os.fsencode(output.name))
    sync(folder)
    found = {os.path.join(top, name) for top, _, names in os.walk(folder) for name in names}
    for name in found | {str(folder / name) for name in plan}:
        wanted = plan.get(os.path.relpath(name, folder))
        if wanted is None or name not in found or os.path.getsize(name) != wanted:
            raise CheckpointError(f"{name} was changed by something else while it was written: nothing is published")
    replaces = output.exists()  # if so, in the place of the unfinished folder it still keeps others out
    with locked(output) if replaces else contextlib.nullcontext():
        if not replaces or not exchange(folder, output):
            if replaces:
                output.rename(old)  # unfinished() brings it back if the next line never runs
            folder.rename(output)
        pointer.rename(output.with_name("latest_universal"))
        sync(output.parent)
        remains = old if old.exists() else folder
        if replaces:
            shutil.rmtree(remains, ignore_errors=True)
            if remains.exists():
                warnings.warn(f"{remains}: the former {output.name}, which could not be removed", stacklevel=2)


@contextlib.contextmanager
def locked(folder):
    """Holds the lock of a folder, or raises BlockingIOError."""
    lock, held = os.open(folder, os.O_RDONLY), False
    try:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = os.path.samestat(os.fstat(lock), os.stat(folder))
        if not held:
            raise BlockingIOError(errno.EAGAIN, "another conversion is at work in it", str(folder))
        yield
    finally:
        os.close(lock)


def sync(folder):
    """All that was written to the file system of this folder is on the disk."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if libc.syncfs(descriptor):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(folder))
    finally:
        os.close(descriptor)


def default_output(source):
    return f"{os.path.abspath(source)}_universal"


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


def stale(folder, now):
    """Whether a folder beside the output was left by a conversion that is over. Its name says the machine and the
    process that made it. Here the process tells, on other machines that nothing has changed for a day."""
    *_, host, process, _ = folder.name.split(".")
    try:
        with locked(folder):
            pass
    except BlockingIOError:
        raise CheckpointError(f"another conversion to the same folder is running: it writes to {folder}") from None
    if host == HOST and process.isdecimal():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(process), 0)
            return int(process) == os.getpid()
        return True
    return max((os.stat(top).st_mtime for top, _, _ in os.walk(folder)), default=now) < now - DAY


@contextlib.contextmanager
def unfinished(folder, output):
    """The empty folder to write into, beside the output and locked; gone in the end unless it was published. Sweeps
    away what a killed conversion has left, and nothing of one that may be running on another machine."""
    old, pointer = beside(output, "replaced"), beside(output, "pointer")
    folder.mkdir(parents=True)
    mine = os.stat(folder)
    with locked(folder):
        try:
            for other in output.parent.iterdir():
                if other.name.startswith(beside(output, "unfinished.").name) and other != folder:
                    with contextlib.suppress(FileNotFoundError):  # its conversion has just ended
                        if stale(other, mine.st_mtime):
                            shutil.rmtree(other, ignore_errors=True)
            if old.exists():
                shutil.rmtree(old, ignore_errors=True) if output.exists() else old.rename(output)
            yield
        finally:
            if folder.exists() and os.path.samestat(mine, os.stat(folder)):
                shutil.rmtree(folder, ignore_errors=True)
                pointer.unlink(missing_ok=True)


def verify(folder, files):
    """Read the finished folder back, cut every tensor as its pieces were, and compare each byte with the source."""
    for name, (wanted, storages) in files.items():
        written, got = pickled(load(folder / name, trust=True))
        if written != wanted or not all(same(a.pieces, b.pieces) for a, b in zip(got, storages, strict=True)):
            raise CheckpointError(f"{folder / name} is not what the checkpoint holds: nothing is published")


@contextlib.contextmanager
def together(share):
    """Of several processes none goes on unless all do: each raises what one of them did."""
    problem = None
    try:
        yield
    except (CheckpointError, OSError, MemoryError) as error:
        problem = error
    problem = next((p for p in share(problem) if p is not None), None)
    if problem is not None:
        raise problem


@contextlib.contextmanager
def no_collection():
    """A hundred thousand small objects live to the end: the garbage collector would look at them again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@no_collection()
def convert(
    input_folder, output_folder=None, num_extract_workers=4, num_merge_workers=2, *,
    strict=True, trust=False, check=False, progress=False, rank=0, ranks=1, share=alone,
):  # fmt: skip
    """Convert the ZeRO checkpoint in input_folder, or in the folder below it that find_tag() finds, into a universal
    checkpoint at output_folder: without a name, the input's with _universal behind it.

    check reads the finished files back and compares them, byte by byte, with the ranges of the shards that they were
    made of, before they are published. strict=False, or the names of the CHECKS to make, permits what --no_strict does.
    Several processes share the work as rank of ranks; share(value) returns the values of all of them.
    Raises CheckpointError when the input is not a whole ZeRO checkpoint, or the output is something else's folder;
    OSError when a disk fails. Nothing has then appeared at output_folder.
    Returns {"source", "parameters", "bytes", "files", "seconds"}; source is the folder of the tag.
    """
    began = time.perf_counter()
    with contextlib.ExitStack() as stack:
        stack.callback(opened.cache_clear)
        with together(share):
            source = find_tag(input_folder)
            output = Path(os.path.realpath(output_folder or default_output(source)))
            if rank == 0:
                check_output(Path(os.path.realpath(source)), output)
        folder = beside(output, f"unfinished.{share(f'{HOST}.{os.getpid()}.{time.time_ns():x}')[0]}")
        team = {"rank": rank, "ranks": ranks, "share": share}
        models, optimizer, parameters = read(source, num_extract_workers, trust, strict, **team)
        with together(share):
            with blame(source / "*_optim_states.pt"):
                files = files_of(models, optimizer, parameters)
            if rank == 0:
                stack.enter_context(unfinished(folder, output))
                for parent in sorted({os.path.dirname(name) for name in files}):
                    os.makedirs(folder / parent, exist_ok=True)
        sizes = {name: sum(map(nbytes_of, storages)) for name, (_, storages) in files.items()}
        records = records_of(files)
        mine, loads = [], [1024 * len(files)] + [0] * (ranks - 1)  # rank 0 makes the folders and looks them through
        weight = {tuple(batch): sum(sizes[name] + 4096 for name in batch) for batch in batches_of(files)}
        for batch in sorted(weight, key=weight.get, reverse=True):  # the largest first, each to who has least so far
            least = loads.index(min(loads))
            loads[least] += weight[batch]
            mine += [batch] if least == rank else []

        def write_batch(batch):
            contents = [files[name] for name in batch]
            if len(batch) > 1:
                data = gather([storages[0].pieces for _, storages in contents])
                contents = [
                    (p, [Storage(s.kind, [(d, 0, len(d))])]) for (p, (s,)), d in zip(contents, data, strict=True)
                ]
            written = {name: write(folder / name, content) for name, content in zip(batch, contents, strict=True)}
            return written, sum(sizes[name] for name in batch)

        plan = {}
        with ThreadPoolExecutor(num_merge_workers) as pool:
            with together(share), bar(sum(sizes[name] for batch in mine for name in batch), progress) as shown:
                for written, nbytes in pool.map(write_batch, mine):
                    plan |= written
                    if shown is not None:
                        shown.update(nbytes)
                if rank:
                    sync(folder)  # its node's part; publish() does rank 0's
            seen = collections.defaultdict(lambda: array("Q"))
            places = dict(records)
            for more, ranges in share((plan, [(place, r.seen) for place, r in records if r.seen])):
                plan |= more
                for place, of_one in ranges:
                    seen[place] += of_one
            with together(share):
                for place in sorted(seen)[rank::ranks]:
                    places[place].seen = seen[place]
                    check_record(places[place])
            with together(share):
                if rank == 0:
                    for name in [name for name in plan if "/" not in name]:
                        second = f"zero_pp_rank_0_{name}"
                        plan[second] = plan[name]
                        try:
                            os.link(folder / name, folder / second)
                        except OSError:  # a file system without links
                            shutil.copyfile(folder / name, folder / second)
                    if check:
                        verify(folder, files)
                    publish(folder, output, plan)
    done = {"source": source, "parameters": len(parameters), "bytes": sum(sizes.values()), "files": len(plan)}
    return done | {"seconds": time.perf_counter() - began}


def records_of(files):
    """[((path, offset), record)] of everything that is read, in an order that all processes agree on."""
    found, every = {}, [storage.pieces for _, storages in files.values() for storage in storages]
    for pieces in every:  # which grows by what stripes are made of
        if isinstance(pieces, Strided):
            every += {id(segment[0]): segment[0] for _, segments in pieces.sections for segment in segments}.values()
        else:
            held = pieces.records if isinstance(pieces, Ranges) else [record for record, _, _ in pieces]
            found.setdefault(id(held), held)
    records = {id(r): r for held in found.values() for r in held if isinstance(r, Record)}
    return [((str(record.path), record.offset), record) for record in records.values()]


def bar(total, progress):
    """A progress bar in bytes where there are a terminal and tqdm, which comes with DeepSpeed; else None."""
    with contextlib.suppress(ImportError):
        if progress and sys.stderr.isatty():
            from tqdm import tqdm

            return tqdm(total=total, unit="B", unit_scale=True)
    return contextlib.nullcontext()


def peak_memory():
    """Megabytes."""
    with contextlib.suppress(OSError, StopIteration), open("/proc/self/status") as file:  # VmHWM is not everywhere
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1e3
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3  # also what the parent process had


# -----------------------------------------------------------------------------
# the weights alone

FORMATS = dict(Double="F64", Long="I64", Float="F32", Int="I32", Short="I16", Char="I8", Byte="U8", Bool="BOOL")
FORMATS = {f"{kind}Storage": dtype for kind, dtype in FORMATS.items()}
HALVES = ("BFloat16Storage", "HalfStorage")


def widened(kind, data):
    """The bytes of one of the HALVES as those of fp32."""
    if kind == "HalfStorage":
        return array("f", struct.unpack(f"<{len(data) // 2}e", data)).tobytes()
    halves = array("H", bytes(2 * len(data)))  # bf16 is the upper half of fp32
    halves[1::2] = array("H", bytes(data))
    return halves.tobytes()


def weights(folder, workers, strict):
    """{name: (shape, [storage])} of the parameters, the trained ones in fp32, and of the persistent buffers."""
    if universal := (folder / "zero").is_dir():
        models, parameters = [load(path, True) for path in folder.glob("mp_rank_*_model_states.pt")], {}
    else:
        models, _, parameters = read(folder, workers, True, strict)  # no object of its pickles goes into the file
    with blame(folder):
        if len(models) != 1 or (module := models[0]["module"]) is None:
            raise CheckpointError(f"{folder} has {len(models)} model-parallel ranks or a pipeline: no --safetensors")
        merger, tied = TensorParallel(None, 1, folder), (models[0].get("shared_params") or {}).keys()
        found = {name: (p["shape"], [Storage(*p["states"]["fp32"])]) for name, p in parameters.items()}
        for name in itertools.chain(*models[0]["param_shapes"]) if universal else ():
            tensor = load(folder / "zero" / file_name(name) / "fp32.pt", True)["param"]
            found[name] = tensor.size, [Storage(tensor.storage.kind, cut(tensor))]
        for name in sorted(module.keys() - found.keys() - tied):
            if not isinstance(tensor := module[name], Tensor) or tensor.storage.kind not in (*FORMATS, *HALVES):
                complain("states", strict, f"{folder}: safetensors has no place for {name}")
                continue
            (kind, pieces), _, shape, stride, _ = tensor = compact(tensor) if universal else tensor
            block = (0, shape, stride, tensor.offset, whole(kind, [], shape).stride, 0)  # it may be a view
            shard = {"states": {"fp32": (kind, Ranges(pieces))}}
            found[name] = shape, [Storage(*merger.put_together(name, [shard], shape, [block])["fp32"])]
    return found


def export(input_folder, path, workers=4, *, strict=True, progress=False):
    """Write the weights of a ZeRO or universal checkpoint, bf16 and fp16 as fp32, to one safetensors file. Raises and
    returns what convert() does."""
    began, output, source = time.perf_counter(), Path(os.path.realpath(path)), find_tag(input_folder)
    if output.suffix != ".safetensors" or output.is_dir():
        raise CheckpointError(f"{output} is not the name of a .safetensors file")
    folder = beside(output, f"unfinished.{HOST}.{os.getpid()}.{time.time_ns():x}")
    with contextlib.ExitStack() as stack, no_collection(), blame(source):
        stack.callback(opened.cache_clear)
        found, places, end = weights(source, workers, strict), {"__metadata__": {"format": "pt"}}, 0
        kinds = {name: "FloatStorage" if kind in HALVES else kind for name, (_, ((kind, _),)) in found.items()}
        order = sorted(found, key=lambda name: -ELEMENT_SIZE[kinds[name]])  # so that all are aligned
        for name in order:
            begin, end = end, end + math.prod(found[name][0]) * ELEMENT_SIZE[kinds[name]]
            places[name] = {"dtype": FORMATS[kinds[name]], "shape": found[name][0], "data_offsets": (begin, end)}
        header = json.dumps(places, ensure_ascii=False).encode()
        header += b" " * (-len(header) % 8)
        stack.enter_context(unfinished(folder, output))
        with open(folder / output.name, "xb", buffering=0) as file, bar(end, progress) as shown:
            write_all(file, struct.pack("<Q", len(header)) + header)
            for kind, pieces in (found[name][1][0] for name in order):
                copy(pieces, file, functools.partial(widened, kind) if kind in HALVES else memoryview)
                shown and shown.update(file.tell() - shown.n)
        for _, record in records_of(found):
            check_record(record)
        sync(folder)
        (folder / output.name).rename(output)
        sync(output.parent)
    done = {"source": source, "parameters": len(found), "bytes": end, "files": 1}
    return done | {"seconds": time.perf_counter() - began}


# -----------------------------------------------------------------------------
# several processes

PATIENCE = 300


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


def meet(rank, ranks, output):
    """share(value) for processes that all see the folder of the output. There rank 0 says, to this user alone, where it
    listens and which password it asks for; it hands everything on."""
    note, peers, began, told = beside(output, "meeting"), {}, time.monotonic(), False
    key, where = secrets.token_hex(32).encode(), f"to write {note}"

    def shake_hands(end, key, *steps):
        end.setblocking(True)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 1 + PATIENCE // 60, 0))  # if silent
        peer = connection.Connection(os.dup(end.fileno()))
        for step in steps:
            step(peer, key)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
        return peer

    with contextlib.ExitStack() as stack:
        if not rank:
            host = os.environ.get("MASTER_ADDR") if "SLURM_PROCID" not in os.environ else None
            server = stack.enter_context(socket.create_server(("", 0)))
            server.settimeout(0.1)
            host, port = host or platform.node(), server.getsockname()[1]
            where, draft = f"at {host}:{port}", Path(f"{note}.{os.getpid()}")
            output.parent.mkdir(parents=True, exist_ok=True)
            with open(draft, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.write(b"%s %d %s" % (host.encode(), port, key))
            draft.rename(note)
            stack.callback(note.unlink, missing_ok=True)
        while missing := sorted({*(range(1) if rank else range(1, ranks))} - peers.keys()):
            waited, whom = time.monotonic() - began, f"rank {', '.join(map(str, missing))} {where}"
            if waited > PATIENCE:
                raise CheckpointError(f"rank {rank} of {ranks} waited {PATIENCE} s for {whom}")
            if waited > PATIENCE / 60 and not told:
                told = not print(f"ds_to_universal.py: rank {rank} of {ranks} waits for {whom}", file=sys.stderr)
            with contextlib.suppress(OSError, EOFError, ValueError, connection.AuthenticationError):
                if rank:  # the note may be a left-over, and where it points to a stranger
                    time.sleep(0.1)
                    host, port, key = note.read_bytes().split()
                    end = socket.create_connection((host.decode(), int(port)), 10)
                    peers[0] = shake_hands(end, key, connection.answer_challenge, connection.deliver_challenge)
                    peers[0].send(rank)
                else:
                    end = server.accept()[0]
                    peer = shake_hands(end, key, connection.deliver_challenge, connection.answer_challenge)
                    peers[peer.recv()] = peer

    def share(value):
        try:
            data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
            if rank:
                peers[0].send_bytes(data)
                data = [peers[0].recv_bytes() for _ in range(ranks)]
            else:  # handed on as they are
                data = [data] + [peers[r].recv_bytes() for r in range(1, ranks)]
                for peer, one in itertools.product(peers.values(), data):
                    peer.send_bytes(one)
            return [value if r == rank else pickle.loads(one) for r, one in enumerate(data)]
        except (OSError, EOFError) as error:
            raise CheckpointError("another process of this conversion is gone: nothing is published") from error

    return share


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arg = parser.add_argument
    arg("--version", action="version", version=__version__)
    arg("--input_folder", required=True, help="ZeRO checkpoint, the folder with the *_states.pt files; or the one "
        "above it, where `latest` says which, or there is no other")  # fmt: skip
    arg("--output_folder", help="universal checkpoint to write; default: <the folder with the files>_universal")
    arg("--safetensors", metavar="FILE", help="write this file, of fp32 weights alone; input may be universal, too")
    arg("--num_extract_workers", type=int, default=4, help="threads that open shards")
    arg("--num_merge_workers", type=int, default=2, help="threads that write parameters")
    arg("--any_step", dest="steps", action="store_false", help="the optimizer may be of another step than the model")
    arg("--drop_states", dest="states", action="store_false", help="leave out and name what the result cannot hold")
    arg("--unused_patterns", dest="patterns", action="store_false", help="patterns may match no parameter")
    arg("--no_strict", dest="strict", action="store_false", help="those three, as in DeepSpeed's converter")
    arg("--verify", dest="check", action="store_true", help="read the result back before it is published and compare "
        "every byte with what was to be written: proves the writing, not that the shards were understood")  # fmt: skip
    arg("--trust", action="store_true", help="take over objects of classes that are not known; they are not executed "
        "here, but they will be when the result is loaded")  # fmt: skip
    arg("--distributed", action="store_true", help="share the work with the other processes that RANK and WORLD_SIZE "
        "tell of; torchrun, deepspeed and srun need no flag")  # fmt: skip
    arg("--inject_missing_state", action="store_true", help="accepted, as DeepSpeed's converter does; not needed here")
    arg("--keep_temp_folder", action="store_true", help="accepted; there is none")
    arg("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher passes it
    args = parser.parse_args()
    if min(args.num_extract_workers, args.num_merge_workers) < 1:
        parser.error("--num_extract_workers and --num_merge_workers are at least 1")
    options = {name: getattr(args, name) for name in ("num_extract_workers", "num_merge_workers", "trust", "check")}
    options["strict"] = args.strict and {name for name in CHECKS if getattr(args, name)}
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")
    rank = 0

    def say(kind, text):
        if not rank:
            print(f"ds_to_universal.py: {kind}: {' '.join(str(text).splitlines())}", file=sys.stderr, flush=True)

    warnings.showwarning = lambda message, *rest: say("warning", message)
    warnings.simplefilter("always", UserWarning)
    code = 0
    try:
        rank, ranks = launched(args.distributed, args.local_rank)
        output = args.safetensors or args.output_folder or default_output(find_tag(args.input_folder))
        if args.safetensors:
            if args.output_folder or args.check or ranks > 1:
                raise CheckpointError("--safetensors goes without --output_folder, without --verify, on one process")
            done = export(args.input_folder, output, args.num_extract_workers, strict=options["strict"], progress=True)
        else:
            share = meet(rank, ranks, Path(os.path.realpath(output))) if ranks > 1 else alone
            done = convert(args.input_folder, output, **options, progress=not rank, rank=rank, ranks=ranks, share=share)
            share(None)
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
            time.sleep(min(5, PATIENCE / 60))
        sys.stdout.flush()
        os._exit(code) if rank else sys.exit(code)
    if rank:
        return
    rate, memory = done["bytes"] / done["seconds"] / 1e9, peak_memory()
    print(
        f"{done['source']} -> {output}: {done['parameters']} parameters, {done['bytes']:,} bytes, {done['files']} "
        f"file{'s' * (done['files'] > 1)} in {done['seconds']:.2f} s, {rate:.2f} GB/s, {memory:.0f} MB of memory"
    )


if __name__ == "__main__":
    main()
