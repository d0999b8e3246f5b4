# SPDX-License-Identifier: MIT
"""Saves that stop the training only for a copy of memory:

    universal.install(background=True)

engine.save_checkpoint() then copies this rank's tensors and returns. A thread writes the files into
a hidden folder; when those of all ranks are on the disk, it gets the checkpoint's name, and then
`latest` names it. So a job that dies in between goes on from the checkpoint before. The next save
and a load wait for the thread, and so does the end of the process.
"""

import contextlib
import functools
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import psutil
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from universal.errors import one_line
from universal.load.collective import SideGroup, all_or_none, say
from universal.load.snapshot import (
    Image,
    copies_done,
    files_of_save,
    nbytes_of_new,
    new_memory,
)
from universal.write.console import print_line
from universal.write.publish import publish

SAVING = "saving"  # the last part of a hidden folder's name
CGROUP = Path("/sys/fs/cgroup")
UNDER_WAY = []


def install() -> None:
    """Let all engines save in the background."""
    method = deepspeed.DeepSpeedEngine.save_checkpoint
    if not hasattr(method, "is_in_background"):

        @functools.wraps(method)
        def save_checkpoint(engine, *args, **options):
            return begin_save(method, engine, *args, **options)

        save_checkpoint.is_in_background = True
        deepspeed.DeepSpeedEngine.save_checkpoint = save_checkpoint


def saves(engine: deepspeed.DeepSpeedEngine) -> bool:
    """Whether an engine saves in the background. Not if its config chooses how to write."""
    is_installed = hasattr(deepspeed.DeepSpeedEngine.save_checkpoint, "is_in_background")
    return is_installed and type(engine.checkpoint_engine) is TorchCheckpointEngine


def begin(work: Callable[[], None]) -> threading.Thread:
    """Do it in a thread. The process does not end before it is done."""

    def run():
        time.sleep(0.001)  # the training goes on at once, not when this lets go of the interpreter
        work()

    UNDER_WAY[:] = [thread for thread in UNDER_WAY if thread.is_alive()]
    UNDER_WAY.append(threading.Thread(target=run, name="universal"))
    UNDER_WAY[-1].start()
    return UNDER_WAY[-1]


def wait() -> None:
    """Wait for what is done in the background."""
    while UNDER_WAY:
        UNDER_WAY.pop().join()


def begin_save(
    method: Callable,
    engine: deepspeed.DeepSpeedEngine,
    save_dir: str | os.PathLike,
    tag: str | None = None,
    client_state: dict[str, Any] | None = None,
    save_latest: bool = True,
    *args: Any,
    published: Callable[[], None] | None = None,
    **options: Any,
) -> bool:
    """engine.save_checkpoint(), method, without waiting for the disk.

    published: is called in a thread, once in each folder, when the checkpoint has its name.
    Raises: on all ranks, what keeps DeepSpeed on one of them from a save.
    """
    if not saves(engine):
        return method(engine, save_dir, tag, client_state or {}, save_latest, *args, **options)
    if not hasattr(engine, "universal_saver"):
        engine.universal_saver = Saver()
    saver = engine.universal_saver
    wait()  # new_folder() would remove what another engine saves beside
    output = Path(save_dir, f"global_step{engine.global_steps}" if tag is None else str(tag))
    saving = saver.new_folder(output)
    hidden = os.path.relpath(saving, save_dir)
    save = functools.partial(method, engine, save_dir, hidden, client_state or {}, False)
    not_copied = saver.copy(engine, functools.partial(save, *args, **options), output.name)
    latest = Path(save_dir, "latest") if save_latest else None
    if not save_latest:
        say_if_beside_latest(save_dir, os.path.relpath(output, save_dir))
    finish = functools.partial(saver.finish, saving, output, latest, published)
    if not_copied:
        write = engine.checkpoint_engine.save
        finish(lambda: [write(state, str(path)) for path, state in not_copied])
    else:
        begin(functools.partial(finish, saver.write))
    return True


class Need(NamedTuple):
    """What a rank tells the others before it copies."""

    tag: str
    machine: str
    memory: int  # bytes that it needs beside what it has
    free: int  # bytes


def say_if_beside_latest(save_dir: str | os.PathLike, tag: str) -> None:
    """Say what a load takes, where a checkpoint is saved that `latest` does not name."""
    if Path(save_dir, "latest").exists():
        say_beside_latest(tag)


@functools.cache
def say_beside_latest(tag):
    """Once, of a tag that is saved again and again."""
    say(
        f"{tag} is saved beside `latest`: a load without a tag takes whichever is of the later "
        "step; one with the tag takes what it names"
    )


