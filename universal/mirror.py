# SPDX-License-Identifier: MIT
"""Keep every shard in the memory of two machines: if one dies, training resumes at the very step it
had reached.

    mirror = Mirror(engine, "/dev/shm/job", every=1)
    folder = mirror.gather("checkpoints")          # the folder of the newest step, in memory or on the disk
    path, client_state = universal.load_checkpoint(engine, folder, missing_ok=True)
    for step in ...:
        ...
        mirror({"step": step})                     # once this returns, the step cannot be lost
    mirror.close()                                 # the job is done

Every rank saves its files into its machine's memory, and sends a copy to a rank on the next
machine. A shard is lost only if two such neighbors die at once. Machines that only have disks of
their own need just gather(). Needs Linux and Python 3.10."""

import contextlib
import fcntl
import operator
import os
import shutil
import time
from pathlib import Path

import torch
import torch.distributed as dist

from universal.checkpoint import describe
from universal.tags import first_models, named_by_latest
from universal.torch_file import CheckpointError, about, load

state_of = operator.attrgetter("st_mtime_ns", "st_size")


class Mirror:
    def __init__(self, engine, folder, every=1):
        """folder: in each machine's memory, for this job alone. every: steps from one copy to the
        next. Raises ValueError, on all ranks, if another job uses the folder or there is not enough
        room."""
        self.engine, self.every = engine, every
        self.folder = Path(folder)
        self.group, self.rank = dist.new_group(backend="gloo"), dist.get_rank()
        places = places_of(self.folder, self.group)
        self.leads = places.index(places[self.rank]) == self.rank
        others = [rank for rank, place in enumerate(places) if place != places[self.rank]] or [
            self.rank
        ]
        self.partner = others[
            self.rank % len(others)
        ]  # a rank on the next machine, which gets this rank's files
        self.attempt = share(time.time_ns(), self.group)[
            0
        ]  # files of two attempts at a step are never mixed
        for problem in filter(None, share(self.problem(), self.group)):
            raise ValueError(problem)
        if self.partner == self.rank == 0:
            print(
                f"mirror.py: {folder} is of one machine: it survives a rank's death, not the machine's",
                flush=True,
            )

    def problem(self):
        self.lock = os.open(self.folder, os.O_RDONLY)
        try:
            if self.leads:
                fcntl.flock(
                    self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB
                )  # the kernel releases it however the process dies
        except BlockingIOError:
            return f"{self.folder} is in use by another job"
        # Room for two steps, all of which one machine may hold after a loss: fp32, Adam's two
        # moments, the weights, and spare.
        needed = 33.6e-6 * sum(
            getattr(p, "ds_numel", p.numel()) for p in self.engine.module.parameters()
        )
        held = sum(
            path.stat().st_size for path in self.folder.rglob("*.pt")
        )  # by the ranks before a restart
        room = (held + shutil.disk_usage(self.folder).free) / 1e6
        return (
            f"{self.folder} has room for {room:.1f} MB, and needs {needed:.1f} MB"
            if room < needed
            else None
        )

    def __call__(self, client_state):
        """Call it on all ranks after a step. If `every` divides the step, two machines hold it when
        this returns."""
        step = self.engine.global_steps
        if step % self.every:
            return
        own = self.folder / f".own{self.rank}"
        self.engine.save_checkpoint(
            str(own), tag="own", client_state=client_state, save_latest=False
        )
        files = [*own.glob("own/*.pt")]
        sends = [(path.name, state_of(path.stat()), self.rank, self.partner) for path in files]
        moves = sum(share(sends, self.group), [])
        count = len({name for name, *_ in moves})
        slot = (
            self.folder / f"step{step:09}-{self.attempt}.{count}"
        )  # with fewer files it was being written
        slot.mkdir(exist_ok=True)
        for path in files:
            path.rename(slot / path.name)
        exchange(slot, moves, self.group)
        self.remove_others(slot.name)

    def remove_others(self, kept):
        for path in self.folder.iterdir() if self.leads else ():
            if path.name != kept:
                shutil.rmtree(path)

    def gather(self, folder):
        """Bring together what the machines hold. Returns the folder with the newest whole step:
        this one or `folder`."""
        disk = gather(folder)
        saved = max(share(step_of(disk), self.group))
        held = {path.parts[-2:] for path in self.folder.glob("step*/*.pt")}
        slots = [slot for slot, _ in set().union(*share(held, self.group))]
        newest = max(
            [f"step{saved:09}", *(slot for slot in slots if slot.endswith(f".{slots.count(slot)}"))]
        )
        self.remove_others(newest)
        gather(self.folder)
        if newest in slots:
            return self.folder
        if slots and self.rank == 0:
            print(
                f"mirror.py: no newer step is whole in memory: back to the disk, {disk}, at step {saved}",
                flush=True,
            )
        return disk

    def close(self):
        if self.leads:
            shutil.rmtree(self.folder)


