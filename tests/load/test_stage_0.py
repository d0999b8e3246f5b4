"""A checkpoint that was saved without ZeRO loads at stages 1, 2 and 3, and theirs without ZeRO, in
every precision and on any number of ranks: every state to the bit. Our converter takes it, too."""

import stage_0

from tests.support.case import cases_of, test_case  # noqa: F401

CASES = stage_0.all_pairs() | cases_of(stage_0)
