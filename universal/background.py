# SPDX-License-Identifier: MIT
"""Saves that stop the training only for a copy of memory:

    universal.install(background=True)

engine.save_checkpoint() then copies this rank's tensors and returns; a thread does the rest.
elastic.save() goes the same way, and waits for the rest if the engine does not save so.

A save goes through five states, and all ranks meet before each but the last:

    begun      the tag's folder is there, new and empty or as it was; a hidden one beside it takes
               the files
    copied     this rank's tensors are in memory, and the training goes on
    written    the files of all ranks are in the hidden folder, and on the disk
    published  the hidden folder has the tag's name; the older one is put aside, then removed, but
               for what a script has put there
    named      by `latest`

What comes in between:

    a kill     of any rank: the others' save ends, too, and they remove it if nobody publishes it. A
               load puts back what was aside, takes what `latest` names, and says if a later one was
               published. The next save of the tag removes what is left; any save does after a day.
    an error   on one rank ends the save on all. As it begins it is raised, as by DeepSpeed; later
               it is a line, and the training goes on. The hidden folder is removed.
    a signal   is handled before a save has begun, or once all is copied: no rank leaves the others
               alone. A save that a handler begins is the next one; who waits in an older one, where
               the handler has led out of it on another rank, gives it up with an error.
    a process  that saves under the same tag: the last one published counts, and the other one's
               line says that it is gone. Nobody removes what another one still writes (as far as
               the file system has locks), or a file that no save writes.
    an exit    waits for the thread. A save that begins in atexit is done at once.
"""

import contextlib
import functools
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import psutil
import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from universal import patches
from universal.errors import RankFailed, RankSilent, one_line
from universal.lines import print_line
from universal.load.collective import ProcessGroup, say
from universal.save.snapshot import Image, copies_done, file_state, files_of_save, new_memory
from universal.write.publish import (
    BACKGROUND,
    can_rename,
    hidden,
    lock,
    publish,
    sweep,
    sync,
    unlock,
    wait,
)

CGROUP = Path("/sys/fs/cgroup")


def install() -> None:
    """Have every engine.save_checkpoint() save in the background."""
    patches.patch("background", save_checkpoint=save_in_background)


def before_load(engine: deepspeed.DeepSpeedEngine) -> None:
    """Wait for saves that still write."""
    wait()


def save_in_background(method, engine, *args, **options):
    if not saves(engine):
        return method(engine, *args, **options)
    begin_save(engine, *args, **options)
    return True


def wait_in_trainers() -> None:
    """Have Hugging Face's Trainer wait before a callback of the script sees a checkpoint, or it is
    pushed to the Hub: they would copy a folder that lacks what is still written."""
    callbacks = sys.modules.get("transformers.trainer_callback")
    trainer = sys.modules.get("transformers.trainer")
    if not callbacks or hasattr(callbacks.CallbackHandler, "waits_for_universal"):
        return
    nothing = callbacks.TrainerCallback.on_save

    def looks(handler):
        return any(type(callback).on_save is not nothing for callback in handler.callbacks)

    callbacks.CallbackHandler.waits_for_universal = True
    targets = [(callbacks.CallbackHandler, "on_save", looks)]
    if trainer:
        targets.append((trainer.Trainer, "_push_from_checkpoint", lambda _: True))
    for owner, name, wanted in targets:
        setattr(owner, name, after_wait(getattr(owner, name), wanted))


def after_wait(method: Callable, wanted: Callable[[Any], bool]) -> Callable:
    """Returns the method, which first waits for saves, if wanted(its object)."""

    @functools.wraps(method)
    def call(owner, *args, **options):
        if wanted(owner):
            wait()
        return method(owner, *args, **options)

    return call


def saves(engine: deepspeed.DeepSpeedEngine) -> bool:
    """Whether an engine saves in the background: not if its config chooses another writer."""
    is_installed = patches.is_patched("save_checkpoint", "background")
    return is_installed and type(engine.checkpoint_engine) is TorchCheckpointEngine


def begin(work: Callable[[], None]) -> threading.Thread:
    """Run work() in a thread, for which wait() and the end of the process wait."""

    def run():
        time.sleep(0.001)  # the training goes on at once, not when this lets go of the interpreter
        try:
            work()
        finally:
            thread.done.set()

    thread = threading.Thread(target=run, name=BACKGROUND)
    thread.done = threading.Event()
    with contextlib.suppress(RuntimeError):  # the system has no more threads
        if threading.main_thread().is_alive():  # or the interpreter ends, and would end this one
            thread.start()
            return thread
    run()
    return thread


@contextlib.contextmanager
def signals_later() -> Iterator[None]:
    """Defer signals in this block: the script's handlers are called after it."""
    received = []
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    try:
        for number in handlers:
            signal.signal(number, lambda number, _: received.append(number))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in received:
            signal.raise_signal(number)


class CannotRename(OSError):
    """The file system renames no folders: no rank can save there but under the final name."""


