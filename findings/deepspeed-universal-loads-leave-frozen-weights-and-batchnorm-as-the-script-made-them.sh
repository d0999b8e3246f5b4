#!/usr/bin/env bash
# DeepSpeed 0.19.8, ZeRO-1: a universal checkpoint of a model with a frozen layer and a BatchNorm,
# resumed by DeepSpeed's own loader.
# Guess, before the run: "universal" is about the optimizer's shards; what the module holds besides
# (frozen weights, running statistics) comes from the module's file as always, for it lies in the
# folder.
# Seen, 2026-11-28, torch 2.13.0: nothing is taken from that file. The frozen weights and the
# running mean stay what the script made them (5.0 and 0.0), in silence; saved were 1.0 and 0.4.
# The ordinary checkpoint restores both.
# Instead: give the script the frozen weights, and load the buffers from mp_rank_00_model_states.pt
# by hand.
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
import sys
import deepspeed
import torch
deepspeed.utils.logger.setLevel("ERROR")
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile
from deepspeed.checkpoint import ds_to_universal


def make(frozen, universal=False):
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 4, bias=False), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)
    )
    torch.nn.init.constant_(model[0].weight, frozen).requires_grad_(False)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1),
        config={
            "train_batch_size": 2,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 1},
            "checkpoint": {"load_universal": universal},
        },
    )
    return engine


def kept(engine):
    frozen, norm, _ = engine.module
    return [round(value, 4) for value in (frozen.weight[0, 0].item(), norm.running_mean[0].item())]


engine = make(frozen=1.0)
engine.backward(engine(torch.ones(2, 4)).sum())
engine.step()
engine.save_checkpoint("saved", tag="t")
seen = {"saved": kept(engine)}
words = "ds_to_universal --inject_missing_state --num_extract_workers 1 --num_merge_workers 1"
sys.argv = [*words.split(), "--input_folder", "saved/t", "--output_folder", "saved/u"]
with contextlib.redirect_stdout(io.StringIO()):
    ds_to_universal.main(ds_to_universal.parse_arguments())
for tag in ("t", "u"):
    engine = make(frozen=5.0, universal=tag == "u")
    engine.load_checkpoint("saved", tag=tag)
    seen["ordinary" if tag == "t" else "universal"] = kept(engine)
print("seen: [frozen weight, running mean]", seen)
if seen["ordinary"] != seen["saved"] or seen["universal"] != [5.0, 0.0]:
    sys.exit("CHANGED: a universal load restores what the optimizer does not have")
END
export CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
"$python" -m torch.distributed.run --standalone --nproc-per-node 1 body.py 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
