#!/usr/bin/env bash
# TRL 1.16.0's experimental GKDTrainer: the same 2 samples in a step, on 1 rank with 2
# micro-batches, and on 2 ranks with 1 each.
# Guess, before the run: the same batch is the same loss and gradient on any number of ranks, as
# with Trainer itself.
# Seen, 2026-11-28, torch 2.13.0: the loss and the gradient norm on 2 ranks are half of those on 1.
# It divides by the tokens of all ranks, as Trainer does, and does not multiply by the ranks, whose
# mean is taken later.
# Instead: GKDConfig(average_tokens_across_devices=False), where all ranks have as many tokens.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
pins="torch==2.13.0 accelerate==1.15.0 transformers==5.24.0 datasets==5.2.0 trl==1.16.0"
python=${FINDINGS_PYTHON:-$PWD/venv/bin/python}  # or an environment that has these
[ -x "$python" ] || { python3 -m venv venv && venv/bin/pip install -q $pins; }
"$python" -c 'import sys, importlib.metadata as m
sys.exit(str([p for p in sys.argv[1:] if m.version(p.split("==")[0]).split("+")[0] != p.split("==")[1]] or "") or 0)' $pins
cat > body.py <<'END'
import os
import sys
import torch
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl.experimental.gkd import GKDConfig, GKDTrainer

disable_progress_bars()
words = {word: number for number, word in enumerate(["<pad>", "<eos>", *map(str, range(30))])}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
shape = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
torch.manual_seed(1)
student, teacher = [LlamaForCausalLM(LlamaConfig(**shape, initializer_range=0.5)) for _ in range(2)]
texts = [{"role": "user", "content": "1 2 3"}, {"role": "assistant", "content": "4 5 6 7"}]
ranks = int(os.environ["WORLD_SIZE"])
arguments = GKDConfig(
    "out",
    lmbda=0.0,
    per_device_train_batch_size=1,
    gradient_accumulation_steps=2 // ranks,
    max_steps=1,
    logging_steps=1,
    max_grad_norm=1e9,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    bf16=False,
    use_cpu=True,
    gradient_checkpointing=False,
)
data = Dataset.from_list([{"messages": texts}] * 4)
trainer = GKDTrainer(student, teacher, arguments, train_dataset=data, processing_class=tokenizer)
trainer.train()
if trainer.is_world_process_zero():
    row = trainer.state.log_history[0]
    loss, norm = float(row["loss"]), float(row["grad_norm"])
    print(f"seen: the same batch on {ranks} rank(s): loss {loss:.4f}, gradient norm {norm:.4f}")
    if ranks == 1:
        open("norm", "w").write(str(norm))
    elif not abs(2 * norm / float(open("norm").read()) - 1) < 0.01:
        sys.exit("CHANGED: wanted half the gradient norm of 1 rank")
END
export CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 TRL_EXPERIMENTAL_SILENCE=1 HF_HUB_OFFLINE=1
"$python" -m torch.distributed.run --standalone --nproc-per-node 1 body.py 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
"$python" -m torch.distributed.run --standalone --nproc-per-node 2 body.py 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
