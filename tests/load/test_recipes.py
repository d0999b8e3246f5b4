"""The recipes of docs/troubleshooting.md do what they say, on 2 ranks and on 3."""

import recipes

from tests.support.case import cases_of, test_case  # noqa: F401

CASES = cases_of(recipes)
