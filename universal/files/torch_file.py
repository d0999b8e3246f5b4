# SPDX-License-Identifier: MIT
"""Read the .pt files of torch.save() without torch, and without running code in them.

Such a file is a zip archive of one pickle and one stored record per tensor. load() returns the
content, with every tensor as a place in the file. torch_writer.py makes files of such places. This
file knows nothing of DeepSpeed.
"""

import copyreg
import functools
import io
import math
import os
import pickle
import pickletools
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from universal.errors import CheckpointError, Refused, as_checkpoint_error
from universal.files.schema import is_natural, is_shape
from universal.files.sources import (
    ByteReader,
    Extent,
    Record,
    Source,
    checksum,
    crc32,
    keep_open,
    open_file,
    width,
)

# --------------------------------------------------------------------------------------------------
# 1. what is in a pickle

DTYPES = {  # by the kind of storage
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexDouble": "complex128",
    "ComplexFloat": "complex64",
    "QInt8": "qint8",
    "QUInt8": "quint8",
    "QInt32": "qint32",
    "QUInt4x2": "quint4x2",
    "QUInt2x4": "quint2x4",
    "Untyped": "byte",
}
KINDS = {dtype: kind for kind, dtype in DTYPES.items()}


class Tensor(NamedTuple):
    """A tensor without its elements.

    storage: where they are. offset, stride: in elements. dtype: "float32", "uint16".
    """

    storage: Record | bytes | Source
    offset: int
    size: tuple
    stride: tuple
    requires_grad: bool
    dtype: str

    @property
    def numel(self) -> int:
        return math.prod(self.size)


class Size(tuple):
    """A torch.Size."""

    __slots__ = ()


def typed_tensor(storage, *view):
    """Takes the place of torch._utils._rebuild_tensor_v2."""
    return built_tensor(DTYPES[storage.kind], storage, *view)


def untyped_tensor(storage, offset, size, stride, requires_grad, hooks, dtype, *metadata):
    """Takes the place of torch._utils._rebuild_tensor_v3, for the dtypes that have no storage
    class."""
    view = (offset, size, stride, requires_grad, hooks)
    return built_tensor(dtype.__name__, storage, *view, *metadata)


def built_tensor(dtype, storage, offset, size, stride, requires_grad, hooks, metadata=None):
    """A Tensor; None if there is more to it than its elements, as to a conjugated view."""
    if hooks or metadata:
        return None
    shapes = is_shape(size) and is_shape(stride) and len(size) == len(stride)
    if not (shapes and is_natural(offset)):
        raise CheckpointError("a tensor has an impossible shape")
    if not isinstance(storage, Record):
        raise CheckpointError("a tensor has no storage")
    return Tensor(storage, offset, size, stride, requires_grad, dtype)


BUILT = {
    "collections.OrderedDict": OrderedDict,
    "torch.Size": Size,
    "torch._utils._rebuild_tensor_v2": typed_tensor,
    "torch._utils._rebuild_tensor_v3": untyped_tensor,
}


class StubType(type):
    """A class of which only the name is known.

    It is made anew for every file, so that no pickle reaches what another one has read.
    """


class Stub(metaclass=StubType):
    """An instance of a class that is never imported. It is pickled again as it was read. build: a
    function of BUILT that takes the class's place."""

    build = None

    def __new__(cls, *args):
        built = cls.build(*args) if cls.build else None
        return stub(cls, args) if built is None else built

    def __init__(self, *args):
        self.called = True  # the pickle called the class, instead of only making an instance of it

    def __setstate__(self, state):
        self.state = state

    def __setitem__(self, key, value):
        self.entries[key] = value

    def append(self, value: Any) -> None:
        self.items.append(value)

    def __reduce__(self):
        return stub, (type(self), self.args, self.called, self.state, self.items, self.entries)


def stub_type(module: str, name: str) -> StubType:
    names = {"__module__": module, "__qualname__": name}
    if build := BUILT.get(f"{module}.{name}"):
        names["build"] = staticmethod(build)
    return StubType(name, (Stub,), names)


# A class that this package names itself, and writes.
known_class = functools.cache(stub_type)

# So that Python's own pickle can take a description from one process to another.
copyreg.pickle(StubType, lambda cls: (stub_type, (cls.__module__, cls.__qualname__)))


def stub(
    cls: StubType,
    args: tuple,
    called: bool = False,
    state: Any = None,
    items: Sequence = (),
    entries: dict | Sequence = (),
) -> Stub:
    """Make a Stub. items: what a list in it has; entries: what a dict has; state: attributes."""
    instance = object.__new__(cls)
    instance.args = args
    instance.called = called
    instance.state = state
    instance.items = list(items)
    instance.entries = dict(entries)
    instance.tensor = wrapped_tensor(cls.__qualname__, args)
    return instance


