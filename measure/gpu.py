"""What this repository does on GPUs: `make gpu`, five minutes, without a network.

    python -m measure.gpu --output out/gpu.txt
    python -m measure.gpu --minutes 20            more of the lines
    python -m measure.gpu --lines exact loads     these alone
    python -m measure.gpu --device cpu            on CPU ranks in the GPUs' place

On one card 4 ranks share it, by gloo, as NCCL takes one rank of each card; on several each rank has
one, by NCCL. Lines go side by side as far as the CPU's cores do, then one by one those that take
times; what is left at the deadline is "not tried". A number is the largest difference of the losses
of 8 steps after a save to those of a resume; nan: the run failed, and its log is in runs/gpu/. Ends
with an error where a row is off."""

import functools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

import universal
from measure import options
from measure.cards import command
from measure.logs import rows_of
from tests.support import ROOT
from tests.support.ranks import last_error

TRAIN = (
    "--train_batch_size 64 --train_micro_batch_size_per_gpu 8 "
    "--steps 20 --checkpoint_interval 12 --dropout 0"
)
SAVED = "global_step12"
FP32 = "--dtype fp32 --zero_stage 3"
ONE_RANK = "--dtype fp32 --zero_stage 1"
HALF = ("--dtype fp16 --zero_stage 1", "--dtype bf16 --zero_stage 3 --offload")
EXACT = "--zero_stage 3 --dropout 0.1 --exact"
TENSOR = "--dtype fp32 --zero_stage 1 --tensor_parallel 2"
ROUNDING = 1e-5  # fp32, on one kind of device
DEVICES = 1e-3  # between two kinds; and fp16, bf16 on one
OPTIMIZERS = 2e-2  # in bf16, with steps that are not ours
LEAST = 20  # seconds that a run takes, at least
ADAM = {"type": "AdamW", "params": {"lr": 5e-3, "betas": [0.9, 0.95]}}
TORCH_FUSED = ADAM["params"] | {"torch_adam": True, "fused": True}
PINNED = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
# --config NAME: over what train.py gives DeepSpeed.
CONFIGS = {
    "torch_fused": {"optimizer": ADAM | {"params": TORCH_FUSED}},
    "fused": {"optimizer": ADAM},
    "cpu_adam": {
        "optimizer": ADAM,
        "zero_optimization": PINNED,
        "zero_force_ds_cpu_optimizer": True,
    },
    "lion": {"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}},
    "lamb": {"optimizer": {"type": "Lamb", "params": {"lr": 5e-3}}},
    "hpz": {"zero_optimization": {"zero_hpz_partition_size": 2}},
    "qwz": {"zero_optimization": {"zero_quantized_weights": True}},
    "qgz": {"zero_optimization": {"zero_quantized_gradients": True}},
}
# (--config, the op that DeepSpeed builds for it, [stages and dtypes])
BUILT = [
    ("torch_fused", "", ["1 --dtype bf16", "3 --dtype bf16"]),
    ("fused", "FusedAdamBuilder", ["1 --dtype bf16", "2 --dtype fp16", "3 --dtype bf16"]),
    ("cpu_adam", "CPUAdamBuilder", ["2 --dtype bf16", "3 --dtype bf16"]),
    ("lion", "FusedLionBuilder", ["1 --dtype bf16"]),
    ("lamb", "FusedLambBuilder", ["1 --dtype bf16"]),
    ("hpz", "", ["3 --dtype bf16"]),
    ("qwz", "QuantizerBuilder", ["3 --dtype bf16"]),
    ("qgz", "QuantizerBuilder", ["3 --dtype bf16"]),
]
LATE = "not tried: no time left"
end = math.inf  # time.monotonic() at which nothing goes on


class Place(NamedTuple):
    """The device of a run. device: "cuda" or "cpu"."""

    device: str
    ranks: int


# -----------------------------------------------------------------------------
# runs


def run(name, words, **variables):
    """What a command prints, and its exit code."""
    left = min(max(1, end - time.monotonic()), 600)
    words = ["timeout", "-k", "9", f"{left:.0f}", *map(str, words)]
    with open(f"{name}.log", "w") as log:
        code = subprocess.run(words, env=os.environ | variables, stdout=log, stderr=log).returncode
    return Path(f"{name}.log").read_text(), code


def start(name, place, script, *words, **variables):
    """What a script prints on the ranks of a place, and its exit code."""
    words, of_device = command(*place, script, *" ".join(map(str, words)).split())
    return run(name, words, **of_device, **variables)


@functools.cache
def train(place, flags):
    """Returns the name of the run (and, unless `flags` name another, of its folder), and its losses
    after the checkpoint."""
    name = re.sub(r"\W+", "_", f"{flags}_{place.device}_{place.ranks}")
    script = "examples.train_elastic" if "--exact" in flags else "train.py"
    script = "examples.train_tp_sp" if "--tensor_parallel" in flags else script
    flags, *config = re.split(r"--config (\w+)", flags, maxsplit=1)
    variables = {"CONFIG": json.dumps(CONFIGS[config[0]])} if config else {}
    names = f"--run_name {name} --checkpoint_dir {name}"
    _, failed = start(name, place, script, TRAIN, names, flags, *config[1:], **variables)
    losses = [float(row["loss"]) for row in rows_of(Path("logs", f"{name}.csv"))[-8:]]
    return name, torch.tensor([torch.nan] if failed else losses, dtype=torch.float64)


def check(flags, source, place, most, kind="", more=""):
    """Train on `source`, resume on `place`, and tell how far the losses are apart.

    kind: what is resumed: "", the checkpoint; "_universal", it converted; "_forgotten", it
    converted without the optimizer's first moments, which must be seen. more: flags of the resume.
    """
    base, losses = train(source, flags)
    words = f"{flags} --resume --checkpoint_dir {base} --checkpoint_tag {SAVED}{kind} {more}"
    if kind and losses.isfinite().all():
        universal.convert(f"{base}/{SAVED}", f"{base}/{SAVED}{kind}")
        words += " --universal_checkpoint"
    least = 0.0
    if kind == "_forgotten":
        least = 1e-3
        for path in Path(base).glob(f"{SAVED}{kind}/zero/*/exp_avg.pt"):
            moment = torch.load(path)
            moment["param"].zero_()
            torch.save(moment, path)
    _, resumed = train(place, words)
    gap = (resumed - losses).abs().max().item()  # of tensors: NaN is the largest
    return f"{gap:.1e}", not least <= gap <= most


@functools.cache
def build(op):
    """Returns in a line why DeepSpeed cannot build an op; None if it can. A build is never ended:
    it would leave a lock behind."""
    code = f"import torch; from deepspeed.ops.op_builder import {op}; {op}().load(verbose=False)"
    words = [sys.executable, "-c", code]
    environment = os.environ | {"DS_ACCELERATOR": "cuda"}
    done = subprocess.run(words, env=environment, stderr=subprocess.PIPE, text=True)
    return last_error(done.stderr) if done.returncode else None


# -----------------------------------------------------------------------------
# the lines: {name: [(what is tried, work)]}; work() returns what came of it, and if that is off


def resume(flags, source, place, most, *kind, op="", more=""):
    """A row: train on `source`, resume on `place`. op: what DeepSpeed builds for it."""
    words = " on the CPU" if place.device != source.device and place.device == "cpu" else ""
    origin = " of the CPU" if place.device != source.device and source.device == "cpu" else ""
    what = f"{flags.replace('--', '')}: {source.ranks}{origin} to {place.ranks}{words}"
    what += "".join(f", {word.strip('_')}" for word in kind)

    def work():
        if op and place.device == "cpu":
            return "not tried: no GPU", False
        if error := op and build(op):
            return f"not tried: DeepSpeed builds no {op}: {error}", False
        return check(flags, source, place, most, *kind, more=more)

    return what, work


def trained(count, place, flags):
    """A row: examples/hf_trainer.py, which goes on from the step 10 of an earlier row."""

    def work():
        shutil.rmtree("ckpt_trainer/checkpoint-20", ignore_errors=True)
        text, code = start(f"trainer_{count}", place, "examples/hf_trainer.py", flags)
        proof = re.search(r"^universal: .*(the loss (?:differs|was).*)", text, re.M)
        return proof[1] if proof else f"exit code {code}", bool(code or "WARNING" in text)

    return f"hf_trainer.py {flags}, {count} ranks", work


def typed(device, count):
    """A row: the README's words for the deepspeed launcher; or for a CPU, though there are GPUs."""
    launcher = Path(sys.executable).with_name("deepspeed")
    few = "--steps 2 --train_batch_size 64 --train_micro_batch_size_per_gpu 8".split()
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}

    def work():
        words = [launcher, "--num_gpus", count, ROOT / "train.py", *few]
        _, code = run(f"words_{device}", words, DS_ACCELERATOR=device, **hidden)
        return f"exit code {code}", code != 0

    return f"deepspeed --num_gpus {count} train.py ({device})", work


