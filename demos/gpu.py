"""What this repository does on a GPU: `make gpu`, some minutes on one card, without a network.

    python demos/gpu.py --output out/gpu.txt
    python demos/gpu.py --device cpu                 the same with CPU ranks in the GPUs' place: fewer cases, shorter

Goes on from a checkpoint on the same ranks, an ordinary one (Test 1) and a universal one (Test 3), from the GPUs' on 4
CPU ranks, and from that of CPU ranks on the GPUs. A number is the largest difference of the losses from then on. What
could not be done stands below; ends with an error where it should have been done, or a number is off.
"""

import argparse
import math
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import universal  # noqa: E402

CPU_RANKS, FIRST = 4, "--dtype fp32 --zero_stage 3"
SMALL = "--train_batch_size 64 --train_micro_batch_size_per_gpu 8 --dropout 0"
CASES = [FIRST, "--dtype fp16 --zero_stage 1 scaling"]
MORE = ["--dtype fp32 --zero_stage 1", "--dtype bf16 --zero_stage 2", "--dtype bf16 --zero_stage 3 --offload"]
MORE += ["--dtype fp16 --zero_stage 3 scaling", "--dtype fp32 --zero_stage 1 FusedAdam"]  # on GPUs alone
ROUNDING = {"fp32": (1e-5, 1e-3), "bf16": (1e-3, 2e-2), "fp16": (1e-3, 2e-2)}  # on one kind of device, between two
COLUMNS = ("Test 1", "Test 3", "to CPU", "from CPU", "no checkpoint")


def prepare(changes):
    """Make changes to a rank that train.py has no flags for, before it runs."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    from universal import loader

    device, initialize, load = get_accelerator(), deepspeed.initialize, loader.load_checkpoint
    if "one_card" in changes:  # all ranks share the first GPU, by gloo, as NCCL refuses
        os.environ["LOCAL_RANK"] = "0"
        device._communication_backend_name = "gloo"
    if "scaling" in changes:  # fp16 is slow on many a CPU, but there
        device.is_fp16_supported = lambda: True

    def changed(config, **options):
        if "scaling" in changes:  # the scale grows every 8 steps, and stays where no number of ranks overflows
            config["fp16"] |= {"initial_scale_power": 10, "loss_scale_window": 8}
        if "FusedAdam" in changes:  # DeepSpeed's own optimizer on GPUs, which it compiles
            del config["optimizer"]["params"]["torch_adam"]
        return initialize(config=config, **options)

    def forgetful(engine, *arguments, **options):
        result = load(engine, *arguments, **options)
        for state in engine.optimizer.optimizer.state.values():
            state["exp_avg"].zero_()
        return result

    deepspeed.initialize = changed
    if "forget" in changes:  # the first moments of the optimizer
        loader.load_checkpoint = forgetful  # which install() installs


class Lab:
    """Runs train.py in the folder `work`: on processes of their own with this environment, or on forked CPU ranks."""

    def __init__(self, on_gpus, work, environment):
        self.work, self.environment, self.lines, self.problems = work, environment, [], []
        self.saved, self.steps = (24, 40) if on_gpus else (12, 20)

    def say(self, *lines):
        print(*lines, sep="\n", flush=True)
        self.lines += lines

    def train(self, ranks, name, folder, flags, script="train.py"):
        """Run the script. Minus so many `ranks`: on CPUs. It saves where the folder has the run's name."""
        interval = self.saved if name == folder else 10**6
        words = f"{SMALL} {flags} --steps {self.steps} --run_name {name} --checkpoint_interval {interval}".split()
        changes = {word for word in words if word in ("scaling", "FusedAdam", "one_card", "forget")}
        words = [word for word in words if word not in changes] + ["--checkpoint_dir", folder]
        if ranks > 0:
            how = {"environment": self.environment}
            words, script = ("rank", ",".join(changes), script, *words), __file__
        else:
            changes.discard("FusedAdam")  # it has to be compiled
            how = {"patch": lambda: prepare(changes)}
        result = harness.launch(self.work, abs(ranks), script, *words, limit=240, **how)
        if result.code:
            raise RuntimeError(harness.last_error(result.err))

    def compare(self, base, name, columns=("loss",)):
        return max(max(harness.compare(self.work, base, name, column).values()) for column in columns)

    def resume(self, ranks, folder, flags, kind=""):
        """The difference of a run that goes on from where the run `folder` has saved. kind: _universal, converted."""
        name = f"{folder}_{len(list(self.work.glob('logs/*.csv')))}"
        self.train(ranks, name, folder, f"{flags} --resume --checkpoint_tag global_step{self.saved}{kind}")
        return self.compare(folder, name)

    def attempt(self, what, measure, most=math.inf, least=0.0):
        """What measure() gives, as text; "-", and a line among the problems, where it cannot."""
        try:
            value = measure() or 0.0
        except (RuntimeError, OSError) as error:
            self.problems.append(f"{what}: {error}")
            return "-"
        if not least <= value <= most:
            self.problems.append(f"{what}: {value:.1e} is off")
        return f"{value:.1e}"

    def line(self, what, measure, *limits):
        self.say(f"{what:<66}{self.attempt(what, measure, *limits):>12}")


