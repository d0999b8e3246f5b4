"""Ranks on cards, which a forked process cannot use: torchrun starts each as `python -m
measure.cards`, with a script and its flags, or with module:function and its arguments in JSON."""

import functools
import importlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from measure import VISIBLE
from measure.machines import QUIET, TORCHRUN, WARM
from tests.support.ranks import run, run_script


def command(device, ranks, script, *words):
    """Returns the words that start a script on so many ranks of a device, and variables for it. The
    ranks on CPUs are forked from a process that has imported what they need."""
    flags = f"--standalone --nproc-per-node {ranks} -m measure.cards".split()
    if device == "cuda":
        return [*TORCHRUN, *flags, script, *words], QUIET | {"DS_ACCELERATOR": "cuda"}
    return [*WARM, *flags, script, *words], QUIET | {
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
    }


def run_on(device, folder, ranks, work, *arguments, limit=300):
    """What tests.support.ranks.run() does; on cards, with a function of the script that runs."""
    if device == "cpu":
        return run(folder, ranks, work, *arguments, limit=limit)
    name = f"measure.{Path(sys.argv[0]).stem}:{work.__name__}"
    words, variables = command(device, ranks, name, json.dumps(arguments))
    environment = os.environ | variables
    del environment["CUDA_VISIBLE_DEVICES"]
    if VISIBLE is not None:
        environment["CUDA_VISIBLE_DEVICES"] = VISIBLE
    done = subprocess.run(
        words, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, timeout=limit
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


# -----------------------------------------------------------------------------
# a rank


def prepare():
    """Prepare a rank, before its script runs."""
    device = get_accelerator()
    device.is_fp16_supported = lambda: True  # on CPUs, where it is slow, too
    if device.device_name() == "cuda":
        if int(os.environ["WORLD_SIZE"]) > torch.cuda.device_count():
            device._communication_backend_name = "gloo"
            share_card()
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if "CONFIG" in os.environ:
        change_config(json.loads(os.environ["CONFIG"]))


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


def change_config(changes):
    """Change what train.py gives DeepSpeed."""
    import train

    config = train.ds_config

    def changed(args, ranks):
        merged = config(args, ranks)
        for key, value in changes.items():
            merged[key] = merged.get(key, {}) | value if isinstance(value, dict) else value
        return merged

    train.ds_config = changed


def main():
    del sys.argv[0]
    prepare()
    module, _, function = sys.argv[0].partition(":")
    if function:
        getattr(importlib.import_module(module), function)(*json.loads(sys.argv[1]))
    else:
        run_script(sys.argv[0])


if __name__ == "__main__":
    main()
