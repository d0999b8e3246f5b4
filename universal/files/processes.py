# SPDX-License-Identifier: MIT
"""Processes for what keeps Python itself busy, such as the directories of a thousand files: its
threads share one CPU."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from typing import Any

FILES = 32  # with fewer, the start of processes takes longer than the work


class Processes(ProcessPoolExecutor):
    """Processes of which each has one portion of the items. All of that can be pickled."""

    def __init__(self, workers: int):
        ctrl_c = (signal.SIGINT, signal.SIG_DFL)  # ends each without a traceback
        super().__init__(workers, get_context("fork"), signal.signal, ctrl_c)
        self.workers = workers

    def map(self, work: Callable[[Any], Any], items: Sequence) -> Iterator[Any]:
        portion = -(-len(items) // self.workers)
        return super().map(work, items, chunksize=max(1, portion))


def pool_of(workers: int, files: int) -> Executor:
    """Workers for so many files: processes, or threads where a fork could find a lock that is held
    by a thread, such as torch's."""
    is_alone = threading.active_count() == 1 and "torch" not in sys.modules
    return (Processes if is_alone and files >= FILES else ThreadPoolExecutor)(workers)
