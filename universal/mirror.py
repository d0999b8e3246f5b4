# SPDX-License-Identifier: MIT
"""Keep every shard in the memory of two machines: if one dies, training resumes at the very step it
had reached.

    mirror = Mirror(engine, "/dev/shm/job", every=1)
    folder = mirror.gather("checkpoints")       # of the newest step, in memory or on the disk
    path, client_state = universal.load_checkpoint(engine, folder, missing_ok=True)
    for step in ...:
        ...
        committed = mirror.save({"step": step}) # the steps up to this one cannot be lost
    mirror.close()                              # the job is done

Every rank copies its tensors into its machine's memory. A thread completes the files there, and
sends them to a rank on the next machine, while the next step is trained; the next save() waits for
it. So a restart repeats the step whose copy was under way, and the one that was trained meanwhile,
if it was; with wait=True, none. A shard is lost only if two such neighbors die at once. Machines
that only have disks of their own need just gather().
"""

import contextlib
import functools
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

from universal import patches
from universal.background import begin, signals_later
from universal.checkpoint.describe import describe
from universal.checkpoint.tags import choose_tag, place_of
from universal.errors import CheckpointError, one_line
from universal.files.torch_file import verify
from universal.lines import print_line
from universal.load import reader
from universal.load.collective import ProcessGroup
from universal.load.engine import Engine
from universal.save.snapshot import FileState, Image, copies_done, file_state, files_of_save
from universal.write.publish import lock

if TYPE_CHECKING:
    import deepspeed

# Room for two steps, all of which one machine may hold after a loss: bytes of each parameter for
# fp32, Adam's two moments, the weights, and spare.
BYTES_PER_PARAMETER = 33.6
ADAMS = (torch.optim.Adam, torch.optim.AdamW, FusedAdam, DeepSpeedCPUAdam)
# The names of what a mirror writes into its folder; with fewer files than its name says, a slot was
# being written.
SLOT_NAME = re.compile(r"step\d{9}-\d{19}\.\d+")
OWN_NAME = re.compile(rf"{SLOT_NAME.pattern}|\.rank\d+")
SLACK = 1 << 16  # bytes by which the next step's file may be longer


class Transfer(NamedTuple):
    """A file that a rank sends to another one."""

    name: str
    state: FileState
    source: int
    target: int


