# SPDX-License-Identifier: MIT
"""Ranks that go on together, or not at all: what one of them raises all raise, and none waits forever.

    with conversation(timeout=1800) as talk:
        values = talk(value)                 # the values of all ranks, in their order
        value = talk.on_rank_0(work)         # what work() gives there, on all ranks
        with together(talk):                 # no rank comes out of it unless all do
            ...

Whatever goes wrong is one CheckpointError, the same on all ranks. universal.py stands on this file, which knows nothing
of checkpoints; together() is the converter's. Needs Python 3.10 and torch.
"""

import contextlib
import datetime
import os
import socket

import torch
import torch.distributed as dist

from ds_to_universal import CheckpointError, together

__version__ = "1.0"  # of the universal checkpoint tutorial, where this file is explained and tested


@contextlib.contextmanager
def conversation(timeout):
    """timeout: seconds that a rank waits for another one, which may be reading."""
    talk = Conversation(datetime.timedelta(seconds=timeout))
    try:
        yield talk
    finally:
        dist.destroy_process_group(talk.group)


@contextlib.contextmanager
def answers():
    """What gloo says of a rank that does not answer, in one line."""
    try:
        yield
    except RuntimeError as error:
        raise CheckpointError(f"rank {dist.get_rank()}: a rank does not answer: {error}") from None


class Conversation:
    def __init__(self, wait):
        self.wait = wait
        self.group = dist.new_group(backend="gloo", timeout=wait)

    @answers()
    def __call__(self, value):
        """[the value of every rank]"""
        values = [None] * dist.get_world_size()
        dist.monitored_barrier(self.group, self.wait)  # it knows which rank does not come
        dist.all_gather_object(values, value, group=self.group)
        return values

    @answers()
    def on_rank_0(self, work):
        """What the work of rank 0 gives, on all ranks."""
        with together(self):
            values = [work() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(values, 0, group=self.group, device=torch.device("cpu"))
        return values[0]

    @answers()
    def broadcast(self, tensor):
        """From rank 0 into that of the others. The tensor is on the CPU, and of any dtype."""
        if tensor.numel():
            dist.broadcast(tensor.view(torch.uint8), 0, group=self.group)


def check_same_folder(folder, talk):
    """Every machine must see the same checkpoint: where no folder is shared, each has the shards of its own ranks."""
    with together(talk):
        here = {entry.name: entry.stat().st_size for entry in os.scandir(folder)} if folder.is_dir() else None
    seen = talk((socket.gethostname(), here))
    if other := sorted({host for host, entries in seen if entries != seen[0][1]}):
        where = f"{seen[0][0]} and on {', '.join(other)}"
        raise CheckpointError(f"{folder} is not the same on {where}: it must be shared, or mirror.gather() before")


def say(message):
    if dist.get_rank() == 0:
        print(f"universal.py: {message}", flush=True)
