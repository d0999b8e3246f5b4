"""What the converter reads, where it writes, and what it leaves alone; its command line. Files of
an earlier save that the last one has not replaced are left over: it names them in one line, and
neither it nor the export looks into them. What is mixed is refused."""

import os
import shutil
import time
import warnings

import pytest
import torch
from helpers import SHAPES, content, converter, edit, failed, load, not_converted, states

from measure.lay_out import lay_out
from universal import CheckpointError, convert
from universal.safetensors import export
from universal.tags import is_newer


@pytest.fixture
def source(laid_out):
    return laid_out(1)


def test_folder_above(source, monkeypatch):
    """What Trainer, Lightning and accelerate write: `latest`, or the only tag in a folder, says
    what is meant. The output stands beside it, also where the input is the folder that one is
    in."""
    above = source.parent / "checkpoint-500"
    tag, result = above / "global_step500", above / "global_step500_universal"
    above.mkdir()
    source.rename(tag)

    def converts(folder):
        convert(folder)
        assert (result / "zero" / "a" / "fp32.pt").is_file()
        assert (above / "latest_universal").read_text() == result.name
        shutil.rmtree(result)
        (above / "latest_universal").unlink()

    for folder in (above, f"{above}/", tag, f"{tag}/"):
        converts(folder)
    (tag / "latest").write_text("another")  # it is the checkpoint itself
    monkeypatch.chdir(tag)
    for folder in (tag, ".", ".."):
        converts(folder)
    shutil.copytree(tag, above / "a later one")
    not_converted(above, "several", "a later one, global_step500")
    (above / "latest").write_text("global_step500\n")
    converts(above)
    (above / "latest").write_text("gone")
    not_converted(above, "checkpoint-500/gone does not exist")
    not_converted(
        above.parent, "holds no *_optim_states.pt: it is no ZeRO checkpoint, nor a folder above"
    )
    assert sorted(os.listdir(above)) == ["a later one", "global_step500", "latest"]


def test_command_line(source, tmp_path):
    """One flag is enough, DeepSpeed's are taken; a line of figures, or one line of error and exit
    code 2."""
    flags = (
        "--num_extract_workers",
        4,
        "--num_merge_workers",
        4,
        "--inject_missing_state",
        "--keep_temp_folder",
    )
    done = converter(tmp_path)
    assert (
        done.code == 0
        and done.out.startswith(f"{source} -> {source}_universal: 3 parameters")
        and not done.err
    )
    done = converter(f"{source}/", tmp_path / "u", *flags, "--verify")
    assert done.code == 0 and done.out.startswith(f"{source} -> {tmp_path}/u: 3 parameters")
    assert content(tmp_path / "u") == content(f"{source}_universal")
    shutil.copytree(source, tmp_path / "d")
    failed(converter(tmp_path), 2, ": c, d\n")
    failed(
        converter(tmp_path / "no", tmp_path / "v"),
        2,
        f"ds_to_universal: error: {tmp_path}/no does not exist\n",
    )
    failed(
        converter(source, "/proc/safety/u"),
        1,
        "ds_to_universal: error: [Errno 2] No such file or directory: ",
    )
    for flag in ("--num_extract_workers", "--num_merge_workers"):
        assert converter(source, tmp_path / "v", flag, 0).err.endswith(
            "--num_merge_workers are at least 1\n"
        )


def test_a_folder_that_took_the_place_of_a_converted_one(tmp_path):
    """mv keeps the times of the files: what the loader has converted before is of another
    checkpoint."""
    made = tmp_path / "t_universal" / "zero" / "optimizer_state.pt"
    for path in (tmp_path / "t" / "x.pt", tmp_path / "other" / "x.pt", made):
        path.parent.mkdir(parents=True)
        path.touch()
        time.sleep(0.05)
    assert is_newer(tmp_path / "t_universal", tmp_path / "t")
    (tmp_path / "t").rename(tmp_path / "gone")
    (tmp_path / "other").rename(tmp_path / "t")
    assert not is_newer(tmp_path / "t_universal", tmp_path / "t")


@pytest.fixture
def saved(tmp_path):
    """saved(name, ranks, stage, dtype, step): another checkpoint of the same parameters."""

    def make(name, ranks, stage, dtype="bf16_", step=100):
        folder = tmp_path / name
        lay_out(folder, SHAPES, ranks, stage)
        config = {"bf16": {"enabled": dtype == "bf16_"}}
        edit(folder, "*_model_*", lambda model: model.update(global_steps=step, ds_config=config))
        edit(
            folder,
            "*_optim_*",
            lambda shard: [state["step"].fill_(step) for state in states(shard)],
        )
        for path in list(folder.glob("bf16_*")) if dtype != "bf16_" else ():
            torch.save(load(path), folder / path.name.replace("bf16_", dtype))
            path.unlink()
        return folder

    return make


def results(folder, output):
    """Every byte of the conversion and of the export, and what each says of files that are left
    over."""
    told = []
    for work, name in ((convert, "u"), (export, "x.safetensors")):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", UserWarning)
            work(folder, output / name)
        told.append([str(one.message) for one in said if "left over" in str(one.message)])
    assert told[0] == told[1]
    return content(output), told[0]


