# SPDX-License-Identifier: MIT
"""Expert parallelism: which rank has which experts of a mixture.

DeepSpeed numbers the experts of every rank from 0, so a name alone does not tell which expert it is
of. Here an expert's parameter has the name that it would have on one rank with all experts; then a
checkpoint of any expert-parallel size, and an engine of any other, speak of the same parameters.
Needs nothing but Python 3.10.
"""

import re
from typing import NamedTuple

EXPERT = re.compile(
    r"(?P<experts>(.*\.)?deepspeed_moe\.experts\.deepspeed_experts)\.(?P<number>\d+)\.(?P<rest>.*)",
    re.DOTALL,
)


class ExpertName(NamedTuple):
    """The parts of the name of an expert's parameter or buffer.

    experts: of the list of experts. number: of this one. rest: within the expert.
    """

    experts: str
    number: int
    rest: str

    def moved(self, by: int) -> str:
        """The name, if the rank's experts are counted from `by`."""
        return f"{self.experts}.{self.number + by}.{self.rest}"


def expert_name(name: str) -> ExpertName | None:
    """The parts of a name, or None if it is not of an expert."""
    match = EXPERT.fullmatch(name)
    return match and ExpertName(match["experts"], int(match["number"]), match["rest"])
