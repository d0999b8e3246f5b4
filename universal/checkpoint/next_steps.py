# SPDX-License-Identifier: MIT
"""The file next_steps.csv of a checkpoint: a row for each of the steps after it, as they were
trained. proof.py writes and compares them."""

import contextlib
import json
import os
import weakref
from pathlib import Path
from typing import NamedTuple

from universal.checkpoint.types import NEXT_STEPS


class Row(NamedTuple):
    """What is written down of a step; None is what was not seen, or in no file of that version.

    dtype: of matrix products. draws: the mean of the hashes of the generators' states before each
    forward pass that drew random numbers; 0 if none did. digests: for 1, 2, ... of the tensors that
    have a row for each sample, the mean hash of their rows, which no order of the samples, no cut
    into micro-batches, and no rank that gets the same changes. others: the mean hash of a
    micro-batch's other tensors. rates: of the parameter groups.
    """

    step: int
    ranks: int
    micro_batch: int | None
    dtype: str
    loss_scale: float
    loss: float | None
    grad_norm: float | None
    draws: float | None
    others: float | None
    digests: str | None
    rates: list[float | None]

    def text(self) -> str:
        """A line of the file."""
        *cells, rates = self
        return json.dumps([*cells, *rates], separators=(",", ":"))[1:-1] + "\n"


HEADER = ",".join(Row._fields) + "\n"


def read_rows(path: Path, first_step: int) -> dict[int, Row]:
    """The rows of the steps from first_step on, by step; none without a file.

    Other versions have other columns. Half a row, of a job that was killed, is the last.
    """
    text = path.read_text() if path.exists() else ""
    header, *lines = text.splitlines(keepends=True) or [""]
    names = header.split(",")[:-1]  # and the rates
    rows = {}
    with contextlib.suppress(ValueError, TypeError):
        for step, line in enumerate(lines, first_step):
            cells = json.loads(f"[{line}]")
            columns = dict.fromkeys(Row._fields) | dict(zip(names, cells, strict=False))
            columns = {name: columns[name] for name in Row._fields}
            row = Row(**columns | {"rates": cells[len(names) :]})
            if row.step != step or not line.endswith("\n"):
                break
            rows[step] = row
    return rows


class NextSteps:
    """The file of a checkpoint, for the steps after it until `end`, of the run that has saved it.

    It belongs to the folder, which may get another name, or be removed, before they are trained. It
    is no link to the file of another one.
    """

    def __init__(self, folder: Path, end: int):
        self.folder = os.open(folder, os.O_RDONLY)
        weakref.finalize(self, os.close, self.folder)
        self.end = end
        with contextlib.suppress(FileNotFoundError):
            os.unlink(NEXT_STEPS, dir_fd=self.folder)
        self.write(HEADER, os.O_CREAT)

    def write(self, text: str, flags: int = 0) -> None:
        """Append to the file, unless it has been linked since."""
        flags |= os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW
        with open(os.open(NEXT_STEPS, flags, 0o666, dir_fd=self.folder), "a") as file:
            if os.fstat(file.fileno()).st_nlink == 1:
                file.write(text)

    def add(self, row: Row) -> None:
        if row.step <= self.end:
            with contextlib.suppress(FileNotFoundError):  # the checkpoint was removed
                self.write(row.text())
