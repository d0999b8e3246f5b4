# SPDX-License-Identifier: MIT
"""Resume a DeepSpeed run on any number of ranks and at any ZeRO stage, without converting anything.

    import universal
    path, client_state = universal.load_checkpoint(engine, "checkpoints")

in place of engine.load_checkpoint(...); or, where a framework calls that itself, one line at the
top of the script:

    universal.install()

How a checkpoint gets into an engine is in load/; whether the next steps are those of before, in
proof.py.
"""

import functools
from pathlib import Path

import deepspeed
from packaging.version import Version

from universal import batches
from universal.background import install as save_in_background
from universal.background import wait
from universal.checkpoint.facts import check_trainer_step
from universal.errors import CheckpointError
from universal.load.collective import process_group
from universal.load.engine import Engine
from universal.load.hooks import LoadOptions, meeting_before_collectives, replace_load_checkpoint
from universal.load.loader import (
    Search,
    check_same_call,
    find_and_load,
    has_known_experts,
    load_other_experts,
)
from universal.load.reader import Damaged
from universal.proof import after_load, watch

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
    watch(proof)
    if background:
        save_in_background()
    replace_load_checkpoint(functools.partialmethod(load_checkpoint, missing_ok=True), __file__)


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
        tag: None for the newest complete checkpoint: the one that `latest` names, a later one, or
            else an earlier one. With load_universal in the config only converted ones count.
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
    search = Search(load_dir, tag, missing_ok)
    while True:
        try:
            with process_group(timeout) as group, meeting_before_collectives(group.meet):
                batches.watch_batches()
                wait()  # for saves in the background
                check_requirements(load_dir, custom_load_fn)
                return load_next(engine, search, options, group)
        except Damaged as error:
            if tag is not None or not search.tags:
                raise
            search.damage = str(error)


def load_next(engine, search, options, group):
    """Load the next checkpoint of a search. Returns: as load_checkpoint()."""
    check_same_call(search, options, group)
    wrapped = Engine(engine)
    if engine.has_moe_layers and not has_known_experts(wrapped):
        path, client_state = load_other_experts(engine, search, options)
        folder = path and Path(path).parent  # the path is of a file
    else:
        path, client_state = find_and_load(wrapped, search, options, group)
        folder = path and Path(path)
    if path:
        group.on_rank_0(lambda: check_trainer_step(folder, engine.global_steps))
        if wrapped.loads_scheduler(options) and not options.load_optimizer_states:
            wrapped.take_scheduled_rates()
        resharded = wrapped.is_resharded
        left_out = not (options.load_module_strict and options.load_lr_scheduler_states)
        left_out |= wrapped.is_rounded
        after_load(engine, folder if options.load_optimizer_states else None, resharded, left_out)
    return path, client_state


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
