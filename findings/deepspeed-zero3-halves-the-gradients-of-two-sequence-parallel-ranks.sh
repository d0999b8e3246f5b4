#!/usr/bin/env bash
# DeepSpeed 0.19.8: 2 sequence-parallel ranks by its own mpu (Ulysses), each with its half of a
# sequence and its part of the mean loss; ZeRO-1 and ZeRO-3.
# Guess, before the run: a stage of ZeRO says where the gradients are kept, so their norm is the
# same at 1 and 3.
# Seen, 2026-11-28, torch 2.13.0: ZeRO-1 divides the sum of gradients by the data-parallel ranks
# (1), ZeRO-3 by all ranks (2): the same data have norm 1 at ZeRO-1 and 0.5 at ZeRO-3. A resume at
# the other stage goes on with another gradient, which Adam hides until clipping or weight decay
# shows it.
# Instead: at ZeRO-3 engine.backward(loss * sequence-parallel ranks).
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
from deepspeed.runtime.sequence_parallel import parallel_state_sp as mpu
deepspeed.utils.logger.setLevel("ERROR")
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile
deepspeed.init_distributed("gloo")
mpu.initialize_sequence_parallel(2)


def norm(stage):
    """The gradient norm of a sequence of two tokens, (1, 0, 0, 0) each, whose loss is a mean."""
    model = torch.nn.Linear(4, 1, bias=False)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        mpu=mpu,
        config={
            "train_batch_size": 1,
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage},
        },
    )
    token = torch.eye(4)[:1]  # this rank's half of the sequence
    engine.backward(engine(token).sum() / 2)
    engine.step()
    return round(float(engine.get_global_grad_norm()), 4)


norms = {stage: norm(stage) for stage in (1, 3)}
if deepspeed.comm.get_rank() == 0:
    print("seen: the gradient norm of the same sequence on 2 sequence-parallel ranks at ZeRO-1 and 3:", norms)
    if norms != {1: 1.0, 3: 0.5}:
        sys.exit("CHANGED: wanted 1.0 at ZeRO-1, 0.5 at ZeRO-3")
END
export CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
"$python" -m torch.distributed.run --standalone --nproc-per-node 2 body.py 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
