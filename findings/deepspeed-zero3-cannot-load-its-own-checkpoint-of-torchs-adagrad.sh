#!/usr/bin/env bash
# DeepSpeed 0.19.8: torch's Adagrad, saved and loaded by the same script on the same rank, at
# ZeRO-1 and 3.
# Guess, before the run: it has one value per weight as Adam has two, so what saves loads.
# Seen, 2026-11-28, torch 2.13.0: ZeRO-1 resumes. At ZeRO-3 training and save are fine, and the
# load raises a ValueError about the size of a parameter group: the checkpoint is first found to be
# of no use at the resume.
# Instead: resume at ZeRO-3 with Adam, or try a resume on the first day.
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


def make(stage):
    model = torch.nn.Linear(4, 1)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.Adagrad(model.parameters(), lr=0.1),
        config={
            "train_batch_size": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage},
        },
    )
    return engine


seen = {}
for stage in (1, 3):
    engine = make(stage)
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    engine.save_checkpoint(f"zero{stage}", tag="t")
    try:
        make(stage).load_checkpoint(f"zero{stage}", tag="t")
        seen[stage] = "loads"
    except Exception as error:
        seen[stage] = f"{type(error).__name__}: {str(error)[:100]}"
print("seen: Adagrad at ZeRO-1 and 3:", seen)
if seen[1] != "loads" or seen[3] == "loads":
    sys.exit("CHANGED: wanted an error at ZeRO-3 alone")
END
export CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
"$python" -m torch.distributed.run --standalone --nproc-per-node 1 body.py 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
