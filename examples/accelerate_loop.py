"""A training loop with accelerate, and its DataLoader, on any number of ranks: run it, let it die,
run it again on another number of ranks.

    torchrun --standalone --nproc-per-node 4 examples/accelerate_loop.py
    rm -r ckpt_accelerate/step_14             # as if it had died after step 13
    torchrun --standalone --nproc-per-node 5 examples/accelerate_loop.py

It saves at steps 7 and 14, and resumes from the newest checkpoint. The loop needs the lines marked
(1) to (6) so that the number of ranks can change. Requires accelerate, and the package universal:
installed (pip install .), or as a folder next to the script or one level up."""

import argparse
import csv
import os
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import deepspeed
import torch
from accelerate import Accelerator, DeepSpeedPlugin, DistributedType, PartialState
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader

import universal
from universal import batches
from universal.trainer import fill_steps

parser = argparse.ArgumentParser()
parser.add_argument("--zero_stage", type=int, choices=[1, 2, 3], default=3)
parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
parser.add_argument("--output_dir", default="ckpt_accelerate")
parser.add_argument("--run_name", help="default: accelerate_<N>_ranks")
args = parser.parse_args()

universal.install()  # accelerator.load_state() reshards from now on

RANK = int(os.environ["RANK"])
RANKS = int(os.environ["WORLD_SIZE"])
BATCH = 24
MICRO = 2
STEPS = 20
if not torch.cuda.is_available():
    torch.set_num_threads(1)  # the number of threads affects the last bits of a sum
    # It compiles for a minute, and leaks memory.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    # On a CPU, accelerate silently uses DDP.
    PartialState(cpu=True).distributed_type = DistributedType.DEEPSPEED
warnings.simplefilter("ignore", FutureWarning)

config = {
    **batches.config(BATCH, MICRO),  # (1) keep the global batch
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": args.zero_stage},
    "bf16": {"enabled": args.dtype == "bf16"},
    "data_types": {"grad_accum_dtype": "fp32"},  # or bf16 rounds the sum of micro-batches
}
plugin = DeepSpeedPlugin(hf_ds_config=config)
# (2) Each epoch has an order of its own, drawn from the seed. The default draws it from the
# generator of the moment, which is another one after a resume.
in_order = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=7)
accelerator = Accelerator(deepspeed_plugin=plugin, dataloader_config=in_order)
assert accelerator.distributed_type == DistributedType.DEEPSPEED
assert accelerator.num_processes == RANKS

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
matrices = [p for p in model.parameters() if p.dim() > 1]
vectors = [p for p in model.parameters() if p.dim() <= 1]
groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, 3e-3)
# The prepared scheduler takes RANKS steps per optimizer step, so its length is counted in those.
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 1 - count / (STEPS * RANKS))

# Sequences that count in steps of 1 to 5. They do not fill the last step of an epoch.
SAMPLES = 5 * BATCH + 11
generator = torch.Generator().manual_seed(1)
starts = torch.randint(0, 64, (SAMPLES, 1), generator=generator)
data = (starts + (torch.arange(SAMPLES)[:, None] % 5 + 1) * torch.arange(33)) % 64
loader = DataLoader(data, batch_size=MICRO, shuffle=True)
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
steps = fill_steps(loader, batches.share(model))  # (3) the same samples in each step
accumulation = config["gradient_accumulation_steps"]

done = max((int(path.name[5:]) for path in Path(args.output_dir).glob("step_*")), default=0)
if done:
    accelerator.load_state(Path(args.output_dir, f"step_{done}"))
    scheduler.scheduler.last_epoch = done * RANKS  # (4) its saved count is for the old ranks
    accelerator.step = 0  # (5) it counts micro-batches; new ranks start at 0, so all do

run_name = args.run_name or f"accelerate_{RANKS}_ranks"
os.makedirs("logs", exist_ok=True)
path = f"logs/{run_name}.csv" if RANK == 0 else os.devnull
with open(path, "w", newline="", buffering=1) as file:
    log = csv.writer(file)
    log.writerow(["step", "loss", "lr"])
    step = done
    while step < STEPS:
        steps.epoch, steps.begin = divmod(step, steps.per_epoch)  # (6) the order, and from where
        total = 0
        for tokens, weight in zip(loader, steps.all_weights(), strict=False):
            lr = scheduler.get_last_lr()[0]
            with accelerator.accumulate(model):
                logits = model(tokens[:, :-1]).float()
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
                accelerator.backward(weight * loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            total += weight * loss.detach().double()
            if not accelerator.sync_gradients:
                continue
            step += 1
            log.writerow([step, accelerator.reduce(total / accumulation, "mean").item(), lr])
            total = 0
            if step % 7 == 0:
                accelerator.save_state(Path(args.output_dir, f"step_{step}"))
            if step == STEPS:
                break
accelerator.end_training()
