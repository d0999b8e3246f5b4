#!/usr/bin/env bash
# DeepSpeed 0.19.8: a layer that requires gradients and was not given to the optimizer
# (model_parameters names the others).
# Guess, before the run: a checkpoint holds the whole module, whatever the optimizer has, as at
# ZeRO-1.
# Seen, 2026-11-28, torch 2.13.0: at ZeRO-3 no file of the checkpoint has its weights, neither the
# save nor the load says so, and after a resume they are those of the new process's start (2.0;
# saved were 1.0). At ZeRO-1 and 2 they are restored.
# Instead: set requires_grad = False on what is not trained; frozen weights are saved at every
# stage.
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


def make(stage, value):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    torch.nn.init.constant_(model[0].weight, value)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model[1].parameters(), lr=0.1),
        config={
            "train_batch_size": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage},
        },
    )
    return engine


after = {}
for stage in (1, 2, 3):
    engine = make(stage, value=1.0)
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    engine.save_checkpoint(f"zero{stage}", tag="t")
    engine = make(stage, value=2.0)
    engine.load_checkpoint(f"zero{stage}", tag="t")
    with deepspeed.zero.GatheredParameters(list(engine.parameters())):
        after[stage] = engine.module[0].weight[0, 0].item()
print("seen: saved as 1.0, and after the load at ZeRO-1, 2, 3:", after)
if after != {1: 1.0, 2: 1.0, 3: 2.0}:
    sys.exit("CHANGED: wanted 1.0 at ZeRO-1 and 2, 2.0 at ZeRO-3")
END
export CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
"$python" -m torch.distributed.run --standalone --nproc-per-node 1 body.py 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