class SavePaths(NamedTuple):
    """The folders of a save. name: the folder as the script names it. hidden: while it is written.
    claimed: the hidden folder's name once one machine, of those that share it, publishes it."""

    name: Path
    output: Path
    hidden: Path
    claimed: Path
    latest: Path | None
    tag: str


class RankReport(NamedTuple):
    """A rank's message to the others before it copies. attempt: the number of its save."""

    attempt: int
    save: str
    machine: str
    can_rename: bool
    memory: int  # bytes that it needs beside what it has
    free: int  # bytes


def begin_save(
    engine: deepspeed.DeepSpeedEngine,
    save_dir: str | os.PathLike,
    tag: str | None = None,
    client_state: dict[str, Any] | None = None,
    save_latest: bool = True,
    *args: Any,
    published: Callable[[], None] | None = None,
    at_once: bool = False,
    **options: Any,
) -> None:
    """Save as engine.save_checkpoint() does, without waiting for the disk.

    published: called once in each folder, when the checkpoint has its name. at_once: wait, and
    raise on all ranks what goes wrong on one. Raises on all ranks the error that DeepSpeed's save
    raises on one before all is copied.
    """
    method = patches.inside("save_checkpoint", "background")
    if not hasattr(engine, "universal_saver"):
        engine.universal_saver = Saver()
    saver = engine.universal_saver
    attempt = saver.attempt = saver.attempt + 1
    wait()
    if attempt < saver.attempt:
        raise RankFailed("not saved: the handler of a signal has saved since")
    tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
    top = os.path.realpath(save_dir)  # a path with .. leads elsewhere behind a symbolic link
    paths = paths_of_save(save_dir, top, tag, attempt, save_latest)
    arguments = engine, top, os.path.relpath(paths.hidden, top), client_state or {}, False, *args
    collect = functools.partial(method, *arguments, **options)
    wait_in_trainers()
    with signals_later(), torch.inference_mode(False):
        try:
            with saver.ended_by_error(paths):
                write, is_copied = saver.begin(engine, collect, paths, attempt, at_once)
        except CannotRename:
            say(f"{top} renames no folders: {tag} is saved in place, and the training waits for it")
            method(engine, top, tag, client_state or {}, save_latest, *args, **options)
            return published() if published and saver.is_local_leader else None
        finish = functools.partial(saver.finish, paths, write, published)
        finish = finish if at_once else functools.partial(saver.in_a_line, paths, finish)
        begin(finish) if is_copied else finish()


def paths_of_save(save_dir, top, tag, attempt, save_latest):
    """Returns the SavePaths of a tag. top: save_dir, as it is on the disk."""
    output = Path(os.path.realpath(Path(top, tag)))
    folder = output.with_name(f".{output.name}.{attempt}.saving")
    latest = Path(top, "latest") if save_latest else None
    return SavePaths(Path(save_dir, tag), output, folder, hidden(output, "saving"), latest, tag)


