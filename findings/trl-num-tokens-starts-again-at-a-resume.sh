#!/usr/bin/env bash
# TRL 1.16.0's SFTTrainer: num_tokens in the log, the tokens trained so far, across a resume.
# Guess, before the run: the count is in the checkpoint, as the step and the epoch are, so it goes
# on.
# Seen, 2026-11-28, torch 2.13.0: it is in no file and begins at 0: 10, 20, 30, 40 in the run that
# goes on, and 10, 20 in steps 3 and 4 after a resume from step 2. A budget or a curve over
# num_tokens is wrong from there on.
# Instead: include_num_input_tokens_seen=True, whose count is in trainer_state.json.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
pins="torch==2.13.0 accelerate==1.15.0 transformers==5.24.0 datasets==5.2.0 trl==1.16.0"
python=${FINDINGS_PYTHON:-$PWD/venv/bin/python}  # or an environment that has these
[ -x "$python" ] || { python3 -m venv venv && venv/bin/pip install -q $pins; }
"$python" -c 'import sys, importlib.metadata as m
sys.exit(str([p for p in sys.argv[1:] if m.version(p.split("==")[0]).split("+")[0] != p.split("==")[1]] or "") or 0)' $pins
cat > body.py <<'END'
import sys
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

disable_progress_bars()
words = {word: number for number, word in enumerate(["<pad>", "<eos>", *map(str, range(30))])}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
shape = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)


def train(resume=None):
    """{step: num_tokens}"""
    arguments = SFTConfig(
        "out",
        per_device_train_batch_size=2,
        max_steps=4,
        save_steps=2,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
    )
    data = Dataset.from_list([{"text": "1 2 3 4"}] * 8)
    model = LlamaForCausalLM(LlamaConfig(**shape))
    trainer = SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer)
    trainer.train(resume_from_checkpoint=resume)
    return {row["step"]: row["num_tokens"] for row in trainer.state.log_history if "num_tokens" in row}


went_on = train()
resumed = train(resume="out/checkpoint-2")
print(f"seen: num_tokens by step {went_on}; after a resume from step 2 {resumed}")
if resumed[3] != went_on[1] or went_on[3] == went_on[1]:
    sys.exit("CHANGED: the count goes on after a resume")
END
export CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
"$python" body.py 2> log || { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
