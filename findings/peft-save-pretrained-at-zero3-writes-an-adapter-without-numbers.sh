#!/usr/bin/env bash
# PEFT 0.21.2 with DeepSpeed 0.19.8: model.save_pretrained() of a LoRA adapter at ZeRO-2 and at
# ZeRO-3.
# Guess, before the run: an adapter is small, so PEFT gathers it; or the save raises, as its
# weights are elsewhere.
# Seen, 2026-11-28, torch 2.13.0: at ZeRO-2 the file has lora_A (2, 4) and lora_B (4, 2); at ZeRO-3
# both have shape (0,), and nothing is said. save_pretrained() is called when the training is over,
# so nothing is left to save again.
# Instead: save within deepspeed.zero.GatheredParameters(list(model.parameters())).
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
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
deepspeed.utils.logger.setLevel("ERROR")
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile

shapes = {}
for stage in (2, 3):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["0"]))
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
        config={
            "train_batch_size": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        },
    )
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    engine.module.save_pretrained(f"zero{stage}")
    saved = load_file(f"zero{stage}/adapter_model.safetensors")
    shapes[stage] = sorted(tuple(value.shape) for value in saved.values())
print("seen: shapes in adapter_model.safetensors at ZeRO-2 and 3:", shapes)
if shapes[2] != [(2, 4), (4, 2)] or shapes[3] != [(0,), (0,)]:
    sys.exit("CHANGED: wanted whole matrices at ZeRO-2, empty ones at ZeRO-3")
END
export CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
"$python" -m torch.distributed.run --standalone --nproc-per-node 1 body.py 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
