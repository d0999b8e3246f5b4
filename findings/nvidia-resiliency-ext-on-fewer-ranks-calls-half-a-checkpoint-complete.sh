#!/usr/bin/env bash
# nvidia-resiliency-ext 0.4.1, LocalCheckpointManager without replication: each of 2 ranks saves its
# shard; then find_latest(), "the most recent complete checkpoint", on 1 rank and on 3.
# Guess, before the run: -1 on both, as on 1 rank nobody can have the other shard.
# Seen, 2026-11-29, torch 2.13.0: on 3 ranks -1. On 1 rank it is the saved iteration, and load()
# returns rank 0's shard, half of the state, without a word: complete means that each rank of now
# has a file. (The state dict here is of the CPU; the package's own wants a card.)
# Instead: save the number of ranks in the state, and compare it after load().
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
pins="torch==2.13.0 nvidia-resiliency-ext==0.4.1 numpy==2.4.6"
python=${FINDINGS_PYTHON:-$PWD/venv/bin/python}  # or an environment that has these
[ -x "$python" ] || { python3 -m venv venv && venv/bin/pip install -q $pins; }
"$python" -c 'import sys, importlib.metadata as m
sys.exit(str([p for p in sys.argv[1:] if m.version(p.split("==")[0]).split("+")[0] != p.split("==")[1]] or "") or 0)' $pins
cat > body.py <<'END'
import sys
import torch
import torch.distributed as dist
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager


class OnCPU(BasicTensorAwareStateDict):
    def __init__(self, state_dict):
        self.state_dict = state_dict
        self._is_hollow = False

    def copy_tensors_to_cpu(self, non_blocking=False):
        pass

    def restore_tensor_device(self, non_blocking=True):
        pass


dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
manager = LocalCheckpointManager("checkpoints")
if ranks == 2:  # the first launch
    manager.save(iteration=20, state_dict=OnCPU({"shard": torch.full((2,), float(rank))}), is_async=False)
else:
    found = manager.find_latest()
    shard = manager.load()[0].state_dict["shard"].tolist() if found >= 0 else None
    if rank == 0:
        print(f"seen: saved by 2 ranks, on {ranks}: find_latest() is {found}, and the loaded shard {shard}")
        if (found, shard) != {1: (20, [0.0, 0.0]), 3: (-1, None)}[ranks]:
            sys.exit("CHANGED: wanted 20 and rank 0's shard on 1 rank, -1 on 3")
END
export CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
"$python" -m torch.distributed.run --standalone --nproc-per-node 2 body.py 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
"$python" -m torch.distributed.run --standalone --nproc-per-node 3 body.py 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
"$python" -m torch.distributed.run --standalone --nproc-per-node 1 body.py 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
