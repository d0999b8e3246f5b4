# SPDX-License-Identifier: MIT
"""What is wrong with a checkpoint, said in one line that names the file; and what is wrong with a
rank. Needs nothing but Python 3.10."""

import contextlib
import errno
import os


class CheckpointError(Exception):
    """Says in one line what is wrong with the checkpoint or the folders."""

    def __init__(self, message):
        super().__init__(" ".join(str(message).splitlines()))


class RankFailed(RuntimeError):
    """A rank met an error of which the checkpoint is not the cause, such as a bug of ours.

    It is no CheckpointError: a script that starts over without a checkpoint must not hide it.
    """


class RankSilent(RankFailed):
    """A rank does not answer."""


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
