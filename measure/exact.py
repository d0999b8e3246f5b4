"""What --exact does and costs: `make exact`.

    python -m measure.exact --output out/exact.png

Trains 200 steps on 1, 2, 4 and 8 ranks, and on 4, 2, 8 and 1 in turn by --resume, with --exact at
ZeRO 1, 2 and 3 and without it at ZeRO-1; compares all with one rank, and draws those in turn. Then
trains with and without it over seeds, on 2 ranks. The ranks are forked from this process. Ends with
an error when a bit of a loss or gradient norm differs with --exact, or when it changes what is
learned by more than the seeds do."""

import argparse
import shutil
import statistics
import sys
from pathlib import Path

import plot
from measure.ranks import compare, ends_after, read_log, run

TRAIN = "--train_batch_size 64 --train_micro_batch_size_per_gpu 8 --steps 200 --checkpoint_interval 50".split()
FOLDER, HERE, BASELINE, IN_TURN = Path("ckpt_exact"), Path.cwd(), "1 rank", "4, 2, 8, 1 in turn"
# what: [(the step that it ends after, ranks)]
RUNS = {BASELINE: [(200, 1)]} | {f"{ranks} ranks": [(200, ranks)] for ranks in (2, 4, 8)}
RUNS[IN_TURN] = [(50, 4), (100, 2), (150, 8), (200, 1)]
HOW = {"without --exact": [], "with --exact": ["--exact"]}


def train(name, lives, *arguments):
    for step, ranks in lives:
        words = (
            *TRAIN,
            *arguments,
            "--checkpoint_dir",
            FOLDER / name,
            *["--resume"] * (step > lives[0][0]),
        )
        run(
            HERE,
            ranks,
            "examples.train_elastic",
            *words,
            "--run_name",
            name,
            patch=ends_after(step),
            limit=1200,
        )
    return name


def on_other_ranks(stage, how):
    """{what: {column: the largest difference from one rank at ZeRO-1}}"""
    gaps = {}
    for what, lives in RUNS.items():
        name = train(f"zero{stage}_{what} {how}", lives, "--zero_stage", stage, *HOW[how])
        columns = ("loss", "val_loss", "grad_norm")
        gaps[what] = {
            c: max(compare(HERE, f"zero1_{BASELINE} {how}", name, c).values()) for c in columns
        }
    return gaps


def draw(path):
    """One rank, and how far those in turn are from it, without --exact and with it."""
    logs = {
        how: [plot.read_log(f"logs/zero1_{what} {how}.csv") for what in (BASELINE, IN_TURN)]
        for how in HOW
    }
    gaps = [plot.differences(*pair, "loss") for pair in logs.values()]
    runs = {BASELINE: logs["without --exact"][0]} | {how: log for how, (_, log) in logs.items()}
    figure = plot.draw({what: run._replace(val_loss={}) for what, run in runs.items()}, gaps)
    apart = "{:.0e} apart, with --exact {:.0e}".format(*(max(gap.values()) for gap in gaps))
    figure.axes[0].set_title(f"4, 2, 8 and 1 ranks in turn: {apart}")
    for axis in figure.axes:
        for step, _ in RUNS[IN_TURN][:-1]:
            axis.axvline(step + 0.5, color="0.4", ls="--", lw=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200)
    plot.write_joined(runs, path.with_suffix(".csv"))


def over_seeds():
    """Train with and without --exact, by seed. Returns whether that changes what is learned less
    than the seeds do."""
    print(f"{'seed':>6}{'validation loss':>20}{'with --exact':>16}{'difference':>14}")
    losses, seconds = {how: [] for how in HOW}, {how: [] for how in HOW}
    for seed in (1337, 1, 2):
        for how, flags in HOW.items():
            log = read_log(
                HERE,
                train(f"seed_{seed} {how}", [(200, 2)], "--seed", seed, *flags),
                "val_loss",
                "seconds",
            )
            losses[how].append(log["val_loss"][200])
            seconds[how].append(statistics.median(log["seconds"].values()))
        plain, exact = (losses[how][-1] for how in HOW)
        print(f"{seed:>6}{plain:20.5f}{exact:16.5f}{exact - plain:14.1e}", flush=True)
    plain, exact = losses.values()
    mean, noise = statistics.mean(exact) - statistics.mean(plain), statistics.stdev(plain)
    ratio = statistics.median(slow / fast for fast, slow in zip(*seconds.values(), strict=True))
    print(f"mean difference {mean:.1e}, the seeds' standard deviation {noise:.1e}; ", end="")
    print(f"a step takes {ratio:.2f} times as long")
    return abs(mean) <= noise


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("out/exact.png"),
        help="picture, with its .csv beside it",
    )
    args = parser.parse_args()
    shutil.rmtree(FOLDER, ignore_errors=True)
    row, equal = "{:<22}{:>10}{:>10}{:>10}{:>22}", True
    print("largest difference of the loss from one rank's, in 200 steps")
    print(row.format("", *[*RUNS][1:]))
    for stage, how in (
        (1, "without --exact"),
        (1, "with --exact"),
        (2, "with --exact"),
        (3, "with --exact"),
    ):
        gaps = on_other_ranks(stage, how)
        equal &= not HOW[how] or not any(any(gap.values()) for gap in gaps.values())
        cells = [f"{gap['loss']:.1e}" for gap in gaps.values()]
        print(row.format(f"ZeRO-{stage} {how}", *cells[1:]), flush=True)
    print(
        f"with --exact: every bit of loss, validation loss and gradient norm equal: {'yes' if equal else 'NO'}\n"
    )
    draw(args.output)
    if not over_seeds():
        sys.exit("--exact changes what is learned")
    if not equal:
        sys.exit("--exact leaves a difference")
