"""Gradient accumulation on DeepSpeed. grad_accu_pt.py is the same program in PyTorch; their diff is the lesson.

    deepspeed --num_gpus 1 grad_accu_ds.py --steps 100 --run_name grad_accu_4_ds \
        --train_micro_batch_size_per_gpu 8 --train_batch_size 32
    deepspeed --num_gpus 2 grad_accu_ds.py --steps 100 --run_name grad_accu_2_ds_ws2 \
        --train_micro_batch_size_per_gpu 8 --train_batch_size 32
"""

import argparse
import logging
import os
import time
import warnings

import deepspeed
import torch
import torch.distributed as dist

from model import GPT, Log, accumulation_steps, fail, global_batch, load_data, parameter_groups, positive, ragged

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.error = fail
parser.add_argument("--train_batch_size", type=positive, default=32, help="sequences of one optimizer step")
parser.add_argument("--train_micro_batch_size_per_gpu", type=positive, default=32, help="sequences of one forward pass")
parser.add_argument("--steps", type=positive, default=100)
parser.add_argument("--run_name", default="grad_accu_ds", help="the log is logs/<run_name>.csv")
parser.add_argument("--ragged", action="store_true", help="sequences of unequal length")
parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher passes it
args = parser.parse_args()

rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
batch, micro = args.train_batch_size, args.train_micro_batch_size_per_gpu
accumulation = accumulation_steps(batch, micro, ranks)
torch.set_num_threads(1)
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
warnings.simplefilter("ignore", FutureWarning)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # on a CPU it compiles for a minute and leaks memory

torch.manual_seed(1337)
model = GPT(dropout=0.0)  # the masks of dropout would depend on the size of the micro-batch
config = {
    "train_batch_size": batch,
    "train_micro_batch_size_per_gpu": micro,
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 1e-3, "betas": [0.9, 0.95]}},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1},
}
groups = parameter_groups(model, weight_decay=0.1)
engine, optimizer, _, _ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
device = engine.device
train, _, _ = load_data()
if rank == 0:
    print(f"{batch} = {micro} per GPU x {accumulation} accumulation steps x {ranks} GPUs")
    log = Log(args.run_name, f"{micro} x {accumulation} x {ranks}")

for step in range(1, args.steps + 1):
    start = time.perf_counter()
    inputs, targets = global_batch(train, 1337, step, batch, 32)
    if args.ragged:
        targets = ragged(targets, 1337, step)
    tokens = (targets >= 0).sum(dim=1)
    mean = torch.zeros((), dtype=torch.float64, device=device)
    for m in range(rank * accumulation, (rank + 1) * accumulation):
        rows = slice(m * micro, (m + 1) * micro)
        loss = engine(inputs[rows].to(device), targets[rows].to(device))  # the mean over the micro-batch's tokens
        # backward() divides by the accumulation steps, and ZeRO takes the mean over the ranks: each micro-batch counts
        # for 1 / (accumulation * ranks). The factor turns that into its share of the tokens; equally long, it is 1.
        share = tokens[rows].sum().item() / tokens.sum().item()
        engine.backward(loss * (share * accumulation * ranks))
        engine.step()  # acts at the last micro-batch only: clips, steps, zeroes the gradients
        mean += loss.detach() * share
    dist.all_reduce(mean)
    norm = engine.get_global_grad_norm()
    row = {"step": step, "loss": mean.item(), "lr": optimizer.param_groups[0]["lr"], "grad_norm": float(norm)}
    seconds = time.perf_counter() - start
    if rank == 0:
        log.write(**row, seconds=seconds, tokens_per_second=tokens.sum().item() / seconds)
dist.barrier()  # a rank that leaves early can take the others down
dist.destroy_process_group()
