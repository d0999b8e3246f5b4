"""What inspect and diff say of checkpoints of model-parallel engines and of experts; and that a
conversion loses no bit of them."""

import experts
import pytest

from tests.support.ranks import run
from universal import convert
from universal.diff import diff
from universal.inspect import look

SCRIPT = "tests/ranks/model_parallel.py"


def facts_in(folder):
    view = look(folder)
    facts = view["tags"][view["takes"]]
    assert facts["checked"] and not facts["problem"] and not facts["unread_damage"]
    return facts


def test_experts(work):
    run(work, 4, experts.play, experts.save, {"moe": ("moe", experts.Life(ep_size=2))})
    facts = facts_in(work / "moe")
    expert = 8 * 11 + 11 + 11 * 8
    layer = 4 * expert + 4 * 8  # with its gate
    assert facts["elements"] == 2 * layer + 2 * (8 * 8 + 8)
    assert facts["client_state"] == ["word"] and facts["batch"]["samples"] == experts.BATCH
    assert diff(work / "moe", work / "moe")["same"]


LAYOUTS = {
    "ZeRO-3, 4 ranks (tensor 2 x data 2)": ("autotp", 3, 2),
    "ZeRO-1, 4 ranks (tensor 2 x pipeline 2)": ("pipeline", 2, 2),
}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_model_parallel(tmp_path, kind):
    run(tmp_path, 4, SCRIPT, tmp_path / "c", *LAYOUTS[kind])
    facts = facts_in(tmp_path / "c")
    assert facts["kind"] == kind
    assert facts["batch"] == {"samples": 8, "micro": facts["batch"]["micro"], "doubt": ""}
    source = tmp_path / "c" / "global_step3"
    convert(source, tmp_path / "u")
    assert diff(source, tmp_path / "u")["same"]
