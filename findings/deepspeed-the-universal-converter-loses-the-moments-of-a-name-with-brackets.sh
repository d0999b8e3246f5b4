#!/usr/bin/env bash
# DeepSpeed 0.19.8, ZeRO-1: ds_to_universal of a model whose ParameterDict has the keys "bias" and
# "w[0]".
# Guess, before the run: a name is a name, so its files are written like those of "bias".
# Seen, 2026-11-28, torch 2.13.0: the name is taken for a pattern that matches no file: "bias" gets
# exp_avg, exp_avg_sq, fp32 and step, "w[0]" its weights alone. "Done" is printed, and its moments
# are in no file.
# Instead: no *, ?, [ or + in the names of parameters.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
pins="torch==2.13.0 deepspeed==0.19.8"
python=${FINDINGS_PYTHON:-$PWD/venv/bin/python}  # or an environment that has these
[ -x "$python" ] || { python3 -m venv venv && venv/bin/pip install -q $pins; }
"$python" -c 'import sys, importlib.metadata as m
sys.exit(str([p for p in sys.argv[1:] if m.version(p.split("==")[0]).split("+")[0] != p.split("==")[1]] or "") or 0)' $pins
cat > body.py <<'END'
import contextlib
import io
import os
import sys
import deepspeed
import torch
deepspeed.utils.logger.setLevel("ERROR")
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile
from deepspeed.checkpoint import ds_to_universal


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.all = torch.nn.ParameterDict({name: torch.ones(4) for name in ("bias", "w[0]")})

    def forward(self, x):
        return sum((weight * x).sum() for weight in self.all.values())


model = Model()
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=0.1),
    config={
        "train_batch_size": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1},
        "gradient_clipping": 0.0,
    },
)
engine.backward(engine(torch.ones(4)))
engine.step()
engine.save_checkpoint("saved", tag="t")
words = "ds_to_universal --inject_missing_state --num_extract_workers 1 --num_merge_workers 1"
sys.argv = [*words.split(), "--input_folder", "saved/t", "--output_folder", "saved/u"]
with contextlib.redirect_stdout(io.StringIO()) as printed:
    ds_to_universal.main(ds_to_universal.parse_arguments())
assert "Done" in printed.getvalue()
written = {name: sorted(os.listdir(f"saved/u/zero/all.{name}")) for name in ("bias", "w[0]")}
print("seen:", written)
if "exp_avg.pt" not in written["bias"] or "exp_avg.pt" in written["w[0]"]:
    sys.exit("CHANGED: wanted moments of bias, and none of w[0]")
END
export CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
"$python" -m torch.distributed.run --standalone --nproc-per-node 1 body.py 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
