# SPDX-License-Identifier: MIT
"""Errors: of a checkpoint, in one line that names the file; and of a rank.

Only the code that parses a file's bytes stands under as_checkpoint_error(), which calls every
failure damage. What it returns is checked by expect() (schema.py), and other code relies on that:
if it fails all the same, the fault is in the code, not in the checkpoint, and is not hidden.
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path


class CheckpointError(Exception):
    """Says in one line what is wrong with the checkpoint or the folders."""

    def __init__(self, message: object):
        super().__init__(" ".join(str(message).splitlines()))


class Refused(CheckpointError):
    """A complete checkpoint that is not loaded: no other is tried in its place."""


class RankFailed(RuntimeError):
    """A rank met an error of which the checkpoint is not the cause, such as a bug of ours.

    It is no CheckpointError: a script that starts over without a checkpoint must not hide it.
    """


class RankSilent(RankFailed):
    """A rank does not answer."""


SPEAKS_FOR_ITSELF = (CheckpointError, RankFailed, OSError, MemoryError)  # on every rank


def one_line(error: Exception) -> str:
    """The error's class and message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def shared_error(error: Exception) -> Exception:
    """The error that all ranks raise: itself, or a RankFailed if its class says too little."""
    return error if isinstance(error, SPEAKS_FOR_ITSELF) else RankFailed(one_line(error))


@contextlib.contextmanager
def adding_path(path: Path) -> Iterator[None]:
    """Add the path to a CheckpointError, or to an error of the system, that does not name it."""
    try:
        yield
    except CheckpointError as error:
        if (os.path.dirname(path) or str(path)) in str(error):
            raise
        raise type(error)(f"{path}: {error}") from None
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(error.filename or path)) from error


@contextlib.contextmanager
def as_checkpoint_error(path: Path) -> Iterator[None]:
    """Turn every error into a CheckpointError, but for those of the system."""
    with adding_path(path):
        try:
            yield
        except (CheckpointError, MemoryError):
            raise
        except Exception as error:  # damaged bytes can fail in any way
            # EINVAL: a damaged directory gives an impossible place in the file.
            if isinstance(error, OSError) and error.errno != errno.EINVAL:
                raise
            reason = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{path} is damaged: {reason}") from error
