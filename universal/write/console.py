# SPDX-License-Identifier: MIT
"""What commands print: screens, errors in one line, and the figures of a conversion."""

import contextlib
import os
import sys
import textwrap
import warnings
from collections.abc import Iterator
from typing import Any

from universal.errors import CheckpointError


def print_screen(text: str) -> None:
    """Print text that a reader, such as `head`, may stop to read before its end."""
    try:
        print(text, flush=True)
    except BrokenPipeError:  # what is left would be flushed at the end, and fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def in_one_line(program: str) -> Iterator[None]:
    """Print an error, and every warning, in this block as one line on standard error.

    The process then ends with exit code 2; after Ctrl-C with 130.
    """

    def say(kind, text):
        text = " ".join(str(text).splitlines())
        print(f"{program}: {kind}: {text}", file=sys.stderr, flush=True)

    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: it was closed by the shell
        stream.reconfigure(errors="backslashreplace")
    warnings.showwarning = lambda message, *rest: say("warning", message)
    warnings.simplefilter("always", UserWarning)
    try:
        yield
        return
    except (CheckpointError, OSError, MemoryError) as error:
        code = 2
        say("error", error if str(error) else "out of memory")
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


def report(done: dict[str, Any]) -> None:
    """Print what convert() returned in one line."""
    print(
        f"{done['source']} -> {done['output']}: {done['parameters']} parameters, "
        f"{done['bytes']:,} bytes in {done['seconds']:.2f} s, "
        f"{done['bytes'] / done['seconds'] / 1e9:.2f} GB/s"
    )


UNITS = ("", " k", " M", " G", " T", " P")
WIDTH = 100


def wrapped(text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, subsequent_indent=" " * 15, break_long_words=False, break_on_hyphens=False
    )


def short(number: Any) -> str:
    """A number in at most four digits, with k, M, G, T or P. Other values become text."""
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return str(number)
    power = 0
    while power < 5 and abs(float(f"{number / 1000**power:.4g}")) >= (1000 if power else 10000):
        power += 1
    return f"{number / 1000**power:.4g}{UNITS[power]}"


def size(nbytes: int) -> str:
    text = short(nbytes)
    return f"{text}B" if " " in text else f"{text} B"


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
