#!/usr/bin/env bash
# DeepSpeed 0.19.8, ZeRO-2: "round_robin_gradients" is switched on at a resume, on the ranks that
# saved.
# Guess, before the run: a switch for speed changes no layout, so the resume is the same; or the
# load refuses.
# Seen, 2026-11-28, torch 2.13.0, 2 ranks: the load says nothing, and after a step of rate 0 the
# layers saved full of 0, 1, 2, 3 are full of 0, 2, 1, 3: each has the master weights of another
# one.
# Instead: never change the option within a run.
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


def make(round_robin):
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4, bias=False) for layer in range(4)])
    for layer in range(4):
        torch.nn.init.constant_(model[layer].weight, float(layer))
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 2, "round_robin_gradients": round_robin},
        },
    )
    return engine


def step(engine):
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()


engine = make(False)
step(engine)
engine.save_checkpoint("saved", tag="t")
after = {}
for option in (False, True):
    engine = make(option)
    engine.load_checkpoint("saved", tag="t")
    step(engine)
    after[option] = [layer.weight.unique().tolist() for layer in engine.module]
if deepspeed.comm.get_rank() == 0:
    print(f"seen: layers full of 0, 1, 2, 3 are, after a resume and a step of rate 0, {after}")
    if after[False] != [[0.0], [1.0], [2.0], [3.0]] or after[True] == after[False]:
        sys.exit("CHANGED: a resume takes the switch into account")
END
export CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
"$python" -m torch.distributed.run --standalone --nproc-per-node 2 body.py 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
