"""universal.load_checkpoint() where it must not go on, and the checkpoints that test_states.py has not."""

import itertools
import json
import os
import pickle
import shutil
import signal
import struct
import time
import zipfile
from pathlib import Path

import pytest
import random_engines
import torch
from helpers import edited, load, states

import universal
from harness.ranks import launch, run
from universal import loader

ZOO = "tests/ranks/zoo.py"
TAG = "global_step3"


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """<stage>/global_step3 of 3 ranks, at each ZeRO stage, and <stage>/universal."""
    folder = tmp_path_factory.mktemp("saved")
    jobs = [{"name": str(stage), "stage": stage, "optimizer": "AdamW", "groups": 2} for stage in (1, 2, 3)]
    run(folder, 3, ZOO, json.dumps(jobs))
    for stage in (1, 2, 3):
        universal.convert(folder / str(stage) / TAG, folder / str(stage) / "universal")
    return folder


def all_refused(folder, ranks, *jobs, patch=None):
    """What all ranks say alike when they refuse to load a checkpoint, for each of the jobs."""
    jobs = [{"name": ".", "optimizer": "AdamW", "groups": 2, "load": TAG, "label": f"job{i}"} | job
            for i, job in enumerate(jobs)]  # fmt: skip
    run(folder, ranks, ZOO, json.dumps(jobs), patch=patch)
    told = []
    for job in jobs:
        lines = {(folder / f"{job['label']}.refused.{rank}").read_text() for rank in range(ranks)}
        assert len(lines) == 1, lines
        told += lines
        assert "\n" not in told[-1] and not (folder / f"{job['label']}.json").exists()
    return told


def refused(folder, ranks, stage, tag=TAG, patch=None, **job):
    (line,) = all_refused(folder, ranks, {"stage": stage, "load": tag} | job, patch=patch)
    return line


@pytest.fixture
def copy(saved, tmp_path):
    def copy(stage, *, into=tmp_path):
        shutil.copytree(saved / str(stage), into, dirs_exist_ok=True, ignore=lambda *_: ["losses.json"])
        return into

    return copy