def wrapped_tensor(name, args):
    """The Tensor in a parameter, or in a tensor with attributes; None in anything else."""
    if args and name in ("_rebuild_parameter", "_rebuild_parameter_with_state"):
        return tensor_of(args[0])
    if args and name == "_rebuild_from_type_v2":
        rebuild, _, arguments, _ = args
        return tensor_of(rebuild(*arguments))
    return None


def tensor_of(value: Any) -> Tensor | None:
    """The Tensor that a value is, or wraps, as a parameter does; None of anything else."""
    if isinstance(value, Stub):
        return value.tensor
    return value if isinstance(value, Tensor) else None


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def has_gaps(tensor: Tensor) -> bool:
    """Whether a tensor is not contiguous: elements are not stored in the order of their indices."""
    strides = zip(tensor.size, tensor.stride, contiguous_strides(tensor.size), strict=True)
    return all(tensor.size) and any(n > 1 and stride != wanted for n, stride, wanted in strides)


def contiguous(dtype: str, storage: Record | bytes | Source, shape: Sequence[int]) -> Tensor:
    """A tensor without gaps, at the beginning of its storage."""
    return Tensor(storage, 0, tuple(shape), contiguous_strides(shape), False, dtype)


def extent_of(tensor: Tensor, numel: int | None = None) -> Extent:
    """The Extent of a contiguous tensor's first `numel` elements, by default of all.

    Raises: CheckpointError, if its record is too short, or the tensor has gaps.
    """
    record = tensor.storage
    size = width(tensor.dtype)
    total = tensor.numel
    numel = total if numel is None else numel
    if numel > total or (tensor.offset + total) * size > record.nbytes:
        raise CheckpointError(f"{record.path} holds fewer elements than its description says")
    if has_gaps(tensor):
        raise CheckpointError(
            f"{record.path} has gaps between the elements of a tensor that must have none"
        )
    return Extent(tensor.dtype, record, tensor.offset * size, numel)


def trim_storage(tensor: Tensor) -> Tensor:
    """The tensor with a storage that ends where it ends: that of a view may be much longer."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.size, tensor.stride, strict=True))
    numel = last + 1 if all(tensor.size) else 0
    span = tensor._replace(size=(numel,), stride=(1,))
    return tensor._replace(storage=extent_of(span), offset=0)


# --------------------------------------------------------------------------------------------------
# 2. reading a file


def load(path: str | Path, known: dict | None = None) -> Any:
    """The content of a .pt file: tensors become Tensor, other objects Stub.

    known: contents of earlier calls with it, a few; of a file with the same bytes, by its
    checksums, that earlier content is returned, whose tensors are in the other file.
    Raises: CheckpointError, naming the file; OSError.
    """
    path = Path(path)
    with as_checkpoint_error(path), open_file(path) as file:
        archive = archive_of(file)
        records = {}
        prefixes = (path.stem, "archive")  # torch.save() writes the file's name into the archive
        for info in archive.infolist():
            prefix, _, name = info.filename.partition("/")
            if prefix not in prefixes:
                raise CheckpointError(f"it was written as {prefix}.pt, and renamed")
            records[name] = record_of(path, file, info, name)
        if "byteorder" in records and archive.read(f"{prefix}/byteorder") != b"little":
            raise CheckpointError("it was written on a big-endian machine")
        data = archive.read(f"{prefix}/data.pkl")  # zipfile compares it with its checksum
        key = data, *((name, record.nbytes, record.crc) for name, record in records.items())
        if known and key in known:
            return known[key]
        content = Unpickler(data, records, file).load()
        has_checksums = records["data.pkl"].crc is not None
        if known is not None and len(known) < KNOWN and has_checksums:
            known[key] = content
        return content


KNOWN = 2  # of the files of many ranks: they are alike, or each has its own
UNZIPPED = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # how a file without an archive begins


def archive_of(file: BinaryIO) -> zipfile.ZipFile:
    """The zip archive in a file. Raises Refused, if it has the format from before torch 1.6.

    If all checksums are 0, as after torch.serialization.set_crc32_options(False), they become None.
    """
    if file.read(len(UNZIPPED)) == UNZIPPED:
        raise Refused(
            f"{file.name} was saved with checkpoint_serialization: false, as before torch 1.6: "
            "DeepSpeed's own loader takes it on the ranks that saved it; save again without that "
            "option"
        )
    archive = zipfile.ZipFile(file)
    if not any(info.CRC for info in archive.infolist()):
        for info in archive.infolist():
            info.CRC = None
    return archive


def record_of(path, file, info, name):
    """The Record of an entry in the archive's directory."""
    if not info.file_size and not info.compress_type:  # ZeRO-3 leaves one for each parameter
        return Record(str(path), info.header_offset, 0, info.CRC)
    header = os.pread(file.fileno(), 30, info.header_offset)
    mark, name_size, extra_size = struct.unpack("<4s22xHH", header)
    if mark != b"PK\3\4" or info.compress_type or info.file_size != info.compress_size:
        raise CheckpointError(f"{path} is damaged: {name} is not stored as torch.save does")
    begin = info.header_offset + len(header) + name_size + extra_size
    return Record(str(path), begin, info.file_size, info.CRC)


