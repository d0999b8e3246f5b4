#!/usr/bin/env bash
# DeepSpeed 0.19.8, bf16: zero_to_fp32 of checkpoints at ZeRO-1 and 2, with and without
# "data_types": {"grad_accum_dtype": "fp32"}.
# Guess (put into words after a run for another question): the type in which gradients are added
# up is not in a checkpoint, so all four are extracted.
# Seen, 2026-11-28, torch 2.13.0: at ZeRO-1 with fp32 sums another optimizer class trains
# (BF16_Optimizer), whose shards do not say their stage: "... is not a zero checkpoint", a
# ValueError. The script zero_to_fp32.py that the save has put beside it ends so, too. The load
# by an engine, with either type, and ds_to_universal are right.
# Instead: ZeRO-2 with fp32 sums, or a load into an engine and engine.module.state_dict().
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

import contextlib
import io
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint


def extracted(stage, sums):
    model = torch.nn.Linear(4, 1)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.1),
        config={
            "train_batch_size": 1,
            "bf16": {"enabled": True},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage},
        } | sums,
    )
    engine.backward(engine(torch.ones(1, 4, dtype=torch.bfloat16)).sum())
    engine.step()
    engine.save_checkpoint("saved", tag=f"zero{stage}_{len(sums)}")
    try:
        return sorted(get_fp32_state_dict_from_zero_checkpoint("saved", tag=f"zero{stage}_{len(sums)}"))
    except ValueError as error:
        return str(error).split("/")[-1]


in_fp32 = {"data_types": {"grad_accum_dtype": "fp32"}}
with contextlib.redirect_stdout(io.StringIO()):
    seen = {(stage, "fp32 sums" if sums else ""): extracted(stage, sums) for stage in (1, 2) for sums in ({}, in_fp32)}
print("seen: zero_to_fp32 by stage:", seen)
if [isinstance(names, list) for names in seen.values()] != [True, False, True, True]:
    sys.exit("CHANGED: wanted an error at ZeRO-1 with fp32 sums alone")
END
export CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
"$python" -m torch.distributed.run --standalone --nproc-per-node 1 body.py 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
