"""An error on one rank, at the first and at the last call of each function that a load runs: all
ranks must end with that error, soon."""

import contextlib
import functools
import os
import shutil
import sys
import time
from pathlib import Path

import deepspeed
import layouts
import models
import routes
import torch
import torch.distributed as dist
from torch import nn

import universal
from tests.support.files import flip
from tests.support.toy import (
    begin,
    differences,
    gathered,
    is_rank_0,
    make,
    torch_optimizer,
    train,
)
from universal import load_checkpoint
from universal.errors import RankFailed
from universal.files import torch_file

PACKAGE = str(Path(universal.__file__).parent)
LIBRARIES = [str(Path(library.__file__).parent) for library in (deepspeed, nn, torch.optim)]
TIMEOUT = 20  # seconds that a rank waits for another one
# A rank that fails before it is connected, or while it tells the others where it is, is silent.
MECHANISM = {
    "load_checkpoint",
    "process_group",
    "ProcessGroup.__init__",
    "ProcessGroup.end",
    "ProcessGroup.all_or_none",
    "ProcessGroup.leave",
    "ProcessGroup.meet",
    "ProcessGroup.places",
    "ProcessGroup.silent_rank",
    "ProcessGroup.all_gather",
    "ProcessGroup.gather",
    "ProcessGroup.all_to_all",
    "ProcessGroup.sent_by",
    "ProcessGroup.answered",
    "telling",
    "drop",
    "gloo_group",
    "network_card",
    "sparing",
    "arrive",
    # Before its own `finally`: no error arises there.
    "GatheredParameters.__exit__",
}
# What fails there costs a line, or the proof; or an optimizer gives no answer.
HARMLESS = ("proof.py", "comparison.py", "samples.py", "ask.py", "parameter.py")


class Planted(MemoryError):
    """On every rank it is raised as it is."""


def is_call(frame, event):
    """Whether a function of the package begins, or one of DeepSpeed or torch that it calls; not a
    generator that goes on."""
    code = frame.f_code
    function = code.co_qualname.split(".<locals>")[0]
    if event != "call" or frame.f_lasti > 0 or function in MECHANISM:
        return False
    file, caller = (f.f_code.co_filename if f else "" for f in (frame, frame.f_back))
    return file.startswith(PACKAGE) or (
        caller.startswith(PACKAGE) and file.startswith(tuple(LIBRARIES))
    )


def calls_of(work):
    """{code: number of calls} of what work() runs."""
    calls = {}

    def count(frame, event, _):
        if is_call(frame, event):
            calls[frame.f_code] = calls.get(frame.f_code, 0) + 1

    profiled(count, work)
    return calls


def profiled(hook, work):
    sys.setprofile(hook)
    try:
        work()
    finally:
        sys.setprofile(None)


def planted(code, number, work):
    """work(), where this call of a function fails."""
    left = number

    def plant(frame, event, _):
        nonlocal left
        if frame.f_code is code and is_call(frame, event):
            left -= 1
            if left == 0:
                raise Planted(f"planted in {code.co_qualname}")

    profiled(plant, work)


def outcome_of(work):
    """What becomes of it, in words; and in how many seconds."""
    began = time.monotonic()
    words = "loaded"
    try:
        work()
    except (MemoryError, RankFailed, universal.CheckpointError) as error:
        words = f"{type(error).__name__}: {error}"
    return words, time.monotonic() - began


