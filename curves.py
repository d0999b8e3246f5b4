"""The picture of plot.py: the loss of runs, and a strip for each with its difference from the first. It is drawn to be
read on a telephone: text of 10 points on 6 inches."""

import math

import matplotlib
import numpy
from matplotlib.figure import Figure

# Of Okabe and Ito: the colour-blind tell them apart.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX*<>hdp8"
LINES = ("-", (0, (5, 3)), (0, (1, 1.5)), "-.")
FRAMEWORKS = {"pt": "PyTorch, ", "ds": "DeepSpeed, "}  # by a part of a run's name
WIDTH = 6  # inches
matplotlib.rcParams.update({"font.size": 10, "axes.titlesize": 11, "legend.fontsize": 9.5})


def in_words(runs):
    """The runs by what the legend says of them, from where they start and from their layout: {words: run}."""
    starts = {name: min(run["loss"]) for name, run in runs.items()}
    first, *_ = starts.values()
    words = {name: name.replace("_", " ") for name in runs}
    for name, run in runs.items():
        if not run["layout"] or len(runs) > 8:
            continue
        micro, steps, ranks = run["layout"].split(" x ")
        here = f"{ranks} rank" if ranks == "1" else f"{ranks} ranks"
        micro_batches = "micro-batch" if steps == "1" else "micro-batches"
        if starts[name] > first:
            words[name] = f"resumed on {here}"
        elif max(starts.values()) > first:
            words[name] = f"{here}, uninterrupted"
        else:
            framework = "".join(FRAMEWORKS.get(part, "") for part in name.split("_"))
            words[name] = f"{framework}{here}, {steps} {micro_batches} of {micro}"
    found = {}
    for name, word in words.items():
        alike = sum(other == word for other in words.values())
        label = f"{word} ({name})" if alike > 1 else word
        found[label] = runs[name]
    return found


def style(i):
    """A colour, a marker and a line of its own for every run."""
    return {
        "color": COLORS[i % len(COLORS)],
        "marker": MARKERS[i % len(MARKERS)],
        "markerfacecolor": "none",
        "ls": LINES[i % len(LINES)],
        "lw": 1.3,
        "ms": 6,
    }


def draw_line(axis, series, **look):
    axis.plot(list(series), list(series.values()), **look)


def tidy(axis):
    axis.grid(color="0.92")
    axis.spines[["top", "right"]].set_visible(False)


def draw_strip(axis, label, baseline, gaps, look, top, explained=True):
    """One run's difference at every step, beside the distance of two float32 numbers near the baseline's loss.
    explained: what that line is."""
    draw_line(axis, gaps, **look | {"ls": "", "ms": 4}, clip_on=False, label=label)
    losses = numpy.float32(list(baseline["loss"].values()))
    words = "float32 rounding unit" if explained else None
    axis.plot(list(baseline["loss"]), numpy.spacing(losses), color="0.5", lw=1, label=words)
    axis.set_yscale("symlog", linthresh=1e-8)  # zero has a place of its own, at the bottom
    axis.set_yticks([tick for tick in (0, 1e-7, 1e-5, 1e-3, 1e-1, 1e1, 1e3) if tick <= top])
    axis.set_ylim(-2e-9, top)
    above = {"loc": "lower left", "bbox_to_anchor": (-0.02, 1.0), "borderaxespad": 0, "borderpad": 0.2}
    legend = axis.legend(**above, frameon=False, ncols=2, handlelength=1.2, columnspacing=1.2)
    legend.set_in_layout(False)  # it stands where the title would
    axis.set_title(" ", pad=4)
    tidy(axis)


def zoom(axis, runs, resumed):
    """Begin not long before the resume, or the first steps would press the rest flat."""
    last = max(max(run["loss"]) for run in runs)
    before = 0.4 * (last - resumed)
    begin = max(1, resumed - before)
    seen = []
    for run in runs:
        for column in ("loss", "val_loss"):
            seen += [value for step, value in run[column].items() if step >= begin]
    seen = [value for value in seen if math.isfinite(value)] or [0, 1]
    low = min(seen)
    high = max(seen)
    edge = 0.05 * (high - low) + 1e-9
    axis.set_xlim(begin - 1, last + 0.02 * (last - begin))
    axis.set_ylim(low - edge, high + edge)


def draw(runs, gaps):
    """A figure. runs: {what the legend says: run}, the baseline first; gaps: {step: |difference|} of each other one."""
    (label, baseline), *others = runs.items()
    largest = max(max(gap.values()) for gap in gaps)
    height = 10 * max(1e-6, largest if largest < 1e9 else 1)
    heights = [3.0] + [0.85] * len(gaps)
    figure = Figure(figsize=(WIDTH, sum(heights)), layout="constrained")
    top, *strips = figure.subplots(len(runs), sharex=True, height_ratios=heights)
    draw_line(top, baseline["loss"], color="0.8", lw=7, label=label)
    if baseline["val_loss"]:
        words = f"{label.split(',')[0]}, validation loss"
        draw_line(top, baseline["val_loss"], ls="", marker="o", color="0.6", ms=9, label=words)
    first = min(baseline["loss"])
    resumed = set()
    for i, (label, run) in enumerate(others):
        look = style(i)
        every = max(1, len(run["loss"]) // 10)
        draw_line(top, run["loss"], **look, markevery=(2 * i % 10, every), label=label)
        words = "the others, validation loss" if i == len(others) - 1 and run["val_loss"] else None
        draw_line(top, run["val_loss"], ls="", marker=".", color="black", ms=5, label=words)
        draw_strip(strips[i], label, baseline, gaps[i], look, height, explained=not i)
        start = min(run["loss"])
        if start > first:
            resumed.add(start - 1)
    title = f"{len(runs)} runs"
    if resumed:
        steps = ", ".join(map(str, sorted(resumed)))
        title = f"Resumed after step {steps}"
        zoom(top, runs.values(), min(resumed))
    for step in resumed:
        for axis in figure.axes:
            axis.axvline(step + 0.5, color="0.4", linestyle="--", linewidth=1)
    gap = "every bit of the loss equal"
    if largest:
        gap = f"the loss differs by {largest:.1e} at most"
    top.set_title(f"{title}: {gap}")
    top.set_ylabel("loss (nats per byte)")
    top.legend(frameon=False, labelspacing=0.3)
    tidy(top)
    figure.supylabel("|difference| (nats per byte)", fontsize=10, y=sum(heights[1:]) / sum(heights) / 2 + 0.04)
    strips[-1].set_xlabel("step")
    return figure
