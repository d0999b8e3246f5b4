#!/usr/bin/env bash
# accelerate 1.15.0 with DeepSpeed 0.19.8, ZeRO-1: accelerator.clip_grad_norm_(parameters, 0.1),
# where DeepSpeed's config has gradient_clipping 5.
# Guess, before the run: it clips to 0.1, as without DeepSpeed, or raises, as clip_grad_value_
# does.
# Seen, 2026-11-28, torch 2.13.0: the number is not read. accelerator.backward() has made
# DeepSpeed's step already, so the weights have moved by 5 (rate 1, gradient of norm 10) when the
# call comes; it returns 10, the norm before clipping.
# Instead: write gradient_clipping into DeepSpeed's config.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
pins="torch==2.13.0 deepspeed==0.19.8 accelerate==1.15.0 transformers==5.24.0"
python=${FINDINGS_PYTHON:-$PWD/venv/bin/python}  # or an environment that has these
[ -x "$python" ] || { python3 -m venv venv && venv/bin/pip install -q $pins; }
"$python" -c 'import sys, importlib.metadata as m
sys.exit(str([p for p in sys.argv[1:] if m.version(p.split("==")[0]).split("+")[0] != p.split("==")[1]] or "") or 0)' $pins
cat > body.py <<'END'
import sys
import deepspeed
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
deepspeed.utils.logger.setLevel("ERROR")
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile

plugin = DeepSpeedPlugin(
    hf_ds_config={
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 5.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1},
    }
)
accelerator = Accelerator(deepspeed_plugin=plugin)
model = torch.nn.Linear(4, 1, bias=False)
torch.nn.init.zeros_(model.weight)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
accelerator.backward(model(10 * torch.eye(4)[:1]).sum())
moved = model.module.weight.norm().item()
norm = float(accelerator.clip_grad_norm_(model.parameters(), 0.1))
optimizer.step()
after = model.module.weight.norm().item()
print(f"seen: moved by {moved:.4f} before clip_grad_norm_(..., 0.1), which returns {norm:.4f}; after step() {after:.4f}")
if [round(value, 3) for value in (moved, norm, after)] != [5.0, 10.0, 5.0]:
    sys.exit("CHANGED: wanted 5, 10 and 5")
END
export CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
"$python" -m torch.distributed.run --standalone --nproc-per-node 1 body.py 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
