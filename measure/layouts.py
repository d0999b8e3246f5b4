"""Every change of the tensor, pipeline and sequence layout in one table, and the curves of the 3D
ones: `make 3d`.

    python -m measure.layouts --output out/3d.png

Each layout trains 160 steps from scratch and is compared with one rank; its checkpoint of step 60
goes on, on other layouts, to step 160; those 100 steps are compared with the uninterrupted run. The
ranks are forked from this process. Ends with an error when any loss differs by more than 1e-5, or
the same layout by a bit."""

import math
import shutil
import sys
from pathlib import Path

import plot
from measure import options
from measure.logs import largest
from tests.support.ranks import run

COMMON = "--train_batch_size 64 --train_micro_batch_size_per_gpu 8 --steps 160 --lr 1e-3".split()
RESUME = "--resume --checkpoint_tag global_step60 --checkpoint_interval 400".split()
FOLDER = Path.cwd()
ONE_RANK = "one_rank"  # the run that all are compared with
TPSP = "examples.train_tp_sp"
PIPE = "examples.train_3d"
SECOND_AXIS = {TPSP: "sequence", PIPE: "pipeline"}
CUBE = [(2, 2, 2), (2, 2, 1), (1, 1, 1), (1, 1, 2), (2, 1, 2), (1, 2, 2)]
# script, ZeRO stages, layout that saves, layouts that go on: (tensor-parallel ranks, those of the
# second axis, data-parallel ranks)
CHANGES = [
    (TPSP, (1, 2, 3), (2, 1, 2), [(2, 1, 2), (2, 1, 1), (1, 1, 2), (4, 1, 1)]),
    (TPSP, (1, 2, 3), (1, 1, 1), [(2, 1, 1)]),
    (TPSP, (1, 3), (1, 2, 2), [(1, 2, 2), (1, 2, 1), (1, 1, 2), (1, 4, 1)]),
    (TPSP, (1, 3), (2, 2, 1), [(2, 2, 1), (1, 1, 2)]),
    (PIPE, (1,), CUBE[0], CUBE),
    *((PIPE, (1,), layout, []) for layout in CUBE[1:]),
]


def name_of(script, layout):
    tensor, second, data = layout
    kind = "SP" if script == TPSP else "PP"
    return f"TP {tensor}, {kind} {second}, DP {data}"


def run_name(script, stage, layout):
    return f"{script.removeprefix('examples.')} ZeRO-{stage} {name_of(script, layout)}"


def train(script, stage, layout, name, folder, *arguments):
    tensor, second, _ = layout
    ranks = f"--tensor_parallel {tensor} --{SECOND_AXIS[script]}_parallel {second}"
    words = [*COMMON, *ranks.split(), "--zero_stage", stage]
    words += ["--run_name", name, "--checkpoint_dir", folder, *arguments]
    run(FOLDER, math.prod(layout), script, *words, limit=1200)


def difference(baseline, name):
    """Returns the largest difference of any step's training or validation loss."""
    return max(largest(FOLDER, baseline, name, ("loss", "val_loss")).values())


def draw(path):
    """The run on 8 ranks, and those that go on from it on the same layout and on one rank."""
    name = run_name(PIPE, 1, CUBE[0])
    names = [name, *(f"{name} to {name_of(PIPE, layout)}" for layout in (CUBE[0], CUBE[2]))]
    logs = [plot.read_log(f"logs/{name}.csv")._replace(val_loss={}) for name in names]
    gaps = [plot.differences(logs[0], log, "loss") for log in logs[1:]]
    legend = [
        "TP 2, PP 2, DP 2: uninterrupted",
        "resumed on the same layout",
        "resumed on one rank",
    ]
    runs = dict(zip(legend, logs, strict=True))
    figure = plot.draw(runs, gaps)
    figure.savefig(path, dpi=200)
    plot.write_joined(runs, path.with_suffix(".csv"))


def play(script, stage, layout, others):
    """Train the layout, and go on with the others. Yields (script, from, to), and the largest
    difference."""
    saved = name_of(script, layout)
    name = run_name(script, stage, layout)
    folder = Path("ckpt_3d", name.replace(" ", "_").replace(",", ""))
    shutil.rmtree(folder, ignore_errors=True)
    train(script, stage, layout, name, folder, "--checkpoint_interval", 60)
    yield (script, "scratch", saved), difference(ONE_RANK, name)
    for other in others:
        resumed = f"{name} to {name_of(script, other)}"
        train(script, stage, other, resumed, folder, *RESUME)
        gap = difference(name, resumed)
        assert other != layout or gap == 0.0, f"{resumed} is not the same, bit by bit"
        yield (script, saved, name_of(script, other)), gap


def main():
    parser = options.parser(__doc__, "out/3d.png")
    args = parser.parse_args()
    train(TPSP, 1, (1, 1, 1), ONE_RANK, "ckpt_3d/one")
    table = {}  # {(script, from, to): {stage: difference}}
    for script, stages, layout, others in CHANGES:
        for stage in stages:
            for change, gap in play(script, stage, layout, others):
                table.setdefault(change, {})[stage] = gap
    print(f"{'script':<15} {'from':<20} {'to':<20}    ZeRO-1    ZeRO-2    ZeRO-3")
    for (script, before, after), gaps in table.items():
        cells = [f"{gaps[stage]:>10.1e}" if stage in gaps else " " * 10 for stage in (1, 2, 3)]
        name = f"{script.removeprefix('examples.')}.py"
        print(f"{name:<15} {before:<20} {after:<20}{''.join(cells)}".rstrip())
    draw(args.output)
    most = max(gap for gaps in table.values() for gap in gaps.values())
    print(f"largest difference {most:.1e}")
    if most > 1e-5:
        sys.exit("measure/layouts.py: a loss differs by more than 1e-5")


if __name__ == "__main__":
    main()
