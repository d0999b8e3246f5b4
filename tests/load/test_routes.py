"""Whatever the route by which a checkpoint gets into the engine, all of its state does, or it is
refused by the line that says why. The cases are in tests/ranks/routes.py."""

import pytest
from helpers import run_all
from routes import CASES

SCRIPT = "tests/ranks/routes.py"


@pytest.fixture(scope="module")
def failures(tmp_path_factory, request):
    """{(case, ranks): error} of the cases that are wanted: one launch saves all of them, and one
    loads them for each number of ranks."""
    wanted = {}
    for item in request.session.items:
        if item.nodeid.startswith(request.node.nodeid) and hasattr(item, "callspec"):
            case, ranks = (item.callspec.params[key] for key in ("case", "ranks"))
            wanted.setdefault(ranks, []).append(case)
    folder = tmp_path_factory.mktemp("routes")
    names = dict.fromkeys(name for names in wanted.values() for name in names)
    not_saved = run_all(folder, 2, SCRIPT, "save", names=names)
    errors = {}
    for ranks, names in wanted.items():
        saved = [name for name in names if name not in not_saved]
        failed = not_saved | run_all(folder, ranks, SCRIPT, "load", names=saved)
        errors |= {(name, ranks): error for name, error in failed.items()}
    return errors


@pytest.mark.parametrize(
    "case, ranks", [(name, ranks) for name, case in CASES.items() for ranks in case.ranks]
)
def test_route(failures, case, ranks):
    assert (case, ranks) not in failures, failures[case, ranks]
