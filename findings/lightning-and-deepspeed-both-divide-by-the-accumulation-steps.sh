#!/usr/bin/env bash
# Lightning 2.6.6 with DeepSpeed 0.19.8, ZeRO-1: accumulate_grad_batches=4 and a loss whose
# gradient is 1.
# Guess, before the run: one of the two divides by 4, so the gradient of a step is the mean, 1, as
# without DeepSpeed.
# Seen, 2026-11-28, torch 2.13.0: Lightning divides the loss that training_step() returns, and
# gives 4 to DeepSpeed's config, which divides again: the gradient is 1/4 of the mean. Adam hides
# most of it; clipping, weight decay and SGD do not.
# Instead: return loss * accumulate_grad_batches from training_step() under DeepSpeed.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
pins="torch==2.13.0 deepspeed==0.19.8 lightning==2.6.6"
python=${FINDINGS_PYTHON:-$PWD/venv/bin/python}  # or an environment that has these
[ -x "$python" ] || { python3 -m venv venv && venv/bin/pip install -q $pins; }
"$python" -c 'import sys, importlib.metadata as m
sys.exit(str([p for p in sys.argv[1:] if m.version(p.split("==")[0]).split("+")[0] != p.split("==")[1]] or "") or 0)' $pins
cat > body.py <<'END'
import sys
import deepspeed
import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
deepspeed.utils.logger.setLevel("ERROR")
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile


class OnCPU(DeepSpeedStrategy):
    """Lightning lets DeepSpeed begin on a GPU alone; this changes the start and nothing else."""

    root_device = torch.device("cpu", 0)

    def setup_environment(self):
        DDPStrategy.setup_environment(self)

    def setup_distributed(self):
        self.set_world_ranks()
        deepspeed.init_distributed("gloo")


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, x, _):
        return (self.weight * x).mean()  # its gradient is 1

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


moved = {}
for name in ("ddp", "deepspeed"):
    config = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True, "gradient_clipping": 0.0}
    module = Module()
    lightning.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=OnCPU(config=config) if name == "deepspeed" else DDPStrategy(process_group_backend="gloo"),
        accumulate_grad_batches=4,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, torch.utils.data.DataLoader(torch.ones(4, 1)))
    moved[name] = -round(module.weight.item(), 4)
print("seen: the step of 4 micro-batches, each with gradient 1, moves the weight by", moved)
if moved != {"ddp": 1.0, "deepspeed": 0.25}:
    sys.exit("CHANGED: wanted 1 under DDP, 0.25 under DeepSpeed")
END
export CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
"$python" -m torch.distributed.run --standalone --nproc-per-node 1 body.py 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
