"""universal/proof.py: the next steps of a checkpoint are written down, and compared when they are
trained again; a fault after the load is named at its first or second step."""

from pathlib import Path

import pytest
from proof_engines import FAULTS, KINDS

from measure.ranks import run

SCRIPT = "tests/ranks/proof_engines.py"


@pytest.fixture(scope="module")
def said(work):
    """{(fault, ranks): the lines about steps that were trained again}."""
    run(work, 4, SCRIPT, "first", *KINDS)
    lines = {}
    for ranks in (4, 2):
        out = run(work, ranks, SCRIPT, "again", *FAULTS)
        for part in out.split("== ")[1:]:
            fault, *rest = part.splitlines()
            lines[fault, ranks] = [line for line in rest if "trained before" in line]
    return lines


@pytest.mark.parametrize("ranks", [4, 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_fault(said, fault, ranks):
    says = FAULTS[fault].says
    if (fault, ranks) == ("dropout", 4):
        says = says.replace("NOTE", "WARNING")
    (line,) = said[fault, ranks]
    assert says in line


def test_the_file_has_ten_rows(work, said):
    header, *rows = Path(work, "plain", "t", "next_steps.csv").read_text().splitlines()
    assert [int(row.split(",")[0]) for row in rows] == list(range(3, 13))
