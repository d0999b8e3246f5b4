"""What this repository does on GPUs: `make gpu`, an hour on a rented machine, without a network.

    python -m measure.gpu
    python -m measure.gpu --lines 2 5       these lines alone
    python -m measure.gpu --device cpu      on 2 CPU ranks in the GPUs' place, as far as that goes

Each line of the list below says how many minutes it may take. A number is the largest difference of
the losses after a resume; nan: the run failed, and its log is in runs/gpu/. It ends with a table to
paste into an issue, and with an error where a number is off. What no GPU has run says "not
tried"."""

import argparse
import functools
import os
import re
import shutil
import subprocess
import sys
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

import universal
from measure.logs import rows_of
from measure.machines import QUIET, TORCHRUN, WARM
from tests.support import ROOT
from tests.support.ranks import run_script

TRAIN = (
    "--train_batch_size 64 --train_micro_batch_size_per_gpu 8 "
    "--steps 20 --checkpoint_interval 12 --dropout 0"
)
SAVED = "global_step12"
CPUS = ("cpu", 4)
FP32 = "--dtype fp32 --zero_stage 3"
HALF = ("--dtype fp16 --zero_stage 1", "--dtype bf16 --zero_stage 3 --offload")
EXACT = "--zero_stage 3 --dropout 0.1 --exact"
# On one kind of device, and between two.
ROUNDING = {FP32: (1e-5, 1e-3)} | dict.fromkeys(HALF, (1e-3, 2e-2))
OTHER_RANKS = 2e-2  # in bf16
ADAM = {"lr": 5e-3, "betas": [0.9, 0.95]}
# --config NAME: over what train.py gives DeepSpeed.
CONFIGS = {
    "torch": {"optimizer": {"type": "AdamW", "params": ADAM | {"torch_adam": True}}},
    "fused": {"optimizer": {"type": "AdamW", "params": ADAM}},
    "fused_0": {
        "optimizer": {"type": "AdamW", "params": ADAM},
        "zero_optimization": {"stage": 0},
    },
    "torch_fused": {
        "optimizer": {"type": "AdamW", "params": ADAM | {"torch_adam": True, "fused": True}}
    },
    "cpu_adam": {
        "optimizer": {"type": "AdamW", "params": ADAM},
        "zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": True}},
        "zero_force_ds_cpu_optimizer": True,
    },
    "lion": {"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}},
    "lamb": {"optimizer": {"type": "Lamb", "params": {"lr": 5e-3}}},
    "hpz": {"zero_optimization": {"zero_hpz_partition_size": 2}},
    "qwz": {"zero_optimization": {"zero_quantized_weights": True}},
    "qgz": {"zero_optimization": {"zero_quantized_gradients": True}},
}
OPTIMIZERS = [f"--zero_stage {stage} --dtype bf16 --config fused" for stage in (1, 2, 3)]
OPTIMIZERS += [f"--zero_stage 1 --dtype {dtype} --config fused_0" for dtype in ("bf16", "fp16")]
OPTIMIZERS += ["--zero_stage 2 --dtype fp16 --config fused"]
OPTIMIZERS += [f"--zero_stage {stage} --dtype bf16 --config torch_fused" for stage in (1, 3)]
OPTIMIZERS += [f"--zero_stage {stage} --dtype bf16 --config cpu_adam" for stage in (2, 3)]
OPTIMIZERS += [f"--zero_stage 1 --dtype bf16 --config {name}" for name in ("lion", "lamb")]
OPTIMIZERS += [f"--zero_stage 3 --dtype bf16 --config {name}" for name in ("hpz", "qwz", "qgz")]
LARGE = "--n_layer 48 --n_head 25 --n_embd 1600 --seq_len 256"  # 1.5 billion parameters
SMALL = "--n_layer 2 --n_head 5 --n_embd 160"
RESULTS = []  # [Result]


class Result(NamedTuple):
    """A row of the table. text: a number, or what came of it."""

    line: str
    what: str
    text: str
    off: bool


def note(line, what, text, off=False):
    RESULTS.append(Result(line, what, text, off))
    print(f"{line:<44} {what:<40} {text}{' is off' if off else ''}", flush=True)


# -----------------------------------------------------------------------------
# a rank


def be_a_rank():
    """Run the script that is named to this process, which torchrun has started."""
    from deepspeed.accelerator import get_accelerator

    device = get_accelerator()
    device.is_fp16_supported = lambda: True  # on CPUs, where it is slow, too
    if int(os.environ["WORLD_SIZE"]) > torch.cuda.device_count() > 0:
        # All share the card, by gloo, as NCCL refuses.
        os.environ["LOCAL_RANK"] = "0"
        device._communication_backend_name = "gloo"
    del sys.argv[0]
    change_train()
    run_script(sys.argv[0])


