"""What the converter reads, where it writes, and what it leaves alone; its command line. Files of
an earlier save that the last one has not replaced are left over: it names them in one line, and
does not look into them. What is mixed is refused."""

import errno
import os
import shutil
import warnings

import pytest
import torch

from tests.support.commands import converter, failed
from tests.support.conversions import not_converted, settled
from tests.support.files import SHAPES, content, each_state, edit, load
from tests.support.lay_out import lay_out
from universal import CheckpointError, convert


@pytest.fixture
def source(laid_out):
    return laid_out(1)


def test_folder_above(source, monkeypatch):
    """What Trainer, Lightning and accelerate write: `latest`, or the only tag in a folder, says
    what is meant. The output stands beside it, also where the input is the folder that one is
    in."""
    above = source.parent / "run" / "checkpoint-500"
    tag = above / "global_step500"
    result = above / "global_step500_universal"
    above.mkdir(parents=True)
    source.rename(tag)

    def converts(folder):
        convert(folder)
        assert (result / "zero" / "a" / "fp32.pt").is_file()
        assert (above / "latest_universal").read_text() == result.name
        shutil.rmtree(result)
        (above / "latest_universal").unlink()

    converts(f"{above}/")
    # This folder is the checkpoint itself, whatever `latest` says.
    (tag / "latest").write_text("another")
    monkeypatch.chdir(tag)
    for folder in (f"{tag}/", ".", ".."):
        converts(folder)
    shutil.copytree(tag, above / "a later one")
    not_converted(above, "`latest` names none", "begins with a later one")
    (above / "latest").write_text("global_step500\n")
    converts(above)
    (above / "latest").write_text("gone")
    not_converted(above, "`latest` names gone, and a resume begins with a later one")
    nothing = "holds no *_optim_states.pt: it is no ZeRO checkpoint, nor a folder above"
    not_converted(above.parent, nothing)


def test_a_bucket_that_renames_no_folders(source, tmp_path, monkeypatch):
    """One line, before anything is written; nothing is left."""
    rename = os.rename

    def of_files(source, target):
        if os.path.isdir(source):
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), source)
        rename(source, target)

    monkeypatch.setattr(os, "rename", of_files)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match="renames no folders, as mounted buckets: convert to"):
        convert(source)
    assert sorted(tmp_path.rglob("*")) == before


def test_command_line(source, tmp_path):
    """One flag is enough, DeepSpeed's are taken; a line of figures, or one line of error and exit
    code 2."""
    done = converter(tmp_path)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"{source} -> {source}_universal: 3 parameters")
    flags = "--inject_missing_state --keep_temp_folder --verify".split()
    workers = "--num_extract_workers 4 --num_merge_workers 4".split()
    output = tmp_path / "out" / "a[b] +1"  # no character of a path means anything
    done = converter(f"{source}/", output, *workers, *flags)
    assert done.code == 0 and done.out.startswith(f"{source} -> {output}: 3 parameters")
    settled(output, content(f"{source}_universal"))
    done = converter(tmp_path / "no", tmp_path / "v")
    failed(done, 2, f"ds_to_universal: error: {tmp_path}/no does not exist\n")
    done = converter(source, tmp_path / "v", "--num_merge_workers", 0)
    assert done.err.endswith("--num_merge_workers are at least 1\n")


@pytest.fixture
def saved(tmp_path):
    """saved(name, ranks, stage, dtype, step): another checkpoint of the same parameters."""

    def make(name, ranks, stage, dtype="bf16", step=100):
        folder = tmp_path / name
        lay_out(folder, SHAPES, ranks, stage)
        edit(folder, "*_model_*", lambda model: model.update(global_steps=step))
        edit(folder, "*_optim_*", each_state(lambda state: state["step"].fill_(step)))
        if dtype == "fp32":
            for path in list(folder.glob("bf16_*")):
                torch.save(load(path), folder / path.name.removeprefix("bf16_"))
                path.unlink()
        return folder

    return make


def test_saved_without_zero(laid_out):
    source = laid_out(1, model=lambda model: model.update(param_shapes=None))
    for shard in source.glob("*_optim_*"):
        shard.unlink()
    not_converted(source, "was saved without ZeRO: resume it without ZeRO")


