"""Whatever the route by which a checkpoint gets into the engine, all of its state does, or it is
refused by the line that says why. The cases are in tests/ranks/routes.py."""

import pytest
import routes

from tests.support.case import cases_of, runs_of

CASES = cases_of(routes)


@pytest.mark.parametrize("name, stage, ranks", runs_of(CASES))
def test_route(failures, name, stage, ranks):
    error = failures.get((name, stage, ranks))
    assert not error, error
