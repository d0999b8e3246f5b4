"""A folder into which two saves have written. Files of the first that the second has not replaced are left over: the
converter names them in one line, and neither it nor the export looks into them. What is mixed is refused."""

import os
import shutil
import warnings
from collections import OrderedDict

import pytest
import torch
from helpers import SHAPES, content, edit, load, states

from harness.lay_out import lay_out
from universal import CheckpointError, convert
from universal.safetensors import export

OPTIM, MODEL = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt", "zero_pp_rank_{}_mp_rank_00_model_states.pt"


@pytest.fixture
def saved(tmp_path):
    """saved(name, ranks, stage, dtype, step): another checkpoint of the same parameters."""

    def make(name, ranks, stage, dtype="bf16_", step=100):
        folder = tmp_path / name
        lay_out(folder, [OrderedDict(group) for group in SHAPES], ranks, stage)
        edit(folder, "*_model_*", lambda model: model.update(global_steps=step))
        edit(folder, "*_optim_*", lambda shard: [state["step"].fill_(step) for state in states(shard)])
        for path in list(folder.glob("bf16_*")) if dtype != "bf16_" else ():
            torch.save(load(path), path.with_name(path.name.replace("bf16_", dtype)))
            path.unlink()
        return folder

    return make


def results(folder, output):
    """Every byte of the conversion and of the export, and what is said of files that are left over."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UserWarning)
        convert(folder, output / "u", check=True)
        converted = len(told)
        export(folder, output / "x.safetensors")
    texts = [str(one.message) for one in told]
    of_both = [[text for text in said if "left over" in text] for said in (texts[:converted], texts[converted:])]
    assert of_both[0] == of_both[1]
    return content(output), of_both[0]


def damage(path):
    path.write_bytes(path.read_bytes()[:-100])


def of_experts(path):
    content = load(path)
    content["optimizer_state_dict"] = {"expert": os.getcwd}
    torch.save(content, path)


@pytest.mark.parametrize(
    "change", [lambda path: None, damage, of_experts], ids=["whole", "damaged", "of another class"]
)
@pytest.mark.parametrize("before, stage", [(1, 1), (3, 3), (1, 3), (3, 1)])
def test_saved_again_by_fewer_ranks(saved, tmp_path, before, stage, change):
    """On 4 ranks, then on 2; also at another stage."""
    old, new = saved("old", 4, before), saved("new", 2, stage, step=200)
    wanted, told = results(new, tmp_path / "wanted")
    assert not told
    left = {path.name for path in old.iterdir()} - {path.name for path in new.iterdir()}
    assert {OPTIM.format(2), OPTIM.format(3)} <= left and (before == 1 or MODEL.format(3) in left)
    shutil.copytree(new, old, dirs_exist_ok=True)
    for name in left:
        change(old / name)
    files = content(old)
    got, (text,) = results(old, tmp_path / "got")
    assert got == wanted and content(old) == files
    assert str(old) in text and min(left) in text and (len(left) <= 3 or f"and {len(left) - 3} more" in text)


@pytest.mark.parametrize("first, second", [("bf16_", ""), ("", "bf16_")])
def test_saved_again_in_another_dtype(saved, tmp_path, first, second):
    """Both have all their shards: the newest counts. With a shard of the second missing, it is not whole."""
    old, new = saved("old", 3, 1, first), saved("new", 3, 1, second, step=200)
    wanted, _ = results(new, tmp_path / "wanted")
    left = {path.name for path in old.glob("*_optim_*")}
    shutil.copytree(new, old, dirs_exist_ok=True)
    got, (text,) = results(old, tmp_path / "got")
    assert got == wanted and all(name in text for name in left)


def mixed(old, new):
    """{what is wrong: files of the second save, by 2 ranks, that are not there yet, or are gone}"""
    models = [path.name for path in new.glob("*_model_*")]
    return {
        "the model states of 4 ranks": models,
        "a shard of 4 ranks": [OPTIM.format(1)],
        "rank 0's shard of 4 ranks": [OPTIM.format(0)],
        "both shards of 4 ranks": [OPTIM.format(0), OPTIM.format(1)],
    }


@pytest.mark.parametrize("stage", [1, 3])
def test_half_of_two_saves(saved, tmp_path, stage):
    """Killed anywhere between its files, the second save leaves no checkpoint: refused in one line."""
    old, new = saved("old", 4, stage), saved("new", 2, stage)  # of one step: nothing but the counts tells them apart
    for what, names in mixed(old, new).items():
        folder = tmp_path / "mixed"
        shutil.copytree(old, folder)
        for path in new.iterdir():
            if path.name not in names:
                shutil.copy(path, folder)
        for work in (lambda: convert(folder, tmp_path / "u"), lambda: export(folder, tmp_path / "x.safetensors")):  # noqa: B023
            with pytest.raises(CheckpointError, match=str(folder)) as error:
                work()
            assert "\n" not in str(error.value), what
        shutil.rmtree(folder)
    assert sorted(os.listdir(tmp_path)) == ["new", "old"]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_shard_that_is_missing_or_of_another_step(saved, tmp_path, stage):
    """Among those that count, with others left over beyond."""
    old, new, other = saved("old", 4, stage), saved("new", 2, stage, step=200), saved("other", 2, stage, step=150)
    shutil.copytree(new, old, dirs_exist_ok=True)
    shutil.copy(other / OPTIM.format(1), old)
    with pytest.raises(CheckpointError, match=r"rank_1_.* is at optimizer step 150\.0, .*rank_0_.* at 200\.0"):
        convert(old, tmp_path / "u")
    (old / OPTIM.format(1)).unlink()
    for work in (lambda: convert(old, tmp_path / "u"), lambda: export(old, tmp_path / "x.safetensors")):
        with pytest.raises(CheckpointError, match=f"{OPTIM.format(1)} is missing"):
            work()
