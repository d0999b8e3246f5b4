# SPDX-License-Identifier: MIT
"""Resume a DeepSpeed run on any number of ranks and at any ZeRO stage, without converting anything.

    import universal
    path, client_state = universal.load_checkpoint(engine, "checkpoints")

in place of engine.load_checkpoint(...); or, where a framework calls that itself, one line at the
top of the script:

    universal.install()

How a checkpoint gets into an engine is in load/, which knows nothing of what is added here: each of
ADD_ONS can go, with its name in that tuple. What install() changes in DeepSpeed is in patches.py.
"""

from pathlib import Path

import deepspeed
from packaging.version import Version

from universal import background, batches, patches, proof
from universal.batch import saved
from universal.errors import CheckpointError
from universal.load.collective import process_group
from universal.load.loader import Search, find_and_load
from universal.load.overrides import LoadOptions, check_mesh, meeting_before_collectives
from universal.save import plain

# Modules with one or more of four functions, which are called in this order: install(), for every
# engine; before_load(engine); compare(engine, folder, model states, options), when a load knows the
# checkpoint and has not changed the engine; after_load(engine, loaded, group).
ADD_ONS = (batches, saved, plain, background, proof)
OLDEST_DEEPSPEED = "0.16.4"
TIMEOUT = 1800  # seconds that a rank waits for another one, which may still be reading


def install(proof: bool = True, background: bool = False) -> None:
    """Let load_checkpoint() answer every engine.load_checkpoint(), such as that of a Trainer.

    As with DeepSpeed's, a first start (no tag, and an absent or empty folder) finds nothing and
    continues. A command that has no script starts with the folder start/ on its PYTHONPATH.

    proof: whether the steps after a checkpoint are written down, and compared when a resumed run
        trains them again (proof.py).
    background: whether engine.save_checkpoint() returns before its files are on the disk
        (background.py).

    Raises: CheckpointError, if another copy of this package is installed.
    """
    patches.claim(__file__)
    patches.patch("resume", load_checkpoint=load_in_place)
    wanted = {"universal.proof": proof, "universal.background": background}
    for add_on in having("install"):
        if wanted.get(add_on.__name__, True):
            add_on.install()
    if not proof:
        patches.undo("proof")


def having(function):
    """Returns those of ADD_ONS that have a function of this name."""
    return [add_on for add_on in ADD_ONS if hasattr(add_on, function)]


def load_in_place(method, engine, *args, **options):
    """Call load_checkpoint() in place of DeepSpeed's method."""
    return load_checkpoint(engine, *args, missing_ok=True, **options)


def load_checkpoint(
    engine: deepspeed.DeepSpeedEngine,
    load_dir: str,
    tag: str | None = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    custom_load_fn: None = None,
    missing_ok: bool = False,
    timeout: float = TIMEOUT,
) -> tuple[str | None, dict | None]:
    """Load a checkpoint as engine.load_checkpoint() does, but saved by any number of ranks, at any
    ZeRO stage, or converted.

    Args, where they differ from DeepSpeed's:
        tag: None for the checkpoint that `latest` names, or, if that is not complete, another,
            earlier ones first. With load_universal in the config only converted ones count.
        load_module_strict: False lets new parameters keep their weights, with fresh optimizer
            states, leaves out those that are gone, and names both in a line.
        missing_ok: return (None, None), as DeepSpeed does, if load_dir has no checkpoint at all.
        timeout: seconds that a rank waits for another one.

    Returns: (folder of the checkpoint, client state); rank 0's where other ranks had saved it.
    Raises: CheckpointError, on all ranks, if there is no such checkpoint, or it is damaged,
        incomplete, or of another model or optimizer. Do not train the engine then.
    """
    options = LoadOptions(
        load_module_strict=load_module_strict,
        load_optimizer_states=load_optimizer_states and not load_module_only,
        load_lr_scheduler_states=load_lr_scheduler_states,
        load_module_only=load_module_only,
    )
    checks = [add_on.compare for add_on in having("compare")]
    with process_group(timeout) as group, meeting_before_collectives(group.meet):
        for add_on in having("before_load"):
            add_on.before_load(engine)
        check_requirements(load_dir, custom_load_fn)
        check_mesh(engine)
        loaded = find_and_load(
            engine, Search(Path(load_dir), tag, missing_ok, options, checks), group
        )
        for add_on in having("after_load") if loaded.folder else ():
            add_on.after_load(engine, loaded, group)
        return loaded.folder and str(loaded.folder), loaded.client_state


def check_requirements(load_dir, custom_load_fn):
    """Raises CheckpointError if this DeepSpeed is too old, or an argument cannot be used."""
    version = deepspeed.__version__
    if Version(version) < Version(OLDEST_DEEPSPEED):
        raise CheckpointError(
            f"universal needs DeepSpeed {OLDEST_DEEPSPEED} or newer, and finds {version}"
        )
    if not isinstance(load_dir, (str, Path)):
        raise CheckpointError(f"load_dir is {load_dir!r}, which names no folder")
    if custom_load_fn:
        raise CheckpointError(
            "custom_load_fn would get no weights: they are read from the shards of the optimizer"
        )
