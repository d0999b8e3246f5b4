# SPDX-License-Identifier: MIT
"""Print progress bars, errors in one line, and the figures at the end of a conversion."""

import contextlib
import os
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from universal.errors import CheckpointError

LONG = 10  # seconds, after which a load shows its progress


def print_line(text: str) -> None:
    """Print one line on standard output; no failure of that, such as a closed pipe, is raised."""
    with contextlib.suppress(Exception):  # of a pipe that nobody reads, of a closed file
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def print_screen(text: str) -> None:
    """Print text that a reader, such as `head`, may stop to read before its end."""
    try:
        print(text, flush=True)
    except BrokenPipeError:  # what is left would be flushed at the end, and fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal; not if it is closed, or None."""
    with contextlib.suppress(Exception):
        return stream.isatty()
    return False


@contextlib.contextmanager
def bar(total: int, progress: bool, delay: float = 0) -> Iterator[Callable[[int], Any]]:
    """Yields a function that moves a progress bar by a number of bytes.

    It is shown on a terminal only, and if tqdm, which comes with DeepSpeed, is there. delay:
    seconds before it appears.
    """
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
