"""What ZeRO makes of the optimizers of these packages, and how they resume: `make optimizers`.

    python -m measure.optimizers --output out/optimizers.txt [parts of names...]

A model of 272 weights trains for 7 steps on 2 and on 3 ranks, and in PyTorch alone; the 2 save at
step 4, and 2 and 3 ranks resume. A number is the largest difference of two runs' losses: 2e-07 is
rounding. Each class has its default settings; what needs others is not taken.
"""

import argparse
import contextlib
import importlib
import inspect
import io
import json
import re
import warnings
from pathlib import Path

import torch
from torch import nn

import universal
from measure.engines import begin
from tests.support import ROOT
from tests.support.helpers import run_all
from tests.support.ranks import deepspeed
from tests.support.toy import in_turn, is_rank_0, train
from universal.load.ask import ask

WORK = ROOT / "runs" / "optimizers"
PACKAGES = (
    "torch.optim",
    "pytorch_optimizer",
    "schedulefree",
    "prodigyopt",
    "dadaptation",
    "optimi",
    "heavyball",
    "bitsandbytes.optim",
    "lion_pytorch",
    "transformers.optimization",
)
SAVED, STEPS = 4, 7
ROUNDING = 3e-7
CONFIG = {
    "train_batch_size": 12,
    "train_micro_batch_size_per_gpu": 2,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


def classes():
    """Returns {name: class} of all optimizers in the packages that are installed."""
    kinds = {}
    for package in PACKAGES:
        with contextlib.suppress(ImportError):
            for name, kind in sorted(vars(importlib.import_module(package)).items()):
                is_kind = isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
                if is_kind and kind.step is not torch.optim.Optimizer.step:
                    kinds[f"{package.split('.')[0]}.{name}"] = kind
    return kinds


class Net(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.emb = nn.Embedding(11, 7)
        self.norm = nn.LayerNorm(7)
        self.a = nn.Linear(7, 13)
        self.b = nn.Linear(13, 5)

    def forward(self, number):
        x = torch.randint(0, 11, (2, 3), generator=torch.Generator().manual_seed(number))
        out = self.b(torch.tanh(self.a(self.norm(self.emb(x).mean(1)))))
        return nn.functional.cross_entropy(out, x.sum(1) % 5)


def make(name, seed=1):
    """A model, and its optimizer; its rate is 0.01 unless the class has a larger one."""
    model = Net(seed)
    kind = classes()[name]
    rate = inspect.signature(kind).parameters.get("lr")
    is_small = rate and isinstance(rate.default, float) and rate.default < 5e-3
    required = rate and rate.default is inspect.Parameter.empty
    optimizer = kind(model.parameters(), **({"lr": 0.01} if is_small or required else {}))
    with contextlib.suppress(AttributeError):
        optimizer.train()
    return model, optimizer


def engine_of(name, stage, seed=1):
    model, optimizer = make(name, seed)
    config = CONFIG | {"zero_optimization": {"stage": stage}}
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def losses(engine, first, last):
    return [train(engine, step, forward=lambda of, n: of(n)) for step in range(first, last)]


def alone(name):
    """The losses in PyTorch alone."""
    model, optimizer = make(name)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        of_step = [model(100 * step + i) / 6 for i in range(6)]
        sum(of_step).backward()
        optimizer.step()
        found.append(sum(of_step).item())
    return found


def play(stage, ranks, *names):
    """What every rank does with these optimizers."""
    begin()
    universal.install()

    def notes(name):
        known = {}
        folder = f"zero-{stage}"
        try:
            engine = engine_of(name, stage)
            known["losses"] = losses(engine, 0, SAVED)
            if ranks == 2:
                engine.save_checkpoint(folder, "t")
            known["losses"] += losses(engine, SAVED, STEPS)
            known["asked"] = getattr(ask(engine.optimizer.optimizer, []), "gap", None)
            engine = engine_of(name, stage, seed=5)
            with contextlib.redirect_stdout(io.StringIO()):
                engine.load_checkpoint(folder, "t")
                known["resumed"] = losses(engine, SAVED, STEPS)
            if ranks == 2:
                known["alone"] = alone(name)
        except BaseException as error:
            known["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
        if is_rank_0():
            Path(f"{stage}.{ranks}.json").write_text(json.dumps(known))
        if "error" in known:
            raise SystemExit(1)

    in_turn(names, notes)


def gap(known, key, other):
    """The largest difference of two runs, in words; what they lack."""
    if key not in known or not other:
        return "-"
    pairs = zip(known[key][::-1], other[::-1], strict=False)
    worst = max((abs(a - b) if a == a and b == b else float("inf")) for a, b in pairs)
    return "same" if worst <= ROUNDING else f"{worst:.0e}"


def outcome(known, key, other):
    """The gap of a resume, in words; or why there is none."""
    error = known.get("error", "")
    if key in known or not error:
        return gap(known, key, other)
    refusal = re.match(r"CheckpointError: (.*?)(;|$)", error)
    return f"refused: {refusal[1]}"[:70] if refusal else error[:70]


def row(name, stage):
    two, three = (
        json.loads(path.read_text()) if path.exists() else {"error": "no answer"}
        for path in (WORK / name / f"{stage}.{ranks}.json" for ranks in (2, 3))
    )
    start = f"{name:<34}{stage:>2}  "
    if len(two.get("losses", ())) < STEPS:
        return f"{start}not taken: {two['error'][:90]}"
    asked = two.get("asked")
    cells = (
        gap(three, "losses", two["losses"]),
        "-" if asked is None else "no" if asked <= 1e-5 else f"{asked:.0e}",
        gap(two, "alone", two["losses"]),
        outcome(two, "resumed", two["losses"]),
    )
    on_3 = outcome(three, "resumed", three.get("losses"))
    return start + "".join(f"{cell:<10}" for cell in cells) + on_3


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--stages", type=int, nargs="*", default=[1, 3])
    parser.add_argument("parts", nargs="*", help="of names; all if there are none")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    names = [name for name in classes() if any(part in name for part in args.parts or [""])]
    WORK.mkdir(parents=True, exist_ok=True)
    lines = [f"{'optimizer':<34}ST  3 RANKS   CUT       PYTORCH   RESUMED 2 RESUMED ON 3"]
    for stage in args.stages:
        for ranks in (2, 3):
            run_all(WORK, ranks, play, stage, ranks, names=names, grace=2)
        lines += [row(name, stage) for name in names]
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text("\n".join(lines) + "\n")
    print(args.output.read_text(), end="")


if __name__ == "__main__":
    main()
