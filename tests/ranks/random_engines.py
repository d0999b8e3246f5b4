"""Random models, optimizers and ZeRO options, saved on some ranks and loaded on others or on the same:

    python tests/random_engines.py 0 300        # the engines of seeds 0 to 299, and a count of what came of them

An engine is wrong when load_checkpoint() returns and anything it holds is not what was saved: weights, masters, states,
frozen parameters, buffers, extra state, hyper-parameters, step counts, scheduler, counters, client state; or when the
losses of two more steps are others. tests/test_universal.py runs some."""

import collections
import json
import logging
import random
import sys
import tempfile
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

import universal

OPTIMIZERS = {
    "AdamW": {}, "Adam": {"amsgrad": True}, "SGD": {"momentum": 0.9}, "Adagrad": {}, "RMSprop": {"centered": True},
    "Adadelta": {}, "Adamax": {}, "RAdam": {}, "NAdam": {}, "ASGD": {}, "Rprop": {},
}  # fmt: skip
NAMES = ["w", "a-b", "x[0]", "y+", "ünï", "sla/sh", "s p"]


def plan(seed):
    """What the engine of a seed is, and what is done with it."""
    r = random.Random(seed)
    stage, to = r.choice([(1, 1), (2, 2), (3, 3), *((a, b) for a in (1, 2, 3) for b in (1, 2, 3))])
    ranks, optimizer = r.randint(1, 4), r.choice(["AdamW"] * 6 + list(OPTIMIZERS))
    return {
        "seed": seed,
        "stages": [stage, to],
        "ranks": [ranks, r.choice([ranks, 1, 2, 3, 4])],
        "optimizer": optimizer,
        "groups": 1 if optimizer == "Adagrad" else r.randint(1, 3),  # DeepSpeed makes it anew, and of one group
        "bf16": r.random() < 0.3,
        "parts": [part for part in ("extra", "hook", "shared", "frozen", "tied", "odd", "table") if r.random() < 0.5],
        "shapes": [[r.choice([1, 2, 3, 5, 8]) for _ in range(r.randint(1, 3))] for _ in range(r.randint(1, 5))],
        "zero": [options_of(r, stage), options_of(r, to)],
        "tag": r.choice(["t", "epoch1/step2", "a tag"]),
        "latest": r.random() < 0.5,  # another checkpoint is saved after it
        "universal": r.random() < 0.2,
        "options": r.choice([{}] * 6 + [{"load_optimizer_states": False}, {"load_module_only": True}]),
    }


def options_of(r, stage):
    options = {}
    if stage == 3:
        options["sub_group_size"] = r.choice([10**9, 1, 20])
        options["stage3_param_persistence_threshold"] = r.choice([0, 10, 10**5])
    else:
        options["round_robin_gradients"] = r.random() < 0.3
        options["elastic_checkpoint"] = r.random() < 0.2
    return options


class Part(nn.Module):
    """Tensors of its own in state_dict(), beside parameters and buffers."""

    def __init__(self, extra, hook):
        super().__init__()
        self.extra, self.hooked = (torch.randn(3) if extra else None), (torch.randn(4) if hook else None)
        if extra:
            Part.get_extra_state, Part.set_extra_state = Part.get, Part.set

    def get(self):
        return self.extra

    def set(self, state):
        self.extra = state

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.hooked is not None:
            destination[f"{prefix}SCB"] = self.hooked

    def _load_from_state_dict(self, state, prefix, *args):
        self.hooked = state.pop(f"{prefix}SCB", self.hooked)
        super()._load_from_state_dict(state, prefix, *args)


