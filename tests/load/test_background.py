"""Saves in the background: what dies or fails in one leaves the checkpoint before, and the training
waits for a copy of memory alone."""

import contextlib
import errno
import functools
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import universal
from tests.support.commands import forked, is_rank, kill, only_if, slow
from tests.support.files import folders_in
from tests.support.ranks import launch, run
from tests.support.toy import (
    BF16,
    begin,
    differences,
    make,
    read_truth,
    save_truth,
    snapshot,
    train,
)
from universal import background, elastic
from universal.files.same import is_same
from universal.files.torch_file import load, verify
from universal.load import snapshot as snapshots
from universal.load.hooks import meeting_before_collectives
from universal.write import publish


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


def save_twice(stage, options):
    engine = start(stage, **options)
    train(engine, 1)
    plain = type(engine).save_checkpoint.__wrapped__
    plain(engine, "plain", "t", {"own": [1, torch.arange(3)]})
    weights = [parameter.detach().clone() for parameter in engine.module.parameters()]
    meetings = []
    with meeting_before_collectives(meetings.append):
        engine.save_checkpoint("c", "t", {"own": [1, torch.arange(3)]})
    assert not meetings
    assert all(map(torch.equal, weights, engine.module.parameters()))
    train(engine, 2)  # the copy is not what is trained
    background.wait()
    dist.barrier()


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
        plain, saved = (tmp_path / folder / "t" / name for folder in ("plain", "c"))
        verify(saved)
        assert is_same(load(plain), load(saved))
        torch.load(saved, weights_only=False)


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


def test_tags(tmp_path):
    """They may be numbers. DeepSpeed says where they differ between ranks, as the config has it; a
    line says which one `latest` does not name."""

    def job():
        engine = start(1, checkpoint={"tag_validation": "Fail"})
        with pytest.raises(AssertionError, match="is not consistent across all ranks"):
            engine.save_checkpoint("c", f"of_rank{os.environ['RANK']}")
        engine.save_checkpoint("c", 0)
        engine.save_checkpoint("c", "best", save_latest=False)
        background.wait()
        dist.barrier()

    out = run(tmp_path, 2, job)
    (line,) = (line for line in out.splitlines() if "beside `latest`" in line)
    assert "best is saved beside `latest`" in line
    assert folders_in(tmp_path / "c") == ["0", "best"]
    assert (tmp_path / "c" / "latest").read_text() == "0"


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


# --------------------------------------------------------------------------------------------------
# the states of a save, and what comes in between: background.py has the table

# Where each state is reached; the renames are those of the tag's folder, and of `latest`.
STATES = {
    "begun": (background, "files_of_save"),
    "copied": (background, "copies_done"),
    "written": (background, "states_of"),
    "aside": (Path, "rename"),
    "published": (Path, "rename"),
    "named": (Path, "rmdir"),
}
OLD = {*"begun copied written aside".split()}  # in which the checkpoint before counts
# Of somebody else, beside the checkpoints; the last one is being written by a job alive.
STRANGERS = (
    "own.txt .step2.saving/x .last.1.saving/x .step2.bak/x step2_best/mp_rank_00_model_states.pt "
    ".other.1764000000000000000.saving/x"
).split()


def plant(state, act, tag):
    """Call act() at the first time that the next save reaches the state."""
    target, name = STATES[state]
    function = getattr(target, name)
    renamed = {"aside": tag, "published": "latest"}.get(state)
    acts = [act]

    def planted(*args, **options):
        if acts and (renamed is None or renamed == Path(args[-1]).name):
            acts.pop()()
        return function(*args, **options)

    setattr(target, name, planted)


def no_space():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def interrupted():
    signal.raise_signal(signal.SIGINT)


def other_job(tag):
    """Another job saves under the same tag, from its begin to its end."""
    output = Path("c", tag).resolve()
    publish.sweep(output)
    folder = shutil.copytree(Path("other", tag), publish.hidden(output, "saving"))
    publish.publish(folder, output, output.with_name("latest"))
    publish.sweep(output)


