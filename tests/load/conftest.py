"""A launch costs more than a load: one launch does all that the chosen tests want of a layout."""

import pytest

from tests.support.case import play, runs_of
from tests.support.helpers import chosen, run_all


def pytest_generate_tests(metafunc):
    if metafunc.function.__name__ == "test_case":
        metafunc.parametrize("name, stage, ranks", runs_of(metafunc.module.CASES))


@pytest.fixture(scope="module")
def names_of(request):
    """{stage: {ranks: [name]}} of the tests of this module that are to run."""
    names = {}
    for stage, ranks, name in chosen(request, "stage", "ranks", "name"):
        names.setdefault(stage, {}).setdefault(ranks, []).append(name)
    return names


@pytest.fixture(scope="module")
def failures(tmp_path_factory, request, names_of):
    """{(name, stage, ranks): error} of those chosen of the module's CASES that have failed."""
    cases = request.module.CASES
    errors = {}
    for stage, of_stage in names_of.items():
        folder = tmp_path_factory.mktemp(f"zero{stage}")
        every_name = dict.fromkeys(name for names in of_stage.values() for name in names)
        not_saved = run_all(folder, 2, play, cases, "save", stage, names=every_name)
        for ranks, names in of_stage.items():
            saved = [name for name in names if name not in not_saved]
            failed = run_all(folder, ranks, play, cases, "load", stage, names=saved) | not_saved
            errors |= {(name, stage, ranks): error for name, error in failed.items()}
    return errors