def flip(path):
    """Change one bit in the middle of the largest tensor of a file."""
    with zipfile.ZipFile(path) as archive:
        record = max((info for info in archive.infolist() if "/data/" in info.filename), key=lambda i: i.file_size)
    content = bytearray(path.read_bytes())
    header = record.header_offset
    content[header + 30 + sum(struct.unpack_from("<HH", content, header + 26)) + record.file_size // 2] ^= 16
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("stage, to", [(1, 3), (3, 2)])
def test_every_byte_is_read_once(copy, stage, to):
    """Over all ranks: each its own part, and one of them what all need."""
    folder = copy(stage)

    def patch():
        check = loader.Reader.check_together

        def disjoint(self, share):
            seen = {}
            for records in share(self.spans):
                for key, numbers in records.items():
                    seen.setdefault(key, []).extend(zip(*[iter(numbers)] * 3, strict=True))
            ends = [0]
            for intervals in seen.values():
                for (start, end, _), (after, *_) in itertools.pairwise([*sorted(intervals), (1 << 60,)]):
                    assert end <= after, intervals
                    ends.append(end - start)
            Path("bytes").write_text(str(sum(ends)))
            check(self, share)

        loader.Reader.check_together = disjoint

    job = {"name": ".", "stage": to, "optimizer": "AdamW", "groups": 2, "load": TAG}
    run(folder, 2, ZOO, json.dumps([job]), patch=patch)
    truth = load(folder / "truth.pt")
    held = [t for states in truth["states"].values() for t in states.values()]
    held += [
        *truth["extra"].values(),
        *truth["frozen"].values(),
        *(b for name, b in truth["buffers"].items() if name != "scratch"),
    ]
    needed = sum(t.numel() * t.element_size() for t in held)
    read = int((folder / "bytes").read_text())
    assert needed <= read < needed + 4 * 4 * 5  # a frozen weight is a view of a wider one


def test_weights_alone(tmp_path):
    """What a fine-tuning starts from: fp32 weights, frozen ones and buffers; the optimizer is a new one."""
    jobs = [{"name": str(stage), "stage": stage, "optimizer": "SGD", "groups": 2} for stage in (1, 2, 3)]
    run(tmp_path, 3, ZOO, json.dumps(jobs))
    goes_on = [
        {"name": str(stage), "stage": to, "optimizer": "SGD", "groups": 2, "load": TAG, "label": option}
        | {"options": {option: value}}
        for stage, to in ((1, 3), (3, 1), (2, 2))
        for option, value in (("load_module_only", True), ("load_optimizer_states", False))
    ]
    run(tmp_path, 2, ZOO, json.dumps(goes_on))
    for job in goes_on:
        folder = tmp_path / job["name"]
        saved, restored = (load(folder / f"{name}.pt") for name in ("truth", job["label"]))
        for what in ("states", "module", "frozen", "buffers"):
            for name in saved[what].keys() - {"scratch"}:
                value, other = (v["fp32"] if what == "states" else v for v in (saved[what][name], restored[what][name]))
                assert torch.equal(value, other), (job, name)
        assert (restored["counters"][0] == 3) == (job["label"] == "load_optimizer_states")


SLOW = [pytest.param(*more, marks=pytest.mark.slow) for more in [(1, 2), (3, 3)]]


@pytest.mark.parametrize("stage, ranks", [(2, 3), (3, 2), *SLOW])
def test_flipped_bit_of_a_shard(copy, stage, ranks):
    """torch.load() would not notice. On the ranks that wrote it and on others."""
    folder = copy(stage)
    path = flip(sorted((folder / TAG).glob("*zero_pp_rank_1_*_optim_states.pt"))[0])
    line = refused(folder, ranks, stage)
    assert path.name in line and "damaged" in line


@pytest.mark.parametrize("state", ["fp32", "exp_avg_sq"])
def test_flipped_bit_of_a_universal_checkpoint(copy, state):
    folder = copy(1)
    path = flip(folder / "universal" / "zero" / "first.weight" / f"{state}.pt")
    assert f"first.weight/{state}.pt is damaged" in refused(folder, 2, 3, "universal") and path.exists()


def test_missing_shard(copy):
    folder = copy(1)
    path = sorted((folder / TAG).glob("*_optim_states.pt"))[2]
    path.unlink()
    for ranks in (2, 3):
        assert f"{path.name} is missing" in refused(folder, ranks, 1)


def test_shard_of_another_step(copy):
    folder = copy(3)
    path = sorted((folder / TAG).glob("*_optim_states.pt"))[2]
    shard = load(path)
    for state in shard["optimizer_state_dict"]["optimizer_state_dict"]["state"].values():
        state["step"] += 1
    torch.save(shard, path)
    for ranks in (2, 3):
        assert path.name in (line := refused(folder, ranks, 3)) and "step" in line


def test_what_is_not_there(copy):
    nowhere = {"load_dir": "nowhere", "tag": None}
    tag, folder = all_refused(copy(2), 2, {"stage": 2, "load": "no"}, {"stage": 2, "options": nowhere})
    assert f"no does not exist; in . there is: {TAG}, universal" in tag
    assert "nowhere holds no checkpoint that is whole" in folder


@pytest.fixture
def find(tmp_path, checkpoint, monkeypatch):
    """find(latest, its hour, broken) is the tag that is taken. A folder gets tags of (step, hour of writing)."""

    def find(latest, written, broken=(), **tags):
        said = []
        (tmp_path / "latest").write_text(latest)
        os.utime(tmp_path / "latest", (3600 * written, 3600 * written))
        for tag, (step, hour) in tags.items():
            made = checkpoint(
                1, model=lambda m, step=step: m.update(global_steps=step), shard=lambda s, t=step: at_step(s, t)
            )
            made.rename(folder := tmp_path / tag)
            for path in folder.glob("*_model_states.pt"):
                os.utime(path, (3600 * hour, 3600 * hour))
            if tag in broken:
                next(folder.glob("*_optim_states.pt")).unlink()
        monkeypatch.setattr(loader, "say", said.append)
        taken = loader.find(tmp_path, None, False)[0].name
        later = [line for line in said if "was written after it" in line]
        assert len(said) - len(later) == len(broken) + (latest not in tags)  # one line for each that is passed over
        newer = [1 for step, hour in tags.values() if hour > written and step > tags.get(latest, (99,))[0]]
        assert len(later) == bool(newer)
        return taken

    return find


def at_step(shard, step):
    for state in states(shard):
        state["step"] = torch.tensor(float(step))


@pytest.mark.parametrize(
    "latest, written, broken, tags, taken",
    [
        ("a", 1, [], {"a": (10, 1), "b": (20, 2)}, "b"),  # killed before it wrote `latest`
        ("a", 3, [], {"a": (10, 1), "b": (20, 2)}, "a"),  # somebody goes back to a
        ("a", 2, [], {"a": (10, 2), "b": (20, 1)}, "a"),  # b is of an earlier run
        ("b", 2, ["b"], {"a": (10, 1), "b": (20, 2)}, "a"),
        ("a", 1, ["b"], {"a": (10, 1), "b": (20, 2)}, "a"),
        ("gone", 1, [], {"a": (10, 2), "b": (20, 1)}, "b"),
    ],
)
def test_the_newest_that_is_whole(find, latest, written, broken, tags, taken):
    assert find(latest, written, broken, **tags) == taken


def test_another_model(copy):
    changes = ({"wider": 8}, {"rename": True}, {"groups": 3})
    wider, renamed, grouped = all_refused(copy(1), 2, *({"stage": 1} | change for change in changes))
    assert "rows is (9, 8) here, and (9, 7) in" in wider
    assert "trained here, and not in the checkpoint (1): renamed" in renamed
    assert "is in parameter group" in grouped


def test_machines_without_a_shared_folder(copy):
    """A machine that has only the shards of its own ranks."""
    folder = copy(1)

    def patch():
        scandir = os.scandir
        if os.environ["RANK"] == "1":
            os.scandir = lambda path: [e for e in scandir(path) if "rank_2_" not in e.name]

    assert "must be shared, or mirror.gather() before" in refused(folder, 2, 1, patch=patch)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("ranks", [3, 2])
def test_another_layout(copy, stage, ranks):
    """A version of DeepSpeed that cuts shards otherwise: what the engine holds is compared on every load."""
    at = {1: (r"flat\.numel\(\), at\)", "flat.numel(), at + 1)"), 3: (r"at \+= share if", "at += share + 1 if")}
    line = refused(copy(stage), ranks, stage, patch=edited(at[stage]))
    assert " as expected: " in line and " in the model, " in line


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_vanishes(copy, by):
    """The others end at once when it dies, and after the time that is set when it is stopped; rank 0 names it."""
    folder = copy(1)

    def patch():
        fill = loader.Reader.fill

        def vanish(*args):
            if os.environ["RANK"] == "1":
                os.kill(os.getpid(), by)
            fill(*args)

        loader.Reader.fill = vanish

    job = {"name": ".", "stage": 1, "optimizer": "AdamW", "groups": 2, "load": TAG, "options": {"timeout": 4}}
    began = time.monotonic()
    launch(folder, 3, ZOO, json.dumps([job]), patch=patch, limit=20, grace=8)
    lines = [(folder / f"losses.refused.{rank}").read_text() for rank in (0, 2)]
    assert time.monotonic() - began < 25 and not any("\n" in line for line in lines), lines
    assert "a rank does not answer" in lines[1] and "Rank 1 failed" in lines[0], lines


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("tag", [TAG, "universal"])
def test_the_description_holds_no_data(saved, stage, tag):
    """Rank 0 sends it to every rank, and a rank's share of the moments can be gigabytes."""

    def tensors(value):
        if isinstance(value, torch.Tensor):
            return [value]
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        return [tensor for part in parts for tensor in tensors(part)]

    description = loader.describe(saved / str(stage) / tag)
    model, optimizer = loader.unpack(description.models), loader.unpack(description.optimizer)
    assert model["global_steps"] == 3 and optimizer["param_groups"]
    assert all(tensor.numel() == 1 for tensor in tensors([model, optimizer]))
    assert len(pickle.dumps(description)) < 64000


@pytest.mark.parametrize("first", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(8, 80, 8))])
def test_random_engines(first):
    """python tests/random_engines.py 0 300 tries as many as one likes."""
    assert random_engines.main(first, first + 8) == 0


def test_what_it_needs(monkeypatch):
    """A DeepSpeed that is too old, and a second copy of the file, are each one line before anything is read."""
    monkeypatch.setattr(loader.deepspeed, "__version__", "0.15.4+cpu")
    with pytest.raises(universal.CheckpointError, match=r"needs DeepSpeed 0\.16\.4 or newer, and finds 0\.15\.4"):
        universal.load_checkpoint(None, "nowhere")
    monkeypatch.setattr(loader.deepspeed.DeepSpeedEngine, "universal", "/elsewhere/universal.py", raising=False)
    with pytest.raises(universal.CheckpointError, match="two copies of universal.py: /elsewhere/universal.py is"):
        universal.install()
