"""Every option and every kind of engine and optimizer that load_checkpoint() knows, with ZeRO and
without, on the ranks that saved and on others: it restores what was saved, or refuses with the line
that says why; what is odd is never worse than with DeepSpeed alone. And the recipes of
docs/troubleshooting.md do what they say."""

import by_deepspeed
import interrupted
import models
import odd
import optimizers
import recipes
import settings
import stage_0
import weights

from tests.support.case import cases_of, test_case  # noqa: F401

CASES = cases_of(
    weights, models, optimizers, odd, interrupted, by_deepspeed, recipes, settings, stage_0
)