@functools.lru_cache(2)  # shards are alike
def check_memo(data):
    """Refuse large memo numbers: a pickle chooses them, and Python makes room for the largest."""
    for code, number, _ in pickletools.genops(data):
        if code.name in ("PUT", "LONG_BINPUT") and number > len(data):
            raise ValueError(
                f"a pickle of {len(data)} bytes that wants to remember {number} objects"
            )


class Unpickler(pickle.Unpickler):
    """Reads a pickle, and calls only what is in this file."""

    def __init__(self, data, records, file):
        check_memo(data)
        super().__init__(io.BytesIO(data))
        self.records = records
        self.file = file
        self.classes = {}

    def find_class(self, module, name):
        if not (module + name).isprintable():
            raise ValueError("a class has an impossible name")
        if (module, name) not in self.classes:
            self.classes[module, name] = stub_type(module, name)
            if name == "getattr" and module in ("__builtin__", "builtins"):
                self.classes[module, name].__new__ = self.attribute
        return self.classes[module, name]

    def attribute(self, cls, parent, name):
        """What getattr() would return.

        Pickles call it for a class inside a class; those of Python 3.11.0 to 3.11.3 for a member of
        an enum, too.
        """
        if isinstance(parent, StubType):
            return self.find_class(parent.__module__, f"{parent.__qualname__}.{name}")
        return Stub.__new__(cls, parent, name)

    def persistent_load(self, pid):
        _, storage, key, _, numel, *_ = pid
        kind = storage.__name__.removesuffix("Storage")
        nbytes = numel * width(DTYPES[kind])
        record = self.records[f"data/{key}"]
        if record.nbytes != nbytes:
            raise CheckpointError(
                f"record {key} has {record.nbytes} bytes, which is not {numel} elements"
            )
        content = None
        if numel == 1:  # read_scalar() does not open the file again
            content = os.pread(self.file.fileno(), nbytes, record.offset)
        return Record(record.path, record.offset, nbytes, record.crc, kind, content)


def records_of(path: Path) -> dict[str, Record]:
    """Returns the Records of a file by name: tensors, and the pickle. Raises CheckpointError."""
    with as_checkpoint_error(path), open_file(path) as file:
        archive = archive_of(file)
        names = [info.filename.partition("/")[2] for info in archive.infolist()]
        infos = zip(names, archive.infolist(), strict=True)
        return {name: record_of(path, file, info, name) for name, info in infos}


def damages_in(path: Path) -> Iterator[tuple[Record, str]]:
    """Read a file. Yields each record that does not match its checksum, and a line that says so.
    Raises CheckpointError."""
    opened = keep_open()
    for name, record in records_of(path).items():
        if record.crc not in (checksum(opened, record, 0, record.nbytes), None):
            yield record, f"{path} is damaged: {name} does not match its checksum"


def verify(path: Path) -> None:
    """Raises CheckpointError if a file's record does not match its checksum, if it has any."""
    for _, text in damages_in(path):
        raise CheckpointError(text)


def read_scalar(value: Any) -> Any:
    """Read and check a one-element tensor: its bytes become its storage. Others are unchanged."""
    tensor = tensor_of(value)
    if tensor is None or tensor.numel != 1:
        return value
    extent = extent_of(tensor)
    data = extent.record.content
    if data is None:  # a view of more
        reader = ByteReader(open_file)
        data = reader.read(extent, 0, 1)
        reader.check()
    elif extent.record.crc not in (crc32(data), None):
        raise CheckpointError(
            f"{extent.record.path} is damaged: a number does not match its checksum"
        )
    return contiguous(tensor.dtype, bytes(data), tensor.size)


STRUCT_CODES = {  # of the module struct
    "float64": "d",
    "float32": "f",
    "float16": "e",
    "int64": "q",
    "int32": "i",
    "int16": "h",
    "int8": "b",
    "uint8": "B",
    "bool": "?",
}


def number_in(value: Any) -> Any:
    """The number in a tensor from read_scalar(); any other value is returned unchanged."""
    if not isinstance(value, Tensor):
        return value
    if value.dtype not in STRUCT_CODES or not isinstance(value.storage, bytes):
        raise CheckpointError(f"a tensor of {value.dtype} {value.size} is not a number")
    (number,) = struct.unpack(f"<{STRUCT_CODES[value.dtype]}", value.storage)
    return number