def measured(name, device, ranks):
    """A row: the table that another script writes on this device."""
    module, *flags = name.split()
    words = ["-m", f"measure.{module}", *flags, "--device", device, "--ranks", ranks]

    def work():
        text, code = run(module, [sys.executable, *words], PYTHONPATH=str(ROOT))
        return f"exit code {code}\n{text}", code != 0

    return " ".join(map(str, words[1:])), work


def lines(device, ranks, cards):
    """Returns the lines that go side by side, the most telling ones first."""
    place = Place(device, ranks)
    at = functools.partial(Place, device)
    cpus = Place("cpu", 4)
    fewer = (ranks, ranks - 1, 1)
    fp32 = [resume(FP32, place, at(count), ROUNDING) for count in fewer]
    fp32.append(resume(FP32, place, place, ROUNDING, "_universal"))
    if device == "cuda":
        fp32.append(resume(FP32, place, cpus, DEVICES))
        fp32 += [resume(FP32, cpus, at(count), DEVICES) for count in (ranks, 1)]
    fp32.append(resume(FP32, place, place, math.inf, "_forgotten"))
    even = ranks // 2 * 2
    few = min(ranks, 4)
    flags = "--dtype bf16 --gradient_checkpointing" if device == "cuda" else ""
    trainer = [trained(count, at(count), flags) for count in (few, few - 1)]
    tensor = {"more": "--tensor_parallel 1"}
    return {
        "fp32": fp32,
        # CUDA does not divide by 7 exactly.
        "exact": [resume(EXACT, place, at(n), 0.0) for n in (ranks, 7, ranks - 1, 2, 1)],
        "one rank": [resume(ONE_RANK, at(1), at(count), ROUNDING) for count in (1, ranks)],
        "fp16, bf16": [resume(half, place, at(n), DEVICES) for half in HALF for n in fewer],
        "tensor parallel": [resume(TENSOR, at(even), at(even // 2), DEVICES, **tensor)],
        "Trainer": trainer if find_spec("transformers") else [],
        "README": [typed("cpu", 4), *([typed("cuda", cards)] if cards else [])],
        **{name: optimizer(name, op, stages, at, ranks) for name, op, stages in BUILT},
    }


def optimizer(name, op, stages, at, ranks):
    fewer = ranks // 2 if name == "hpz" else ranks - 1  # it takes ranks in pairs
    return [
        resume(f"--config {name} --zero_stage {stage}", at(ranks), at(count), OPTIMIZERS, op=op)
        for stage in stages
        for count in (ranks, fewer)
    ]


def times(device, cards):
    """Returns the lines that take times, so that nothing else may run meanwhile."""
    return {
        "loads": [measured("resume --loads", device, cards)],
        "mirror, save": [measured("mirror", device, max(2, cards))],
        "proof": [measured("proof", device, cards)],
    }


# -----------------------------------------------------------------------------
# all lines


def play(name, rows):
    """Returns (line, whether it is off) of each row."""
    results = []
    for what, work in rows:
        text, is_off = LATE, False
        if time.monotonic() < end - LEAST:
            try:
                text, is_off = work()
            except Exception as error:
                text, is_off = f"{type(error).__name__}: {error}".splitlines()[0], True
        if is_off and time.monotonic() > end:
            text, is_off = LATE, False
        results.append((f"{name:<16}{what:<58}{text}{'  OFF' * is_off}", is_off))
        print(results[-1][0], flush=True)
    return results


def title(device, cards, ranks):
    card = "CPU ranks in the GPUs' place"
    if device == "cuda":
        card = f"{cards} x {torch.cuda.get_device_name()}"
        how = "share it by gloo" if cards < ranks else "by NCCL"
        card += f", {ranks} ranks {how}"
    versions = f"torch {torch.__version__}, DeepSpeed {version('deepspeed')}"
    return f"{card}; {len(os.sched_getaffinity(0))} CPU cores; {versions}"


def main():
    global end
    parser = options.parser(__doc__, "out/gpu.txt")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--lines", nargs="+", metavar="LINE")
    args = parser.parse_args()
    cards = torch.cuda.device_count() if args.device == "cuda" else 0
    if args.device == "cuda" and not cards:
        parser.error("there is no GPU; --device cpu does the same on CPU ranks")
    end = time.monotonic() + 60 * args.minutes
    ranks = cards if cards > 1 else 4
    output = args.output.resolve()
    work = Path("runs/gpu")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    os.chdir(work)
    head = title(args.device, cards, ranks)
    print(head, flush=True)
    together = lines(args.device, ranks, cards)
    alone = times(args.device, max(1, cards))
    wanted = args.lines or [*together, *alone]
    if unknown := {*wanted} - together.keys() - alone.keys():
        parser.error(f"no line {', '.join(unknown)}; there are {', '.join([*together, *alone])}")
    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // ranks)) as threads:
        names = [name for name in together if name in wanted]
        results = [*threads.map(lambda name: play(name, together[name]), names)]
    results += [play(name, alone[name]) for name in alone if name in wanted]
    rows = [row for line in results for row in line]
    output.write_text("\n".join([head, "", *(text for text, _ in rows), ""]))
    print(f"\n{output.read_text()}")
    if off := sum(is_off for _, is_off in rows):
        sys.exit(f"measure/gpu.py: {off} rows are off")


if __name__ == "__main__":
    main()
