"""Fixtures. Scripts run on ranks that measure/ranks.py forks from this process;
lesson/test_launch.py starts the real launchers."""

import os

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before a module imports DeepSpeed


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("work")