class Model(nn.Module):
    def __init__(self, parts, shapes):
        super().__init__()
        self.weights = nn.ParameterDict({f"{NAMES[i]}": torch.randn(shape) for i, shape in enumerate(shapes)})
        if "tied" in parts:
            self.again = nn.ParameterDict({"w": self.weights["w"]})
        if "frozen" in parts:
            self.frozen = nn.Parameter(torch.randn(4, 9)[:, 2:7], requires_grad=False)
        if "shared" in parts:
            self.norm = self.same = nn.BatchNorm1d(3, affine=False)
        if "odd" in parts:
            self.register_buffer("angles", torch.polar(torch.ones(4), torch.randn(4)))
            self.register_buffer("small", torch.randn(4).to(torch.float8_e4m3fn))
        if "table" in parts:
            self.register_buffer("table", torch.randint(0, 99, (2, 3)).to(torch.uint32))
        self.part = Part("extra" in parts, "hook" in parts)

    def forward(self, x):
        total = sum((p * x[i % len(x)]).sin().mean() for i, p in enumerate(self.weights.values()))
        if hasattr(self, "frozen"):
            total = total * (1 + self.frozen.float().cos().mean())
        if hasattr(self, "norm"):  # the same on every rank, as it looks at nothing of the batch
            total = (
                total + self.norm(self.weights["w"].float().flatten()[:1].expand(4, 3) + torch.eye(4, 3)).pow(3).mean()
            )
        return total.float().pow(2)


def make(job, side, seed):
    torch.manual_seed(seed)
    model = Model(job["parts"], job["shapes"])
    trained = [p for p in model.parameters() if p.requires_grad]
    cuts = [cut for cut in (trained[i :: job["groups"]] for i in range(job["groups"])) if cut]
    groups = [{"params": cut, "lr": 1e-2 / (i + 1), "weight_decay": 0.1 * i} for i, cut in enumerate(cuts)]
    config = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": job["bf16"]}}
    config["zero_optimization"] = {"stage": job["stages"][side]} | job["zero"][side]
    config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    return deepspeed.initialize(
        model=model, optimizer=getattr(torch.optim, job["optimizer"])(groups, **OPTIMIZERS[job["optimizer"]]),
        lr_scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: min(1, (step + 1) / 8)), config=config,
    )[0]  # fmt: skip


def train(engine, step):
    count, total = engine.gradient_accumulation_steps(), torch.zeros((), dtype=torch.float64)
    for i in range(dist.get_rank() * count, (dist.get_rank() + 1) * count):
        loss = engine(
            torch.randn(5, generator=torch.Generator().manual_seed(100 * step + i)).to(
                next(engine.module.parameters()).dtype
            )
        )
        engine.backward(loss)
        engine.step()
        total += loss.detach()
    dist.all_reduce(total)
    return total.item() / 12


