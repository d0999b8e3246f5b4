"""Trains, saves and loads under whatever DeepSpeed PYTHONPATH names: any_version.py '[{"name": "a", ...}, ...]'.

A job trains a small model with a loop that knows nothing of this repository, on ranks forked from this process, at most
`limit` seconds; universal.py is imported by those that load with it. Prints one line of JSON a job: its losses,
or the error that one of its ranks raised. Imports nothing else of this repository: that may need a newer DeepSpeed.
"""

import importlib
import json
import logging
import os
import signal
import sys
import tempfile
import time
import warnings
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
ROOT = Path(__file__).resolve().parent.parent

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

# Older DeepSpeeds gather into views that autograd forbids gloo to write to, and not NCCL.
dist.all_gather_into_tensor = torch.no_grad()(dist.all_gather_into_tensor)

import deepspeed  # noqa: E402

SAVED, STEPS, BATCH, ACCUMULATION = 3, 9, 24, 2
# What DeepSpeed imports when it makes an engine: once here instead of once in every rank.
LATER = ("setuptools", "distutils.ccompiler", "torch._dynamo", "torch._inductor.compile_fx", "deepspeed.comm.torch")
LATER += ("torch._subclasses.schema_check_mode", "deepspeed.sequence.layer", "deepspeed.checkpoint.ds_to_universal")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.out.weight = self.embed.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.hidden, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens, targets):
        self.calls += 1
        hidden = self.norm(self.hidden(self.frozen(self.embed(tokens)).tanh()).relu())
        return nn.functional.cross_entropy(self.out(hidden) * (1 + 0.01 * self.calls), targets)


def make_engine(ranks, stage, seed, universal, one_group):
    torch.manual_seed(1)
    frozen = Net().frozen
    torch.manual_seed(seed)
    model = Net()
    if universal:  # DeepSpeed's universal loader leaves both out: here they come from elsewhere
        model.frozen = frozen
        model.calls += SAVED * ACCUMULATION
    decayed = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    config = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // ACCUMULATION // ranks,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 0.5,  # the default was none, and is 1 since 0.19.3
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "checkpoint": {"load_universal": universal},
    }
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 2e-2}]
    optimizer = torch.optim.AdamW([{"params": decayed + others}] if one_group else groups, lr=1e-2)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config,
        lr_scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: min(1, (step + 1) / STEPS)),
    )  # fmt: skip
    return engine


def work(name, ranks, stage, folder=None, save=None, load=None, how=None, seed=1, one_group=False):
    """Train to the last step. load: a tag, by `how`, in a model of another seed; save: a tag, at step 3 or a load."""
    if how == "convert":
        options = dict(num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=True)
        options |= dict(input_folder=f"{folder}/{load}", output_folder=f"{folder}/{save}", inject_missing_state=True)
        deepspeed.checkpoint.ds_to_universal.main(SimpleNamespace(**options))
        return []
    engine = make_engine(ranks, stage, seed=seed + bool(load), universal=how == "universal", one_group=one_group)
    if load and how == "ours":
        sys.path.append(str(ROOT))
        import universal

        universal.load_checkpoint(engine, folder, load)
    elif load:
        assert engine.load_checkpoint(folder, load)[0], "nothing was loaded"
    if load and save:
        engine.save_checkpoint(folder, tag=save)
    rank, losses = dist.get_rank(), []
    for step in range(engine.global_steps, STEPS):
        data = torch.randint(11, (BATCH, 2), generator=torch.Generator().manual_seed(step))
        mean = torch.zeros((), dtype=torch.float64)
        for rows in data.chunk(ACCUMULATION):
            mine = rows[rank::ranks]
            loss = engine(mine[:, 0], mine[:, 1])
            engine.backward(loss)
            engine.step()
            mean += loss.detach().double() / ACCUMULATION / ranks
        dist.all_reduce(mean)
        losses.append(mean.item())
        if save and step + 1 == SAVED:
            engine.save_checkpoint(folder, tag=save)
    return losses[-(STEPS - SAVED) :]


def rank_main(rank, job, result):
    code = 0
    try:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job["ranks"])}
        dist.init_process_group("gloo", init_method=f"file://{result}.store", rank=rank, world_size=job["ranks"])
        deepspeed.init_distributed("gloo")
        found = {"losses": work(**job)}
    except BaseException as error:
        text = next((line for line in str(error).splitlines() if line.strip()), "")
        found, code = {"error": f"{type(error).__name__}: {text}"}, 1
        logging.exception(job["name"])
    if rank == 0 or code:
        Path(f"{result}.{rank}").write_text(json.dumps(found))
    os._exit(code)  # nothing of the parent's is to be finished here


def run(job, limit=90):
    """The result of the rank that failed first, or of rank 0; the others of a rank that fails may wait for ever."""
    with tempfile.TemporaryDirectory() as folder:
        result, children, first = f"{folder}/result", set(), None
        sys.stdout.flush()
        for rank in range(job["ranks"]):
            if not (child := os.fork()):
                os.dup2(2, 1)
                rank_main(rank, job, result)
            children.add(child)
        deadline = time.monotonic() + limit
        while children and time.monotonic() < deadline:
            for child in list(children):
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid:
                    children.remove(pid)
                    if status and first is None:
                        first, deadline = pid, min(deadline, time.monotonic() + 5)
            time.sleep(0.01)
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        written = sorted(Path(folder).glob("result.[0-9]*"), key=lambda path: path.stat().st_mtime_ns)
        found = [json.loads(path.read_text()) for path in written]
        if first is None and not children and found:
            return found[0]
        errors = [one for one in found if "error" in one]
        return errors[0] if errors else {"error": f"no answer within {limit} seconds, or a rank that died"}


def main():
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    for name in LATER:
        with suppress(ImportError):
            importlib.import_module(name)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it needs a compiler
    for job in json.loads(sys.argv[1]):
        print(json.dumps({"name": job["name"], "version": deepspeed.__version__} | run(job)), flush=True)


if __name__ == "__main__":
    main()