def change_train():
    """As --config says; and a load prints what it has cost."""
    import train

    config, resume = train.ds_config, train.resume
    changes = {}
    if "--config" in sys.argv:
        place = sys.argv.index("--config")
        changes = CONFIGS[sys.argv[place + 1]]
        del sys.argv[place : place + 2]

    def changed(args, ranks):
        merged = config(args, ranks)
        for key, value in changes.items():
            merged[key] = merged.get(key, {}) | value if isinstance(value, dict) else value
        return merged

    def timed(*arguments):
        began = time.perf_counter()
        state = resume(*arguments)
        seconds = time.perf_counter() - began
        cards = torch.cuda.max_memory_allocated() / 1e6 if torch.cuda.is_available() else 0
        peak = re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1]
        train.say(f"load: {seconds:.1f} s, {cards:.0f} MB of a GPU, {int(peak) / 1e3:.0f} MB")
        return state

    train.ds_config, train.resume = changed, timed


# -----------------------------------------------------------------------------
# runs


@functools.cache
def train(device, ranks, flags):
    """(name of the run and, unless `flags` name another, of its folder; its losses after the
    checkpoint)"""
    name = re.sub(r"\W+", "_", f"{flags}_{device}_{ranks}")
    script = "examples.train_elastic" if "--exact" in flags else "train.py"
    script = "examples.train_tp_sp" if "--tensor_parallel" in flags else script
    launcher = WARM if device == "cpu" else TORCHRUN
    environment = os.environ | QUIET | {"DS_ACCELERATOR": device}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    words = f"--standalone --nproc-per-node {ranks} -m measure.gpu {script} {TRAIN}"
    words += f" --run_name {name} --checkpoint_dir {name} {flags}"
    command = ["timeout", "600", *launcher, *words.split()]
    with open(f"{name}.log", "w") as log:
        failed = subprocess.run(command, env=environment, stdout=log, stderr=log).returncode
    losses = [float(row["loss"]) for row in rows_of(Path("logs", f"{name}.csv"))[-8:]]
    return name, torch.tensor([torch.nan] if failed else losses, dtype=torch.float64)


def check(what, flags, source, place, most, kind="", least=0.0, more=""):
    """Note how far a run on a place, a device and ranks, is from the one that has saved on
    `source`. kind: "_universal", converted; "_forgotten", converted, without the optimizer's first
    moments. more: flags of the second one."""
    base, losses = train(*source, flags)
    words = f"{flags} --resume --checkpoint_dir {base} --checkpoint_tag {SAVED}{kind} {more}"
    if kind and losses.isfinite().all():
        universal.convert(f"{base}/{SAVED}", f"{base}/{SAVED}{kind}")
        words += " --universal_checkpoint"
    if kind == "_forgotten":
        for path in Path(base).glob(f"{SAVED}{kind}/zero/*/exp_avg.pt"):
            moment = torch.load(path)
            moment["param"].zero_()
            torch.save(moment, path)
    name, resumed = train(*place, words)
    gap = (resumed - losses).abs().max().item()  # of tensors: NaN is the largest
    note(flags, what, f"{gap:.1e}", off=not least <= gap <= most)
    return name


# -----------------------------------------------------------------------------
# the lines


def machine(device, ranks):
    for command in ("nvidia-smi -L", "getent hosts $(hostname)", "ulimit -n", "df -h /dev/shm"):
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
        note("the machine", command, " ".join((done.stdout or done.stderr).split()[-40:]))


def rounding(device, ranks):
    place = (device, ranks)
    for flags in (FP32, *HALF) if device == "cuda" else (FP32,):
        same_device, two_devices = ROUNDING[flags]
        check("Test 1", flags, place, place, same_device)
        check("Test 3", flags, place, place, same_device, "_universal")
        check("to 4 CPU ranks", flags, place, CPUS, two_devices)
        check("from 4 CPU ranks", flags, CPUS, place, two_devices)
    check("first moments forgotten", FP32, place, place, torch.inf, "_forgotten", least=1e-3)


def words(device, ranks):
    """README's, by the deepspeed launcher; those for a CPU, though there are GPUs."""
    cpu = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    few = "--steps 2 --train_batch_size 64 --train_micro_batch_size_per_gpu 8".split()
    launcher = str(Path(sys.executable).with_name("deepspeed"))
    commands = {"the CPU's": ([launcher, "--num_gpus", "4", ROOT / "train.py", *few], cpu)}
    if device == "cuda":
        command = [launcher, "--num_gpus", str(ranks), ROOT / "train.py", *few]
        commands["README's"] = (command, {"DS_ACCELERATOR": "cuda"})
        commands["make test"] = (["make", "-C", ROOT, "test"], {})
    for what, (command, variables) in commands.items():
        command = ["timeout", "900", *command]
        done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
        Path(f"{what}.log").write_text(done.stdout + done.stderr)
        note("README", what, f"exit code {done.returncode}", off=done.returncode != 0)
    if device == "cpu":
        note("README", "README's words, make test", "not tried: no GPU")


def optimizers(device, ranks):
    cases = OPTIMIZERS if device == "cuda" else ["--zero_stage 2 --dtype bf16 --config torch"]
    for flags in cases:
        fewer = (device, ranks - 1 or 2)
        check(f"{ranks} to {fewer[1]} ranks", flags, (device, ranks), fewer, OTHER_RANKS)
        check("and the same ranks", flags, (device, ranks), (device, ranks), OTHER_RANKS)
    if device == "cpu":
        note("optimizers", f"{len(OPTIMIZERS)} others", "not tried: no GPU")


