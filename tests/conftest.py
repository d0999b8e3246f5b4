"""Fixtures. Scripts run on ranks that harness/ranks.py forks from this process; lesson/test_launch.py starts the real
launchers."""

import pytest


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("work")
