"""Whatever the route by which a checkpoint gets into the engine, all of its state does, or it is
refused by the line that says why. The cases are in tests/ranks: routes.py and pipelines.py."""

import pipelines
import routes

from tests.support.case import cases_of, test_case  # noqa: F401

CASES = cases_of(routes, pipelines)
