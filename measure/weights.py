"""Test 1's claims about the state itself: every weight and moment of step 200, of the first run and
of the resumes, compared by universal.diff. Exit code 1 where one of them does not hold.

    python -m measure.weights ds_transformer_checkpoint ckpt_resume_no_uc ckpt_resume

The folders are those of the first run, of the resume on as many ranks and of the resume on fewer,
and each has a step 200: `make demo` makes them.

A conversion changes no bit, nor does a resume on as many ranks. On fewer ranks the gradients are
added in another order, so after 100 steps the state is the same up to ROUNDING; but for one kind of
parameter, the bias of the keys. It adds the same number to all of a query's scores, and softmax
does not see that: its gradient is 0, and what is computed is rounding alone. Adam divides the mean
of that by its size, so these biases move by up to the learning rate in each step, in directions
that rounding chooses. Nothing of the loss depends on them. The bound for them is the way that Adam
can go in these steps, from both sides."""

import csv
import os
import sys
from array import array
from pathlib import Path

from measure import options
from universal.checkpoint.describe import describe
from universal.diff import diff, screen_lines
from universal.files.sources import ByteReader
from universal.write.console import in_one_line

ROUNDING = 1e-6
QUERY_KEY_VALUE = "attn.qkv.bias fp32"


def compare(first, second, tolerance=0.0):
    view = diff(first, second, tolerance)
    print(*screen_lines(view), sep="\n", flush=True)
    return view


def masters(folder, name):
    """The fp32 numbers of a parameter."""
    source = describe(folder).parameters[name].states["fp32"]
    return array("f", bytes(ByteReader().read(source, 0, source.numel)))


def gaps_of_keys(view):
    """The largest difference of the keys' biases, and that of everything else."""
    keys = []
    others = []
    for gap in view["gaps"]:
        if not gap.name.endswith(QUERY_KEY_VALUE):
            others.append(gap.absolute)
            continue
        pair = [masters(folder, gap.name.removesuffix(" fp32")) for folder in view["folders"]]
        gaps = [abs(a - b) for a, b in zip(*pair, strict=True)]
        third = len(gaps) // 3
        keys += gaps[third : 2 * third]
        others += gaps[:third] + gaps[2 * third :]
    return max(keys, default=0.0), max(others, default=0.0)


def longest_way(log):
    """Returns by how much Adam may move a parameter in the steps of this log: the sum of learning
    rates."""
    with open(log, newline="") as file:
        return sum(float(row["lr"]) for row in csv.DictReader(file))


def main():
    parser = options.parser(__doc__)
    for name in ("first", "same_ranks", "fewer_ranks"):
        parser.add_argument(name, help="folder of checkpoints")
    args = parser.parse_args()
    with in_one_line("measure.weights"):
        same = compare_all(args.first, args.same_ranks, args.fewer_ranks)
    print("PASS" if same else "FAIL")
    sys.exit(0 if same else 1)


def compare_all(first, same_ranks, fewer_ranks):
    """Whether all is as it should be. Raises: CheckpointError."""
    step_100 = Path(first, "global_step100")
    same = compare(step_100, f"{step_100}_universal")["same"]
    step_200 = Path(first, "global_step200")
    same &= compare(step_200, Path(same_ranks, step_200.name))["same"]
    view = compare(step_200, Path(fewer_ranks, step_200.name), ROUNDING)
    of_keys, of_others = gaps_of_keys(view)
    bound = 2 * longest_way(Path("logs", f"{os.path.basename(fewer_ranks)[5:]}.csv"))
    same &= not view["others"] and of_others <= ROUNDING and of_keys <= bound
    print(f"biases of the keys, whose gradient is rounding alone: {of_keys:.1e} <= {bound:.2g}")
    print(f"all else: {of_others:.1e} <= {ROUNDING:g}")
    return same


if __name__ == "__main__":
    main()
