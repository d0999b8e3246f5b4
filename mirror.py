# SPDX-License-Identifier: MIT
"""Shards in memory, twice: a machine dies by kill -9, and training goes on from the very step it was at.

    mirror = Mirror(engine, "/dev/shm/job", every=1)
    folder = mirror.gather("checkpoints")          # that which holds the newest step: in memory, or on the disk
    path, client_state = universal.load_checkpoint(engine, folder, missing_ok=True)
    for step in ...:
        ...
        mirror({"step": step})                     # when it returns, this step is not lost
    mirror.close()                                 # the job is done

A ZeRO shard exists once. Here every rank saves its files, as DeepSpeed writes them, into its machine's memory and sends
them to a rank of the next machine. What survives holds the step, unless two neighbours die at once. For machines that
save on disks of their own there is gather("checkpoints") alone. Needs Linux, Python 3.10, torch and DeepSpeed.
"""

import contextlib
import fcntl
import os
import shutil
import time
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist

__version__ = "1.0"  # of the universal checkpoint tutorial, where this file is explained and tested


class Mirror:
    def __init__(self, engine, folder, every=1):
        """folder: in each machine's memory, of this job alone. every: steps from one copy to the next. Raises
        ValueError, on all ranks, where another job uses the folder or there is not the room."""
        self.engine, self.folder, self.every = engine, Path(folder), every
        self.group, rank = dist.new_group(backend="gloo"), dist.get_rank()
        self.own = self.folder / f".own{rank}"
        places = machines(self.folder, self.group)
        self.here = next(ranks for ranks in places if rank in ranks)
        self.leads = rank == self.here[0]
        self.copies = {}  # {rank: a rank of the next machine, which has its copy}
        for ranks, others in zip(places, places[1:] + places[:1], strict=True):
            self.copies |= {rank: others[i % len(others)] for i, rank in enumerate(ranks) if others is not ranks}
        self.attempt = share(time.time_ns(), self.group)[0]  # files of two attempts at a step are never mixed
        if problems := [*filter(None, share(self.problem(), self.group))]:
            raise ValueError(problems[0])
        if not self.copies:
            say(f"{self.folder} is of one machine: it survives processes that die, but not the machine")

    def problem(self):
        self.lock = os.open(self.folder, os.O_RDONLY)
        with contextlib.suppress(BlockingIOError):
            if self.leads:
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # undone by the kernel at any death
            size = sum(getattr(p, "ds_numel", p.numel()) for p in self.engine.module.parameters()) / 1e6
            # The shards have 12 bytes of a parameter, fp32 and Adam's two moments; the model states up to 4.
            step = 24 * size * len(self.here) / dist.get_world_size() + 4 * size
            needed = step + max(step, 16 * size)  # with the step before, of which a machine has all after a loss
            room = sum(path.stat().st_size for path in self.folder.rglob("*.pt"))  # of the ranks before these
            room = (room + shutil.disk_usage(self.folder).free) / 1e6
            return f"{self.folder} has room for {room:.1f} MB, and needs {needed:.1f} MB" if room < needed else None
        return f"{self.folder} is in use by another job"

    def __call__(self, client_state):
        """All ranks, after a step. If it is one of every `every`, it is held twice when this returns."""
        step = self.engine.global_steps
        if step % self.every:
            return
        self.engine.save_checkpoint(str(self.own), tag="own", client_state=client_state, save_latest=False)
        mine = sorted(self.own.glob("own/*.pt"))
        listed = share([(path.name, path.stat().st_size) for path in mine], self.group)
        # Its name says how many files it is to have: one that has fewer was being written.
        slot = self.folder / f"step{step:09}-{self.attempt}.{sum(map(len, listed))}"
        slot.mkdir(exist_ok=True)
        for path in mine:
            path.rename(slot / path.name)
        moves = [
            (f"{slot.name}/{name}", size, rank, self.copies[rank])
            for rank in self.copies
            for name, size in listed[rank]
        ]
        exchange(self.folder, moves, self.group)
        dist.barrier(group=self.group)  # both copies of every shard are there: the step before may go
        self.keep(slot.name, "step*")

    def keep(self, name, pattern):
        for path in self.folder.glob(pattern) if self.leads else ():
            if path.name != name:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def gather(self, folder):
        """Bring together what the machines hold. Returns where the newest whole step is, this folder or `folder`."""
        gather(folder)
        saved = max(share(step_of(Path(folder)), self.group))
        held = share([(path.parent.name, path.name) for path in self.folder.glob("step*/*.pt")], self.group)
        slots = Counter(slot for slot, _ in set().union(*held))
        newest = max((slot for slot in slots if slot.endswith(f".{slots[slot]}")), default="")
        if slots and int(newest[4:13] or -1) < saved:
            say(f"no newer step is whole in the memory of these machines: back to the disk, {folder}, at step {saved}")
            newest = ""
        self.keep(newest, "*")  # nor what was being written
        gather(self.folder)
        return self.folder if newest else Path(folder)

    def close(self):
        if self.leads:
            shutil.rmtree(self.folder)


