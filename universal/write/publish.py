# SPDX-License-Identifier: MIT
"""Publishing: no folder gets its final name before it is on the disk.

Until then it has a hidden name beside its place: .NAME.NUMBER.unfinished, or .saving while a
training run writes it. What it replaces is .NAME.NUMBER.replaced for a moment; after a crash
tags.restore() gives that its name back."""

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from universal.checkpoint.tags import HIDDEN, POINTER, restore
from universal.checkpoint.types import NEXT_STEPS
from universal.errors import CheckpointError

BACKGROUND = "universal"  # the name of the threads in which saves go on
LOCKED = set()  # descriptors of this process
DAY = 86400  # seconds; nobody writes any more into a folder that is older


def wait() -> None:
    """Wait for saves in the background.

    An event, not join(): if a signal interrupts join(), Python before 3.13 forgets the thread.
    """
    while events := [
        thread.done
        for thread in threading.enumerate()
        if thread.name == BACKGROUND and not thread.done.is_set()
    ]:
        events[0].wait()


def hidden(output: Path, kind: str) -> Path:
    """A hidden, unique path beside the output. kind: "unfinished", "saving", ..."""
    return output.with_name(f".{output.name}.{time.time_ns()}.{kind}")


def check_output(source: Path, output: Path) -> None:
    """Raises CheckpointError if the output exists and is more than a universal checkpoint, or is or
    contains the source."""
    entry = re.compile(
        r"zero|(zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt|layer_.*_model_states\.pt"
        rf"|{NEXT_STEPS}|{re.escape(POINTER)}"
    )
    pointer = output.parent / "latest_universal"
    if source == output or output in source.parents:
        raise CheckpointError(
            f"{output} is not a universal checkpoint but holds the input: "
            "name another output folder"
        )
    if source / "zero" in (output, *output.parents):
        raise CheckpointError(f"{output} would make a conversion of the input: name another output")
    if pointer == output or pointer.is_dir():
        raise CheckpointError(
            f"{pointer} is the name of the file that points to the output, and not of a folder"
        )
    if output.exists():
        names = os.listdir(output) if output.is_dir() else []
        others = [name for name in names if not entry.fullmatch(name)]
        if others or not (output / "zero" / "optimizer_state.pt").is_file():
            content = f": it holds {min(others)}" if others else ""
            raise CheckpointError(
                f"{output} exists and is not a universal checkpoint{content}: it is left as it is"
            )


def lock(folder: Path, alone: bool = False) -> int | None:
    """Mark a folder as being written, until unlock(), or for as long as this process lives. Returns
    the descriptor. alone: for this process alone; then returns None if another one has locked it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    LOCKED.add(descriptor)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except OSError as error:  # or a file system without locks
        if alone and error.errno == errno.EWOULDBLOCK:
            return unlock(descriptor)
    return descriptor


def unlock(descriptor: int) -> None:
    """Close what lock() has returned."""
    LOCKED.discard(descriptor)
    os.close(descriptor)


def drop_locks():
    """Close, in a process that was forked, what it shares: a DataLoader's worker would keep a lock
    for as long as it lives."""
    while LOCKED:
        os.close(LOCKED.pop())


os.register_at_fork(after_in_child=drop_locks)


def is_locked(folder: Path) -> bool:
    """Whether a process of this machine has lock()ed the folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno == errno.EWOULDBLOCK
    finally:
        os.close(descriptor)
    return False


def can_rename(folder: Path) -> bool:
    """Whether the file system can rename a folder with a file in it; mounted buckets often cannot.
    Nothing is left behind."""
    probe = Path(tempfile.mkdtemp(dir=folder))  # other machines may have one there
    renamed = probe.with_name(f"{probe.name}.renamed")
    (probe / "file").touch()
    try:
        os.rename(probe, renamed)
        return True
    except OSError:
        return False
    finally:
        for path in (probe, renamed):
            shutil.rmtree(path, ignore_errors=True)


def sweep(output: Path) -> None:
    """Remove hidden folders that dead processes left beside the output: those of its name, and of
    others those that are a day old or were being removed."""
    restore(output.parent)
    for path in output.parent.glob(".*"):
        match = HIDDEN.fullmatch(path.name)
        with contextlib.suppress(OSError):  # another user's, say, or just removed
            if not match or is_locked(path):
                continue
            is_old = time.time() - path.stat().st_mtime > DAY
            if is_old or match[1] == output.name or match[2] == "removed":
                with contextlib.suppress(OSError):  # a mounted bucket renames nothing
                    path = path.rename(path.with_suffix(".removed"))
                shutil.rmtree(path)


@contextlib.contextmanager
def unfinished(output: Path) -> Iterator[Path]:
    """Yields a hidden folder beside the output, to write into. Afterwards it is removed, unless it
    was published, and so are those of processes that died. Raises CheckpointError where it could
    not be published."""
    sweep(output)
    folder = hidden(output, "unfinished")
    folder.mkdir(parents=True)
    descriptor = lock(folder)
    try:
        if not can_rename(folder):
            raise CheckpointError(
                f"{output.parent} renames no folders, as mounted buckets: convert to another disk, "
                "and copy the result"
            )
        yield folder
    finally:
        unlock(descriptor)
        sweep(output)


def publish(folder: Path, output: Path, latest: Path | None = None, tag: str | None = None) -> None:
    """Write everything to the disk, and give the finished folder its final name.

    latest: a file to name the tag in, by default the output's name. If this is interrupted, the
    output is the old or the new one, and complete; for a moment the old one has a hidden name.
    """
    if latest:
        (folder / POINTER).write_bytes(os.fsencode(tag or output.name))
    sync(folder)
    while True:
        with contextlib.suppress(FileNotFoundError):
            output.rename(hidden(output, "replaced"))
        try:
            folder.rename(output)
            break
        except OSError as error:  # somebody else was faster
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    if latest:
        with contextlib.suppress(FileNotFoundError):  # again
            (output / POINTER).rename(latest)
    restore(output.parent)  # one process: ranks that do it at once get in each other's way
    sync(output.parent)


def sync(folder: Path) -> None:
    """Write everything in the file system of this folder to the disk. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if libc.syncfs(descriptor):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(folder))
    finally:
        os.close(descriptor)
