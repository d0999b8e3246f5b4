"""Older DeepSpeeds: `make versions` (measure/versions.py) measures all of them; here the oldest."""

import pytest

from measure import versions
from tests.support.commands import slow

OLDEST = versions.OLD[0]


@pytest.mark.parametrize("stage", [slow(1), slow(2), 3])
def test_the_oldest(tmp_path, stage):
    """Under it 3 ranks go on where 4 have saved, and not if nothing is loaded."""
    jobs = versions.commands(OLDEST, stage)
    wanted = {name: jobs[name] for name in ("saved", "universal", "not loaded")}
    for _ in range(versions.ATTEMPTS):  # this DeepSpeed loses gradients now and then (#8382)
        assert not versions.run(OLDEST, tmp_path, stage, wanted)
        gap = versions.difference(tmp_path, "universal", "saved")
        if gap <= versions.ROUNDING:
            break
    gap_of_nothing = versions.difference(tmp_path, "not loaded", "saved")
    assert gap <= versions.ROUNDING < versions.FAR < gap_of_nothing
