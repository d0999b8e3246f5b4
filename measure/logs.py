"""The logs of runs, read and compared; tables of what came of them."""

import csv
import re
import string
from pathlib import Path

COLUMNS = ("loss", "val_loss", "grad_norm")


def rows_of(log):
    """Returns the rows of a log as dicts of text; none where there is no log yet."""
    return list(csv.DictReader(log.read_text().splitlines())) if log.exists() else []


def steps(folder, run_name):
    """Returns the steps in logs/<run_name>.csv, in its order."""
    return [int(row["step"]) for row in rows_of(Path(folder, "logs", f"{run_name}.csv"))]


def read_log(folder, run_name, *columns):
    """Returns {column: {step: value}} of logs/<run_name>.csv."""
    rows = rows_of(Path(folder, "logs", f"{run_name}.csv"))
    return {
        column: {int(row["step"]): float(row[column]) for row in rows if row.get(column)}
        for column in columns or ("loss", "val_loss")
    }


def compare(folder, baseline, resumed, column="loss"):
    """Returns |difference| at every step that the resumed run has; the baseline must have them
    all."""
    a = read_log(folder, baseline, column)[column]
    b = read_log(folder, resumed, column)[column]
    assert b and b.keys() <= a.keys()
    return {step: abs(b[step] - a[step]) for step in b}


def largest(folder, baseline, resumed, columns=COLUMNS):
    """Returns, by column, the largest |difference| at any step that the resumed run has."""
    return {column: max(compare(folder, baseline, resumed, column).values()) for column in columns}


def brief(error):
    """Shortens a message: no ranks, paths, colours and names of modules."""
    paths = r"( See)? https?://\S+|/\S*/"
    error = re.sub(rf"\x1b\[\d*m|^(\[rank\d+\]: )?([a-z_]\w*\.)*|{paths}", "", error)
    return error[:200].strip()


def write_table(output, head, rows, *notes):
    """Write a table: of each cell the largest number, and the letters of what was said, which
    follow. Returns its text.

    rows: {label: {column: [number or message]}}
    """
    letters = {}
    (columns, *_) = rows.values()
    width = max(map(len, [head, *rows]))
    lines = ["  ".join([head.ljust(width), *columns])]
    for label, row in rows.items():
        line = label.ljust(width)
        for column, values in row.items():
            numbers = [value for value in values if isinstance(value, float)]
            worst = max(numbers, key=lambda number: (number != number, number), default=None)
            texts = [] if worst is None else [f"{worst:.1e}"]
            for said in dict.fromkeys(value for value in values if isinstance(value, str)):
                texts.append(letters.setdefault(said, string.ascii_letters[len(letters)]))
            line += "  " + " ".join(texts).rjust(len(column))
        lines.append(line.rstrip())
    lines += ["", *(f"{letter}: {said}" for said, letter in letters.items()), *notes]
    text = "\n".join(lines) + "\n"
    output.write_text(text)
    return text
