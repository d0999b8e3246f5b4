#!/usr/bin/env bash
# DeepSpeed 0.19.8, ZeRO-1, 2 and 3: a script calls loss.backward(), which DeepSpeed supports; the
# model returns the loss alone, or the loss and the logits that it is computed from.
# Guess, before the run: what else a model returns changes no gradient, and a step of 4 equal
# micro-batches has the gradient norm of one.
# Seen, 2026-11-29, torch 2.13.0, 2 ranks: with the logits, at ZeRO-1 and 2, the norm of 4
# micro-batches is a quarter of that of 1: each output that the loss comes from has a hook that
# divides by the accumulation steps. At ZeRO-3, or with engine.backward(loss), it is the same.
# Instead: engine.backward(loss).
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
pins="torch==2.13.0 deepspeed==0.19.8"
python=${FINDINGS_PYTHON:-$PWD/venv/bin/python}  # or an environment that has these
[ -x "$python" ] || { python3 -m venv venv && venv/bin/pip install -q $pins; }
"$python" -c 'import sys, importlib.metadata as m
sys.exit(str([p for p in sys.argv[1:] if m.version(p.split("==")[0]).split("+")[0] != p.split("==")[1]] or "") or 0)' $pins
cat > body.py <<'END'
import itertools
import os
import sys
import deepspeed
import torch
deepspeed.utils.logger.setLevel("ERROR")
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile


class Regression(torch.nn.Module):
    def __init__(self, with_logits):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
        self.with_logits = with_logits

    def forward(self, inputs):
        logits = self.layer(inputs)
        loss = (logits - 1).pow(2).mean()
        return (loss, logits) if self.with_logits else (loss,)


def norm(stage, with_logits, by_engine, count):
    torch.manual_seed(0)
    model = Regression(with_logits)
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": count,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for _ in range(count):
        loss, *_ = engine(torch.arange(12.0).view(3, 4))
        engine.backward(loss) if by_engine else loss.backward()
        engine.step()
    return float(engine.get_global_grad_norm())


parts = {}
for case in itertools.product((1, 2, 3), (False, True), (False, True)):
    parts[case] = round(norm(*case, 4) / norm(*case, 1), 4)
off = {case: part for case, part in parts.items() if part != 1}
rank = deepspeed.comm.get_rank()
torch.distributed.barrier()
if rank == 0:
    print(f"seen: the norm with 4 accumulation steps is 1 of that with one, but, by (ZeRO stage, logits are returned, engine.backward), {off}")
    if off != {(1, True, False): 0.25, (2, True, False): 0.25}:
        sys.exit("CHANGED: it is 1 in other cases")
sys.stdout.flush()
os._exit(0)  # after twenty engines gloo now and then aborts an orderly exit
END
export CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
"$python" -m torch.distributed.run --standalone --nproc-per-node 2 body.py 2> log ||
    { grep -m 1 -E '^(CHANGED|(\[rank.\]: )?[A-Za-z.]*Error)' log || tail -n 5 log; exit 1; } >&2
