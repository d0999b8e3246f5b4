"""What may stand between a save and a load (tests/cases.py): every option and every refusal of load_checkpoint(), on
the ranks that saved and on others, at ZeRO 1 and 3."""

import re

import pytest
from conftest import ROOT

from harness.ranks import run

SCRIPT = "tests/cases.py"
CASES = re.findall(r"(?m)^@case\ndef (\w+)", (ROOT / SCRIPT).read_text())


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("case", CASES)
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
        assert "WARNING: the global batch was 12, and is 15 now: no accumulation gives 12 here" in said[3]
