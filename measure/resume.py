"""A model of realistic size, trained on 4 ranks and resumed on 2, in three ways: what it costs and
how close it stays.

    python -m measure.resume

    reshard     universal.load_checkpoint(), from the ZeRO checkpoint as it is
    ours        ds_to_universal.py, DeepSpeed's universal loader, universal.mend()
    DeepSpeed   DeepSpeed's converter and its universal loader

Seconds: of the conversion, a process of its own, and of loading, the slowest rank. Memory: the
largest of a rank while it loads, over what it had, and the converter's. Difference: the largest of
the training loss over the steps after the resume."""

import json
import logging
import os
import re
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

import train as lesson
import universal
from measure.convert import commands, timed
from measure.ranks import deepspeed, run

STAGE, SAVED, STEPS, BATCH, LENGTH, CONVERTED = 3, 2, 12, 4, 32, ("ours", "DeepSpeed")
SHAPE = 12, 12, 768  # layers, heads, width: 86 million parameters


def make_engine(batch, micro, stage, load_universal=False):
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    gpt = lesson.GPT(*SHAPE, seq_len=LENGTH, dropout=0.0)
    config = {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": micro,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 3e-4}},
        "checkpoint": {"load_universal": load_universal},
    }
    return deepspeed.initialize(
        model=gpt, model_parameters=lesson.parameter_groups(gpt), config=config
    )[0]


def megabytes(key):
    """Of memory: VmRSS, what this process has, or VmHWM, the most that it had."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{key}:\s*(\d+) kB", status)[1]) * 1024 / 1e6


def load(engine, folder, way):
    """Returns (seconds, megabytes) of this rank."""
    before = megabytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    dist.barrier()
    start = time.perf_counter()
    if way == "reshard":
        universal.load_checkpoint(engine, folder, "saved")
    else:
        assert engine.load_checkpoint(folder, way)[0]
        if way == "ours":
            universal.mend(engine, f"{folder}/{way}")
    return time.perf_counter() - start, megabytes("VmHWM") - before


def train(folder, way=None):
    """What each rank does; rank 0 prints the losses, and what loading has cost every rank."""
    torch.manual_seed(
        int(os.environ["RANK"]) if way else 0
    )  # what is resumed must come from the checkpoint
    engine = make_engine(BATCH, 1, STAGE, way in CONVERTED)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    costs, losses = [None] * ranks, []
    dist.all_gather_object(costs, load(engine, folder, way) if way else None)
    for step in range(SAVED if way else 0, STEPS):
        tokens = torch.randint(
            256, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step)
        )
        total = torch.zeros((), dtype=torch.float64)
        for row in tokens.chunk(ranks)[rank]:
            loss = engine(row[None, :-1], row[None, 1:])
            engine.backward(loss)
            engine.step()
            total += loss.item()
        dist.all_reduce(total)
        losses.append(total.item() / BATCH)
        if not way and step + 1 == SAVED:
            engine.save_checkpoint(folder, "saved")
    dist.barrier()
    print("\n" + json.dumps([losses, costs]))


if __name__ == "__main__":
    row = "{:<12}{:>12}{:>10}{:>10}{:>14}{:>14}"
    print(row.format("", "seconds of", "loading", "MB of", "MB of the", "difference"))
    print(row.format(f"ZeRO-{STAGE}", "converting", "it", "a rank", "converter", "of the loss"))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as work:
        wanted, _ = json.loads(run(work, 4, train, work, limit=1200).splitlines()[-1])
        for way in ("reshard", *CONVERTED):
            converting = converter = 0.0
            if way in CONVERTED:
                converting, converter, _ = timed(
                    commands(f"{work}/saved", f"{work}/{way}")[way], work
                )
            losses, costs = json.loads(run(work, 2, train, work, way, limit=1200).splitlines()[-1])
            seconds, memory = (max(cost) for cost in zip(*costs, strict=True))
            difference = max(abs(a - b) for a, b in zip(wanted[SAVED:], losses, strict=True))
            numbers = (
                f"{converting:.2f}",
                f"{seconds:.2f}",
                f"{memory:.0f}",
                f"{converter:.0f}",
                f"{difference:.1e}",
            )
            print(row.format(way, *numbers), flush=True)
