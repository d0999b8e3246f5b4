#!/usr/bin/env bash
# transformers 4.54.1 and 4.55.4: a model whose loss is a mean (it takes no num_items_in_batch), 4
# accumulation steps, 5 samples in micro-batches of 1: the epoch's second step has one micro-batch.
# Guess, before the run: the loss is divided by the micro-batches of the step, so the short step is
# the gradient of its one sample, in both releases.
# Seen, 2026-11-28, torch 2.13.0: 4.54.1 divides by 4 whatever the step has: of a gradient of 1 the
# short step has 0.25. 4.55.4 has 1. A job that is resumed under the newer release trains each
# epoch's last step four times as strongly, and nothing says so.
# Instead: dataloader_drop_last=True, or a number of samples that the batch divides, when the
# release changes.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
pins="torch==2.13.0 accelerate==1.10.1 transformers==4.54.1"
python3 -m venv venv && venv/bin/pip install -q $pins
python=$PWD/venv/bin/python
cat > body.py <<'END'
import sys
import torch
from importlib.metadata import version
from transformers import Trainer, TrainerCallback, TrainingArguments

norms = []


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        return {"loss": (self.weight * x).mean()}  # its gradient is 1


class Norms(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model, **more):
        norms.append(round(model.weight.grad.item(), 4))


arguments = TrainingArguments(
    "out",
    per_device_train_batch_size=1,
    gradient_accumulation_steps=4,
    num_train_epochs=1,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
    max_grad_norm=0.0,
)
data = [{"x": torch.ones(1)} for _ in range(5)]
Trainer(Model(), arguments, train_dataset=data, callbacks=[Norms()]).train()
release = version("transformers")
print(f"seen: transformers {release}: the gradient of the whole step and of the short one:", norms)
if norms != ([1.0, 0.25] if release == "4.54.1" else [1.0, 1.0]):
    sys.exit("CHANGED: wanted 1.0 and 0.25 under 4.54.1, 1.0 and 1.0 under 4.55.4")
END
export CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
for release in 4.54.1 4.55.4; do
    [ "$release" = 4.54.1 ] || venv/bin/pip install -q transformers==$release
    "$python" body.py 2> log || { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
done
