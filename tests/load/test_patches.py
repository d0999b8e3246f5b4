"""patches.py: what install() changes in DeepSpeed's class is what its table says, in that order."""

import re

import pytest
from deepspeed import DeepSpeedEngine

import universal
from tests.support import ROOT
from universal import patches
from universal.patches import PATCHES

OWNERS = {owner for owners in PATCHES.values() for owner in owners}


@pytest.fixture(autouse=True)
def undone():
    yield
    patches.undo(*OWNERS)


def wrapped(name):
    return {*getattr(getattr(DeepSpeedEngine, name), "wrappers", {})}


def test_all_of_the_table_is_used():
    universal.install(background=True)
    assert {name: wrapped(name) for name in PATCHES} == {name: {*PATCHES[name]} for name in PATCHES}


def test_what_is_left_out_is_not_there():
    universal.install()
    universal.install(proof=False)
    left = {owner for name in PATCHES for owner in wrapped(name)}
    assert left == OWNERS - {"proof", "background"}


def test_order():
    """It does not depend on the order of the calls; and undo() leaves DeepSpeed's own method."""
    calls = []

    def named(owner):
        def wrapper(method, engine, *args):
            calls.append(owner)
            return method(engine, *args)

        return wrapper

    patches.patch("proof", forward=named("proof"))
    patches.patch("batches", forward=named("batches"))
    patches.patch("batches", forward=named("batches, again"))
    with pytest.raises(AttributeError):
        DeepSpeedEngine.forward(object())
    assert calls == ["proof", "batches, again"]
    with pytest.raises(AttributeError):
        patches.inside("forward", "proof")(object())
    assert calls[2:] == ["batches, again"]
    patches.undo("batches", "proof")
    with pytest.raises(AttributeError):
        DeepSpeedEngine.forward(object())
    assert calls[3:] == []
    with pytest.raises(AssertionError):
        patches.patch("saves", forward=named("saves"))


def test_nobody_else_patches():
    for path in ROOT.glob("universal/**/*.py"):
        if path.name != "patches.py":
            assert not re.search(r"DeepSpeedEngine\.\w+ = |setattr\(\w*Engine", path.read_text())
