"""A life of a training job: a script that knows nothing of careful saving loads, trains, saves, and
dies in the middle of a save, as its plan says."""

import contextlib
import errno
import hashlib
import io
import itertools
import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.lr_schedules import WarmupLR
from torch import nn

import universal
from tests.support.commands import kill
from tests.support.ranks import launch
from tests.support.toy import adam, begin, make, snapshot, train

LAST = 50  # the last step of any life


class Place(NamedTuple):
    """Where a rank dies in the fatal save: after so many files, and this part of the next one."""

    files: int
    part: float


class Plan(NamedTuple):
    """tag: which one it loads. It trains so many steps, and saves every few under a name. saves:
    how many there were before. fatal: the number of the save in which it dies, each rank at its
    place; full: of a disk that is full."""

    ranks: int = 2
    stage: int = 1
    bf16: bool = False
    tag: str | None = None
    steps: int = 2
    every: int = 2
    name: str = "checkpoint-{}"
    saves: int = 0
    fatal: int | None = None
    full: bool = False
    places: dict[int, Place] = {}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 24)
        self.norm = nn.LayerNorm(24)
        self.b = nn.Linear(24, 3)

    def forward(self, x):
        return (self.b(self.norm(self.a(x)).tanh()) - 2 * x[:, :3].sin()).pow(2).mean()


def warm_up(optimizer):
    return WarmupLR(optimizer, warmup_max_lr=0.02, warmup_num_steps=LAST)


def digest(engine):
    """Of the masters and moments of all ranks."""
    code = hashlib.sha256()
    for name, value in snapshot(engine).items():
        if name.endswith(("fp32", "exp_avg", "exp_avg_sq")):
            code.update(value.numpy().tobytes())
    return code.hexdigest()


def an_hour_passes(folder):
    """Between two saves, and before anybody touches their folder: the loader goes by the times of
    files."""
    for path in Path(folder).rglob("*"):
        os.utime(path, (0, path.stat().st_mtime - 3600))


def break_disk(place, full):
    """From now on this rank comes to its place, and no further."""
    torch_save = torch.save
    numbers = itertools.count()

    def write(path, data):
        last = next(numbers) == place.files
        if last:
            data = data[: int(place.part * len(data))]
        if place.part or not last:
            Path(path).write_bytes(data)
        if last and full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        if last:
            kill()

    def save(thing, path, **options):
        memory = io.BytesIO()
        torch_save(thing, memory, **options)
        write(path, memory.getvalue())

    @contextlib.contextmanager
    def open_latest(path, mode):
        yield SimpleNamespace(write=lambda text: write(path, text.encode()))

    torch.save = save
    deepspeed.runtime.engine.open = open_latest


def live(plan, folder, ledger_path):
    """What every rank does. The ledger says what has happened, an object of JSON a line; what is
    printed is between them."""
    begin()
    rank = dist.get_rank()
    ledger = sys.stdout = open(ledger_path, "a", buffering=1)

    def note(**event):
        if rank == 0 or "refused" in event:
            ledger.write(json.dumps(event) + "\n")

    universal.install()
    bf16 = {"enabled": plan.bf16}
    engine = make(plan.stage, Net, adam, clip=1.0, scheduler=warm_up, bf16=bf16)
    try:
        path, state = engine.load_checkpoint(folder, tag=plan.tag)
    except universal.CheckpointError as error:
        note(refused=str(error))
        kill()
    start = engine.global_steps
    if path:
        tag = os.path.relpath(path, folder)
        note(loaded=tag, save=state["save"], step=start, digest=digest(engine))
    else:
        note(loaded=None, save=None, step=start, digest=None)
    saves = itertools.count(plan.saves)
    for step in range(start + 1, min(start + plan.steps, LAST) + 1):
        note(step=step, loss=train(engine, step))
        if step % plan.every == 0:
            tag = plan.name.format(step)
            save = next(saves)
            note(begun=save, tag=tag, step=step, digest=digest(engine))
            if rank == 0:
                an_hour_passes(folder)
            if save == plan.fatal and rank in plan.places:
                break_disk(plan.places[rank], plan.full)
            engine.save_checkpoint(folder, tag=tag, client_state={"save": save})
            dist.barrier()
            note(back=save, tag=tag)
    kill()


def play_life(above, folder, plan):
    """(objects of the ledger, lines that the loader has printed). Raises AssertionError where the
    life hangs, or ends by anything but the death that was planned."""
    ledger = Path(above, "ledger")
    ledger.write_text("")
    result = launch(above, plan.ranks, live, plan, str(folder), ledger, limit=300, grace=20)
    assert "time limit" not in result.codes.values(), "it hangs"
    full = plan.full and "No space left" in result.errors
    killed = -signal.SIGKILL in result.codes.values()
    assert full or killed, f"{result.codes} {result.errors[-500:]}"
    lines = ledger.read_text().splitlines()
    events = [json.loads(line) for line in lines if line.startswith("{")]
    return events, [line for line in lines if not line.startswith("{")]
