# SPDX-License-Identifier: MIT
"""The global batch of a checkpoint, from the config that DeepSpeed saves in it, and an engine's."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from universal.advice import advice_on_batch
from universal.batches import TRUE_BATCH, gradient_factor, ledger_of
from universal.checkpoint.module_states import client_state_of, config_of
from universal.errors import CheckpointError
from universal.files.schema import is_natural

BATCH_KEYS = (
    TRUE_BATCH,
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "sequence_parallel_size",
)
CLIENT_FILES = ("trainer_state.json", "random_states_0.pkl")


class Batch(NamedTuple):
    """The batch that a config names. samples: in a step, on all ranks. micro: in a micro-batch."""

    samples: int
    micro: int


def batch_of(model: dict) -> Batch | None:
    """Returns the batch that the saved config names; None if it names none.

    DeepSpeed's own rule, but TRUE_BATCH comes first. None also where several ranks share a sequence
    (DeepSpeed's count of samples is then a float), and the config says neither how many nor the
    batch.
    """
    config = config_of(model)
    values = [config.get(key) for key in BATCH_KEYS]
    true, batch, micro, steps, sequence = (
        value if is_natural(value) and value else None for value in values
    )
    if isinstance(model.get("global_samples"), float) and not (true or batch or sequence):
        return None
    per_step = (steps or 1) * max(1, model["dp_world_size"] // (sequence or 1))
    samples = true or batch or micro and micro * per_step
    return Batch(samples, micro or max(1, samples // per_step)) if samples else None


def client_signs(folder: Path) -> list[str]:
    """Returns the names, for advice_on_batch(), by which one knows whose code saved a checkpoint.

    folder: the checkpoint.
    """
    beside = [name for name in CLIENT_FILES if (folder.absolute().parent / name).exists()]
    return [*beside, "deepspeed.runtime.pipe"] if any(folder.glob("layer_*")) else beside


# Follows doubt_of(): no number may be advised.
CHOOSE = (
    "another batch was trained, too (an earlier checkpoint may name it): choose one in place of "
    "BATCH"
)


def doubt_of(samples: int, model: dict) -> str:
    """Says in words what DeepSpeed has counted, if it is not `samples` a step; otherwise ""."""
    counted, steps = model.get("global_samples"), model["global_steps"]
    if not counted or counted == samples * steps:
        return ""
    return f" by its config; {counted} samples in {steps} steps are {counted / steps:.4g} each"


def check_trainer_step(folder: Path, steps: int) -> None:
    """Raises CheckpointError if Hugging Face's Trainer has saved a checkpoint within a step, as its
    enable_jit_checkpoint does: it counts the step later than DeepSpeed, and would train it again.

    folder: the checkpoint. steps: of its engine.
    """
    path = folder.parent / "trainer_state.json"
    state = json.loads(path.read_text()) if path.exists() else {}
    counted = state.get("global_step")
    if counted and counted + 1 == steps:
        epoch = state["epoch"] * steps / counted
        raise CheckpointError(
            f"{folder} was saved within a step: the weights have taken {steps} steps, and {path} "
            f"counts {counted}, so that step {steps} would be trained twice. Resume from an "
            f'earlier one; if there is none, write "global_step": {steps} and "epoch": '
            f"{epoch:.17g} there: the learning rate then stays a step behind"
        )


# --------------------------------------------------------------------------------------------------
# at a load


def compare(engine: Any, folder: Path, model: dict, options: Any) -> Iterator[str]:
    """Yields lines about what the batch was and is now, before the engine changes.

    engine: load.engine.Engine. folder: the checkpoint. model: model states. options: LoadOptions.
    Raises CheckpointError if the gradient would be another one.
    """
    if not hasattr(engine.torch_optimizer, "step"):  # None, or DeepSpeed's DummyOptim
        return  # nothing is trained
    if saved := batch_of(model):
        yield from compare_batch(engine, folder, model, saved)
    if config_of(model, "data_efficiency", "data_sampling", "curriculum_learning").get("enabled"):
        yield (
            "WARNING: no file holds the random numbers of DeepSpeed's curriculum sampler: after "
            "its next shuffle it draws other samples"
        )
    if options.load_optimizer_states:
        yield from compare_gradients(engine, model)


def compare_batch(engine, folder, model, saved):
    """Warns if the engine's global batch is not the saved one, or not the only one that was
    trained, and the engine's config names none."""
    written = engine.config()
    now = written.get(TRUE_BATCH, engine.engine.train_batch_size())
    was = saved.samples
    doubt = doubt_of(was, model)
    keep = CHOOSE if doubt else f"to keep {was}"
    micro = engine.engine.train_micro_batch_size_per_gpu()
    if was != now or doubt and TRUE_BATCH not in written:
        signs = [*client_signs(folder), *map(str, client_state_of(model))]
        cure, *_ = advice_on_batch(None if doubt else was, micro, *signs)
        yield f"WARNING: the global batch was {was}{doubt}, and is {now} now: {keep}, {cure}"
    if saved.micro != micro and engine.has_batch_norm():
        yield f"NOTE: BatchNorm sees {micro} samples (was {saved.micro})"


def compare_gradients(engine, model):
    """Raises CheckpointError if the gradient would be more than the mean over the ranks, and was
    not as much; warns if it was, and will be the mean."""
    saved, saved_key = gradient_factor(config_of(model), model["dp_world_size"])
    now, key = gradient_factor(engine.config(), engine.ranks)
    if now not in (1, saved):
        raise CheckpointError(
            f"{key} in the config makes the gradient {now:.4g} times the mean over the ranks, and "
            f"it was {saved:.4g} times: take it out, and multiply each loss by {saved:.4g}"
        )
    if now != saved:
        yield (
            f"WARNING: {saved_key} made the gradient {saved:.4g} times the mean over the ranks, "
            f"which it is now: multiply each loss by {saved:.4g} to go on as before"
        )


def after_load(engine: Any, loaded: Any, group: Any) -> None:
    """Begin a step. loaded: loader.Loaded. Raises: as check_trainer_step()."""
    ledger = ledger_of(engine)
    ledger.backwards.clear()
    ledger.ended = None
    if not loaded.options.load_module_only:  # the engine keeps its own count
        group.on_rank_0(lambda: check_trainer_step(loaded.folder, engine.global_steps))
