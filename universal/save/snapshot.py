# SPDX-License-Identifier: MIT
"""The files of a save, in memory. Tensors are copied at once; the rest of what torch.save() does
can wait for a thread.

    for path, state_dict in files_of_save(engine, save): # what save() would write
        image = Image(path, state_dict)
        image.copy(memory)
    ...                                             # from here on training may go on
    data = image.seal()                             # the bytes of the .pt file
"""

import contextlib
import fcntl
import io
import os
import pickle
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import deepspeed
import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from universal.files.sources import ByteReader
from universal.files.torch_writer import (
    other_records,
    record_header,
    storage_records,
    write_records,
)
from universal.load.overrides import overridden

PAGE_BYTES = 1 << 16  # bytes


class FileState(NamedTuple):
    """The time and size of a file, by which contents of one name are told apart."""

    written: int  # nanoseconds
    size: int  # bytes


def file_state(path: Path) -> FileState:
    stat = path.stat()
    return FileState(stat.st_mtime_ns, stat.st_size)


class Collector(TorchCheckpointEngine):
    """A stand-in for an engine's checkpoint_engine that keeps what DeepSpeed would write.

    files: [(path, state dict)]
    """

    def __init__(self):
        self.files = []

    def save(self, state_dict: Any, path: str) -> None:
        self.files.append((Path(path), state_dict))


class StoragePickler(pickle.Pickler):
    """Pickles as torch.save() does. storages: {identity: (number, storage)}"""

    def __init__(self, file):
        super().__init__(file, protocol=2)
        self.storages = {}

    def persistent_id(self, value):
        if isinstance(value, torch.storage.TypedStorage):
            storage = value._untyped_storage
            kind = getattr(torch, value._pickle_storage_type())
            numel = value._size()
        elif isinstance(value, torch.UntypedStorage):
            storage, kind, numel = value, torch.UntypedStorage, value.nbytes()
        else:
            return None
        number, _ = self.storages.setdefault(storage._cdata, (len(self.storages), storage))
        return "storage", kind, str(number), torch.serialization.location_tag(storage), numel


