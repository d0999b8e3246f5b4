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
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from universal import background
from universal.checkpoint.tags import POINTERS, named_by_latest
from universal.write.publish import hidden

if TYPE_CHECKING:
    import deepspeed

# The exit code of a rank that is to be started again; 0 would tell the agents that the job is done.
STOPPED = 143


def wait_at_most(seconds: float) -> datetime.timedelta:
    """Set the timeout of all process groups made from now on, DeepSpeed's, too. Returns it, for
    deepspeed.init_distributed(timeout=...)."""
    timeout = datetime.timedelta(seconds=seconds)
    distributed_c10d.default_pg_timeout = timeout
    distributed_c10d.default_pg_nccl_timeout = timeout
    return timeout


def watch_sigterm(device: torch.device) -> Callable[[], bool]:
    """Returns stopping(), which tells all ranks whether any of them has received SIGTERM: it
    arrives at different moments, but all must stop after the same step."""
    received = []
    signal.signal(signal.SIGTERM, lambda *_: received.append(True))

    def stopping() -> bool:
        votes = torch.tensor(float(len(received)), device=device)
        dist.all_reduce(votes)
        return bool(votes)

    return stopping


def exit_together(finished: bool) -> NoReturn:
    """Exit on all ranks together: with 0 if the job is done, 143 if it is to be started again."""
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
# checkpoints that are complete, or do not exist


def save(
    engine: "deepspeed.DeepSpeedEngine",
    folder: str | os.PathLike,
    client_state: dict[str, Any],
    keep: int | None = None,
) -> None:
    """Save a checkpoint as global_step<N>. Call it on all ranks. Whenever the job dies, a folder of
    that name is complete. Machines may share `folder` or have a disk each.

    keep: how many of the newest checkpoints to keep; the others are removed, with what was
    converted from them, except those that `latest` and `latest_universal` name.
    """
    folder = Path(folder)
    clean = functools.partial(remove_old, folder, keep) if keep else None
    at_once = not background.saves(engine)
    background.begin_save(engine, folder, None, client_state, published=clean, at_once=at_once)


def remove_old(folder: Path, keep: int) -> None:
    """Remove all but the `keep` newest checkpoints and those that `latest` files name."""
    kept = {named_by_latest(folder, [pointer]) for pointer in POINTERS}
    written = {
        path.parent.name: path.stat().st_mtime
        for path in folder.glob("global_step*/*_states.pt")
        if re.fullmatch(r"global_step\d+", path.parent.name)
    }
    kept.update(sorted(written, key=written.get)[-keep:])
    for tag in written.keys() - kept:
        for path in (folder / f"{tag}_universal", folder / tag):
            if path.name not in kept and path.is_dir() and not path.is_symlink():
                # A half-removed checkpoint must not have the name of a complete one.
                with contextlib.suppress(OSError):  # a mounted bucket may rename nothing
                    path = path.rename(hidden(path, "removed"))
                shutil.rmtree(path, ignore_errors=True)
