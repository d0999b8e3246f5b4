"""demos/clients_cli.py: its judgement. `make clients-cli` runs LLaMA-Factory and ms-swift."""

import pytest
from helpers import ROOT

from demos import clients_cli
from harness.commands import requirements

STEPS = range(11, 21)
RIGHT = dict.fromkeys(STEPS, 4.0)
STOPS = "ZeRORuntimeException: The checkpoint being loaded used a DP world size of 4 but the current world size is 2."
BATCH = "AssertionError: train_batch_size is not equal to ... 24 != 2 * 3 * 2"
LEFT = (dict.fromkeys(STEPS, 4.1), "WARNING: 24, 12")
AS_IT_IS = {"elastic-without": (BATCH, None), "": (RIGHT, None), "without": (STOPS, None), "left": LEFT}


@pytest.mark.parametrize(
    "changed, found, problems",
    [
        ("", (RIGHT, None), 0),
        ("to-3", ({**RIGHT, 15: 4.1}, None), 8),
        ("to-6", (STOPS, None), 8),
        ("without", (RIGHT, None), 2),
        ("elastic-without", (RIGHT, None), 1),
        ("left", (RIGHT, "WARNING"), 2),
        ("left", (LEFT[0], None), 2),
        ("number", ({**RIGHT, 20: 4.1}, None), 2),
        ("elastic", (STOPS, None), 1),
    ],
)
def test_what_is_wrong_is_seen(monkeypatch, changed, found, problems):
    """By the end of a run's name; all others are as they should be."""
    results = AS_IT_IS | {changed: found}

    def run(work, name, *_, **__):
        return results[next((end for end in results if end and name.endswith(end)), "")]

    monkeypatch.setattr(clients_cli, "run", run)
    monkeypatch.setattr(clients_cli, "lose_a_machine", run)
    told = []
    lines = [*clients_cli.table(None, told), *clients_cli.left_out(None, told)]
    assert len(told) == problems and len(lines) == 11 + 5 + 5 + 2


def test_what_a_fresh_clone_needs_is_there():
    for client, (*_, settings) in clients_cli.COMMANDS.items():
        assert "gradient_accumulation_steps: 3" in (ROOT / "examples" / settings).read_text()
        assert requirements(client).is_file()
