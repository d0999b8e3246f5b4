"""ds_to_universal.py against DeepSpeed's own converter and `cp -r`: seconds, ratios, memory.

    python benchmarks/convert.py --sizes 10M 124M --ranks 4 16 64 --stages 1 3 --folder /dev/shm
    python benchmarks/convert.py --names 64 250 512 1024
    python benchmarks/convert.py --safetensors --sizes 124M --ranks 4 16

The checkpoints are laid out here, in DeepSpeed 0.19.8's format, as bf16 training of a GPT-2 of that size on so many
ranks writes them: random weights, all else as it would be. All three tools run as whole processes, in turn, and
the median of --repeat rounds counts. Ours waits until the disk has it, so that each is followed by a sync.

--names: ours alone on ZeRO-3 checkpoints of so many ranks, with the 723 parameters of a 70B Llama, of 1,024 elements
each: what a piece of a parameter, of which there are ranks x 723 x 3, costs beside its bytes.

--safetensors: the weights alone, by ds_to_safetensors.py, against DeepSpeed's zero_to_fp32.py; both files hold the same
bits, or it says so.
"""

import argparse
import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

ROOT = Path(__file__).resolve().parent.parent
GPT = {"1M": (1000, 128, 4), "10M": (12288, 256, 8), "124M": (50257, 768, 12), "1B": (50257, 1792, 24)}


def gpt_groups(vocabulary, width, layers):
    """Parameter shapes of a GPT-2 with tied embeddings, in a decay and a no-decay group."""
    decay, no_decay = OrderedDict(), OrderedDict()
    decay["wte.weight"], decay["wpe.weight"] = (vocabulary, width), (1024, width)
    for i in range(layers):
        for name, shape in {
            "attn.qkv": (3 * width, width),
            "attn.proj": (width, width),
            "up": (4 * width, width),
            "down": (width, 4 * width),
        }.items():
            decay[f"blocks.{i}.{name}.weight"], no_decay[f"blocks.{i}.{name}.bias"] = shape, shape[:1]
        for name in ("ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias"):
            no_decay[f"blocks.{i}.{name}"] = (width,)
    no_decay |= {"ln_f.weight": (width,), "ln_f.bias": (width,)}
    return [OrderedDict((name, torch.Size(shape)) for name, shape in group.items()) for group in (decay, no_decay)]


