#!/usr/bin/env bash
# DeepSpeed 0.19.8's WarmupLR, WarmupDecayLR and WarmupCosineLR, by the config, 4 warm-up steps
# from rate 0.
# Guess, before the run: the first step has rate 0, and the warm-up is over after 4 steps.
# Seen, 2026-11-28, torch 2.13.0: the first two steps have rate 0, and the fifth is the first
# with the full rate: 0, 0, 0.25, 0.5, 0.75, 1 where linear (WarmupLR's own type, log: 0, 0, 0.5,
# 0.79, 1). The state before the first step and that after it are both number 0. A trial of one
# or two steps trains nothing, and a smoke test on "the loss falls" fails.
# Instead: warmup_min_lr above 0, or a LambdaLR of the script's.
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

def rates(kind, params):
    """The rates of 6 steps, as seen by how far a gradient of norm 1 moves a weight."""
    model = torch.nn.Linear(4, 1, bias=False)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        config={
            "train_batch_size": 1,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 1},
            "scheduler": {"type": kind, "params": {"warmup_num_steps": 4} | params},
        },
    )
    moved = []
    for step in range(6):
        before = engine.module.weight.detach().clone()
        engine.backward(engine(torch.eye(4)[:1]).sum())
        engine.step()
        moved.append(round((engine.module.weight - before).norm().item(), 2))
    return moved


linear = {"warmup_type": "linear", "warmup_min_lr": 0.0, "warmup_max_lr": 1.0}
seen = {
    "WarmupLR": rates("WarmupLR", linear),
    "WarmupDecayLR": rates("WarmupDecayLR", linear | {"total_num_steps": 20}),
    "WarmupCosineLR": rates("WarmupCosineLR", {"warmup_type": "linear", "total_num_steps": 20}),
}
print("seen: the rates of the first 6 steps:", seen)
if any(values[:2] != [0.0, 0.0] or values[2] == 0 for values in seen.values()):
    sys.exit("CHANGED: wanted two steps with rate 0")
if seen["WarmupLR"] != [0.0, 0.0, 0.25, 0.5, 0.75, 1.0]:
    sys.exit("CHANGED: wanted the full rate in the sixth step")
END
export CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
"$python" -m torch.distributed.run --standalone --nproc-per-node 1 body.py 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
