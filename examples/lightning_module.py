"""Lightning on any number of ranks: run it, let it die, run it again on another number of ranks.

    torchrun --standalone --nproc-per-node 4 examples/lightning_module.py
    rm -r ckpt_lightning/step=14.ckpt         # as if it had died after step 13
    torchrun --standalone --nproc-per-node 5 examples/lightning_module.py

It saves at steps 7 and 14, and resumes from the newest checkpoint. The module needs the lines
marked (1) to (4) so that the number of ranks can change. Requires lightning, and the package
universal: installed (pip install .), or as a folder next to the script or one level up."""

import argparse
import csv
import os
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import deepspeed
import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from torch import nn
from torch.utils.data import DataLoader

import universal
from universal import batches

parser = argparse.ArgumentParser()
parser.add_argument("--zero_stage", type=int, choices=[1, 2, 3], default=3)
parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
parser.add_argument("--output_dir", default="ckpt_lightning")
parser.add_argument("--run_name", help="default: lightning_<N>_ranks")
args = parser.parse_args()

universal.install()  # trainer.fit(ckpt_path=...) reshards from now on

RANK = int(os.environ["RANK"])
RANKS = int(os.environ["WORLD_SIZE"])
BATCH = 24
MICRO = 2
STEPS = 20
GPU = torch.cuda.is_available()
batch_config = batches.config(BATCH, MICRO)  # (1) keep the global batch
accumulation = batch_config.pop("gradient_accumulation_steps")  # Lightning says it to DeepSpeed
if not GPU:
    torch.set_num_threads(1)  # the number of threads affects the last bits of a sum
    # It compiles for a minute, and leaks memory.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
warnings.simplefilter("ignore")

# Sequences that count in steps of 1 to 5.
SAMPLES = 5 * BATCH + 11
generator = torch.Generator().manual_seed(1)
starts = torch.randint(0, 64, (SAMPLES, 1), generator=generator)
data = (starts + (torch.arange(SAMPLES)[:, None] % 5 + 1) * torch.arange(33)) % 64


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Embedding(64, 64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)
        )
        self.losses = []

    def configure_optimizers(self):
        matrices = [p for p in self.parameters() if p.dim() > 1]
        vectors = [p for p in self.parameters() if p.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": vectors, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, 3e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def train_dataloader(self):
        """Starts the data at the next step (2): Lightning starts them over when it resumes within
        an epoch."""
        share = batches.share(self.trainer.strategy.deepspeed_engine)
        self.weights = [weight for _, weight in share]
        sampler = batches.Sampler(len(data), share)
        sampler.set_step(self.trainer.global_step + 1)
        return DataLoader(data, batch_sampler=sampler)

    def training_step(self, tokens, _):
        weight = self.weights[len(self.losses)]
        logits = self.net(tokens[:, :-1]).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.losses.append(weight * loss.detach().double())
        # (3) Lightning divides by the accumulation steps, and DeepSpeed divides again.
        return weight * loss * accumulation

    def on_train_batch_end(self, *_):
        if len(self.losses) == accumulation:
            loss = torch.stack(self.losses).mean()
            loss = self.trainer.strategy.reduce(loss, reduce_op="mean").item()
            log.writerow([self.trainer.global_step, loss, self.lr_schedulers().get_last_lr()[0]])
            self.losses.clear()

    def on_load_checkpoint(self, checkpoint):
        """Converts the loop's count of micro-batches from the old accumulation steps to the new
        (4)."""
        ready = checkpoint["global_step"] * accumulation
        for counts in checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"].values():
            if isinstance(counts, dict):
                # "completed" is one behind: Lightning saves before it counts the batch.
                missing = ready - counts["ready"]
                for key in counts:
                    counts[key] += missing


class OnCPU(DeepSpeedStrategy):
    """Lightning allows DeepSpeed on CUDA only. To try things out on a CPU, gloo will do."""

    root_device = torch.device("cpu", 0)

    def setup_environment(self):
        DDPStrategy.setup_environment(self)

    def setup_distributed(self):
        self.set_world_ranks()
        deepspeed.init_distributed()


config = {
    **batch_config,
    "gradient_clipping": 1.0,
    "data_types": {"grad_accum_dtype": "fp32"},  # or bf16 rounds the sum of micro-batches
    "zero_optimization": {"stage": args.zero_stage},
    "zero_allow_untested_optimizer": True,
}
trainer = lightning.Trainer(
    accelerator="gpu" if GPU else "cpu",
    devices=RANKS,
    strategy=(DeepSpeedStrategy if GPU else OnCPU)(config=config),
    precision="bf16-true" if args.dtype == "bf16" else "32-true",
    accumulate_grad_batches=accumulation,
    max_steps=STEPS,
    max_epochs=-1,  # the sampler goes on through all epochs
    use_distributed_sampler=False,
    callbacks=[ModelCheckpoint(args.output_dir, "{step}", every_n_train_steps=7, save_top_k=-1)],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
saved = [int(path.stem[5:]) for path in Path(args.output_dir).glob("step=*.ckpt")]
newest = f"{args.output_dir}/step={max(saved)}.ckpt" if saved else None
run_name = args.run_name or f"lightning_{RANKS}_ranks"
os.makedirs("logs", exist_ok=True)
path = f"logs/{run_name}.csv" if RANK == 0 else os.devnull
with open(path, "w", newline="", buffering=1) as file:
    log = csv.writer(file)
    log.writerow(["step", "loss", "lr"])
    trainer.fit(Module(), ckpt_path=newest)
