"""Random models, optimizers and ZeRO options (tests/ranks/random_engines.py): what is saved loads
on other ranks and at another stage, and converts into what the engine held."""

import pytest
import random_engines
from random_layouts import failures_of

from tests.support.commands import slow

SEEDS = [range(16), *(slow(range(i, i + 20)) for i in range(16, 300, 20))]


@pytest.mark.parametrize("seeds", SEEDS, ids=lambda seeds: f"from {seeds[0]}")
def test_random_engines(tmp_path, seeds):
    assert not failures_of(random_engines, seeds, tmp_path)
