"""What keeps load_checkpoint() from going on is one line, the same on all ranks, and soon: no rank waits for ever."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from helpers import flip

import universal
from harness.ranks import launch, run
from universal import loader

ZOO = "tests/ranks/zoo.py"
TAG = "global_step3"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a run of 3 ranks at ZeRO-1: global_step3 and universal."""
    folder = tmp_path_factory.mktemp("saved")
    run(folder, 3, ZOO, json.dumps([{"name": ".", "stage": 1, "optimizer": "AdamW", "groups": 2}]))
    universal.convert(folder / TAG, folder / "universal")
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True, ignore=lambda *_: ["losses.json"])
    return tmp_path


def refused(folder, *jobs, patch=None):
    """What both ranks say alike when they refuse to load a checkpoint, for each of the jobs."""
    common = {"name": ".", "stage": 1, "optimizer": "AdamW", "groups": 2, "load": TAG}
    jobs = [common | {"label": f"job{i}"} | job for i, job in enumerate(jobs)]
    run(folder, 2, ZOO, json.dumps(jobs), patch=patch)
    for job in jobs:
        first, second = ((folder / f"{job['label']}.refused.{rank}").read_text() for rank in (0, 1))
        assert first == second and "\n" not in first and not (folder / f"{job['label']}.json").exists()
        yield first


@pytest.mark.parametrize("state", ["fp32", "exp_avg_sq"])
def test_flipped_bit_of_a_universal_checkpoint(copy, state):
    flip(copy / "universal" / "zero" / "first.weight" / f"{state}.pt")
    (line,) = refused(copy, {"stage": 3, "load": "universal"})
    assert f"first.weight/{state}.pt is damaged" in line


def test_another_model(copy):
    wider, renamed, grouped = refused(copy, {"wider": 8}, {"rename": True}, {"groups": 3})
    assert "rows is (9, 8) here, and (9, 7) in" in wider
    assert "trained here, and not in the checkpoint (1): renamed" in renamed
    assert "is in parameter group" in grouped


def test_machines_without_a_shared_folder(copy):
    """A machine that has only the shards of its own ranks."""

    def patch():
        scandir = os.scandir
        if os.environ["RANK"] == "1":
            os.scandir = lambda path: [e for e in scandir(path) if "rank_2_" not in e.name]

    (line,) = refused(copy, {}, patch=patch)
    assert "must be shared, or mirror.gather() before" in line


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_vanishes(copy, by):
    """The others end at once when it dies, and after the time that is set when it is stopped; rank 0 names it."""

    def patch():
        fill, load = loader.Reader.fill, loader.load_checkpoint

        def vanish(*args):
            if os.environ["RANK"] == "1":
                os.kill(os.getpid(), by)
            fill(*args)

        def leave(*args, **options):
            try:
                return load(*args, **options)
            except universal.CheckpointError as error:
                Path(f"told.{os.environ['RANK']}").write_text(str(error))
                os._exit(1)

        loader.Reader.fill, universal.load_checkpoint = vanish, leave

    job = {"name": ".", "stage": 1, "optimizer": "AdamW", "groups": 2, "load": TAG, "options": {"timeout": 4}}
    began = time.monotonic()
    launch(copy, 3, ZOO, json.dumps([job]), patch=patch, limit=20, grace=6)
    first, last = ((copy / f"told.{rank}").read_text() for rank in (0, 2))
    assert time.monotonic() - began < 25 and "\n" not in first + last, (first, last)
    assert "a rank does not answer" in last and "Rank 1 failed" in first, (first, last)


def test_what_it_needs(monkeypatch):
    """A DeepSpeed that is too old, and a second copy of the package, are each one line before anything is read."""
    monkeypatch.setattr(loader.deepspeed, "__version__", "0.15.4+cpu")
    with pytest.raises(universal.CheckpointError, match=r"needs DeepSpeed 0\.16\.4 or newer, and finds 0\.15\.4"):
        universal.load_checkpoint(None, "nowhere")
    monkeypatch.setattr(loader.deepspeed.DeepSpeedEngine, "universal", "/elsewhere/loader.py", raising=False)
    with pytest.raises(universal.CheckpointError, match="two copies of universal: /elsewhere/loader.py is"):
        universal.install()
