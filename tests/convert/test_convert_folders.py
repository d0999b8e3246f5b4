"""What the converter reads, where it writes, and what it leaves alone; its command line."""

import os
import shutil
import time

import pytest
from helpers import content, converter

from universal import CheckpointError, convert
from universal.checkpoint import is_newer


@pytest.fixture
def source(laid_out):
    return laid_out(1)


# -----------------------------------------------------------------------------
# which checkpoint


def test_folder_above(source, monkeypatch):
    """What Trainer, Lightning and accelerate write: `latest`, or the only tag in a folder, says what is meant. The
    output stands beside it, also where the input is the folder that one is in."""
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
    converts(tag)
    monkeypatch.chdir(tag)
    for folder in (".", ".."):
        converts(folder)
    shutil.copytree(tag, above / "a later one")
    with pytest.raises(CheckpointError, match="several .*a later one, global_step500"):
        convert(above)
    (above / "latest").write_text("global_step500\n")
    converts(above)
    (above / "latest").write_text("gone")
    with pytest.raises(CheckpointError, match="checkpoint-500/gone does not exist"):
        convert(above)
    with pytest.raises(CheckpointError, match="holds no .*: it is no ZeRO checkpoint, nor a folder above"):
        convert(above.parent)
    assert sorted(os.listdir(above)) == ["a later one", "global_step500", "latest"]


def test_command_line(source):
    """One flag is enough, DeepSpeed's are taken; a line of figures, or one line of error and exit code 2."""
    flags = ("--num_extract_workers", 4, "--num_merge_workers", 4, "--inject_missing_state", "--keep_temp_folder")
    done = converter(source.parent)
    assert done.code == 0 and done.out.startswith(f"{source} -> {source}_universal: 3 parameters") and not done.err
    done = converter(f"{source}/", source.parent / "u", *flags, "--verify")
    assert done.code == 0 and done.out.startswith(f"{source} -> {source.parent}/u: 3 parameters")
    assert content(source.parent / "u") == content(f"{source}_universal")
    shutil.copytree(source, source.with_name("d"))
    done = converter(source.parent)
    assert done.code == 2 and done.err.count("\n") == 1 and done.err.endswith(": c, d\n")
    done = converter(source.parent / "no", source.parent / "v")
    assert done.code == 2 and done.err == f"ds_to_universal: error: {source.parent}/no does not exist\n"
    for flag in ("--num_extract_workers", "--num_merge_workers"):
        done = converter(source, source.parent / "v", flag, 0)
        assert done.code == 2 and done.err.endswith("--num_merge_workers are at least 1\n")


def test_a_folder_that_took_the_place_of_a_converted_one(tmp_path):
    """mv keeps the times of the files: what the loader has converted before is of another checkpoint."""
    for tag in ("t", "other"):
        (tmp_path / tag).mkdir()
        (tmp_path / tag / "x.pt").touch()
    made = tmp_path / "t_universal" / "zero" / "optimizer_state.pt"
    made.parent.mkdir(parents=True)
    time.sleep(0.05)
    made.touch()
    assert is_newer(tmp_path / "t_universal", tmp_path / "t")
    time.sleep(0.05)
    (tmp_path / "t").rename(tmp_path / "gone")
    (tmp_path / "other").rename(tmp_path / "t")
    assert not is_newer(tmp_path / "t_universal", tmp_path / "t")


# -----------------------------------------------------------------------------
# where the result goes


@pytest.mark.parametrize("name", ["a[b]", "run+1", "with space", "trailing/"])
def test_any_folder_name(source, name):
    """No character in a path means anything, and a trailing slash changes nothing."""
    convert(f"{source}/", f"{source.parent}/out/{name}")
    name, above = name.strip("/"), source.parent / "out"
    assert (above / "latest_universal").read_text() == name
    assert len(list((above / name / "zero").rglob("exp_avg.pt"))) == 3
    assert sorted(os.listdir(above)) == sorted([name, "latest_universal"])


def test_an_older_result_is_replaced_whole(source):
    output = source.parent / "u"
    convert(source, output)
    wanted = content(output)
    (output / "zero" / "left over").mkdir()
    (output / "zero" / "left over" / "fp32.pt").touch()
    convert(source, output)
    assert content(output) == wanted


def test_what_is_no_universal_checkpoint_is_left_alone(source, tmp_path):
    """A folder that holds the input, at any depth and by any path, the input itself, and a universal checkpoint in
    which something else lies."""
    run1, precious = tmp_path / "run1", tmp_path / "other"
    for output in (run1, precious):
        convert(source, output)
    later = run1 / "later" / "global_step200"
    shutil.copytree(source, later)
    (tmp_path / "link").symlink_to(run1)
    (precious / "notes.txt").write_text("mine")
    before = content(tmp_path)
    for output in (later, later.parent, run1, tmp_path / "link", precious, tmp_path, "/"):
        with pytest.raises(CheckpointError, match="is not a universal checkpoint"):
            convert(later, output)
    assert content(tmp_path) == before


def test_latest_universal_is_a_file(source, tmp_path):
    with pytest.raises(CheckpointError, match="latest_universal is the name of the file"):
        convert(source, tmp_path / "latest_universal")
    (tmp_path / "latest_universal").mkdir()
    with pytest.raises(CheckpointError, match="latest_universal is the name of the file"):
        convert(source, tmp_path / "u")
    assert sorted(os.listdir(tmp_path)) == ["c", "latest_universal"] and not os.listdir(tmp_path / "latest_universal")


def test_output_behind_a_link(source, tmp_path):
    """An output that is a link to a folder elsewhere: that folder is replaced, the link stays, and nothing is left
    beside either."""
    elsewhere, output = tmp_path / "disk" / "u", tmp_path / "out" / "u"
    convert(source, elsewhere)
    wanted = content(elsewhere)
    (elsewhere / "zero" / "left over").touch()
    output.parent.mkdir()
    output.symlink_to(elsewhere)
    convert(source, output)
    assert content(elsewhere) == wanted and sorted(os.listdir(elsewhere.parent)) == ["latest_universal", "u"]
    assert output.is_symlink() and os.listdir(output.parent) == ["u"]
