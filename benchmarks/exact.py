"""What --exact costs: validation loss after 200 steps with and without it, over seeds, and steps per second.

    python benchmarks/exact.py

Both train on 2 ranks, in turn. Ends with an error when the losses differ by more than the seeds do.
"""

import argparse
import csv
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TRAIN = "--train_batch_size 64 --train_micro_batch_size_per_gpu 8 --steps 200 --checkpoint_interval 400"


def train(run_name, *arguments):
    """(last validation loss, median steps per second)."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", ROOT / "train.py"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*command, *TRAIN.split(), "--run_name", run_name, *arguments],
        check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=600, env=environment,
    )  # fmt: skip
    with open(Path("logs", f"{run_name}.csv"), newline="") as file:
        rows = list(csv.DictReader(file))
    return float(rows[-1]["val_loss"]), 1 / statistics.median(float(row["seconds"]) for row in rows)


def main():
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(
        f"{'seed':>6}{'validation loss':>20}{'with --exact':>16}{'difference':>14}{'steps/s':>12}{'with --exact':>16}"
    )
    plain, exact, ratios = [], [], []
    for seed in ("1337", "1", "2"):
        loss, speed = train(f"inexact_{seed}", "--seed", seed)
        rounded, slower = train(f"exact_{seed}", "--seed", seed, "--exact")
        print(f"{seed:>6}{loss:20.5f}{rounded:16.5f}{rounded - loss:14.1e}{speed:12.1f}{slower:16.1f}", flush=True)
        plain, exact, ratios = [*plain, loss], [*exact, rounded], [*ratios, speed / slower]
    means, noise = (statistics.mean(exact) - statistics.mean(plain)), statistics.stdev(plain)
    print(f"mean difference {means:.1e}, the seeds' standard deviation {noise:.1e}; a step takes "
          f"{statistics.median(ratios):.2f} times as long")  # fmt: skip
    if abs(means) > noise:
        sys.exit("--exact changes what is learned")


if __name__ == "__main__":
    main()
