"""Saves in the background: what dies or fails in one leaves the checkpoint before, and the training
waits for a copy of memory alone. A case is one of tests/support/case.py."""

import contextlib
import errno
import functools
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import universal
from tests.support.case import PRINTED, case, cases_of, printed, test_case  # noqa: F401
from tests.support.commands import forked, is_rank, kill, only_if
from tests.support.files import folders_in
from tests.support.helpers import chosen, run_all
from tests.support.toy import (
    BF16,
    begin,
    differences,
    in_turn,
    is_rank_0,
    make,
    read_truth,
    save_truth,
    snapshot,
    train,
)
from universal import background, elastic, patches
from universal.files.same import is_same
from universal.files.torch_file import load, verify
from universal.load.overrides import meeting_before_collectives
from universal.save import snapshot as snapshots
from universal.write import publish

PATCHED = pytest.MonkeyPatch()  # until a job ends


def in_background(job):
    """The job, where engines save in the background; it ends when all is saved."""

    @functools.wraps(job)
    def play(*arguments):
        universal.install(background=True)
        result = job(*arguments)
        all_saved()
        PATCHED.undo()
        return result

    return play


def all_saved():
    background.wait()
    dist.barrier()


def call_of(target, name, number, act, renamed=None):
    """At that call of a function, act() comes first. number: counts from 1. renamed: the name that
    the calls give to a path, if not all count."""
    function = getattr(target, name)
    calls = []

    def wrapped(*args, **options):
        if renamed is None or renamed == Path(args[-1]).name:
            calls.append(args)
            if len(calls) == number:
                act(*args)
        return function(*args, **options)

    PATCHED.setattr(target, name, wrapped)


def train_and_save(engine, steps, tag="step{}"):
    for step in steps:
        train(engine, step)
        save_truth(snapshot(engine), f"{step}.pt")
        engine.save_checkpoint("c", tag.format(step), {"step": step})


@in_background
def resume(expected, stage=1):
    """It goes on from that step, of whose state every bit is there."""
    engine = make(stage, seed=7)
    path, state = universal.load_checkpoint(engine, "c")
    assert state["step"] == expected, path
    assert not differences(read_truth(f"{expected}.pt"), snapshot(engine))
    return engine


def resumed_at(expected):
    """A decorator of what saves: a resume takes this step."""
    load = functools.partial(resume, expected)
    return lambda save: case(in_background(save), stages=(1,), quick_ranks=(2,))(load)


# --------------------------------------------------------------------------------------------------
# what is in the files


def save_twice(stage):
    engine = make(stage, clip=1.0, **BF16 if stage == 2 else {})
    train(engine, 1)
    plain = patches.inside("save_checkpoint", "background")
    plain(engine, "plain", "t", {"own": [1, torch.arange(3)]})
    weights = [parameter.detach().clone() for parameter in engine.module.parameters()]
    meetings = []
    with meeting_before_collectives(lambda: meetings.append("met")):
        engine.save_checkpoint("c", "t", {"own": [1, torch.arange(3)]})
    assert not meetings
    assert all(map(torch.equal, weights, engine.module.parameters()))
    train(engine, 2)  # the copy is not what is trained


@case(in_background(save_twice), quick_stages=(1, 3), quick_ranks=(2,))
def files_of_a_plain_save(stage):
    assert Path("c/latest").read_text() == "t"
    names = [path.name for path in Path("plain/t").iterdir()]
    assert sorted(names) == sorted(path.name for path in Path("c/t").iterdir())
    for name in names:
        if name.endswith(".pt"):
            saved = Path("c/t", name)
            verify(saved)
            assert is_same(load(Path("plain/t", name)), load(saved))
            torch.load(saved, weights_only=False)


@resumed_at(1)
def a_disk_that_takes_no_direct_writes(stage):
    """It is written through the system's memory."""

    def refuse(file, data):
        file.seek(512)  # as after a part of it
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    call_of(snapshots, "write_all", 1, refuse)
    train_and_save(make(stage), [1])


@resumed_at(1)
def a_folder_elsewhere(stage):
    """The script's folder is a symbolic link."""
    if is_rank_0():
        Path("far/away/from/it").mkdir(parents=True, exist_ok=True)
        Path("c").symlink_to("far/away/from/it")
    dist.barrier()
    train_and_save(make(stage), [1])
    all_saved()
    assert printed("c/step1 is saved") and folders_in(Path("far/away/from")) == ["it"]


