"""A model of realistic size, trained on 4 ranks and resumed on 2, in three ways: what it costs and how close it stays.

    python benchmarks/resume.py --layers 12 --width 768

    reshard     universal.load_checkpoint(), from the ZeRO checkpoint as it is
    ours        ds_to_universal.py, DeepSpeed's universal loader, universal.mend()
    DeepSpeed   DeepSpeed's converter and its universal loader

Seconds: of the conversion, a process of its own, and of loading, the slowest rank. Read and written: by the converter
and all ranks together while they load, as the kernel counts it, with what the ranks send to each other. Memory: the
largest of a rank while it loads, over what it had, and the converter's. Difference: the largest of the training loss
over the steps after the resume.
"""

import argparse
import itertools
import json
import logging
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import model  # noqa: E402
import universal  # noqa: E402
from benchmarks.convert import commands, timed  # noqa: E402
from harness.ranks import deepspeed, run  # noqa: E402

SAVED, STEPS, BATCH, LENGTH, CONVERTED = 2, 12, 4, 32, ("ours", "DeepSpeed")


def make_engine(shape, batch, micro, stage, dtype="fp32", load_universal=False):
    """shape: layers, heads, width."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    gpt = model.GPT(*shape, seq_len=LENGTH, dropout=0.0)
    config = {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": micro,
        "bf16": {"enabled": dtype == "bf16"},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 3e-4}},
        "checkpoint": {"load_universal": load_universal},
    }
    return deepspeed.initialize(model=gpt, model_parameters=model.parameter_groups(gpt, 0.1), config=config)[0]


def load(engine, folder, way):
    """Returns (seconds, bytes read, bytes written, megabytes) of this rank."""
    process, peak, done = psutil.Process(), [0], threading.Event()

    def anonymous():  # the memory of this process that no file is behind
        memory = process.memory_info()
        return memory.rss - memory.shared

    def watch():
        while not done.wait(0.01):
            peak[0] = max(peak[0], anonymous())

    memory, before, watcher = anonymous(), process.io_counters(), threading.Thread(target=watch)
    watcher.start()
    dist.barrier()
    start = time.perf_counter()
    if way == "reshard":
        universal.load_checkpoint(engine, folder, "saved")
    else:
        assert engine.load_checkpoint(folder, "universal")[0]
        if way == "ours":
            universal.mend(engine, folder / "universal")
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    after = process.io_counters()
    read, written = after.read_chars - before.read_chars, after.write_chars - before.write_chars
    return seconds, read, written, (peak[0] - memory) / 1e6


def train(folder, shape, stage, dtype, way=None):
    """What each rank does; rank 0 prints the losses, and what loading has cost every rank."""
    torch.manual_seed(int(os.environ["RANK"]) if way else 0)  # what is resumed must come from the checkpoint
    engine = make_engine(shape, BATCH, 1, stage, dtype, way in CONVERTED)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    costs, losses = [None] * ranks, []
    dist.all_gather_object(costs, load(engine, folder, way) if way else None)
    for step in range(SAVED if way else 0, STEPS):
        tokens = torch.randint(256, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--stage", type=int, default=3)
    args = parser.parse_args()
    print(f"ZeRO-{args.stage}        converting    loading      read   written    of a rank   converter   largest")
    print("                 seconds    seconds        MB        MB           MB          MB   difference", flush=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as work:
        for dtype, way in itertools.product(("fp32", "bf16"), (None, "reshard", "ours", "DeepSpeed")):
            folder, converting, converter, into, out_of = Path(work, dtype), 0, 0, 0, 0
            if way in CONVERTED:
                command = commands(folder / "saved", folder / "universal")[way]
                converting, converter, into, out_of, _ = timed(command, folder)
            job = folder, (args.layers, args.width // 64, args.width), args.stage, dtype, way
            losses, costs = json.loads(run(work, 2 if way else 4, train, *job, limit=1200).splitlines()[-1])
            if not way:
                wanted = losses[SAVED:]
                continue
            seconds, read, written, memory = zip(*costs, strict=True)
            difference = max(abs(a - b) for a, b in zip(wanted, losses, strict=True))
            print(
                f"{dtype} {way:<10}{converting:>10.2f}{max(seconds):>11.2f}{(into + sum(read)) / 1e6:>10.0f}"
                f"{(out_of + sum(written)) / 1e6:>10.0f}{max(memory):>13.0f}{converter:>12.0f}{difference:>13.1e}",
                flush=True,
            )
            shutil.rmtree(folder / "universal", ignore_errors=True)
