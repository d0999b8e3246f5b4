"""Tensor-parallel ranks and pipeline stages: any of them loads what any other has saved. The cases
are in tests/ranks/layouts.py."""

import layouts
import pytest
from case import cases_of, runs_of

CASES = layouts.kinds() | cases_of(layouts)


@pytest.mark.parametrize("name, stage, ranks", runs_of(CASES))
def test_case(failures, name, stage, ranks):
    error = failures.get((name, stage, ranks))
    assert not error, error
