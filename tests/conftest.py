"""Fixtures. Scripts run on ranks that support/ranks.py forks from this process;
lesson/test_launch.py starts the real launchers."""

import os
from pathlib import Path

import pytest

# An assert that fails on a rank says what was compared, as those of tests do.
RANKS = Path(__file__).with_name("ranks")
pytest.register_assert_rewrite("tests.support", *(path.stem for path in RANKS.glob("*.py")))

# Before a module imports DeepSpeed. A machine with GPUs may have fewer than a test has ranks.
if os.environ.setdefault("DS_ACCELERATOR", "cpu") == "cpu":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("work")


@pytest.fixture
def laid_out(tmp_path):
    """laid_out(stage, model=change, shard=change): a checkpoint of 2 ranks, with the parameters a,
    b and c in 2 groups or those of other shapes, in tmp_path/c; its contents changed."""
    from tests.support.files import SHAPES, edit
    from tests.support.lay_out import lay_out  # which needs DeepSpeed

    def make(stage=1, model=None, shard=None, shapes=None):
        folder = tmp_path / "c"
        lay_out(folder, shapes or SHAPES, 2, stage)
        for pattern, change in (("*_model_*", model), ("*_optim_*", shard)):
            if change:
                edit(folder, pattern, change)
        return folder

    return make
