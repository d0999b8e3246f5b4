"""The logs of runs, read and compared."""

import csv
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
