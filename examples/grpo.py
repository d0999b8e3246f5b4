"""TRL's GRPOTrainer on any number of ranks: run it, let it die, run it again on another number of
ranks.

    torchrun --standalone --nproc-per-node 2 examples/grpo.py
    rm -r ckpt_grpo/checkpoint-10          # as if it had died after step 9
    torchrun --standalone --nproc-per-node 3 examples/grpo.py
    python plot.py logs/grpo_2_ranks.csv logs/grpo_3_ranks.csv --tolerance 1e-5

A tiny Llama learns to count on: nothing is downloaded; on a CPU or on GPUs. Requires trl 1.16,
transformers, accelerate, datasets, and the package universal: installed (pip install .), or as a
folder next to the script or one level up."""

import argparse
import csv
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import deepspeed
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerFast,
    TrainerCallback,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer

import universal
from universal import batches
from universal.rollouts import AnyRanksRollouts

parser = argparse.ArgumentParser()
parser.add_argument("--zero_stage", type=int, choices=[1, 2, 3], default=2)
parser.add_argument("--output_dir", default="ckpt_grpo")
parser.add_argument("--run_name", help="default: grpo_<N>_ranks")
args = parser.parse_args()

universal.install()  # Trainer's engine.load_checkpoint() reshards from now on

RANK = int(os.environ["RANK"])
RANKS = int(os.environ["WORLD_SIZE"])
BATCH = 32  # completions
MICRO = 4
GROUP = 4  # completions of a prompt: a micro-batch holds whole groups
batch_config = batches.config(BATCH, MICRO)  # fewer ranks take more accumulation steps each
if not torch.cuda.is_available():
    torch.set_num_threads(1)  # the number of threads affects the last bits of a sum
    # It compiles for a minute, and leaks memory.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()  # without it, ZeRO-3 on a CPU takes each rank for the only one


def counts_on(prompts, completions, **others):
    """The reward: how near each word is to what follows the one before, as in the prompt."""
    rewards = []
    for prompt, completion in zip(prompts, completions, strict=True):
        numbers = [int(word) for word in f"{prompt} {completion}".split()]
        start = len(prompt.split())
        gaps = [b - a for a, b in zip(numbers, numbers[1:], strict=False)]
        rewards.append(sum(1 / (1 + abs(gap - gaps[0])) for gap in gaps[start - 1 :]))
    return rewards


class AnyRanksGRPO(AnyRanksRollouts, GRPOTrainer):
    """GRPOTrainer, but the ranks need not divide the batch."""


class Log(TrainerCallback):
    def on_log(self, args, state, control, logs, **kwargs):
        if state.is_world_process_zero and "loss" in logs:
            log.writerow([state.global_step, logs["loss"], logs["learning_rate"]])


arguments = GRPOConfig(
    output_dir=args.output_dir,
    max_steps=10,
    per_device_train_batch_size=MICRO,
    gradient_accumulation_steps=batch_config["gradient_accumulation_steps"],
    num_generations=GROUP,
    max_completion_length=8,
    learning_rate=3e-3,
    bf16=False,
    gradient_checkpointing=False,
    logging_steps=1,
    save_steps=5,
    report_to=[],
    use_cpu=not torch.cuda.is_available(),
    disable_tqdm=True,
    deepspeed={
        **batch_config,
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": args.zero_stage},
    },
)

words = {word: number for number, word in enumerate(["<pad>", "<end>", *map(str, range(62))])}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>"
)
set_seed(0)
shape = dict(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
)
ends = dict(bos_token_id=None, eos_token_id=1, pad_token_id=0)
model = AutoModelForCausalLM.from_config(LlamaConfig(**shape, **ends, attention_dropout=0.1))
# 45 prompts: the last step of an epoch would be short, and is left out, as in TRL.
prompts = [" ".join(str(n + gap * k) for k in range(4)) for n in range(15) for gap in (1, 2, 3)]
trainer = AnyRanksGRPO(
    model,
    counts_on,
    arguments,
    train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
    processing_class=tokenizer,
    callbacks=[Log()],
)

run_name = args.run_name or f"grpo_{RANKS}_ranks"
for folder in ("logs", args.output_dir):
    os.makedirs(folder, exist_ok=True)
path = f"logs/{run_name}.csv" if RANK == 0 else os.devnull
with open(path, "w", newline="", buffering=1) as file:
    log = csv.writer(file)
    log.writerow(["step", "loss", "lr"])
    trainer.train(resume_from_checkpoint=get_last_checkpoint(args.output_dir))
torch.distributed.barrier()  # a rank that leaves early can take the others down
# Without this, gloo aborts one run in eight after the last step.
torch.distributed.destroy_process_group()