def results(folder, output):
    """Every byte of the conversion, and what it says of files that are left over."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        convert(folder, output / "u")
    messages = [str(warning.message) for warning in caught]
    return content(output), [message for message in messages if "left over" in message]


# Ranks, stage and dtype of both saves.
OTHERWISE = {
    "zero1_then_zero3": ((4, 1), (2, 3)),
    "zero3_then_zero1": ((4, 3), (2, 1)),
    "bf16_then_fp32": ((3, 1, "bf16"), (3, 1, "fp32")),
}


@pytest.mark.parametrize("before, after", OTHERWISE.values(), ids=OTHERWISE)
def test_saved_again_otherwise(saved, tmp_path, before, after):
    """At another stage, or in another dtype: refused, until files of the earlier save are gone."""
    old = saved("old", *before)
    new = saved("new", *after, step=200)
    wanted, _ = results(new, tmp_path / "wanted")
    left = set(os.listdir(old)) - set(os.listdir(new))
    shutil.copytree(new, old, dirs_exist_ok=True)
    not_converted(
        old, "was saved twice under its name, at other stages or in other dtypes", strict=False
    )
    for name in left:
        os.unlink(old / name)
    assert results(old, tmp_path / "got")[0] == wanted


@pytest.mark.parametrize("stage", [1, 3])
def test_saved_again(saved, tmp_path, stage):
    """By fewer ranks, or without experts: the newest counts. What is left over is not looked
    into; a shard that counts must be there, and of the same step."""
    old = saved("old", 4, stage)
    new = saved("new", 2, stage, step=200)
    (old / "layer_0_expert_0_mp_rank_00_model_states.pt").touch()
    wanted, nothing = results(new, tmp_path / "wanted")
    left = set(os.listdir(old)) - set(os.listdir(new))
    shutil.copytree(new, old, dirs_exist_ok=True)
    os.truncate(old / max(left), 999)
    files = content(old)
    got, (text,) = results(old, tmp_path / "got")
    assert got == wanted and content(old) == files and not nothing
    assert str(old) in text and min(left) in text
    assert len(left) <= 3 or f"and {len(left) - 3} more" in text
    # Of those that count.
    (other,) = saved("other", 2, stage, step=150).glob("*_rank_1_*_optim_*")
    shard = shutil.copy(other, old)
    not_converted(old, f"{shard} is at optimizer step 150.0", "at 200.0")
    os.unlink(shard)
    not_converted(old, f"{shard} is missing")


def test_nvme_left_over(laid_out, tmp_path):
    """The folder of swapped states counts unless the config says that there are none."""

    def on(config):
        source = laid_out(3, model=lambda model: model.update(ds_config=config))
        (source / "offloaded_tensors").mkdir()
        return source

    for config in (device_config("nvme"), "of a path alone"):
        not_converted(on(config), "has NVMe-offloaded states, which are not converted")
    convert(on(device_config("cpu")), tmp_path / "u")


def device_config(device):
    return {"zero_optimization": {"offload_optimizer": {"device": device}}}


@pytest.mark.parametrize("stage", [1, 3])
def test_half_of_two_saves(saved, tmp_path, stage):
    """Killed anywhere between its files, the second save leaves no checkpoint: refused in one
    line."""
    # Of one step: nothing but the counts tells them apart.
    old = saved("old", 4, stage)
    new = saved("new", 2, stage)
    models = set(new.glob("*_model_*"))
    shards = set(new.glob("*_optim_*"))
    for missing in (models, shards, *({shard} for shard in shards)):
        mixed = shutil.copytree(old, tmp_path / "mixed")
        for path in (models | shards) - missing:
            shutil.copy(path, mixed)
        with pytest.raises(CheckpointError, match=str(mixed)) as error:
            convert(mixed, tmp_path / "u")
        assert "\n" not in str(error.value), missing
        shutil.rmtree(mixed)
    assert sorted(os.listdir(tmp_path)) == ["new", "old"]


NOT_UNIVERSAL = "is not a universal checkpoint"
POINTER = "latest_universal is the name of the file"
OUTPUTS = {
    "the_input": ("run1/later/global_step200", NOT_UNIVERSAL),
    "universal_that_holds_the_input": ("run1", NOT_UNIVERSAL),
    "link_to_it": ("link", NOT_UNIVERSAL),
    "universal_with_something_else": ("other", NOT_UNIVERSAL),
    "root": ("/", NOT_UNIVERSAL),
    "name_of_the_pointer": ("latest_universal", POINTER),
    "folder_in_the_place_of_the_pointer": ("taken/u", POINTER),
}


@pytest.mark.parametrize("output, words", OUTPUTS.values(), ids=OUTPUTS)
def test_what_is_no_universal_checkpoint_is_left_alone(source, tmp_path, output, words):
    """A folder that holds the input, at any depth and by any path, the input itself, a universal
    checkpoint in which something else lies, and the names of the file that points to the output."""
    for name in ("run1", "other"):
        convert(source, tmp_path / name)
    later = shutil.copytree(source, tmp_path / "run1" / "later" / "global_step200")
    (tmp_path / "link").symlink_to(tmp_path / "run1")
    (tmp_path / "other" / "notes.txt").write_text("mine")
    (tmp_path / "taken" / "latest_universal").mkdir(parents=True)
    before = content(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        convert(later, tmp_path / output)
    assert content(tmp_path) == before


def test_output_behind_a_link(source, tmp_path):
    """An output that is a link to a folder elsewhere: that folder is replaced whole, the link
    stays, and nothing is left beside either."""
    elsewhere = tmp_path / "disk" / "u"
    output = tmp_path / "out" / "u"
    convert(source, elsewhere)
    wanted = content(elsewhere)
    (elsewhere / "zero" / "left over").touch()
    output.parent.mkdir()
    output.symlink_to(elsewhere)
    convert(source, output)
    settled(elsewhere, wanted)
    assert output.is_symlink() and os.listdir(output.parent) == ["u"]
