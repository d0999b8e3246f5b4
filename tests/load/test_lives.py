"""Random histories of a job that dies in its saves; what must be loaded then, the docstring of lives.py says."""

import lives
import pytest


@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 45))])
def test_lives(seed, tmp_path):
    lives.play(seed, tmp_path)
