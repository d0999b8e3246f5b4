"""What may stand between a save and a load (tests/cases.py): every option and every refusal of load_checkpoint(), on
the ranks that saved and on others, at ZeRO 1 and 3."""

import re

import pytest
from helpers import ROOT

from harness.ranks import run

SCRIPT = "tests/ranks/cases.py"
CASES = re.findall(r"(?m)^@case\ndef (\w+)", (ROOT / SCRIPT).read_text())


# ZeRO-2 is like ZeRO-1 but for its gradients.
QUICK = [(case, stage) for case in CASES for stage in (1, 3)] + [("half_a_step", 2)]
SLOW = [pytest.param(case, 2, marks=pytest.mark.slow) for case in CASES if (case, 2) not in QUICK]


@pytest.mark.parametrize("case, stage", [*QUICK, *SLOW])
def test_case(tmp_path, case, stage):
    run(tmp_path, 2, SCRIPT, case, stage, "save")
    said = {ranks: run(tmp_path, ranks, SCRIPT, case, stage, "load") for ranks in (2, 3)}
    if case == "half_a_step":
        assert all("the gradients of half a step are discarded" in out for out in said.values())
    if case == "the_first_start":
        assert all("nothing was loaded: nowhere holds no checkpoint" in out for out in said.values())
    if case == "another_batch":
        assert "WARNING" not in said[2]
        assert "WARNING: the global batch was 12, and is 18 now: gradient_accumulation_steps 4 keeps it" in said[3]
        assert "WARNING: the global batch was 12, and is 15 now: other ranks or micro-batches keep it" in said[3]
