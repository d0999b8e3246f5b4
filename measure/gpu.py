"""What this repository does on GPUs: `make gpu`, five minutes, without a network.

    python -m measure.gpu --output out/gpu.txt
    python -m measure.gpu --minutes 20            more of the lines
    python -m measure.gpu --lines exact loads     these alone
    python -m measure.gpu --device cpu            on CPU ranks in the GPUs' place

On one card 4 ranks share it, by gloo, as NCCL takes one rank of each card; on several each rank has
one, by NCCL. Lines go side by side as far as the CPU's cores do, those that take times alone, the
most telling ones first; what is left at the deadline is "not tried". A number is the largest
difference of the losses of 8 steps after a save to those of a resume; nan: the run failed, and its
log is in runs/gpu/. Ends with an error where a row is off."""

import argparse
import functools
import inspect
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import universal
from measure.logs import rows_of
from measure.machines import QUIET, TORCHRUN, WARM
from tests.support import ROOT
from tests.support.ranks import last_error, launch, run_script

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
LEAST = 20  # seconds that a run may take
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
UNSEEN = ("--elastic, with kernels of NCCL that wait", "two machines", "make test beside a card")
end = math.inf  # time.monotonic() at which nothing goes on


class Late(Exception):
    """The deadline has come, or is too near."""


class Place(NamedTuple):
    """The device of a run. device: "cuda" or "cpu"."""

    device: str
    ranks: int


class Row(NamedTuple):
    """What is tried. work(): returns what came of it, and whether that is off."""

    what: str
    work: Callable[[], tuple[str, bool]]


class Line(NamedTuple):
    """Rows in the order in which they are tried: later ones go on from what earlier ones saved.

    is_alone: nothing else may run meanwhile, as it takes times."""

    rows: list[Row]
    is_alone: bool = False


class Result(NamedTuple):
    line: str
    what: str
    text: str
    is_off: bool

    def __str__(self):
        return f"{self.line:<16}{self.what:<58}{self.text}{'  OFF' * self.is_off}"


# -----------------------------------------------------------------------------
# a rank


def be_a_rank():
    """Run the script that is named to this process, which a launcher has started."""
    del sys.argv[0]
    prepare()
    run_script(sys.argv[0])


def prepare():
    """Prepare a rank, before its script runs."""
    from deepspeed.accelerator import get_accelerator

    device = get_accelerator()
    device.is_fp16_supported = lambda: True  # on CPUs, where it is slow, too
    if int(os.environ["WORLD_SIZE"]) > torch.cuda.device_count() > 0:
        device._communication_backend_name = "gloo"
        share_card()
    change_config()


def share_card():
    """Let all ranks have the one card: by gloo, as NCCL refuses. Of a gloo group that knows its
    card, torch makes no device mesh."""
    os.environ["LOCAL_RANK"] = "0"
    for name in ("init_process_group", "new_group"):
        shared = by_gloo(getattr(dist, name))
        for module in (dist, dist.distributed_c10d):
            setattr(module, name, shared)


def by_gloo(make):
    @functools.wraps(make)
    def made(*arguments, **options):
        given = inspect.signature(make).bind(*arguments, **options).arguments
        given.pop("device_id", None)
        return make(**given | {"backend": "gloo"})

    return made


def change_config():
    """Change what train.py gives DeepSpeed, as --config says."""
    if "--config" not in sys.argv:
        return
    import train

    config = train.ds_config
    place = sys.argv.index("--config")
    changes = CONFIGS[sys.argv[place + 1]]
    del sys.argv[place : place + 2]

    def changed(args, ranks):
        merged = config(args, ranks)
        for key, value in changes.items():
            merged[key] = merged.get(key, {}) | value if isinstance(value, dict) else value
        return merged

    train.ds_config = changed


# -----------------------------------------------------------------------------
# runs


def seconds_left():
    left = end - time.monotonic()
    if left < LEAST:
        raise Late
    return min(left, 600)


def command(name, words, **variables):
    """What a command prints, and its exit code. Raises Late if there is no time for it."""
    words = ["timeout", "-k", "9", f"{seconds_left():.0f}", *map(str, words)]
    with open(f"{name}.log", "w") as log:
        environment = os.environ | variables
        code = subprocess.run(words, env=environment, stdout=log, stderr=log).returncode
    return end_of(Path(f"{name}.log").read_text(), code)


def end_of(text, code):
    if code and time.monotonic() > end:
        raise Late
    return text, code


