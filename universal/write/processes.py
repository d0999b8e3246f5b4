# SPDX-License-Identifier: MIT
"""What processes do together: all of them continue, or none does.

If one fails, all raise the same error, and none waits forever. Only a CheckpointError says
something about the checkpoint.
"""

import contextlib
import itertools
from array import array
from collections.abc import Callable, Iterator
from typing import Any

from universal.errors import CheckpointError, RankFailed

AllGather = Callable[[Any], list]  # takes this process's value, and returns those of all processes


SPEAKS_FOR_ITSELF = (CheckpointError, RankFailed, OSError, MemoryError)  # on every rank


def one_line(error: Exception) -> str:
    """The error's class and message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def shared_error(error: Exception) -> Exception:
    """The error as all ranks raise it."""
    return error if isinstance(error, SPEAKS_FOR_ITSELF) else RankFailed(one_line(error))


def alone(value: Any) -> list:
    """all_gather() of a single process."""
    return [value]


@contextlib.contextmanager
def all_or_none(all_gather: AllGather) -> Iterator[None]:
    """No process leaves this block unless all do: if some fail, all raise the error of the first.

    Raises: CheckpointError, OSError and MemoryError as they were raised; RankFailed for any other
        error, with that error as its cause on the rank where it happened. A process alone raises
        every error as it is.
    """
    cause = None
    try:
        yield
    except Exception as error:
        cause = error
    reported = cause
    if cause is not None and all_gather is not alone:
        reported = shared_error(cause)
    errors = [error for error in all_gather(reported) if error is not None]
    if errors:
        raise errors[0] from cause if cause is not errors[0] else None


def merge_spans(spans_of_ranks: list[dict]) -> dict:
    """What all processes have read, from the `spans` of each one's ByteReader."""
    merged = {}
    for record, spans in itertools.chain(*(spans.items() for spans in spans_of_ranks)):
        merged.setdefault(record, array("Q")).extend(spans)
    return merged
