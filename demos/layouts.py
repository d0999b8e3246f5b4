"""Every change of the tensor, pipeline and sequence layout in one table, and the curves of the 3D ones.

    python demos/layouts.py

Each layout trains 160 steps from scratch and is compared with one rank; its checkpoint of step 60 is converted and goes
on, on other layouts, to step 160; those 100 steps are compared with the uninterrupted run. The ranks are forked from
this process, which has imported DeepSpeed already. Ends with an error when any loss differs by more than 1e-5, or
the same layout by a bit.
"""

import argparse
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import curves  # noqa: E402
import ds_to_universal  # noqa: E402
import plot  # noqa: E402
from harness.ranks import compare, run  # noqa: E402

COMMON = (
    "--train_batch_size 64 --train_micro_batch_size_per_gpu 8 --steps 160 --checkpoint_interval 60 --lr 1e-3".split()
)
AXES = {"train.py": ("tensor", "sequence"), "train_3d.py": ("tensor", "pipeline")}
# script, ZeRO stage, layout that saves, layouts that go on: (first of the axes, second, data-parallel ranks)
CHANGES = [
    *(("train.py", s, (2, 1, 2), [(2, 1, 2), (2, 1, 1), (1, 1, 2), (4, 1, 1)]) for s in (1, 2, 3)),
    *(("train.py", s, (1, 1, 1), [(2, 1, 1)]) for s in (1, 2, 3)),
    *(("train.py", s, (1, 2, 2), [(1, 2, 2), (1, 2, 1), (1, 1, 2), (1, 4, 1)]) for s in (1, 3)),
    *(("train.py", s, (2, 2, 1), [(2, 2, 1), (1, 1, 2)]) for s in (1, 3)),
    ("train_3d.py", 1, (2, 2, 2), [(2, 2, 2), (2, 2, 1), (1, 1, 1), (1, 1, 2), (2, 1, 2), (1, 2, 2)]),
    *(("train_3d.py", 1, layout, []) for layout in [(2, 2, 1), (1, 1, 1), (1, 1, 2), (2, 1, 2), (1, 2, 2)]),
]


def name_of(script, layout):
    first, second = ("TP", "SP") if script == "train.py" else ("TP", "PP")
    return f"{first} {layout[0]}, {second} {layout[1]}, DP {layout[2]}"


def train(script, stage, layout, run_name, folder, *arguments):
    degrees = [f"--{axis}_parallel={n}" for axis, n in zip(AXES[script], layout, strict=False)]
    degrees += ["--zero_stage", stage] if script == "train.py" else []
    ranks = layout[0] * layout[1] * layout[2]
    run(Path.cwd(), ranks, script, *COMMON, *degrees, "--run_name", run_name, "--checkpoint_dir", folder, *arguments,
        limit=1200)  # fmt: skip


def largest(baseline, run_name):
    """Difference of any step's training or validation loss."""
    return max(max(compare(Path.cwd(), baseline, run_name, column).values()) for column in ("loss", "val_loss"))


def draw(runs, path):
    """The training losses of {name: run}, the first one of which is the baseline."""
    baseline, *others = runs.values()
    gaps = [plot.differences(baseline, run, "loss") for run in others]
    figure = curves.draw({name: run | {"val_loss": {}} for name, run in runs.items()}, gaps)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("out/3d.png"), help="picture, with its .csv beside it")
    args = parser.parse_args()
    table, one = {}, "one_rank"
    train("train.py", 1, (1, 1, 1), one, "ckpt_3d/one")
    for script, stage, layout, others in CHANGES:
        name = f"{script[:-3]} ZeRO-{stage} {name_of(script, layout)}"
        folder = Path("ckpt_3d", name.replace(" ", "_").replace(",", ""))
        shutil.rmtree(folder, ignore_errors=True)
        train(script, stage, layout, name, folder)
        table.setdefault((script, "scratch", name_of(script, layout)), {})[stage] = largest(one, name)
        tag = folder / "global_step60_universal"
        ds_to_universal.convert(folder / "global_step60", tag)
        for other in others:
            resumed = f"{name} to {name_of(script, other)}"
            more = ("--resume", "--universal_checkpoint", "--checkpoint_tag", tag.name, "--checkpoint_interval", 400)
            train(script, stage, other, resumed, folder, *more)
            difference = largest(name, resumed)
            assert other != layout or difference == 0.0, f"{resumed} is not the same, bit by bit"
            change = (script, name_of(script, layout), name_of(script, other))
            table.setdefault(change, {})[stage] = difference
    print(f"{'script':<12} {'from':<20} {'to':<20}" + "".join(f"    ZeRO-{stage}" for stage in (1, 2, 3)))
    for (script, before, after), found in table.items():
        columns = (f"{found[stage]:>10.1e}" if stage in found else f"{'':>10}" for stage in (1, 2, 3))
        print(f"{script:<12} {before:<20} {after:<20}{''.join(columns)}".rstrip())
    worst = max(max(found.values()) for found in table.values())
    baseline = "train_3d ZeRO-1 TP 2, PP 2, DP 2"
    others = next(others for script, _, _, others in CHANGES if script == "train_3d.py")
    layouts = [name_of("train_3d.py", other) for other in others]
    runs = {layouts[0]: plot.read_log(f"logs/{baseline}.csv")}
    for layout in layouts:
        runs[f"then {layout}"] = plot.read_log(f"logs/{baseline} to {layout}.csv")
    draw(runs, args.output)
    plot.write_joined(runs, args.output.with_suffix(".csv"))
    print(f"largest difference {worst:.1e}")
    if worst > 1e-5:
        sys.exit("demos/layouts.py: a loss differs by more than 1e-5")


if __name__ == "__main__":
    main()
