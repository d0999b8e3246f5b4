"""What it costs to mirror the shards, beside a step without it and a save to the disk.

    python -m measure.mirror

A GPT of 86 million parameters on 2 and 4 ranks, half of them on each of two "machines" of this
machine. Every round does a step, a copy by mirror.py and a save to the disk (with a sync), each
after a barrier; medians over the rounds. At every k-th step the copy is shared by k steps. `saved`
is the part of a copy in which DeepSpeed saves into memory; in the rest it is sent. MB: what a rank
saves, and so sends, at each copy, and what a machine's memory holds of one step; for a moment, of
two."""

import itertools
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from measure.resume import LENGTH, make_engine
from tests.support.ranks import run
from universal.load.hooks import overridden
from universal.mirror import Mirror

BATCH, ROUNDS = 16, 7


def measure(stage, memory, disk):
    """What each rank does; rank 0 prints the costs."""
    ranks = int(os.environ["WORLD_SIZE"])
    engine = make_engine(BATCH, BATCH // ranks, stage)
    rank = dist.get_rank()
    machine = Path(memory, f"machine{2 * rank // ranks}")
    mirror = Mirror(engine, machine)
    seconds = {"step": [], "mirror": [], "disk": [], "saved": []}

    def step():
        rows = torch.randint(256, (BATCH // ranks, LENGTH + 1))
        engine.backward(engine(rows[:, :-1], rows[:, 1:]))
        engine.step()

    def save():
        engine.save_checkpoint(disk, tag="saved")
        os.sync()

    def copy():
        with overridden(engine, save_checkpoint=timed_save):
            mirror.save({})

    def timed_save(*args, **options):
        start = time.perf_counter()
        type(engine).save_checkpoint(engine, *args, **options)
        dist.barrier()
        seconds["saved"].append(time.perf_counter() - start)

    for _ in range(ROUNDS):
        for name, action in (("step", step), ("mirror", copy), ("disk", save)):
            dist.barrier()
            start = time.perf_counter()
            action()
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
    sizes = {path: path.stat().st_size / 1e6 for path in machine.glob("step*/*.pt")}
    sent = sum(
        size
        for path, size in sizes.items()
        if f"_rank_{rank}_mp" in path.name or path.name.startswith("mp_rank")
    )
    mirror.close()
    dist.barrier()
    # The first two rounds are slower.
    costs = {name: 1e3 * statistics.median(times[2:]) for name, times in seconds.items()}
    print("\n" + json.dumps(costs | {"rank": sent, "machine": sum(sizes.values())}))


def main():
    Path("out").mkdir(exist_ok=True)
    print(
        "              ms of a step, mirrored at every K-th     ms of a copy   ms of a save", end=""
    )
    print("         MB")
    print(
        "ranks  ZeRO    never     K = 1    K = 10   K = 100    all    saved   to the disk", end=""
    )
    print("   a rank  a machine")
    for ranks, stage in itertools.product((2, 4), (1, 3)):
        with (
            tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
            tempfile.TemporaryDirectory(dir="out") as disk,
        ):
            out = run(Path.cwd(), ranks, measure, stage, memory, disk, limit=900)
        cost = json.loads(out.splitlines()[-1])
        steps = "".join(f"{cost['step'] + cost['mirror'] / every:>10.1f}" for every in (1, 10, 100))
        line = f"{ranks:>5}{stage:>6}{cost['step']:>9.1f}{steps}{cost['mirror']:>7.0f}"
        line += f"{cost['saved']:>9.0f}{cost['disk']:>14.0f}"
        print(f"{line}{cost['rank']:>9.2f}{cost['machine']:>11.2f}", flush=True)


if __name__ == "__main__":
    main()
