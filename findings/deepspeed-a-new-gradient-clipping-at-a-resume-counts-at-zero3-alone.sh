#!/usr/bin/env bash
# DeepSpeed 0.19.8: gradient_clipping is 1.0 in the run that saves, and 0.1 in the config of the
# one that resumes.
# Guess, before the run: a config is what the script says now, so 0.1 counts at every stage.
# Seen, 2026-11-28, torch 2.13.0: at ZeRO-1 and 2 the checkpoint's 1.0 wins without a word: with
# rate 1 and a gradient of norm 10 the update has norm 1. At ZeRO-3 the config's 0.1 counts.
# Instead: after load_checkpoint() set engine.optimizer.clip_grad = 0.1 at ZeRO-1 and 2.
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


def make(stage, clipping):
    model = torch.nn.Linear(4, 1, bias=False)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        config={
            "train_batch_size": 1,
            "gradient_clipping": clipping,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage},
        },
    )
    return engine


def update(engine):
    """How far a step with a gradient of norm 10 moves the weights."""
    with deepspeed.zero.GatheredParameters(list(engine.parameters())):
        before = engine.module.weight.detach().clone()
    engine.backward(engine(10 * torch.eye(4)[:1]).sum())
    engine.step()
    with deepspeed.zero.GatheredParameters(list(engine.parameters())):
        return round((engine.module.weight - before).norm().item(), 4)


moved = {}
for stage in (1, 2, 3):
    engine = make(stage, clipping=1.0)
    update(engine)
    engine.save_checkpoint(f"zero{stage}", tag="t")
    engine = make(stage, clipping=0.1)
    engine.load_checkpoint(f"zero{stage}", tag="t")
    moved[stage] = update(engine)
print("seen: resumed with gradient_clipping 0.1, a step moves the weights by", moved)
if moved != {1: 1.0, 2: 1.0, 3: 0.1}:
    sys.exit("CHANGED: wanted 1.0 at ZeRO-1 and 2, 0.1 at ZeRO-3")
END
export CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
"$python" -m torch.distributed.run --standalone --nproc-per-node 1 body.py 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