EXPERTS = {"optimizer_state_dict": {"expert": os.getcwd}}
CHANGES = {
    "none": lambda path: None,
    "damage": lambda path: os.truncate(path, 999),
    "of experts": lambda path: edit(
        path.parent, path.name, lambda content: content.update(EXPERTS)
    ),
}
AGAIN = [
    ((4, 1), (2, 1)),
    ((4, 3), (2, 3)),
    ((4, 1), (2, 3)),
    ((4, 3), (2, 1)),
]  # ranks, stage, dtype
AGAIN += [((3, 1, "bf16_"), (3, 1, "")), ((3, 1, ""), (3, 1, "bf16_"))]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("before, after", AGAIN)
def test_saved_again(saved, tmp_path, before, after, change):
    """By fewer ranks, also at another stage, or in another dtype: the newest counts, also where
    both have all their shards."""
    old, new = saved("old", *before), saved("new", *after, step=200)
    wanted, nothing = results(new, tmp_path / "wanted")
    left = {path.name for path in old.iterdir()} - {path.name for path in new.iterdir()}
    shutil.copytree(new, old, dirs_exist_ok=True)
    for name in left:
        CHANGES[change](old / name)
    files = content(old)
    got, (text,) = results(old, tmp_path / "got")
    assert got == wanted and content(old) == files and not nothing
    assert (
        str(old) in text
        and min(left) in text
        and (len(left) <= 3 or f"and {len(left) - 3} more" in text)
    )


@pytest.mark.parametrize("stage", [1, 3])
def test_half_of_two_saves(saved, tmp_path, stage):
    """Killed anywhere between its files, the second save leaves no checkpoint: refused in one
    line."""
    old, new = (
        saved("old", 4, stage),
        saved("new", 2, stage),
    )  # of one step: nothing but the counts tells them apart
    models, shards = (
        {path.name for path in new.glob(f"*_{kind}_*")} for kind in ("model", "optim")
    )
    for missing in (models, shards, *({shard} for shard in shards)):
        mixed = shutil.copytree(old, tmp_path / "mixed")
        for name in (models | shards) - missing:
            shutil.copy(new / name, mixed)
        for work, output in ((convert, "u"), (export, "x.safetensors")):
            with pytest.raises(CheckpointError, match=str(mixed)) as error:
                work(mixed, tmp_path / output)
            assert "\n" not in str(error.value), missing
        shutil.rmtree(mixed)
    assert sorted(os.listdir(tmp_path)) == ["new", "old"]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_shard_that_is_missing_or_of_another_step(saved, tmp_path, stage):
    """Among those that count, with others left over beyond."""
    old, new, other = (
        saved("old", 4, stage),
        saved("new", 2, stage, step=200),
        saved("other", 2, stage, step=150),
    )
    shutil.copytree(new, old, dirs_exist_ok=True)
    shard = shutil.copy(max(other.glob("*_optim_*")), old)
    not_converted(old, f"{shard} is at optimizer step 150.0", "at 200.0")
    os.unlink(shard)
    not_converted(old, f"{shard} is missing")


@pytest.mark.parametrize("name", ["a[b]", "run+1", "with space", "trailing/"])
def test_any_folder_name(source, tmp_path, name):
    """No character in a path means anything, and a trailing slash changes nothing."""
    convert(f"{source}/", f"{tmp_path}/out/{name}")
    assert (tmp_path / "out" / "latest_universal").read_text() == name.strip("/")
    assert len(list((tmp_path / "out" / name / "zero").rglob("exp_avg.pt"))) == 3


def test_what_is_no_universal_checkpoint_is_left_alone(source, tmp_path):
    """A folder that holds the input, at any depth and by any path, the input itself, a universal
    checkpoint in which something else lies, and the names of the file that points to the output."""
    run1, precious = tmp_path / "run1", tmp_path / "other"
    for output in (run1, precious):
        convert(source, output)
    later = shutil.copytree(source, run1 / "later" / "global_step200")
    (tmp_path / "link").symlink_to(run1)
    (precious / "notes.txt").write_text("mine")
    (tmp_path / "taken" / "latest_universal").mkdir(parents=True)
    before = content(tmp_path)
    named = (tmp_path / "latest_universal", tmp_path / "taken" / "u")
    for output in (later, later.parent, run1, tmp_path / "link", precious, tmp_path, "/", *named):
        words = (
            "latest_universal is the name of the file"
            if output in named
            else "is not a universal checkpoint"
        )
        with pytest.raises(CheckpointError, match=words):
            convert(later, output)
    assert content(tmp_path) == before


def test_output_behind_a_link(source, tmp_path):
    """An output that is a link to a folder elsewhere: that folder is replaced whole, the link
    stays, and nothing is left beside either."""
    elsewhere, output = tmp_path / "disk" / "u", tmp_path / "out" / "u"
    convert(source, elsewhere)
    wanted = content(elsewhere)
    (elsewhere / "zero" / "left over").touch()
    output.parent.mkdir()
    output.symlink_to(elsewhere)
    convert(source, output)
    assert content(elsewhere) == wanted and sorted(os.listdir(elsewhere.parent)) == [
        "latest_universal",
        "u",
    ]
    assert output.is_symlink() and os.listdir(output.parent) == ["u"]
