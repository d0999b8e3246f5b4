# SPDX-License-Identifier: MIT
"""Says in one line what DeepSpeed does in a step where a script that guesses well guesses wrong
(docs/surprises.md)."""

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import deepspeed

MANY = 128  # micro-batches, whose bf16 sum has lost much: equal ones stop adding up at 256


def say_of_settings(engine: "deepspeed.DeepSpeedEngine") -> None:
    """Say what the engine's scheduler and sums are worth, on rank 0."""
    if type(engine.lr_scheduler).__name__ == "ReduceLROnPlateau":
        say_once(
            engine,
            "DeepSpeed tells ReduceLROnPlateau the train_batch_size in place of the loss, so the "
            "rate only falls: keep it out of initialize(), and call its step(loss)",
        )
    count = engine.gradient_accumulation_steps()
    if count >= MANY and str(engine.get_data_types()[1]) == "torch.bfloat16":
        say_once(
            engine,
            f"{count} accumulation steps are added up in bf16, whose sums stop growing at 256 "
            'equal ones: put "data_types": {"grad_accum_dtype": "fp32"} into the config',
        )


def say_if_lost(engine: "deepspeed.DeepSpeedEngine", ended: int | None) -> int | None:
    """Say, after engine.backward(), if DeepSpeed has lost the gradients of the call before it.

    ended: what this returned then. Returns the micro-step; None if it does not end a step.
    """
    if engine.inside_no_sync_ctxt or not engine.is_gradient_accumulation_boundary():
        return None
    optimizer = engine.optimizer
    adds = getattr(optimizer, "use_separate_grad_accum", True) or optimizer.cpu_offload
    # DeepSpeed 0.16 adds them, and has no such method.
    if ended == engine.micro_steps and not adds and hasattr(engine, "_backward_epilogue"):
        say_once(
            engine,
            "engine.backward() was called twice before a step(): at ZeRO-1 and 2 DeepSpeed has "
            "thrown away the gradients of all calls but the last: add the losses, and call it once",
        )
    return engine.micro_steps


def say_if_divided_twice(engine: "deepspeed.DeepSpeedEngine", outputs: int) -> None:
    """Say, after a loss.backward() of the script's own, if DeepSpeed has divided the gradients by
    the accumulation steps more than once: at each output that the loss comes from.

    outputs: tensors with gradients that the model has returned.
    """
    divides = hasattr(engine, "_backward_prologue_per_tensor")
    if divides and outputs > 1 and engine.zero_optimization_stage() in (1, 2):
        if engine.gradient_accumulation_steps() > 1:
            say_once(
                engine,
                f"the model returns {outputs} tensors with gradients, and the script calls "
                "loss.backward(): at ZeRO-1 and 2 DeepSpeed divides the gradient by the "
                "accumulation steps at each of those that the loss comes from: call "
                "engine.backward(loss)",
            )


def say_once(engine: "deepspeed.DeepSpeedEngine", text: str) -> None:
    if engine.global_rank == 0:
        print_once(f"universal: WARNING: {text}")


@functools.cache
def print_once(line):
    print(line, flush=True)
