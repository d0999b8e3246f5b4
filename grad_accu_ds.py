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

import deepspeed
import torch
import torch.distributed as dist

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
parser.add_argument(
    "--local_rank", type=int, help=argparse.SUPPRESS
)  # the deepspeed launcher passes it
args = parser.parse_args()

settle()
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = (
    False  # on CPUs its build takes a minute; gloo will do
)
deepspeed.init_distributed()
rank, ranks = dist.get_rank(), dist.get_world_size()
batch, micro = args.train_batch_size, args.train_micro_batch_size_per_gpu
accumulation = accumulation_steps(batch, micro, ranks)

torch.manual_seed(1337)
model = GPT(dropout=0.0)  # dropout masks would depend on the size of the micro-batch
optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.1), lr=1e-3, betas=(0.9, 0.95))
config = {
    "train_batch_size": batch,
    "train_micro_batch_size_per_gpu": micro,
    "gradient_clipping": 1.0,
}
config["zero_optimization"] = {"stage": 1}
engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
device = engine.device
train, _, _ = load_data()
say(f"{batch} = {micro} per rank x {accumulation} accumulation steps x {ranks} ranks")
log = Log(args.run_name)

for step in range(1, args.steps + 1):
    start, mean = time.perf_counter(), torch.zeros((), dtype=torch.float64, device=device)
    inputs, targets = global_batch(train, 1337, step, batch, 32)
    for m in range(rank * accumulation, (rank + 1) * accumulation):
        rows = slice(m * micro, (m + 1) * micro)
        loss = engine(
            inputs[rows].to(device), targets[rows].to(device)
        )  # the mean over the micro-batch's tokens
        # backward() sums gradients, and we want their mean: so divide the loss; DeepSpeed's engine
        # does that for you.
        engine.backward(loss)  # ZeRO also takes the mean over the ranks
        engine.step()  # acts at the last micro-batch only: clips, steps, zeroes the gradients
        mean += loss.detach() / (accumulation * ranks)
    dist.all_reduce(mean)
    norm = engine.get_global_grad_norm()
    row = {
        "step": step,
        "loss": mean.item(),
        "lr": optimizer.param_groups[0]["lr"],
        "grad_norm": float(norm),
    }
    row |= {"seconds": time.perf_counter() - start, "layout": f"{micro} x {accumulation} x {ranks}"}
    log.write(**row, tokens_per_second=targets.numel() / row["seconds"])
dist.barrier()  # a rank that leaves early can take the others down
dist.destroy_process_group()
