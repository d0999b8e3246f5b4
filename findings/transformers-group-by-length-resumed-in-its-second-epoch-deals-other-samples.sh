#!/usr/bin/env bash
# transformers 5.24.0: Trainer with train_sampling_strategy="group_by_length", resumed from a
# checkpoint in the second epoch, on one process.
# Guess, before the run: a resume deals what the run that goes on deals, as with the default
# sampler; the data are skipped for that.
# Seen, 2026-11-28, torch 2.13.0: with "random" the resumed steps have the very samples. With
# "group_by_length" they are other ones: its sampler draws each epoch's order from torch's global
# generator, which in the new process stands elsewhere at the epoch's begin. Some samples of the
# epoch come twice, others never.
# Instead: the default sampler, or resume at an epoch's end.
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


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.samples = []

    def forward(self, x):
        self.samples.append(x[:, 0].int().tolist())
        return {"loss": (self.weight * x).mean()}


def collate(rows):
    return {"x": torch.stack([row["x"] for row in rows])}


def dealt(strategy, resume=None):
    """The samples of each step: 2 epochs of 10 steps, saved at step 13."""
    arguments = TrainingArguments(
        f"out_{strategy}",
        train_sampling_strategy=strategy,
        per_device_train_batch_size=4,
        num_train_epochs=2,
        save_steps=13,
        remove_unused_columns=False,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    data = [{"x": torch.full((1,), float(n)), "input_ids": [0] * (1 + n % 7)} for n in range(40)]
    model = Model()
    Trainer(model, arguments, train_dataset=data, data_collator=collate).train(resume_from_checkpoint=resume)
    return model.samples


same, epoch = {}, []
for strategy in ("random", "group_by_length"):
    went_on, resumed = dealt(strategy), dealt(strategy, f"out_{strategy}/checkpoint-13")
    same[strategy] = went_on[13:] == resumed
    epoch = sum(went_on[10:13] + resumed, [])
print(f"seen: a resume at step 13 of 20 deals the same samples: {same}; of the 40 of the second epoch it has trained "
      f"{len(set(epoch))} in {len(epoch)} places")
if same != {"random": True, "group_by_length": False} or len(set(epoch)) == 40:
    sys.exit("CHANGED: wanted the same with random, other ones with group_by_length")
END
export CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
"$python" body.py 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
