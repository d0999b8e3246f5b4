"""Draw a step's micro-batches by rank, before and after a rank is lost; print what other numbers of
ranks are worth.

    python -m measure.shares --output out/shares.png
"""

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from measure import options
from universal.batches import Share

FOLLOWED = "#56B4E9"
OTHER = "0.85"
MICRO_BATCHES = 32
LOST = 3  # this rank's micro-batches are followed
BEFORE = 8
AFTER = 7
matplotlib.rcParams["font.size"] = 11


def shares(micro_batches, ranks):
    return [Share(micro_batches, 1, ranks, rank) for rank in range(ranks)]


def efficiency(micro_batches, ranks):
    """The part of the ranks' work that counts: a step's micro-batches, of those that are
    computed."""
    share = Share(micro_batches, 1, ranks)
    return micro_batches / (share.accumulation * ranks)


def divisor(micro_batches, ranks):
    """The largest number of ranks, of at most so many, that divides the micro-batches."""
    return max(n for n in range(1, ranks + 1) if micro_batches % n == 0)


def print_table(counts, most):
    ranks = range(1, most + 1)
    print("A row for each number of micro-batches, a column for each number of ranks:")
    print("the part of what they compute that counts, and how many times as fast they are as")
    print("the largest number of them that divides the micro-batches.")
    print("     " + "".join(f"{n:>12}" for n in ranks))
    for micro_batches in counts:
        shares_of_time = [efficiency(micro_batches, n) for n in ranks]
        speeds = [
            share * n / divisor(micro_batches, n)
            for n, share in zip(ranks, shares_of_time, strict=True)
        ]
        cells = [f"{a:.0%} x {b:.2f}" for a, b in zip(shares_of_time, speeds, strict=True)]
        print(f"{micro_batches:<5}" + "".join(f"{cell:>12}" for cell in cells))


def draw_shares(axis, parts, followed):
    """A column for each rank, a row for each accumulation step, a number for each micro-batch."""
    for share in parts:
        axis.text(share.rank + 0.5, -0.25, f"rank {share.rank}", ha="center", fontsize=9)
        for row, (m, weight) in enumerate(share):
            color = FOLLOWED if m in followed and weight else OTHER if weight else "white"
            box = Rectangle(
                (share.rank + 0.04, row + 0.06),
                0.92,
                0.88,
                facecolor=color,
                edgecolor="0.6",
                hatch="" if weight else "////",
                lw=0.6,
            )
            axis.add_patch(box)
            axis.text(share.rank + 0.5, row + 0.52, m, ha="center", va="center")
    axis.set(xlim=(-1.35, BEFORE), ylim=(parts[0].accumulation, -0.6))
    axis.axis("off")
    middle = parts[0].accumulation / 2
    axis.text(-0.15, middle, "accumulation\nsteps", ha="right", va="center", fontsize=9)


def draw():
    before = shares(MICRO_BATCHES, BEFORE)
    after = shares(MICRO_BATCHES, AFTER)
    followed = {m for m, _ in before[LOST]}
    rows = [parts[0].accumulation + 0.6 for parts in (before, after)]
    figure = Figure(figsize=(6, 5.6))
    axes = figure.subplots(2, height_ratios=rows)
    for axis, parts in zip(axes, (before, after), strict=True):
        draw_shares(axis, parts, followed)
    places = MICRO_BATCHES + after[0].repeats
    axes[0].set_title(f"A step of {MICRO_BATCHES} micro-batches on {BEFORE} GPUs", pad=2)
    axes[1].set_title(
        f"GPU {LOST} is lost: the same {MICRO_BATCHES} on the other {AFTER}\n"
        f"(all compute {places}; the weight of a loss is {places}/{MICRO_BATCHES}, or 0)",
        pad=2,
    )
    handles = [
        Patch(facecolor=FOLLOWED, edgecolor="0.6", label=f"micro-batches that GPU {LOST} had"),
        Patch(facecolor="white", edgecolor="0.6", hatch="////", label="computed again, weight 0"),
    ]
    figure.legend(handles=handles, loc="lower center", ncols=2, frameon=False, columnspacing=1.2)
    figure.subplots_adjust(left=0.02, right=0.99, top=0.95, bottom=0.07, hspace=0.24)
    return figure


def main():
    parser = options.parser(__doc__, "out/shares.png")
    args = parser.parse_args()
    print_table((8, 16, 24, 32, 48, 64), most=8)
    draw().savefig(args.output, dpi=200)


if __name__ == "__main__":
    main()
