# SPDX-License-Identifier: MIT
"""All that this package changes in DeepSpeed's classes: functions around methods of its engine.

PATCHES says which, and why. install() has all of them called, but for those of what it is told to
leave out; batches.config(), share() and any load those of batches. After undo() those of an owner
are no longer called. What is changed for the length of a load is in load/overrides.py, of a save in
save/snapshot.py; in an engine alone, in exact.py.
"""

import functools
from collections.abc import Callable

from deepspeed import DeepSpeedEngine

from universal.errors import CheckpointError

# {method: {whose function is called around it: why}}, the innermost first.
PATCHES = {
    "load_checkpoint": {
        "resume": "loads what any number of ranks has saved",
        "proof": "begins to compare, where DeepSpeed's own loader has loaded",
    },
    "save_checkpoint": {
        "proof": "begins to write down the next steps",
        "saves": "refuses a client state that would replace the engine's own; says which is latest",
        "background": "returns before the files are written",
    },
    "forward": {
        "batches": "counts forward passes",
        "proof": "hashes samples and random numbers",
    },
    "backward": {
        "batches": "counts micro-batches",
        "proof": "sees losses",
    },
    "_backward_epilogue": {"batches": "counts loss.backward() of a script's own"},
    "_take_model_step": {  # engine.step() calls it at the last micro-batch; so does a pipeline
        "batches": "refuses a step that trains another batch than the config names",
        "proof": "writes a step's row, and compares it",
    },
    "set_train_batch_size": {"batches": "names another batch"},
    "deepspeed_io": {"batches": "refuses a loader that draws more than is trained"},
}


def patch(owner: str, **wrappers: Callable) -> None:
    """Have wrapper(method, engine, ...) called in place of each of these methods, for every engine.

    owner: one of PATCHES. Another one's wrapper of a method stays, and the owner's is replaced.
    """
    for name, wrapper in wrappers.items():
        assert owner in PATCHES[name], (owner, name)
        method = getattr(DeepSpeedEngine, name, None)
        if method and not hasattr(method, "wrappers"):
            method = patched(name, method)
            setattr(DeepSpeedEngine, name, method)
        if method:  # an older DeepSpeed has no such step
            method.wrappers[owner] = wrapper


def patched(name, method):
    """Returns a method that goes through its wrappers from the outermost to the innermost."""
    wrappers = {}

    def inside(owner):
        call = method
        for inner in PATCHES[name]:
            if inner == owner:
                break
            if inner in wrappers:
                call = functools.partial(wrappers[inner], call)
        return call

    @functools.wraps(method)
    def call(engine, *args, **options):
        return inside(None)(engine, *args, **options)

    call.wrappers = wrappers
    call.inside = inside
    return call


def inside(name: str, owner: str) -> Callable:
    """A method with those wrappers alone that lie inside of an owner's."""
    method = getattr(DeepSpeedEngine, name)
    return method.inside(owner) if hasattr(method, "inside") else method


def is_patched(name: str, owner: str) -> bool:
    """Whether an owner's wrapper is around a method."""
    return owner in getattr(getattr(DeepSpeedEngine, name), "wrappers", {})


def undo(*owners: str) -> None:
    """Take the wrappers of these owners away."""
    for name in PATCHES:
        wrappers = getattr(getattr(DeepSpeedEngine, name, None), "wrappers", {})
        for owner in owners:
            wrappers.pop(owner, None)


def claim(file: str) -> None:
    """Raises CheckpointError if another copy of this package has patched; file: of this one."""
    other = vars(DeepSpeedEngine).get("universal", file)
    if other != file:
        raise CheckpointError(f"two copies of universal: {other} is installed, {file} cannot be")
    DeepSpeedEngine.universal = file
