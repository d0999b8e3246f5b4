"""Saves in the background: what dies or fails in one leaves the checkpoint before, and the training
waits for a copy of memory alone."""

import errno
import os
import signal
import time
from pathlib import Path

import deepspeed
import pytest
import torch
import torch.distributed as dist

import universal
from tests.support.commands import forked, is_rank, kill, slow
from tests.support.files import folders_in
from tests.support.ranks import launch, run
from tests.support.toy import (
    BF16,
    begin,
    differences,
    make,
    read_truth,
    same,
    save_truth,
    snapshot,
    train,
)
from universal import background, elastic
from universal.files.torch_file import verify
from universal.load import snapshot as snapshots
from universal.load.hooks import overridden


def start(stage, seed=1, **options):
    """An engine that saves in the background."""
    begin()
    universal.install(background=True)
    return make(stage, seed=seed, **options)


def train_and_save(engine, steps, tag="step{}"):
    for step in steps:
        train(engine, step)
        save_truth(snapshot(engine), f"{step}.pt")
        engine.save_checkpoint("c", tag.format(step), {"step": step})


def resume(stage, expected):
    """It goes on from that step, of whose state every bit is there."""
    engine = start(stage, seed=7)
    path, state = universal.load_checkpoint(engine, "c")
    assert state["step"] == expected, path
    assert not differences(read_truth(f"{expected}.pt"), snapshot(engine))
    dist.barrier()


# --------------------------------------------------------------------------------------------------
# what is in the files


def seen_collectives(names):
    """In this block, DeepSpeed's collective operations are named in a list."""
    backend = deepspeed.comm.comm.cdb

    def seen(name, operation):
        def run(*args, **options):
            names.append(name)
            return operation(*args, **options)

        return run

    kinds = ("all_", "barrier", "broadcast", "gather", "reduce")
    operations = {name: getattr(backend, name) for name in dir(backend) if name.startswith(kinds)}
    return overridden(
        backend, **{name: seen(name, call) for name, call in operations.items() if callable(call)}
    )


def save_twice(stage, options):
    engine = start(stage, **options)
    train(engine, 1)
    plain = type(engine).save_checkpoint.__wrapped__
    plain(engine, "plain", "t", {"own": [1, torch.arange(3)]})
    weights = [parameter.detach().clone() for parameter in engine.module.parameters()]
    meetings = []
    with seen_collectives(meetings):
        engine.save_checkpoint("c", "t", {"own": [1, torch.arange(3)]})
    assert not meetings
    assert all(map(torch.equal, weights, engine.module.parameters()))
    train(engine, 2)  # the copy is not what is trained
    background.wait()
    dist.barrier()


def parts(value, name=""):
    """{name: part} of nested containers."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found = {}
    for key, part in items:
        where = f"{name}/{key}"
        if isinstance(part, dict | list | tuple):
            found |= parts(part, where)
        elif isinstance(part, torch.Tensor):
            found[where] = part
        else:
            found[where] = getattr(part, "__dict__", part)
    return found


KINDS = [(1, {}), (3, {}), slow(2, BF16), slow(3, {"clip": 1.0})]


@pytest.mark.parametrize("stage, options", KINDS)
def test_the_files_of_a_plain_save(tmp_path, stage, options):
    run(tmp_path, 2, save_twice, stage, options)
    names = sorted(path.name for path in (tmp_path / "plain" / "t").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "c" / "t").iterdir())
    assert (tmp_path / "c" / "latest").read_text() == "t"
    for name in names:
        if not name.endswith(".pt"):
            continue
        verify(tmp_path / "c" / "t" / name)
        wanted, saved = (
            parts(torch.load(tmp_path / folder / "t" / name, weights_only=False))
            for folder in ("plain", "c")
        )
        assert wanted.keys() == saved.keys()
        assert not [key for key in wanted if not same(wanted[key], saved[key])]


def test_a_disk_that_takes_no_direct_writes(tmp_path):
    """It is written through the system's memory."""

    def job():
        engine = start(1)
        call_of(snapshots, "write_all", 1, refuse)
        train_and_save(engine, [1])
        background.wait()
        dist.barrier()

    def refuse(file, data):
        file.seek(512)  # as after a part of it
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    run(tmp_path, 2, job)
    run(tmp_path, 2, resume, 1, 1)


