"""Every option and every kind of engine and optimizer that load_checkpoint() knows, on the ranks
that saved and on others: it restores what was saved, or refuses with the line that says why."""

import by_deepspeed
import interrupted
import models
import optimizers
import pytest
import weights

from tests.support.case import cases_of, runs_of

CASES = cases_of(weights, models, optimizers, interrupted, by_deepspeed)


@pytest.mark.parametrize("name, stage, ranks", runs_of(CASES))
def test_case(failures, name, stage, ranks):
    error = failures.get((name, stage, ranks))
    assert not error, error
