"""The time of a step of train.py and grad_accu_ds.py on one rank against the same work in plain PyTorch, and the time
from the launch to the first step.

    python benchmarks/speed.py

All run as processes of their own, one thread each, in turn; medians over --repeat rounds.
"""

import argparse
import csv
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
STEPS = 60
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
ENVIRONMENT |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}


def bare(device="cpu", dtype="float32", n_layer=2, n_head=4, n_embd=64, seq_len=32, batch=256, micro=64):
    """train.py's work without DeepSpeed, bf16 without masters; prints the median seconds of a step."""
    import torch

    from data import global_batch, load_data
    from model import GPT, parameter_groups

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(device == "cuda", warn_only=True)  # as launch.py sets it, and these two
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.manual_seed(1337)
    model = GPT(n_layer, n_head, n_embd, seq_len).to(device, getattr(torch, dtype))
    (train, _, _), steps = load_data(None, seq_len), batch // micro
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=5e-3, betas=(0.9, 0.95))
    seconds = []
    for step in range(1, STEPS + 1):
        start, total = time.perf_counter(), 0.0
        inputs, targets = global_batch(train, 1337, step, batch, seq_len)
        for m in range(steps):
            rows = (half[m * micro : m * micro + micro].to(device) for half in (inputs, targets))
            loss = model(*rows, key=(1337, step, m))
            (loss / steps).backward()
            total += loss.detach() / steps
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        float(total)  # waits for a GPU
        seconds.append(time.perf_counter() - start)
    print(statistics.median(seconds[10:]))


def process(*command):
    options = {"check": True, "env": ENVIRONMENT, "timeout": 300, "text": True}
    return subprocess.run(
        [sys.executable, *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, **options
    ).stdout


def of_log(script, run_name, *arguments):
    """Median seconds of a step, by the log."""
    process(ROOT / script, "--run_name", run_name, *arguments)
    with open(Path("logs", f"{run_name}.csv"), newline="") as file:
        return statistics.median(float(row["seconds"]) for row in list(csv.DictReader(file))[10:])


def launch(*command):
    """Seconds from the launch to the end of the first step."""
    start = time.perf_counter()
    running = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    for line in running.stdout:
        if line.startswith("step    1 "):
            first = time.perf_counter() - start
    running.wait(timeout=300)
    return first


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3, help="rounds, of which the median counts; default 3")
    parser.add_argument("--bare", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.bare is not None:
        device_and_type, shape = args.bare[:2], args.bare[2:]
        return bare(*device_and_type, *map(int, shape))
    accumulate = ("--steps", STEPS, "--train_batch_size", 32, "--train_micro_batch_size_per_gpu", 8)
    work = {
        "plain PyTorch": lambda: float(process(__file__, "--bare")),
        "train.py": lambda: of_log("train.py", "speed", "--steps", STEPS, "--eval_interval", 1000),
        "train.py --zero_stage 3": lambda: of_log(
            "train.py", "speed3", "--steps", STEPS, "--eval_interval", 1000, "--zero_stage", 3
        ),
        "grad_accu_pt.py": lambda: of_log("grad_accu_pt.py", "speed_pt", *accumulate),
        "grad_accu_ds.py": lambda: of_log("grad_accu_ds.py", "speed_ds", *accumulate),
    }
    seconds = {name: [] for name in work}
    for _ in range(args.repeat):
        for name, run in work.items():
            seconds[name].append(run())
    print(f"medians of {args.repeat} rounds, one rank     ms per step     to plain PyTorch")
    for name, taken in seconds.items():
        peer = seconds["plain PyTorch" if name[0] != "g" else "grad_accu_pt.py"]
        ratio = statistics.median(a / b for a, b in zip(taken, peer, strict=True))
        print(f"{name:<32}{1e3 * statistics.median(taken):>16.1f}{ratio:>21.2f}")
    train = (ROOT / "train.py", "--steps", 1, "--run_name", "speed")
    programs = Path(sys.executable).parent
    for ranks in (1, 4):
        for name, command in {
            "deepspeed --num_gpus": (programs / "deepspeed", "--num_gpus", ranks),
            "torchrun --nproc-per-node": (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", ranks),
        }.items():
            taken = statistics.median(launch(*command, *train) for _ in range(args.repeat))
            print(f"launch to first step, {name} {ranks}: {taken:.1f} s")


if __name__ == "__main__":
    main()
