#!/usr/bin/env bash
# DeepSpeed 0.19.8: load_checkpoint(load_module_only=True), for a new run from trained weights.
# Guess, before the run: the module's weights are loaded, and are those of the next step, at
# every stage; or ZeRO-3 refuses.
# Seen, 2026-11-28, torch 2.13.0: ZeRO-0, 1 and 2 have the saved weights (7.0). At ZeRO-3 the
# call returns the checkpoint's path and the weights are those of the script's start (1.0), in
# silence: the module's part of the file has no numbers at this stage, and the shards, which have
# them, are left out.
# Instead: load_optimizer_states=False, load_lr_scheduler_states=False at ZeRO-3.
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
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.constant_(model.weight, value)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        config={
            "train_batch_size": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage},
        },
    )
    return engine


def weight_after_a_step(engine):
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    with deepspeed.zero.GatheredParameters(list(engine.parameters())):
        return engine.module.weight[0, 0].item()


after = {}
for stage in (0, 1, 2, 3):
    engine = make(stage, value=7.0)
    weight_after_a_step(engine)
    engine.save_checkpoint(f"zero{stage}", tag="t")
    engine = make(stage, value=1.0)
    path, _ = engine.load_checkpoint(f"zero{stage}", tag="t", load_module_only=True)
    assert path is not None
    after[stage] = weight_after_a_step(engine)
print("seen: saved as 7.0, loaded by load_module_only into an engine of 1.0, after a step of rate 0:", after)
if after != {0: 7.0, 1: 7.0, 2: 7.0, 3: 1.0}:
    sys.exit("CHANGED: wanted 7.0 at ZeRO-0, 1 and 2, and 1.0 at ZeRO-3")
END
export CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
"$python" -m torch.distributed.run --standalone --nproc-per-node 1 body.py 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
