"""What --exact does and costs: `make exact`.

    python demos/exact.py --output out/exact.png

Trains 200 steps on 1, 2, 4 and 8 ranks, and on 4, 2, 8 and 1 in turn by --resume, with --exact at ZeRO 1, 2 and 3 and
without it at ZeRO-1; compares all with one rank, and draws ZeRO-1. Then trains with and without it over seeds, on 2
ranks. The ranks are forked from this process. Ends with an error when a bit of a loss or gradient norm differs with
--exact, or when it changes what is learned by more than the seeds do.
"""

import argparse
import shutil
import statistics
import sys
from pathlib import Path

from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import plot  # noqa: E402
from harness.ranks import compare, ends_after, read_log, run  # noqa: E402

TRAIN = "--train_batch_size 64 --train_micro_batch_size_per_gpu 8 --steps 200 --checkpoint_interval 50".split()
FOLDER, HERE, IN_TURN, BASELINE = Path("ckpt_exact"), Path.cwd(), "4, 2, 8, 1 in turn", "1 rank"
# what: [(the step that it ends after, ranks)]
RUNS = {BASELINE: [(200, 1)]} | {f"{ranks} ranks": [(200, ranks)] for ranks in (2, 4, 8)}
RUNS[IN_TURN] = [(50, 4), (100, 2), (150, 8), (200, 1)]
HOW = {"rounding": [], "exact": ["--exact"]}


def train(name, lives, *arguments):
    for step, ranks in lives:
        words = (*TRAIN, *arguments, "--checkpoint_dir", FOLDER / name, *["--resume"] * (step > lives[0][0]))
        run(HERE, ranks, "train_elastic.py", *words, "--run_name", name, patch=ends_after(step), limit=1200)
    return name


def draw(groups, path):
    """groups: {title: {what: run}}, one rank first. A panel for each group: how far its runs are from one rank, each
    run at every twelfth step, and not at the same ones."""
    figure = Figure(figsize=(6, 4.5), layout="constrained")
    panels = figure.subplots(len(groups), sharex=True)
    for axis, (title, runs) in zip(panels, groups.items(), strict=True):
        (_, baseline), *others = runs.items()
        worst, names = 0.0, {}
        for i, (what, other) in enumerate(others):
            gaps = plot.differences(baseline, other, "loss")
            look = plot.style(i) | {"ls": "", "ms": 5}
            what = what.replace(IN_TURN, "4, then 2, 8, 1 ranks")
            names[what] = plot.draw_line(axis, gaps, **look, markevery=(3 * i, 12), clip_on=False)
            worst = max(worst, *gaps.values())
        for step in (50, 100, 150):
            names["where those change"] = axis.axvline(step + 0.5, color="0.4", ls="--", lw=1)
        names["float32 rounding step"] = plot.scale(axis, baseline, 1e-3)
        axis.set_title(f"{title}: " + (f"up to {worst:.0e} apart" if worst else "every bit is equal"))
        axis.set_ylabel("|difference|\n(nats per byte)")
    axis.set_xlabel("step (each run at every twelfth)")
    where = {"loc": "outside upper center", "ncols": 2, "frameon": False, "labelspacing": 0.2}
    figure.legend(names.values(), names, title="The loss against that of 1 rank:", **where)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200)
    columns = {f"{what} {title}": run for title, runs in groups.items() for what, run in runs.items()}
    plot.write_joined(columns, path.with_suffix(".csv"))


def over_seeds():
    """Train with and without --exact, by seed. Returns whether that changes what is learned less than the seeds do."""
    heads = f"{'seed':>6}{'validation loss':>20}{'with --exact':>16}{'difference':>14}"
    print(f"{heads}{'steps/s':>12}{'with --exact':>16}")
    losses, ratios = [], []
    for seed in ("1337", "1", "2"):
        names = [train(f"{how}_seed_{seed}", [(200, 2)], "--seed", seed, *flags) for how, flags in HOW.items()]
        logs = [read_log(HERE, name, "val_loss", "seconds") for name in names]
        loss, rounded = (log["val_loss"][200] for log in logs)
        speed, slower = (1 / statistics.median(log["seconds"].values()) for log in logs)
        print(f"{seed:>6}{loss:20.5f}{rounded:16.5f}{rounded - loss:14.1e}{speed:12.1f}{slower:16.1f}", flush=True)
        losses.append((loss, rounded))
        ratios.append(speed / slower)
    plain, exact = zip(*losses, strict=True)
    mean, noise = statistics.mean(exact) - statistics.mean(plain), statistics.stdev(plain)
    ratio = f"a step takes {statistics.median(ratios):.2f} times as long"
    print(f"mean difference {mean:.1e}, the seeds' standard deviation {noise:.1e}; {ratio}")
    return abs(mean) <= noise


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("out/exact.png"), help="picture, with its .csv beside it")
    args = parser.parse_args()
    shutil.rmtree(FOLDER, ignore_errors=True)
    print("largest difference of the loss from one rank's, in 200 steps")
    print(f"{'':<22}{'2 ranks':>10}{'4 ranks':>10}{'8 ranks':>10}{IN_TURN:>22}")
    pictured, equal = {}, True
    for stage, how in ((1, "rounding"), (1, "exact"), (2, "exact"), (3, "exact")):
        title = f"with{'out' * (how == 'rounding')} --exact"
        flags = ("--zero_stage", stage, *HOW[how])
        names = {what: train(f"{how}_zero{stage}_{what}", lives, *flags) for what, lives in RUNS.items()}
        gaps = {}
        for column in ("grad_norm", "val_loss", "loss"):
            for what, name in names.items():
                gaps[what] = max(compare(HERE, f"{how}_zero1_{BASELINE}", name, column).values())
            equal &= how == "rounding" or not any(gaps.values())
        widths = (10, 10, 10, 22)
        cells = "".join(f"{gaps[what]:>{width}.1e}" for what, width in zip([*RUNS][1:], widths, strict=True))
        print(f"{f'ZeRO-{stage} {title}':<22}{cells}", flush=True)
        pictured.setdefault(title, {what: plot.read_log(f"logs/{name}.csv") for what, name in names.items()})
    print(f"with --exact: every bit of loss, validation loss and gradient norm equal: {'yes' if equal else 'NO'}\n")
    draw(pictured, args.output)
    alike = over_seeds()
    if not equal:
        sys.exit("--exact leaves a difference")
    if not alike:
        sys.exit("--exact changes what is learned")
