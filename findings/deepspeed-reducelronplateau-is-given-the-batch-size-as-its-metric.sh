#!/usr/bin/env bash
# DeepSpeed 0.19.8: a ReduceLROnPlateau that is given to deepspeed.initialize().
# Guess, before the run: a TypeError at the first step, for it wants a metric; or the script is
# left to call it.
# Seen, 2026-11-28, torch 2.13.0: engine.step() gives it the number train_batch_size as the loss.
# That never improves, so the rate falls to a tenth every patience + 1 steps, while the loss falls:
# 0.05, 0.05, 0.005, 0.005, ...
# Instead: keep it out of initialize(), and call its step(loss) in the script.
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

model = torch.nn.Linear(4, 1)
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
    lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
    config={"train_batch_size": 2, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True},
)
losses, rates = [], []
for step in range(8):
    loss = engine(torch.ones(2, 4)).square().mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
    rates.append(round(engine.get_lr()[0], 8))
print("losses", *[f"{loss:.4g}" for loss in losses])
print("rates ", *rates)
falls = all(after < before for before, after in zip(losses, losses[1:]))
if not (falls and rates[-1] < 1e-3):
    sys.exit("CHANGED: the rate no longer falls while the loss does")
print("seen: the loss falls at every step, and the rate to a tenth every second step")
END
export CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
"$python" -m torch.distributed.run --standalone --nproc-per-node 1 body.py 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