class Mirror:
    """The shards of a job in memory, twice. committed: the last step that two machines hold; 0 if
    there is none."""

    def __init__(
        self,
        engine: "deepspeed.DeepSpeedEngine",
        folder: str | os.PathLike,
        every: int = 1,
        wait: bool = False,
    ):
        """Claim the folder on all ranks. folder: in each machine's memory, for this job alone.
        every: steps from one copy to the next. wait: whether save() waits until two machines hold
        the step. Raises ValueError, on all ranks, if another job uses the folder or there is not
        enough room."""
        self.engine = engine
        self.every = every
        self.waits = wait
        self.committed = 0
        self.thread = self.slot = None
        self.mapped = {}  # {inode: memory} of files that are written again and again
        self.count = 0  # of all ranks' files
        self.derived = derived_weights(engine)
        self.folder = Path(folder)
        self.group = ProcessGroup()
        self.meet = self.group.all_gather
        self.rank = self.group.rank
        self.unfinished = self.folder / f".rank{self.rank}"
        self.spare = self.unfinished / "spare"
        machines = machine_ids(self.folder, self.group)
        machine = machines[self.rank]
        elsewhere = [rank for rank, other in enumerate(machines) if other != machine]
        # A rank on the next machine gets this rank's files.
        self.partner = elsewhere[self.rank % len(elsewhere)] if elsewhere else self.rank
        self.machine_ranks = [rank for rank, other in enumerate(machines) if other == machine]
        self.is_local_leader = self.machine_ranks[0] == self.rank
        begun = self.group.all_gather((self.problem(), time.time_ns()))
        problems, (self.attempt, *_) = zip(*begun, strict=True)
        for problem in problems:
            if problem:
                raise ValueError(problem)
        if self.partner == self.rank == 0:
            print_line(
                f"mirror.py: {folder} is of one machine: "
                "it survives a rank's death, not the machine's"
            )

    def problem(self) -> str | None:
        """Lock the folder for as long as this process lives. Returns why it cannot be used, or
        None."""
        # The kernel releases it however the process dies.
        self.lock = self.is_local_leader and lock(self.folder, alone=True)
        if self.lock is None:
            return f"{self.folder} is in use by another job"
        others = [name for name in os.listdir(self.folder) if not OWN_NAME.fullmatch(name)]
        if others:
            return (
                f"{self.folder} holds {min(others)}, so it is not for this job alone: name another"
            )
        parameters = self.engine.module.parameters()
        numel = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in parameters)
        needed = BYTES_PER_PARAMETER * numel / 1e6
        # What the ranks before a restart have left gives way.
        used = sum(path.stat().st_size for path in self.folder.rglob("*.pt"))
        room = (used + shutil.disk_usage(self.folder).free) / 1e6
        if room < needed:
            return f"{self.folder} has room for {room:.1f} MB, and needs {needed:.1f} MB"
        return None

    def save(self, client_state: dict[str, Any]) -> int:
        """Copy a step if `every` divides it. Call it on all ranks after each step.

        Two machines hold it when the next save() returns; with `wait`, when this one does. If
        something goes wrong on one rank, a line says so, and the step before stays.

        Returns: `committed`.
        """
        step = self.engine.global_steps
        if step % self.every:
            return self.committed
        self.finish()
        with signals_later(), torch.inference_mode(False):
            self.attempt += 1  # files of two attempts at a step are never mixed
            images, failure = [], None
            arguments = (str(self.unfinished), "saved", client_state, False)
            write = functools.partial(self.engine.save_checkpoint, *arguments)
            try:
                files = files_of_save(self.engine, write)
                self.leave_out(files)
                images = [Image(path, content) for path, content in files]
            except Exception as error:  # send() tells the others
                failure = error
            if not self.count:  # later saves wait for no other rank
                self.count = len(set().union(*self.meet({image.path.name for image in images})))
            slot = self.folder / f"step{step:09}-{self.attempt}.{self.count}"
            try:
                self.copy(images, slot)
            except Exception as error:
                failure = error
            self.thread = begin(functools.partial(self.send, step, images, slot, failure))
        return self.finish() if self.waits else self.committed

    def copy(self, images: list[Image], slot: Path) -> None:
        """Copy all elements of the files into a slot, the folder of a step."""
        self.spare.mkdir(parents=True, exist_ok=True)
        slot.mkdir(exist_ok=True)
        for image in images:
            memory = self.memory_of(image.path, image.room)
            reserve(image.path, image.room)
            image.copy(memory)
        copies_done()
        if patches.is_patched("save_checkpoint", "proof"):
            from universal.proof import begin_after_save

            begin_after_save(self.engine, slot)

    def leave_out(self, files: list[tuple[Path, Any]]) -> None:
        """Replace weights that a load makes from the masters with empty tensors."""
        for _, content in files:
            module = content.get("module") or {}
            module.update((name, self.derived[name]) for name in self.derived.keys() & module)

    def finish(self) -> int:
        """Wait until two machines hold the last step that was copied. Returns `committed`."""
        if self.thread:
            self.thread.done.wait()
        return self.committed

    def memory_of(self, path: Path, nbytes: int) -> torch.Tensor:
        """The memory of a file, uint8. The file of the step before the last is reused, as new
        memory costs more than the copy into it."""
        spare = self.spare / re.sub(r"\.pt\..*", ".pt", path.name)
        if spare.exists() and not path.exists():
            spare.rename(path)
        path.touch()
        inode = path.stat().st_ino
        if inode not in self.mapped or self.mapped[inode].numel() < nbytes:
            self.mapped[inode] = map_file(path, nbytes + SLACK)
        if path.stat().st_size != nbytes:
            os.truncate(path, nbytes)
        return self.mapped[inode][:nbytes]

    def send(self, step: int, images: list[Image], slot: Path, failure: Exception | None) -> None:
        """Complete this rank's files, and exchange them with the other machines; in a thread. Ranks
        meet after each part: what one cannot do, all give up."""
        count, self.count = self.count, 0  # it may be wrong, if a rank fails here
        try:
            with self.group.all_or_none():
                if failure:
                    raise failure
                for image in images:
                    os.truncate(image.path, len(image.seal()))
                paths = [image.path for image in images]
                copies = [Transfer(p.name, file_state(p), self.rank, self.partner) for p in paths]
            self.count = count
            slots, copies = zip(*self.meet((slot.name, copies)), strict=True)
            if len({*slots}) > 1:
                raise ValueError(f"ranks copy {', '.join(slots)}: on one, save() was interrupted")
            transfers = sum(copies, [])
            with self.group.all_or_none():
                for path in paths:
                    path.rename(slot / path.name)
            exchange(slot, transfers, self.group, self.memory_of)
            names = [t.name for t in transfers if self.rank in (t.source, t.target)]
            self.commit(step, slot, names)
        except Exception as error:
            if self.rank == 0:
                print_line(f"mirror.py: WARNING: step {step} is not copied: {one_line(error)}")

    def commit(self, step: int, slot: Path, names: list[str]) -> None:
        """Note that two machines hold the slot. The slot before becomes memory for the next."""
        with self.group.all_or_none():
            for name in names if self.slot else []:
                with contextlib.suppress(FileNotFoundError):
                    (self.slot / name).rename(self.spare / name)
        self.remove(SLOT_NAME, slot.name)
        paths = [folder / name for folder in (slot, self.spare) for name in names]
        used = {path.stat().st_ino for path in paths if path.exists()}
        self.mapped = {inode: memory for inode, memory in self.mapped.items() if inode in used}
        self.slot = slot
        self.committed = step

    def remove(self, names: re.Pattern, kept: str = "") -> None:
        """Remove what has such a name in this machine's folder, but for `kept`."""
        for path in self.folder.iterdir() if self.is_local_leader else []:
            if names.fullmatch(path.name) and path.name != kept:
                shutil.rmtree(path, ignore_errors=True)

    def gather(self, folder: str | os.PathLike) -> Path:
        """Give each machine what the others have. Returns the folder with the newest complete step:
        this one or `folder`, on the disk."""
        self.finish()
        self.remove_damaged()
        disk = gather(folder)  # all ranks have removed theirs when it returns
        saved = self.group.on_rank_0(lambda: self.step_on(disk))
        files = {path.parts[-2:] for path in self.folder.glob("step*/*.pt")}
        (of_all,) = self.group.unions(files)
        counts = Counter(slot for slot, _ in of_all)
        complete = [slot for slot, count in counts.items() if slot.endswith(f".{count}")]
        newest = max([f"step{saved:09}", *complete])
        self.remove(OWN_NAME, newest)
        gather(self.folder)
        problem = self.group.on_rank_0(lambda: self.problem_of(self.folder / newest))
        if problem is None:
            return self.folder
        if counts and self.rank == 0:
            if newest in complete:
                print_line(f"mirror.py: {problem}")
            print_line(
                "mirror.py: no newer step is complete in memory: "
                f"back to the disk, {disk}, at step {saved}"
            )
        return disk

    def remove_damaged(self) -> None:
        """Remove damaged files from this machine's memory: another machine has a copy. Each rank
        reads its share."""
        share = slice(self.machine_ranks.index(self.rank), None, len(self.machine_ranks))
        paths = sorted(self.folder.glob("step*/*.pt"))[share]
        self.group.meet()  # all have seen the same files
        for path in paths:
            try:
                verify(path)
            except (CheckpointError, OSError) as error:
                print_line(f"mirror.py: {error}; removed")
                path.unlink(missing_ok=True)

    def step_on(self, disk: Path) -> int:
        """Returns the step from which a resume from the disk would begin; 0 if there is none."""
        tags = choose_tag(disk).to_try
        return next(
            (tag.step for tag in tags if self.problem_of(place_of(disk, tag.name)) is None), 0
        )

    def problem_of(self, checkpoint: Path) -> str | None:
        """Returns why a checkpoint would not load, though its files match their checksums, or
        None."""
        try:
            reader.describe_for_load(checkpoint)
        except (CheckpointError, OSError) as error:
            return str(error)
        return None

    def close(self) -> None:
        """Remove all that the mirror has in memory: the job is done."""
        self.finish()
        self.group.meet()
        with contextlib.suppress(OSError):  # it holds something else, or another rank was faster
            self.remove(OWN_NAME)
            self.folder.rmdir()


