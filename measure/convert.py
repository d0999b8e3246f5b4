"""ds_to_universal.py against DeepSpeed's own converter and `cp -r`: seconds, ratios, memory.

    python -m measure.convert --ranks 4 --folder /dev/shm

The checkpoints are laid out by hand, in DeepSpeed 0.19.8's format, as bf16 training of a GPT, 86
million parameters, on so many ranks writes them: random weights, all else as it would be. All three
tools run as whole processes, in turn, and the median of three rounds counts. Ours waits until the
disk has it, so that each is followed by a sync."""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
import train
from measure.lay_out import groups_of, lay_out

# A process inherits the peak memory of the one that forks it, and this one is large: a small one
# goes between.
BETWEEN = """import json, resource, subprocess, sys, time
start = time.perf_counter()
run = subprocess.run(sys.argv[2:], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
subprocess.run(["sync", "-f", sys.argv[1]], check=True)
seconds = time.perf_counter() - start
used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3
print(json.dumps([seconds, used, run.stdout]))"""


def timed(command, folder):
    """[seconds, MB of the largest process, output] of a whole process and the disk behind it."""
    command = [sys.executable, "-c", BETWEEN, folder, *command]
    return json.loads(
        subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, check=True).stdout
    )


def commands(source, output):
    """{name: the command that converts, or copies, source}"""
    folders = ["--input_folder", source, "--output_folder", output]
    workers = ["--num_extract_workers", 4, "--num_merge_workers", 2]
    theirs = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *folders, *workers]
    return {
        "ours": [sys.executable, ROOT / "ds_to_universal.py", *folders, *workers],
        "DeepSpeed": [*theirs, "--inject_missing_state"],
        "cp": ["cp", "-r", source, output],
    }


def compare(work, stage, ranks):
    """A line of the table."""
    source, output = work / "source", work / "output"
    net = train.GPT(n_layer=12, n_head=12, n_embd=768, seq_len=1024, dropout=0.1)
    lay_out(source, groups_of(net), ranks, stage, {"lm_head.weight": "wte.weight"})
    os.sync()  # or the first to run would wait for the source to reach the disk, too
    total = sum(path.stat().st_size for path in source.iterdir()) / 1e9
    results = {name: [] for name in commands(source, output)}
    for _ in range(3):
        for name, command in commands(source, output).items():
            results[name].append(timed(command, work))
            shutil.rmtree(output)
    ours, theirs, cp = (statistics.median(run[0] for run in results[name]) for name in results)
    data = statistics.median(
        float(out.split(" in ")[1].split()[0]) for _, _, out in results["ours"]
    )
    memory = [f"{max(run[1] for run in results[name]):.0f}" for name in ("ours", "DeepSpeed")]
    seconds = (f"{ours:.2f}", f"{theirs:.2f}", f"{cp:.2f}")
    return (
        stage,
        ranks,
        f"{total:.2f}",
        *seconds,
        f"{theirs / ours:.1f}",
        f"{data / cp:.2f}",
        *memory,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument(
        "--folder", type=Path, default="/dev/shm", help="where: /dev/shm is memory, others a disk"
    )
    args = parser.parse_args()
    print(
        f"seconds of whole processes, medians of 3, on {args.folder}; data: what ours takes after its start"
    )
    columns = "{:>4}{:>7}{:>7} |{:>8}{:>11}{:>8} |{:>16}{:>9} |{:>9}{:>14}"
    heads = (
        "ranks",
        "GB",
        "ours",
        "DeepSpeed",
        "cp -r",
        "DeepSpeed/ours",
        "data/cp",
        "ours MB",
        "DeepSpeed MB",
    )
    print(columns.format("ZeRO", *heads))
    for stage in (1, 3):
        with tempfile.TemporaryDirectory(dir=args.folder) as work:
            print(columns.format(*compare(Path(work), stage, args.ranks)), flush=True)
