"""The picture of plot.py: the loss of runs, and a strip for each with its difference from the first. Drawn 6 inches
wide with text of 11 points, to be read on a telephone."""

import math

import matplotlib
import numpy
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

# Of Okabe and Ito: the colour-blind tell them apart.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX*<>hdp8"
LINES = ("-", (0, (5, 3)), (0, (1, 1.5)), "-.")
LIBRARIES = {"pt": "PyTorch", "ds": "DeepSpeed"}  # by a part of a run's name
matplotlib.rcParams.update({"font.size": 11, "axes.titlesize": 11})


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
            library = [LIBRARIES[part] for part in name.split("_") if part in LIBRARIES]
            where = [] if library and ranks == "1" else [here]
            words[name] = ", ".join([*library, *where, f"{steps} {micro_batches} of {micro}"])
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
    (line,) = axis.plot(list(series), list(series.values()), **look)
    return line


def tidy(axis):
    axis.grid(color="0.92")
    axis.spines[["top", "right"]].set_visible(False)


def scale(axis, baseline, top):
    """An axis of differences, from zero to top. Returns the line of what one rounding of the baseline's loss can be."""
    units = numpy.spacing(numpy.float32(list(baseline["loss"].values())))
    (line,) = axis.plot(list(baseline["loss"]), units, color="0.5", lw=1)
    axis.set_yscale("symlog", linthresh=1e-8)  # zero has a place of its own, at the bottom
    axis.set_yticks([tick for tick in (0, 1e-7, 1e-4, 1e-1, 1e2) if tick < top])
    axis.set_yticks([], minor=True)
    axis.set_ylim(-2e-9, top)
    tidy(axis)
    return line


def draw_strip(axis, label, baseline, gaps, look, top):
    """One run's difference at every step."""
    draw_line(axis, gaps, **look | {"ls": "", "ms": 3, "markerfacecolor": look["color"]}, clip_on=False)
    line = scale(axis, baseline, top)
    names = {label: Line2D([], [], **look)}
    if axis.get_subplotspec().rowspan.start == 1:
        names["float32 rounding step"] = line
    above = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0, "borderpad": 0.2}
    axis.legend(names.values(), names, ncols=2, columnspacing=1, handlelength=1.6, frameon=False, **above)


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
    heights = [2.4] + [max(0.5, 1 / len(gaps))] * len(gaps)
    figure = Figure(figsize=(6, 0.6 + sum(heights) + 0.3 * len(gaps)), layout="constrained")
    top, *strips = figure.subplots(len(runs), sharex=True, height_ratios=heights)
    draw_line(top, baseline["loss"], color="0.8", lw=7, label=label)
    if baseline["val_loss"]:
        draw_line(top, baseline["val_loss"], ls="", marker="o", color="0.6", ms=8, label="its validation loss")
    first = min(baseline["loss"])
    resumed = set()
    for i, (label, run) in enumerate(others):
        look = style(i)
        every = max(1, len(run["loss"]) // 10)
        draw_line(top, run["loss"], **look, markevery=(2 * i % 10, every), label=label)
        draw_line(top, run["val_loss"], ls="", marker=".", color="black", ms=5)
        if run["val_loss"] and i == len(others) - 1:
            top.lines[-1].set_label("their validation loss" if i else "its validation loss")
        draw_strip(strips[i], label, baseline, gaps[i], look, height)
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
    gap = f"the loss differs by {largest:.1e} at most" if largest else "every bit of the loss is equal"
    top.set_title(f"{title}: {gap}")
    top.set_ylabel("loss (nats per byte)")
    low, high = top.get_ylim()
    top.set_ylim(low, high + 0.25 * (high - low))  # room for the legend
    top.legend(frameon=False, labelspacing=0.2, handlelength=1.6, borderaxespad=0, loc="upper right", alignment="left")
    tidy(top)
    strips[-1].set_xlabel("step")
    strips[len(strips) // 2].set_ylabel("|difference|\n(nats per byte)", y=1.3 if len(strips) > 1 else 0.5)
    figure.align_ylabels()
    return figure
