"""Whatever the route by which a checkpoint gets into the engine, by data-parallel ranks,
tensor-parallel ones and pipeline stages, all of its state does, though a module, an optimizer or a
setting has peculiarities; or it is refused by the line that says why. The cases are in tests/ranks.
"""

import layouts
import pipelines
import pytest
import routes
import whole_and_refused

from tests.support.case import cases_of, test_case  # noqa: F401
from tests.support.ranks import run

# Where a case has permitted fp16, ZeRO-3 takes no weights in float64 any more: these come first.
CASES = cases_of(whole_and_refused, routes, pipelines, layouts)


@pytest.mark.slow
@pytest.mark.parametrize("stage, degrees", [(1, (2, 1)), (3, (1, 2)), (3, (2, 2))])
def test_a_model_of_transformers(tmp_path, stage, degrees):
    import autotp

    run(tmp_path, 2, autotp.play, stage, *degrees)