@resumed_at(1)
def tags(stage):
    """They may be numbers. DeepSpeed says where they differ between ranks, as the config has it."""
    engine = make(stage, checkpoint={"tag_validation": "Fail"})
    with pytest.raises(AssertionError, match="is not consistent across all ranks"):
        engine.save_checkpoint("c", f"of_rank{dist.get_rank()}")
    train(engine, 1)
    save_truth(snapshot(engine), "1.pt")
    for tag in (0, "best"):
        engine.save_checkpoint("c", tag, {"step": 1}, save_latest=not tag)
    all_saved()
    assert folders_in(Path("c")) == ["0", "best"] and Path("c/latest").read_text() == "0"


# --------------------------------------------------------------------------------------------------
# the states of a save, and what comes in between: background.py has the table

# Where each state is reached; the renames are those of the tag's folder, and of `latest`.
STATES = {
    "begun": (background, "files_of_save"),
    "copied": (background, "copies_done"),
    "written": (background, "stamps_of"),
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


def no_space():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def interrupted():
    signal.raise_signal(signal.SIGINT)


def other_job(tag):
    """Another job saves under the same tag, from its begin to its end."""
    output = Path("c", tag).resolve()
    publish.sweep(output)
    folder = publish.hidden(output, "saving")
    folder.mkdir()
    descriptor = publish.lock(folder)  # or a rank of the first job may sweep it away
    shutil.copytree(Path("other", tag), folder, dirs_exist_ok=True)
    publish.publish(folder, output, output.with_name("latest"))
    publish.unlock(descriptor)
    publish.sweep(output)


@in_background
def saved_again(rank, state, event, tag):
    """A job saves step 1, and as it saves step 2 the event comes to a rank. It goes on if it
    can."""
    for name in STRANGERS if is_rank(0) else ():
        path = Path("c", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    engine = make(1)
    train_and_save(engine, [1], tag)
    background.wait()
    tag = tag.format(2)
    engine.save_checkpoint("other", tag, {"step": 1})
    all_saved()
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
        renamed = {"aside": tag, "published": "latest"}.get(state)
        call_of(*STATES[state], 1, lambda *_: acts[event](), renamed)
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
        dist.barrier()
        sys.exit(EXIT)  # the process is gone


def once_more(rank, state, event, tag):
    """The next job finds the checkpoint that `latest` names, and saves under the same tag."""
    if is_rank(0) and event in LAST:
        folder = Path("c", LAST[event])
        verify_all(folder)
        shutil.rmtree(folder)
    dist.barrier()
    is_unnamed = state == "published" and tag != "last"  # complete, and `latest` names the old one
    old = event in ("kill", "error") and (state in OLD or is_unnamed)
    old = old or event == "process" and state in ("published", "named")
    engine = resume(1 if old else 2)
    in_background(train_and_save)(engine, [3], tag)


EXIT = 3
LAST = {"signal": "interrupted", "exit": "at_exit"}  # what a job saves that has been told to end
CASES_OF_STATES = [
    f"{ranks} {rank} {state} {event} {tag}"
    for ranks, rank in ((1, 0), (2, 0), (2, 1))
    for state in STATES
    for event in "error signal process exit kill".split()
    for tag in ("last", "step{}")
    if not (rank and (state in ("aside", "published", "named") or event == "process"))
]
QUICK = """
1 0 begun kill last
1 0 copied kill last
1 0 written kill last
1 0 written kill step{}
1 0 aside kill last
1 0 published kill last
1 0 named kill last
2 1 begun kill last
2 1 copied kill last
2 1 written kill last
2 1 written kill step{}
1 0 aside error last
2 0 aside error last
2 1 begun error last
2 1 copied error last
2 1 written error last
2 1 copied signal last
1 0 begun process last
1 0 copied process last
1 0 written process last
1 0 aside process last
1 0 published process last
1 0 named process last
1 0 written exit last
2 0 written exit last
""".splitlines()


def play(act, *names):
    def play_one(name):
        _, *words = name.split()
        with open("said", "a", buffering=1) as said, contextlib.redirect_stdout(said):
            act(*words)

    begin()
    in_turn(names, play_one)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory, request):
    """{case: (its folder, how the first job has ended if it did not go on, why the next one has
    failed)}. One launch goes through all cases in which nothing ends it."""
    outcomes = {}
    for ranks in (1, 2):
        folder = tmp_path_factory.mktemp(f"on_{ranks}")
        names = [name for (name,) in chosen(request, "job") if name.startswith(f"{ranks} ")]
        ended = run_all(folder, ranks, play, saved_again, names=names, grace=5)
        failed = run_all(folder, ranks, play, once_more, names=names)
        for name in names:
            outcomes[name] = folder / name, ended.get(name, ""), failed.get(name)
    return outcomes


@pytest.mark.parametrize("job", [only_if(job in QUICK, job) for job in CASES_OF_STATES])
def test_states(jobs, job):
    """The newest complete checkpoint is found, nothing of anybody else is gone, and the training
    goes on, or ends with a line."""
    folder, ended, failed = jobs[job]
    ranks, rank, state, event, tag = job.split()
    codes = ended.partition(" on ")[0]
    if event == "kill":
        assert f"{rank}: {-signal.SIGKILL}" in codes, ended
    elif event == "exit":
        assert codes.count(f": {EXIT}") == int(ranks), ended
    else:
        assert not ended, ended
    if event != "kill":
        said = (folder / "said").read_text()
        lines = [line for line in said.splitlines() if "not saved" in line]
        fails = event == "error" and state not in ("begun", "named")
        fails = fails or (event, state) == ("process", "published")
        assert len(lines) == fails, said
        named = f"c/{tag.format(2)} is not saved, and the training goes on: "
        assert all(named in line for line in lines)
    assert not failed, failed
    verify_all(folder / "c" / tag.format(3))
    assert all((folder / "c" / name).exists() for name in STRANGERS)
    assert (folder / "c" / tag.format(2) / "ema.pt").exists()
    hidden = {path.name for path in (folder / "c").glob(".*")}
    hidden -= {Path(name).parts[0] for name in STRANGERS}
    assert not [name for name in hidden if name.startswith(f".{tag.format(3)}.")]
    has_survivor = ranks == "2" and state in ("begun", "copied", "written")
    assert len(hidden) <= (event == "kill" and not has_survivor)


def verify_all(folder):
    """Every file is what was written."""
    paths = [path for path in folder.glob("*.pt") if path.name != "ema.pt"]
    assert len(paths) > 1
    for path in paths:
        verify(path)


@resumed_at(2)
def a_wait_that_is_interrupted(stage):
    """Ctrl-C on rank 0 as it waits for the save before, and on rank 1 when it has begun the next
    one: both save once more."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    engine = make(stage)
    train_and_save(engine, [1])
    train(engine, 2)
    save_truth(snapshot(engine), "2.pt")
    if is_rank(0):
        call_of(background, "wait", 1, interrupted)
    threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        engine.save_checkpoint("c", "step2", {"step": 2})
    with contextlib.suppress(KeyboardInterrupt):
        time.sleep(2 * is_rank(0))
    engine.save_checkpoint("c", "interrupted", {"step": 2})
    all_saved()
    assert folders_in(Path("c")) == ["interrupted", "step1"]


# --------------------------------------------------------------------------------------------------
# who waits


@resumed_at(2)
def who_waits(stage):
    """The first save does not wait for the disk, that of another engine waits for the first, a load
    for the last."""
    engines = [make(stage, seed=seed) for seed in (1, 2)]
    disk = threading.Event()
    if is_rank(1):
        call_of(os, "fsync", 1, lambda *_: disk.wait(60))
        call_of(os, "fsync", 2, lambda *_: time.sleep(1))
    for step, engine in enumerate(engines, 1):
        if step == 2:
            threading.Timer(1, disk.set).start()
        train_and_save(engine, [step])
        if is_rank(1):
            assert bool(os.listdir(Path("c", "step1"))) == (step == 2)
    other = make(stage, seed=7)
    for step in (1, 2):
        other.load_checkpoint("c", f"step{step}")
        assert not differences(read_truth(f"{step}.pt"), snapshot(other))


def test_the_end_of_the_process(tmp_path):
    end = forked(lambda: background.begin(lambda: (time.sleep(0.5), (tmp_path / "x").touch())))
    assert end().code == 0 and (tmp_path / "x").exists()


@resumed_at(1)
def too_little_memory(stage):
    """It is said, and saved without a copy."""
    PATCHED.setattr(background, "free_memory", lambda: 0)
    engine = make(stage)
    train(engine, 1)
    save_truth(snapshot(engine), "1.pt")
    engine.save_checkpoint("c", "step1", {"step": 1, "more": torch.zeros(25_000)})
    assert Path("c", "latest").read_text() == "step1"
    assert printed("MB of memory, and 0.0 MB are free: saved without one")


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
    assert memory.numel() == 1_000_003 and pointer % snapshots.PAGE_BYTES == 0
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


@resumed_at(3)
def elastic_saves(stage):
    """elastic.save() keeps its promises: old checkpoints are removed, when the new one is there;
    the end of the job waits for it."""
    engine = make(stage)
    for step in (1, 2, 3):
        train(engine, step)
        save_truth(snapshot(engine), f"{step}.pt")
        elastic.save(engine, "c", {"step": step}, keep=2)
    PATCHED.setattr(dist, "destroy_process_group", lambda: None)
    with pytest.raises(SystemExit):
        elastic.exit_together(finished=True)
    assert folders_in(Path("c")) == ["global_step2", "global_step3"]


@resumed_at(1)
def a_machine_that_sees_late(stage):
    """What another one has renamed, on NFS, say."""

    def no_such_file(*_):
        raise FileNotFoundError

    if is_rank(1):
        call_of(background, "stamps_of", 2, no_such_file)
    train_and_save(make(stage), [1])
    all_saved()
    assert printed("c/step1 is saved")


@resumed_at(2)
def a_rank_that_saves_again_at_once(stage):
    """Under the same name, where the file system has no locks: who still cleans up after the save
    before leaves its new folder alone."""
    engine = make(stage)
    if is_rank(0):
        call_of(background, "sweep", 1, lambda *_: time.sleep(0.5))
    PATCHED.setattr(background, "lock", functools.partial(os.open, flags=os.O_RDONLY))
    train_and_save(engine, (1, 2), "last")
    all_saved()
    assert PRINTED.getvalue().count("c/last is saved") == 2 * is_rank_0()


# --------------------------------------------------------------------------------------------------
# who reads a checkpoint at once, and who cannot rename


def save_in_a_bucket(stage):
    rename = os.rename

    def of_files(source, target, **options):
        if os.path.isdir(source):
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), source)
        rename(source, target, **options)

    PATCHED.setattr(os, "rename", of_files)
    engine = make(stage)
    for step in (1, 2):
        train(engine, step)
        engine.save_checkpoint("c", client_state={"step": step})
    train(engine, 3)
    save_truth(snapshot(engine), "3.pt")
    elastic.save(engine, "c", {"step": 3}, keep=1)
    assert printed("renames no folders: global_step1 is saved in place", "global_step3 is saved")
    assert Path("c/latest").read_text() == "global_step3"
    dist.barrier()
    assert folders_in(Path("c")) == ["global_step3"]


@case(in_background(save_in_a_bucket), stages=(1,), quick_ranks=(2,))
def a_bucket_that_renames_no_folders(stage):
    """It is found out as a save begins: the save is an ordinary one, and leaves nothing else."""
    resume(3)


CASES = cases_of(sys.modules[__name__])


def test_callbacks_of_trainer_wait():
    """One that uploads a checkpoint gets all of it; without one the training goes on at once."""
    callbacks = pytest.importorskip("transformers.trainer_callback")
    files = []

    class Upload(callbacks.TrainerCallback):
        def on_save(self, *_, **__):
            assert files == ["shard"]

    def write():
        time.sleep(0.3)
        files.append("shard")

    background.wait_in_trainers()
    for callback, written in ((callbacks.DefaultFlowCallback(), []), (Upload(), ["shard"])):
        files.clear()
        background.begin(write)
        handler = callbacks.CallbackHandler([callback], None, None, None, None)
        handler.on_save(None, None, callbacks.TrainerControl())
        assert files == written
        background.wait()
