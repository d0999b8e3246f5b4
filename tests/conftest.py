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
