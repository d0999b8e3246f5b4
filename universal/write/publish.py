# SPDX-License-Identifier: MIT
"""Publishing: no folder gets its final name before it is on the disk."""

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from universal.checkpoint.types import NEXT_STEPS
from universal.errors import CheckpointError


def beside(output: Path, what: str) -> Path:
    """A hidden path next to the output."""
    return output.with_name(f".{output.name}.{what}")


def check_output(source: Path, output: Path) -> None:
    """Check that the output is new, or a universal checkpoint and nothing else, and does not
    contain the source. Raises CheckpointError."""
    entry = re.compile(
        r"zero|(zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt|layer_.*_model_states\.pt"
        rf"|{NEXT_STEPS}"
    )
    pointer = output.parent / "latest_universal"
    if source == output or output in source.parents:
        raise CheckpointError(
            f"{output} is not a universal checkpoint but holds the input: "
            "name another output folder"
        )
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


@contextlib.contextmanager
def locked(folder, made):
    """Keep other conversions out of the folder. made: this conversion has just made it, so nobody
    else holds it."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"another conversion to the same folder is running: it writes to {folder}"
            ) from None
        except OSError as error:  # a file system without locks: the folder itself is the lock
            if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
                raise
            if not made:
                raise CheckpointError(
                    f"{folder} belongs to another conversion that runs, or was killed; "
                    f"if so: rm -r '{folder}'"
                ) from None
        if not os.path.samestat(os.fstat(lock), os.stat(folder)):
            raise CheckpointError(f"another conversion has just replaced {folder}")
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def unfinished(output: Path) -> Iterator[Path]:
    """An empty folder next to the output, to write into; removed in the end unless it was
    published. First removes what a killed conversion left. Raises CheckpointError, if another
    conversion is at it."""
    folder = beside(output, "unfinished")
    old = beside(output, "replaced")
    with contextlib.ExitStack() as stack:
        if output.exists():  # whoever has just given it this name still holds its lock
            stack.enter_context(locked(output, True))
        made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=not made)
        stack.enter_context(locked(folder, made))
        made_folder = os.stat(folder)
        if old.exists() and not output.exists():
            old.rename(output)
        shutil.rmtree(old, ignore_errors=True)
        if old.exists():  # if another user's, it stays, and must not be in the way
            old.rename(beside(output, f"replaced.{time.time_ns()}"))
        for left in folder.iterdir():
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink()
        try:
            yield folder
        finally:
            if folder.exists() and os.path.samestat(made_folder, os.stat(folder)):
                shutil.rmtree(folder, ignore_errors=True)
                beside(output, "pointer").unlink(missing_ok=True)


def publish(folder: Path, output: Path, latest: Path | None = None) -> None:
    """Write everything to the disk, give the finished folder its final name, and let the file
    `latest`, if any, point to it. If this is interrupted, the output is either the old or the new
    one, and whole. For a moment the old one is next to its place; the next conversion then moves it
    back."""
    old = beside(output, "replaced")
    pointer = beside(output, "pointer")
    if latest:
        pointer.write_bytes(os.fsencode(os.path.relpath(output, latest.parent)))
    sync(folder)
    if output.exists():
        output.rename(old)
    folder.rename(output)
    if latest:
        pointer.rename(latest)
    sync(output.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync(folder: Path) -> None:
    """Write everything in the file system of this folder to the disk. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if libc.syncfs(descriptor):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(folder))
    finally:
        os.close(descriptor)
