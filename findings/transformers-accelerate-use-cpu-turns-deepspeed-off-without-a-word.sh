#!/usr/bin/env bash
# transformers 5.24.0, accelerate 1.15.0, DeepSpeed 0.19.8 on a CPU:
# TrainingArguments(deepspeed=...) in a process that has ACCELERATE_USE_CPU=true in its environment
# (accelerate launch --cpu sets it).
# Guess, before the run: the argument is explicit, so DeepSpeed trains, on the CPU; or an error
# says that the two exclude each other.
# Seen, 2026-11-28, torch 2.13.0: the trainer runs without DeepSpeed and says nothing. Its
# checkpoint is of another kind (optimizer.pt, no global_step1), so a resume in a process without
# the variable finds no DeepSpeed checkpoint.
# Instead: unset ACCELERATE_USE_CPU; DS_ACCELERATOR=cpu is DeepSpeed's own way to say CPU.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
pins="torch==2.13.0 deepspeed==0.19.8 accelerate==1.15.0 transformers==5.24.0"
python=${FINDINGS_PYTHON:-$PWD/venv/bin/python}  # or an environment that has these
[ -x "$python" ] || { python3 -m venv venv && venv/bin/pip install -q $pins; }
"$python" -c 'import sys, importlib.metadata as m
sys.exit(str([p for p in sys.argv[1:] if m.version(p.split("==")[0]).split("+")[0] != p.split("==")[1]] or "") or 0)' $pins
cat > body.py <<'END'
import os
import sys
import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
deepspeed.utils.logger.setLevel("ERROR")
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile

use_cpu = os.environ["ACCELERATE_USE_CPU"]
shape = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
data = [{"input_ids": [n, 1, 2, 3], "labels": [n, 1, 2, 3]} for n in range(4)]
trainer = Trainer(
    LlamaForCausalLM(LlamaConfig(**shape)),
    TrainingArguments(
        f"out_{use_cpu}",
        deepspeed={
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 1},
        },
        per_device_train_batch_size=1,
        max_steps=1,
        save_steps=1,
        optim="sgd",
        report_to=[],
        disable_tqdm=True,
    ),
    train_dataset=data,
)
trainer.train()
saved = sorted(os.listdir(f"out_{use_cpu}/checkpoint-1"))
has_deepspeed = "global_step1" in saved
print(f"seen: ACCELERATE_USE_CPU={use_cpu}: DeepSpeed is {'on' if trainer.is_deepspeed_enabled else 'off'};",
      "the checkpoint has", "global_step1" if has_deepspeed else "optimizer.pt" if "optimizer.pt" in saved else saved)
if has_deepspeed != (use_cpu == "false") or trainer.is_deepspeed_enabled != has_deepspeed:
    sys.exit("CHANGED: wanted DeepSpeed on without the variable, off with it")
END
export CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
for use_cpu in false true; do
    ACCELERATE_USE_CPU=$use_cpu "$python" -m torch.distributed.run --standalone --nproc-per-node 1 body.py 2> log ||
        { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
done
