"""Saves a checkpoint of every kind of engine, and beside each truth.json: what the live engine says
of itself. Then goes on from one kind to another and saves again, without a step in between."""

import json
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp

import universal
from tests.support.toy import (
    BF16,
    BF16_OPTIMIZER,
    begin,
    falling,
    is_rank_0,
    make,
    torch_optimizer,
    train,
    two_groups,
)

TAG = "global_step2"
KINDS = {
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3},
    "zero2_bf16": {"stage": 2} | BF16,
    "bf16_optimizer": {"stage": 1} | BF16_OPTIMIZER,
    "three_numbers": {"stage": 1, "gradient_accumulation_steps": 3},
    "no_batch": {"stage": 1, "batch": None, "micro": 2, "gradient_accumulation_steps": 2},
}
AGAIN = [("zero1", "zero3"), ("zero3", "zero2"), ("zero2", "zero1")]


def engine_of(options):
    options = {"optimizer": two_groups, "scheduler": falling} | options
    if options.get("batch", 12) is None:  # DeepSpeed multiplies
        options["batch"] = 2 * 2 * dist.get_world_size()
    return make(**options)


def elements(tensors):
    return sum(getattr(tensor, "ds_numel", tensor.numel()) for tensor in tensors)


def write_truth(engine, folder, **more):
    parameters = [*engine.module.parameters()]
    groups = torch_optimizer(engine).param_groups
    truth = {
        "step": engine.global_steps,
        "stage": engine.zero_optimization_stage(),
        "ranks": engine.seq_dp_world_size,
        "trained": elements(p for p in parameters if p.requires_grad),
        "frozen": elements(p for p in parameters if not p.requires_grad),
        "buffers": elements(engine.module.buffers()),
        "samples": engine.train_batch_size(),
        "micro": engine.train_micro_batch_size_per_gpu(),
        "steps": engine.gradient_accumulation_steps(),
        "rates": [group["lr"] for group in groups],
        "decay": [group["weight_decay"] for group in groups],
    }
    if is_rank_0():
        Path(folder, "truth.json").write_text(json.dumps(truth | more))


def save(engine, folder, **more):
    Path(folder).mkdir(exist_ok=True)
    engine.save_checkpoint(folder, tag=TAG, client_state={"step": 2, "note": "x"})
    write_truth(engine, folder, **more)
    dist.barrier()


def sequence_parallel():
    """Two ranks share each sequence: of the batch, ZeRO's ranks count half."""
    parallel_state_sp.initialize_sequence_parallel(2)
    mpu = SimpleNamespace(**vars(parallel_state_sp))
    mpu.get_tensor_model_parallel_world_size = lambda: 1
    mpu.get_tensor_model_parallel_rank = lambda: 0
    optimizer = {"type": "AdamW", "params": {"torch_adam": True, "lr": 0.01}}
    numbers = {"batch": None, "micro": 2, "gradient_accumulation_steps": 3}
    engine = make(1, optimizer=optimizer, mpu=mpu, **numbers)
    for _ in range(6):
        engine.backward(engine(torch.ones(2, 8)))
        engine.step()
    save(engine, "sequence")


def play():
    begin()
    for name, options in KINDS.items():
        engine = engine_of(options)
        for step in (1, 2):
            train(engine, step)
        save(engine, name)
    for source, target in AGAIN:
        engine = engine_of(KINDS[target] | {"seed": 2})
        universal.load_checkpoint(engine, source, TAG)
        save(engine, f"{source}_to_{target}")
    sequence_parallel()
