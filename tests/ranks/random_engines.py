"""Random models, optimizers and ZeRO options, saved on some ranks and loaded on others or on the
same: random_engines.py save SEED..., then random_engines.py load SEED...

An engine is wrong when load_checkpoint() returns and anything it holds is not what was saved:
weights, masters, states, frozen parameters, buffers, extra state, hyper-parameters, step counts,
scheduler, counters, client state; or when the losses of two more steps are others. wanted() says
which of them must load."""

import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from helpers import run_all
from torch import nn
from toy import (
    RARE_DTYPES,
    ExtraState,
    begin,
    in_turn,
    make,
    same,
    save_truth,
    snapshot,
    split_groups,
    train,
)

import universal

OPTIMIZERS = {
    "AdamW": {},
    "Adam": {"amsgrad": True},
    "SGD": {"momentum": 0.9},
    "Adagrad": {},
    "RMSprop": {"centered": True},
    "Adadelta": {},
    "Adamax": {},
    "RAdam": {},
    "NAdam": {},
    "ASGD": {},
    "Rprop": {},
}
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
        "groups": 1
        if optimizer == "Adagrad"
        else r.randint(1, 3),  # DeepSpeed makes it anew, and of one group
        "bf16": r.random() < 0.3,
        "parts": [part for part in ("shared", "frozen", "tied", "odd") if r.random() < 0.5],
        "shapes": [
            [r.choice([1, 2, 3, 5, 8]) for _ in range(r.randint(1, 3))]
            for _ in range(r.randint(1, 5))
        ],
        "zero": [options_of(r, stage), options_of(r, to)],
        "tag": r.choice(["t", "epoch1/step2", "a tag"]),
        "latest": r.random() < 0.5,  # another checkpoint is saved after it
        "universal": r.random() < 0.2,
        "options": r.choice(
            [{}] * 6 + [{"load_optimizer_states": False}, {"load_module_only": True}]
        ),
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


class Model(nn.Module):
    def __init__(self, parts, shapes):
        super().__init__()
        self.weights = nn.ParameterDict(
            {f"{NAMES[i]}": torch.randn(shape) for i, shape in enumerate(shapes)}
        )
        if "tied" in parts:
            self.again = nn.ParameterDict({"w": self.weights["w"]})
        if "frozen" in parts:
            self.frozen = nn.Parameter(torch.randn(4, 9)[:, 2:7], requires_grad=False)
        if "shared" in parts:
            self.norm = self.same = nn.BatchNorm1d(3, affine=False)
        if "odd" in parts:
            self.odd = ExtraState(RARE_DTYPES)

    def forward(self, x):
        x = x.flatten()
        total = sum((p * x[i % len(x)]).sin().mean() for i, p in enumerate(self.weights.values()))
        if hasattr(self, "frozen"):
            total = total * (1 + self.frozen.float().cos().mean())
        if hasattr(self, "norm"):  # the same on every rank, as it looks at nothing of the batch
            first = self.weights["w"].float().flatten()[:1]
            total = total + self.norm(first.expand(4, 3) + torch.eye(4, 3)).pow(3).mean()
        return total.float().pow(2)


def wanted(job):
    """The one outcome that is right: all load but the two whose optimizers keep what belongs to no
    single element, and which were to be converted."""
    return (
        "not converted" if job["universal"] and job["optimizer"] in ("ASGD", "NAdam") else "right"
    )


def make_it(job, side, seed):
    return make(
        job["stages"][side],
        lambda: Model(job["parts"], job["shapes"]),
        lambda ps: getattr(torch.optim, job["optimizer"])(
            split_groups(ps, job["groups"]), **OPTIMIZERS[job["optimizer"]]
        ),
        seed,
        job["zero"][side],
        bf16={"enabled": job["bf16"]},
        clip=1.0,
        scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(
            o, lambda step: min(1, (step + 1) / 8)
        ),
    )


