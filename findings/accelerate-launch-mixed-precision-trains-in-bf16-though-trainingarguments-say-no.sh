#!/usr/bin/env bash
# accelerate 1.15.0, transformers 5.24.0: `accelerate launch --mixed_precision bf16` (or a saved
# default_config.yaml that has it) with TrainingArguments(bf16=False).
# Guess, before the run: what the script says counts, so the forward pass is in fp32; or the two
# are compared.
# Seen, 2026-11-28, torch 2.13.0: the forward pass is in bf16 and nothing says so;
# trainer.args.bf16 is False, as is what a log of the arguments shows. The launcher sets
# ACCELERATE_MIXED_PRECISION, which Trainer's Accelerator reads. So a resume on a machine with
# another default_config.yaml trains in another precision.
# Instead: print trainer.accelerator.mixed_precision, or launch with torchrun.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
pins="torch==2.13.0 accelerate==1.15.0 transformers==5.24.0"
python=${FINDINGS_PYTHON:-$PWD/venv/bin/python}  # or an environment that has these
[ -x "$python" ] || { python3 -m venv venv && venv/bin/pip install -q $pins; }
"$python" -c 'import sys, importlib.metadata as m
sys.exit(str([p for p in sys.argv[1:] if m.version(p.split("==")[0]).split("+")[0] != p.split("==")[1]] or "") or 0)' $pins
cat > body.py <<'END'

import sys
import torch
from transformers import Trainer, TrainingArguments

wanted = {"no": torch.float32, "bf16": torch.bfloat16}[sys.argv[1]]
seen = []


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 4))

    def forward(self, x):
        product = x @ self.weight
        seen.append(product.dtype)
        return {"loss": product.float().mean()}


arguments = TrainingArguments(
    "out",
    bf16=False,
    per_device_train_batch_size=1,
    max_steps=1,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
)
trainer = Trainer(Model(), arguments, train_dataset=[{"x": torch.ones(4)}] * 4)
trainer.train()
print(f"seen: --mixed_precision {sys.argv[1]}: args.bf16 is {trainer.args.bf16}, and the product is in {seen[0]}")
if seen[0] != wanted:
    sys.exit(f"CHANGED: wanted {wanted}")
END
export CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
for precision in no bf16; do
    "$python" -m accelerate.commands.launch --cpu --num_processes 1 --num_machines 1 --dynamo_backend no \
        --mixed_precision $precision body.py $precision 2> log ||
        { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
done
