#!/usr/bin/env bash
# DeepSpeed 0.19.8: "sequence_parallel_size": 2 and "data_parallel_size": 1 in the config, which
# build the groups without an mpu.
# Guess, before the run: both ranks compute parts of one sequence, so gradients are averaged over
# both, and the weights stay the same everywhere.
# Seen, 2026-11-28, torch 2.13.0, 2 ranks, ZeRO-1: each rank keeps the gradient of its own part.
# The weights are apart after the first step (1.0 and 0.8 here), nothing says so, and both ranks
# write the same file names at a save.
# Instead: give initialize() an mpu, deepspeed.runtime.sequence_parallel.parallel_state_sp.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
pins="torch==2.13.0 deepspeed==0.19.8"
python=${FINDINGS_PYTHON:-$PWD/venv/bin/python}  # or an environment that has these
[ -x "$python" ] || { python3 -m venv venv && venv/bin/pip install -q $pins; }
"$python" -c 'import sys, importlib.metadata as m
sys.exit(str([p for p in sys.argv[1:] if m.version(p.split("==")[0]).split("+")[0] != p.split("==")[1]] or "") or 0)' $pins
cat > body.py <<'END'
import sys
import deepspeed
import torch
deepspeed.utils.logger.setLevel("ERROR")
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile

model = torch.nn.Linear(4, 1, bias=False)
torch.nn.init.ones_(model.weight)
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    config={
        "train_batch_size": 1,
        "sequence_parallel_size": 2,
        "data_parallel_size": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1},
        "gradient_clipping": 0.0,
    },
)
rank = deepspeed.comm.get_rank()
part = torch.full((1, 4), float(rank))  # the gradient is 0 on rank 0, and 1 on rank 1
engine.backward(engine(part).sum())
engine.step()
weights = [torch.empty(1, 4) for _ in range(2)]
deepspeed.comm.all_gather(weights, engine.module.weight.detach())
if rank == 0:
    values = [round(weight[0, 0].item(), 4) for weight in weights]
    print("seen: the same weight after one step on the 2 sequence-parallel ranks:", values)
    if values[0] == values[1]:
        sys.exit("CHANGED: they share their gradients")
END
export CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
"$python" -m torch.distributed.run --standalone --nproc-per-node 2 body.py 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
