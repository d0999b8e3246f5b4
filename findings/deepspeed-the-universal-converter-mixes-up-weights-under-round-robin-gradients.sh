#!/usr/bin/env bash
# DeepSpeed 0.19.8, ZeRO-2 with "round_robin_gradients": true; its own ds_to_universal.
# Guess, before the run: the option says in which order gradients are reduced; a universal
# checkpoint has each parameter's own values, or the converter stops.
# Seen, 2026-11-28, torch 2.13.0, 2 ranks: the converter ends with "Done", and parameters of one
# shape have each other's values: layer 1, saved full of 1, is full of 2 in its file, and layer 2
# of 1. Without the option all are right.
# Instead: save with the option off before a conversion; a resume on the same ranks does not need
# one.
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


def converted(round_robin):
    """What the converter makes of 4 layers that are full of 0, 1, 2 and 3."""
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4, bias=False) for layer in range(4)])
    for layer in range(4):
        torch.nn.init.constant_(model[layer].weight, float(layer))
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 2, "round_robin_gradients": round_robin},
        },
    )
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    folder = f"round_robin_{round_robin}"
    engine.save_checkpoint(folder, tag="t")
    words = "ds_to_universal --inject_missing_state --num_extract_workers 1 --num_merge_workers 1"
    sys.argv = [*words.split(), "--input_folder", f"{folder}/t", "--output_folder", f"{folder}/u"]
    if deepspeed.comm.get_rank() == 0:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            ds_to_universal.main(ds_to_universal.parse_arguments())
        assert "Done" in printed.getvalue()
    deepspeed.comm.barrier()
    files = [f"{folder}/u/zero/{layer}.weight/fp32.pt" for layer in range(4)]
    return [torch.load(file, weights_only=False)["param"].unique().tolist() for file in files]


off, on = converted(False), converted(True)
if deepspeed.comm.get_rank() == 0:
    print(f"seen: layers full of 0, 1, 2, 3 are converted to {off} without round robin, {on} with it")
    if off != [[0.0], [1.0], [2.0], [3.0]] or on == off:
        sys.exit("CHANGED: the converter takes round robin into account")
END
export CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
"$python" -m torch.distributed.run --standalone --nproc-per-node 2 body.py 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
