#!/usr/bin/env bash
# DeepSpeed 0.19.8, bf16, stages 0 to 3: load_checkpoint(load_optimizer_states=False), the
# weights with a fresh optimizer.
# Guess (put into words after a run for another question): the fp32 weights are made from those
# loaded, as at ZeRO-1, so the next step goes on from the checkpoint.
# Seen, 2026-11-28, torch 2.13.0: without ZeRO the forward pass after the load has the saved
# weights (7.0), and a step of rate 0 puts back those of the script's start (1.0): the
# optimizer's fp32 copy was never told. At ZeRO-1, 2 and 3, and with load_module_only=True at
# stage 0, it is 7.0.
# Instead: load_module_only=True without ZeRO.
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
            "bf16": {"enabled": True},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage},
        },
    )
    return engine


def forward_and_after(engine):
    """The weight by a forward pass, and the one after a step of rate 0."""
    output = engine(torch.ones(1, 4, dtype=torch.bfloat16))
    engine.backward(output.sum())
    engine.step()
    with deepspeed.zero.GatheredParameters(list(engine.parameters())):
        return output.item() / 4, engine.module.weight[0, 0].item()


weights = {}
for stage in (0, 1, 2, 3):
    engine = make(stage, value=7.0)
    forward_and_after(engine)
    engine.save_checkpoint(f"zero{stage}", tag="t")
    engine = make(stage, value=1.0)
    engine.load_checkpoint(f"zero{stage}", tag="t", load_optimizer_states=False)
    weights[stage] = forward_and_after(engine)
engine = make(0, value=1.0)
engine.load_checkpoint("zero0", tag="t", load_module_only=True)
weights["0, load_module_only"] = forward_and_after(engine)
print("seen: saved as 7.0: the weight in the first forward pass, and after a step of rate 0:", weights)
if weights != {0: (7.0, 1.0), "0, load_module_only": (7.0, 7.0)} | {stage: (7.0, 7.0) for stage in (1, 2, 3)}:
    sys.exit("CHANGED: wanted 7.0 everywhere but after the step without ZeRO, 1.0 there")
END
export CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
"$python" -m torch.distributed.run --standalone --nproc-per-node 1 body.py 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
