#!/usr/bin/env bash
# DeepSpeed 0.19.8's Muon, ZeRO-1, 2 and 3: gradient_clipping, which is 1 unless the config names
# it.
# Guess, before the run: the raw gradient is clipped, as everywhere; the orthogonalized update
# has the same size whatever the gradient had, so clipping hardly matters to Muon.
# Seen, 2026-11-28, torch 2.13.0: the orthogonalized updates of all matrices are clipped,
# together, to norm 1. A matrix of 8 x 8 moves by 2.6 times the rate without clipping, by 1.0
# with clipping 1; each of four by 2.1 and by 0.5, whatever the size of the gradient. So the rate
# is divided by a number that grows with the model, and get_global_grad_norm() is the norm of the
# updates.
# Instead: "gradient_clipping": 0 for Muon.
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

def norms(stage, layers, clipping, scale=1.0):
    """How far each matrix moves in a step of rate 1, and the gradient norm that is reported."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8, bias=False) for _ in range(layers)])
    for parameter in model.parameters():
        parameter.use_muon = True
    start = [parameter.detach().clone() for parameter in model.parameters()]
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_batch_size": 1,
            "optimizer": {"type": "Muon", "params": {"lr": 1.0, "momentum": 0.9, "weight_decay": 0.0}},
            "zero_optimization": {"stage": stage, "reduce_scatter": False},
        } | clipping,
    )
    engine.backward(scale * engine(torch.eye(8)).square().sum())
    engine.step()
    with deepspeed.zero.GatheredParameters(list(engine.parameters())):
        moved = [(new - old).norm().item() for new, old in zip(engine.module.parameters(), start)]
    return [round(value, 2) for value in moved], round(float(engine.get_global_grad_norm()), 2)


off, unnamed = {"gradient_clipping": 0.0}, {}
for stage in (1, 2, 3):
    one, clipped = norms(stage, 1, off), norms(stage, 1, unnamed)
    loud, four = norms(stage, 1, unnamed, scale=1000.0), norms(stage, 4, unnamed)
    print(f"seen: ZeRO-{stage}: (moved by, gradient norm) of one matrix: without clipping {one}, by default {clipped}, "
          f"with 1000 times the loss {loud}; of four by default {four}")
    if not (one[0][0] > 2 and clipped[0] == loud[0] == [1.0] and one[1] == loud[1] and max(four[0]) < 0.6):
        sys.exit("CHANGED: wanted more than 2, 1.0, 1.0, less than 0.6, and a norm that does not follow the loss")
END
export CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
"$python" -m torch.distributed.run --standalone --nproc-per-node 1 body.py 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
