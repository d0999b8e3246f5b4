"""Random models that tensor-parallel ranks cut in every known way (tests/ranks/random_layouts.py),
and random pipelines (tests/ranks/random_pipelines.py), saved on one layout and loaded on another,
against an oracle that cuts with torch."""

import pytest
import random_pipelines
from random_layouts import failures_of

SEEDS = [
    range(12),
    *(pytest.param(range(i, i + 21), marks=pytest.mark.slow) for i in range(12, 201, 21)),
]


@pytest.mark.parametrize("seeds", SEEDS, ids=lambda seeds: f"from {seeds[0]}")
def test_random_layouts(tmp_path, seeds):
    assert not failures_of(seeds, tmp_path)


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 60), marks=pytest.mark.slow)])
def test_random_pipelines(tmp_path, seeds):
    assert not random_pipelines.failures_of(seeds, tmp_path)
