# SPDX-License-Identifier: MIT
"""What the commands print: a progress bar, an error in one line, the figures of the end."""

import contextlib
import os
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from universal.errors import CheckpointError

LONG = 10  # seconds, after which a load tells how far it is


def print_line(text: str) -> None:
    """Print one line on standard output, if that is open: to whom it matters less than the job."""
    with contextlib.suppress(Exception):  # of a pipe that nobody reads, of a closed file
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def print_screen(text: str) -> None:
    """Print it. Whoever reads it may stop early, as `head` does."""
    try:
        print(text, flush=True)
    except BrokenPipeError:  # what is left would be flushed at the end, and fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def is_terminal(stream: Any) -> bool:
    """Whether somebody looks at it; not if it is closed, or None, as the shell closed it."""
    with contextlib.suppress(Exception):
        return stream.isatty()
    return False


@contextlib.contextmanager
def bar(total: int, progress: bool, delay: float = 0) -> Iterator[Callable[[int], Any]]:
    """Yields a function that moves a progress bar by so many bytes, if there is a terminal,
    and tqdm, which comes with DeepSpeed. delay: seconds after which it appears."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda nbytes: None
        return
    disable = not (progress and is_terminal(sys.stderr))
    options = {"unit": "B", "unit_scale": True, "disable": disable, "delay": delay}
    with tqdm(total=total, **options) as shown:  # it ends by itself when the terminal is gone
        yield shown.update


@contextlib.contextmanager
def in_one_line(program: str) -> Iterator[None]:
    """Prints an error, and every warning, as one line on standard error.

    After an error the process ends, with 2, after Ctrl-C with 130.
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
    """Print the figures of what convert() has returned."""
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
    """A number in at most four digits, and k, M, G, T or P. Other values as they are."""
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