def case(lab, ranks, flags):
    """The line of one way to train."""
    gpu, cpu = (where + re.sub(r"\W+", "_", flags) for where in ("gpu", "cpu"))
    alike, apart = ROUNDING[flags.split()[1]]

    def converted():
        saved = lab.work / gpu / f"global_step{lab.saved}"
        universal.convert(saved, f"{saved}_universal")
        return lab.resume(ranks, gpu, f"{flags} --universal_checkpoint", "_universal")

    steps = {
        "training": [lambda: lab.train(ranks, gpu, gpu, flags)],
        "training on CPUs": [lambda: lab.train(-CPU_RANKS, cpu, cpu, flags)],
        "no checkpoint": [lambda: lab.compare(gpu, cpu)],
        "Test 1": [lambda: lab.resume(ranks, gpu, flags), alike],
        "to CPU": [lambda: lab.resume(-CPU_RANKS, gpu, flags), apart],
        "from CPU": [lambda: lab.resume(ranks, cpu, flags), apart],
        "Test 3": [converted, alike],
    }
    found = {column: lab.attempt(f"{flags}: {column}", *step) for column, step in steps.items()}
    lab.say(f"{flags:<42}" + "".join(f"{found[column]:>15}" for column in COLUMNS))


def other_ranks(lab, ranks, others, change):
    """Lines about another number of ranks, --exact, and a load that forgets."""
    base = "gpu" + re.sub(r"\W+", "_", FIRST)
    there = f"{others} rank{'s' * (others > 1)}{' on one card, by gloo' * bool(change)}"

    def exact(ranks, name, change=""):
        lab.train(ranks, name, name, f"--exact --zero_stage 3 --dropout 0.1 {change}", "train_elastic.py")
        return lab.compare("exact", name, ("loss", "val_loss", "grad_norm"))

    lab.line(f"{ranks} to {there}", lambda: lab.resume(others, base, f"{FIRST} {change}"), 1e-5)
    forgotten = "the first moments forgotten: no rounding"
    lab.line(forgotten, lambda: lab.resume(-CPU_RANKS, base, f"{FIRST} forget"), math.inf, 1e-3)
    lab.line(f"--exact, all bits: {ranks}", lambda: exact(ranks, "exact"), 0.0)
    lab.line(f"--exact, all bits: {ranks} once more", lambda: exact(ranks, "again"), 0.0)
    lab.line(f"--exact, all bits: {there}", lambda: exact(others, "others", change), 0.0)


if sys.argv[1:2] == ["rank"]:  # one of a run
    prepare(sys.argv[2].split(","))
    sys.argv = sys.argv[3:]
    runpy.run_path(str(ROOT / sys.argv[0]), run_name="__main__")
else:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--output", type=Path, default=Path("out/gpu.txt"))
    parser.add_argument("--work", type=Path, default=Path("runs/gpu"), help="checkpoints and logs")
    args = parser.parse_args()
    # By a process of its own: CPU ranks are forked from this one, without CUDA.
    code = "import torch as t, deepspeed as d; n = t.cuda.device_count(); name = n and t.cuda.get_device_name();"
    code += "print(n, f'{n} x {name}' if n else 'no GPU', t.__version__, d.__version__, sep='|')"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120).stdout
    cards, *there = out.splitlines()[-1].split("|")
    began, environment, on_gpus = time.time(), os.environ | {"DS_ACCELERATOR": args.device}, args.device == "cuda"
    if cards == "0" and on_gpus:
        sys.exit("demos/gpu.py: there is no GPU; --device cpu does the same on CPU ranks")
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}  # from here on, for what is forked
    from harness import ranks as harness

    shutil.rmtree(args.work, ignore_errors=True)
    args.work.mkdir(parents=True)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    ranks = max(n for n in (1, 2, 4, 8) if n <= int(cards)) if on_gpus else 2
    lab = Lab(on_gpus, args.work.resolve(), environment)
    lab.say("{}, torch {}, DeepSpeed {}, Python {}".format(*there, platform.python_version()))
    head = f"steps {lab.saved + 1} to {lab.steps}: {ranks} of {args.device}, {CPU_RANKS} of CPUs"
    lab.say(f"{head:<42}" + "".join(f"{column:>15}" for column in COLUMNS))
    for flags in CASES + MORE * on_gpus:
        case(lab, ranks, flags)
    other_ranks(lab, ranks, *((2, "one_card") if ranks == 1 else (ranks // 2, "")))
    lab.say(f"{time.time() - began:.0f} seconds", *lab.problems)
    args.output.write_text("\n".join(line.rstrip() for line in lab.lines) + "\n")
    if any(re.search("is off$", one) or not re.search("FusedAdam|one card", one) for one in lab.problems):
        sys.exit("demos/gpu.py: not all is as it should be")
