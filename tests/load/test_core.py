"""How much of the package a plain load runs: what somebody has to know who wants to follow it."""

import json

import profiled
import pytest

from tests.support.ranks import run

# Of rank 0; by parameters of one kind of parallelism, without experts, frozen weights or buffers.
FUNCTIONS, FILES, TYPES = 360, 40, 50


@pytest.fixture(scope="module")
def met(tmp_path_factory):
    folder = tmp_path_factory.mktemp("met")
    run(folder, 4, profiled.save, 3)
    run(folder, 3, profiled.load, 3)
    return json.loads((folder / "met.json").read_text())


def test_a_plain_load(met):
    functions, types = met
    assert 100 < len(functions) <= FUNCTIONS, functions
    assert len({file for file, _ in functions}) <= FILES
    assert 10 < len(types) <= TYPES, types
