"""Cases of tests/load/test_routes.py: routes.py save CASE... on 2 ranks, then routes.py load CASE...
on as many or others, each case in a folder of its name. A case asserts what it sees; its test is
that it ends."""

import sys
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.utils import groups
from toy import Net, begin, in_turn, keep, make, train

import universal

CASES = {}


class Case(NamedTuple):
    """play(saving) is called to save, and then to load on each of these numbers of ranks."""

    play: Callable[[bool], None]
    ranks: tuple[int, ...]


def case(*ranks):
    def add(play):
        CASES[play.__name__] = Case(play, ranks)
        return play

    return add


def load(engine, tag="t", **options):
    return universal.load_checkpoint(engine, ".", tag, **options)[1]


def next_losses(engine):
    return [train(engine, step) for step in (3, 4, 5)]


def check_losses(engine, tag, tolerance):
    """The engine has loaded `tag`: its next losses are those of the run that saved it."""
    saved = torch.load(f"{tag}.losses")
    differences = [abs(a - b) for a, b in zip(next_losses(engine), saved, strict=True)]
    limit = 0 if dist.get_world_size() == 2 else tolerance
    assert max(differences) <= limit, differences


def goes_on(saving, tolerance, tag="t", **options):
    """After three steps the run goes on, and another one from the checkpoint: to the bit on the 2
    ranks that saved, within the tolerance on others."""
    engine = make(seed=1 if saving else 5, **options)
    if not saving:
        load(engine, tag)
        return check_losses(engine, tag, tolerance)
    for step in range(3):
        train(engine, step)
    engine.save_checkpoint(".", tag=tag)
    keep(next_losses(engine), f"{tag}.losses")


# --------------------------------------------------------------------------------------------------
# Muon


class Matrices(Net):
    """Muon takes the matrices, and Adam the rest."""

    def __init__(self):
        super().__init__()
        for parameter in self.parameters():
            parameter.use_muon = parameter.dim() == 2


MUON = {"net": Matrices, "optimizer": {"type": "Muon", "params": {"lr": 1e-2, "torch_adam": True}}}
BF16_OPTIMIZER = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}


@case(2, 3)
def muon_on_bf16_optimizer(saving):
    """It cuts the momentum like the masters; ZeRO-1 and 2 keep whole matrices."""
    torch.compiler.set_stance("force_eager")
    goes_on(saving, 1e-3, stage=1, **MUON, **BF16_OPTIMIZER)


@case(2, 3)
def muon_with_its_momentum_in_memory(saving):
    """ZeRO-3 then looks for it in a buffer of its own, which DeepSpeed's loader leaves at zero."""
    torch.compiler.set_stance("force_eager")
    zero = {"reduce_scatter": False, "save_muon_momentum_buffer_in_memory": True}
    goes_on(saving, 1e-6, stage=3, zero=zero, **MUON)


if __name__ == "__main__":
    begin()
    phase, *names = sys.argv[1:]

    def play(name):
        # A pipeline leaves its mpu there, and the next engine would take it.
        with mock.patch.object(groups, "mpu", None):
            CASES[name].play(phase == "save")

    in_turn(names, play)