def held(engine, job, side):
    """What an engine holds. DeepSpeed misreads the masters and states of a live engine with round_robin_gradients."""
    stage, found = engine.zero_optimization_stage(), {}
    readable = not any(zero.get("round_robin_gradients") for zero in job["zero"])
    if stage < 3:
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, p in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([p], enabled=hasattr(p, "ds_id")):
            found[name] = p.detach().clone()
        if p.requires_grad and readable:
            found[f"{name}/fp32"] = safe_get_full_fp32_param(p).clone()
            for key in sorted(
                {k for s in engine.optimizer.optimizer.state.values() for k, v in s.items() if is_slice(v)}
            ):
                found[f"{name}/{key}"] = safe_get_full_optimizer_state(p, key).clone()
    found |= {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    found |= {k: t.clone() for k, t in engine.module.state_dict().items() if "SCB" in k or "_extra" in k}
    groups = engine.optimizer.optimizer.param_groups
    found["groups"] = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    scalars = [
        {k: float(v) for k, v in s.items() if not is_slice(v) and v is not None}
        for s in engine.optimizer.optimizer.state.values()
    ]
    found["scalars"] = [of_one for i, of_one in enumerate(scalars) if of_one not in scalars[:i]]
    found["scheduler"] = engine.lr_scheduler.state_dict()
    found["counters"] = [engine.global_steps, engine.skipped_steps, engine.global_samples]
    found["counters"] += [engine.micro_steps / engine.gradient_accumulation_steps()]
    return found


def is_slice(value):
    return isinstance(value, torch.Tensor) and value.dim() > 0


def same(a, b):
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor)
            and a.dtype == b.dtype
            and torch.equal(a.view(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        )
    return a == b


def save(job):
    engine = make(job, 0, seed=1)
    for step in range(2):
        train(engine, step)
    engine.save_checkpoint(
        ".", tag=job["tag"], client_state={"word": job["seed"], "odd": torch.ones(2, dtype=torch.uint16)}
    )
    truth = held(engine, job, 0)
    truth["losses"] = []
    for step in (2, 3):
        truth["losses"].append(train(engine, step))
        if job["latest"] and step == 2:
            engine.save_checkpoint(".", tag="a later one")
    if dist.get_rank() == 0:
        torch.save(truth, "truth.pt")
        if job["universal"]:
            universal.convert(job["tag"], "universal")
    dist.barrier()


def load(job):
    engine = make(job, 1, seed=2)
    train(engine, 9)
    tag = "universal" if job["universal"] else job["tag"] if job["latest"] or job["seed"] % 2 else None
    path, client_state = universal.load_checkpoint(engine, ".", tag, **job["options"])
    assert path == str(Path("universal" if job["universal"] else job["tag"])), path
    assert client_state["word"] == job["seed"] and client_state["odd"].tolist() == [1, 1]
    truth, now, wrong = torch.load("truth.pt", weights_only=False), held(engine, job, 1), []
    names = [key for key in truth if key != "losses"]
    if job["options"]:
        names = [
            k
            for k in names
            if k not in ("groups", "scalars", "counters", "scheduler") and ("/" not in k or "/fp32" in k)
        ]
    wrong = [key for key in names if not same(truth[key], now.get(key))]
    if not job["options"]:
        gap = max(abs(train(engine, step) - loss) for step, loss in zip((2, 3), truth["losses"], strict=True))
        exact = (
            job["stages"][0] == job["stages"][1]
            and job["ranks"][0] == job["ranks"][1]
            and job["zero"][0] == job["zero"][1]
        )
        wrong += [f"loss {gap}"] if gap > (0 if exact else 2e-2 if job["bf16"] else 1e-5) else []
    Path(f"wrong.{dist.get_rank()}").write_text(json.dumps(wrong))


def try_one(seed, folder):
    """(what came of it, in a word; more)"""
    from harness.ranks import launch

    job = plan(seed)
    words = [json.dumps(job)]
    saved = launch(folder, job["ranks"][0], "tests/ranks/random_engines.py", "save", *words, limit=120)
    if saved.code:
        by_us = "CheckpointError" in saved.errors
        return ("not converted" if by_us else "DeepSpeed cannot save"), saved.errors.strip().splitlines()[-1:]
    loaded = launch(folder, job["ranks"][1], "tests/ranks/random_engines.py", "load", *words, limit=120)
    if loaded.code:
        refused = "CheckpointError: " in loaded.errors
        ours = "universal.py" in loaded.errors
        return (
            "refused" if refused else "failed" if ours else "DeepSpeed cannot start"
        ), loaded.errors.strip().splitlines()[-1:]
    wrong = [w for path in sorted(Path(folder).glob("wrong.*")) for w in json.loads(path.read_text())]
    return ("WRONG" if wrong else "right"), wrong


def main(first, last):
    counts = collections.Counter()
    for seed in range(first, last):
        with tempfile.TemporaryDirectory() as folder:
            word, more = try_one(seed, folder)
        job = plan(seed)
        where = "same ranks and stage" if len(set(job["ranks"])) == len(set(job["stages"])) == 1 else "others"
        counts[word, where] += 1
        if word != "right":
            print(seed, word, more, json.dumps(job), flush=True)
    for (word, where), count in sorted(counts.items()):
        print(f"{count:5} {word} ({where})")
    return 1 if any(word in ("WRONG", "failed") for word, _ in counts) else 0


if __name__ == "__main__":
    if sys.argv[1] in ("save", "load"):
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore")
        torch.set_num_threads(1)
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed()
        {"save": save, "load": load}[sys.argv[1]](json.loads(sys.argv[2]))
        dist.barrier()
    else:
        sys.exit(main(*map(int, sys.argv[1:])))
