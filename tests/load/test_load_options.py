"""Every option and every kind of engine and optimizer that load_checkpoint() knows, on the ranks
that saved and on others: it restores what was saved, or refuses with the line that says why."""

import by_deepspeed
import interrupted
import models
import optimizers
import weights

from tests.support.case import cases_of, test_case  # noqa: F401

CASES = cases_of(weights, models, optimizers, interrupted, by_deepspeed)
