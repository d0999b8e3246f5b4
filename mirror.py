# SPDX-License-Identifier: MIT
"""Shards in memory, twice: a machine dies by kill -9, and training goes on from the very step it was at.

    mirror = Mirror(engine, "/dev/shm/job", every=1)
    folder = mirror.gather("checkpoints")          # the one that holds the newest step: the memory, or else the disk
    path, client_state = universal.load_checkpoint(engine, folder, missing_ok=True)
    for step in ...:
        ...
        mirror({"step": step})                     # when it returns, this step is not lost
    mirror.close()                                 # the job is done

A ZeRO shard exists once. Here every rank saves its files, as DeepSpeed writes them, into its machine's memory and sends
them to a rank of the next machine. What survives then holds the step, unless two neighbours die at once. For machines
that save on disks of their own there is gather("checkpoints") alone. Needs Linux, Python 3.10, torch and DeepSpeed.
"""

import contextlib
import fcntl
import shutil
import time
import uuid
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

__version__ = "1.0"  # of the universal checkpoint tutorial, where this file is explained and tested
PATIENCE = 30  # seconds in which what is left of a killed job must be gone


class Mirror:
    def __init__(self, engine, folder, every=1):
        """folder: in the memory of each machine, for this job alone. every: steps from one copy to the next. Raises
        ValueError, on all ranks, where another job uses the folder or the memory does not suffice."""
        self.engine, self.folder, self.every = engine, Path(folder), every
        self.rank, self.group = dist.get_rank(), dist.new_group(backend="gloo")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.own = self.folder / f".own{self.rank}"
        places = machines(self.folder, self.group)
        self.here = next(ranks for ranks in places if self.rank in ranks)
        self.next = {}  # {rank: the rank of the next machine that has its copy}
        for ranks, others in zip(places, places[1:] + places[:1], strict=True):
            self.next |= {rank: others[i % len(others)] for i, rank in enumerate(ranks)}
        self.attempt = share(uuid.uuid4().hex[:8], self.group)[0]  # files of two attempts at a step are never mixed
        for check in (self.lock, self.lack_of_room):
            if told := [problem for problem in share(check(), self.group) if problem]:
                raise ValueError(told[0])
        if len(places) == 1:
            say(f"{self.folder} is of one machine: it survives processes that die, but not the machine")

    def lock(self):
        """The kernel undoes it at any death. Returns the problem."""
        self.file = (self.folder / ".lock").open("a")
        end = time.monotonic() + PATIENCE
        while self.rank == self.here[0]:
            with contextlib.suppress(BlockingIOError):
                return fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.monotonic() > end:
                return f"{self.folder} is in use by another job"
            time.sleep(0.5)

    def lack_of_room(self):
        """Counts what save() would write. Returns the problem."""
        sizes = []

        def save(state_dict, path):
            # An optimizer has no states before its first step. Those of Adam are twice as large as its weights.
            times = 3 if "optim_states" in path and not self.engine.optimizer.optimizer.state else 1
            counting = SimpleNamespace(write=lambda data: sizes.append(times * len(data)), flush=lambda: None)
            torch.save(state_dict, counting)

        with mock.patch.object(self.engine.checkpoint_engine, "save", save):
            self.save({})
        sizes = share(sum(sizes), self.group)
        step = sum(sizes[rank] for rank, there in self.next.items() if rank in self.here or there in self.here)
        needed = step + max(step, sum(sizes))  # a step and the one before, all of which a machine has after a loss
        free = shutil.disk_usage(self.folder).free
        free += sum(path.stat().st_size for path in self.folder.rglob("*.pt"))  # of the ranks before these
        if free < needed:
            return f"{self.folder} has room for {free / 1e6:,.2f} MB, and the mirror needs {needed / 1e6:,.2f} MB"

    def save(self, client_state):
        self.engine.save_checkpoint(str(self.own), tag="own", client_state=client_state, save_latest=False)
        return sorted(self.own.glob("own/*.pt"))

    def __call__(self, client_state):
        """All ranks, after a step. If it is one of every `every`, it is held twice when this returns."""
        step = self.engine.global_steps
        if step % self.every:
            return
        mine = self.save(client_state)
        listed = share([(path.name, path.stat().st_size) for path in mine], self.group)
        # Its name says how many files it is to have: one that has fewer was being written.
        slot = self.folder / f"step{step:09}.{sum(map(len, listed))}.{self.attempt}"
        slot.mkdir(exist_ok=True)
        for path in mine:
            path.rename(slot / path.name)
        moves = [(*file, rank, self.next[rank]) for rank, files in enumerate(listed) for file in files]
        exchange(slot, [move for move in moves if move[2] not in self.here or move[3] not in self.here], self.group)
        dist.barrier(group=self.group)  # both copies of every shard are there: the step before may go
        self.keep(slot.name)

    def keep(self, name, of="step*"):
        for path in self.folder.glob(of) if self.rank == self.here[0] else ():
            if path.name not in (name, ".lock"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def gather(self, folder):
        """Bring together what the machines hold. Returns where the newest whole step is, this folder or `folder`."""
        gather(folder)
        saved = share(step_of(Path(folder)), self.group)[0]
        held = share([str(path.relative_to(self.folder)) for path in self.folder.glob("step*/*.pt")], self.group)
        slots = Counter(Path(file).parent.name for file in set().union(*held))
        whole = [slot for slot, files in slots.items() if slot.split(".")[1] == str(files)]
        newest = max(whole, default="step0")
        for slot in slots.keys() - whole:
            say(f"{slots[slot]} files are left in memory of {slot}, which had {slot.split('.')[1]}: passed over")
        if slots and step_in(newest) < max(saved, 1):
            say(f"no newer step is whole in memory: back to the disk, {folder}, at step {saved}")
            newest = None
        self.keep(newest, of="*")  # what others left half written, too
        dist.barrier(group=self.group)
        gather(self.folder)
        return self.folder if newest in whole else Path(folder)

    def close(self):
        dist.barrier(group=self.group)
        if self.rank == self.here[0]:
            shutil.rmtree(self.folder)


def step_in(slot):
    return int(slot.removeprefix("step").split(".")[0])


def step_of(folder):
    """The step of the checkpoint that `latest` names."""
    with contextlib.suppress(OSError, StopIteration):
        model = next(folder.glob(f"{(folder / 'latest').read_text().strip()}/*mp_rank_*_model_states.pt"))
        return torch.load(model, mmap=True, map_location="cpu", weights_only=False)["global_steps"]
    return 0


def gather(folder):
    """Give each machine the files of the checkpoints in its `folder` that only others have. Raises ValueError where no
    machine has any model states: a loader would find nothing there, and begin anew."""
    folder, group = Path(folder), dist.new_group(backend="gloo")
    leaders = [ranks[0] for ranks in machines(folder, group)]
    paths = [path for path in folder.glob("[!.]*/*.pt") if path.parent.suffix not in (".unfinished", ".replaced")]
    held = share({str(p.relative_to(folder)): p.stat().st_size for p in [*paths, *folder.glob("latest")]}, group)
    files, moves = {file: size for leader in leaders for file, size in held[leader].items()}, []
    if files and not any("mp_rank_00_model_states.pt" in file for file in files):
        raise ValueError(
            f"{folder}: mp_rank_00_model_states.pt is on no machine, and there is {', '.join(sorted(files))}"
        )
    for name, size in sorted(files.items()):
        holders = [leader for leader in leaders if name in held[leader]]
        moves += [(name, size, holders[len(moves) % len(holders)], to) for to in leaders if to not in holders]
    exchange(folder, moves, group)
    dist.barrier(group=group)  # everything is everywhere


def machines(folder, group):
    """[[rank, ...], ...]: the ranks that see the same folder."""
    place, found = Path("/proc/sys/kernel/random/boot_id").read_text(), {}  # a host's name may be another's, too
    if folder.is_dir():
        place += f"{folder.stat().st_dev} {folder.stat().st_ino}"
    for rank, other in enumerate(share(place, group)):
        found.setdefault(other, []).append(rank)
    return list(found.values())


def exchange(folder, moves, group):
    """moves: [(name, size, from rank, to rank), ...], alike on all ranks."""
    rank, sends, part = dist.get_rank(), [], folder / f".part{dist.get_rank()}"
    for name, size, source, to in moves:
        if source == rank:
            data = torch.from_file(str(folder / name), size=size, dtype=torch.uint8)
            sends.append((dist.isend(data, to, group=group), data))
    for name, size, source, to in moves:
        if to == rank:
            data = torch.empty(size, dtype=torch.uint8)
            dist.recv(data, source, group=group)
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            data.numpy().tofile(part)
            part.rename(folder / name)  # whole, or not there
    for sending, _ in sends:
        sending.wait()


def share(value, group):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def say(message):
    if dist.get_rank() == 0:
        print(f"mirror.py: {message}", flush=True)
