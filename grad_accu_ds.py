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

import deepspeed
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(1)  # the number of threads that share a sum affects its last bits
deepspeed.utils.logger.setLevel("ERROR")
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # takes a minute to build
rank = int(os.environ.get("RANK", 0))
ranks = int(os.environ.get("WORLD_SIZE", 0))
if rank > 0:
    sys.stdout = open(os.devnull, "w")  # rank 0 speaks for all


def fail(message):
    time.sleep(9 * rank)  # rank 0 speaks for all, and the launcher ends the others
    print(f"{parser.prog}: error: {message}", file=sys.stderr)
    sys.exit(2)


parser = argparse.ArgumentParser()
parser.error = fail
parser.add_argument("--train_batch_size", type=int, default=32, help="sequences of a step")
parser.add_argument("--train_micro_batch_size_per_gpu", type=int, default=32)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--run_name", default=Path(__file__).stem, help="of logs/<run_name>.csv")
parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # the deepspeed launcher passes it
args = parser.parse_args()
if ranks == 0:
    fail("start it with a launcher: deepspeed --num_gpus 1 grad_accu_ds.py")
batch = args.train_batch_size
micro = args.train_micro_batch_size_per_gpu
if min(batch, micro, args.steps) < 1:
    fail("the batch, the micro-batch and the steps must be at least 1")
micro_batches, rest = divmod(batch, micro)
if rest:
    fail(f"--train_batch_size must be a multiple of the micro-batch, {micro}, and is {batch}")
accumulation = -(-micro_batches // ranks)  # rounded up: all ranks take as many steps


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
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
config = {
    "train_micro_batch_size_per_gpu": micro,
    "gradient_accumulation_steps": accumulation,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1},
}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
device = engine.device
print(f"batch {batch}: micro-batches of {micro}, accumulation steps: {accumulation}")
print(f"on each of {ranks} ranks; repeats, with weight 0: {accumulation * ranks - micro_batches}")
Path("logs", args.run_name).parent.mkdir(parents=True, exist_ok=True)
log = open(f"logs/{args.run_name}.csv" if rank == 0 else os.devnull, "w", buffering=1)
print("step,loss,grad_norm,seconds,batch,micro_batch,accumulation,ranks", file=log)

for step in range(1, args.steps + 1):
    began = time.perf_counter()
    mean = torch.zeros((), dtype=torch.float64, device=device)
    inputs, targets = global_batch(step)
    for place in range(rank * accumulation, (rank + 1) * accumulation):
        m = place % micro_batches  # after the last one they begin again, with weight 0
        weight = accumulation * ranks / micro_batches if place < micro_batches else 0
        rows = slice(m * micro, (m + 1) * micro)
        loss = weight * engine(inputs[rows], targets[rows])
        # backward() sums the gradients, and we want their mean: so the loss is divided first.
        engine.backward(loss)  # DeepSpeed divides it; ZeRO also takes the mean over the ranks
        engine.step()  # acts at the last micro-batch only: clips, steps, zeroes the gradients
        mean += loss.detach() / (accumulation * ranks)
    dist.all_reduce(mean)
    norm = float(engine.get_global_grad_norm())
    seconds = time.perf_counter() - began
    row = [step, mean.item(), norm, seconds, batch, micro, accumulation, ranks]
    print(*row, sep=",", file=log)
    print(f"step {step:4d} | loss {mean:.4f} | norm {norm:.3f}", flush=True)
dist.barrier()  # a rank that leaves early can take the others down
dist.destroy_process_group()