def step_of(folder):
    """The step of the checkpoint that `latest` names."""
    with contextlib.suppress(OSError, StopIteration):
        model = next(folder.glob(f"{(folder / 'latest').read_text().strip()}/*mp_rank_*_model_states.pt"))
        return torch.load(model, mmap=True, map_location="cpu", weights_only=False)["global_steps"]
    return 0


def gather(folder):
    """Give each machine the files of the checkpoints in its `folder` that only others have. Raises ValueError where no
    machine has model states: a loader would find nothing there, and begin anew."""
    folder, group = Path(folder), dist.new_group(backend="gloo")
    leaders = [ranks[0] for ranks in machines(folder, group)]
    paths = [path for path in folder.glob("[!.]*/*.pt") if path.parent.suffix not in (".unfinished", ".replaced")]
    held = share({f"{path.parent.name}/{path.name}": path.stat().st_size for path in paths}, group)
    files, moves = {name: size for leader in leaders for name, size in held[leader].items()}, []
    if files and not any("mp_rank_00_model_states" in name for name in files):
        raise ValueError(f"{folder}: mp_rank_00_model_states.pt is on no machine, but {', '.join(files)}")
    for name, size in sorted(files.items()):
        holders = [leader for leader in leaders if name in held[leader]]
        moves += [(name, size, holders[len(moves) % len(holders)], to) for to in leaders if to not in holders]
    exchange(folder, moves, group)
    dist.barrier(group=group)  # everything is everywhere


def machines(folder, group):
    """[[rank, ...], ...]: the ranks that see the same folder. It is made where it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    boot, found = Path("/proc/sys/kernel/random/boot_id").read_text(), {}  # a host's name may be another's, too
    for rank, place in enumerate(share((boot, folder.stat().st_dev, folder.stat().st_ino), group)):
        found.setdefault(place, []).append(rank)
    return list(found.values())


def exchange(folder, moves, group):
    """moves: [(file, size, from rank, to rank), ...], alike on all ranks."""
    rank = dist.get_rank()
    part, kind = folder / f".part{rank}", {"dtype": torch.uint8}
    sends = [
        dist.isend(torch.from_file(str(folder / name), size=size, **kind), there, group=group)
        for name, size, source, there in moves
        if source == rank
    ]
    for name, size, source, there in moves:
        if there == rank:
            data = torch.empty(size, **kind)
            dist.recv(data, source, group=group)
            data.numpy().tofile(part)
            (folder / name).parent.mkdir(exist_ok=True)
            part.rename(folder / name)  # whole, or not there
    for sending in sends:
        sending.wait()


def share(value, group):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def say(message):
    if dist.get_rank() == 0:
        print(f"mirror.py: {message}", flush=True)