def start(name, place, script, *words):
    """What a script prints on the ranks of a place, and its exit code."""
    words = " ".join(map(str, words)).split()
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":  # where no CUDA is, forks do
        limit = seconds_left()
        done = launch(Path.cwd(), place.ranks, script, *words, patch=prepare, limit=limit)
        Path(f"{name}.log").write_text(done.out + done.errors)
        return end_of(done.out, done.code)
    variables = QUIET | {"DS_ACCELERATOR": place.device}
    launcher = TORCHRUN
    if place.device == "cpu":
        launcher = WARM
        variables["CUDA_VISIBLE_DEVICES"] = ""
    ranks = f"--standalone --nproc-per-node {place.ranks} -m measure.gpu".split()
    return command(name, [*launcher, *ranks, script, *words], **variables)


@functools.cache
def train(place, flags):
    """Returns the name of the run (and, unless `flags` name another, of its folder), and its losses
    after the checkpoint."""
    name = re.sub(r"\W+", "_", f"{flags}_{place.device}_{place.ranks}")
    script = "examples.train_elastic" if "--exact" in flags else "train.py"
    script = "examples.train_tp_sp" if "--tensor_parallel" in flags else script
    names = f"--run_name {name} --checkpoint_dir {name}"
    _, failed = start(name, place, script, TRAIN, names, flags)
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
    environment = os.environ | {"DS_ACCELERATOR": "cuda"}
    with open(f"{op}.log", "w") as log:
        builder = subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdout=log, stderr=log
        )
    try:
        failed = builder.wait(seconds_left())
    except subprocess.TimeoutExpired:
        raise Late from None
    return last_error(Path(f"{op}.log").read_text()) if failed else None


# -----------------------------------------------------------------------------
# the lines: {name: Line} of a device, of which there are so many cards and ranks


def row_of(flags, source, place, most, *kind, **more):
    words = " on the CPU" if place.device != source.device and place.device == "cpu" else ""
    origin = " of the CPU" if place.device != source.device and source.device == "cpu" else ""
    what = f"{flags.replace('--', '')}: {source.ranks}{origin} to {place.ranks}{words}"
    if kind:
        what += f", {kind[0].strip('_')}"
    work = functools.partial(check, flags, source, place, most, *kind, **more)
    return Row(what, work)


def not_tried(what, why):
    return Row(what, lambda: (f"not tried: {why}", False))


def rounding(at, ranks):
    """Resumes fp32 runs at ZeRO-3 on other ranks, by a conversion, between a card and a CPU."""
    place, cpus = at(ranks), Place("cpu", 4)
    rows = [row_of(FP32, place, at(count), ROUNDING) for count in (ranks, ranks - 1, 1)]
    rows += [row_of(FP32, place, place, ROUNDING, "_universal")]
    if place.device != "cpu":
        rows.append(row_of(FP32, place, cpus, DEVICES))
        rows += [row_of(FP32, cpus, at(count), DEVICES) for count in (ranks, 1)]
    return Line([*rows, row_of(FP32, place, place, math.inf, "_forgotten")])


def exact(at, ranks):
    """Compare every bit, also on 7 ranks, by which CUDA does not divide exactly."""
    counts = (ranks, 7, ranks - 1, 2, 1)
    return Line([row_of(EXACT, at(ranks), at(count), 0.0) for count in counts])


def one_rank(at, ranks):
    return Line([row_of(ONE_RANK, at(1), at(count), ROUNDING) for count in (1, ranks)])


def half(at, ranks):
    counts = (ranks, ranks - 1, 1)
    return Line([row_of(f, at(ranks), at(count), DEVICES) for f in HALF for count in counts])


