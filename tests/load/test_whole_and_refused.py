"""Checkpoints that are whole, and are loaded, though a module, an optimizer or a setting has
peculiarities; and such as cannot be restored, which are refused by the reason that is true. The
cases are in tests/ranks/whole_and_refused.py."""

import pytest
from helpers import run_all
from whole_and_refused import CASES

SCRIPT = "tests/ranks/whole_and_refused.py"


@pytest.fixture(scope="module")
def failures(tmp_path_factory, request):
    """{(case, stage, ranks): error} of the cases that are wanted: for each stage one launch saves
    them, and one for each number of ranks loads them."""
    wanted = {}
    for item in request.session.items:
        if item.path == request.path and "case" in getattr(item, "callspec", request).params:
            case, stage, ranks = (item.callspec.params[key] for key in ("case", "stage", "ranks"))
            wanted.setdefault(stage, {}).setdefault(ranks, []).append(case)
    errors = {}
    for stage, by_ranks in wanted.items():
        folder = tmp_path_factory.mktemp(f"zero{stage}")
        names = dict.fromkeys(name for names in by_ranks.values() for name in names)
        not_saved = run_all(folder, 2, SCRIPT, "save", stage, names=names)
        for ranks, names in by_ranks.items():
            saved = [name for name in names if name not in not_saved]
            failed = not_saved | run_all(folder, ranks, SCRIPT, "load", stage, names=saved)
            errors |= {(name, stage, ranks): error for name, error in failed.items()}
    return errors


@pytest.mark.parametrize(
    "case, stage, ranks",
    [
        (name, stage, ranks)
        for name, case in CASES.items()
        for stage in case.stages
        for ranks in case.ranks
    ],
)
def test_case(failures, case, stage, ranks):
    assert (case, stage, ranks) not in failures, failures[case, stage, ranks]


@pytest.mark.parametrize("stage", [2, 3])
def test_bitsandbytes(tmp_path, stage):
    """Where it is installed."""
    pytest.importorskip("bitsandbytes")
    for phase, ranks in (("save", 2), ("load", 2), ("load", 3)):
        assert not run_all(tmp_path, ranks, SCRIPT, phase, stage, names=["bitsandbytes"])
