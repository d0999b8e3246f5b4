"""What it costs to look: universal.inspect beside `cat`, universal.diff beside `cmp`.

    python -m measure.inspect --folder /tmp

A ZeRO-1 checkpoint of 4 ranks, of a GPT of 86 million parameters or --times as many, is laid out
twice, with the same bytes. All four commands run as whole processes, in turn, several rounds; the
shortest counts, for whatever else the machine does adds to all others. "memory": the system has the
files there; "disk": it has nothing of them. The last column is the peak of the process's memory;
where numbers differ, less that of a process that imports torch alone."""

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from measure import costs, options
from tests.support.lay_out import groups_of, lay_out
from train import GPT

SHARED = {"lm_head.weight": "wte.weight"}
COLUMNS = "{:<28}{:>9}{:>9}{:>8}{:>11}"


def forget(folders):
    """Let the system have nothing of these folders' files in memory."""
    os.sync()
    for path in (path for folder in folders for path in folder.iterdir()):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(words, cold=()):
    """Runs a whole process. It may end with 1: numbers differ. cold: folders that it is to read
    from the disk."""
    forget(cold)
    return costs.timed(words, codes=(0, 1))


def of_package(module, *words):
    return [sys.executable, "-m", f"universal.{module}", *words]


def pairs(first, second):
    """Returns our command and the limit of each row."""
    files = " && ".join(f"cmp {path} {second / path.name}" for path in sorted(first.iterdir()))
    return {
        "inspect, cat": (of_package("inspect", first), ["sh", "-c", f"cat {first}/* > /dev/null"]),
        "diff, cmp": (of_package("diff", first, second), ["sh", "-c", files]),
    }


def measure(what, ours, limit, rounds, cold):
    """Measure a line of the table."""
    seconds = {"ours": [], "limit": []}
    peak = 0
    for _ in range(rounds):
        run = timed(ours, cold)
        seconds["ours"].append(run.seconds)
        peak = max(peak, run.megabytes)
        seconds["limit"].append(timed(limit, cold).seconds)
    a, b = map(min, seconds.values())
    name = f"{what}, {'disk' if cold else 'memory'}"
    print(COLUMNS.format(name, f"{a:.2f} s", f"{b:.2f} s", f"{a / b:.1f}x", f"{peak:.0f} MB"))


def print_ours(name, words, known=0):
    """Measure a line without a limit. known: megabytes to be left out. Returns what the command
    prints."""
    run = timed(words)
    peak = run.megabytes - known
    print(COLUMNS.format(name, f"{run.seconds:.2f} s", "", "", f"{peak:.0f} MB"))
    return run.output


def measure_many_ranks(folder, stage):
    """Measure two lines: 19 million parameters in the shards of 512 ranks, and the same with
    itself."""
    net = GPT(n_layer=24, n_head=16, n_embd=256, seq_len=1024, dropout=0.1)
    lay_out(folder, groups_of(net), 512, stage, SHARED)
    for module, *folders in (("inspect", folder), ("diff", folder, folder)):
        print_ours(f"{module}, 512 ranks, ZeRO-{stage}", of_package(module, *folders))


def main():
    parser = options.parser(__doc__)
    parser.add_argument("--folder", type=Path, help="where to lay the checkpoints out")
    parser.add_argument("--times", type=int, default=1, help="of 12 layers, which have 86 million")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as work:
        first = Path(work, "first")
        groups = groups_of(
            GPT(n_layer=12 * args.times, n_head=12, n_embd=768, seq_len=1024, dropout=0.1)
        )
        lay_out(first, groups, 4, 1, SHARED)
        second = shutil.copytree(first, first.with_name("second"))
        gigabytes = sum(path.stat().st_size for path in first.iterdir()) / 1e9
        print(f"{gigabytes:.2f} GB in {len([*first.iterdir()])} files")
        print(COLUMNS.format("", "ours", "limit", "ratio", "memory"))
        for cold in ((), (first, second)):
            for what, (ours, limit) in pairs(first, second).items():
                measure(what, ours, limit, args.rounds, cold)
        lay_out(second, groups, 3, 3, SHARED)
        measure_differing(first, second)
        for stage in (1, 3):
            measure_many_ranks(first, stage)


def measure_differing(first, second):
    """Measure a line where other ranks and another stage saved, and every number differs."""
    torch_alone = timed([sys.executable, "-c", "import torch"]).megabytes
    printed = print_ours("diff, all differ", of_package("diff", first, second), torch_alone)
    equal, total = re.search(r"(\d+) of (\d+) tensors equal", printed).groups()
    assert equal == "0" < total


if __name__ == "__main__":
    main()
