"""Loading a universal checkpoint, files read whole or mapped into memory: seconds and memory of a rank.

    python benchmarks/load.py --size 124M --ranks 4 --stages 1 3

Lays out a GPT-2 of that size, converts it, and lets every rank of a fresh launch call engine.load_checkpoint(), with
torch.utils.serialization.config.load.mmap off and on in turn. Memory is the rank's own (RssAnon): its peak while it
loads, over what it was before. Medians of --repeat launches, the slowest rank of each.
"""

import argparse
import json
import logging
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]


def own_memory():
    """Megabytes of this process that no file is behind."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1e3


def load(folder, size, stage, mapped):
    """In every rank: build the engine, load, print what it took."""
    import deepspeed
    import torch
    from convert import GPT
    from torch.utils.serialization import config

    import model

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    config.load.mmap = mapped
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    model.VOCABULARY, width, layers = GPT[size]
    gpt = model.GPT(n_layer=layers, n_head=4, n_embd=width, seq_len=1024)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 1e-4}},
        "checkpoint": {"load_universal": True},
    }
    groups = model.parameter_groups(gpt, 0.1)
    engine, *_ = deepspeed.initialize(model=gpt, model_parameters=groups, config=settings)
    before, peak, done = own_memory(), [0.0], threading.Event()

    def watch():
        while not done.wait(0.01):
            peak[0] = max(peak[0], own_memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    torch.distributed.barrier()
    start = time.perf_counter()
    path, _ = engine.load_checkpoint(folder, tag="universal")
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    assert path is not None
    print("RESULT " + json.dumps([seconds, peak[0] - before]), flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="124M")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--stages", nargs="+", type=int, default=[1, 3])
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    if "RANK" in os.environ:
        load(args.folder, args.size, args.stages[0], bool(args.repeat))
        return

    from convert import GPT, gpt_groups, lay_out

    import ds_to_universal

    work = args.folder / f"load_benchmark_{os.getpid()}"
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        args.ranks,
        __file__,
        "--size",
        args.size,
    ]
    print(f"{'ZeRO':>5}{'files':>8}{'seconds':>10}{'MB of a rank':>15}")
    try:
        for stage in args.stages:
            lay_out(work / "source", gpt_groups(*GPT[args.size]), args.ranks, stage)
            ds_to_universal.convert(work / "source", work / "universal")
            shutil.rmtree(work / "source")
            results = {0: [], 1: []}
            for _ in range(args.repeat):
                for mapped, runs in results.items():
                    command = [*launch, "--folder", work, "--stages", stage, "--repeat", mapped]
                    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=600)
                    lines = [json.loads(x.split("RESULT ")[1]) for x in done.stdout.splitlines() if "RESULT " in x]
                    assert done.returncode == 0 and len(lines) == args.ranks, done.stderr
                    runs.append([max(column) for column in zip(*lines, strict=True)])
            for mapped, runs in results.items():
                seconds, memory = (statistics.median(column) for column in zip(*runs, strict=True))
                print(f"{stage:>5}{['read', 'mapped'][mapped]:>8}{seconds:>10.2f}{memory:>15.0f}", flush=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
