#!/usr/bin/env bash
# accelerate 1.15.0 with torchdata 0.11.0, use_stateful_dataloader=True, micro-batches of 2; after 2
# of them on each of 2 ranks save_state(), then load_state() on 1 rank and on 4.
# Guess, before the run: 8 samples are trained, so the loader goes on with sample 8. With fewer
# ranks and more accumulation steps nothing is trained twice.
# Seen, 2026-11-29, torch 2.13.0: the state counts micro-batches of one rank. On 1 rank it goes on
# with sample 4, so 4 to 7 are trained again; on 4 ranks with sample 16, so 8 to 15 never are.
# Where the micro-batch times the ranks stays the same (4 on 1 rank), it is right.
# Instead: without a stateful loader, skip_first_batches() by samples, counted by the script.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
pins="torch==2.13.0 accelerate==1.15.0 torchdata==0.11.0"
python=${FINDINGS_PYTHON:-$PWD/venv/bin/python}  # or an environment that has these
[ -x "$python" ] || { python3 -m venv venv && venv/bin/pip install -q $pins; }
"$python" -c 'import sys, importlib.metadata as m
sys.exit(str([p for p in sys.argv[1:] if m.version(p.split("==")[0]).split("+")[0] != p.split("==")[1]] or "") or 0)' $pins
cat > body.py <<'END'
import sys
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration

accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
micro_batch = int(sys.argv[1])
loader = torch.utils.data.DataLoader(range(32), batch_size=micro_batch)
model = torch.nn.Linear(1, 1)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters()), loader)
ranks = accelerator.num_processes
if sys.argv[2] == "save":
    for step, batch in enumerate(loader, 1):
        trained = accelerator.gather(batch).tolist()
        if step == 2:
            accelerator.save_state("saved")
            break
    wanted = [4, 5, 6, 7]
else:
    accelerator.load_state("saved")
    trained = accelerator.gather(next(iter(loader))).tolist()
    wanted = {(1, 2): [4, 5], (4, 2): [*range(16, 24)], (1, 4): [8, 9, 10, 11]}[ranks, micro_batch]
if accelerator.is_main_process:
    words = "the last before the save" if sys.argv[2] == "save" else "the first after a resume"
    print(f"seen: on {ranks} rank(s), micro-batch {micro_batch}: {words}:", *trained)
    if trained != wanted:
        sys.exit(f"CHANGED: wanted {wanted}")
END
export CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
"$python" -m torch.distributed.run --standalone --nproc-per-node 2 body.py 2 save 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
"$python" -m torch.distributed.run --standalone --nproc-per-node 1 body.py 4 load 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
"$python" -m torch.distributed.run --standalone --nproc-per-node 1 body.py 2 load 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
"$python" -m torch.distributed.run --standalone --nproc-per-node 4 body.py 2 load 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
