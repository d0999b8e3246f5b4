"""Random models, optimizers and ZeRO options (tests/ranks/random_engines.py): what is saved loads
on other ranks and at another stage, and what must not load is known beforehand."""

import pytest
from random_engines import plan, play_all, wanted

SEEDS = [
    range(10),
    *(pytest.param(range(i, i + 20), marks=pytest.mark.slow) for i in range(10, 300, 20)),
]


@pytest.mark.parametrize("seeds", SEEDS, ids=lambda seeds: f"from {seeds[0]}")
def test_random_engines(tmp_path, seeds):
    for seed, text in play_all(seeds, tmp_path).items():
        assert text.partition(":")[0] == wanted(plan(seed)), (seed, text, plan(seed))
