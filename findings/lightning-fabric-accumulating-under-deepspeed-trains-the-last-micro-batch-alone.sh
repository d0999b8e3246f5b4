#!/usr/bin/env bash
# lightning 2.6.6, Fabric, with DeepSpeed 0.19.8: gradients accumulated as Fabric's pages do it, two
# fabric.backward() and one optimizer.step(), at ZeRO-0 to 2 and under DDP. fabric.no_backward_sync()
# is left out, as a warning asks for under DeepSpeed.
# Guess, before the run: the warning is about speed, and a step has the sum of both gradients, as
# under DDP.
# Seen, 2026-11-29, torch 2.13.0: at ZeRO-1 and 2 the step has the second gradient alone, and
# nothing is said; under DDP and without ZeRO it has both. DeepSpeed's own count of accumulation
# steps is no help: Fabric calls the step of ZeRO's optimizer, not the engine's, and with
# gradient_accumulation_steps 2 and a step() each time the first one raises KeyError: 0.
# Instead: add the losses of a step, and call fabric.backward() once.
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
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, DeepSpeedStrategy
deepspeed.utils.logger.setLevel("ERROR")
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile


class OnCPU(DeepSpeedStrategy):
    """Lightning lets DeepSpeed begin on a GPU alone; this changes the start and nothing else."""

    root_device = torch.device("cpu", 0)

    def setup_environment(self):
        DDPStrategy.setup_environment(self)

    def _setup_distributed(self):
        deepspeed.init_distributed("gloo")


moved = {}
for name in ("DDP", 0, 1, 2):
    strategy = DDPStrategy(process_group_backend="gloo")
    if name != "DDP":
        config = {"zero_optimization": {"stage": name}, "zero_allow_untested_optimizer": True}
        config |= {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0}
        strategy = OnCPU(config=config)
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
    fabric.launch()
    model = torch.nn.Linear(1, 1, bias=False)
    before = model.weight.item()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for gradient in (1.0, 2.0):
        fabric.backward(model(torch.tensor([[gradient]])).sum())
    optimizer.step()
    moved[name] = round(before - next(model.parameters()).item(), 3)
print("seen: gradients of 1 and 2, and one step, move the weight by", moved)
if moved != {"DDP": 3.0, 0: 3.0, 1: 2.0, 2: 2.0}:
    sys.exit("CHANGED: wanted 3 under DDP and without ZeRO, 2 at ZeRO-1 and 2")
END
export CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
"$python" -m torch.distributed.run --standalone --nproc-per-node 1 body.py 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
