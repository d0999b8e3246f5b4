"""Random histories of a job that dies in its saves. What must be loaded then, the docstring of lives.py says."""

import lives
import pytest

SEEDS = [*range(5), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 45))]


@pytest.mark.filterwarnings("ignore:.*was saved again under its name")
@pytest.mark.parametrize("seed", SEEDS)
def test_lives(seed, tmp_path):
    """`python tests/ranks/lives.py SEED` plays one again."""
    lives.play(seed, tmp_path)
