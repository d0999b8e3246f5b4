"""What a call, or a whole process, costs: seconds and megabytes."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

# A process inherits the peak memory of the one that forks it, and this one is large: a small one
# goes between.
TIMER = """import json, resource, subprocess, sys, time
folder, *words = sys.argv[1:]
start = time.perf_counter()
run = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
if folder:
    subprocess.run(["sync", "-f", folder], check=True)
seconds = time.perf_counter() - start
megabytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3
print(json.dumps([seconds, megabytes, run.stdout, run.returncode]))"""


class Run(NamedTuple):
    """A process, from its start to its end, and the disk behind it."""

    seconds: float
    megabytes: float  # of its largest process
    output: str


def timed(words, folder="", codes=(0,)):
    """Run a command, and wait until the disk has what it has written into the folder. codes: with
    which it may end."""
    timer = [sys.executable, "-c", TIMER, folder, *words]
    process = subprocess.run(list(map(str, timer)), stdout=subprocess.PIPE, check=True)
    *run, code = json.loads(process.stdout)
    assert code in codes, words
    return Run(*run)


def megabytes(key):
    """Returns megabytes of memory: VmRSS, what this process has, or VmHWM, the most that it had."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{key}:\s*(\d+) kB", status)[1]) * 1024 / 1e6


def cost(work):
    """Returns the seconds and megabytes that a call costs this rank, and those of its card; all
    ranks begin together, and the call must return something."""
    import torch
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator

    is_card = get_accelerator().device_name() == "cuda"
    before = megabytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    allocated = 0
    if is_card:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
    dist.barrier()
    start = time.perf_counter()
    assert work()
    get_accelerator().synchronize()
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() - allocated if is_card else 0
    return seconds, megabytes("VmHWM") - before, peak / 1e6
