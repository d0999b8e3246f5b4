# SPDX-License-Identifier: MIT
"""The file next_steps.csv of a checkpoint: a row for each step that was trained after it. proof.py
fills and compares the rows."""

import contextlib
import json
import os
import weakref
from pathlib import Path
from typing import NamedTuple

from universal.checkpoint.types import NEXT_STEPS


class Row(NamedTuple):
    """A step's numbers; None for what was not seen, or is in no file of that version.

    dtype: of matrix products. draws: the mean hash of the generators' states before each forward
    pass that drew random numbers; 0 if none did. others: the mean hash of those tensors of a
    micro-batch that have no row for each sample. digests: of the first 1, 2, ... of those that
    have, the mean hash of their rows, which depends neither on the order of the samples nor on how
    they are shared out. rates: the learning rate of each parameter group.
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
    """Read {step: Row} for the steps from first_step on; {} if there is no file.

    Files of other versions may have other columns. A killed job leaves half a row: reading ends.
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
    """Writes a checkpoint's file, for the steps up to `end`. An older file is replaced.

    The folder stays open, since it may be renamed or removed before those steps are trained.
    """

    def __init__(self, folder: Path, end: int):
        self.folder = os.open(folder, os.O_RDONLY)
        weakref.finalize(self, os.close, self.folder)
        self.end = end
        with contextlib.suppress(FileNotFoundError):
            os.unlink(NEXT_STEPS, dir_fd=self.folder)
        self.write(HEADER, os.O_CREAT)

    def write(self, text: str, flags: int = 0) -> None:
        """Append to the file, unless another folder has a hard link to it by now."""
        flags |= os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW
        with open(os.open(NEXT_STEPS, flags, 0o666, dir_fd=self.folder), "a") as file:
            if os.fstat(file.fileno()).st_nlink == 1:
                file.write(text)

    def add(self, row: Row) -> None:
        if row.step <= self.end:
            with contextlib.suppress(FileNotFoundError):  # the checkpoint was removed
                self.write(row.text())
