"""inspect and load_checkpoint() agree on which checkpoint is taken, and on what is damaged: over
every row of test_load_refuses.py."""

import os
import shutil

import pytest

from tests.load.test_load_refuses import DAMAGES, SCRIPT, STEPS
from tests.support.commands import only_if
from tests.support.harms import options_in
from tests.support.ranks import run
from universal import CheckpointError
from universal.inspect import look

# The files are right: that a class, an argument, the optimizer or the model does not fit them, only
# a load can tell.
OF_THE_LOAD = {"moments_missing", "class_that_nobody_has", "folder_none"}
OF_THE_LOAD_AT_3 = {"frozen_param_shapes_missing_in_models"}
STAGES = [1, 3]


def rows():
    """Each at both stages; `make test` has every third once."""
    for i, name in enumerate(DAMAGES):
        for stage in STAGES:
            if name not in OF_THE_LOAD and (stage == 1 or name not in OF_THE_LOAD_AT_3):
                yield only_if(i % 3 == 0 and stage == STAGES[i % 2], stage, name)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """{stage: a folder with the checkpoints "t" and "later"}"""
    folders = {}
    for stage in STAGES:
        folders[stage] = tmp_path_factory.mktemp(f"zero{stage}")
        run(folders[stage], 2, SCRIPT, stage, "save")
    return folders


@pytest.mark.parametrize("stage, name", [*rows()])
def test_damages(saved, tmp_path, monkeypatch, stage, name):
    """What the row says that a load does: inspect names that tag as the one taken, or none, and the
    same fault. A load asks the engine's optimizer whether only some ranks make a state."""
    folder = shutil.copytree(saved[stage], tmp_path / "c")
    DAMAGES[name].change(folder)
    monkeypatch.chdir(folder)
    options = options_in(folder)
    outcome = DAMAGES[name].expected(stage)
    tag = options["tag"]
    try:
        view = look(options["load_dir"], None if tag is None else str(tag))
        takes = view["takes"]
        problems = [facts["problem"] for facts in view["tags"].values() if facts["problem"]]
    except CheckpointError as error:
        takes, problems = None, [str(error)]
    if outcome.verdict == "loads" or name == "second_moment_missing_on_rank_1":
        assert takes == os.path.normpath(outcome.tag), problems
    elif outcome.verdict == "refused":
        assert takes is None and problems
        says = "holds no" if name.startswith("tag_") else outcome.says
        assert tag is None or any(text in problems[0] for text in (says, STEPS)), problems
