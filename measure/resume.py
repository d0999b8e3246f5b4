"""A model of realistic size, trained on 4 ranks and resumed on 2, in two ways: what it costs and
how close it stays.

    python -m measure.resume

    universal   universal.load_checkpoint(), from the ZeRO checkpoint as it is
    DeepSpeed   DeepSpeed's converter and its universal loader

Seconds: of the conversion, a process of its own, and of loading, the slowest rank. Memory: the
largest of a rank while it loads, over what it had, and the converter's. Difference: the largest of
the training loss over the steps after the resume."""

import json
import os
import re
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

import universal
from measure.convert import Run, commands, timed
from tests.support.ranks import deepspeed, run
from train import GPT, init_distributed, parameter_groups

STAGE = 3
BATCH = 4
LENGTH = 32
SHAPE = {"n_layer": 12, "n_head": 12, "n_embd": 768}  # 86 million parameters
SAVED = 2  # steps before the save
STEPS = 12
WAYS = ("universal", "DeepSpeed")


def make_engine(batch, micro, stage, load_universal=False):
    init_distributed()
    gpt = GPT(**SHAPE, seq_len=LENGTH, dropout=0.0)
    config = {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": micro,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 3e-4}},
        "checkpoint": {"load_universal": load_universal},
    }
    groups = parameter_groups(gpt)
    engine, *_ = deepspeed.initialize(model=gpt, model_parameters=groups, config=config)
    return engine


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
    if way == "universal":
        universal.load_checkpoint(engine, folder, "saved")
    else:
        assert engine.load_checkpoint(folder, way)[0]
    return time.perf_counter() - start, megabytes("VmHWM") - before


def train(folder, way=None):
    """What each rank does; rank 0 prints the losses, and what loading has cost every rank."""
    # Of other weights on each rank: what is resumed must come from the checkpoint.
    torch.manual_seed(int(os.environ["RANK"]) if way else 0)
    engine = make_engine(BATCH, 1, STAGE, way == "DeepSpeed")
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    costs = [None] * ranks
    dist.all_gather_object(costs, load(engine, folder, way) if way else None)
    losses = []
    for step in range(SAVED if way else 0, STEPS):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(256, (BATCH, LENGTH + 1), generator=generator)
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


def trained(work, ranks, *way):
    """The losses of train() on so many ranks, and what loading has cost each."""
    out = run(work, ranks, train, work, *way, limit=1200)
    return json.loads(out.splitlines()[-1])


def main():
    row = "{:<12}{:>12}{:>10}{:>10}{:>14}{:>14}"
    print(row.format("", "seconds of", "loading", "MB of", "MB of the", "difference"))
    print(row.format(f"ZeRO-{STAGE}", "converting", "it", "a rank", "converter", "of the loss"))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as work:
        baseline, _ = trained(work, 4)
        for way in WAYS:
            converter = Run(0.0, 0.0, "")
            if way == "DeepSpeed":
                command = commands(f"{work}/saved", f"{work}/{way}")[way]
                converter = timed(command, work)
            losses, costs = trained(work, 2, way)
            seconds, memory = (max(cost) for cost in zip(*costs, strict=True))
            gap = max(abs(a - b) for a, b in zip(baseline[SAVED:], losses, strict=True))
            cells = (
                f"{converter.seconds:.2f}",
                f"{seconds:.2f}",
                f"{memory:.0f}",
                f"{converter.megabytes:.0f}",
                f"{gap:.1e}",
            )
            print(row.format(way, *cells), flush=True)


if __name__ == "__main__":
    main()
