#!/usr/bin/env bash
# DeepSpeed 0.19.8: a universal checkpoint made of a ZeRO-1 checkpoint, loaded by an engine at
# ZeRO-2 and at ZeRO-3.
# Guess, before the run: it holds each parameter whole, so it loads at every stage: that is what it
# is for.
# Seen, 2026-11-28, torch 2.13.0: ZeRO-2 loads it. ZeRO-3 ends in an AssertionError without a word,
# as it looks for what only the conversion of a ZeRO-3 checkpoint writes.
# Instead: resume at the stage that saved, or at 2 for 1 and 1 for 2.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
pins="torch==2.13.0 deepspeed==0.19.8"
python=${FINDINGS_PYTHON:-$PWD/venv/bin/python}  # or an environment that has these
[ -x "$python" ] || { python3 -m venv venv && venv/bin/pip install -q $pins; }
"$python" -c 'import sys, importlib.metadata as m
sys.exit(str([p for p in sys.argv[1:] if m.version(p.split("==")[0]).split("+")[0] != p.split("==")[1]] or "") or 0)' $pins
cat > body.py <<'END'
import contextlib
import io
import sys
import deepspeed
import torch
deepspeed.utils.logger.setLevel("ERROR")
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile
from deepspeed.checkpoint import ds_to_universal


def make(stage, universal=False):
    model = torch.nn.Linear(4, 1, bias=False)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.1),
        config={
            "train_batch_size": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage},
            "checkpoint": {"load_universal": universal},
        },
    )
    return engine


engine = make(1)
engine.backward(engine(torch.ones(1, 4)).sum())
engine.step()
engine.save_checkpoint("saved", tag="t")
words = "ds_to_universal --inject_missing_state --num_extract_workers 1 --num_merge_workers 1"
sys.argv = [*words.split(), "--input_folder", "saved/t", "--output_folder", "saved/u"]
with contextlib.redirect_stdout(io.StringIO()):
    ds_to_universal.main(ds_to_universal.parse_arguments())
seen = {}
for stage in (1, 2, 3):
    try:
        make(stage, universal=True).load_checkpoint("saved", tag="u")
        seen[stage] = "loads"
    except Exception as error:
        seen[stage] = f"{type(error).__name__}: {str(error)[:120]}"
print("seen: a universal checkpoint of ZeRO-1 at ZeRO-1, 2, 3:", seen)
if [text == "loads" for text in seen.values()] != [True, True, False]:
    sys.exit("CHANGED: wanted an error at ZeRO-3 alone")
END
export CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
"$python" -m torch.distributed.run --standalone --nproc-per-node 1 body.py 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
