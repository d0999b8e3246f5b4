#!/usr/bin/env bash
# DeepSpeed 0.19.8, ZeRO-3: ds_to_universal twice into one output folder, the first time with
# --keep_temp_folder (which a killed conversion is like), of a checkpoint of 2 ranks and then of
# one of 1.
# Guess, before the run: the second conversion begins with an empty tmp/, or writes over what is
# there.
# Seen, 2026-11-28, torch 2.13.0: fragments of the first one that have no counterpart stay and are
# joined with the new ones, and "Done" is printed: the weight of 8 values, all 1, gets 12, and the
# last 4 are 2s of the other checkpoint.
# Instead: remove the output folder before each conversion.
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

ranks = int(os.environ["WORLD_SIZE"])


def save(folder, value):
    model = torch.nn.Linear(8, 1, bias=False)
    torch.nn.init.constant_(model.weight, value)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 3},
        },
    )
    engine.backward(engine(torch.ones(1, 8)).sum())
    engine.step()
    engine.save_checkpoint(folder, tag="t")


def convert(folder, output, *options):
    """The weight that the converter writes."""
    words = "ds_to_universal --num_extract_workers 1 --num_merge_workers 1"
    sys.argv = [*words.split(), "--input_folder", f"{folder}/t", "--output_folder", output, *options]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        ds_to_universal.main(ds_to_universal.parse_arguments())
    assert "Done" in printed.getvalue()
    return torch.load(f"{output}/zero/weight/fp32.pt", weights_only=False).tolist()


if ranks == 1:  # the first of two launches
    save("one", 1.0)
else:
    save("two", 2.0)
    if deepspeed.comm.get_rank() == 0:
        clean = convert("one", "clean")
        convert("two", "both", "--keep_temp_folder")
        mixed = convert("one", "both")
        print(f"seen: the weight of the 1-rank checkpoint is {clean}, and after another one {mixed}")
        if clean != [1.0] * 8 or mixed == clean:
            sys.exit("CHANGED: the second conversion takes nothing from the first")
END
export CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
"$python" -m torch.distributed.run --standalone --nproc-per-node 1 body.py 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
"$python" -m torch.distributed.run --standalone --nproc-per-node 2 body.py 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
