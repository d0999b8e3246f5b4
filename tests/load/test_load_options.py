"""Every option and every kind of engine and optimizer that load_checkpoint() knows, on the ranks
that saved and on others: it restores what was saved, or refuses with the line that says why. The
cases are in tests/ranks/cases.py."""

import pytest
from cases import CASES
from helpers import run_all

SCRIPT = "tests/ranks/cases.py"
ALL = [
    (name, stage, ranks)
    for name, case in CASES.items()
    for stage in case.stages
    for ranks in (2, 3)
]


def is_quick(name, stage, ranks):
    """ZeRO-2 is like ZeRO-1 but for its gradients, and 2 ranks, those that saved, are like 3, but
    where it matters."""
    return (stage != 2 or name == "half_a_step") and (ranks == 3 or CASES[name].own)


@pytest.fixture(scope="module")
def problems(tmp_path_factory, request):
    """problems(stage): {(case, ranks): error}, of all the cases of a stage that are wanted. One
    launch saves all of them, and one loads them for each number of ranks."""
    wanted, found = {}, {}
    for item in request.node.session.items:
        if item.nodeid.startswith(request.node.nodeid):
            name, stage, ranks = (item.callspec.params[key] for key in ("case", "stage", "ranks"))
            wanted.setdefault(stage, {}).setdefault(ranks, []).append(name)

    def of(stage):
        if stage not in found:
            folder, found[stage] = tmp_path_factory.mktemp(f"zero{stage}"), {}
            names = dict.fromkeys(name for names in wanted[stage].values() for name in names)
            failed = run_all(folder, 2, SCRIPT, stage, "save", names=names)
            for ranks, names in wanted[stage].items():
                left = [name for name in names if name not in failed]
                of_rank = failed | run_all(folder, ranks, SCRIPT, stage, "load", names=left)
                found[stage] |= {(name, ranks): error for name, error in of_rank.items()}
        return found[stage]

    return of


@pytest.mark.parametrize(
    "case, stage, ranks",
    [pytest.param(*one, marks=[] if is_quick(*one) else [pytest.mark.slow]) for one in ALL],
)
def test_case(problems, case, stage, ranks):
    assert (case, ranks) not in problems(stage), problems(stage)[case, ranks]
