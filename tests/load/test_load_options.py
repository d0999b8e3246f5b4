"""Every option and every kind of engine and optimizer that load_checkpoint() knows, on the ranks that saved and on
others: it restores what was saved, or refuses with the line that says why. The cases are in tests/ranks/cases.py."""

import re

import pytest
from helpers import ROOT, run_all

SCRIPT = "tests/ranks/cases.py"
CASES = re.findall(r"(?m)^@case\ndef (\w+)", (ROOT / SCRIPT).read_text())
# ZeRO-2 is like ZeRO-1 but for its gradients.
QUICK = [(case, stage) for case in CASES for stage in (1, 3)] + [("half_a_step", 2)]
SLOW = [pytest.param(case, 2, marks=pytest.mark.slow) for case in CASES if (case, 2) not in QUICK]


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
