"""What it costs to look: universal.inspect beside `cat`, universal.diff beside `cmp`.

    python -m measure.inspect --folder /tmp

A ZeRO-1 checkpoint of 4 ranks, of a GPT of 86 million parameters or --times as many, is laid out
twice, with the same bytes. All four commands run as whole processes, in turn, several rounds; the
shortest counts, for whatever else the machine does adds to all others. "memory": the system has the
files there; "disk": it has nothing of them. The last column is the peak of the process's own memory
(VmHWM) as it ends; of diff, less that of a process that imports torch alone."""

import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import options
from tests.support import ROOT
from tests.support.lay_out import groups_of, lay_out
from train import GPT

SHARED = {"lm_head.weight": "wte.weight"}
COLUMNS = "{:<28}{:>9}{:>9}{:>8}{:>11}"
# Runs a command of the package, and tells its peak memory: that of a child would be this process's.
PEAK = """import re, runpy, sys
from pathlib import Path
module = sys.argv[1]
sys.argv[:2] = [module]
try:
    runpy.run_module(module, run_name="__main__")
finally:
    print(re.findall(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[0])"""
OF_TORCH = """import re, torch
from pathlib import Path
print(re.findall(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[0])"""


def forget(folders):
    """Let the system have nothing of these folders' files in memory."""
    os.sync()
    for path in (path for folder in folders for path in folder.iterdir()):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(words, cold=()):
    """Returns the seconds of a whole process, and what it prints. It may end with 1: numbers
    differ. cold: folders that it is to read from the disk."""
    forget(cold)
    begin = time.perf_counter()
    done = subprocess.run([*map(str, words)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert done.returncode in (0, 1), words
    return time.perf_counter() - begin, done.stdout


def megabytes(printed):
    return int(printed.split()[-1]) / 1000


@functools.cache
def memory_of_torch():
    return megabytes(timed([sys.executable, "-c", OF_TORCH])[1])


def memory_of(words, printed):
    """Megabytes of what a command has printed, without those of importing torch."""
    return megabytes(printed) - memory_of_torch() * ("universal.diff" in words)


def of_package(module, *words):
    return [sys.executable, "-c", PEAK, f"universal.{module}", *words]


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
        took, printed = timed(ours, cold)
        seconds["ours"].append(took)
        peak = max(peak, memory_of(ours, printed))
        seconds["limit"].append(timed(limit, cold)[0])
    a, b = map(min, seconds.values())
    name = f"{what}, {'disk' if cold else 'memory'}"
    print(COLUMNS.format(name, f"{a:.2f} s", f"{b:.2f} s", f"{a / b:.1f}x", f"{peak:.0f} MB"))


def measure_many_ranks(folder, stage):
    """Measure two lines: 19 million parameters in the shards of 512 ranks, and the same with
    itself."""
    net = GPT(n_layer=24, n_head=16, n_embd=256, seq_len=1024, dropout=0.1)
    lay_out(folder, groups_of(net), 512, stage, SHARED)
    for module, *folders in (("inspect", folder), ("diff", folder, folder)):
        took, printed = timed(of_package(module, *folders))
        name = f"{module}, 512 ranks, ZeRO-{stage}"
        peak = memory_of(of_package(module), printed)
        print(COLUMNS.format(name, f"{took:.2f} s", "", "", f"{peak:.0f} MB"))


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
    took, printed = timed(of_package("diff", first, second))
    equal, total = re.search(r"(\d+) of (\d+) tensors equal", printed).groups()
    assert equal == "0" < total
    peak = memory_of(of_package("diff"), printed)
    print(COLUMNS.format("diff, all differ", f"{took:.2f} s", "", "", f"{peak:.0f} MB"))


if __name__ == "__main__":
    main()
