#!/usr/bin/env bash
# accelerate 1.15.0, DDP: a prepared LambdaLR whose rate is 1, 2, 3, ... thousandths; 4 steps on 2
# ranks, save_state(), load_state() on 1 rank.
# Guess, before the run: a schedule counts steps, so after 4 steps it is at 5 thousandths on any
# number of ranks, and goes on by one for each step.
# Seen, 2026-11-28, torch 2.13.0: each step() counts once for every rank: after 4 steps on 2 ranks
# the rate is 9 thousandths. The state is restored on 1 rank as it is, and goes on by 1 for each
# step: 10, 11, where the run on 2 ranks goes on with 11, 13.
# Instead: DataLoaderConfiguration(split_batches=True), or a schedule that is not prepared.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
pins="torch==2.13.0 accelerate==1.15.0"
python=${FINDINGS_PYTHON:-$PWD/venv/bin/python}  # or an environment that has these
[ -x "$python" ] || { python3 -m venv venv && venv/bin/pip install -q $pins; }
"$python" -c 'import sys, importlib.metadata as m
sys.exit(str([p for p in sys.argv[1:] if m.version(p.split("==")[0]).split("+")[0] != p.split("==")[1]] or "") or 0)' $pins
cat > body.py <<'END'
import os
import sys
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: (count + 1) / 1000)
model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)


def steps(count):
    rates = []
    for _ in range(count):
        accelerator.backward(model(torch.ones(1, 4)).sum())
        optimizer.step()
        schedule.step()
        rates.append(round(1000 * schedule.get_last_lr()[0]))
    return rates


ranks = accelerator.num_processes
if ranks == 2:  # the first of two launches
    rates = steps(4)
    accelerator.save_state("saved")
    rates += steps(2)
    wanted = [3, 5, 7, 9, 11, 13]
else:
    accelerator.load_state("saved")
    rates = steps(2)
    wanted = [10, 11]
if accelerator.is_main_process:
    print(f"seen: {'resumed' if ranks == 1 else 'trained'} on {ranks} rank(s): thousandths after each step:", *rates)
    if rates != wanted:
        sys.exit(f"CHANGED: wanted {wanted}")
END
export CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
"$python" -m torch.distributed.run --standalone --nproc-per-node 2 body.py 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
"$python" -m torch.distributed.run --standalone --nproc-per-node 1 body.py 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