def tensor_parallel(at, ranks):
    even = ranks // 2 * 2
    row = row_of(TENSOR, at(even), at(even // 2), DEVICES, more="--tensor_parallel 1")
    return Line([row])


def trainer(at, ranks):
    """Runs examples/hf_trainer.py twice: the second run goes on from the first one's step 10."""
    if not find_spec("transformers"):
        return Line([not_tried("hf_trainer.py", "no transformers")])
    flags = "--dtype bf16 --gradient_checkpointing" if at(1).device == "cuda" else ""

    def resumed(count):
        shutil.rmtree("ckpt_trainer/checkpoint-20", ignore_errors=True)
        text, code = start(f"trainer_{count}", at(count), "examples/hf_trainer.py", flags)
        proof = re.search(r"^universal: .*(the loss (?:differs|was).*)", text, re.M)
        return proof[1] if proof else f"exit code {code}", bool(code or "WARNING" in text)

    few = min(ranks, 4)
    return Line(
        [
            Row(f"hf_trainer.py {flags}, {few} ranks", functools.partial(resumed, few)),
            Row(f"and on {few - 1}", functools.partial(resumed, few - 1)),
        ]
    )


def words(at, ranks):
    """The README's words: those for the deepspeed launcher; or for a CPU, though there are GPUs."""
    few = "--steps 2 --train_batch_size 64 --train_micro_batch_size_per_gpu 8".split()
    launcher = Path(sys.executable).with_name("deepspeed")
    cpu = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    cards = torch.cuda.device_count()

    def launched(name, count, variables):
        script = [launcher, "--num_gpus", count, ROOT / "train.py", *few]
        _, code = command(f"words_{name}", script, **variables)
        return f"exit code {code}", code != 0

    variables = {"cpu": (4, cpu), "cuda": (cards, {"DS_ACCELERATOR": "cuda"})}
    return Line(
        [
            Row(
                f"deepspeed --num_gpus {count} train.py ({device})",
                functools.partial(launched, device, count, values),
            )
            for device, (count, values) in variables.items()
            if count
        ]
    )


def costs(what, stage, ranks_of):
    """Returns a line of what measure/card.py prints."""

    def line(at, ranks):
        count = ranks_of(max(1, torch.cuda.device_count()))

        def measured():
            name = f"{what}_{stage}"
            with tempfile.TemporaryDirectory(dir=memory()) as folder:
                text, code = start(name, at(count), "measure/card.py", what, stage, folder)
            result = re.search(r"^RESULT (.*)$", text, re.M)
            return result[1] if result else f"exit code {code}", code != 0

        return Line([Row(f"ZeRO-{stage}, ranks: {count}", measured)], is_alone=True)

    return line


def memory():
    """Returns a folder of memory, if it has room for what measure/card.py saves."""
    shared = "/dev/shm"
    return shared if Path(shared).is_dir() and shutil.disk_usage(shared).free > 50e9 else "."


def optimizers(config, op, flags):
    """Returns a line of an optimizer, if DeepSpeed can build it."""

    def line(at, ranks):
        rows = []
        fewer = ranks // 2 if config == "hpz" else ranks - 1  # it takes ranks in pairs
        for stage in flags:
            words = f"--config {config} --zero_stage {stage}"
            for count in (ranks, fewer):
                row = row_of(words, at(ranks), at(count), OPTIMIZERS)
                rows.append(Row(row.what, functools.partial(if_built, op, at, row.work)))
        return Line(rows)

    return line


def if_built(op, at, work):
    if op and at(1).device == "cpu":
        return "not tried: no GPU", False
    error = op and build(op)
    return (f"not tried: DeepSpeed builds no {op}: {error}", False) if error else work()


def unseen(at, ranks):
    rows = [not_tried(what, "by hand") for what in UNSEEN]
    if torch.cuda.device_count() < 2:
        rows.append(not_tried("NCCL between cards", "it takes two"))
    return Line(rows)


LINES = {
    "fp32": rounding,
    "exact": exact,
    "one rank": one_rank,
    "loads": costs("loads", 1, lambda cards: cards),
    "fp16, bf16": half,
    "tensor parallel": tensor_parallel,
    "Trainer": trainer,
    "save": costs("background", 1, lambda cards: cards),
    "loads, ZeRO-3": costs("loads", 3, lambda cards: cards),
    "README": words,
    "mirror": costs("mirror", 1, lambda cards: max(2, cards)),
    "proof": costs("proof", 1, lambda cards: cards),
    **{config: optimizers(config, op, flags) for config, op, flags in BUILT},
    "by hand": unseen,
}


# -----------------------------------------------------------------------------
# all lines, side by side


def play(name, line):
    results = []
    for row in line.rows:
        try:
            text, is_off = row.work()
        except Late:
            text, is_off = "not tried: no time left", False
        except Exception as error:
            text, is_off = f"{type(error).__name__}: {error}".splitlines()[0], True
        results.append(Result(name, row.what, text, is_off))
        print(results[-1], flush=True)
    return results


def play_all(lines, cores, ranks):
    """Returns the results of {name: Line}, in this order. Each takes as many cores as there are
    ranks."""
    running = {}  # {future: cores}
    futures = []
    with ThreadPoolExecutor(len(lines)) as threads:
        for name, line in lines.items():
            needed = cores if line.is_alone else min(ranks, cores)
            while sum(running.values()) + needed > cores:
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    del running[future]
            futures.append(threads.submit(play, name, line))
            running[futures[-1]] = needed
    return [result for future in futures for result in future.result()]


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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--lines", nargs="+", choices=LINES, default=[*LINES], metavar="LINE")
    parser.add_argument("--output", type=Path, default=Path("out/gpu.txt"))
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        cores = 1  # the ranks of all launches have one port
    cards = torch.cuda.device_count()
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
    at = functools.partial(Place, args.device)
    results = play_all({name: LINES[name](at, ranks) for name in args.lines}, cores, ranks)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("\n".join([head, "", *map(str, results), ""]))
    print(f"\n{output.read_text()}")
    if off := sum(result.is_off for result in results):
        sys.exit(f"measure/gpu.py: {off} rows are off")


if __name__ == "__main__":
    if "RANK" in os.environ:
        be_a_rank()
    else:
        main()