def step_of(folder):
    """The step of the checkpoint that `latest` names; 0, if there is none that can be read."""
    try:
        path = first_models(folder / named_by_latest(folder))
        with about(path):
            return load(path)["global_steps"]
    except CheckpointError:
        return 0


def gather(folder):
    """Give each machine the files of the checkpoints in `folder` that it lacks, or of which others
    have newer ones. Returns the folder. If a checkpoint was saved again under the same name, files
    of the first save are removed as soon as the last save is whole. Raises ValueError if no machine
    has model states: a loader would find nothing there, and start over."""
    folder, group = Path(folder), dist.new_group(backend="gloo")
    places = places_of(folder, group)
    leaders = {places.index(place) for place in places}
    paths = [path for path in folder.glob("[!.]*/*.pt") if path.parent.suffix != ".unfinished"]
    held = share({str(path.relative_to(folder)): state_of(path.stat()) for path in paths}, group)
    found = dict(
        sorted((name, (state, at)) for at in leaders for name, state in held[at].items())
    )  # the newest last
    if found and not any("mp_rank_00_model_states" in name for name in found):
        raise ValueError(
            f"{folder}: mp_rank_00_model_states.pt is on no machine, but {', '.join(found)}"
        )
    moves = [
        (name, *found[name], to)
        for to in leaders
        for name in found
        if held[to].get(name) != found[name][0]
    ]
    exchange(folder, moves, group)
    for tag in (
        {folder / Path(name).parent for name, *_ in moves} if dist.get_rank() in leaders else ()
    ):
        with contextlib.suppress(Exception):  # it is not whole
            for name in describe(tag).left:
                (tag / name).unlink(missing_ok=True)
    dist.barrier(group=group)
    return folder


def places_of(folder, group):
    """Returns, for every rank, an identity of the folder that it sees; ranks of one machine see the
    same. Creates the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()  # two hosts may have the same name
    return share((boot, folder.stat().st_dev, folder.stat().st_ino), group)


def exchange(folder, moves, group):
    """Send files. moves: [(file, (time, size), from rank, to rank), ...], the same on all ranks.
    All have arrived when it returns."""
    rank, waiting = dist.get_rank(), []
    for name, (written, size), source, to in moves:
        if rank in (source, to) and source != to:
            path = folder / name
            file = path if rank == source else folder / f"{name}.{size}.part"
            file.parent.mkdir(exist_ok=True)
            data = torch.from_file(str(file), True, size, dtype=torch.uint8, device="cpu")
            work = (
                dist.isend(data, to, group=group)
                if rank == source
                else dist.irecv(data, source, group=group)
            )
            waiting.append((work, file, path, written))
    for work, file, path, written in waiting:
        work.wait()
        os.utime(file, ns=(written, written))  # otherwise an old copy would pass for a new one
        file.rename(path)  # it is whole, or does not exist; what was sent stays
    dist.barrier(group=group)


def share(value, group):
    dist.all_gather_object(values := [None] * dist.get_world_size(), value, group=group)
    return values
