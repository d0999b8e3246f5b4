# SPDX-License-Identifier: MIT
"""Lets machines leave and join a training script that runs under torchrun's elastic agent:

    ...deepspeed.init_distributed(), deepspeed.initialize()...
    path, client_state = universal.load_checkpoint(engine, "checkpoints", missing_ok=True)
    stopping = elastic.watch_sigterm(engine.device)
    for step in ...:
        ...
        stop = stopping()                       # the same answer on all ranks
        if stop or ...:
            elastic.save(engine, "checkpoints", client_state)
        if stop:
            break
    elastic.exit_together(finished=step == steps)

torchrun restarts all processes whenever a machine leaves or joins; the same command line then
continues from the disk.
"""

import atexit
import contextlib
import datetime
import functools
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from universal import background
from universal.write.console import print_line
from universal.write.publish import publish

if TYPE_CHECKING:
    import deepspeed

# The exit code of a rank that is to be started again; 0 would tell the agents that the job is done.
STOPPED = 143


def wait_at_most(seconds: float) -> datetime.timedelta:
    """Set the time after which all process groups made from now on, DeepSpeed's too, give up on a
    silent rank. Returns it, for deepspeed.init_distributed(timeout=...)."""
    timeout = datetime.timedelta(seconds=seconds)
    distributed_c10d.default_pg_timeout = timeout
    distributed_c10d.default_pg_nccl_timeout = timeout
    return timeout


def watch_sigterm(device: torch.device) -> Callable[[], bool]:
    """Returns stopping(), which says on all ranks alike whether any of them has received SIGTERM:
    the signal reaches them at different moments, but they must stop after the same step."""
    received = []
    signal.signal(signal.SIGTERM, lambda *_: received.append(True))

    def stopping() -> bool:
        votes = torch.tensor(float(len(received)), device=device)
        dist.all_reduce(votes)
        return bool(votes)

    return stopping


def exit_together(finished: bool) -> NoReturn:
    """Exit, all ranks together, with 0 if the job is done and 143 if it is to continue."""
    background.wait()
    dist.barrier()  # a rank that leaves early can take the others down
    dist.destroy_process_group()
    code = 0 if finished else STOPPED
    atexit.register(end_process, code)
    sys.exit(code)


def end_process(code: int) -> NoReturn:
    """End this process after the functions of atexit, but not the interpreter in it. A thread of
    gloo that still has to release a tensor would wait for the interpreter, which ends such threads,
    and C++ then aborts: "terminate called without an active exception", exit code -6."""
    atexit.unregister(end_process)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # it may be closed
            stream.flush()
    os._exit(code)


# --------------------------------------------------------------------------------------------------
# checkpoints that are whole, or do not exist


def save(
    engine: "deepspeed.DeepSpeedEngine",
    folder: str | os.PathLike,
    client_state: dict[str, Any],
    keep: int | None = None,
) -> None:
    """Call engine.save_checkpoint() on all ranks, under the name global_step<N>: whenever the job
    dies, a folder of that name is whole, and on the disk. Machines may share `folder` or have a
    disk each.

    keep: how many of the newest checkpoints to keep; the others are removed, with what was
    converted from them, except those that `latest` and `latest_universal` name.
    """
    background.wait()
    folder, rank = Path(folder), dist.get_rank()
    checkpoint = folder / f"global_step{engine.global_steps}"
    leads = os.environ.get("LOCAL_RANK", "0") == "0"  # the first rank of its machine
    attempt = [time.time_ns()]
    dist.broadcast_object_list(attempt)
    if leads:
        remove_unfinished(checkpoint)  # of a job that was killed as it saved
    dist.barrier()
    if background.saves(engine):
        clean = functools.partial(remove_old, folder, keep) if keep else None
        engine.save_checkpoint(folder, checkpoint.name, client_state, published=clean)
        return
    # A cut-off rank that still writes for an earlier attempt must not write into this one.
    unfinished = Path(f"{checkpoint}.{attempt[0]}.unfinished")
    engine.save_checkpoint(
        folder, tag=unfinished.name, client_state=client_state, save_latest=False
    )
    if leads:
        os.sync()  # if the machine goes down, a folder of that name must not have empty files
    dist.barrier()
    if leads:
        renamed = Path(f"{checkpoint}.{attempt[0]}-{rank}.unfinished")
        with contextlib.suppress(FileNotFoundError):  # another machine that shares it was first
            unfinished.rename(renamed)
        if renamed.exists():
            publish(renamed, checkpoint, folder / "latest")
            if keep:
                remove_old(folder, keep)
    dist.barrier()
    if rank == 0:
        print_line(f"saved {checkpoint}")


def remove_unfinished(checkpoint: Path) -> None:
    """Remove what other attempts to save this checkpoint have left."""
    for pattern in (f"{checkpoint.name}.*", f".{checkpoint.name}.*"):
        for path in checkpoint.parent.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def remove_old(folder: Path, keep: int) -> None:
    """Remove all but the newest checkpoints, and those that a pointer names."""
    pointers = (folder / "latest", folder / "latest_universal")
    kept = {path.read_text().strip() for path in pointers if path.is_file()}
    written = {
        path.parent.name: path.stat().st_mtime
        for path in folder.glob("global_step*[0-9]/*_states.pt")
    }
    kept.update(sorted(written, key=written.get)[-keep:])
    # A left-over before the checkpoint that is renamed to its name.
    for path in sorted(folder.glob("global_step*"), reverse=True):
        tag = path.name.split(".")[0]
        if tag in kept or tag.removesuffix("_universal") in kept:
            continue
        if not path.suffix:  # a half-removed checkpoint must not have the name of a whole one
            path = path.rename(f"{path}.unfinished")
        shutil.rmtree(path, ignore_errors=True)