class Saver:
    """Saves of an engine. memory: {a file's name: where its copy goes}"""

    def __init__(self):
        self.group = SideGroup()
        self.attempt, *_ = self.group.all_gather(time.time_ns())
        self.memory = {}
        self.images = []
        self.failure = None
        # The first rank of its machine; machines may share the folder or have a disk each.
        self.leads = os.environ.get("LOCAL_RANK", "0") == "0"

    def new_folder(self, output: Path) -> Path:
        """A hidden folder beside the checkpoint's, of a name that no other save has. What jobs that
        died have left beside it is removed."""
        self.attempt += 1
        saving = output.with_name(f".{output.name}.{self.attempt}.{SAVING}")
        if self.leads:
            for path in output.parent.glob(f".*.{SAVING}"):
                if path != saving:
                    shutil.rmtree(path, ignore_errors=True)
        return saving

    def copy(
        self, engine: deepspeed.DeepSpeedEngine, save: Callable[[], Any], tag: str
    ) -> list[tuple[Path, Any]]:
        """Copy the tensors of all files that save() would write. Ranks meet once.

        Returns: [], or if a machine has no memory for it, those files and their state dicts.
        """
        needs = []

        def meet(error):
            machine = Path("/proc/sys/kernel/random/boot_id").read_text()
            new = [image.room for image in self.images if not self.fits(image)]
            memory = sum(map(nbytes_of_new, new))
            need = Need(tag, machine, memory, free_memory())
            errors, needs[:] = zip(*self.group.all_gather((error, need)), strict=True)
            return errors

        with all_or_none(meet):
            files = files_of_save(engine, save)
            self.images = [Image(path, content) for path, content in files]
        if len({need.tag for need in needs}) > 1:
            engine._checkpoint_tag_validation(tag)  # raises, or warns, as the config says
        if not self.has_room(needs):
            self.images = []
            return files
        self.failure = None
        try:
            for image in self.images:
                if not self.fits(image):
                    self.memory[image.path.name] = new_memory(image.room)
                image.copy(self.memory[image.path.name])
            copies_done()
        except Exception as error:  # write() tells all ranks: here they meet no more
            self.failure = error
        return []

    def fits(self, image: Image) -> bool:
        memory = self.memory.get(image.path.name)
        return memory is not None and memory.numel() >= image.room

    def has_room(self, needs: list[Need]) -> bool:
        """Whether each machine has the memory that its ranks need beside what they have."""
        for machine in dict.fromkeys(need.machine for need in needs):
            total = sum(need.memory for need in needs if need.machine == machine) / 1e6
            free = min(need.free for need in needs if need.machine == machine) / 1e6
            if total > free:
                say(
                    f"a copy to save in the background needs {total:.1f} MB of memory, and "
                    f"{free:.1f} MB are free: saved without one"
                )
                return False
            if total and not self.memory and machine == needs[0].machine:
                say(f"saves in the background keep a copy of {total:.1f} MB in memory")
        return True

    def write(self) -> None:
        """Write the copies to the disk."""
        if self.failure:
            raise self.failure
        for image in self.images:
            image.write()

    def finish(
        self,
        saving: Path,
        output: Path,
        latest: Path | None,
        published: Callable[[], None] | None,
        write: Callable[[], Any],
    ) -> None:
        """Write all ranks' files, and then give their folder its name. A failure is a line."""
        try:
            with all_or_none(self.group.all_gather):
                write()
            with all_or_none(self.group.all_gather):
                if self.publish(saving, output, latest) and published:
                    published()
            if self.group.rank == 0:
                print_line(f"universal: {output} is saved")
        except Exception as error:
            if self.leads:
                shutil.rmtree(saving, ignore_errors=True)
            if self.group.rank == 0:
                print_line(
                    f"universal: WARNING: {output} is not saved, and the training goes on: "
                    f"{one_line(error)}"
                )

    def publish(self, saving: Path, output: Path, latest: Path | None) -> bool:
        """Give the folder its name, unless a rank of another machine does. Returns whether it
        did."""
        if not self.leads:
            return False
        claimed = saving.with_name(f".{output.name}.{self.group.rank}.{SAVING}")
        with contextlib.suppress(FileNotFoundError):  # another machine that shares it was first
            saving.rename(claimed)
        if not claimed.exists():
            return False
        if output.exists():  # a script's own files stay beside those of the save
            for path in output.iterdir():
                if path.suffix != ".pt" and not (claimed / path.name).exists():
                    path.rename(claimed / path.name)
        publish(claimed, output, latest)
        return True


def free_memory() -> int:
    """The bytes that this machine, or its container, still has."""
    free = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):  # no container, or no limit
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        free = min(free, limit - used + int(stat["inactive_file"]))
    return free
