#!/usr/bin/env bash
# DeepSpeed 0.19.8: data_efficiency has "enabled": false, data_routing in it too, and only the
# innermost random_ltd has true.
# Guess, before the run: a section that is switched off is off with all that is in it.
# Seen, 2026-11-28, torch 2.13.0: the outer switches are read and never asked:
# engine.random_ltd_enabled() is True, and the scheduler that drops tokens is made.
# Instead: set the innermost switch.
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
schedule = {"min_value": 1, "max_value": 1, "schedule_type": "fixed_linear"}
schedule["schedule_config"] = {"require_steps": 4, "seq_per_step": 1}
random_ltd = {"enabled": True, "total_layer_num": 2, "random_ltd_layer_num": 0, "random_ltd_layer_id": []}
random_ltd |= {"model_mask_name": None, "model_type": "decoder", "hidden_state_order": "batch_seq_dim"}
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    config={
        "train_batch_size": 1,
        "data_efficiency": {
            "enabled": False,
            "data_routing": {
                "enabled": False,
                "random_ltd": {**random_ltd, "random_ltd_schedule": schedule},
            },
        },
    },
)
made = type(getattr(engine, "random_ltd_scheduler", None)).__name__
print("seen: random-LTD is on:", engine.random_ltd_enabled(), "; its scheduler:", made)
if not engine.random_ltd_enabled():
    sys.exit("CHANGED: the outer switches count")
END
export CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
"$python" -m torch.distributed.run --standalone --nproc-per-node 1 body.py 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
