#!/usr/bin/env bash
# DeepSpeed 0.19.8, ZeRO-1 in fp32: a script puts averaged weights into the module just before
# save_checkpoint(), as for EMA, and zero_to_fp32 extracts them.
# Guess, before the run: in fp32 there is one set of weights, so the file has the average that was
# in the model at the save.
# Seen, 2026-11-28, torch 2.13.0: zero_to_fp32 takes the optimizer's copy, the weights before the
# swap (1.0); the average (7.0) is in mp_rank_00_model_states.pt alone. Who publishes the extracted
# file publishes other weights than were evaluated.
# Instead: torch.save(engine.module.state_dict()) while the average is in.
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
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

model = torch.nn.Linear(4, 1, bias=False)
torch.nn.init.ones_(model.weight)
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
    config={
        "train_batch_size": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1},
    },
)
engine.backward(engine(torch.ones(1, 4)).sum())
engine.step()
with torch.no_grad():
    engine.module.weight.fill_(7.0)
engine.save_checkpoint("saved", tag="t")
in_module = torch.load("saved/t/mp_rank_00_model_states.pt", weights_only=False)["module"]["weight"]
extracted = get_fp32_state_dict_from_zero_checkpoint("saved", tag="t")["weight"]
values = [weight[0, 0].item() for weight in (in_module, extracted)]
print("seen: the weight in the saved module and in what zero_to_fp32 extracts:", values)
if values != [7.0, 1.0]:
    sys.exit("CHANGED: wanted 7.0 and 1.0")
END
export CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
"$python" -m torch.distributed.run --standalone --nproc-per-node 1 body.py 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
