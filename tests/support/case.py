"""A case of loading: a function that saves, on 2 ranks, and one that loads, on as many or others.
They assert what they see; the test is that they end.

    @case(saved(net=Bigger), stages=(1, 2))
    def frozen_layers(stage):
        restored(stage, net=Bigger)

A test module has CASES = cases_of(module, ...), and imports test_case(), of which
tests/load/conftest.py makes one test for each way to run a case."""

import contextlib
import functools
import io
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from deepspeed.runtime import torch_autocast
from deepspeed.utils import groups

import universal
from tests.support.commands import only_if
from tests.support.toy import (
    begin,
    differences,
    gathered,
    in_turn,
    is_rank_0,
    make,
    read_truth,
    save_truth,
    snapshot,
    train,
)
from universal import patches
from universal.load.overrides import overridden

PRINTED = io.StringIO()  # by this rank, in this case


class Case(NamedTuple):
    """save(stage), load(stage). stages: of ZeRO. quick_stages, quick_ranks: what of them `make
    test` runs; `make test-all` has every stage, on 2 ranks and on 3."""

    save: Callable
    load: Callable
    stages: tuple
    quick_stages: tuple
    quick_ranks: tuple


def train_and_save(
    stage, tag="t", steps=2, states=True, change=None, frozen=True, truth="truth.pt", **options
):
    """An engine with these options trains and saves itself. What it holds is in the file `truth`.

    states: as of snapshot(). change(engine): ahead of the save. frozen: whether frozen parameters
    are saved."""
    engine = make(stage, **options)
    for step in range(steps):
        train(engine, step)
    if change:
        change(engine)
    client_state = {"step": steps, "rank": dist.get_rank()}
    engine.save_checkpoint(".", tag, client_state, exclude_frozen_parameters=not frozen)
    save_truth(snapshot(engine, states), truth)
    return engine


def save_and_go_on(stage, steps=2, **options):
    """The next two losses are in losses.pt."""
    engine = train_and_save(stage, steps=steps, **options)
    save_truth([train(engine, step) for step in (steps, steps + 1)], "losses.pt")
    return engine


def saved(**options):
    return functools.partial(train_and_save, **options)


def saved_with_losses(**options):
    return functools.partial(save_and_go_on, **options)


def case(save=train_and_save, stages=(1, 2, 3), quick_stages=None, quick_ranks=(3,)):
    """The function below loads what save(stage) has saved.

    `make test` runs it at the last of its stages, on other ranks than saved it. Where ZeRO-1, which
    cuts in another way than ZeRO-3, or the same ranks matter, the case says so."""
    return lambda load: Case(save, load, stages, quick_stages or stages[-1:], quick_ranks)


def cases_of(*modules):
    """{name: Case} of all in these modules."""
    pairs = [pair for module in modules for pair in vars(module).items()]
    return {name: value for name, value in pairs if isinstance(value, Case)}


def runs_of(cases):
    """What is to be run: (name, stage, ranks)."""
    runs = []
    for name, case in cases.items():
        for stage in case.stages:
            for ranks in (2, 3):
                quick = stage in case.quick_stages and ranks in case.quick_ranks
                runs.append(only_if(quick, name, stage, ranks))
    return runs


def test_case(failures, name, stage, ranks):
    error = failures.get((name, stage, ranks))
    assert not error, error


def play(cases, phase, stage, *names):
    """What every rank does: the "save" or the "load" of these cases, each in a folder of its
    name."""

    def play_case(name):
        PRINTED.seek(0)
        PRINTED.truncate()
        # A pipeline leaves its mpu there, and autocast that it is on: the next engine takes them.
        clean = overridden(torch_autocast, TORCH_AUTOCAST_INITIALIZED=False)
        with contextlib.redirect_stdout(PRINTED), overridden(groups, mpu=None), clean:
            getattr(cases[name], phase)(stage)

    begin()
    torch.compiler.set_stance("force_eager")  # Muon's arithmetic would be compiled for minutes
    in_turn(names, play_case)


# --------------------------------------------------------------------------------------------------
# what cases do


def on_own_ranks():
    """Whether as many load as have saved."""
    return dist.get_world_size() == 2


def degrees():
    """Into how many parts ranks may cut a model: those that saved two, too."""
    return (1, 2) if on_own_ranks() else (1,)


def printed(*lines):
    """Whether rank 0 has printed these."""
    return not is_rank_0() or all(line in PRINTED.getvalue() for line in lines)


def load(engine, tag="t", **options):
    path, client_state = universal.load_checkpoint(engine, ".", tag, **options)
    assert path is None or Path(path).is_dir()
    return client_state


@contextlib.contextmanager
def installed():
    """universal.install(), in this block alone."""
    universal.install()
    try:
        yield
    finally:
        patches.undo(*(owner for owners in patches.PATCHES.values() for owner in owners))


def convert(tag="t", output="u", **options):
    """Rank 0 converts a checkpoint; then it is there for all."""
    if is_rank_0():
        universal.convert(tag, output, **options)
    dist.barrier()


def refused(engine, *parts, tag="t", folder=".", timeout=60, **options):
    """load_checkpoint() refuses, in one line that has these parts and is the same on all ranks."""
    line = None
    try:
        universal.load_checkpoint(engine, folder, tag, timeout=timeout, **options)
    except universal.CheckpointError as error:
        line = str(error)
    lines = gathered(line)
    assert line and "\n" not in line and set(lines) == {line}, (lines, parts)
    assert all(part in line for part in parts), (line, parts)


def resumed(stage, tag="t", told=None, **options):
    """An engine of another seed that has loaded. told: options of load_checkpoint()."""
    engine = make(stage, **{"seed": 5} | options)
    load(engine, tag, **told or {})
    return engine


def restored(stage, tag="t", states=True, **options):
    """An engine of another seed that has loaded, and holds what was saved."""
    engine = resumed(stage, tag, **options)
    check_restored(engine, states=states)
    return engine


def check_restored(engine, path="truth.pt", states=True, but=()):
    """It holds what was saved, but for what has these names."""
    lost = {*differences(read_truth(path), snapshot(engine, states))} - {*but}
    assert not lost, lost


def check_losses(engine, tolerance=1e-6, begin=2, exact=True):
    """They go on from this step as before the load. exact: to the bit, on the ranks that saved."""
    losses = enumerate(read_truth("losses.pt"), begin)
    gaps = [abs(train(engine, step) - loss) for step, loss in losses]
    assert max(gaps) <= (0 if exact and on_own_ranks() else tolerance), gaps


def check_weights_restored(engine):
    """The optimizer is a new one."""
    now = snapshot(engine, states=False)
    truth = {name: value for name, value in read_truth().items() if name in now}
    lost = {*differences(truth, now)} - {"groups", "steps", "counters"}
    assert not lost, lost


def check_same_state(module, path="truth.pt"):
    """The module's state_dict() is what save_truth(), or this rank, has put there."""
    truth = torch.load(path)
    state = module.state_dict()
    assert truth.keys() == state.keys() and not differences(truth, state)
