"""Pairs of ranks that leave while gloo's threads still have tensors: how often each exit code came.

python exits.py PAIRS  prints {code: times}.
"""

import collections
import os
import sys
import tempfile

import torch
import torch.distributed as dist

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", ".."))
from universal import elastic


def leave(rank, path):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    GROUPS.append(dist.group.WORLD)  # as DeepSpeed does, so that nobody ends gloo's threads
    dist.barrier()
    for _ in range(30):
        tensor = torch.ones(200_000)
        dist.all_reduce(tensor, async_op=True)
        del tensor  # it is gloo's alone
    dist.barrier = lambda: None  # nobody waits for them
    elastic.exit_together(finished=True)


GROUPS = []
codes = collections.Counter()
for _ in range(int(sys.argv[1])):
    path = tempfile.mktemp()
    pids = []
    for rank in range(2):
        pid = os.fork()
        if not pid:
            leave(rank, path)  # and takes the interpreter down
        pids.append(pid)
    codes.update(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)
print(dict(codes))
