"""What one plain load runs: save() on 4 ranks, load() on 3; rank 0 writes what it has met."""

import json
import sys
from pathlib import Path

from torch import nn

import universal.resume
from tests.support.toy import adam, begin, is_rank_0, make, train

UNIVERSAL = str(Path(universal.__file__).parent)
INSIDE = ("<genexpr>", "<lambda>", "<listcomp>", "<dictcomp>", "<setcomp>")


class Plain(nn.Module):
    """Five parameters, and nothing else."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 7)
        self.b = nn.Linear(7, 5, bias=False)
        self.norm = nn.LayerNorm(7)

    def forward(self, x):
        return self.b(self.norm(self.a(x))).pow(2).mean()


def save(stage):
    begin()
    engine = make(stage, Plain)
    train(engine, 0)
    engine.save_checkpoint(".", "t")


def load(stage):
    begin()
    engine = make(stage, Plain, adam, seed=5)
    functions, types = set(), set()

    def see(frame, event, _):
        code = frame.f_code
        if event != "call":
            return
        if code.co_filename.startswith(UNIVERSAL) and code.co_name not in INSIDE:
            functions.add((code.co_filename.removeprefix(UNIVERSAL), code.co_qualname))
        # A NamedTuple is made by a lambda that Python has written.
        kind = frame.f_locals.get("_cls") or type(frame.f_locals.get("self"))
        if kind.__module__.startswith("universal."):
            types.add(kind.__name__)

    sys.setprofile(see)
    universal.load_checkpoint(engine, ".", "t")
    sys.setprofile(None)
    if is_rank_0():
        Path("met.json").write_text(json.dumps([sorted(functions), sorted(types)]))
