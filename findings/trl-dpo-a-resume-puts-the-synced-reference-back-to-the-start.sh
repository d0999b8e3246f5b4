#!/usr/bin/env bash
# TRL 1.16.0's DPOTrainer with sync_ref_model=True: the reference follows the policy during the
# training (TR-DPO).
# Guess, before the run: what moves during the training is in the checkpoint, so a resume has the
# reference of the save.
# Seen, 2026-11-28, torch 2.13.0: it is in no file. After a resume the reference is the model that
# the script gives it, the untrained one: the loss of step 3 is 0.5991 where the run that goes on
# has 0.6931, in silence. Without the option both are equal.
# Instead: save trainer.ref_model beside each checkpoint, and load it before a resume.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
pins="torch==2.13.0 accelerate==1.15.0 transformers==5.24.0 datasets==5.2.0 trl==1.16.0"
python=${FINDINGS_PYTHON:-$PWD/venv/bin/python}  # or an environment that has these
[ -x "$python" ] || { python3 -m venv venv && venv/bin/pip install -q $pins; }
"$python" -c 'import sys, importlib.metadata as m
sys.exit(str([p for p in sys.argv[1:] if m.version(p.split("==")[0]).split("+")[0] != p.split("==")[1]] or "") or 0)' $pins
cat > body.py <<'END'
import copy
import sys
import torch
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

disable_progress_bars()
words = {word: number for number, word in enumerate(["<pad>", "<eos>", *map(str, range(30))])}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
shape = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
torch.manual_seed(1)
model = LlamaForCausalLM(LlamaConfig(**shape))


def third_loss(sync, resume=None):
    arguments = DPOConfig(
        f"out_{sync}",
        sync_ref_model=sync,
        ref_model_sync_steps=1,
        ref_model_mixup_alpha=1.0,
        per_device_train_batch_size=2,
        learning_rate=0.05,
        lr_scheduler_type="constant",
        max_steps=3,
        save_steps=2,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
    )
    rows = [{"prompt": f"{n} ", "chosen": f"{n + 1} 9", "rejected": f"{n} 7"} for n in range(8)]
    trainer = DPOTrainer(
        copy.deepcopy(model), copy.deepcopy(model), arguments,
        train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=resume)
    return [round(float(row["loss"]), 4) for row in trainer.state.log_history if row["step"] == 3 and "loss" in row][0]


losses = {sync: (third_loss(sync), third_loss(sync, f"out_{sync}/checkpoint-2")) for sync in (False, True)}
print("seen: the third loss in the run that goes on, and after a resume:", losses)
same = {sync: abs(went_on - resumed) < 1e-4 for sync, (went_on, resumed) in losses.items()}
if same != {False: True, True: False}:
    sys.exit("CHANGED: wanted the same without sync_ref_model, and another loss with it")
END
export CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
"$python" body.py 2> log || { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
