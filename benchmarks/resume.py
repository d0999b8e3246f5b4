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
import json
import logging
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
SAVED, STEPS, BATCH, LENGTH = 2, 12, 4, 32
CONVERTERS = {
    "ours": [str(ROOT / "ds_to_universal.py")],
    "DeepSpeed": ["-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"],
}


def status(field):
    """Megabytes, from /proc: RssAnon is the memory of this process that no file is behind."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1e3


def transferred():
    """Bytes that this process has read and written."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"]), int(fields["wchar"])


def rank_main(args):
    import deepspeed
    import torch
    import torch.distributed as dist

    import universal
    from model import GPT, parameter_groups

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank if args.way else 0)  # what is resumed must come from the checkpoint
    model = GPT(n_layer=args.layers, n_head=args.width // 64, n_embd=args.width, seq_len=LENGTH, dropout=0.0)
    config = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": args.dtype == "bf16"},
        "zero_optimization": {"stage": args.stage},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 3e-4}},
        "checkpoint": {"load_universal": args.way in CONVERTERS},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameter_groups(model, 0.1), config=config)
    if args.way:
        memory, peak, done, before = status("RssAnon"), [0.0], threading.Event(), transferred()

        def watch():
            while not done.wait(0.01):
                peak[0] = max(peak[0], status("RssAnon"))

        watcher = threading.Thread(target=watch)
        watcher.start()
        dist.barrier()
        start = time.perf_counter()
        if args.way == "reshard":
            universal.load_checkpoint(engine, args.folder, "saved")
        else:
            assert engine.load_checkpoint(args.folder, "universal")[0]
            if args.way == "ours":
                universal.mend(engine, args.folder / "universal")
        seconds = time.perf_counter() - start
        done.set()
        watcher.join()
        read, written = (after - b for after, b in zip(transferred(), before, strict=True))
        print("COST " + json.dumps([seconds, read, written, peak[0] - memory]), flush=True)
    losses = []
    for step in range(SAVED if args.way else 0, STEPS):
        tokens = torch.randint(256, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
        total = torch.zeros((), dtype=torch.float64)
        for row in tokens.chunk(ranks)[rank].to(engine.device):
            loss = engine(row[None, :-1], row[None, 1:])
            engine.backward(loss)
            engine.step()
            total += loss.item()
        dist.all_reduce(total)
        losses.append(total.item() / BATCH)
        if not args.way and step + 1 == SAVED:
            engine.save_checkpoint(args.folder, "saved")
    if rank == 0:
        print("LOSSES " + json.dumps(losses), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def launch(ranks, args, **changed):
    """(losses, [cost of every rank]) of this file on so many ranks."""
    flags = {"layers": args.layers, "width": args.width} | changed
    flags = [text for key, value in flags.items() for text in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), __file__, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    found = {"COST": [], "LOSSES": []}
    for kind, numbers in re.findall(r"(COST|LOSSES) (\[[^]]*\])", done.stdout):  # lines of two ranks can run together
        found[kind].append(json.loads(numbers))
    assert len(found["COST"]) in (0, ranks)
    return found["LOSSES"][0], found["COST"]


def convert(way, folder):
    """(seconds, bytes read, bytes written, megabytes) of a conversion, its child processes included."""
    measured = "import os,resource,subprocess,sys,time;s=time.time();subprocess.run(sys.argv[1:],check=True,stdout=2);"
    measured += "s=time.time()-s;print(s,*(l.split()[1] for l in open('/proc/self/io') if 'char' in l),"
    measured += "resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss/1e3)"
    options = ["--input_folder", folder / "saved", "--output_folder", folder / "universal"]
    command = [sys.executable, *CONVERTERS[way], *options, "--num_extract_workers", "4", "--num_merge_workers", "2"]
    done = subprocess.run([sys.executable, "-c", measured, *map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(map(float, done.stdout.split()))


def describe_many(shards):
    """Seconds to describe a checkpoint of so many shards, GPT-2 small's parameters, and the bytes sent to each rank."""
    from benchmarks.convert import GPT, gpt_groups, lay_out
    from universal import loader

    folder = Path(f"/dev/shm/resume_benchmark_{os.getpid()}")
    try:
        lay_out(folder, gpt_groups(*GPT["10M"]), shards, 3)
        start = time.perf_counter()
        description = loader.describe(folder)
        return time.perf_counter() - start, len(pickle.dumps(description))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--stage", type=int, default=3)
    for name in ("--dtype", "--way"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if "RANK" in os.environ:
        return rank_main(args)
    folder = args.folder / f"resume_benchmark_{os.getpid()}"
    print(f"ZeRO-{args.stage}        converting    loading      read   written    of a rank   converter   largest")
    print("                 seconds    seconds        MB        MB           MB          MB   difference", flush=True)
    try:
        for dtype in ("fp32", "bf16"):
            common = {"folder": folder, "stage": args.stage, "dtype": dtype}
            losses, _ = launch(4, args, **common)
            for way in ("reshard", *CONVERTERS):
                converting = convert(way, folder) if way in CONVERTERS else (0, 0, 0, 0)
                resumed, costs = launch(2, args, **common, way=way)
                seconds, read, written, memory = zip(*costs, strict=True)
                read, written = (sum(own) + there for own, there in ((read, converting[1]), (written, converting[2])))
                difference = max(abs(a - b) for a, b in zip(losses[SAVED:], resumed, strict=True))
                print(
                    f"{dtype} {way:<10}{converting[0]:>10.2f}{max(seconds):>11.2f}{read / 1e6:>10.0f}"
                    f"{written / 1e6:>10.0f}{max(memory):>13.0f}{converting[3]:>12.0f}{difference:>13.1e}",
                    flush=True,
                )
                shutil.rmtree(folder / "universal", ignore_errors=True)
            shutil.rmtree(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for shards in (4, 64):
        seconds, nbytes = describe_many(shards)
        print(f"describing {shards} shards at ZeRO-3: {seconds:.2f} s, {nbytes:,} bytes to every rank")


if __name__ == "__main__":
    main()
