"""Optimizers and modules that are odd: never worse than DeepSpeed alone."""

import odd

from tests.support.case import cases_of, test_case

CASES = cases_of(odd)
__all__ = ["test_case"]
