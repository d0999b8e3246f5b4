"""What inspect and diff say of checkpoints of every kind of engine: what the live engine says of
itself; and that a load, or a conversion, loses no bit."""

import json

import experts
import kinds
import pytest

from tests.support.ranks import run
from universal import convert
from universal.diff import diff
from universal.inspect import look

SCRIPT = "tests/ranks/model_parallel.py"


@pytest.fixture(scope="module")
def saved(work):
    """A folder with those of kinds.py, and with "moe"."""
    run(work, 4, kinds.play)
    run(work, 4, experts.play, experts.save, {"moe": ("moe", experts.Life(ep_size=2))})
    return work


def facts_in(folder):
    view = look(folder)
    facts = view["tags"][view["takes"]]
    assert facts["checked"] and not facts["problem"] and not facts["unread_damage"]
    return facts


def truth_of(folder):
    return json.loads((folder / "truth.json").read_text())


@pytest.mark.parametrize("name", [*kinds.KINDS, *map("_to_".join, kinds.AGAIN), "sequence"])
def test_facts_of_the_live_engine(saved, name):
    """Step, stage, ranks, how much is trained, the batch, the groups. How many ranks share a
    sequence no file says, so of a config that names no batch it is not known."""
    truth = truth_of(saved / name)
    facts = facts_in(saved / name)
    kind = f"ZeRO-{truth['stage']}, {truth['ranks']} ranks"
    assert facts["step"] == truth["step"] and facts["kind"] == kind
    batch = {"samples": truth["samples"], "micro": truth["micro"], "doubt": ""}
    assert facts["batch"] == (None if name == "sequence" else batch)
    assert facts["elements"] == truth["trained"]
    assert facts["client_state"] == ["note", "step"]
    assert [group["rate"] for group in facts["groups"]] == truth["rates"]
    assert [group["decay"] for group in facts["groups"]] == truth["decay"]


@pytest.mark.parametrize("source, target", kinds.AGAIN)
def test_a_load_loses_no_bit(saved, source, target):
    """What was loaded at another stage and saved again is what was loaded: every tensor, every
    hyperparameter, every counter."""
    view = diff(saved / source, saved / f"{source}_to_{target}")
    assert view["same"] and view["tensors"] == 3 * 5 + 3, view


def test_experts(saved):
    facts = facts_in(saved / "moe")
    expert = 8 * 11 + 11 + 11 * 8
    layer = 4 * expert + 4 * 8  # with its gate
    assert facts["elements"] == 2 * layer + 2 * (8 * 8 + 8)
    assert facts["client_state"] == ["word"] and facts["batch"]["samples"] == experts.BATCH
    assert diff(saved / "moe", saved / "moe")["same"]


@pytest.mark.parametrize("name", ["tp2", "tp2pp2"])
def test_model_parallel(tmp_path, name):
    """Tensor parallelism at ZeRO-3, tensor and pipeline parallelism at ZeRO-1."""
    words = {"tp2": ("autotp", 3, 2), "tp2pp2": ("pipeline", 2, 2)}[name]
    run(tmp_path, 4, SCRIPT, tmp_path / "c", *words)
    facts = facts_in(tmp_path / "c")
    layout = {"tp2": "ZeRO-3, 4 ranks (tensor 2 x data 2)"}
    assert facts["kind"] == layout.get(name, "ZeRO-1, 4 ranks (tensor 2 x pipeline 2)")
    assert facts["batch"]["samples"] == 8 and not facts["batch"]["doubt"]
    source = tmp_path / "c" / "global_step3"
    convert(source, tmp_path / "u")
    assert diff(source, tmp_path / "u")["same"]
