"""Loads damaged checkpoints, one after the other, into one engine: damage.py STAGE FOLDER...

`damage.py STAGE save` writes two checkpoints of step 2 and 4, tags "t" and "later", and truth_<tag>.pt beside them. Of
every folder each rank writes told.<rank>.json: the error, or what it has loaded and how that differs from the truth."""

import contextlib
import json
import logging
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

import universal


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(8, 7), nn.Linear(7, 5, bias=False), nn.LayerNorm(7)
        self.frozen = nn.Linear(8, 4).requires_grad_(False)
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, x):
        self.calls += self.training  # once for every micro-batch, so a step's losses depend on the rank: a little
        return self.b(self.norm(self.a(x))).pow(2).mean() + self.frozen(x).mean() * 0.1


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def make(stage, net=Net, optimizer=adam, seed=1, zero=None, batch=12, micro=1, clip=0.0, **more):
    torch.manual_seed(seed)
    model = net()
    made = optimizer and optimizer([p for p in model.parameters() if p.requires_grad])
    config = {"train_batch_size": batch, "train_micro_batch_size_per_gpu": micro, "gradient_clipping": clip}
    config |= {"zero_optimization": {"stage": stage} | (zero or {})}
    config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False} | more
    return deepspeed.initialize(model=model, optimizer=made, config=config)[0]


def train(engine, step, micro_batches=None):
    """An optimizer step; its loss, over all ranks."""
    count, total = engine.gradient_accumulation_steps(), torch.zeros((), dtype=torch.float64)
    for i in range(dist.get_rank() * count, dist.get_rank() * count + (micro_batches or count)):
        loss = engine(torch.randn(1, 8, generator=torch.Generator().manual_seed(100 * step + i)))
        engine.backward(loss)
        engine.step()
        total += loss.detach()
    dist.all_reduce(total)
    return total.item() / 12


def held(engine, states=True):
    """Everything that the engine holds, whole."""
    if engine.zero_optimization_stage() < 3:  # DeepSpeed looks for the states once, and not again after a load
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    found = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    for name, p in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([p], enabled=hasattr(p, "ds_id")):
            found[name] = p.detach().clone()
        if p.requires_grad:
            found[f"{name} fp32"] = safe_get_full_fp32_param(p)
            for key in ("exp_avg", "exp_avg_sq") if states else ():
                found[f"{name} {key}"] = safe_get_full_optimizer_state(p, key)
    found["steps"] = torch.tensor([float(s.get("step", 0)) for s in engine.optimizer.optimizer.state.values()][:1])
    found["global_steps"] = torch.tensor(engine.global_steps)
    return found


def save(stage):
    engine = make(stage)
    for step in (1, 2, 3, 4):
        train(engine, step)
        if step % 2 == 0:
            tag = {2: "t", 4: "later"}[step]
            engine.save_checkpoint(".", tag=tag, client_state={"step": step})
            truth = held(engine)
            if dist.get_rank() == 0:
                torch.save(truth, f"truth_{tag}.pt")
            dist.barrier()


def load(engine, folder):
    """{"error"} or {"tag", "step", "wrong": what is not as it was saved, by name}, and the seconds."""
    options = {"load_dir": folder, "tag": "t"}
    if (folder / "options.json").exists():
        options |= json.loads((folder / "options.json").read_text())
    began = time.monotonic()
    try:
        path, client_state = universal.load_checkpoint(engine, **options, timeout=30)
        told = {"tag": str(Path(path).relative_to(folder)), "step": client_state["step"]}
    except universal.CheckpointError as error:
        told = {"error": str(error)}
    told["seconds"] = time.monotonic() - began
    if "step" in told:
        truth, now = torch.load(f"truth_{ {2: 't', 4: 'later'}[told['step']] }.pt"), held(engine)
        told["wrong"] = [name for name in truth if not torch.equal(truth[name], now[name])]
    return told


if __name__ == "__main__":
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    stage, *folders = sys.argv[1:]
    if folders == ["save"]:
        save(int(stage))
    else:
        engine = make(int(stage))
        train(engine, 1)  # its states are not zeros
        for folder in map(Path, folders):
            rank = dist.get_rank()
            with open(folder / f"said.{rank}", "w", buffering=1) as said, contextlib.redirect_stdout(said):
                told = load(engine, folder)
            (folder / f"told.{rank}.json").write_text(json.dumps(told))
            dist.barrier()
        engine.destroy()
    dist.barrier()
