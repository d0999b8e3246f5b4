"""Tensor-parallel ranks and pipeline stages: any of them loads what any other has saved. The cases
are in tests/ranks/layouts.py."""

import layouts
import pytest

from tests.support.case import cases_of, test_case  # noqa: F401
from tests.support.ranks import run

CASES = cases_of(layouts)


@pytest.mark.clients
@pytest.mark.parametrize("degrees", [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_models_of_transformers(tmp_path, name, stage, degrees):
    """AutoTP by itself, and of attention alone."""
    import autotp

    run(tmp_path, 2, autotp.play, name, stage, *degrees)
