# SPDX-License-Identifier: MIT
"""The file next_steps.csv of a checkpoint: a row for each of the steps after it, as they were
trained. proof.py writes and compares them."""

import contextlib
import functools
import json
import os
import weakref
from pathlib import Path
from typing import NamedTuple

from universal.checkpoint.types import NEXT_STEPS


class Row(NamedTuple):
    """What is written down of a step. samples, loss, grad_norm: None where they were not seen.

    dtype: of matrix products. samples: the mean of their hashes, which no order of them, no cut
    into micro-batches, and no rank that gets the same changes. rates: of the parameter groups.
    """

    step: int
    ranks: int
    dtype: str
    samples: float | None
    loss_scale: float
    loss: float | None
    grad_norm: float | None
    rates: list[float]

    def text(self) -> str:
        """A line of the file."""
        *cells, rates = self
        return json.dumps([*cells, *rates], separators=(",", ":"))[1:-1] + "\n"


HEADER = ",".join(Row._fields) + "\n"


def read_rows(path: Path, first_step: int) -> tuple[dict[int, Row], bool]:
    """The rows of the steps from first_step on, by step.

    Returns: the rows; whether others may follow them. Not so behind half a row of a job that was
        killed, nor in a file that is of another save.
    """
    header, *lines = path.read_text().splitlines(keepends=True) or [""]
    rows = {}
    with contextlib.suppress(ValueError, TypeError):
        for step, line in enumerate(lines, first_step):
            cells = json.loads(f"[{line}]")
            row = Row(*cells[:7], rates=cells[7:])
            if row.step != step or not line.endswith("\n"):
                break
            rows[step] = row
    return rows, header == HEADER and len(rows) == len(lines)


class NextSteps:
    """The file of a checkpoint, for its steps `begin` to `end`.

    It belongs to the folder, which may get another name, or be removed, before they are trained.
    """

    def __init__(self, folder: Path, begin: int, end: int):
        self.folder = os.open(folder, os.O_RDONLY)
        weakref.finalize(self, os.close, self.folder)
        self.begin = begin
        self.end = end

    def write(self, text: str, mode: str) -> None:
        opener = functools.partial(os.open, dir_fd=self.folder)
        with open(NEXT_STEPS, mode, opener=opener) as file:
            file.write(text)

    def add(self, row: Row) -> None:
        if self.begin <= row.step <= self.end:
            with contextlib.suppress(FileNotFoundError):  # the checkpoint was removed
                self.write(row.text(), "a")