def derived_weights(engine: "deepspeed.DeepSpeedEngine") -> dict[str, torch.Tensor]:
    """Returns {name: empty tensor} of the weights that need no copy, as a load makes them from the
    masters: of Adam at ZeRO-1 and 2."""
    known = Engine(engine)
    # Of other optimizers a state may depend on the rank, and DeepSpeed's own loader wants weights.
    if type(known.torch_optimizer) not in ADAMS or not known.has_known_optimizer():
        return {}
    if known.stage not in (1, 2) or engine.has_moe_layers or not known.is_data_parallel():
        return {}
    optimized = known.optimized_names()
    parameters = known.module.named_parameters(remove_duplicate=False)
    return {name: p.new_empty(0) for name, p in parameters if known.names.get(p) in optimized}


def gather(folder: str | os.PathLike) -> Path:
    """Give each machine the files of the checkpoints in `folder` that it lacks, or of which others
    have newer ones. Returns the folder.

    If a checkpoint was saved again under its name, files of the earlier save are removed once the
    later one is complete. Raises ValueError if no machine has model states: a loader would find no
    checkpoint, and start over.
    """
    folder = Path(folder)
    group = ProcessGroup()
    machines = machine_ids(folder, group)
    leaders = sorted({machines.index(machine) for machine in machines})
    paths = sorted(folder.glob("[!.]*/*.pt")) if group.rank in leaders else ()
    files = group.all_gather({str(path.relative_to(folder)): file_state(path) for path in paths})
    newest = {}  # {name: (state, a rank that has it)}
    for leader in leaders:
        for name, state in files[leader].items():
            newest[name] = max(newest.get(name, (state, leader)), (state, leader))
    if newest and not any("mp_rank_00_model_states" in name for name in newest):
        raise ValueError(
            f"{folder}: mp_rank_00_model_states.pt is on no machine, "
            f"but {', '.join(sorted(newest))}"
        )
    transfers = [
        Transfer(name, state, source, target)
        for target in leaders
        for name, (state, source) in sorted(newest.items())
        if files[target].get(name) != state
    ]
    exchange(folder, transfers, group)
    with group.all_or_none():
        if group.rank in leaders:
            remove_left_over({folder / Path(transfer.name).parent for transfer in transfers})
    group.end()  # it has a connection to every rank
    return folder


