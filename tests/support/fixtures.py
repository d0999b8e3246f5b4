"""Fixtures of the tests that read or convert files."""

import os
import tempfile
from pathlib import Path

import pytest

from tests.support.files import SHAPES, edit


@pytest.fixture
def tmp_path(tmp_path):
    """In memory where there is a folder for that: every conversion waits until the disk has its
    result."""
    memory = Path("/dev/shm")
    above = memory if os.access(memory, os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=above) as folder:
        yield Path(folder)


@pytest.fixture
def laid_out(tmp_path):
    """laid_out(stage, model=change, shard=change): a checkpoint of 2 ranks, with the parameters a,
    b and c in 2 groups or those of other shapes, in tmp_path/c; its contents changed."""
    from tests.support.lay_out import lay_out  # which needs DeepSpeed

    def make(stage=1, model=None, shard=None, shapes=SHAPES):
        folder = tmp_path / "c"
        lay_out(folder, shapes, 2, stage)
        for pattern, change in (("*_model_*", model), ("*_optim_*", shard)):
            if change:
                edit(folder, pattern, change)
        return folder

    return make