def saved_again(state, event, rank, tag):
    """A job saves step 1, and as it saves step 2 the event comes. It goes on if it can."""
    for name in STRANGERS if is_rank(0) else ():
        path = Path("c", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    engine = start(1)
    train_and_save(engine, [1], tag)
    background.wait()
    tag = tag.format(2)
    engine.save_checkpoint("other", tag, {"step": 1})
    background.wait()
    dist.barrier()
    if is_rank(0):
        Path("c", tag).mkdir(exist_ok=True)
        Path("c", tag, "ema.pt").touch()
    acts = {
        "kill": kill,
        "error": no_space,
        "signal": interrupted,
        "process": lambda: other_job(tag),
        "exit": lambda: time.sleep(0.5),
    }
    if is_rank(rank):
        plant(state, acts[event], tag)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    train(engine, 2)
    save_truth(snapshot(engine), "2.pt")
    try:
        engine.save_checkpoint("c", tag, {"step": 2})
        if event == "signal":
            if not is_rank(rank):
                interrupted()
            background.wait()
    except (OSError, KeyboardInterrupt) as error:
        assert (type(error) is OSError) == (event == "error" and state == "begun")
        if event == "signal":
            engine.save_checkpoint("c", "interrupted", {"step": 2})
    if event == "exit":
        threading._shutdown()  # as the interpreter does, which then calls what atexit has
        engine.save_checkpoint("c", "at_exit", {"step": 2})
        return  # and the process is gone
    background.wait()


def once_more(left, tag):
    """The next job finds the newest complete checkpoint, and saves under the same tag."""
    resume(1, left)
    engine = start(1)
    train_and_save(engine, [3], tag)
    background.wait()
    dist.barrier()


CASES = [
    (ranks, rank, state, event)
    for ranks, rank in ((1, 0), (2, 0), (2, 1))
    for state in STATES
    for event in "kill error signal process exit".split()
    if not (rank and (state in ("aside", "published", "named") or event == "process"))
]


def is_quick(case):
    ranks, rank, state, event = case
    return (
        event == "kill"
        and rank == ranks - 1
        or (ranks, event) == (1, "process")
        or case[1:]
        in (
            (1, "begun", "error"),
            (1, "copied", "error"),
            (1, "written", "error"),
            (0, "aside", "error"),
            (1, "copied", "signal"),
            (0, "written", "exit"),
        )
    )


@pytest.mark.parametrize(
    "ranks, rank, state, event, tag",
    [
        only_if(is_quick(c) and (tag == "last" or c[2:] == ("written", "kill")), *c, tag)
        for c in CASES
        for tag in ("last", "step{}")
    ],
)
def test_states(tmp_path, ranks, rank, state, event, tag):
    """The newest complete checkpoint is found, nothing of anybody else is gone, and the training
    goes on, or ends with a line."""
    result = launch(tmp_path, ranks, saved_again, state, event, rank, tag, grace=5)
    named = tag.format(2)
    lines = [line for line in result.out.splitlines() if "not saved" in line]
    if event == "kill":
        assert -signal.SIGKILL in result.codes.values(), result.errors
    else:
        assert not any(result.codes.values()), result.errors
        fails = event == "error" and state not in ("begun", "named")
        fails = fails or (event, state) == ("process", "published")
        assert len(lines) == fails, result.out
        assert all(f"c/{named} is not saved, and the training goes on: " in line for line in lines)
    tags = {"signal": {"interrupted"}, "exit": {"at_exit"}}.get(event, set())
    old = event in ("kill", "error") and state in OLD
    old = old or event == "process" and state in ("published", "named")
    for name in tags:
        verify_all(tmp_path / "c" / name)
        shutil.rmtree(tmp_path / "c" / name)
    run(tmp_path, ranks, once_more, 1 if old else 2, tag)
    verify_all(tmp_path / "c" / tag.format(3))
    assert all((tmp_path / "c" / name).exists() for name in STRANGERS)
    assert (tmp_path / "c" / named / "ema.pt").exists()
    hidden = {path.name for path in (tmp_path / "c").glob(".*")}
    hidden -= {Path(name).parts[0] for name in STRANGERS}
    assert not [name for name in hidden if name.startswith(f".{tag.format(3)}.")]
    assert len(hidden) <= (event == "kill" and (ranks, state) != (2, "begun"))


def verify_all(folder):
    """Every file is what was written."""
    paths = [path for path in folder.glob("*.pt") if path.name != "ema.pt"]
    assert len(paths) > 1
    for path in paths:
        verify(path)


def test_a_wait_that_is_interrupted(tmp_path):
    """Ctrl-C on rank 0 as it waits for the save before, and on rank 1 when it has begun the next
    one: both save once more."""

    def job():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        engine = start(1)
        train_and_save(engine, [1])
        train(engine, 2)
        save_truth(snapshot(engine), "2.pt")
        if is_rank(0):
            call_of(background, "wait", 1, interrupted)
        threading.Timer(1, interrupted_by_the_system).start()
        with pytest.raises(KeyboardInterrupt):
            engine.save_checkpoint("c", "step2", {"step": 2})
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(2 * is_rank(0))
        engine.save_checkpoint("c", "interrupted", {"step": 2})
        background.wait()
        dist.barrier()

    def interrupted_by_the_system():
        os.kill(os.getpid(), signal.SIGINT)

    run(tmp_path, 2, job)
    assert folders_in(tmp_path / "c") == ["interrupted", "step1"]
    run(tmp_path, 2, resume, 1, 2)


# --------------------------------------------------------------------------------------------------
# who waits


def test_who_waits(tmp_path):
    """The first save does not wait for the disk, that of another engine waits for the first, a load
    and the end of the job for the last."""

    def job():
        engines = [start(1, seed=seed) for seed in (1, 2)]
        disk = threading.Event()
        if is_rank(1):
            call_of(os, "fsync", 1, lambda *_: disk.wait(60))
            call_of(os, "fsync", 2, lambda *_: time.sleep(1))
        for step, engine in enumerate(engines, 1):
            train(engine, step)
            save_truth(snapshot(engine), f"{step}.pt")
            if step == 2:
                threading.Timer(1, disk.set).start()
            engine.save_checkpoint("c", f"step{step}", {"step": step})
            if is_rank(1):
                assert bool(os.listdir(Path("c", "step1"))) == (step == 2)
        other = make(1, seed=7)
        for step in (1, 2):
            other.load_checkpoint("c", f"step{step}")
            assert not differences(read_truth(f"{step}.pt"), snapshot(other))
        dist.barrier()

    run(tmp_path, 2, job)


def test_the_end_of_the_process(tmp_path):
    end = forked(lambda: background.begin(lambda: (time.sleep(0.5), (tmp_path / "x").touch())))
    assert end().code == 0 and (tmp_path / "x").exists()


def test_too_little_memory(tmp_path):
    """It is said, and saved without a copy."""

    def job():
        engine = start(1)
        background.free_memory = lambda: 0
        train(engine, 1)
        save_truth(snapshot(engine), "1.pt")
        engine.save_checkpoint("c", "step1", {"step": 1, "more": torch.zeros(25_000)})
        assert Path("c", "latest").read_text() == "step1"
        dist.barrier()

    out = run(tmp_path, 2, job)
    assert "MB of memory, and 0.0 MB are free: saved without one" in out
    run(tmp_path, 2, resume, 1, 1)


@pytest.mark.parametrize("code", [0, 2])
def test_pinned_memory(monkeypatch, tmp_path, code):
    """For a GPU exactly what is needed is pinned once it has been copied into, on that GPU, and
    released before it is freed. If it cannot be, it is memory all the same."""
    pinned = []
    gpu = torch.device("cuda", 3)
    cuda = SimpleNamespace(
        cudaHostRegister=lambda *place: pinned.append(place) or code,
        cudaHostUnregister=lambda pointer: pinned.append(pointer),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(
        torch.cuda, "device", lambda device: contextlib.nullcontext(pinned.append(device))
    )
    memory = snapshots.new_memory(1_000_003)
    pointer = memory.data_ptr()
    assert memory.numel() == 1_000_003 and pointer % snapshots.PAGE == 0
    image = snapshots.Image(tmp_path / "a.pt", {"a": torch.ones(3)})
    image.copy(memory)
    image.write()  # from the CPU
    assert not pinned
    image.devices.add(gpu)
    for _ in range(2):
        image.write()
        assert pinned == [gpu, (pointer, 1_000_003, 0)]
    del image
    del memory
    assert pinned[2:] == ([] if code else [pointer])


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


def test_a_machine_that_sees_late(tmp_path):
    """What another one has renamed, on NFS, say."""

    def job():
        engine = start(1)
        if is_rank(1):
            call_of(background, "states_of", 2, no_such_file)
        train_and_save(engine, [1])
        background.wait()
        dist.barrier()

    def no_such_file(*_):
        raise FileNotFoundError

    assert "c/step1 is saved" in run(tmp_path, 2, job)


def test_a_rank_that_saves_again_at_once(tmp_path):
    """Under the same name, where the file system has no locks: who still cleans up after the save
    before leaves its new folder alone."""

    def job():
        engine = start(1)
        if is_rank(0):
            call_of(background, "sweep", 1, lambda *_: time.sleep(0.5))
        background.lock = functools.partial(os.open, flags=os.O_RDONLY)
        for step in (1, 2):
            engine.save_checkpoint("c", "last", {"step": step})
        background.wait()
        dist.barrier()

    assert run(tmp_path, 2, job).count("c/last is saved") == 2
