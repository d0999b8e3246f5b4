"""universal.load_checkpoint() where it must not go on, and the checkpoints that test_states.py has not."""

import json
import os
import shutil
import struct
import zipfile

import pytest
import torch
from conftest import run

import ds_to_universal
import universal

ZOO = "tests/zoo.py"
TAG = "global_step3"


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """<stage>/global_step3 of 3 ranks, at each ZeRO stage, and <stage>/universal."""
    folder = tmp_path_factory.mktemp("saved")
    jobs = [{"name": str(stage), "stage": stage, "optimizer": "AdamW", "groups": 2} for stage in (1, 2, 3)]
    run(folder, 3, ZOO, json.dumps(jobs))
    for stage in (1, 2, 3):
        ds_to_universal.convert(folder / str(stage) / TAG, folder / str(stage) / "universal")
    return folder


def refused(folder, ranks, stage, tag=TAG, patch=None, **job):
    """What all ranks say alike when they refuse to load the checkpoint."""
    job = {"name": ".", "stage": stage, "optimizer": "AdamW", "groups": 2, "load": tag} | job
    run(folder, ranks, ZOO, json.dumps([job]), patch=patch)
    lines = {(folder / f"losses.refused.{rank}").read_text() for rank in range(ranks)}
    assert len(lines) == 1, lines
    (line,) = lines
    assert "\n" not in line and not (folder / "losses.json").exists()
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


@pytest.mark.parametrize("stage, ranks", [(1, 2), (2, 3), (3, 2), (3, 3)])
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
    shard = torch.load(path, weights_only=False)
    for state in shard["optimizer_state_dict"]["optimizer_state_dict"]["state"].values():
        state["step"] += 1
    torch.save(shard, path)
    for ranks in (2, 3):
        assert path.name in (line := refused(folder, ranks, 3)) and "step" in line


def test_what_is_not_there(copy):
    folder = copy(2)
    assert f"no does not exist; in . there is: {TAG}, universal" in refused(folder, 2, 2, "no")
    assert "nowhere holds no checkpoint that is whole" in refused(
        folder, 2, 2, options={"load_dir": "nowhere", "tag": None}
    )


def test_another_model(copy):
    folder = copy(1)
    assert "rows is (9, 8) here, and (9, 7) in" in refused(folder, 2, 1, wider=8)
    assert "renamed is trained here, and not in the checkpoint" in refused(folder, 2, 1, rename=True)
    assert "is in parameter group" in refused(folder, 2, 1, groups=3)


def test_machines_without_a_shared_folder(copy):
    """A machine that has only the shards of its own ranks."""
    folder = copy(1)

    def patch():
        scandir = os.scandir
        if os.environ["RANK"] == "1":
            os.scandir = lambda path: [e for e in scandir(path) if "rank_2_" not in e.name]

    assert "must be shared" in refused(folder, 2, 1, patch=patch)


def test_untried_version(copy):
    folder = copy(1)

    def patch():
        universal.TRIED = ("0.1",)

    assert "was tried with DeepSpeed 0.1, not with" in refused(folder, 2, 1, patch=patch)
