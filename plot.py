"""Draw the loss of runs against a baseline, the difference below, and print it as numbers.

    python plot.py logs/default.csv logs/resume_uc.csv --output assets/resume_uc.png --tolerance 1e-5

The first log is the baseline. The picture's CSV, all runs joined by step, is written next to it. With --tolerance,
exit code 1 when a loss differs by more. Nothing is smoothed.
"""

import argparse
import csv
import math
import statistics
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS, STYLES = "osD^vPX*<>hdp8", ("-", (0, (5, 3)), (0, (1, 1.5)), "-.")


def fail(message):
    print(f"plot.py: error: {message}", file=sys.stderr)
    sys.exit(2)


def read_log(path):
    """{"loss": {step: value}, "val_loss": {step: value}, "layout": str, "seconds": [of every step]} of one log."""
    if Path(path).is_dir():
        return read_tensorboard(path)
    try:
        with open(path, newline="") as file:
            rows = list(csv.DictReader(file))
        run = {c: {int(r["step"]): float(r[c]) for r in rows if r.get(c)} for c in ("loss", "val_loss")}
        run["seconds"] = [float(r["seconds"]) for r in rows if r.get("seconds")]
    except FileNotFoundError:
        fail(f"{path} does not exist")
    except (OSError, KeyError, TypeError, ValueError) as error:
        fail(f"{path} is not a log of these scripts: {error!r}")
    if not run["loss"]:
        fail(f"{path} has no steps with a loss")
    run["layout"] = rows[-1].get("layout") or ""
    return run


