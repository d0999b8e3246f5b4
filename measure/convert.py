"""ds_to_universal.py against DeepSpeed's own converter and `cp -r`: seconds, ratios, memory.

    python -m measure.convert --ranks 4 --folder /dev/shm

The checkpoints are laid out by hand, in DeepSpeed 0.19.8's format, as bf16 training of a GPT, 86
million parameters, on so many ranks writes them: random weights, all else as it would be. All three
tools run as whole processes, in turn, and the median of three rounds counts. Ours waits until the
disk has it, so that each is followed by a sync."""

import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from measure import options
from measure.costs import timed
from tests.support import ROOT
from tests.support.lay_out import groups_of, lay_out
from train import GPT

COLUMNS = "{:>4}{:>7}{:>7} |{:>8}{:>11}{:>8} |{:>16}{:>9} |{:>9}{:>14}"


def commands(source, output):
    """Returns, by name, the commands that convert or copy the source."""
    folders = ["--input_folder", source, "--output_folder", output]
    workers = ["--num_extract_workers", 4, "--num_merge_workers", 2]
    theirs = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *folders, *workers]
    return {
        "ours": [sys.executable, ROOT / "ds_to_universal.py", *folders, *workers],
        "DeepSpeed": [*theirs, "--inject_missing_state"],
        "cp": ["cp", "-r", source, output],
    }


def data_seconds(run):
    """The seconds that our converter says it has taken after its start."""
    return float(run.output.split(" in ")[1].split()[0])


def measure(work, stage, ranks):
    """Returns the cells of a line of the table."""
    source = work / "source"
    output = work / "output"
    net = GPT(n_layer=12, n_head=12, n_embd=768, seq_len=1024, dropout=0.1)
    lay_out(source, groups_of(net), ranks, stage, {"lm_head.weight": "wte.weight"})
    os.sync()  # or the first to run would wait for the source to reach the disk, too
    gigabytes = sum(path.stat().st_size for path in source.iterdir()) / 1e9
    tools = commands(source, output)
    runs = {name: [] for name in tools}
    for _ in range(3):
        for name, command in tools.items():
            runs[name].append(timed(command, work))
            shutil.rmtree(output)
    seconds = {name: statistics.median(run.seconds for run in runs[name]) for name in runs}
    data = statistics.median(data_seconds(run) for run in runs["ours"])
    return (
        stage,
        ranks,
        f"{gigabytes:.2f}",
        *(f"{median:.2f}" for median in seconds.values()),
        f"{seconds['DeepSpeed'] / seconds['ours']:.1f}",
        f"{data / seconds['cp']:.2f}",
        *(f"{max(run.megabytes for run in runs[name]):.0f}" for name in ("ours", "DeepSpeed")),
    )


def main():
    parser = options.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument(
        "--folder", type=Path, default="/dev/shm", help="where: /dev/shm is memory, others a disk"
    )
    args = parser.parse_args()
    print(
        f"seconds of whole processes, medians of 3, on {args.folder}; "
        "data: what ours takes after its start"
    )
    heads = "ZeRO,ranks,GB,ours,DeepSpeed,cp -r,DeepSpeed/ours,data/cp,ours MB,DeepSpeed MB"
    print(COLUMNS.format(*heads.split(",")))
    for stage in (1, 3):
        with tempfile.TemporaryDirectory(dir=args.folder) as work:
            print(COLUMNS.format(*measure(Path(work), stage, args.ranks)), flush=True)


if __name__ == "__main__":
    main()
