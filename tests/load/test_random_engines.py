"""Random models, optimizers and ZeRO options (tests/ranks/random_engines.py): what is saved loads on other ranks and at
another stage, and what must not load is known beforehand."""

import pytest
import random_engines


@pytest.mark.parametrize("first", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(20, 300, 20))])
def test_random_engines(first):
    assert random_engines.main(range(first, first + 20)) == 0
