"""What --exact does and costs: `make exact`.

    python -m measure.exact --output out/exact.png

Trains 200 steps on 1, 2, 4 and 8 ranks, and on 4, 2, 8 and 1 in turn by --resume, with --exact at
ZeRO 1, 2 and 3 and without it at ZeRO-1; compares all with one rank, and draws those in turn. Then
trains with and without it over seeds, on 2 ranks. The ranks are forked from this process. Ends with
an error when a bit of a loss or gradient norm differs with --exact, or when it changes what is
learned by more than the seeds do."""

import shutil
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

import plot
from measure import options
from measure.logs import largest, read_log
from tests.support.ranks import ends_after, run

TRAIN = (
    "--train_batch_size 64 --train_micro_batch_size_per_gpu 8 --steps 200 --checkpoint_interval 50"
).split()
FOLDER = Path("ckpt_exact")
HERE = Path.cwd()


class Life(NamedTuple):
    """A job that trains on so many ranks, and ends after a step."""

    last: int
    ranks: int


BASELINE, IN_TURN = "1 rank", "4, 2, 8, 1 in turn"
RUNS = {
    BASELINE: [Life(200, 1)],
    "2 ranks": [Life(200, 2)],
    "4 ranks": [Life(200, 4)],
    "8 ranks": [Life(200, 8)],
    IN_TURN: [Life(50, 4), Life(100, 2), Life(150, 8), Life(200, 1)],
}
HOW = {"without --exact": [], "with --exact": ["--exact"]}


def train(name, lives, *flags):
    resume = []
    for life in lives:
        words = [*TRAIN, *flags, *resume, "--checkpoint_dir", FOLDER / name, "--run_name", name]
        patch = ends_after(life.last)
        run(HERE, life.ranks, "examples.train_elastic", *words, patch=patch, limit=1200)
        resume = ["--resume"]
    return name


def on_other_ranks(stage, how):
    """Returns, for each row and column, the largest difference from one rank at ZeRO-1."""
    gaps = {}
    for what, lives in RUNS.items():
        name = train(f"zero{stage}_{what} {how}", lives, "--zero_stage", stage, *HOW[how])
        gaps[what] = largest(HERE, f"zero1_{BASELINE} {how}", name)
    return gaps


def draw(path):
    """Draw one rank's loss, and how far the others are from it, with --exact and without."""
    logs = {
        how: [plot.read_log(f"logs/zero1_{what} {how}.csv") for what in (BASELINE, IN_TURN)]
        for how in HOW
    }
    gaps = [plot.differences(*pair, "loss") for pair in logs.values()]
    runs = {BASELINE: logs["without --exact"][0]} | {how: log for how, (_, log) in logs.items()}
    figure = plot.draw({what: run._replace(val_loss={}) for what, run in runs.items()}, gaps)
    plain, exact = (max(gap.values()) for gap in gaps)
    with_exact = f"{exact:.1e} apart" if exact else "identical"
    figure.axes[0].set_title(
        f"4, 2, 8 and 1 ranks in turn: {plain:.1e} apart, {with_exact} with --exact"
    )
    begin = 0
    look = {"ha": "center", "fontsize": 9, "transform": figure.axes[-1].get_xaxis_transform()}
    for last, ranks in RUNS[IN_TURN]:
        figure.axes[-1].text((begin + last) / 2, 0.65, plot.count(ranks, "rank"), **look)
        if begin:
            for axis in figure.axes:
                axis.axvline(begin + 0.5, color="0.4", ls="--", lw=1)
        begin = last
    figure.savefig(path, dpi=200)
    plot.write_joined(runs, path.with_suffix(".csv"))


def over_seeds():
    """Train with and without --exact, by seed. Returns whether that changes what is learned less
    than the seeds do."""
    print(f"{'seed':>6}{'validation loss':>20}{'with --exact':>16}{'difference':>14}")
    losses = {how: [] for how in HOW}
    seconds = {how: [] for how in HOW}
    for seed in (1337, 1, 2):
        for how, flags in HOW.items():
            name = train(f"seed_{seed} {how}", [Life(200, 2)], "--seed", seed, *flags)
            log = read_log(HERE, name, "val_loss", "seconds")
            losses[how].append(log["val_loss"][200])
            seconds[how].append(statistics.median(log["seconds"].values()))
        plain, exact = (losses[how][-1] for how in HOW)
        print(f"{seed:>6}{plain:20.5f}{exact:16.5f}{exact - plain:14.1e}", flush=True)
    plain, exact = losses.values()
    mean = statistics.mean(exact) - statistics.mean(plain)
    noise = statistics.stdev(plain)
    ratio = statistics.median(slow / fast for fast, slow in zip(*seconds.values(), strict=True))
    print(
        f"mean difference {mean:.1e}, the seeds' standard deviation {noise:.1e}; "
        f"a step takes {ratio:.2f} times as long"
    )
    return abs(mean) <= noise


def main():
    parser = options.parser(__doc__, "out/exact.png")
    args = parser.parse_args()
    shutil.rmtree(FOLDER, ignore_errors=True)
    row = "{:<22}{:>10}{:>10}{:>10}{:>22}"
    print("largest difference of the loss from one rank's, in 200 steps")
    print(row.format("", *[*RUNS][1:]))
    plain, exact = HOW
    equal = True
    for stage, how in ((1, plain), (1, exact), (2, exact), (3, exact)):
        gaps = on_other_ranks(stage, how)
        if how == exact:
            equal &= not any(any(gap.values()) for gap in gaps.values())
        cells = [f"{gap['loss']:.1e}" for gap in gaps.values()]
        print(row.format(f"ZeRO-{stage} {how}", *cells[1:]), flush=True)
    print(
        "with --exact: every bit of loss, validation loss and gradient norm equal: "
        f"{'yes' if equal else 'NO'}\n"
    )
    draw(args.output)
    if not over_seeds():
        sys.exit("--exact changes what is learned")
    if not equal:
        sys.exit("--exact leaves a difference")


if __name__ == "__main__":
    main()
