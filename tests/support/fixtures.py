"""Fixtures of the folders whose tests read or convert files."""

import os
import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def tmp_path(tmp_path):
    """In memory where there is a folder for that: every conversion waits until the disk has its
    result."""
    memory = Path("/dev/shm")
    above = memory if os.access(memory, os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=above) as folder:
        yield Path(folder)
