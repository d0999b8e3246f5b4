# SPDX-License-Identifier: MIT
"""Print one line, and progress bars."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

LONG_SECONDS = 10  # seconds, after which a load shows its progress


def print_line(text: str) -> None:
    """Print one line on standard output; no failure of that, such as a closed pipe, is raised."""
    with contextlib.suppress(Exception):  # of a pipe that nobody reads, of a closed file
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


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
