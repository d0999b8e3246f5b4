"""A job that loses its machines again and again, and goes on with others: `make preempt`.

    python benchmarks/preempt.py

A supervisor starts train.py, takes it down, converts the last checkpoint, and starts it again on another number of
ranks. SIGTERM to all ranks is the polite way: they save and exit after the step. SIGKILL to one rank while the
checkpoint is being written is the other. In the end the log has every step once, with the loss of a run that was never
interrupted: every bit with --exact.
"""

import argparse
import csv
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import ds_to_universal  # noqa: E402

FOLDER = Path("ckpt_preempt")
TRAIN = "--exact --train_batch_size 64 --train_micro_batch_size_per_gpu 8 --steps 160 --checkpoint_interval 20".split()
# on so many ranks, taken down by this, once this step is done
EVENTS = [
    (4, "SIGTERM", 25),
    (2, "SIGKILL", 50),
    (1, "SIGTERM", 70),
    (4, "SIGKILL", 90),
    (2, "SIGKILL", 110),
    (4, "", 0),
]


def start(ranks, run_name, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), ROOT / "train.py", *TRAIN]
    command += ["--run_name", run_name, "--checkpoint_dir", FOLDER / run_name, *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def rows(run_name):
    try:
        with open(Path("logs", f"{run_name}.csv"), newline="") as file:
            return [row for row in csv.DictReader(file) if row["layout"]]
    except FileNotFoundError:
        return []


def take_down(process, how, at):
    """Send the signal when step `at` is done; SIGKILL, when a checkpoint is half written. Returns the exit code."""
    while not rows("preempted") or int(rows("preempted")[-1]["step"]) < at:
        assert process.poll() is None, "train.py ended by itself"
        time.sleep(0.05)
    ranks = psutil.Process(process.pid).children()
    if how == "SIGTERM":
        for rank in ranks:
            rank.send_signal(signal.SIGTERM)
    else:
        while not any(list(folder.iterdir()) for folder in (FOLDER / "preempted").glob("*.unfinished")):
            assert process.poll() is None, "train.py ended by itself"
        random.choice(ranks).send_signal(signal.SIGKILL)
    return process.wait(timeout=120)


def main():
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    shutil.rmtree(FOLDER, ignore_errors=True)
    Path("logs", "preempted.csv").unlink(missing_ok=True)
    checkpoints, resume = FOLDER / "preempted", ()
    for number, (ranks, how, at) in enumerate(EVENTS):
        process = start(ranks, "preempted", *resume)
        code = take_down(process, how, at) if how else process.wait(timeout=600)
        reached = int(rows("preempted")[-1]["step"])
        if not how:
            assert code == 0 and reached == 160
            print(f"{ranks} ranks finished at step {reached}")
            break
        tag = (checkpoints / "latest").read_text()
        saved, half = int(tag.removeprefix("global_step")), list(checkpoints.glob("*.unfinished"))
        if how == "SIGTERM":
            assert code == 0 and saved == reached and not half, (code, saved, reached, half)
        else:
            assert code != 0 and saved < reached and half, (code, saved, reached, half)
        ds_to_universal.convert(checkpoints / tag, checkpoints / f"{tag}_universal")
        resume = ("--resume", "--universal_checkpoint")
        again = f"{EVENTS[number + 1][0]} ranks go on from {tag}, {reached - saved} steps to do again"
        print(f"{ranks} ranks, {how} at step {reached}, exit code {code}: {again}", flush=True)
    assert start(4, "uninterrupted").wait(timeout=600) == 0
    stitched, wanted = rows("preempted"), rows("uninterrupted")
    assert [int(row["step"]) for row in stitched] == list(range(1, 161)), "a step is missing, or twice in the log"
    worst = max(abs(float(a[c]) - float(b[c])) for a, b in zip(stitched, wanted, strict=True)
                for c in ("loss", "val_loss", "grad_norm") if b[c])  # fmt: skip
    print("160 steps, each once; so many as micro-batch x accumulation steps x ranks:")
    layouts = [(layout, len(list(group))) for layout, group in itertools.groupby(r["layout"] for r in stitched)]
    print("  " + ", ".join(f"{steps} as {layout}" for layout, steps in layouts))
    print(f"largest difference to the uninterrupted run, of loss, validation loss and gradient norm: {worst}")
    if worst:
        sys.exit("benchmarks/preempt.py: the runs differ")


if __name__ == "__main__":
    main()