def fail_everywhere(load, rank, every=1, harmless=HARMLESS):
    """Plant an error on this rank, in every so many-th function. Yields what went wrong.

    harmless: beginnings of names of functions whose error may not count."""
    plants = []
    if dist.get_rank() == rank:
        calls = calls_of(load)
        plants = [(code, number) for code in calls for number in sorted({1, calls[code]})]
    else:
        load()
    for i in range(0, gathered(len(plants))[rank], every):
        name = None
        work = load
        if plants:
            code, number = plants[i]
            name = f"{Path(code.co_filename).name} {code.co_qualname} {number}"
            work = functools.partial(planted, code, number, load)
        name = gathered(name)[rank]
        outcomes = gathered(outcome_of(work))
        words = {word for word, _ in outcomes}
        hidden = name.startswith(harmless) and words == {"loaded"}
        alike = len(words) == 1 and ("planted" in str(words) or hidden)
        if not alike or max(seconds for _, seconds in outcomes) > TIMEOUT / 4:
            yield f"{name} on rank {rank}: {outcomes}"


# --------------------------------------------------------------------------------------------------
# routes: each saves, and returns an engine of another seed that loads it


def save(engine, tag="t"):
    train(engine, 0)
    engine.save_checkpoint(".", tag=tag)
    return engine


def zero(stage):
    """By reshard.py; without ZeRO by DeepSpeed's own loader."""
    save(make(stage))
    return make(stage, seed=5)


def own_ranks():
    save(routes.as_if(make(2), "ZenFlow"))
    return routes.as_if(make(2, seed=5), "ZenFlow")


def universal_folder():
    save(make(2))
    if is_rank_0():
        universal.convert("t", "universal")
        shutil.rmtree("t")
    dist.barrier()
    return make(2, seed=5)


def passed_over():
    """The newest checkpoint is damaged, and the one before is taken."""
    save(save(make(3)), tag="damaged")
    if is_rank_0():
        flip(next(Path("damaged").glob("*zero_pp_rank_1_*optim_states.pt")))
    dist.barrier()
    return make(3, seed=5)


def tensor_parallel():
    save(layouts.halves(1, 2))
    return layouts.halves(1, 2, seed=5)


def pipeline():
    routes.train_and_save_pipeline(routes.pipeline(2, routes.SCALING))
    return routes.pipeline(2, routes.SCALING, seed=5)


def other_experts():
    """Those that install() leaves to DeepSpeed."""
    save(make(0, models.Experts, models.groups_of_experts))
    return make(0, models.Experts, models.groups_of_experts, seed=5)


ROUTES = {f"ZeRO-{stage}": functools.partial(zero, stage) for stage in (1, 2, 3)}
ROUTES |= {"without ZeRO": functools.partial(zero, 0)}
OTHERS = (own_ranks, universal_folder, passed_over, tensor_parallel, pipeline, other_experts)
ROUTES |= {route.__name__.replace("_", " "): route for route in OTHERS}


def main(route, every=1):
    """Writes what goes wrong to the file `failures`."""
    begin()
    torch.compiler.set_stance("force_eager")
    engine = ROUTES[route]()

    def load():
        torch_file.check_memo.cache_clear()
        load_checkpoint(engine, ".", missing_ok=True, timeout=TIMEOUT)

    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        load()  # it imports, and fills caches
        load()  # a padding of masters keeps its values in the first one alone
        truth = held_by(engine)
        harmless = dict.fromkeys((1, 0), HARMLESS)
        if route == "passed over":
            # An error may be late: the other rank has found the damage before. As rank 0's own
            # damage goes before rank 1's error, that is where both compare checksums.
            harmless = {1: (*HARMLESS, "sources.py"), 0: ("",)}
        found = [fail_everywhere(load, rank, every, names) for rank, names in harmless.items()]
        failures = [text for texts in found for text in texts]
        load()
    assert not differences(truth, held_by(engine))
    if is_rank_0():
        Path("failures").write_text("\n".join(failures))
    dist.barrier()


def held_by(engine):
    """This rank's weights, masters and states of the optimizer."""
    tensors = dict(engine.module.named_parameters()) | dict(engine.module.named_buffers())
    for i, (master, state) in enumerate(torch_optimizer(engine).state.items()):
        tensors |= {f"{i} {key}": torch.as_tensor(state[key]) for key in state} | {i: master}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
