"""The picture of plot.py: the loss of runs, and a strip for each with its difference from the first."""

import math

import numpy
from matplotlib.figure import Figure

# Of Okabe and Ito: the colour-blind tell them apart.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX*<>hdp8"
LINES = ("-", (0, (5, 3)), (0, (1, 1.5)), "-.")


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
            words[name] = f"{here}, {steps} {micro_batches} of {micro}"
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


def draw_strip(axis, label, baseline, gaps, look, top):
    """One run's difference at every step, beside one unit in the last place of the baseline's loss."""
    look = look | {"ls": "", "ms": 4}
    draw_line(axis, gaps, **look, clip_on=False)
    losses = numpy.float32(list(baseline["loss"].values()))
    units = numpy.spacing(losses)
    axis.plot(list(baseline["loss"]), units, color="0.5", lw=1)
    axis.set_yscale("symlog", linthresh=1e-8)  # zero has a place of its own, at the bottom
    axis.set_yticks([0, 1e-7, 1e-5, 1e-3, 1e-1, 1e1, 1e3])
    axis.set_ylim(-2e-9, top)
    axis.set_title(label, loc="left", fontsize=9, pad=3, color=look["color"])
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
    axis.set_xlim(begin - 1, last + 1)
    axis.set_ylim(low - edge, high + edge)


def draw(runs, gaps):
    """A figure. runs: {what the legend says: run}, the baseline first; gaps: {step: |difference|} of each other one."""
    (label, baseline), *others = runs.items()
    largest = max(max(gap.values()) for gap in gaps)
    height = 10 * max(1e-6, largest if largest < 1e9 else 1)
    heights = [3.6] + [0.85] * len(gaps)
    tall = 3.6 + 0.85 * len(gaps)
    figure = Figure(figsize=(8, tall), layout="constrained")
    top, *strips = figure.subplots(len(runs), sharex=True, height_ratios=heights)
    draw_line(top, baseline["loss"], color="0.8", lw=7, label=label)
    if baseline["val_loss"]:
        draw_line(top, baseline["val_loss"], ls="", marker="o", color="0.6", ms=9, label="the same, validation")
    first = min(baseline["loss"])
    resumed = set()
    for i, (label, run) in enumerate(others):
        look = style(i)
        every = max(1, len(run["loss"]) // 10)
        draw_line(top, run["loss"], **look, markevery=(2 * i % 10, every), label=label)
        draw_line(top, run["val_loss"], ls="", marker=".", color=look["color"], ms=5)
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
    gap = "every bit of the loss equal"
    if largest:
        gap = f"the loss differs by {largest:.1e} at most"
    top.set_title(f"{title}: {gap}")
    top.set_ylabel("loss (nats per byte)")
    top.legend(frameon=False)
    tidy(top)
    strips[0].set_title("|difference| at every step; line: one unit in the loss's last place", loc="right", fontsize=8)
    strips[-1].set_xlabel("step")
    return figure
