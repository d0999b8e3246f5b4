"""Gradient accumulation in PyTorch (grad_accu_pt.py) and in DeepSpeed (grad_accu_ds.py): compare
the two files with diff. Both train the same GPT on the same sequences.

    python grad_accu_pt.py --train_micro_batch_size_per_gpu 8
    deepspeed --num_gpus 2 grad_accu_ds.py --train_micro_batch_size_per_gpu 8
    python plot.py logs/grad_accu_pt.csv logs/grad_accu_ds.csv
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(1)  # the number of threads that share a sum affects its last bits


def fail(message):
    print(f"{parser.prog}: error: {message}", file=sys.stderr)
    sys.exit(2)


parser = argparse.ArgumentParser()
parser.error = fail
parser.add_argument("--train_batch_size", type=int, default=32, help="sequences of a step")
parser.add_argument("--train_micro_batch_size_per_gpu", type=int, default=32)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--run_name", default=Path(__file__).stem, help="of logs/<run_name>.csv")
args = parser.parse_args()
batch = args.train_batch_size
micro = args.train_micro_batch_size_per_gpu
if min(batch, micro, args.steps) < 1:
    fail("the batch, the micro-batch and the steps must be at least 1")
accumulation, rest = divmod(batch, micro)
if rest:
    fail(f"--train_batch_size must be a multiple of the micro-batch, {micro}, and is {batch}")


class GPT(nn.Module):
    """A GPT over bytes, in sequences of 32, of torch's own layers."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(256, 64)
        self.positions = nn.Embedding(32, 64)
        block = nn.TransformerEncoderLayer(
            d_model=64,
            nhead=4,
            dim_feedforward=256,
            dropout=0.0,  # its masks would depend on the size of the micro-batch
            activation="gelu",
            batch_first=True,
        )
        self.blocks = nn.TransformerEncoder(block, num_layers=2)
        self.head = nn.Linear(64, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(32))

    def forward(self, inputs, targets):
        x = self.tokens(inputs) + self.positions.weight
        logits = self.head(self.blocks(x, self.mask, is_causal=True))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())  # the mean over all tokens


def global_batch(step):
    """The inputs and targets of a step, each [batch, 32]: the same on any number of ranks."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - 32, (batch, 1), generator=generator)
    sequences = text[starts + torch.arange(33)].long().to(device)
    return sequences[:, :-1], sequences[:, 1:]


files = sorted(Path(os.__file__).parent.glob("*.py"))  # Python's standard library
text = bytearray(b"".join(file.read_bytes() for file in files))
text = torch.frombuffer(text, dtype=torch.uint8)
torch.manual_seed(1337)
model = GPT()
device = "cuda" if torch.cuda.is_available() else "cpu"
model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
print(f"batch {batch}: micro-batches of {micro}, accumulation steps: {accumulation}")
Path("logs", args.run_name).parent.mkdir(parents=True, exist_ok=True)
log = open(f"logs/{args.run_name}.csv", "w", buffering=1)
print("step,loss,grad_norm,seconds,batch,micro_batch,accumulation,ranks", file=log)

for step in range(1, args.steps + 1):
    began = time.perf_counter()
    mean = torch.zeros((), dtype=torch.float64, device=device)
    inputs, targets = global_batch(step)
    for m in range(accumulation):
        rows = slice(m * micro, (m + 1) * micro)
        loss = model(inputs[rows], targets[rows])
        # backward() sums the gradients, and we want their mean: so the loss is divided first.
        (loss / accumulation).backward()
        mean += loss.detach() / accumulation
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    optimizer.step()
    optimizer.zero_grad()
    seconds = time.perf_counter() - began
    row = [step, mean.item(), norm, seconds, batch, micro, accumulation, 1]
    print(*row, sep=",", file=log)
    print(f"step {step:4d} | loss {mean:.4f} | norm {norm:.3f}", flush=True)
