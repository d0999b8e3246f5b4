#!/usr/bin/env bash
# transformers 5.24.0: a checkpoint of 2 ranks (rng_state_0.pth, rng_state_1.pth), resumed on 1
# process; random numbers as dropout draws them.
# Guess, before the run: the one process takes rank 0's state, as it takes rank 0's place.
# Seen, 2026-11-28, torch 2.13.0: one process looks for rng_state.pth alone, and says at level INFO
# that there is none. So the numbers of steps 3 and 4 are those of 1 and 2 again (0.383, 0.959):
# dropout and noise repeat what the model has seen.
# Instead: copy rng_state_0.pth to rng_state.pth before such a resume.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
pins="torch==2.13.0 accelerate==1.15.0 transformers==5.24.0"
python=${FINDINGS_PYTHON:-$PWD/venv/bin/python}  # or an environment that has these
[ -x "$python" ] || { python3 -m venv venv && venv/bin/pip install -q $pins; }
"$python" -c 'import sys, importlib.metadata as m
sys.exit(str([p for p in sys.argv[1:] if m.version(p.split("==")[0]).split("+")[0] != p.split("==")[1]] or "") or 0)' $pins
cat > body.py <<'END'
import json
import os
import sys
import torch
from transformers import Trainer, TrainingArguments

drawn = []


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        drawn.append(round(torch.rand(()).item(), 6))
        return {"loss": (self.weight * x).mean()}


ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
arguments = TrainingArguments(
    "out", per_device_train_batch_size=1, max_steps=4, save_steps=2, report_to=[], disable_tqdm=True, use_cpu=True
)
data = [{"x": torch.ones(1)} for _ in range(16)]
trainer = Trainer(Model(), arguments, train_dataset=data)
trainer.train(resume_from_checkpoint="out/checkpoint-2" if ranks == 1 else None)
if rank == 0 and ranks == 2:
    json.dump(drawn, open("drawn.json", "w"))
elif rank == 0:
    first = json.load(open("drawn.json"))
    print(f"seen: rank 0 of 2 draws {first} in steps 1 to 4; resumed at step 3 on one process: {drawn}")
    if drawn == first[2:]:
        sys.exit("CHANGED: rank 0's state is restored")
END
export CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
"$python" -m torch.distributed.run --standalone --nproc-per-node 2 body.py 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
"$python" -m torch.distributed.run --standalone --nproc-per-node 1 body.py 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