def remove_left_over(checkpoints: set[Path]) -> None:
    """Remove, from complete checkpoints, files that an earlier save under the same name left."""
    for checkpoint in checkpoints:
        with contextlib.suppress(CheckpointError):  # it is not complete
            for name in describe(checkpoint).left_over:
                (checkpoint / name).unlink(missing_ok=True)


def machine_ids(folder: Path, group: ProcessGroup) -> list[reader.Machine]:
    """Create the folder. Returns the machine that has it, for each rank."""
    folder.mkdir(parents=True, exist_ok=True)
    return reader.machines_of(folder, group)


def map_file(path: Path, nbytes: int) -> torch.Tensor:
    """Map a file's first bytes into memory, as uint8."""
    return torch.from_file(str(path), True, nbytes, dtype=torch.uint8, device="cpu")


def reserve(path: Path, nbytes: int) -> None:
    """Reserve room for a file: to write into mapped memory without room is a bus error."""
    with open(path, "r+b") as file:
        if os.fstat(file.fileno()).st_blocks * 512 < nbytes:
            os.posix_fallocate(file.fileno(), 0, nbytes)


def exchange(
    folder: Path,
    transfers: list[Transfer],
    group: ProcessGroup,
    memory_of: Callable[[Path, int], torch.Tensor] = map_file,
) -> None:
    """Send files between ranks. All have arrived when it returns. transfers: the same on all ranks.

    memory_of: maps a file, which it may create, into memory.
    """
    rank = group.rank
    begun = []
    with group.all_or_none():  # whoever sends waits for one who has memory for it
        for transfer in transfers:
            name, (_, size), source, target = transfer
            if source == target or rank not in (source, target):
                continue
            path = folder / (name if rank == source else f"{name}.{size}.part")
            path.parent.mkdir(exist_ok=True)
            begun.append((memory_of(path, size), path, transfer))
            if rank == target:
                reserve(path, size)
    works = [
        group.handle.send([data], transfer.target, 0)
        if rank == transfer.source
        else group.handle.recv([data], transfer.source, 0)
        for data, _, transfer in begun
    ]
    with group.all_or_none():
        for work, (_, path, transfer) in zip(works, begun, strict=True):
            work.wait()
            if rank == transfer.target:
                # Otherwise an old copy would pass for a new one.
                os.utime(path, ns=(transfer.state.written, transfer.state.written))
                path.replace(folder / transfer.name)  # it is complete, or does not exist
