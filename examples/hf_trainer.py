"""Hugging Face's Trainer on any number of ranks: run it, let it die, run it again on another number
of ranks.

    torchrun --standalone --nproc-per-node 4 examples/hf_trainer.py
    rm -r ckpt_trainer/checkpoint-20          # as if it had died after step 19
    torchrun --standalone --nproc-per-node 5 examples/hf_trainer.py
    python plot.py logs/trainer_4_ranks.csv logs/trainer_5_ranks.csv --tolerance 1e-5

It trains a tiny Llama on data that it makes itself, so there is nothing to download; on a CPU or on
GPUs. Requires transformers, accelerate, peft for --lora, and the package universal: installed (pip
install .), or as a folder next to the script or one level up."""

import argparse
import csv
import os
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import deepspeed
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

import universal
from universal import batches
from universal.trainer import AnyRanks

parser = argparse.ArgumentParser()
parser.add_argument("--zero_stage", type=int, choices=[1, 2, 3], default=3)
parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
parser.add_argument("--lora", action="store_true", help="adapters; the rest is frozen, not saved")
parser.add_argument("--freeze", action="store_true", help="train the upper half of the layers")
parser.add_argument("--gradient_checkpointing", action="store_true")
parser.add_argument("--mixtral", action="store_true", help="4 experts in place of the Llama")
parser.add_argument("--output_dir", default="ckpt_trainer")
parser.add_argument("--run_name", help="default: trainer_<N>_ranks")
args = parser.parse_args()

universal.install()  # Trainer's engine.load_checkpoint() reshards from now on

RANK = int(os.environ["RANK"])
RANKS = int(os.environ["WORLD_SIZE"])
BATCH = 24
MICRO = 2
STEPS = 20
batch_config = batches.config(BATCH, MICRO)  # fewer ranks take more accumulation steps each
if not torch.cuda.is_available():
    torch.set_num_threads(1)  # the number of threads affects the last bits of a sum
    # It compiles for a minute, and leaks memory.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()  # without it, ZeRO-3 on a CPU takes each rank for the only one
warnings.simplefilter("ignore", FutureWarning)  # torch warns about DeepSpeed's calls, on every rank


class SeedDropout(TrainerCallback):
    """Seeds what the model draws (dropout; not what a collator draws) by step and micro-batch, not
    by rank: Trainer gives micro-batch m of a step to rank m % ranks. One that AnyRanks computes
    again may draw something else, as it has no weight. It can be copied as it is, with `from
    transformers import TrainerCallback, set_seed`."""

    def on_step_begin(self, args, state, control, **kwargs):
        self.micro_batch = args.process_index
        self.seed(args, state)

    def on_substep_end(self, args, state, control, **kwargs):
        self.micro_batch += args.world_size
        self.seed(args, state)

    def on_train_end(self, args, state, control, **kwargs):
        set_seed(args.seed)  # the same on all ranks for what comes after

    def seed(self, args, state):
        set_seed((args.seed + state.global_step * 100_000 + self.micro_batch) % 2**32)


class AnyRanksTrainer(AnyRanks, Trainer):
    """Trainer, but the ranks need not divide the batch."""


class Log(TrainerCallback):
    def on_log(self, args, state, control, logs, **kwargs):
        if state.is_world_process_zero and "loss" in logs:
            log.writerow([state.global_step, logs["loss"], logs["learning_rate"]])


arguments = TrainingArguments(
    output_dir=args.output_dir,
    max_steps=STEPS,
    per_device_train_batch_size=MICRO,
    per_device_eval_batch_size=MICRO,
    gradient_accumulation_steps=batch_config["gradient_accumulation_steps"],
    learning_rate=3e-3,
    lr_scheduler_type="cosine",
    warmup_steps=5,
    weight_decay=0.1,
    max_grad_norm=1.0,
    bf16=args.dtype == "bf16",
    logging_steps=1,
    save_steps=10,
    eval_strategy="steps",
    eval_steps=10,
    load_best_model_at_end=True,
    report_to=[],
    use_cpu=not torch.cuda.is_available(),
    disable_tqdm=True,
    deepspeed={
        **batch_config,
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "data_types": {"grad_accum_dtype": "fp32"},  # or bf16 rounds the sum of micro-batches
        "zero_optimization": {"stage": args.zero_stage},
    },
)

set_seed(0)
shape = dict(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
)
config = LlamaConfig(**shape, attention_dropout=0.1, use_cache=False)
if args.mixtral:  # without expert parallelism: every rank has all experts
    shape |= dict(num_key_value_heads=4, num_local_experts=4)
    config = MixtralConfig(**shape, attention_dropout=0.1, use_cache=False)
model = AutoModelForCausalLM.from_config(config)
if args.gradient_checkpointing:
    model.gradient_checkpointing_enable()
if args.lora:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(model, lora)
if args.freeze:
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)

# Sequences that count in steps of 1 to 5, of 8 to 32 tokens with a label. They do not fill the last
# step of an epoch.
SAMPLES = 15 * BATCH + 11
generator = torch.Generator().manual_seed(0)
starts = torch.randint(0, 64, (SAMPLES, 1), generator=generator)
strides = torch.arange(SAMPLES)[:, None] % 5 + 1
tokens = (starts + strides * torch.arange(32)) % 64
lengths = torch.randint(8, 33, (SAMPLES, 1), generator=generator)
labels = tokens.where(torch.arange(32) < lengths, -100)
# Not in the evaluation: Trainer takes the mean of as many of its micro-batches as there are ranks,
# and then that of the means, which only with labels of one length is the same on other ranks.
labels[:BATCH] = tokens[:BATCH]
data = [{"input_ids": row, "labels": target} for row, target in zip(tokens, labels, strict=True)]
trainer = AnyRanksTrainer(
    model,
    arguments,
    train_dataset=data[BATCH:],
    eval_dataset=data[:BATCH],
    callbacks=[SeedDropout(), Log()],
)

run_name = args.run_name or f"trainer_{RANKS}_ranks"
for folder in ("logs", args.output_dir):
    os.makedirs(folder, exist_ok=True)
path = f"logs/{run_name}.csv" if RANK == 0 else os.devnull
with open(path, "w", newline="", buffering=1) as file:
    log = csv.writer(file)
    log.writerow(["step", "loss", "lr"])
    trainer.train(resume_from_checkpoint=get_last_checkpoint(args.output_dir))
trainer.evaluate()
torch.distributed.barrier()  # a rank that leaves early can take the others down
# Without this, gloo aborts one run in eight after the last step.
torch.distributed.destroy_process_group()
