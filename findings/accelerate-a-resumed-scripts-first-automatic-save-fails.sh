#!/usr/bin/env bash
# accelerate 1.15.0: ProjectConfiguration(automatic_checkpoint_naming=True), two saves, then a new
# process: load_state() without a folder, which takes the newest, and save_state().
# Guess, before the run: the numbers go on, so the new save is checkpoint_2.
# Seen, 2026-11-28, torch 2.13.0: load_state() takes checkpoint_1, and the count starts at 0 again:
# save_state() raises a ValueError that checkpoint_0 exists already, so a resumed job dies at its
# first save, hours after the load.
# Instead: after load_state() set project_configuration.iteration to the number after the loaded
# one.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
pins="torch==2.13.0 accelerate==1.15.0"
python=${FINDINGS_PYTHON:-$PWD/venv/bin/python}  # or an environment that has these
[ -x "$python" ] || { python3 -m venv venv && venv/bin/pip install -q $pins; }
"$python" -c 'import sys, importlib.metadata as m
sys.exit(str([p for p in sys.argv[1:] if m.version(p.split("==")[0]).split("+")[0] != p.split("==")[1]] or "") or 0)' $pins
cat > body.py <<'END'
import os
import sys
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration


def start():
    """What a process of the job does first."""
    project = ProjectConfiguration(project_dir="job", automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = torch.nn.Linear(4, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return accelerator


first = start()
first.save_state()
first.save_state()
second = start()
second.load_state()
try:
    second.save_state()
    error = "none"
except ValueError as raised:
    error = str(raised).replace(os.getcwd(), "...")
print("seen: the folders are", sorted(os.listdir("job/checkpoints")), "; a save after load_state():", error[:120])
if "already exists" not in error:
    sys.exit("CHANGED: the count goes on after load_state()")
END
export CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
"$python" body.py 2> log || { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
