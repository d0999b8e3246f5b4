#!/usr/bin/env bash
# DeepSpeed 0.19.8, ZeRO-1: a model that was moved to torch's channels_last memory format, and one
# with a parameter that is a single number.
# Guess, before the run: a memory format changes no value, and one number is a tensor like others,
# so both train.
# Seen, 2026-11-28, torch 2.13.0: initialize() raises a RuntimeError for both, about views as bytes
# that name neither the parameter nor the format: it broadcasts each weight as bytes, and cannot
# view these so.
# Instead: model.to(memory_format=torch.contiguous_format), shape (1,) in place of ().
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
pins="torch==2.13.0 deepspeed==0.19.8"
python=${FINDINGS_PYTHON:-$PWD/venv/bin/python}  # or an environment that has these
[ -x "$python" ] || { python3 -m venv venv && venv/bin/pip install -q $pins; }
"$python" -c 'import sys, importlib.metadata as m
sys.exit(str([p for p in sys.argv[1:] if m.version(p.split("==")[0]).split("+")[0] != p.split("==")[1]] or "") or 0)' $pins
cat > body.py <<'END'
import sys
import deepspeed
import torch
deepspeed.utils.logger.setLevel("ERROR")
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile


def begin(model):
    try:
        deepspeed.initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            config={
                "train_batch_size": 1,
                "zero_allow_untested_optimizer": True,
                "zero_optimization": {"stage": 1},
            },
        )
        return "begins"
    except RuntimeError as error:
        return str(error)[:90]


class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.0))


seen = {
    "contiguous": begin(torch.nn.Conv2d(2, 2, 3)),
    "channels_last": begin(torch.nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)),
    "one number": begin(Scale()),
}
print("seen:", seen)
if [text == "begins" for text in seen.values()] != [True, False, False]:
    sys.exit("CHANGED: wanted errors for channels_last and for one number")
END
export CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
"$python" -m torch.distributed.run --standalone --nproc-per-node 1 body.py 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
