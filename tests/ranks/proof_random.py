"""The engines of random_engines.py, saved after two steps and trained for ten more, then loaded and
trained again: lines_of(seeds, folder)."""

import contextlib
import io
import re
from pathlib import Path

import torch.distributed as dist
from random_engines import WIDTH, engine_of, plan

import universal
from tests.support.helpers import run_all
from tests.support.toy import begin, in_turn, train

SAVED = 2


def train_ten_steps(engine):
    for step in range(SAVED, SAVED + 10):
        train(engine, step, width=WIDTH)


def save(plan):
    engine = engine_of(plan, plan.saved, seed=1)
    for step in range(SAVED):
        train(engine, step, width=WIDTH)
    engine.save_checkpoint(".", tag="t")
    train_ten_steps(engine)
    if plan.converted and dist.get_rank() == 0:
        with contextlib.suppress(universal.CheckpointError):  # some optimizers are not converted
            universal.convert("t", "t_universal")


def load(plan):
    engine = engine_of(plan, plan.loaded, seed=2)
    converted = Path("t_universal").exists()
    engine.load_checkpoint(".", tag="t_universal" if converted else "t")
    train_ten_steps(engine)


def play(phase, *seeds):
    """What every rank does."""

    def play_engine(seed):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            {"save": save, "load": load}[phase](plan(int(seed)))
        lines = re.findall("^.*trained before.*$", output.getvalue(), re.M)
        Path(f"lines.{dist.get_rank()}").write_text("\n".join(lines))

    begin()
    universal.install()
    in_turn(seeds, play_engine)


def lines_of(seeds, folder):
    """{seed: what rank 0 says of the steps that are trained again}."""
    plans = {str(seed): plan(seed) for seed in seeds}
    for phase, side in (("save", "saved"), ("load", "loaded")):
        for ranks in (1, 2, 3, 4):
            names = [name for name in plans if getattr(plans[name], side).ranks == ranks]
            assert not run_all(folder, ranks, play, phase, names=names)
    return {int(name): Path(folder, name, "lines.0").read_text() for name in plans}
