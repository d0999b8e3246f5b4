"""Which of the checkpoints in a folder is loaded, if no tag is given: the order in which to try
them, and the line that says why."""

import os

import pytest
import torch

from universal import CheckpointError
from universal.checkpoint.describe import describe
from universal.checkpoint.tags import (
    choose_tag,
    find_tag,
    list_tags,
    named_by_latest,
    restore_all,
)
from universal.inspect import look

HOUR = 3600


@pytest.fixture
def tag(tmp_path):
    """tag(name, step, hour): a checkpoint that was written in this hour."""

    def make(name, step, hour, converted=False):
        folder = tmp_path / name
        folder.mkdir()
        if converted:
            (folder / "zero").mkdir()
        path = folder / "mp_rank_00_model_states.pt"
        torch.save({"global_steps": step}, path)
        os.utime(path, (hour * HOUR, hour * HOUR))

    return make


@pytest.fixture
def latest(tmp_path):
    """latest(name, text, hour): the file of that name, written in this hour."""

    def write(name, text, hour):
        (tmp_path / name).write_text(text)
        os.utime(tmp_path / name, (hour * HOUR, hour * HOUR))

    return write


def order(folder, **options):
    """The tags, in the order in which they are tried, and what is said about them."""
    choice = choose_tag(folder, **options)
    return [tag.name for tag in choice.to_try], choice.says


def test_latest_universal_beside_latest(tag, latest, tmp_path):
    """A job that loads converted checkpoints begins with the one that `latest_universal` names."""
    for step in (100, 150, 200):
        tag(f"step{step}", step, step)
    tag("step150_universal", 150, 300, converted=True)
    tag("step100_universal", 100, 400, converted=True)
    latest("latest", "step200", 200)
    latest("latest_universal", "step100_universal", 400)
    converted = ["step100_universal", "step150_universal"]
    names, [line] = order(tmp_path, converted_only=True)
    assert names == converted and line.startswith("`latest_universal` names step100_universal, ")
    assert order(tmp_path)[0][0] == "step200"
    (tmp_path / "latest").unlink()
    assert order(tmp_path)[0][0] == "step200"


def test_a_copy_of_an_early_one(tag, latest, tmp_path):
    """`cp -r step1 best`, long after: the run has not gone back."""
    for step in (1, 2, 3):
        tag(f"step{step}", step, step)
    tag("best", 1, 9)
    latest("latest", "step3", 3)
    assert order(tmp_path)[0][:2] == ["step3", "step2"]


def test_in_doubt(tag, latest, tmp_path):
    """What takes one alone takes that with which a resume begins, or none."""
    tag("step200", 200, 1)
    assert find_tag(tmp_path) == tmp_path / "step200"
    tag("step100", 100, 2)
    latest("latest", "step100", 3)
    assert find_tag(tmp_path) == tmp_path / "step100"
    latest("latest", "gone", 3)
    with pytest.raises(CheckpointError, match="names gone, and a resume begins with step100"):
        find_tag(tmp_path)


def test_others_by_step(tag, latest, tmp_path):
    """Whatever their times, which copies do not have; beside `latest` those come last behind which
    the run went back."""
    for hour, step in enumerate((1000, 200, 900)):
        tag(f"step{step}", step, hour)
    tag("converted", 900, 3, converted=True)  # comes behind what it was made of
    names, [line] = order(tmp_path)
    assert names == ["step1000", "step900", "converted", "step200"]
    assert line == f"{tmp_path} has no `latest`: step1000 is of the most steps"
    latest("latest", "step200", 5)
    assert order(tmp_path)[0] == ["step200", "step900", "converted", "step1000"]


def test_a_folder_below_another_run(tag, tmp_path):
    """The tags of the run above are not its own: a first start finds none."""
    tag("step100", 100, 1)
    assert list_tags(tmp_path / "new") == []
    (tmp_path / "new").mkdir()
    assert list_tags(tmp_path / "new") == [] and order(tmp_path / "new") == ([], [])
    (tmp_path / "new" / "latest").write_text("")
    assert list_tags(tmp_path / "new") == []


