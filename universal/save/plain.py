# SPDX-License-Identifier: MIT
"""What engine.save_checkpoint() is asked and told, in the background or not."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import psutil
import torch
from torch.utils._pytree import tree_flatten

from universal import patches
from universal.checkpoint.tags import checkpoints_near
from universal.errors import CheckpointError
from universal.load.collective import say
from universal.load.overrides import check_mesh, is_within_a_step

COUNTED = ("global_steps", "global_samples", "skipped_steps", "dp_world_size", "mp_world_size")


def install() -> None:
    """Check what every engine.save_checkpoint() is given from now on."""
    patches.patch("saves", save_checkpoint=checked_save)


def after_load(engine: deepspeed.DeepSpeedEngine, loaded: Any, group: Any) -> None:
    """Note that the run goes on: what it saves over is its own."""
    engine.universal_run_is_known = True


def checked_save(
    method: Callable,
    engine: deepspeed.DeepSpeedEngine,
    save_dir: str,
    tag: str | None = None,
    client_state: dict | None = None,
    *args: Any,
    **options: Any,
) -> Any:
    """Save by a method. Raises CheckpointError; says which checkpoint is of another run, and what
    the save leaves out."""
    check_mesh(engine)
    check_client_state(engine, client_state)
    if is_within_a_step(engine):
        say(
            "WARNING: this save is within a step, whose gradients so far are in no file: save "
            "after the step() that updates the weights"
        )
    say_if_another_run(engine, save_dir)
    return method(engine, save_dir, tag, client_state or {}, *args, **options)


def check_client_state(engine: deepspeed.DeepSpeedEngine, client_state: dict | None) -> None:
    """Raises CheckpointError if a client state would replace what DeepSpeed saves of the engine.

    With ZeRO the optimizer is in other files.
    """
    parts = {"module": engine.module, "lr_scheduler": engine.lr_scheduler}
    if not engine.zero_optimization():
        parts["optimizer"] = engine.optimizer
    for key, value in (client_state or {}).items():
        own = parts[key].state_dict() if parts.get(key) else None
        if key in COUNTED:
            own = getattr(engine, key)
        if own is not None and not hold_same(value, own):
            raise CheckpointError(
                f"client_state[{key!r}] would take the place of the engine's own in the "
                "checkpoint: save it under another name"
            )


def hold_same(value, own):
    """Whether two states hold the same tensors, and equal numbers."""
    leaves, shape = tree_flatten(value)
    own_leaves, own_shape = tree_flatten(own)
    if shape != own_shape:
        return False
    leaves, own_leaves = [
        [leaf.data_ptr() if torch.is_tensor(leaf) else leaf for leaf in of_state]
        for of_state in (leaves, own_leaves)
    ]
    return leaves == own_leaves


def say_if_another_run(engine: deepspeed.DeepSpeedEngine, save_dir: str | os.PathLike) -> None:
    """Print, before an engine's first save, which checkpoint of another run has as many steps, if
    the engine has loaded none. Call it on all ranks."""
    is_known = getattr(engine, "universal_run_is_known", False)
    engine.universal_run_is_known = True
    if is_known or engine.global_rank:
        return
    step = engine.global_steps
    since = psutil.Process().create_time()  # others that this process has saved are of this run
    near = []
    with contextlib.suppress(OSError):  # else the save would end on this rank alone
        near = checkpoints_near(Path(save_dir), step)
    for place, tag in near:
        if tag.step >= step and tag.written < since:
            say(
                f"WARNING: {place} is of step {tag.step}, and this run, which has loaded no "
                f"checkpoint, now saves its step {step} there: to continue the older run, stop "
                "this one, and start the script with its resume option (Trainer: "
                "resume_from_checkpoint=True); if it is new, give it another folder"
            )
            return
