# SPDX-License-Identifier: MIT
"""How to keep a batch on any number of ranks, in words that can be pasted."""

# How to keep a batch, by what a name has in it: of a file beside a checkpoint, of a key in its
# client state, or of an engine's module.
BATCH_ADVICE = {
    "trainer_state.json": (
        "under a Trainer, put `UNIVERSAL_BATCH={batch} python -m universal` before the command at "
        "every start, with per_device_train_batch_size={micro}"
    ),
    "random_states_": (
        "with accelerate, `config |= batches.config({batch}, {micro})` for the plugin, `steps = "
        "trainer.fill_steps(loader, batches.share(model))` after prepare(), `steps.epoch, "
        "steps.begin = divmod(step, steps.per_epoch)` in place of what skips micro-batches, `for "
        "inputs, weight in zip(loader, steps.all_weights()):` and `accelerator.backward(weight * "
        "loss)`, with `from universal import batches, trainer`"
    ),
    "lightning": (
        "with Lightning, `config |= batches.config({batch}, {micro})`, `accumulate_grad_batches="
        'config.pop("gradient_accumulation_steps")`, and the lines (1) to (4) of '
        "examples/lightning_module.py, with `from universal import batches`"
    ),
    "deepspeed.runtime.pipe": (
        "in a pipeline, `config |= batches.config({batch}, {micro}, ranks)` for so many "
        "data-parallel ranks, and `engine.train_batch((inputs(m), (targets(m), torch.tensor(weight"
        "))) for m, weight in batches.share(engine))` with a loss_fn that multiplies by the weight"
        ", with `from universal import batches`"
    ),
    "": (
        "in a loop of your own, `config |= batches.config({batch}, {micro})`, `for m, weight in "
        "batches.share(engine):` with micro-batch m of the step, and `engine.backward(weight * "
        "loss)`, with `from universal import batches`"
    ),
}


def advice_on_batch(batch: int | None, micro_batch: int, *names: str) -> list[str]:
    """Says how to keep a batch on any number of ranks, a line for each kind of code; what fits
    these names of BATCH_ADVICE comes first. batch: None for one that the reader has to choose."""
    seen = "\n".join(names)
    micro = largest_divisor(batch, micro_batch) if batch else micro_batch
    fitting_first = sorted(BATCH_ADVICE, key=lambda sign: sign not in seen)
    return [
        BATCH_ADVICE[sign].format(batch=batch or "BATCH", micro=micro) for sign in fitting_first
    ]


def largest_divisor(batch: int, most: int) -> int:
    """The largest micro-batch of at most so many samples that makes up the batch."""
    return max((size for size in range(1, most + 1) if batch % size == 0), default=1)