def test_tags_that_differ(tmp_path):
    """DeepSpeed says so, as the config has it."""

    def job():
        engine = start(1, checkpoint={"tag_validation": "Fail"})
        train(engine, 1)
        with pytest.raises(AssertionError, match="is not consistent across all ranks"):
            engine.save_checkpoint("c", f"of_rank{os.environ['RANK']}")
        engine.save_checkpoint("c", "of_all")
        background.wait()
        dist.barrier()
        assert Path("c", "latest").read_text() == "of_all"

    run(tmp_path, 2, job)


# --------------------------------------------------------------------------------------------------
# what dies or fails


def call_of(target, name, number, act):
    """A patch: at that call of a function, act() comes first. number: counts from 1."""
    function = getattr(target, name)
    calls = []

    def wrapped(*args, **options):
        calls.append(args)
        if len(calls) == number:
            act(*args)
        return function(*args, **options)

    setattr(target, name, wrapped)


def die(*_):
    kill()


def no_space(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# (rank, what it calls, at which of its calls): where it dies in the save of step 2; rank 0 writes
# two files in each. What the next job goes on from. Is the name of both saves the same?
DEATHS = [
    (1, os, "fsync", 2, 1, "step{}"),
    (1, os, "fsync", 2, 1, "last"),
    (0, background, "publish", 2, 1, "step{}"),
    # It has its name, and `latest` is of before: it is whole.
    (0, Path, "rename", 6, 2, "step{}"),
    slow(0, os, "fsync", 4, 1, "step{}"),
    slow(0, background, "publish", 2, 1, "last"),
]


@pytest.mark.parametrize("stage", [1, slow(3)])
@pytest.mark.parametrize("rank, target, name, number, left, tag", DEATHS)
def test_a_death(tmp_path, stage, rank, target, name, number, left, tag):
    def job():
        engine = start(stage)
        if is_rank(rank):
            call_of(target, name, number + (stage == 3 and rank == 1 and name == "fsync"), die)
        train_and_save(engine, [1, 2], tag)
        background.wait()

    result = launch(tmp_path, 2, job, grace=5)
    assert -signal.SIGKILL in result.codes.values(), result.errors
    run(tmp_path, 2, resume, stage, left)


def test_a_full_disk(tmp_path):
    """One line; the training goes on, and the next save is whole. What the dead left is removed."""

    def job():
        engine = start(1)
        if is_rank(1):
            call_of(os, "fsync", 2, no_space)
        (Path("c") / ".t.1.saving").mkdir(parents=True, exist_ok=True)
        train_and_save(engine, [1, 2])
        background.wait()
        dist.barrier()
        assert Path("c", "latest").read_text() == "step1"
        train_and_save(engine, [3])
        engine.save_checkpoint("named", 0)  # a tag may be a number
        engine.save_checkpoint("named", "best", save_latest=False)
        background.wait()
        dist.barrier()
        assert Path("named", "0").is_dir() and Path("named", "best").is_dir()
        assert Path("named", "latest").read_text() == "0"

    out = run(tmp_path, 2, job)
    (line,) = (line for line in out.splitlines() if "beside `latest`" in line)
    assert "best is saved beside `latest`" in line
    (line,) = (line for line in out.splitlines() if "not saved" in line)
    assert "c/step2 is not saved, and the training goes on: OSError: [Errno 28]" in line
    assert folders_in(tmp_path / "c") == ["step1", "step3"]
    run(tmp_path, 2, resume, 1, 3)


def test_a_copy_that_fails(tmp_path):
    """On one rank, of a tensor to memory: it is a line, too."""

    def no_memory(*_):
        raise RuntimeError("CUDA error: out of memory")

    def job():
        engine = start(1)
        if is_rank(1):
            call_of(background, "new_memory", 1, no_memory)
        train_and_save(engine, [1, 2])
        background.wait()
        dist.barrier()

    out = run(tmp_path, 2, job)
    (line,) = (line for line in out.splitlines() if "not saved" in line)
    assert "c/step1 is not saved" in line
    assert line.endswith("RuntimeError: CUDA error: out of memory")
    assert folders_in(tmp_path / "c") == ["step2"]
    run(tmp_path, 2, resume, 1, 2)


# --------------------------------------------------------------------------------------------------
# who waits


def test_who_waits(tmp_path):
    """The first save does not wait for the disk, the second one waits for the first, a load and the
    end of the job for the last."""

    def sleep(*_):
        time.sleep(1)

    def job():
        engine = start(1)
        if is_rank(1):
            for number in (1, 2):
                call_of(os, "fsync", number, sleep)
        seconds = []
        for step in (1, 2):
            train(engine, step)
            save_truth(snapshot(engine), f"{step}.pt")
            begun = time.perf_counter()
            engine.save_checkpoint("c", f"step{step}", {"step": step})
            seconds.append(time.perf_counter() - begun)
            assert not Path("c", f"step{step}").exists()
        if is_rank(1):
            assert seconds[0] < 0.7 < seconds[1], seconds
        other = make(1, seed=7)
        for step in (1, 2):
            other.load_checkpoint("c", f"step{step}")
            assert not differences(read_truth(f"{step}.pt"), snapshot(other))
        dist.barrier()

    run(tmp_path, 2, job)


def test_two_engines(tmp_path):
    """Of one job, in one folder: the second one's save waits for that of the first."""

    def job():
        engines = [start(1, seed=seed) for seed in (1, 2)]
        if is_rank(1):
            call_of(os, "fsync", 1, lambda *_: time.sleep(1))
        for engine, tag in zip(engines, ("generator", "critic"), strict=True):
            engine.save_checkpoint("c", tag)
        background.wait()
        dist.barrier()

    run(tmp_path, 2, job)
    assert folders_in(tmp_path / "c") == ["critic", "generator"]


def test_the_end_of_the_process(tmp_path):
    end = forked(lambda: background.begin(lambda: (time.sleep(0.5), (tmp_path / "x").touch())))
    assert end().code == 0 and (tmp_path / "x").exists()


# Two files of 131,072 bytes and one of 196,608, for which torch pins a power of two.
@pytest.mark.parametrize("free, has_gpu", [(0, False), (500_000, True)])
def test_too_little_memory(tmp_path, free, has_gpu):
    """It is said, and saved without a copy."""

    def job():
        engine = start(1)
        background.free_memory = lambda: free
        torch.cuda.is_available = lambda: has_gpu
        train(engine, 1)
        save_truth(snapshot(engine), "1.pt")
        engine.save_checkpoint("c", "step1", {"step": 1, "more": torch.zeros(25_000)})
        assert Path("c", "latest").read_text() == "step1"
        dist.barrier()

    out = run(tmp_path, 2, job)
    assert f"MB of memory, and {free / 1e6:.1f} MB are free: saved without one" in out
    run(tmp_path, 2, resume, 1, 1)


def test_elastic(tmp_path):
    """elastic.save() keeps its promises: old checkpoints are removed, when the new one is there."""

    def job():
        engine = start(1)
        for step in (1, 2, 3):
            train(engine, step)
            elastic.save(engine, "c", {"step": step}, keep=2)
            save_truth(snapshot(engine), f"{step}.pt")
        elastic.exit_together(finished=True)

    run(tmp_path, 2, job)
    assert folders_in(tmp_path / "c") == ["global_step2", "global_step3"]
    run(tmp_path, 2, resume, 1, 3)
