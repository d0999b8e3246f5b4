"""What it costs to mirror the shards, beside a step without it and a save to the disk.

    python -m measure.mirror

A GPT of 86 million parameters on 4 ranks, 2 on each of two "machines" of this machine. Every round
does a step, a copy by mirror.py and a save to the disk (with a sync), each after a barrier; medians
over the rounds. At every k-th step the copy is shared by k steps. MB: what a rank saves, and so
sends, at each copy, and what a machine's memory holds of one step; it has two for a moment."""

import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from measure.ranks import run
from measure.resume import LENGTH, make_engine
from universal.mirror import Mirror

BATCH, ROUNDS = 16, 7


def measure(stage, memory, disk):
    """What each rank does; rank 0 prints the costs."""
    engine, rank = make_engine(BATCH, BATCH // 4, stage), dist.get_rank()
    machine = Path(memory, f"machine{rank // 2}")
    mirror = Mirror(engine, machine)

    def step():
        rows = torch.randint(256, (BATCH // 4, LENGTH + 1))
        engine.backward(engine(rows[:, :-1], rows[:, 1:]))
        engine.step()

    def save():
        engine.save_checkpoint(disk, tag="saved")
        os.sync()

    seconds = {"step": [], "mirror": [], "disk": []}
    for _ in range(ROUNDS):
        for name, action in (("step", step), ("mirror", lambda: mirror.save({})), ("disk", save)):
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


if __name__ == "__main__":
    Path("out").mkdir(exist_ok=True)
    print("        ms of a step, mirrored at every K-th                ms of a save         MB")
    print(
        "ZeRO    never     K = 1    K = 10   K = 100   ms of a copy      "
        "to the disk   a rank  a machine"
    )
    for stage in (1, 3):
        with (
            tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
            tempfile.TemporaryDirectory(dir="out") as disk,
        ):
            out = run(Path.cwd(), 4, measure, stage, memory, disk, limit=900)
        cost = json.loads(out.splitlines()[-1])
        steps = "".join(f"{cost['step'] + cost['mirror'] / every:>10.1f}" for every in (1, 10, 100))
        line = f"{stage:>4}{cost['step']:>9.1f}{steps}{cost['mirror']:>15.1f}{cost['disk']:>17.1f}"
        print(f"{line}{cost['rank']:>9.2f}{cost['machine']:>11.2f}", flush=True)
