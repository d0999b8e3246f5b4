#!/usr/bin/env bash
# DeepSpeed 0.19.8, ZeRO-1: ds_to_universal of a checkpoint of torch's AdamW with amsgrad=True.
# Guess, before the run: each state that has a value for every weight is written, or the converter
# stops and names what it cannot convert.
# Seen, 2026-11-28, torch 2.13.0: it ends with "Done" and writes fp32, exp_avg, exp_avg_sq and
# step. max_exp_avg_sq, by which amsgrad divides, is in no file. (The momentum of torch's SGD is
# not written either: there the converter stops with KeyError: 'exp_avg'.)
# Instead: convert only what Adam without amsgrad has trained.
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


def files(folder, optimizer, **options):
    """The files that the converter writes for the weight."""
    model = torch.nn.Linear(4, 1, bias=False)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer(model.parameters(), lr=0.1, **options),
        config={
            "train_batch_size": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 1},
        },
    )
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    engine.save_checkpoint(folder, tag="t")
    words = "ds_to_universal --inject_missing_state --num_extract_workers 1 --num_merge_workers 1"
    sys.argv = [*words.split(), "--input_folder", f"{folder}/t", "--output_folder", f"{folder}/u"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        ds_to_universal.main(ds_to_universal.parse_arguments())
    assert "Done" in printed.getvalue()
    (shard,) = [name for name in os.listdir(f"{folder}/t") if name.endswith("optim_states.pt")]
    state = torch.load(f"{folder}/t/{shard}", weights_only=False)["optimizer_state_dict"]
    return sorted(state["base_optimizer_state"]["state"][0]), sorted(os.listdir(f"{folder}/u/zero/weight"))


saved, converted = files("amsgrad", torch.optim.AdamW, amsgrad=True)
print("saved", *saved, "; converted", *converted)
try:
    files("sgd", torch.optim.SGD, momentum=0.9)
    sgd = "nothing is raised"
except Exception as error:
    sgd = f"{type(error).__name__}: {error}"
print("seen: max_exp_avg_sq is saved, and is not converted; SGD with momentum:", sgd)
if "max_exp_avg_sq" not in saved or "max_exp_avg_sq.pt" in converted or "exp_avg" not in sgd:
    sys.exit("CHANGED: the converter knows more than Adam's two moments")
END
export CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
"$python" -m torch.distributed.run --standalone --nproc-per-node 1 body.py 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
