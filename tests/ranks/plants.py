"""An error on one rank, at the first and at the last call of each function that a load runs: all
ranks must end with that error, soon."""

import sys
import time
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import universal
from tests.support.toy import begin, differences, make, read_truth, save_truth, snapshot, train
from universal import load_checkpoint
from universal.errors import RankFailed

PACKAGE = str(Path(universal.__file__).parent)
PLACES = (PACKAGE, *(str(Path(library.__file__).parent) for library in (deepspeed, nn, torch.optim)))
TIMEOUT = 20  # seconds that a rank waits for another one
# A rank that fails before it meets the others, or while it tells them of its error, is silent.
MECHANISM = {
    "load_checkpoint",
    "process_group",
    "ProcessGroup.__init__",
    "ProcessGroup.end",
    "end_process_group",
    "first_error",
    "shared_error",
    "gloo_group",
    "meet_at",
    "store_of",
}


class Planted(MemoryError):
    """On every rank it is raised as it is."""


def is_call(frame, event):
    """Whether a function of the package begins, or one of DeepSpeed or torch that it calls; not a
    generator that goes on."""
    code = frame.f_code
    if event != "call" or frame.f_lasti > 0 or code.co_qualname in MECHANISM:
        return False
    files = [f.f_code.co_filename for f in (frame, frame.f_back) if f]
    return files[0].startswith(PLACES) and any(file.startswith(PACKAGE) for file in files)


def calls_of(work):
    """{code: number of calls} of what work() runs."""
    calls = {}

    def count(frame, event, _):
        if is_call(frame, event):
            calls[frame.f_code] = calls.get(frame.f_code, 0) + 1

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def planted(code, number, work):
    """work(), where this call of a function fails."""
    left = number

    def plant(frame, event, _):
        nonlocal left
        if frame.f_code is code and is_call(frame, event):
            left -= 1
            if left == 0:
                raise Planted(f"planted in {code.co_qualname}")

    sys.setprofile(plant)
    try:
        work()
    finally:
        sys.setprofile(None)


def outcome_of(work):
    """What becomes of it, in words; and in how many seconds."""
    began = time.monotonic()
    words = "loaded"
    try:
        work()
    except (MemoryError, RankFailed, universal.CheckpointError) as error:
        words = f"{type(error).__name__}: {error}"
    return words, time.monotonic() - began


def gathered(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def fail_everywhere(load, rank, every=1):
    """Plant an error on this rank, in every so many-th function. Yields what went wrong."""
    plants = []
    if dist.get_rank() == rank:
        calls = calls_of(load)
        plants = [(code, n) for code in calls for n in sorted({1, calls[code]})]
    else:
        load()
    for i in range(0, gathered(len(plants))[rank], every):
        name = None
        work = load
        if plants:
            code, number = plants[i]
            name = f"{Path(code.co_filename).name} {code.co_qualname} {number}"
            work = lambda: planted(code, number, load)  # noqa: B023
        name = gathered(name)[rank]
        print(name, file=sys.stderr, flush=True)
        outcomes = gathered(outcome_of(work))
        words = {word for word, _ in outcomes}
        seconds = max(seconds for _, seconds in outcomes)
        if len(words) > 1 or "planted" not in str(words) or seconds > TIMEOUT / 4:
            yield f"{name} on rank {rank}: {outcomes}"


def main(stage, every=1):
    begin()
    engine = make(stage)
    train(engine, 0)
    engine.save_checkpoint(".", tag="t")
    save_truth(snapshot(engine))
    engine = make(stage, seed=5)

    def load():
        load_checkpoint(engine, ".", "t", timeout=TIMEOUT)

    load()  # it imports, and fills caches
    failures = [text for rank in (1, 0) for text in fail_everywhere(load, rank, every)]
    load()
    lost = differences(read_truth(), snapshot(engine))
    if dist.get_rank() == 0:
        Path("failures").write_text("\n".join([*failures, *lost]))
    dist.barrier()
