#!/usr/bin/env bash
# DeepSpeed 0.19.8: engine.load_checkpoint(folder) of a folder that has a checkpoint, but no file
# `latest` (as after a copy of one tag, or save_latest=False), and of a folder that does not exist.
# Guess, before the run: an error, at least for the folder that does not exist; a resume was asked
# for.
# Seen, 2026-11-28, torch 2.13.0: both return (None, None) after a warning in the log, and the
# script trains on from its random start, at step 0.
# Instead: assert the first value that load_checkpoint() returns.
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


def make():
    model = torch.nn.Linear(4, 1)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config={
            "train_batch_size": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 1},
        },
    )
    return engine


engine = make()
engine.backward(engine(torch.ones(1, 4)).sum())
engine.step()
engine.save_checkpoint("saved", tag="t", save_latest=False)
seen = {}
for folder in ("saved", "nowhere"):
    engine = make()
    try:
        seen[folder] = (engine.load_checkpoint(folder), engine.global_steps)
    except Exception as error:
        seen[folder] = type(error).__name__
print("seen: what load_checkpoint() returns, and the step after it:", seen)
if set(seen.values()) != {((None, None), 0)}:
    sys.exit("CHANGED: wanted (None, None) and step 0 for both")
END
export CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
"$python" -m torch.distributed.run --standalone --nproc-per-node 1 body.py 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
