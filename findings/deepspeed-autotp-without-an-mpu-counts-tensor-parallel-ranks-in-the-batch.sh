#!/usr/bin/env bash
# DeepSpeed 0.19.8: AutoTP by the config ("autotp_size": 2) on 2 ranks, with "train_batch_size": 8
# and no mpu.
# Guess, before the run: 2 tensor-parallel ranks are 1 data-parallel one, so the micro-batch is 8.
# Seen, 2026-11-28, torch 2.13.0: the config divides by all ranks: the engine asks for
# micro-batches of 4, of which there is one, as both ranks compute on the same samples. A step
# trains 4 samples, and global_samples counts 8.
# Instead: give initialize() mpu=deepspeed.utils.groups after groups._init_tp_mesh_device(2).
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

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    config={
        "train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1},
        "tensor_parallel": {
            "autotp_size": 2,
            "partition_config": {
                "use_default_specs": False,
                "layer_specs": [
                    {"patterns": [r".*0\.weight$"], "partition_type": "column"},
                    {"patterns": [r".*1\.weight$"], "partition_type": "row"},
                ],
            },
        },
    },
)
engine.backward(engine(torch.ones(4, 4)).sum())
engine.step()
micro_batch = engine.train_micro_batch_size_per_gpu()
data_parallel = deepspeed.utils.groups.get_data_parallel_world_size()
if deepspeed.comm.get_rank() == 0:
    print(f"seen: train_batch_size {engine.train_batch_size()}, micro-batch {micro_batch}, 1 accumulation step, "
          f"{data_parallel} data-parallel rank(s): a step trains {micro_batch * data_parallel} samples "
          f"and counts {engine.global_samples}")
    if (micro_batch, data_parallel, engine.global_samples) != (4, 1, 8):
        sys.exit("CHANGED: wanted a micro-batch of 4 on 1 data-parallel rank")
END
export CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
"$python" -m torch.distributed.run --standalone --nproc-per-node 2 body.py 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