@pytest.mark.parametrize("text", ["step100/", "./step100", "../{0}/step100", "{1}/step100\n"])
def test_latest_with_a_path(tag, latest, tmp_path, text):
    """As DeepSpeed takes it."""
    tag("step100", 100, 1)
    tag("step200", 200, 2)
    latest("latest", text.format(tmp_path.name, tmp_path), 3)
    assert named_by_latest(tmp_path) == "step100"
    assert order(tmp_path)[0] == ["step100", "step200"]


LATEST = {
    "absent": (None, {}, "`latest` names x, which holds no checkpoint"),
    "damaged": (lambda path: path.write_text(""), {}, None),
    "cut": (
        lambda path: path.rename(path.with_name("mp_rank_01_model_states.pt")),
        {},
        "`latest` names x, which lacks rank 0's model states",
    ),
    "not converted": (
        lambda path: None,
        {"converted_only": True},
        "`latest_universal` names x, which holds no checkpoint that is converted",
    ),
}


@pytest.mark.parametrize("harm", LATEST)
def test_what_latest_names(tag, latest, tmp_path, harm):
    """One that cannot be taken has one reason, in one line."""
    act, options, line = LATEST[harm]
    if act:
        tag("x", 1, 1)
        act(tmp_path / "x" / "mp_rank_00_model_states.pt")
    latest("latest_universal" if options else "latest", "x", 2)
    tags, lines = order(tmp_path, **options)
    assert tags == [] and len(lines) == 1
    assert lines == [line] if line else lines[0].startswith("x is passed over: ")


@pytest.mark.parametrize("hour", range(1, 7))
def test_a_copy_with_two_branches(tag, latest, tmp_path, hour):
    """`latest` is taken, whenever it arrived: no time in a copy tells whether the run went back to
    step 3, or died before it wrote `latest`. A line says what to type for the other."""
    latest("latest", "step 5", hour)
    for time, step in enumerate((3, 5, 6, 9), 2):
        tag(f"step {step}", step, time)
    assert order(tmp_path) == (
        ["step 5", "step 3", "step 9", "step 6"],
        [
            "`latest` names step 5, which is taken, and step 9 is of a later step: to take that "
            f"one, `echo 'step 9' > {tmp_path / 'latest'}`"
        ],
    )
    latest("latest", "step 9\n", hour)
    assert order(tmp_path) == (["step 9", "step 6", "step 5", "step 3"], [])


def everything(folder):
    """Returns {path: time} of all that is in a folder."""
    return {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}


def test_listing_changes_nothing(tag, latest, tmp_path):
    """What a save has put aside is listed under its name; only a load gives it that back."""
    tag("step5", 5, 1)
    latest("latest", "step5", 2)
    aside = tmp_path / f".step5.{10**18}.replaced"
    (tmp_path / "step5").rename(aside)
    before = everything(tmp_path)
    assert list_tags(tmp_path) == ["step5"]
    assert order(tmp_path) == (
        ["step5"],
        [f"step5 is {aside.name} since a save of it died: a load gives it its name back"],
    )
    assert find_tag(tmp_path) == aside
    view = look(tmp_path)
    assert [*view["tags"]] == ["step5"] and view["says"]
    assert everything(tmp_path) == before
    restore_all(tmp_path)
    assert order(tmp_path) == (["step5"], []) and find_tag(tmp_path) == tmp_path / "step5"


def test_files_of_a_mac(tag, tmp_path):
    """Copies from there bring a ._NAME beside each file, which is nobody's damage."""
    tag("step5", 5, 1)
    for path in [*tmp_path.rglob("*")]:
        path.with_name(f"._{path.name}").write_bytes(b"\0\5\26\7")
    (tmp_path / "step6").mkdir()
    (tmp_path / "step6" / "._mp_rank_00_model_states.pt").write_bytes(b"\0\5\26\7")
    assert list_tags(tmp_path) == ["step5"] and order(tmp_path) == (["step5"], [])
    with pytest.raises(CheckpointError, match="step6 holds no .*optim_states.pt: it is no ZeRO"):
        describe(tmp_path / "step6")