def read_tensorboard(folder):
    """The same of a folder of event files, these scripts', DeepSpeed's or Megatron-DeepSpeed's. They hold float32."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        fail(f"{folder} is a folder of TensorBoard files: pip install tensorboard")
    series = {}
    for file in sorted(Path(folder).rglob("*tfevents*")):
        events = EventAccumulator(str(file.parent), {"scalars": 0}).Reload()
        series |= {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
    run = {
        column: next((series[tag] for tag in tags if tag in series), {})
        for column, tags in {
            "loss": ("loss", "lm-loss-training/lm loss", "Train/Samples/train_loss"),
            "val_loss": ("val_loss", "lm-loss-validation/lm loss validation"),
        }.items()
    }
    if not run["loss"]:
        fail(f"{folder} has no loss in its TensorBoard files; there is: {', '.join(series) or 'nothing'}")
    if "loss" not in series and "Train/Samples/train_loss" in series:  # counted in sequences
        batch = math.gcd(*run["loss"])
        run["loss"] = {samples // batch: loss for samples, loss in run["loss"].items()}
    return run | {"layout": "", "seconds": []}


def differences(baseline, run, column):
    """{step: |run - baseline|} over the steps that both have; NaN compares as infinitely far."""
    common = sorted(baseline[column].keys() & run[column].keys())
    gaps = {step: abs(run[column][step] - baseline[column][step]) for step in common}
    return {step: gap if gap == gap else float("inf") for step, gap in gaps.items()}


def in_words(names, runs):
    """What the legend says of each run, from where it starts and its layout; the name where that says too little."""
    first, words = min(runs[0]["loss"]), []
    interrupted = any(min(run["loss"]) > first for run in runs)
    for name, run in zip(names, runs, strict=True):
        if " " in name or not run.get("layout") or len(runs) > 8:
            words.append(name.replace("_", " "))
            continue
        micro, steps, n = map(int, run["layout"].split(" x "))
        ranks, batches = f"{n} rank{'s' * (n > 1)}", f"{steps} micro-batch{'es' * (steps > 1)} of {micro}"
        here = f"{ranks}, uninterrupted" if interrupted else f"{ranks}, {batches}"
        words.append(f"resumed on {ranks}" if min(run["loss"]) > first else here)
    return [f"{w} ({name})" if words.count(w) > 1 else w for w, name in zip(words, names, strict=True)]


def style(i):
    """A colour, a marker and a line of its own for every run; the colours are Okabe's and Ito's, which the colour-blind
    tell apart."""
    own = {"color": COLORS[i % len(COLORS)], "marker": MARKERS[i % len(MARKERS)], "markerfacecolor": "none"}
    return own, {"lw": 1.3, "ls": STYLES[i % len(STYLES)], "ms": 6}


def draw_strip(axis, label, baseline, gaps, look, top):
    """One run's difference at every step, beside one unit in the last place of the baseline's loss."""
    unit = {step: 2.0 ** (math.frexp(loss)[1] - 24) for step, loss in baseline["loss"].items() if math.isfinite(loss)}
    axis.plot(*zip(*gaps.items(), strict=True), **look, ls="", ms=4, clip_on=False)
    axis.plot(*zip(*unit.items(), strict=True), color="0.5", lw=1)
    axis.set_yscale("symlog", linthresh=1e-8)  # zero has a place of its own, at the bottom
    axis.set(ylim=(-2e-9, top), yticks=[0, *(10.0**n for n in range(-7, math.ceil(math.log10(top)) + 1, 2))])
    axis.set_title(label, loc="left", fontsize=9, color=look["color"], pad=3)
    axis.grid(color="0.92")
    axis.spines[["top", "right"]].set_visible(False)


def draw(names, runs, path):
    """The loss of all runs, and below a strip for each with its difference from the first."""
    baseline, labels, gaps = runs[0], in_words(names, runs), [differences(runs[0], run, "loss") for run in runs[1:]]
    figure, (top, *strips) = plt.subplots(
        len(runs), 1, figsize=(8, 3.6 + 0.85 * len(gaps)), sharex=True, height_ratios=[3.6] + [0.85] * len(gaps),
        layout="constrained",
    )  # fmt: skip
    top.plot(*zip(*baseline["loss"].items(), strict=True), color="0.8", linewidth=7, label=labels[0])
    if baseline["val_loss"]:
        points = zip(*baseline["val_loss"].items(), strict=True)
        top.plot(*points, "o", color="0.6", markersize=9, label="the same, validation")
    largest = max(max(gap.values()) for gap in gaps)
    height = 10 * max(1e-6, largest if largest < 1e9 else 1)
    for i, (axis, label, run, gap) in enumerate(zip(strips, labels[1:], runs[1:], gaps, strict=True)):
        look, line = style(i)
        often = (2 * i % 10, max(1, len(run["loss"]) // 10))
        top.plot(*zip(*run["loss"].items(), strict=True), **look, **line, markevery=often, label=label)
        if run["val_loss"]:
            top.plot(*zip(*run["val_loss"].items(), strict=True), ".", color=look["color"], markersize=5)
        draw_strip(axis, label, baseline, gap, look, height)
    first, last = min(baseline["loss"]), max(baseline["loss"])
    resumed = {max((s for s in baseline["loss"] if s < min(run["loss"])), default=first) for run in runs} - {first}
    for step in resumed:
        for axis in (top, *strips):
            axis.axvline(step + 0.5, color="0.4", linestyle="--", linewidth=1)
    if resumed:  # the picture begins not long before, or the first steps would press the rest flat
        begin = max(first, min(resumed) - 0.4 * (last - min(resumed)))
        seen = [v for run in runs for c in ("loss", "val_loss") for s, v in run[c].items() if s >= begin]
        seen = [value for value in seen if math.isfinite(value)] or [0, 1]
        edge = 0.05 * (max(seen) - min(seen)) + 1e-9
        top.set(xlim=(begin - 1, last + 1), ylim=(min(seen) - edge, max(seen) + edge))
    what = f"Resumed after step {', '.join(map(str, sorted(resumed)))}" if resumed else f"{len(runs)} runs"
    gap = f"the loss differs by {largest:.1e} at most" if largest else "every bit of the loss equal"
    top.set(title=f"{what}: {gap}", ylabel="loss (nats per byte)")
    top.legend(frameon=False)
    top.grid(color="0.92")
    top.spines[["top", "right"]].set_visible(False)
    strips[0].set_title("|difference| at every step; line: one unit in the loss's last place", loc="right", fontsize=8)
    strips[-1].set(xlabel="step")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200)


def write_joined(names, runs, path):
    steps = sorted(set().union(*(run["loss"] for run in runs)))
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        columns = ("loss", "val_loss")
        writer.writerow(["step", *(f"{name} {column}" for column in columns for name in names)])
        writer.writerows([step, *(run[c].get(step, "") for c in columns for run in runs)] for step in steps)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="+", help="logs/*.csv or folders of TensorBoard files, the baseline first")
    parser.add_argument("--output", default="out/loss.png", help="picture to write, with its .csv beside it")
    parser.add_argument("--tolerance", type=float, help="exit 1 when a |difference| is above this")
    args = parser.parse_args()
    if len(set(args.logs)) < max(2, len(args.logs)):
        fail("name two different logs, or more: the first one is the baseline")
    names, runs = [Path(log).stem for log in args.logs], [read_log(log) for log in args.logs]
    if len(set(names)) < len(names):  # a run's log and its TensorBoard files, say
        names = args.logs
    for name, run in zip(names[1:], runs[1:], strict=True):
        if not differences(runs[0], run, "loss"):
            fail(f"{name} has no step in common with {names[0]}")
    output = Path(args.output)
    draw(names, runs, output)
    write_joined(names, runs, output.with_suffix(".csv"))

    row = f"{{:<{max(20, *map(len, names))}}}" + "{:>20}{:>10}{:>14}{:>12}{:>15}{:>18}{:>9}"
    print(row.format("", "micro x accum x", "", "", "", "", "validation", ""))
    columns = ("run", "ranks = batch", "steps", "first |diff|", "max |diff|", "bit-identical", "max |diff|", "steps/s")
    print(row.format(*columns))
    above = []
    for name, run in zip(names, runs, strict=True):
        steps, gaps, validation = list(run["loss"]), *(differences(runs[0], run, c) for c in ("loss", "val_loss"))
        layout = f"{run['layout']} = {math.prod(map(int, run['layout'].split(' x ')))}" if run["layout"] else ""
        numbers = ["", "baseline", "", ""]
        if run is not runs[0]:
            zeros = sum(gap == 0 for gap in gaps.values())
            numbers = [f"{next(iter(gaps.values())):.1e}", f"{max(gaps.values()):.1e}", f"{zeros} of {len(gaps)}"]
            numbers.append(f"{max(validation.values()):.1e}" if validation else "")
        speed = f"{1 / statistics.median(run['seconds']):.1f}" if run["seconds"] else ""
        print(row.format(name, layout, f"{steps[0]}-{steps[-1]}", *numbers, speed))
        for kind, series in (("training", gaps), ("validation", validation)):
            above += [(step, name, kind, g) for step, g in series.items() if g > (args.tolerance or 0)]
    print(f"wrote {output} and {output.with_suffix('.csv')}")
    if above and args.tolerance is not None:
        step, name, kind, gap = min(above)
        sys.exit(f"plot.py: {name} differs by {gap:.1e} at step {step} ({kind}), more than {args.tolerance:g}")


if __name__ == "__main__":
    main()
