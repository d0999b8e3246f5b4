#!/usr/bin/env bash
# DeepSpeed 0.18.9 and 0.19.8, ZeRO-1 with bf16: a buffer of the model in fp32, 1000.7 (a position
# table, a routing bias, a running mean).
# Guess, before the run: bf16 is about parameters and gradients; two releases of the same year
# treat a buffer alike.
# Seen, 2026-11-28, torch 2.13.0: 0.18.9 makes it bf16, and 1000.7 becomes 1000; 0.19.8 keeps
# 1000.7 in fp32 by default (data_types.buffer_dtype). So a job that goes from one to the other, or
# back, trains with other numbers after the resume; nothing says so.
# Instead: set the buffer again in the script after a load, when the release has changed.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
pins="torch==2.13.0 deepspeed==0.18.9"
python3 -m venv venv && venv/bin/pip install -q $pins
python=$PWD/venv/bin/python
cat > body.py <<'END'
import sys
from importlib.metadata import version
import deepspeed
import torch
deepspeed.utils.logger.setLevel("ERROR")
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile


def make():
    model = torch.nn.Linear(4, 1)
    model.register_buffer("table", torch.tensor([1000.7]))
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config={
            "train_batch_size": 1,
            "bf16": {"enabled": True},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 1},
        },
    )
    return engine


release = version("deepspeed")
engine = make()
kept = engine.module.table.item()
if release == "0.18.9":  # the first of two launches
    engine.save_checkpoint("old", tag="t")
    print(f"seen: DeepSpeed 0.18.9: 1000.7 is {kept:.1f}, {engine.module.table.dtype}")
    if kept != 1000:
        sys.exit("CHANGED: wanted 1000 under 0.18.9")
else:
    engine.load_checkpoint("old", tag="t")
    loaded = engine.module.table.item()
    print(f"seen: DeepSpeed {release}: 1000.7 is {kept:.1f}, {engine.module.table.dtype}; after a load of 0.18.9's {loaded:.1f}")
    if round(kept, 1) != 1000.7 or loaded != 1000:
        sys.exit("CHANGED: wanted 1000.7 under 0.19.8, and 1000.0 after the load")
END
export CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
for release in 0.18.9 0.19.8; do
    [ "$release" = 0.18.9 ] || venv/bin/pip install -q deepspeed==$release
    "$python" -m torch.distributed.run --standalone --nproc-per-node 1 body.py 2> log || { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
done
