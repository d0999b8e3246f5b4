"""Random histories of a job that dies in its saves. The docstring of lives.py says what must be
loaded after each."""

import lives
import pytest

from tests.support.commands import slow


@pytest.mark.filterwarnings("ignore:.*was saved again under its name")
@pytest.mark.parametrize("seed", [0, *map(slow, range(1, 45))])
def test_lives(seed, tmp_path):
    lives.play(seed, tmp_path)
