"""Random models that tensor-parallel ranks cut in every known way (tests/ranks/random_layouts.py),
and random pipelines (tests/ranks/random_pipelines.py), saved on one layout and loaded on another,
against an oracle that cuts with torch."""

import pytest
import random_layouts
import random_pipelines

from tests.support.commands import slow

SEEDS = [range(12), *(slow(range(i, i + 21)) for i in range(12, 201, 21))]


@pytest.mark.parametrize("seeds", SEEDS, ids=lambda seeds: f"from {seeds[0]}")
def test_random_layouts(tmp_path, seeds):
    assert not random_layouts.failures_of(random_layouts, seeds, tmp_path)


@pytest.mark.parametrize("seeds", [range(8), slow(range(8, 60))])
def test_random_pipelines(tmp_path, seeds):
    assert not random_layouts.failures_of(random_pipelines, seeds, tmp_path)
