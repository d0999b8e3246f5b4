"""What ZeRO makes of the optimizers of these packages, and how they resume: `make optimizers`.

    python -m measure.optimizers --output out/optimizers.txt [parts of names...]

A model of 272 weights trains for 7 steps on 2 and on 3 ranks, and in PyTorch alone; the 2 save at
step 4, and 2 and 3 ranks resume. Each class has its default settings; what needs others is not
taken. A row, of a class and a ZeRO stage, has

    3 RANKS       3 ranks against 2, not interrupted
    CUT           how far an update follows from the cut, as a load asks the optimizer; -: no answer
    PYTORCH       2 ranks against PyTorch alone
    RESUMED ON 2  against the 2 ranks that were not interrupted
    RESUMED ON 3  against the 3 ranks that were not interrupted

Of losses, these are the largest differences; "same" is at most 3e-07, and inf is a loss that is no
number. Rows that the output has are not made again. What draws random numbers (Kron, PSGD, Magma),
or takes norms of padding at ZeRO-3, is not the same on the 2 that saved either, with DeepSpeed
alone as with a load of ours.
"""

import contextlib
import functools
import importlib
import inspect
import io
import json
import re
import shutil
import warnings
from pathlib import Path

import torch
from torch import nn

import universal
from measure import options
from measure.engines import begin
from tests.support import ROOT
from tests.support.ranks import last_error, launch
from tests.support.toy import is_rank_0, make, train
from universal.load.ask import NEGLIGIBLE, ask

WORK = ROOT / "runs" / "optimizers"
PACKAGES = (
    "torch.optim",
    "transformers.optimization",
    "lion_pytorch",
    "schedulefree",
    "prodigyopt",
    "dadaptation",
    "optimi",
    "bitsandbytes.optim",
    "pytorch_optimizer",
    "heavyball",
)
WIDTH = 44  # of a name
SAVED, STEPS = 4, 7
ROUNDING = 3e-7
LIMIT = 400  # seconds, of a launch


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
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(11, 7)
        self.norm = nn.LayerNorm(7)
        self.a = nn.Linear(7, 13)
        self.b = nn.Linear(13, 5)

    def forward(self, number):
        x = torch.randint(0, 11, (2, 3), generator=torch.Generator().manual_seed(number))
        out = self.b(torch.tanh(self.a(self.norm(self.emb(x).mean(1)))))
        return nn.functional.cross_entropy(out, x.sum(1) % 5)


def optimizer_of(name, parameters):
    """Its rate is 0.01 unless the class has a larger one. 8-bit ones would have 32 bits of so few
    weights."""
    kind = classes()[name]
    settings = inspect.signature(kind).parameters
    rate = settings.get("lr")
    is_small = rate and isinstance(rate.default, float) and rate.default < 5e-3
    required = rate and rate.default is inspect.Parameter.empty
    chosen = {"lr": 0.01} if is_small or required else {}
    if "min_8bit_size" in settings:
        chosen["min_8bit_size"] = 16
    return kind(parameters, **chosen)


def engine_of(name, stage, seed=1):
    engine = make(stage, Net, functools.partial(optimizer_of, name), seed, micro=2)
    begin_training(engine.optimizer.optimizer)
    return engine


def begin_training(optimizer):
    """Schedule-free ones want to be told."""
    if hasattr(optimizer, "train"):
        optimizer.train()


def losses(engine, first, last):
    return [train(engine, step, forward=lambda of, n: of(n)) for step in range(first, last)]


def alone(name):
    """The losses in PyTorch alone."""
    torch.manual_seed(1)
    model = Net()
    optimizer = optimizer_of(name, model.parameters())
    begin_training(optimizer)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        of_step = [model(100 * step + i) / 6 for i in range(6)]
        sum(of_step).backward()
        optimizer.step()
        found.append(sum(of_step).item())
    return found


def play(stage, ranks, name):
    """What every rank does with an optimizer."""
    begin()
    torch.compiler.set_stance("force_eager")
    universal.install()
    known = {}
    try:
        engine = engine_of(name, stage)
        known["losses"] = losses(engine, 0, SAVED)
        if ranks == 2:
            engine.save_checkpoint(".", "t")
            known["alone"] = alone(name)
        known["losses"] += losses(engine, SAVED, STEPS)
        known["asked"] = getattr(ask(engine.optimizer.optimizer, []), "gap", None)
        engine = engine_of(name, stage, seed=5)
        with contextlib.redirect_stdout(io.StringIO()):
            engine.load_checkpoint(".", "t")
            known["resumed"] = losses(engine, SAVED, STEPS)
    finally:
        if is_rank_0():
            Path(f"{ranks}.json").write_text(json.dumps(known))


def gap(known, key, other):
    """The largest difference of two runs, in words; what they lack."""
    if key not in known or not other:
        return "-"
    pairs = zip(known[key][::-1], other[::-1], strict=False)
    worst = max((abs(a - b) if a == a and b == b else float("inf")) for a, b in pairs)
    return "same" if worst <= ROUNDING else f"{worst:.0e}"


def outcome(known, other):
    """The gap of a resume, in words; or why there is none."""
    error = known.get("error")
    if "resumed" in known or not error:
        return gap(known, "resumed", other)
    refusal = re.search(r"CheckpointError: (.*?)(;|$)", error)
    return f"refused: {refusal[1]}"[:70] if refusal else error[:70]


def tried(name, stage, ranks):
    """What so many ranks have written, and their error."""
    folder = WORK / name / f"zero-{stage}"
    result = launch(folder, ranks, play, stage, ranks, name, limit=LIMIT, grace=2)
    path = folder / f"{ranks}.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    return known | ({"error": last_error(result.err)} if result.code else {})


def start_of_row(name, stage):
    return f"{name:<{WIDTH}}{stage:>2}  "


def row(name, stage):
    folder = WORK / name / f"zero-{stage}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    two = tried(name, stage, 2)
    start = start_of_row(name, stage)
    if len(two.get("losses", ())) < STEPS:
        return f"{start}not taken: {two['error'][:90]}"
    three = tried(name, stage, 3)
    asked = two.get("asked")
    cells = (
        gap(three, "losses", two["losses"]),
        "-" if asked is None else "no" if asked <= NEGLIGIBLE else f"{asked:.0e}",
        gap(two, "alone", two["losses"]),
        outcome(two, two["losses"]),
    )
    on_3 = outcome(three, three.get("losses"))
    return start + "".join(f"{cell:<9} " for cell in cells) + on_3


def main():
    parser = options.parser(__doc__, "out/optimizers.txt")
    parser.add_argument("--stages", type=int, nargs="*", default=[1, 3])
    parser.add_argument("parts", nargs="*", help="of names; all if there are none")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    names = [name for name in classes() if any(part in name for part in args.parts or [""])]
    head = f"{'optimizer':<{WIDTH}}ST  3 RANKS   CUT       PYTORCH   RESUMED ON 2, AND ON 3"
    lines = args.output.read_text().splitlines() if args.output.exists() else []
    with args.output.open("a") as file:
        if not lines:
            print(head, file=file)
        for name in names:
            for stage in args.stages:
                if not any(line.startswith(start_of_row(name, stage)) for line in lines):
                    print(row(name, stage), file=file, flush=True)
    print(args.output.read_text(), end="")


if __name__ == "__main__":
    main()
