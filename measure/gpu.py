"""What this repository does on a GPU: `make gpu`, some minutes on one card, without a network.

    python -m measure.gpu
    python -m measure.gpu --device cpu      the same in fp32, with 2 CPU ranks in the GPUs' place

Resumes on the GPUs from an ordinary checkpoint (Test 1), a universal one (Test 3) and one of 4 CPU
ranks, and on those from one of the GPUs. A number is the largest difference of the losses from then
on; nan: the run failed, and its log is in runs/gpu/. Ends with an error where a number is off."""

import argparse
import functools
import os
import shutil
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch

import universal
from measure.logs import rows_of
from measure.machines import QUIET, TORCHRUN, WARM
from measure.ranks import run_script

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
    run_script(sys.argv[0])


@functools.cache
def train(device, ranks, flags):
    """(name of the run and, unless `flags` name another, of its folder; its losses after the
    checkpoint)"""
    name = f"{flags}_{device}_{ranks}".replace("--", "").replace(" ", "_")
    script = "examples.train_elastic" if "--exact" in flags else "train.py"
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


def check(what, flags, source, place, most, kind="", least=0.0):
    """Print how far a run on a place, a device and ranks, is from the one that has saved on
    `source`. Returns whether that is off. kind: "_universal", converted; "_forgotten", converted,
    without the optimizer's first moments."""
    base, losses = train(*source, flags)
    words = f"{flags} --resume --checkpoint_dir {base} --checkpoint_tag {SAVED}{kind}"
    if kind and losses.isfinite().all():
        universal.convert(f"{base}/{SAVED}", f"{base}/{SAVED}{kind}")
        words += " --universal_checkpoint"
    if kind == "_forgotten":
        for path in Path(base).glob(f"{SAVED}{kind}/zero/*/exp_avg.pt"):
            moment = torch.load(path)
            moment["param"].zero_()
            torch.save(moment, path)
    _, resumed = train(*place, words)
    gap = (resumed - losses).abs().max().item()  # of tensors: NaN is the largest
    off = not least <= gap <= most
    print(f"{flags:<42}{what:<32}{gap:.1e}{' is off' if off else ''}", flush=True)
    return off


def check_all(device, ranks):
    """Returns how many numbers are off."""
    place = (device, ranks)
    others = ranks // 2 or 2
    off = 0
    for flags in (FP32, *HALF) if device == "cuda" else (FP32,):
        same_device, two_devices = ROUNDING[flags]
        off += check("Test 1", flags, place, place, same_device)
        off += check("Test 3", flags, place, place, same_device, "_universal")
        off += check("to 4 CPU ranks", flags, place, CPUS, two_devices)
        off += check("from 4 CPU ranks", flags, CPUS, place, two_devices)
    off += check("first moments forgotten", FP32, place, place, torch.inf, "_forgotten", least=1e-3)
    off += check("every bit", EXACT, place, place, 0.0)
    off += check(f"every bit, {ranks} to {others} ranks", EXACT, place, (device, others), 0.0)
    return off


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    device = parser.parse_args().device
    cards = 2 if device == "cpu" else torch.cuda.device_count()
    if not cards:
        sys.exit("measure/gpu.py: there is no GPU; --device cpu does the same on CPU ranks")
    began = time.time()
    work = Path("runs/gpu")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    os.chdir(work)
    card = "CPU" if device == "cpu" else torch.cuda.get_device_name()
    versions = f"torch {torch.__version__}, DeepSpeed {version('deepspeed')}"
    print(f"{cards} x {card}, {versions}", flush=True)
    off = check_all(device, ranks=max(n for n in (1, 2, 4, 8) if n <= cards))
    print(f"{time.time() - began:.0f} seconds")
    if off:
        sys.exit(f"measure/gpu.py: {off} numbers are off")


if __name__ == "__main__":
    if "RANK" in os.environ:
        be_a_rank()
    else:
        main()
