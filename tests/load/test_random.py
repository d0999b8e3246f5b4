"""Random models, optimizers, ZeRO options, cuts by tensor-parallel ranks and pipelines
(tests/ranks/random_*.py): what is saved on some ranks loads on others. Each part of the seeds
launches each number of ranks once to save, and once to load."""

import pytest
from random_layouts import failures_of

from tests.support.commands import slow

# How many seeds are in the first part, and in each of the others. Pipelines come last: they leave
# their groups to later engines.
SEEDS = {"random_engines": (8, 32), "random_layouts": (6, 21), "random_pipelines": (4, 6)}


@pytest.mark.parametrize("part", [0, *map(slow, range(1, 10))])
def test_random(part, tmp_path):
    names = []
    for module, (first, more) in SEEDS.items():
        end = first + part * more
        names += [f"{module} {seed}" for seed in range(end - more if part else 0, end)]
    assert not failures_of(names, tmp_path)
