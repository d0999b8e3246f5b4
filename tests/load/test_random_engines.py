"""Random models, optimizers and ZeRO options (tests/ranks/random_engines.py): what is saved loads
on other ranks and at another stage, and what must not load is known beforehand."""

import pytest
from random_engines import outcomes_of, plan, wanted

from tests.support.commands import slow

SEEDS = [range(10), *(slow(range(i, i + 20)) for i in range(10, 300, 20))]


@pytest.mark.parametrize("seeds", SEEDS, ids=lambda seeds: f"from {seeds[0]}")
def test_random_engines(tmp_path, seeds):
    for seed, outcome in outcomes_of(seeds, tmp_path).items():
        assert outcome.partition(":")[0] == wanted(plan(seed)), (outcome, plan(seed))
