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

TRAIN = "--train_batch_size 64 --train_micro_batch_size_per_gpu 8 --steps 200".split()
FOLDER, RANKS, CHAIN, IN_TURN = Path("ckpt_exact"), (1, 2, 4, 8), (4, 2, 8, 1), "4, 2, 8, 1 in turn"


def train(ranks, run_name, *arguments, patch=None):
    folder = ("--checkpoint_dir", FOLDER / run_name, "--checkpoint_interval", 50)
    arguments = (*TRAIN, *arguments, *folder, "--run_name", run_name)
    run(Path.cwd(), ranks, "train_elastic.py", *arguments, patch=patch, limit=1200)
    return run_name


def train_all(how, stage, *arguments):
    """{what: run name} of the runs at this stage, one rank first."""
    runs, arguments = {}, ("--zero_stage", stage, *arguments)
    for ranks in RANKS:
        runs[f"{ranks} rank{'s' * (ranks > 1)}"] = train(ranks, f"{how}_zero{stage}_{ranks}_ranks", *arguments)
    runs[IN_TURN] = f"{how}_zero{stage}_in_turn"
    for step, ranks in zip((50, 100, 150, 200), CHAIN, strict=True):
        train(ranks, runs[IN_TURN], *arguments, *["--resume"] * (step > 50), patch=ends_after(step))
    return runs


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
        how = f"up to {worst:.0e} apart" if worst else "every bit is equal"
        axis.set_title(f"{title}: {how}")
        axis.set_ylabel("|difference|\n(nats per byte)")
    axis.set_xlabel("step (each run at every twelfth)")
    where = {"loc": "outside upper center", "ncols": 2, "frameon": False, "labelspacing": 0.2}
    figure.legend(names.values(), names, title="The loss against that of 1 rank:", **where)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200)
    columns = {f"{what} {title}": run for title, runs in groups.items() for what, run in runs.items()}
    plot.write_joined(columns, path.with_suffix(".csv"))


def play(stage, arguments):
    """Train at this stage on every number of ranks. Returns ({what: run name}, one rank at ZeRO-1 first; the
    difference of each other run's loss from that; whether there is none in any column)."""
    how = "exact" if arguments else "rounding"
    runs = train_all(how, stage, *arguments)
    baseline = f"{how}_zero1_1_ranks"
    differences, equal = [], True
    for name in runs.values():
        if name != baseline:
            differences.append(max(compare(Path.cwd(), baseline, name).values()))
            for column in ("loss", "val_loss", "grad_norm"):
                equal &= not any(compare(Path.cwd(), baseline, name, column).values())
    return runs, differences, equal


def over_seeds():
    """Train with and without --exact, by seed. Returns (mean difference of what is learned, standard deviation between
    the seeds)."""
    heads = f"{'seed':>6}{'validation loss':>20}{'with --exact':>16}{'difference':>14}"
    print(f"{heads}{'steps/s':>12}{'with --exact':>16}")
    plain, exact, ratios = [], [], []
    for seed in ("1337", "1", "2"):
        names = [train(2, f"rounding_seed_{seed}", "--seed", seed)]
        names.append(train(2, f"exact_seed_{seed}", "--seed", seed, "--exact"))
        logs = [read_log(Path.cwd(), name, "val_loss", "seconds") for name in names]
        loss, rounded = (log["val_loss"][200] for log in logs)
        speed, slower = (1 / statistics.median(log["seconds"].values()) for log in logs)
        print(f"{seed:>6}{loss:20.5f}{rounded:16.5f}{rounded - loss:14.1e}{speed:12.1f}{slower:16.1f}", flush=True)
        plain.append(loss)
        exact.append(rounded)
        ratios.append(speed / slower)
    mean = statistics.mean(exact) - statistics.mean(plain)
    noise = statistics.stdev(plain)
    ratio = statistics.median(ratios)
    print(
        f"mean difference {mean:.1e}, the seeds' standard deviation {noise:.1e}; a step takes {ratio:.2f} times as long"
    )
    return mean, noise


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("out/exact.png"), help="picture, with its .csv beside it")
    args = parser.parse_args()
    shutil.rmtree(FOLDER, ignore_errors=True)
    print("largest difference of the loss from one rank's, in 200 steps")
    heads = "".join(f"{f'{n} ranks':>10}" for n in RANKS[1:])
    print(f"{'':<22}{heads}{IN_TURN:>22}")
    pictured, every = {}, True
    for stage, arguments in ((1, ()), (1, ("--exact",)), (2, ("--exact",)), (3, ("--exact",))):
        how = f"{'with' if arguments else 'without'} --exact"
        runs, differences, equal = play(stage, arguments)
        pictured.setdefault(how, {what: plot.read_log(f"logs/{name}.csv") for what, name in runs.items()})
        row = f"{f'ZeRO-{stage} {how}':<22}"
        for difference, width in zip(differences[-4:], (10, 10, 10, 22), strict=True):
            row += f"{difference:>{width}.1e}"
        print(row, flush=True)
        if arguments:
            every &= equal
    print(f"with --exact: every bit of loss, validation loss and gradient norm equal: {'yes' if every else 'NO'}\n")
    draw(pictured, args.output)
    mean, noise = over_seeds()
    if not every:
        sys.exit("--exact leaves a difference")
    if abs(mean) > noise:
        sys.exit("--exact changes what is learned")


if __name__ == "__main__":
    main()
