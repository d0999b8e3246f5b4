# SPDX-License-Identifier: MIT
"""Ranks that read a checkpoint together, and continue together or not at all.

    with conversation(timeout=1800) as talk:
        values = talk(value)                 # the values of all ranks, in their order
        value = talk.on_rank_0(work)         # what work() returns on rank 0, on all ranks
        with together(talk):                 # no rank leaves this block unless all do
            ...

If anything goes wrong on one rank, all ranks raise the same CheckpointError, and no rank waits forever. loader.py uses
this file, which knows nothing of DeepSpeed's engine; together() is in converter.py. Needs Python 3.10 and torch.
"""

import contextlib
import datetime
import os
import socket
import time

import torch
import torch.distributed as dist

from universal import torch_file
from universal.converter import alone, merged, together
from universal.torch_file import CheckpointError, check_all, compact, load, tensor_of, whole


@contextlib.contextmanager
def conversation(timeout):
    """timeout: seconds that a rank waits for another one, which may still be reading."""
    talk = Conversation(datetime.timedelta(seconds=timeout))
    try:
        yield talk
    finally:
        end_group(talk.group)


def end_group(group=None):
    """End a process group; without one, all of them."""
    # Before torch 2.8 the destructor holds the GIL while it joins the group's threads, and one of them may still need
    # the GIL to release its last tensor (pytorch#154976).
    if torch.__version__ < (2, 8):
        time.sleep(0.2)
    dist.destroy_process_group(group)


class Silent(CheckpointError):
    """Raised when a rank does not answer."""


class Damaged(CheckpointError):
    """Raised when a checkpoint is not whole; another one may be."""


@contextlib.contextmanager
def damage():
    """Errors in this block mean that the checkpoint is damaged, except for errors of the system."""
    try:
        yield
    except (Silent, OSError, MemoryError):
        raise
    except Exception as error:
        raise Damaged(error if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}") from error


@contextlib.contextmanager
def answers():
    """gloo's message about a rank that does not answer, in one line."""
    try:
        yield
    except RuntimeError as error:
        raise Silent(f"rank {dist.get_rank()}: a rank does not answer: {error}") from None


class Conversation:
    def __init__(self, wait):
        self.wait = wait
        self.group = dist.new_group(backend="gloo", timeout=wait)

    @answers()
    def __call__(self, value):
        """[the value of every rank]"""
        values = [None] * dist.get_world_size()
        dist.monitored_barrier(self.group, self.wait)  # it reports which rank is missing
        dist.all_gather_object(values, value, group=self.group)
        return values

    @answers()
    def on_rank_0(self, work):
        """Run work() on rank 0; return its result on all ranks."""
        with together(self):
            values = [work() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(values, 0, group=self.group, device=torch.device("cpu"))
        return values[0]

    @answers()
    def broadcast(self, tensor):
        """Copy rank 0's tensor into that of the others. It is on the CPU, and of any dtype."""
        if tensor.numel():
            dist.broadcast(tensor.view(torch.uint8), 0, group=self.group)


class Reader(torch_file.Reader):
    """Every rank reads its own bytes, once; together the ranks compare them with the checksums of the files."""

    def fill(self, tensor, slices, start=0):
        """Fill the flat CPU tensor with elements from `start` on. Returns the tensor."""
        self.read_slices(memoryview(tensor.view(torch.uint8).numpy()), slices, start)
        return tensor

    def fill_flat(self, flat, key, dtype, parts, parameters):
        """Read a state into a flat tensor like the masters' (the fp32 weights); into the masters themselves if they are
        on the CPU."""
        dtype = getattr(torch, dtype)
        state = flat.detach().to("cpu", dtype) if key == "fp32" else torch.zeros(flat.numel(), dtype=dtype)
        for name, start, at, numel in parts:
            if name in parameters:
                self.fill(state[at : at + numel], parameters[name].states[key], start)
        return state

    def whole(self, tensor, talk, own=False):
        """Returns a tensor in its shape and strides. Rank 0 reads it and sends it to all; with own, every rank reads
        its own."""
        data = torch.empty(tensor.storage.numel, dtype=getattr(torch, tensor.dtype))
        with together(talk):
            if own or dist.get_rank() == 0:
                self.fill(data, tensor.storage)
        if not own:
            talk.broadcast(data)
        return data.as_strided(tensor.size, tensor.stride, tensor.offset)

    def check_together(self, talk):
        """Raise CheckpointError, on all ranks, if what the ranks have read does not match the checksums."""
        spans = merged(talk(self.spans))
        with together(talk), damage():
            check_all(spans, self.opened, dist.get_rank(), dist.get_world_size())


def masters_of(parameter):
    masters = parameter.states["fp32"]
    return whole(masters.dtype, masters, parameter.shape)


def check_weights(found, doubts):
    """Check that the model states (at ZeRO-1 and 2 they hold the weights) and the shards are of one step. Reads them
    only if nothing counts steps, as with SGD, or if there are doubts."""
    counts = any("step" in known for known in (*found.param_groups, *(p.scalars for p in found.parameters.values())))
    module = {} if counts and not doubts else load(found.first)["module"] or {}
    for name, parameter in found.parameters.items():
        weight = tensor_of(module.get(name))
        if weight and weight.size == parameter.shape:  # at ZeRO-3 it is empty
            tensors = compact(weight), masters_of(parameter)
            weight, masters = (Reader().whole(tensor, alone, own=True) for tensor in tensors)
            if not torch.allclose(weight, masters.to(weight.dtype), 0, 0, equal_nan=True):
                older = f"; older ones may be in the way: {', '.join(found.left)}" if found.left else ""
                raise CheckpointError(f"{found.folder}: model states and shards are of different steps{older}")


def check_same_folder(folder, talk):
    """Check that every machine sees the same checkpoint: without a shared folder, each has only its own ranks'
    shards."""
    with together(talk):
        here = {entry.name: entry.stat().st_size for entry in os.scandir(folder)} if folder.is_dir() else None
    seen = talk((socket.gethostname(), here))
    for host, entries in seen:
        if entries != seen[0][1]:
            raise CheckpointError(
                f"{folder} is not the same on {seen[0][0]} and {host}: it must be shared, or mirror.gather() before"
            )


def say(message):
    if dist.get_rank() == 0:
        print(f"universal: {message}".encode(errors="backslashreplace").decode(), flush=True)  # a path may not be UTF-8
