#!/usr/bin/env bash
# DeepSpeed 0.19.8, ZeRO-1 with "elastic_checkpoint": true, torch's AdamW, saved and loaded on 2
# ranks.
# Guess, before the run: this is the format for other numbers of ranks, so on the same number it
# loads at least.
# Seen, 2026-11-28, torch 2.13.0: the save says nothing; the load on the very ranks that saved
# fails with an AssertionError. Without the option it loads.
# Instead: leave the option off.
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


def make(elastic):
    model = torch.nn.Linear(4, 3)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.1),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 1, "elastic_checkpoint": elastic},
        },
    )
    return engine


seen = {}
for elastic in (False, True):
    engine = make(elastic)
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    engine.save_checkpoint(f"elastic_{elastic}", tag="t")
    try:
        make(elastic).load_checkpoint(f"elastic_{elastic}", tag="t")
        seen[elastic] = "loads"
    except Exception as error:
        seen[elastic] = f"{type(error).__name__}: {str(error)[:100]}"
if deepspeed.comm.get_rank() == 0:
    print("seen: elastic_checkpoint false and true, on the ranks that saved:", seen)
    if seen[False] != "loads" or seen[True] == "loads":
        sys.exit("CHANGED: wanted an error with the option alone")
END
export CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
"$python" -m torch.distributed.run --standalone --nproc-per-node 2 body.py 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
