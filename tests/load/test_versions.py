"""A version of DeepSpeed that is known to be wrong, or that nobody has tried, is named."""

import re
import sys

import deepspeed
import pytest

from tests.support import ROOT
from universal.load.versions import NEWEST_TRIED, doubts, say_doubts

WRONG = "computes wrong gradients at ZeRO-2 with gradient accumulation"
UNTRIED = f"is newer than {NEWEST_TRIED}, the newest that was tried"


@pytest.mark.parametrize(
    "version, words",
    [
        *[(version, None) for version in ("0.16.4", "0.17.5", "0.18.3", "0.19.8", "0.19.8+abc")],
        *[(version, WRONG) for version in ("0.17.6", "0.18.0", "0.18.2", "0.18.2+abc")],
        *[(version, UNTRIED) for version in ("0.19.9", "0.19.9.dev0", "0.20.0", "1.0")],
    ],
)
def test_doubts(version, words):
    text = doubts(version)
    assert text is None if words is None else f"DeepSpeed {version} {words}" in text


@pytest.mark.parametrize("rank, said", [(None, True), ("0", True), ("1", False)])
def test_say_doubts(monkeypatch, capsys, rank, said):
    """On rank 0 alone. A closed stdout is no reason to end."""
    monkeypatch.setattr(deepspeed, "__version__", "0.18.0")
    monkeypatch.delenv("RANK", raising=False)
    if rank:
        monkeypatch.setenv("RANK", rank)
    say_doubts()
    assert (WRONG in capsys.readouterr().out) == said
    with open("/dev/null", "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
    say_doubts()


def test_what_was_tried():
    """The newest is that of the tables, and the one that the tutorial installs."""
    requirements = (ROOT / "requirements.txt").read_text()
    assert re.search(r"^deepspeed==(.*)$", requirements, re.M)[1] == NEWEST_TRIED
    table = (ROOT / "assets" / "versions.txt").read_text()
    assert re.findall(r"^(\d+\.\d+\.\d+) ", table, re.M)[-1] == NEWEST_TRIED
