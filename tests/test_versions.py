"""demos/versions.py: older DeepSpeeds. `make versions` measures all of them; here its judgement, and the oldest."""

import pytest
from conftest import ROOT

from demos import versions

OURS, CONTROL = "universal.py, 4 to 3", "3 ranks, no checkpoint"
OLDEST = versions.OLD[0]


def test_the_page_has_the_table_as_it_was_measured():
    short = (ROOT / "assets" / "versions.txt").read_text().split("\n\n")[0]
    assert short in (ROOT / "docs" / "operations.md").read_text()


@pytest.mark.parametrize(
    "ours, control, count",
    [
        (4e-7, 2e-7, 0),
        (2e-3, 2e-7, 1),
        ("CheckpointError: no", 2e-7, 1),
        (float("nan"), 2e-7, 1),
        (2e-3, 3e-1, 0),  # this version does not train alike on 3 ranks
        (2e-3, "RuntimeError: no", 1),
    ],
)
def test_what_universal_py_has_to_answer_for(ours, control, count):
    assert len(versions.wrong({(OURS, 2): ours, (CONTROL, 2): control})) == count


def test_nan_is_the_largest():
    losses = {"saved/1": {"losses": [1.0, 2.0]}, f"{OURS}/1": {"losses": [1.5, float("nan")]}}
    assert str(versions.differences(losses, losses)[OURS, 1]) == "nan"


def test_an_error_stands_below_the_table():
    legend = {}
    lines = versions.table({"0.1.2": {(OURS, 1): 1e-7, (OURS, 3): "ValueError: /a/b/c is gone"}}, legend)
    assert lines[1].split()[-2:] == ["1.0e-07", "a"] and legend == {"ValueError: c is gone": "a"}


@pytest.mark.slow  # it installs that DeepSpeed
@pytest.mark.parametrize("stage", versions.STAGES)
def test_the_oldest(stage, tmp_path):
    """Saved and resumed under it, and what is not loaded is seen."""
    jobs = [versions.job("saved", stage, 4, tmp_path, save="t"), versions.job(CONTROL, stage, 3)]
    jobs += [versions.job(row, stage, 3, tmp_path, load="t", how="ours") for row in (OURS,)]
    jobs += [versions.job(versions.NOTHING, stage, 3, seed=2)]
    results = versions.run(OLDEST, jobs, tmp_path / "log")
    assert not [result for result in results.values() if "error" in result]
    found = versions.differences(results, results)
    assert found[OURS, stage] <= versions.ROUNDING < 0.1 < found[versions.NOTHING, stage]
