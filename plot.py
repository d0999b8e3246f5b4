"""Draw the loss of runs against a baseline, the difference below, and print it as numbers.

    python plot.py logs/default.csv logs/resume_uc.csv --output assets/resume_uc.png --tolerance 1e-5

The first log is the baseline. The picture's CSV, all runs joined by step, is written next to it. With --tolerance,
exit code 1 when a loss differs by more, or a run ends before the others. Nothing is smoothed.
"""

import argparse
import csv
import math
import statistics
import sys
from pathlib import Path

import curves

KINDS = {"loss": "training", "val_loss": "validation"}
HEAD = ("", "micro x accum x", "", "", "", "", "validation", "")
COLUMNS = ("run", "ranks = batch", "steps", "first |diff|", "max |diff|", "bit-identical", "max |diff|", "steps/s")


def fail(message):
    print(f"plot.py: error: {message}", file=sys.stderr)
    sys.exit(2)


def read_log(path):
    """{"loss", "val_loss" or "seconds": {step: value}, "layout": str} of one log."""
    try:
        with open(path, newline="") as file:
            rows = list(csv.DictReader(file))
        run = {c: {int(r["step"]): float(r[c]) for r in rows if r.get(c)} for c in (*KINDS, "seconds")}
    except FileNotFoundError:
        fail(f"{path} does not exist")
    except (OSError, KeyError, TypeError, ValueError) as error:
        fail(f"{path} is not a log of these scripts: {error!r}")
    if not run["loss"]:
        fail(f"{path} has no steps with a loss")
    run["layout"] = rows[-1].get("layout") or ""
    return run


def differences(baseline, run, column):
    """{step: |run - baseline|} over the steps that both have; NaN compares as infinitely far."""
    gaps = {}
    for step in sorted(baseline[column].keys() & run[column].keys()):
        gap = abs(run[column][step] - baseline[column][step])
        gaps[step] = math.inf if math.isnan(gap) else gap
    return gaps


def write_joined(runs, path):
    series = {}
    for column in KINDS:
        for name, run in runs.items():
            series[f"{name} {column}"] = run[column]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *series])
        for step in sorted(set().union(*series.values())):
            values = [of_run.get(step, "") for of_run in series.values()]
            writer.writerow([step, *values])


def numbers(loss, val_loss):
    """How far a run is from the baseline, as the table says it, from the differences of both losses."""
    gaps = list(loss.values())
    return (
        f"{gaps[0]:.1e}",
        f"{max(gaps):.1e}",
        f"{gaps.count(0)} of {len(gaps)}",
        f"{max(val_loss.values()):.1e}" if val_loss else "",
    )


def print_table(runs, gaps):
    width = max(20, *map(len, runs))
    row = f"{{:<{width}}}" + "{:>20}{:>10}{:>14}{:>12}{:>15}{:>18}{:>9}"
    print(row.format(*HEAD))
    print(row.format(*COLUMNS))
    baseline, *_ = runs
    for name, run in runs.items():
        steps = f"{min(run['loss'])}-{max(run['loss'])}"
        layout = run["layout"]
        if layout:
            batch = math.prod(map(int, layout.split(" x ")))
            layout = f"{layout} = {batch}"
        speed = ""
        if run["seconds"]:
            seconds = statistics.median(run["seconds"].values())
            speed = f"{1 / seconds:.1f}"
        far = ("", "baseline", "", "")
        if name != baseline:
            far = numbers(**gaps[name])
        print(row.format(name, layout, steps, *far, speed))


def first_above(gaps, tolerance):
    """(step, run, kind of loss, difference), or None."""
    above = []
    for name, columns in gaps.items():
        for column, kind in KINDS.items():
            steps = columns[column].items()
            above += [(step, name, kind, gap) for step, gap in steps if gap > tolerance]
    return min(above, default=None)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="+", help="logs/*.csv, the baseline first")
    parser.add_argument("--output", type=Path, default="out/loss.png", help="picture to write, with its .csv beside it")
    parser.add_argument("--tolerance", type=float, default=math.inf, help="exit 1 when a |difference| is above this")
    args = parser.parse_args()
    if len(set(args.logs)) < max(2, len(args.logs)):
        fail("name two different logs, or more: the first one is the baseline")
    names = [Path(log).stem for log in args.logs]
    if len(set(names)) < len(names):
        names = args.logs
    runs = {name: read_log(log) for name, log in zip(names, args.logs, strict=True)}
    baseline, *others = names
    gaps = {}
    for name, run in runs.items():
        gaps[name] = {column: differences(runs[baseline], run, column) for column in KINDS}
        if not gaps[name]["loss"]:
            fail(f"{name} has no step in common with {baseline}")
    joined = args.output.with_suffix(".csv")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    figure = curves.draw(curves.in_words(runs), [gaps[name]["loss"] for name in others])
    figure.savefig(args.output, dpi=200)
    write_joined(runs, joined)
    print_table(runs, gaps)
    print(f"wrote {args.output} and {joined}")
    if above := first_above(gaps, args.tolerance):
        step, name, kind, gap = above
        sys.exit(f"plot.py: {name} differs by {gap:.1e} at step {step} ({kind}), more than {args.tolerance:g}")
    if args.tolerance < math.inf:
        ends = {name: max(run["loss"]) for name, run in runs.items()}
        if len(set(ends.values())) > 1:
            sys.exit(f"plot.py: the runs end at different steps: {ends}")
        largest = max(gap for columns in gaps.values() for column in columns.values() for gap in column.values())
        print(f"PASS: {largest:.1e} <= {args.tolerance:g}")


if __name__ == "__main__":
    main()