def llama_names():
    """The parameters of a Llama of 80 layers, each of 1,024 elements."""
    layers = [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    layers += ["input_layernorm", "post_attention_layernorm"]
    names = ["embed_tokens", *(f"layers.{i}.{layer}" for i in range(80) for layer in layers), "norm"]
    names = [f"model.{name}.weight" for name in names] + ["lm_head.weight"]
    return [OrderedDict((name, torch.Size((1024,))) for name in names)]


def lay_out(folder, groups, ranks, stage, tied=True):
    """Write a ZeRO checkpoint of random weights. groups: [{name: shape}]."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    noise = torch.rand(1 << 22)

    def flat(numel):
        return noise.repeat(math.ceil(numel / len(noise)))[:numel].clone()

    hyper = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "params": [0]}
    param_groups = [hyper | {"weight_decay": 0.1}, hyper | {"weight_decay": 0.0, "params": [1]}]
    model = {
        "buffer_names": [], "optimizer": None, "param_shapes": groups, "frozen_param_shapes": None,
        "shared_params": {"lm_head.weight": "wte.weight"} if tied else {}, "data_sampler": None,
        "frozen_param_fragments": None,
        "lr_scheduler": {"last_batch_iteration": 100}, "random_ltd": None, "skipped_steps": 0, "global_steps": 100,
        "global_samples": 100, "dp_world_size": ranks, "mp_world_size": 1, "ds_config": {}, "ds_version": "0.19.8",
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
    }  # fmt: skip
    shapes = {name: shape for group in groups for name, shape in group.items()}
    sizes = [[(name, shape.numel()) for name, shape in group.items()] for group in groups]
    if stage == 3:
        placeholders = {name: torch.empty(0, dtype=torch.bfloat16) for name in shapes}
        for rank in range(ranks):
            torch.save(model | {"module": placeholders}, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    else:
        module = {name: flat(shape.numel()).view(shape).bfloat16() for name, shape in shapes.items()}
        torch.save(model | {"module": module}, folder / "mp_rank_00_model_states.pt")
    for rank in range(ranks):
        common = {"loss_scaler": LossScaler(1.0), "dynamic_loss_scale": False, "overflow": False}
        step, state, fp32, mappings, paddings = torch.tensor(100.0), {}, [], [], []
        for group, names in enumerate(sizes):
            if stage == 3:
                size = sum(math.ceil(numel / ranks) for _, numel in names)
            else:
                total = sum(numel for _, numel in names)
                size, mapping, offset = 2 * math.ceil(total / (2 * ranks)), OrderedDict(), 0
                for name, numel in names:
                    begin, end = max(offset, rank * size), min(offset + numel, (rank + 1) * size)
                    if begin < end:
                        mapping[name] = fragment_address(start=begin - rank * size, numel=end - begin)
                    offset += numel
                mappings.append(mapping)
                paddings.append(max(0, min(size, (rank + 1) * size - total)))
            state[group] = {"step": step, "exp_avg": flat(size), "exp_avg_sq": flat(size)}
            fp32.append(flat(size)[: size - paddings[-1]].clone() if paddings else flat(size))
        base = {"state": state, "param_groups": param_groups}
        if stage == 3:
            shard = common | {"zero_stage": ZeroStageEnum.weights, "partition_count": ranks, "fp32_flat_groups": fp32}
            shard |= {"optimizer_state_dict": base}
        else:
            shard = common | {"clip_grad": 1.0, "base_optimizer_state": base, "single_partition_of_fp32_groups": fp32}
            shard |= {"zero_stage": ZeroStageEnum(stage), "group_paddings": paddings, "ds_version": "0.19.8"}
            shard |= {"partition_count": [ranks, ranks], "param_slice_mappings": mappings}
        content = {"optimizer_state_dict": shard, "ds_config": {}, "ds_version": "0.19.8"}
        torch.save(content, folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


# A process inherits the peak memory of the one that forks it, and this one is large: a small one goes between.
BETWEEN = """import json, resource, subprocess, sys, time
start = time.perf_counter()
run = subprocess.run(sys.argv[2:], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
subprocess.run(["sync", "-f", sys.argv[1]], check=True)
seconds = time.perf_counter() - start
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([seconds, used.ru_maxrss / 1e3, run.stdout, used.ru_utime + used.ru_stime]))"""


def timed(command, folder):
    """[seconds, MB of the largest process, output, CPU seconds] of a whole process and the disk behind it."""
    command = [sys.executable, "-c", BETWEEN, folder, *command]
    return json.loads(subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, check=True).stdout)


def compare_weights(args, work):
    """Seconds and memory of writing the weights as safetensors, by us and by zero_to_fp32.py."""
    from safetensors.torch import load_file  # nothing else here needs it

    source, files = work / "source", {name: work / name / "model.safetensors" for name in ("ours", "DeepSpeed")}
    ours = [source, files["ours"]]
    theirs = [work, files["DeepSpeed"].parent, "--tag", source.name, "--safe_serialization", "--max_shard_size", "1TB"]
    commands = {"ours": [sys.executable, ROOT / "ds_to_safetensors.py", *ours]}
    commands["DeepSpeed"] = [sys.executable, "-m", "deepspeed.utils.zero_to_fp32", *theirs]
    print(f"weights to safetensors, seconds of whole processes, medians of {args.repeat}, on {args.folder}")
    columns = "{:>5}{:>6}{:>7}{:>7} |{:>8}{:>11}{:>16} |{:>9}{:>14}"
    print(
        columns.format("size", "ZeRO", "ranks", "GB", "ours", "DeepSpeed", "DeepSpeed/ours", "ours MB", "DeepSpeed MB")
    )
    try:
        for size, stage, ranks in itertools.product(args.sizes, args.stages, args.ranks):
            lay_out(source, gpt_groups(*GPT[size]), ranks, stage, tied=False)  # or zero_to_fp32.py writes none
            os.sync()
            results = {name: [] for name in commands}
            for _ in range(args.repeat):
                for name, command in commands.items():
                    shutil.rmtree(files[name].parent, ignore_errors=True)
                    results[name].append(timed(command, args.folder))
            weights = {name: load_file(path) for name, path in files.items()}
            for name in {**weights["ours"], **weights["DeepSpeed"]}:
                if not torch.equal(weights["ours"][name], weights["DeepSpeed"][name]):
                    sys.exit(f"{name} is not the same in both files")
            total = files["ours"].stat().st_size / 1e9
            seconds = [statistics.median(run[0] for run in results[name]) for name in commands]
            memory = [f"{max(run[1] for run in results[name]):.0f}" for name in commands]
            times = (*(f"{s:.2f}" for s in seconds), f"{seconds[1] / seconds[0]:.1f}")
            print(columns.format(size, stage, ranks, f"{total:.2f}", *times, *memory), flush=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=GPT, default=["10M", "124M"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[4, 16, 64])
    parser.add_argument("--stages", nargs="+", type=int, default=[1, 3])
    parser.add_argument(
        "--folder", type=Path, default=Path("/dev/shm"), help="where: /dev/shm is memory, others a disk"
    )
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--names", nargs="+", type=int, metavar="RANKS", help="the cost of a piece, and nothing else")
    parser.add_argument("--safetensors", action="store_true", help="the weights alone, and nothing else")
    args = parser.parse_args()
    work = args.folder / f"convert_benchmark_{os.getpid()}"
    source, output = work / "source", work / "output"
    common = ["--input_folder", source, "--output_folder", output, "--num_extract_workers", "4", "--num_merge_workers"]
    commands = {
        "ours": [sys.executable, ROOT / "ds_to_universal.py", *common, "2"],
        "DeepSpeed": [
            sys.executable,
            "-m",
            "deepspeed.checkpoint.ds_to_universal",
            *common,
            "2",
            "--inject_missing_state",
        ],
        "cp": ["cp", "-r", source, output],
    }
    if args.safetensors:
        compare_weights(args, work)
        return
    if args.names:
        print(f"{'ranks':>6}{'pieces':>11}{'seconds':>9}{'CPU s':>8}{'us a piece':>12}{'MB':>6}")
        try:
            for ranks in args.names:
                lay_out(source, llama_names(), ranks, 3)
                runs = []
                for _ in range(args.repeat):
                    runs.append(timed(commands["ours"], args.folder))
                    shutil.rmtree(output)
                seconds, cpu = (statistics.median(run[i] for run in runs) for i in (0, 3))
                pieces, memory = ranks * 723 * 3, max(run[1] for run in runs)
                print(
                    f"{ranks:6}{pieces:11,}{seconds:9.2f}{cpu:8.2f}{cpu / pieces * 1e6:12.1f}{memory:6.0f}", flush=True
                )
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return
    print(
        f"seconds of whole processes, medians of {args.repeat}, on {args.folder}; data: what ours takes after its start"
    )
    columns = "{:>5}{:>6}{:>7}{:>7} |{:>8}{:>11}{:>8} |{:>16}{:>9} |{:>9}{:>14}"
    print(
        columns.format(
            "size",
            "ZeRO",
            "ranks",
            "GB",
            "ours",
            "DeepSpeed",
            "cp -r",
            "DeepSpeed/ours",
            "data/cp",
            "ours MB",
            "DeepSpeed MB",
        )
    )
    try:
        for size in args.sizes:
            for stage in args.stages:
                for ranks in args.ranks:
                    lay_out(source, gpt_groups(*GPT[size]), ranks, stage)
                    os.sync()  # or the first to run would wait for the source to reach the disk, too
                    total = sum(path.stat().st_size for path in source.iterdir()) / 1e9
                    results = {name: [] for name in commands}
                    for _ in range(args.repeat):
                        for name, command in commands.items():
                            results[name].append(timed(command, args.folder))
                            shutil.rmtree(output)
                    data = statistics.median(float(out.split(" in ")[1].split()[0]) for _, _, out, _ in results["ours"])
                    seconds = {name: statistics.median(s for s, *_ in runs) for name, runs in results.items()}
                    memory = {name: max(m for _, m, *_ in runs) for name, runs in results.items()}
                    ours, theirs, cp = (f"{seconds[name]:.2f}" for name in ("ours", "DeepSpeed", "cp"))
                    ratio = f"{seconds['DeepSpeed'] / seconds['ours']:.1f}"
                    row = (size, stage, ranks, f"{total:.2f}", ours, theirs, cp, ratio, f"{data / seconds['cp']:.2f}")
                    print(columns.format(*row, f"{memory['ours']:.0f}", f"{memory['DeepSpeed']:.0f}"), flush=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
