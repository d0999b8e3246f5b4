"""Gradient accumulation in PyTorch (grad_accu_pt.py) and in DeepSpeed (grad_accu_ds.py): compare
them with diff.

    python grad_accu_pt.py --steps 100 --run_name grad_accu_4_pt \
        --train_micro_batch_size_per_gpu 8 --train_batch_size 32
    deepspeed --num_gpus 2 grad_accu_ds.py --steps 100 --run_name grad_accu_2_ds_ws2 \
        --train_micro_batch_size_per_gpu 8 --train_batch_size 32
"""

import argparse
import time
from pathlib import Path

import torch

from data import Log, accumulation_steps, fail, global_batch, load_data, positive, say
from model import GPT, parameter_groups, settle

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.error = fail
parser.add_argument(
    "--train_batch_size", type=positive, default=32, help="sequences of one optimizer step"
)
parser.add_argument(
    "--train_micro_batch_size_per_gpu",
    type=positive,
    default=32,
    help="sequences of one forward pass",
)
parser.add_argument("--steps", type=positive, default=100)
parser.add_argument(
    "--run_name", default=Path(__file__).stem, help="the log is logs/<run_name>.csv"
)
args = parser.parse_args()

settle()
rank, ranks = 0, 1
batch, micro = args.train_batch_size, args.train_micro_batch_size_per_gpu
accumulation = accumulation_steps(batch, micro, ranks)

torch.manual_seed(1337)
model = GPT(dropout=0.0)  # dropout masks would depend on the size of the micro-batch
device = "cuda" if torch.cuda.is_available() else "cpu"
model.to(device)
optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.1), lr=1e-3, betas=(0.9, 0.95))
train, _, _ = load_data()
say(f"{batch} = {micro} per rank x {accumulation} accumulation steps x {ranks} ranks")
log = Log(args.run_name)

for step in range(1, args.steps + 1):
    start, mean = time.perf_counter(), torch.zeros((), dtype=torch.float64, device=device)
    inputs, targets = global_batch(train, 1337, step, batch, 32)
    for m in range(rank * accumulation, (rank + 1) * accumulation):
        rows = slice(m * micro, (m + 1) * micro)
        loss = model(
            inputs[rows].to(device), targets[rows].to(device)
        )  # the mean over the micro-batch's tokens
        # backward() sums gradients, and we want their mean: so divide the loss; DeepSpeed's engine
        # does that for you.
        (loss / accumulation).backward()
        mean += loss.detach() / (accumulation * ranks)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    row = {
        "step": step,
        "loss": mean.item(),
        "lr": optimizer.param_groups[0]["lr"],
        "grad_norm": float(norm),
    }
    row |= {"seconds": time.perf_counter() - start, "layout": f"{micro} x {accumulation} x {ranks}"}
    log.write(**row, tokens_per_second=targets.numel() / row["seconds"])
