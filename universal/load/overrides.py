# SPDX-License-Identifier: MIT
"""DeepSpeed's private functions and attributes: replaced for a while, or read."""

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import deepspeed
import torch
import torch.distributed as dist

from universal.errors import CheckpointError
from universal.load.flat import Partition


class LoadOptions(NamedTuple):
    """The arguments of DeepSpeed's load_checkpoint(), which get there under these names."""

    load_module_strict: bool = True
    load_optimizer_states: bool = True
    load_lr_scheduler_states: bool = True
    load_module_only: bool = False


# The operations of DeepSpeed's communication in which ranks wait for each other.
COLLECTIVES = (
    "all_gather",
    "all_gather_base",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "inference_all_reduce",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
)
deepspeed_load = deepspeed.DeepSpeedEngine.load_checkpoint  # before anybody replaces it


@contextlib.contextmanager
def overridden(target: Any, **attributes: Any) -> Iterator[None]:
    """Give an object these attributes in this block, and then those back that it had."""
    absent = object()
    before = {name: vars(target).get(name, absent) for name in attributes}
    for name, value in attributes.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            delattr(target, name)
            if value is not absent:
                setattr(target, name, value)


@contextlib.contextmanager
def meeting_before_collectives(meet: Callable[[], Any]) -> Iterator[None]:
    """Call meet() before each of DeepSpeed's collective operations of all ranks in this block."""
    backend = deepspeed.comm.comm.cdb

    def met_before(name):
        operation = getattr(backend, name)

        def run(*args, **options):
            values = (*args, *options.values())
            groups = [value for value in values if isinstance(value, dist.ProcessGroup)]
            if not groups or groups[0].size() == dist.get_world_size():
                meet()
                if name == "barrier":
                    return None  # they have met
            return operation(*args, **options)

        return run

    names = [name for name in COLLECTIVES if hasattr(backend, name)]
    with overridden(backend, **{name: met_before(name) for name in names}):
        yield


@contextlib.contextmanager
def gathering_in_place(optimizer: Any) -> Iterator[None]:
    """Let ranks broadcast their parts of the weights of ZeRO-1 and 2 in this block, if by gloo: its
    all-gather copies everything twice, which takes twice the time and the model's memory."""
    if dist.get_backend() != "gloo":
        yield
        return
    backend = deepspeed.comm.comm.cdb

    def gather(tensor_list, group, **_):
        works = []
        backend.barrier(group=group)
        # A loop: where a rank can fail from here on, another one waits.
        for rank, part in zip(dist.get_process_group_ranks(group), tensor_list, strict=True):
            works.append(dist.broadcast(part, rank, group, async_op=True))
        for work in works:
            work.wait()

    gathers = {"has_all_gather_into_tensor": lambda: False, "all_gather": gather}
    with overridden(backend, **gathers), overridden(optimizer, allgather_bucket_size=sys.maxsize):
        yield


@contextlib.contextmanager
def gathering_at_once() -> Iterator[None]:
    """Join asynchronous all-gathers in this block into one: ZeRO-3 gathers each of its persistent
    parameters by itself, a hundred small tensors."""
    backend = deepspeed.comm.comm.cdb
    gather_one = backend.all_gather_into_tensor
    waiting = {}

    def gather(output_tensor, input_tensor, group=None, async_op=False):
        if not async_op:
            return gather_one(output_tensor, input_tensor, group=group)
        waiting.setdefault((group, input_tensor.dtype), []).append((output_tensor, input_tensor))
        return types.SimpleNamespace(wait=gather_all)

    def gather_all():
        while waiting:
            (group, _), pairs = waiting.popitem()
            parts = torch.cat([part.flatten() for _, part in pairs])
            gathered = parts.new_empty(dist.get_world_size(group), len(parts))
            gather_one(gathered.view(-1), parts, group=group)
            columns = gathered.split([part.numel() for _, part in pairs], dim=1)
            for (output, _), column in zip(pairs, columns, strict=True):
                output.view(column.shape).copy_(column)

    with overridden(backend, all_gather_into_tensor=gather):
        yield


def check_mesh(engine: deepspeed.DeepSpeedEngine) -> None:
    """Raises CheckpointError if mesh_param= makes sequence-parallel ranks, which DeepSpeed lets
    train apart and save under the same names."""
    mesh = getattr(engine, "mesh_device", None)
    if mesh is not None and engine.sequence_parallel_size > 1:
        raise CheckpointError(
            "mesh_param makes a mesh, whose ranks DeepSpeed lets train apart and save under the "
            "same names: give initialize() an mpu"
        )


def zero_options(engine: deepspeed.DeepSpeedEngine) -> dict[str, Any]:
    """The config's zero_optimization as written; {} if there is none, or it is just `true`."""
    options = engine._config._param_dict.get("zero_optimization")
    return options if isinstance(options, dict) else {}


def is_within_a_step(engine: deepspeed.DeepSpeedEngine) -> bool:
    """Whether an engine has gradients of a step that is not complete."""
    if backwards := getattr(engine, "_unmanaged_backward_count", 0):
        return backwards > 0
    is_boundary = engine._is_gradient_accumulation_boundary
    if is_boundary is None and getattr(engine, "managed_gradient_accumulation", lambda: True)():
        return engine.micro_steps % engine.gradient_accumulation_steps() > 0
    return is_boundary is False  # accelerate says it, and counts steps alone


def begin_step(engine: deepspeed.DeepSpeedEngine) -> None:
    """Start a new optimizer step: reset DeepSpeed's count of micro-batches, which no file holds."""
    engine.micro_steps = 0
    engine._unmanaged_backward_count = 0


def partition_of(parameter: torch.Tensor | None) -> Partition | None:
    """This rank's part of a parameter at ZeRO-3.

    None for any other tensor, and if the part is quantized, on NVMe, or has a second copy for hpZ.
    """
    part = getattr(parameter, "ds_tensor", None)
    if part is None or hasattr(part, "ds_quant_scale") or getattr(part, "final_location", None):
        return None
    if getattr(parameter, "ds_secondary_tensor", None) is not None:
        return None
    group = parameter.ds_process_group
    if part.numel() != -(-parameter.ds_numel // dist.get_world_size(group)):
        return None
    start = dist.get_rank(group) * part.numel()
    return Partition(part.data, start, max(0, min(part.numel(), parameter.ds_numel - start)))


def clip_by(
    engine: deepspeed.DeepSpeedEngine, norm: torch.Tensor, fill: Callable[[], None]
) -> None:
    """Make ZeRO call fill() when the masters' gradients are in their .grad, and then clip by the
    value of `norm`, in place of the norm that it computes."""
    clip = engine.optimizer.unscale_and_clip_grads

    def filled(gradients, _):
        fill()
        clip(gradients, norm)

    engine.optimizer.unscale_and_clip_grads = filled
    engine.get_global_grad_norm = lambda: float(norm)
