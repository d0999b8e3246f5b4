"""Plays one rank of thousands: its load runs as it is, on a group that makes up what others send.

What ranks send each other is mostly equal, so an all-gather gives copies of this rank's own value;
what rank 0 broadcasts was written down when rank 0 was played, which is first. In an exchange a
rank gets as much as it sends. Machines have 8 ranks each. gloo's connections are not played."""

import os
import pickle
import time
from pathlib import Path

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from universal.load import collective, reader

ON_A_MACHINE = 8
SENT = Path("broadcasts.pickle")  # by rank 0


class Work:
    def wait(self, *timeout):
        return True


class Others:
    """Takes the place of torch's ProcessGroupGloo. received: bytes. numels: what ranks add up."""

    def __init__(self, numels):
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.numels = numels
        self.received = 0
        self.broadcasts = pickle.loads(SENT.read_bytes()) if self.rank else []

    def count(self, tensor, times=1):
        self.received += tensor.nbytes * times
        return Work()

    def send(self, *_):
        return Work()

    def recv(self, tensors, *_):
        return self.count(tensors[0])

    def allgather(self, lists, tensors):
        for tensor in lists[0]:
            tensor.copy_(tensors[0])
        return self.count(tensors[0], self.size - 1)

    def broadcast(self, tensor, root):
        if self.rank == 0:
            self.broadcasts.append(tensor.clone())
            return Work()
        tensor.copy_(self.broadcasts.pop(0))
        return self.count(tensor)

    def allreduce(self, tensors):
        for tensor in tensors:
            tensor.copy_(tensor.new_tensor(self.numels))
        return self.count(tensors[0], 2)

    def alltoall_base(self, come, tensor, *_):
        come.copy_(tensor)
        return self.count(tensor)


class Clock:
    """CPU seconds of this process, but for what is done for others."""

    def __init__(self):
        self.others = 0.0

    def time(self):
        return time.process_time() - self.others


def become(rank, ranks):
    """Let this process be one of so many ranks."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks)}
    os.environ["LOCAL_SIZE"] = str(min(ranks, ON_A_MACHINE))
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())


def play(groups, clock, calls):
    """Play the others in a load. groups: [{name: shape}] of the model. clock, calls: are not
    counted while this process works for others. Returns the Others."""
    others = Others([shape.numel() for group in groups for shape in group.values()])
    collective.gloo_group = lambda *_: others
    collective.store_of = lambda number: None
    play_machines(others)
    if others.rank == 0:
        play_pool(others, clock, calls)
    return others


def play_machines(others):
    machines_of = reader.machines_of

    def of_ranks(folder, group):
        own, *_ = machines_of(folder, group)
        hosts = [f"host-{rank // ON_A_MACHINE:04}" for rank in range(others.size)]
        others.received += len(pickle.dumps(own)) * others.size // ON_A_MACHINE
        return [own._replace(host=host) for host in hosts]

    reader.machines_of = of_ranks


def play_pool(others, clock, calls):
    do_share = collective.SharedPool.do_share

    def of_all(pool, task):
        results = do_share(pool, task)
        work, items = task
        counted, began = dict(calls), time.process_time()
        shares = [
            pickle.dumps((rank, [*map(work, items[rank :: others.size])]))
            for rank in range(1, others.size)
        ]
        calls.clear()
        calls.update(counted)
        clock.others += time.process_time() - began
        others.received += sum(map(len, shares))
        return results + [*map(pickle.loads, shares)]

    collective.SharedPool.do_share = of_all
