"""Every option and every kind of engine and optimizer that load_checkpoint() knows, on the ranks that saved and on
others: it restores what was saved, or refuses with the line that says why. The cases are in tests/ranks/cases.py."""

import pytest
from cases import CASES
from helpers import run_all

SCRIPT = "tests/ranks/cases.py"
ALL = [(case, stage) for case, (_, stages) in CASES.items() for stage in stages]
# ZeRO-2 is like ZeRO-1 but for its gradients.
QUICK = [(case, stage) for case, stage in ALL if stage != 2 or case == "half_a_step"]
SLOW = [pytest.param(*one, marks=pytest.mark.slow) for one in ALL if one not in QUICK]


@pytest.fixture(scope="module")
def problems(tmp_path_factory, request):
    """problems(stage): {case: error}, of all the cases of a stage that are wanted. One launch saves all of them, one
    loads them on 2 ranks, and one on 3."""
    wanted, found = {}, {}
    for item in request.node.session.items:
        if item.nodeid.startswith(request.node.nodeid):
            wanted.setdefault(item.callspec.params["stage"], []).append(item.callspec.params["case"])

    def of(stage):
        if stage not in found:
            folder = tmp_path_factory.mktemp(f"zero{stage}")
            found[stage] = {}
            for ranks, phase in ((2, "save"), (2, "load"), (3, "load")):
                left = [case for case in wanted[stage] if case not in found[stage]]
                found[stage] |= run_all(folder, ranks, SCRIPT, stage, phase, names=left)
        return found[stage]

    return of


@pytest.mark.parametrize("case, stage", [*QUICK, *SLOW])
def test_case(problems, case, stage):
    assert case not in problems(stage), problems(stage)[case]
