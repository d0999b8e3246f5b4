#!/usr/bin/env bash
# DeepSpeed 0.19.8, ZeRO-3 with "reduce_scatter": false and "gradient_predivide_factor": 2.
# Guess, before the run: the factor only says when to divide, so the gradient is the mean of the
# ranks at any factor, on any number of ranks.
# Seen, 2026-11-28, torch 2.13.0: on 2 ranks, where the factor is the number of ranks, the gradient
# is half the mean; on 1 it is the mean. So the same data give norm 1 on 1 rank and 0.5 on 2, and a
# resume on other ranks trains on with another gradient. ZeRO-2 has 1 on both.
# Instead: leave gradient_predivide_factor at 1.
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


def norm(stage):
    """The gradient norm of a model whose gradient is (1, 0, 0, 0) on every rank."""
    model = torch.nn.Linear(4, 1, bias=False)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_predivide_factor": 2.0,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage, "reduce_scatter": False},
        },
    )
    engine.backward(engine(torch.eye(4)[:1]).sum())
    engine.step()
    return float(engine.get_global_grad_norm())


norms = [norm(2), norm(3)]
ranks = deepspeed.comm.get_world_size()
if deepspeed.comm.get_rank():
    sys.exit()
print(f"seen: on {ranks} rank(s) the gradient norm is {norms[0]:.2f} at ZeRO-2, {norms[1]:.2f} at ZeRO-3")
if [round(n, 3) for n in norms] != [1.0, 1 / ranks]:
    sys.exit("CHANGED: wanted 1.00 at ZeRO-2, and 1 / ranks at ZeRO-3")
END
export CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
"$python" -m torch.distributed.run --standalone --nproc-per-node 1 body.py 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
"$python" -m torch.distributed.run --standalone --nproc-per-node 2 body.py 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
