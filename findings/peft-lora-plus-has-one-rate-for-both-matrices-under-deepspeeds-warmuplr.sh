#!/usr/bin/env bash
# PEFT 0.21.2's create_loraplus_optimizer (loraplus_lr_ratio 16) with DeepSpeed 0.19.8's WarmupLR
# by the config.
# Guess, before the run: a schedule scales the rate that each group has, as torch's do, so lora_B
# keeps 16 times the rate of lora_A.
# Seen, 2026-11-28, torch 2.13.0: WarmupLR writes its warmup_max_lr into every group: from the
# first step on both have one rate, and LoRA+ is LoRA. A LambdaLR given to initialize() keeps the
# 16.
# Instead: a schedule of torch's, or warmup_max_lr as a list with one number for each group.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
pins="torch==2.13.0 deepspeed==0.19.8 peft==0.21.2"
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

from peft import LoraConfig, get_peft_model
from peft.optimizers import create_loraplus_optimizer


def rates(scheduler, schedule=None):
    """The rates of the groups that hold parameters, after 4 steps."""
    model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(4, 4)), LoraConfig(r=2, target_modules=["0"]))
    optimizer = create_loraplus_optimizer(model, torch.optim.AdamW, lr=0.01, loraplus_lr_ratio=16)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=schedule,
        config={
            "train_batch_size": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 1},
        } | scheduler,
    )
    for step in range(4):
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
    return [round(group["lr"], 6) for group in engine.optimizer.param_groups]


warmup = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 2}}
by_config = rates({"scheduler": warmup})
by_torch = rates({}, lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: min(1, count / 2)))
print("seen: rates of lora_A and lora_B with WarmupLR:", by_config, "; with torch's LambdaLR:", by_torch)
if by_config != [0.01, 0.01] or by_torch != [0.01, 0.16]:
    sys.exit("CHANGED: wanted one rate with WarmupLR, and 16 times with LambdaLR")
END
export CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
"$python" -m torch.distributed.run --standalone --nproc-per-node 1 body.py 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
