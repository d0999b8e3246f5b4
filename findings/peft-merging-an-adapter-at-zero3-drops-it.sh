#!/usr/bin/env bash
# PEFT 0.21.2 with DeepSpeed 0.19.8: merge_and_unload() of a trained LoRA adapter at ZeRO-2 and 3.
# Guess, before the run: the merged model computes what the model with its adapter did; or the
# merge raises, as the weights are elsewhere.
# Seen, 2026-11-29, torch 2.13.0: at ZeRO-2 it does. At ZeRO-3 nothing is raised or said, and the
# merged model computes what the base model did: the update went into an empty tensor, and the
# adapter is gone. (After a forward pass without a step, where ZeRO-3 has kept the adapter gathered,
# it raises.)
# Instead: gather first, deepspeed.zero.GatheredParameters(list(model.parameters()),
# modifier_rank=0), and merge within that block; or save the adapter, and merge without ZeRO.
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
deepspeed.utils.logger.setLevel("ERROR")
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile

x = torch.ones(1, 4)
seen = {}
for name in ("ZeRO-2", "ZeRO-3", "ZeRO-3, gathered"):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    base = model(x).detach()
    model = get_peft_model(model, LoraConfig(r=2, lora_alpha=8, target_modules=["0"]))
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0),
        config={
            "train_batch_size": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": int(name[5]), "stage3_param_persistence_threshold": 0},
        },
    )
    engine.backward(engine(x).sum())
    engine.step()
    with torch.no_grad():
        weights = list(model.parameters())
        with deepspeed.zero.GatheredParameters(weights):
            weight, bias, lora_a, lora_b = (tensor.clone() for tensor in weights)
        trained = torch.nn.functional.linear(x, weight + 4 * lora_b @ lora_a, bias)
        gathered = weights if "gathered" in name else []
        with deepspeed.zero.GatheredParameters(gathered, modifier_rank=0):
            merged = engine.module.merge_and_unload()
        output = merged(x)
    results = {"trained": trained, "base": base}
    seen[name] = [key for key in results if torch.allclose(output, results[key], atol=1e-5)]
print("seen: the merged model computes what these do:", seen)
if seen != {"ZeRO-2": ["trained"], "ZeRO-3": ["base"], "ZeRO-3, gathered": ["trained"]}:
    sys.exit("CHANGED: wanted the trained model at ZeRO-2 and gathered, the base at ZeRO-3")
END
export CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
"$python" -m torch.distributed.run --standalone --nproc-per-node 1 body.py 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
