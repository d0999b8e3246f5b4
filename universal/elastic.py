# SPDX-License-Identifier: MIT
"""Lets machines leave and join a training script that runs under torchrun's elastic agent:

    elastic.enlist(batch, micro_batch)          # first of all: surplus ranks stand by
    ...deepspeed.init_distributed(), deepspeed.initialize()...
    path, client_state = universal.load_checkpoint(engine, "checkpoints", missing_ok=True)
    stop = elastic.listen(engine.device)
    for step in ...:
        ...
        if (told := stop()) or ...:             # the same answer on all ranks
            elastic.save(engine, "checkpoints", client_state)
        if told:
            break
    elastic.leave(finished=step == steps)

torchrun restarts all processes whenever a machine leaves or joins; the same command line then
continues from the disk. Needs Python 3.10 and torch 2.6 or newer."""

import contextlib
import datetime
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from universal.publish import publish

GO_ON = (
    143  # the exit code for "stopped, not finished"; 0 would tell the agents that the job is done
)


def enlist(batch, micro_batch, model_parallel=1):
    """Select the largest number of ranks that can share the batch's micro-batches evenly, and set
    WORLD_SIZE to it; this call never returns on the other ranks. model_parallel: ranks that share
    one micro-batch. Call it before there is a process group. Raises ValueError if no number of
    ranks will do."""
    rank, present = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    usable = [n for n in range(1, present // model_parallel + 1) if batch % (micro_batch * n) == 0]
    if not usable:
        raise ValueError(
            f"none of 1 to {present} ranks trains micro-batches of {micro_batch}, {model_parallel} ranks to each, "
            f"that add up to a batch of {batch}"
        )
    ranks = usable[-1] * model_parallel
    os.environ |= {"WORLD_SIZE": str(ranks), "STANDING_BY": str(present - ranks)}
    if rank >= ranks:
        stand_by(rank, f"{present} ranks do not divide a batch of {batch}, {ranks} do")


def wait_at_most(seconds):
    """Set the time after which all process groups made from now on, DeepSpeed's too, give up on a
    silent rank. Returns it as a timedelta, for deepspeed.init_distributed(timeout=...)."""
    timeout = datetime.timedelta(seconds=seconds)
    distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = timeout
    return timeout


def store():
    """The store where the ranks meet. It belongs to rank 0, or to its agent."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(*address, wait_for_workers=False)


def stand_by(rank, why):
    """Wait until the job is done, or until the agent restarts everything, with SIGTERM."""
    print(f"rank {rank} stands by until the next change: {why}", flush=True)
    try:
        common = store()
        common.wait(["elastic/done"], datetime.timedelta(days=365))
        common.set(f"elastic/left/{rank}", "")
        sys.exit(0)
    except dist.DistError:  # rank 0 is gone; the agent will notice, or learn it from this exit code
        time.sleep(60)
        sys.exit(GO_ON)


def listen(device):
    """Returns stop(), which says on all ranks alike whether any of them has received SIGTERM: the
    signal reaches them at different moments, but they must stop after the same step."""
    told = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(True))

    def stop():
        votes = torch.tensor(float(bool(told)), device=device)
        dist.all_reduce(votes)
        return bool(votes)

    return stop


def leave(finished):
    """Exit, all ranks together, with 0 if the job is done and 143 if it is to continue."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # a rank that leaves early can take the others down
    if finished and rank == 0 and (waiting := int(os.environ.get("STANDING_BY", 0))):
        common = store()
        common.set("elastic/done", "")
        common.wait(
            [f"elastic/left/{ranks + i}" for i in range(waiting)], datetime.timedelta(seconds=60)
        )
    dist.destroy_process_group()
    sys.exit(0 if finished else GO_ON)


# -----------------------------------------------------------------------------
# checkpoints that are whole, or do not exist


def save(engine, folder, client_state, keep=None):
    """Call engine.save_checkpoint() on all ranks, under the name global_step<N>: whenever the job
    dies, a folder of that name is whole, and on the disk. Machines may share `folder` or have a
    disk each. keep: how many of the newest checkpoints to keep; the others are removed, with what
    was converted from them, except those that `latest` and `latest_universal` name."""
    folder, tag, rank = Path(folder), f"global_step{engine.global_steps}", dist.get_rank()
    leads = os.environ.get("LOCAL_RANK", "0") == "0"  # the first rank of its machine
    attempt = number_of_save(folder)
    for left in (
        (*folder.glob(f"{tag}.*"), *folder.glob(f".{tag}.*")) if leads else ()
    ):  # by a job killed as it saved
        shutil.rmtree(left, ignore_errors=True)
    dist.barrier()
    # A cut-off rank that still writes for an earlier attempt must not write into this one.
    unfinished, own = (
        folder / f"{tag}.{name}.unfinished" for name in (attempt, f"{attempt}-{rank}")
    )
    engine.save_checkpoint(
        folder, tag=unfinished.name, client_state=client_state, save_latest=False
    )
    if leads:
        os.sync()  # if the machine goes down, a folder with its final name must not have empty files
    dist.barrier()
    if leads:
        with contextlib.suppress(
            FileNotFoundError
        ):  # in a shared folder, another machine may have been first
            unfinished.rename(own)
        if own.exists():
            publish(own, folder / tag, "latest")
            if keep:
                remove_old(folder, keep)
    dist.barrier()
    if rank == 0:
        print(f"saved {folder / tag}", flush=True)


SAVES = {}  # {folder: the last attempt of these ranks to save into it}


def number_of_save(folder):
    """The same new number on all ranks. If others have saved since these ranks last did, these end,
    to be restarted: agents that take each other for dead, as torch's do after a few silent seconds,
    train the same job twice at once."""
    said, last = [time.time_ns()], folder / ".last_save"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        if folder in SAVES and last.read_text() != SAVES[folder]:
            print(
                f"others train this job, too, and have saved into {folder}: the agents meet again",
                flush=True,
            )
            said = [None]
        else:
            SAVES[folder] = str(said[0])
            last.write_text(SAVES[folder])
    dist.broadcast_object_list(said)
    if said[0] is None:
        leave(finished=False)
    return said[0]


def remove_old(folder, keep):
    pointers = (folder / "latest", folder / "latest_universal")
    kept = {path.read_text().strip() for path in pointers if path.is_file()}
    written = {
        path.parent.name: path.stat().st_mtime
        for path in folder.glob("global_step*[0-9]/*_states.pt")
    }
    kept |= {*sorted(written, key=written.get)[-keep:]}
    for path in sorted(
        folder.glob("global_step*"), reverse=True
    ):  # a leftover first, then what could get its name
        tag = path.name.split(".")[0]
        if kept.isdisjoint({tag, tag.removesuffix("_universal")}):
            # A half-removed checkpoint must not have the name of a whole one.
            shutil.rmtree(
                path if path.suffix else path.rename(f"{path}.unfinished"), ignore_errors=True
            )
