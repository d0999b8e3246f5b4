# SPDX-License-Identifier: MIT
"""Write .pt files as torch.save() does, without torch, from places in other files."""

import io
import itertools
import pickle
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from universal.errors import CheckpointError, adding_path
from universal.files.sources import (
    SHORT_BYTES,
    ByteReader,
    Record,
    Source,
    append_crc,
    crc32,
    nbytes_of,
    width,
)
from universal.files.torch_file import (
    DTYPES,
    KINDS,
    Size,
    Stub,
    StubType,
    Tensor,
    known_class,
    stub,
)


class Pickled(NamedTuple):
    """A pickle, and the sources of its tensors' bytes, in the order of their numbers."""

    data: bytes
    sources: list


def pickled(content: Any) -> Pickled:
    """The content as torch.save() pickles it. Raises CheckpointError, if that is impossible."""
    pickler = Pickler()
    data = pickler.dump(content)
    return Pickled(data, [source for _, source in pickler.sources.values()])


def write_pt(path: Path, content: Pickled, reader: ByteReader) -> None:
    """Write a .pt file. Raises OSError and, if a source cannot be read, CheckpointError."""
    with adding_path(path), open(path, "xb", buffering=SHORT_BYTES) as file:
        write_archive(file, path.stem, content, reader)


def packed(content: Any) -> bytes:
    """The bytes of a .pt file with this content; its tensors are read and checked."""
    file = io.BytesIO()
    reader = ByteReader()
    write_archive(file, "packed", pickled(content), reader)
    reader.check()
    return file.getvalue()


def write_archive(file: BinaryIO, stem: str, content: Pickled, reader: ByteReader) -> None:
    """Write a .pt file's archive into an open file, on a disk or in memory."""
    sources = other_records(content.data) | storage_records(content.sources)
    write_records(file, stem, sources, reader)


def other_records(data: bytes) -> dict[str, bytes]:
    """The records that are no storages, by name. data: the pickle."""
    return {"data.pkl": data, "byteorder": b"little", "version": b"3\n"}


def storage_records(sources: list) -> dict[str, Any]:
    """The records of the storages, by name."""
    return {f"data/{number}": source for number, source in enumerate(sources)}


def record_header(stem: str, name: str, nbytes: int, offset: int) -> zipfile.ZipInfo:
    """The header of a record that begins at this offset, without its checksum."""
    info = zipfile.ZipInfo(f"{stem}/{name}")
    info.CRC = 0
    info.file_size = info.compress_size = nbytes
    info.header_offset = offset
    # torch aligns records, to map them.
    padding = -(offset + len(info.FileHeader()) + 4) % 64
    info.extra = struct.pack("<HH", 0x4246, padding) + bytes(padding)
    return info


def write_records(file: BinaryIO, stem: str, sources: dict[str, Any], reader: ByteReader) -> None:
    """Write an archive of these records, {name: source}, in their order."""
    # ZipFile writes the directory alone: archive.open() would checksum all bytes again.
    with zipfile.ZipFile(file, "w") as archive:
        for name, source in sources.items():
            info = record_header(stem, name, nbytes_of(source), file.tell())
            file.write(info.FileHeader())
            if isinstance(source, bytes | memoryview):
                chunks = [(source, crc32(source))]
            else:
                chunks = reader.chunks(source)
            for chunk, crc in chunks:
                file.write(chunk)
                info.CRC = append_crc(info.CRC, chunk, crc)
            archive.start_dir = file.tell()
            file.seek(info.header_offset)
            file.write(info.FileHeader())  # with the checksum
            file.seek(archive.start_dir)
            archive.filelist.append(info)


class Storage(NamedTuple):
    """The source of a storage's bytes, and the kind of storage."""

    source: Source
    kind: str


class Pickler:
    """Writes a pickle of protocol 2, as torch.save() does.

    It imports no class: names are written as they were read. It does not recurse, so no nesting is
    too deep. sources: {source of a tensor's bytes, or its id: (number, source)}.
    """

    def __init__(self):
        self.data = bytearray(b"\x80\2")
        self.memo = {}
        self.sources = {}
        self.stubs = []

    def dump(self, content: Any) -> bytes:
        pending = [self.write(content)]
        while pending:
            try:
                inner = next(pending[-1])
            except StopIteration:
                pending.pop()
            else:
                pending.append(self.write(inner))
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
        elif kind is StubType:
            yield from self.write_name(value)
        elif kind in (list, dict):
            self.data += b"]" if kind is list else b"}"
            self.remember(key)
            yield from self.write_items(value)
        elif kind is tuple:
            yield from self.write_tuple(value, key)
        elif kind in (Record, Storage):
            yield from self.write_storage(value)
        elif instance := self.stub_of(value):
            self.stubs.append(instance)  # otherwise another object may get its id
            yield from self.write_stub(instance, key)
        else:
            raise CheckpointError(
                f"{value!r} cannot be written: torch.save does not write {kind.__name__} like that"
            )

    def stub_of(self, value):
        """The Stub that a value is written as; None if there is none."""
        if isinstance(value, Stub):
            return value
        if isinstance(value, Size):
            return stub(known_class("torch", "Size"), (tuple(value),), True)
        if isinstance(value, OrderedDict):
            attributes = vars(value) or None  # such as _metadata, of a state_dict()
            name = known_class("collections", "OrderedDict")
            return stub(name, (), True, state=attributes, entries=value)
        if isinstance(value, Tensor):
            return self.stub_of_tensor(value)
        return None

    def stub_of_tensor(self, tensor):
        kind = KINDS.get(tensor.dtype, "Untyped")
        storage = tensor.storage
        if not isinstance(storage, Record):
            storage = Storage(storage, kind)
        view = (tensor.offset, tensor.size, tensor.stride, tensor.requires_grad)
        arguments = (storage, *view, OrderedDict())
        function = "_rebuild_tensor_v2"
        if kind == "Untyped":
            arguments = (*arguments, known_class("torch", tensor.dtype))
            function = "_rebuild_tensor_v3"
        return stub(known_class("torch._utils", function), arguments, True)

    def write_items(self, items):
        """Writes the items of a list, or of a dict with its keys."""
        if items:
            end = b"e"
            if isinstance(items, dict):
                items = itertools.chain.from_iterable(items.items())
                end = b"u"
            self.data += b"("
            yield from items
            self.data += end

    def write_tuple(self, value, key):
        self.data += b"("
        yield from value
        if key in self.memo:  # it contains itself, through a list say, and is already written
            self.data += b"1j" + struct.pack("<I", self.memo[key])
        else:
            self.data += b"t"
            self.remember(key)

    def write_name(self, cls):
        outer, _, inner = cls.__qualname__.rpartition(".")
        if outer:  # protocol 2 has no name for a class in a class
            yield known_class("__builtin__", "getattr")
            self.data += b"("
            yield known_class(cls.__module__, outer)
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
        yield from self.write_items(value.items)
        yield from self.write_items(value.entries)
        if value.state is not None:
            yield value.state
            self.data += b"b"

    def write_storage(self, storage):
        if isinstance(storage, Record):
            storage = Storage(storage, storage.kind)
        source, kind = storage
        # Two views of one storage still share it.
        key = id(source) if isinstance(source, bytes) else source
        number, _ = self.sources.setdefault(key, (len(self.sources), source))
        self.data += b"("
        yield "storage"
        yield known_class("torch.storage" if kind == "Untyped" else "torch", f"{kind}Storage")
        yield str(number)
        yield "cpu"
        yield nbytes_of(source) // width(DTYPES[kind])
        self.data += b"tQ"
