"""The engines of random_engines.py, saved after two steps and trained for ten more, then loaded and
trained again: proof_random.py save SEED..., then proof_random.py load SEED... The file `said.0` of
a seed gets the lines about steps that were trained before."""

import contextlib
import io
import sys
from pathlib import Path

import torch.distributed as dist
from helpers import run_all
from random_engines import make_it, plan
from toy import begin, in_turn, train

import universal

SAVED = 2


def steps(engine, numbers):
    for step in numbers:
        train(engine, step, width=5)


def save(job):
    engine = make_it(job, 0, seed=1)
    steps(engine, range(SAVED))
    engine.save_checkpoint(".", tag="t")
    steps(engine, range(SAVED, SAVED + 10))
    if dist.get_rank() == 0 and job["universal"]:
        with contextlib.suppress(universal.CheckpointError):  # some optimizers are not converted
            universal.convert("t", "t_universal")


def load(job):
    engine = make_it(job, 1, seed=2)
    converted = Path("t_universal").exists()
    dist.barrier()
    engine.load_checkpoint(".", tag="t_universal" if converted else "t")
    steps(engine, range(SAVED, SAVED + 10))


def play(phase, seed):
    with contextlib.redirect_stdout(io.StringIO()) as said:
        {"save": save, "load": load}[phase](plan(int(seed)))
    lines = [line for line in said.getvalue().splitlines() if "trained before" in line]
    Path(f"said.{dist.get_rank()}").write_text("\n".join(lines))


def play_all(seeds, folder):
    """{seed: what rank 0 says of the steps that are trained again}."""
    for side, phase in enumerate(("save", "load")):
        for ranks in (1, 2, 3, 4):
            names = [str(seed) for seed in seeds if plan(seed)["ranks"][side] == ranks]
            assert not run_all(folder, ranks, Path(__file__), phase, names=names)
    return {seed: Path(folder, str(seed), "said.0").read_text() for seed in seeds}


if __name__ == "__main__":
    begin()
    universal.install()
    phase, *seeds = sys.argv[1:]
    in_turn(seeds, lambda seed: play(phase, seed))