def keep_truth(engine, job):
    """What the engine holds, and the losses of two more steps. DeepSpeed misreads the masters and
    states of a live engine with round_robin_gradients."""
    truth = snapshot(engine)
    truth["losses"] = []
    for step in (2, 3):
        truth["losses"].append(train(engine, step, width=5))
        if job["latest"] and step == 2:
            engine.save_checkpoint(".", tag="a later one")
    save_truth(truth)


def save(job):
    """What came of it: "saved", or the line that says why it is not converted."""
    engine = make_it(job, 0, seed=1)
    for step in (0, 1):
        train(engine, step, width=5)
    client_state = {"word": job["seed"], "odd": torch.ones(2, dtype=torch.uint16)}
    engine.save_checkpoint(".", tag=job["tag"], client_state=client_state)
    keep_truth(engine, job)
    if job["universal"] and dist.get_rank() == 0:
        try:
            universal.convert(job["tag"], "universal")
        except universal.CheckpointError as error:
            return f"not converted: {error}"
    return "saved"


def compared(job, truth):
    """The names of what must be as it was."""
    names = truth.keys() - {"losses"}
    if any(zero.get("round_robin_gradients") for zero in job["zero"]):
        names = {name for name in names if " " not in name.replace("s p", "")}
    if job["options"]:  # the optimizer is a new one
        names -= {"groups", "steps", "counters", "scheduler"}
        names = {
            name for name in names if " " not in name.replace("s p", "") or name.endswith(" fp32")
        }
    return names


def load(job):
    """What came of it: "right", what is wrong, or why it was refused."""
    engine = make_it(job, 1, seed=2)
    train(engine, 9, width=5)
    tag = (
        "universal"
        if job["universal"]
        else job["tag"]
        if job["latest"] or job["seed"] % 2
        else None
    )
    try:
        path, client_state = universal.load_checkpoint(engine, ".", tag, **job["options"])
    except universal.CheckpointError as error:
        return f"refused: {error}"
    truth, now = torch.load("truth.pt", weights_only=False), snapshot(engine)
    wrong = sorted(key for key in compared(job, truth) if not same(truth[key], now.get(key)))
    if path != str(Path("universal" if job["universal"] else job["tag"])):
        wrong.append(path)
    if client_state["word"] != job["seed"] or client_state["odd"].tolist() != [1, 1]:
        wrong.append("client state")
    if not job["options"]:
        gap = max(
            abs(train(engine, step, width=5) - loss)
            for step, loss in zip((2, 3), truth["losses"], strict=True)
        )
        exact = all(job[key][0] == job[key][1] for key in ("stages", "ranks", "zero"))
        wrong += [f"loss {gap}"] if gap > (0 if exact else 2e-2 if job["bf16"] else 1e-5) else []
    return f"WRONG: {wrong}" if wrong else "right"


def outcome(folder, phase, failed):
    """What came of a phase for one engine."""
    if failed:
        return f"FAILED: {failed.strip().splitlines()[-1]}"
    told = {path.read_text() for path in folder.glob(f"{phase}.*")} - {"saved"}
    told = told - {"right"} or told
    return (
        next(iter(told), "saved")
        if len(told) < 2
        else f"FAILED: not all ranks say the same: {told}"
    )


def play_all(seeds, folder):
    """{seed: what came of it}. All engines of a number of ranks are saved in one launch, and loaded
    in one."""
    found, left = {}, list(seeds)
    for side, phase in enumerate(("save", "load")):
        for ranks in (1, 2, 3, 4):
            names = [str(seed) for seed in left if plan(seed)["ranks"][side] == ranks]
            failed = run_all(folder, ranks, Path(__file__), phase, names=names)
            found |= {int(name): outcome(folder / name, phase, failed.get(name)) for name in names}
        left = [seed for seed in left if found[seed] == "saved"]
    return found


if __name__ == "__main__":
    begin()
    phase, *seeds = sys.argv[1:]

    def play(seed):
        told = {"save": save, "load": load}[phase](plan(int(seed)))
        Path(f"{phase}.{dist.get_rank()}").write_text(told)

    in_turn(seeds, play)
