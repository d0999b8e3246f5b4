#!/usr/bin/env bash
# torch-optimi 0.3.3's AdamW in DeepSpeed 0.19.8, ZeRO-1, resumed from a universal checkpoint by
# DeepSpeed itself.
# Guess, before the run: exp_avg and exp_avg_sq are named as torch's, they are converted and
# loaded, so the resume goes on.
# Seen, 2026-11-28, torch 2.13.0: the moments are in the folder and are loaded. But optimi marks a
# state as made by a key whose value is None (kahan_comp), which no file of tensors can hold; it
# does not find the key, and sets the moments to zero at the first step, in silence. The ordinary
# checkpoint resumes bit for bit.
# Instead: resume torch-optimi from the ordinary checkpoint, on the same ranks.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
pins="torch==2.13.0 deepspeed==0.19.8 torch-optimi==0.3.3"
python=${FINDINGS_PYTHON:-$PWD/venv/bin/python}  # or an environment that has these
[ -x "$python" ] || { python3 -m venv venv && venv/bin/pip install -q $pins; }
"$python" -c 'import sys, importlib.metadata as m
sys.exit(str([p for p in sys.argv[1:] if m.version(p.split("==")[0]).split("+")[0] != p.split("==")[1]] or "") or 0)' $pins
cat > body.py <<'END'
import contextlib
import io
import sys
import deepspeed
import optimi
import torch
deepspeed.utils.logger.setLevel("ERROR")
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile
from deepspeed.checkpoint import ds_to_universal


def make(universal=False):
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimi.AdamW(model.parameters(), lr=0.1),
        config={
            "train_batch_size": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 1},
            "gradient_clipping": 0.0,
            "checkpoint": {"load_universal": universal},
        },
    )
    return engine


def step(engine, number):
    engine.backward((number * engine(torch.arange(4.0)[None] + number)).sum())
    engine.step()
    return engine.module.weight.detach().clone()


engine = make()
for number in range(1, 5):
    step(engine, number)
engine.save_checkpoint("saved", tag="t")
went_on = step(engine, -5)
words = "ds_to_universal --inject_missing_state --num_extract_workers 1 --num_merge_workers 1"
sys.argv = [*words.split(), "--input_folder", "saved/t", "--output_folder", "saved/u"]
with contextlib.redirect_stdout(io.StringIO()):
    ds_to_universal.main(ds_to_universal.parse_arguments())
off = {}
for tag in ("t", "u"):
    engine = make(universal=tag == "u")
    engine.load_checkpoint("saved", tag=tag)
    off[tag] = (step(engine, -5) - went_on).abs().max().item()
print(f"seen: weights off after a step: resumed {off['t']:.1e}, from the universal checkpoint {off['u']:.1e}")
if off["t"] or off["u"] < 1e-3:
    sys.exit("CHANGED: wanted 0 for the ordinary checkpoint, and more than 1e-3 for the universal one")
END
export CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
"$python" -m torch.distributed.run --standalone --nproc-per-node 1 body.py 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