class Saver:
    """Saves an engine's checkpoints. attempt: the number of the last save, the same on all ranks.
    memory: {a file's name: memory for its copy}"""

    def __init__(self):
        self.group = ProcessGroup()
        self.attempt, *_ = self.group.all_gather(time.time_ns())
        self.memory = {}
        self.lock = None
        # The first rank of its machine; machines may share the folder or have a disk each.
        self.is_local_leader = os.environ.get("LOCAL_RANK", "0") == "0"

    def begin(
        self,
        engine: deepspeed.DeepSpeedEngine,
        collect: Callable[[], Any],
        paths: SavePaths,
        attempt: int,
        at_once: bool,
    ) -> tuple[Callable[[], list[str]], bool]:
        """Copy the tensors of all files that collect() would write, unless memory is short. All
        ranks meet, and tell what they need.

        Returns a function that writes the files and returns their names, and whether they are
        copied.
        """
        reports = []
        while len({report.attempt for report in reports}) != 1:
            with self.group.all_or_none():
                if not reports:
                    if self.is_local_leader:
                        paths.output.mkdir(parents=True, exist_ok=True)
                    paths.hidden.mkdir(parents=True, exist_ok=True)
                    self.lock = lock(paths.hidden)
                    renames = not self.is_local_leader or can_rename(paths.hidden)
                    files = files_of_save(engine, collect)
                    images = [Image(path, content) for path, content in files]
                machine = Path("/proc/sys/kernel/random/boot_id").read_text()
                memory = sum(image.room for image in images if not self.fits(image))
                save = f"{paths.tag} at step {engine.global_steps}"
                report = RankReport(attempt, save, machine, renames, memory, free_memory())
                reports = self.group.all_gather(report)
            if attempt < max(report.attempt for report in reports):
                raise RankFailed(f"{paths.name} is not saved: another rank is at a later save")
        saved = sorted({report.save for report in reports})
        if saved[1:]:
            engine._checkpoint_tag_validation(paths.tag)  # raises, if the config says so
            raise RankFailed(f"the ranks do not save the same: {', '.join(saved)}")
        if not all(report.can_rename for report in reports):
            raise CannotRename(paths.hidden)
        if at_once or not self.has_room(reports):
            return functools.partial(write_files, files, paths.hidden), False
        return functools.partial(write_images, images, self.copy(images)), True

    def copy(self, images: list[Image]) -> Exception | None:
        """Copy the images. Returns the error, if any, which write_images() raises later."""
        try:
            for image in images:
                if not self.fits(image):
                    self.memory[image.path.name] = new_memory(image.room)
                image.copy(self.memory[image.path.name])
            copies_done()
        except Exception as error:
            return error
        return None

    def fits(self, image: Image) -> bool:
        memory = self.memory.get(image.path.name)
        return memory is not None and memory.numel() >= image.room

    def has_room(self, reports: list[RankReport]) -> bool:
        """Whether each machine has the memory that its ranks need beside what they have."""
        for machine in dict.fromkeys(report.machine for report in reports):
            total = sum(report.memory for report in reports if report.machine == machine) / 1e6
            free = min(report.free for report in reports if report.machine == machine) / 1e6
            if total > free:
                say(
                    f"a copy to save in the background needs {total:.1f} MB of memory, and "
                    f"{free:.1f} MB are free: saved without one"
                )
                return False
            if total and not self.memory and machine == reports[0].machine:
                say(f"saves in the background keep a copy of {total:.1f} MB in memory")
        return True

    def finish(
        self, paths: SavePaths, write: Callable[[], list[str]], published: Callable[[], None] | None
    ) -> None:
        """Write this rank's files. When all ranks have, give the folder its name. Raises on all
        ranks the error of one."""
        with self.ended_by_error(paths):
            with self.group.all_or_none():
                names = write()
                states = stamps_of(paths.hidden, names)
            with self.group.all_or_none():
                is_published = self.is_local_leader and publish_first(paths)
            are_published = self.group.all_gather(is_published)
            with self.group.all_or_none():
                is_gone = not any(are_published) or os.fstat(self.lock).st_nlink == 0
                # What another machine has renamed, this one may not see yet.
                if is_gone or is_published and stamps_of(paths.output, names) != states:
                    raise FileNotFoundError("another process has replaced or removed it")
            with self.group.all_or_none():
                if is_published and published:
                    published()
                self.end(paths)  # the next save's folder might not be locked yet
        if self.group.rank == 0:  # not say(): the script's own group may have ended
            print_line(f"universal: {paths.name} is saved")

    @contextlib.contextmanager
    def ended_by_error(self, paths: SavePaths) -> Iterator[None]:
        """Remove what is left of a save if this block fails."""
        try:
            yield
        except Exception as error:
            self.end(paths, error)
            raise

    def end(self, paths: SavePaths, error: Exception | None = None) -> None:
        """Remove what is left of a save, published or not. error: what has ended it. A silent rank
        may be publishing it under a name that is not this rank's to remove."""
        if self.lock:
            self.lock = unlock(self.lock)
        with contextlib.suppress(OSError):  # whoever publishes it has claimed it
            shutil.rmtree(paths.hidden.rename(paths.claimed))
        with contextlib.suppress(OSError):  # rmdir() wants it empty
            if not isinstance(error, RankSilent):
                sweep(paths.output)  # on each rank: what others have locked, the last one removes
            paths.output.rmdir()

    def in_a_line(self, paths: SavePaths, finish: Callable[[], None]) -> None:
        """Call finish(); print an error in one line."""
        try:
            finish()
        except Exception as error:
            if self.group.rank == 0:
                print_line(
                    f"universal: WARNING: {paths.name} is not saved, and the training goes on: "
                    f"{one_line(error)}"
                )


def write_images(images: list[Image], failure: Exception | None) -> list[str]:
    """Write the copies, or raise the error of copying. Returns the files' names."""
    if failure:
        raise failure
    for image in images:
        image.write()
    return [image.path.name for image in images]


def write_files(files: list[tuple[Path, Any]], folder: Path) -> list[str]:
    """Write state dicts by torch.save(). Returns the files' names. folder: the one of all."""
    for path, state in files:
        torch.save(state, path)
    sync(folder)
    return [path.name for path, _ in files]


def stamps_of(folder, names):
    return [file_state(folder / name) for name in names]


def publish_first(paths: SavePaths) -> bool:
    """Publish the hidden folder, unless another machine does. Returns whether this one did."""
    try:
        paths.hidden.rename(paths.claimed)
    except FileNotFoundError:
        return False
    publish(paths.claimed, paths.output, paths.latest, paths.tag)
    return True


def free_memory() -> int:
    """The bytes of memory that this machine, or its container, has free."""
    free = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):  # no container, or no limit
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        free = min(free, limit - used + int(stat["inactive_file"]))
    return free