class Image:
    """A .pt file in memory. room: bytes that are enough for it."""

    def __init__(self, path: Path, content: Any):
        """Prepare a file. content: what it is to hold; it may change after copy()."""
        self.path = path
        with io.BytesIO() as file:
            pickler = StoragePickler(file)
            pickler.dump(content)
            self.data = file.getvalue()
        self.storages = [storage for _, storage in pickler.storages.values()]
        self.begins = []
        end = 0
        for number, storage in enumerate(self.storages):
            info = record_header(path.stem, f"data/{number}", storage.nbytes(), end)
            self.begins.append(end + len(info.FileHeader()))
            end = self.begins[-1] + storage.nbytes()
        # The directory, too, names each record.
        names = (len(self.storages) + 4) * (256 + len(path.stem))
        self.room = (end + len(self.data) + names + PAGE_BYTES) // PAGE_BYTES * PAGE_BYTES

    def copy(self, memory: torch.Tensor) -> None:
        """Begin to copy all elements. memory: uint8, at least `room` bytes. See copies_done()."""
        places = []
        self.target = memory
        self.devices = {storage.device for storage in self.storages}
        for begin, storage in zip(self.begins, self.storages, strict=True):
            source = torch.tensor([], dtype=torch.uint8, device=storage.device).set_(storage)
            target = memory[begin : begin + storage.nbytes()]
            target.copy_(source, non_blocking=True)
            places.append(slice(begin, begin + storage.nbytes()))
        self.storages = []  # they may go
        self.memory = memoryview(memory.numpy())
        self.places = places

    def seal(self) -> memoryview:
        """Write all but the elements, which are there, with checksums. Returns the file's bytes."""
        file = InPlace(self.memory)
        storages = [self.memory[place] for place in self.places]
        sources = storage_records(storages) | other_records(self.data)
        write_records(file, self.path.stem, sources, ByteReader())
        return self.memory[: file.tell()]

    def write(self) -> None:
        """Write the file, and wait for the disk. Raises OSError. First its memory is pinned."""
        for device in self.devices:
            pin(self.target, device)
        nbytes = len(self.seal())
        pages = self.memory[: -(-nbytes // PAGE_BYTES) * PAGE_BYTES]
        with open(self.path, "wb", buffering=0) as file:
            try:  # without the system's own copy, whose new pages cost more than all the rest
                set_direct(file, os.O_DIRECT)
                write_all(file, pages)
            except OSError:  # this file system, or this disk, wants it
                set_direct(file, 0)
                file.seek(0)
                write_all(file, pages)
            file.truncate(nbytes)
            os.fsync(file.fileno())


def set_direct(file: BinaryIO, flag: int) -> None:
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    fcntl.fcntl(file, fcntl.F_SETFL, flags & ~os.O_DIRECT | flag)


def write_all(file: BinaryIO, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


class InPlace(io.RawIOBase):
    """A file in memory. Elements, which lie there already, are not copied when it is written."""

    def __init__(self, memory):
        self.memory = memory
        self.position = 0

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.position = offset
        return offset

    def write(self, data):
        end = self.position + len(data)
        if not isinstance(data, memoryview):
            self.memory[self.position : end] = data
        self.position = end
        return len(data)


@contextlib.contextmanager
def saving_alone(engine: deepspeed.DeepSpeedEngine) -> Iterator[None]:
    """Let a save of DeepSpeed's wait for no other rank in this block.

    Otherwise ranks compare tags, meet, and at ZeRO-3 partition and gather the weights that are
    gathered now: these are saved as empty tensors instead.
    """
    gathered = [
        (parameter, parameter.data, parameter.ds_status)
        for parameter in engine.module.parameters()
        if hasattr(parameter, "ds_status") and parameter.data.numel()
    ]
    steps = {
        "_checkpoint_tag_validation": lambda tag: None,
        "_optimizer_has_ckpt_event_prologue": lambda: False,
        "_optimizer_has_ckpt_event_epilogue": lambda: False,
    }
    backend = deepspeed.comm.comm.cdb
    with overridden(engine, **steps), overridden(backend, barrier=lambda *args, **options: None):
        try:
            for parameter, data, status in gathered:
                parameter.data = data.new_empty(0)
                parameter.ds_status = type(status).NOT_AVAILABLE
            yield
        finally:
            for parameter, data, status in gathered:
                parameter.data = data
                parameter.ds_status = status


def files_of_save(
    engine: deepspeed.DeepSpeedEngine, save: Callable[[], Any]
) -> list[tuple[Path, Any]]:
    """Run a save of this engine without writing. Returns [(path, state dict)]. No rank waits for
    another."""
    collector = Collector()
    with overridden(engine, checkpoint_engine=collector), saving_alone(engine):
        save()
    return collector.files


def new_memory(nbytes: int) -> torch.Tensor:
    """Memory to copy into, uint8, at the beginning of a page."""
    memory = torch.empty(nbytes + PAGE_BYTES, dtype=torch.uint8, device="cpu")
    return memory[-memory.data_ptr() % PAGE_BYTES :][:nbytes]


def pin(memory: torch.Tensor, device: torch.device) -> None:
    """Pin memory, all of it and no more, for later copies from a GPU; torch itself would pin a
    power of two. Once: it may take seconds."""
    if device.type != "cuda" or hasattr(memory, "is_pinned_by_us"):
        return
    memory.is_pinned_by_us = True
    cuda = torch.cuda.cudart()
    with torch.cuda.device(device):  # a new thread would begin to use the first one
        if not int(cuda.cudaHostRegister(memory.data_ptr(), len(memory), 0)):  # or copies are slow
            unpin = weakref.finalize(memory, cuda.cudaHostUnregister, memory.data_ptr())
            unpin.atexit = False


def copies_done() -> None:
    """Wait until the accelerator has done all copies."""
    deepspeed.get_accelerator().synchronize()
