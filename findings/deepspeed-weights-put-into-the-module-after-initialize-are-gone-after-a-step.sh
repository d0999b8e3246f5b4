#!/usr/bin/env bash
# DeepSpeed 0.19.8, ZeRO-1 and 2 in fp32: weights that a script loads into engine.module after
# deepspeed.initialize(), as for a fine-tuning or an average of weights.
# Guess, before the run: in fp32 the module's weights are those that the optimizer updates, so they
# are trained on (only in bf16 is there a second copy).
# Seen, 2026-11-28, torch 2.13.0: the losses of the next forward pass are those of the new weights;
# then the step writes the old ones back, updated: weights set to 7 are 1 again after a step of
# rate 0. Without ZeRO they stay 7.
# Instead: load before initialize(), or write with deepspeed.utils.safe_set_full_fp32_param().
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


def weight_after_a_step(stage):
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        config={
            "train_batch_size": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage},
        },
    )
    engine.module.load_state_dict({"weight": torch.full((1, 4), 7.0)})
    output = engine(torch.ones(1, 4))
    assert output.item() == 28, "the forward pass uses the new weights"
    engine.backward(output.sum())
    engine.step()
    return engine.module.weight[0, 0].item()


weights = {stage: weight_after_a_step(stage) for stage in (0, 1, 2)}
print("seen: the module's weights were 1, were set to 7, and are after a step of rate 0", weights)
if weights != {0: 7.0, 1: 1.0, 2: 1.0}:
    sys.exit("CHANGED: wanted 7 without ZeRO, 1 at ZeRO-1 and 2")
END
export CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
"$python" -m torch.distributed.run --standalone --nproc-per-node 1 body.py 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
