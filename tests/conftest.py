"""Fixtures. Scripts run on ranks that harness/ranks.py forks from this process; lesson/test_launch.py starts the real
launchers."""

import functools
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from helpers import SHAPES, edit, scramble

from benchmarks.convert import lay_out


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("work")


@pytest.fixture
def in_memory(tmp_path):
    """A folder in memory where there is one: every conversion waits until the disk has its result."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def laid_out(tmp_path_factory):
    """laid_out(stage): a checkpoint of 2 ranks, 3 parameters, 2 groups."""

    @functools.cache
    def make(stage):
        folder = tmp_path_factory.mktemp("laid_out") / f"zero{stage}"
        lay_out(folder, SHAPES, 2, stage)
        edit(folder, "*_model_*", lambda model: model.update(shared_params={}))
        edit(folder, "*_optim_*", scramble)
        return folder

    return make


@pytest.fixture
def checkpoint(tmp_path, laid_out):
    """checkpoint(stage, model=change, shard=change): a copy with its contents changed."""

    def make(stage=1, model=None, shard=None):
        folder = tmp_path / "c"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(laid_out(stage), folder)
        if model:
            edit(folder, "*_model_*", model)
        if shard:
            edit(folder, "*_optim_*", shard)
        return folder

    return make