def exact(device, ranks):
    for others in sorted({ranks, ranks // 2 or 2, *range(1, ranks, 2)}, reverse=True):
        what = f"every bit, {ranks} to {others} ranks"
        check(what, EXACT, (device, ranks), (device, others), 0.0)


def trainer(device, ranks):
    """The second run goes on from the first one's checkpoint of step 10."""
    if not find_spec("transformers") or ranks < 2:
        note("hf_trainer.py", "", "not tried: no transformers, or one GPU")
        return
    variables = {"DS_ACCELERATOR": device}
    flags = ["--dtype", "bf16", "--gradient_checkpointing"]
    if device == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""
        flags = []
    most = min(ranks, 4)  # they divide its 12 micro-batches
    for count in (most, most // 2):
        command = f"--standalone --nproc-per-node {count} {ROOT}/examples/hf_trainer.py"
        command = ["timeout", "600", *TORCHRUN, *command.split(), *flags]
        environment = os.environ | QUIET | variables
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        Path(f"trainer_{count}.log").write_text(done.stdout + done.stderr)
        proof = re.search(r"^universal: .*(the loss (?:differs|was).*)", done.stdout, re.M)
        text = proof[1] if proof else f"exit code {done.returncode}"
        note("hf_trainer.py", f"{count} ranks {' '.join(flags)}", text, done.returncode != 0)
        for later in Path("ckpt_trainer").glob("checkpoint-2*"):
            shutil.rmtree(later)


def large(device, ranks):
    """Seconds and peak memory of a load, and of DeepSpeed's own."""
    size = LARGE if device == "cuda" else SMALL
    dtype = "bf16" if device == "cuda" else "fp32"
    for stage in ("1", "3", "3 --offload"):
        flags = f"{size} --dtype {dtype} --zero_stage {stage}"
        for count, more in ((ranks - 1 or 2, ""), (ranks, ""), (ranks, "--stock")):
            what = f"{ranks} to {count} ranks {more}"
            name = check(what, flags, (device, ranks), (device, count), OTHER_RANKS, more=more)
            cost = re.search(r"^load: (.*)", Path(f"{name}.log").read_text(), re.M)
            note(flags, what, cost[1] if cost else "no load")


def tensor_parallel(device, ranks):
    if ranks < 2:
        note("tensor parallelism", "", "not tried: one GPU")
        return
    flags = "--dtype fp32 --zero_stage 1 --tensor_parallel 2"
    fewer = (device, ranks // 2)
    check("2 to 1", flags, (device, ranks), fewer, 1e-3, more="--tensor_parallel 1")


def by_hand(device, ranks):
    for what in (
        "7B, LoRA: seconds of a load beside --stock",
        "tf32, gradient checkpointing, adamw_torch_fused in hf_trainer.py",
        "proof on and off: seconds of a step",
        "train_elastic --elastic --mirror 1: kill -9, SIGSTOP, SIGTERM, two containers",
        "fused=True, engine.compile() in train_tp_sp",
        "a load in half a step with overlap_comm; after an eval forward at ZeRO-3",
    ):
        note("by hand", what, "not tried")


# (the line, minutes on 8 GPUs)
LINES = [
    (machine, 1),
    (rounding, 12),
    (words, 9),
    (optimizers, 8),
    (exact, 5),
    (trainer, 3),
    (large, 8),
    (tensor_parallel, 2),
    (by_hand, 12),
]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    numbers = range(1, len(LINES) + 1)
    names = ", ".join(
        f"{n} {line.__name__} {m}'" for n, (line, m) in zip(numbers, LINES, strict=True)
    )
    parser.add_argument("--lines", type=int, nargs="+", choices=numbers, help=names)
    args = parser.parse_args()
    device = args.device
    cards = 2 if device == "cpu" else torch.cuda.device_count()
    if not cards:
        sys.exit("measure/gpu.py: there is no GPU; --device cpu does the same on CPU ranks")
    work = Path("runs/gpu")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    os.chdir(work)
    card = "CPU" if device == "cpu" else torch.cuda.get_device_name()
    versions = f"torch {torch.__version__}, DeepSpeed {version('deepspeed')}"
    title = f"{cards} x {card}, {versions}"
    print(title, flush=True)
    for number in args.lines or numbers:
        line, minutes = LINES[number - 1]
        began = time.time()
        line(device, max(n for n in (1, 2, 4, 8) if n <= cards))
        taken = (time.time() - began) / 60
        note(line.__name__, "minutes", f"{taken:.1f}, {minutes} expected on 8 GPUs")
    print(f"\n{title}\n\n| run | what | result |\n|---|---|---|")
    for result in RESULTS:
        print(f"| {result.line} | {result.what} | {result.text}{' **off**' * result.off} |")
    if off := sum(result.off for result in RESULTS):
        sys.exit(f"measure/gpu.py: {off} numbers are off")


if __name__ == "__main__":
    if "RANK" in os.environ:
        be_a_rank()
    else:
        main()
