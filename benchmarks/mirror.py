"""What it costs to mirror the shards, beside a step without it and a save to the disk.

    python benchmarks/mirror.py

4 ranks, 2 on each of two "machines" of this machine. Every round does a step, a copy by mirror.py and a save to the
disk (with a sync), each after a barrier; medians over the rounds. At every k-th step the copy is shared by k steps. MB:
what a rank saves, and so sends, at each copy, and what a machine's memory holds of one step; it has two for a moment.
"""

import argparse
import itertools
import json
import logging
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
LENGTH = 32
MODELS = {"tutorial": (2, 64, 256, 20), "86M": (12, 768, 16, 5)}  # layers, width, sequences of a step, rounds


def rank_main(args):
    import deepspeed
    import torch
    import torch.distributed as dist

    from model import GPT, parameter_groups
    from universal.mirror import Mirror

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    layers, width, batch, rounds = MODELS[args.model]
    model = GPT(n_layer=layers, n_head=4, n_embd=width, seq_len=LENGTH, dropout=0.0)
    config = {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": batch // ranks,
        "zero_optimization": {"stage": args.stage},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 3e-4}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameter_groups(model, 0.1), config=config)
    machine = args.memory / f"machine{rank // 2}"
    mirror, disk = Mirror(engine, machine), args.disk

    def step():
        rows = torch.randint(256, (batch // ranks, LENGTH + 1))
        engine.backward(engine(rows[:, :-1], rows[:, 1:]))
        engine.step()

    def save():
        engine.save_checkpoint(str(disk), tag="saved")
        os.sync()

    seconds = {"step": [], "mirror": [], "disk": []}
    for _ in range(rounds + 2):
        for name, action in (("step", step), ("mirror", lambda: mirror({})), ("disk", save)):
            dist.barrier()
            start = time.perf_counter()
            action()
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
    sizes = {path: path.stat().st_size / 1e6 for path in machine.glob("step*/*.pt")}
    own = sum(size for path, size in sizes.items() if f"_rank_{rank}_mp" in path.name or path.name[:7] == "mp_rank")
    if rank == 0:
        medians = {name: 1e3 * statistics.median(times[2:]) for name, times in seconds.items()}
        print("COST " + json.dumps(medians | {"own": own, "slot": sum(sizes.values())}), flush=True)
    mirror.close()
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--disk", type=Path, default=Path("out/mirror_benchmark").resolve())
    parser.add_argument("--memory", type=Path, default=Path(f"/dev/shm/mirror_benchmark_{os.getpid()}"))
    for name in ("--stage", "--model"):
        parser.add_argument(name, type=int if name == "--stage" else str, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if "RANK" in os.environ:
        return rank_main(args)
    print("                   ms of a step, mirrored at every K-th                ms of a save         MB")
    print("model     ZeRO    never     K = 1    K = 10   K = 100   ms of a copy      to the disk   a rank  a machine")
    for model, stage in itertools.product(args.models, (1, 3)):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", __file__]
        command += ["--model", model, "--stage", str(stage), "--disk", str(args.disk), "--memory", str(args.memory)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=900)
            assert done.returncode == 0, done.stderr
        finally:
            for folder in (args.disk, args.memory):
                shutil.rmtree(folder, ignore_errors=True)
        cost = json.loads(re.search(r"COST (\{.*?\})", done.stdout)[1])
        steps = "".join(f"{cost['step'] + cost['mirror'] / every:>10.1f}" for every in (1, 10, 100))
        print(
            f"{model:<10}{stage:>4}{cost['step']:>9.1f}{steps}{cost['mirror']:>15.1f}{cost['disk']:>17.1f}"
            f"{cost['own']:>9.2f}{cost['slot']:>11.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
