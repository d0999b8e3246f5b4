"""What was saved without ZeRO resumes without ZeRO, and what was saved with it resumes with it; the
line that refuses all else says how to go on."""

import stage_0

from tests.support.case import cases_of, test_case  # noqa: F401

CASES = cases_of(stage_0)
