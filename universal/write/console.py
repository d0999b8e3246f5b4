# SPDX-License-Identifier: MIT
"""What the commands print: a progress bar, an error in one line, the figures of the end."""

import contextlib
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any

from universal.errors import CheckpointError, RankSilent


@contextlib.contextmanager
def bar(total: int, progress: bool) -> Iterator[Callable[[int], Any]]:
    """Yields a function that moves a progress bar by so many bytes, if there is a terminal,
    and tqdm, which comes with DeepSpeed."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda nbytes: None
        return
    with tqdm(
        total=total, unit="B", unit_scale=True, disable=not progress or None
    ) as shown:  # None: no terminal
        yield shown.update


@contextlib.contextmanager
def in_one_line(program: str, rank: int = 0) -> Iterator[None]:
    """Rank 0 prints an error, and every warning, as one line on standard error; after an error the
    process ends."""

    def say(kind, text):
        if not rank:
            print(
                f"{program}: {kind}: {' '.join(str(text).splitlines())}",
                file=sys.stderr,
                flush=True,
            )

    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")
    warnings.showwarning = lambda message, *rest: say("warning", message)
    warnings.simplefilter("always", UserWarning)
    try:
        yield
        return
    except (CheckpointError, RankSilent) as error:
        code = 2
        say("error", error)
    except (OSError, MemoryError) as error:
        code = 1
        say("error", error if str(error) else "out of memory")
    except KeyboardInterrupt:
        code = 130
    if not rank:
        sys.exit(code)
    time.sleep(5)  # rank 0 prints it, so this rank must not make the launcher kill rank 0 first
    os._exit(code)


def totals(
    source: Any, output: Any, parameters: Sized, sizes: Iterable[int], began: float
) -> dict[str, Any]:
    """What a command returns, and report() prints. sizes: in bytes. began: by perf_counter()."""
    return {
        "source": source,
        "output": output,
        "parameters": len(parameters),
        "bytes": sum(sizes),
        "seconds": time.perf_counter() - began,
    }


def report(done: dict[str, Any]) -> None:
    """Print the line of figures of totals()."""
    print(
        f"{done['source']} -> {done['output']}: {done['parameters']} parameters, "
        f"{done['bytes']:,} bytes in {done['seconds']:.2f} s, "
        f"{done['bytes'] / done['seconds'] / 1e9:.2f} GB/s"
    )
