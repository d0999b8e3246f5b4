"""Random histories of a training job, which dies in the middle of its saves and goes on as another
one: play(seed, folder).

Each of its lives has ranks and a ZeRO stage of its own, and names of checkpoints come again at the
same stage. Its script knows nothing of careful saving. In its fatal save each rank has a place of
its own, drawn by the seed, where it dies. So a seed's folders are the same in every run. Between
two lives someone may convert.

What must be loaded. A save that came back on all ranks is a promise.

- While nothing was written over the last promise and `latest` names it: that one, or a save that
  was begun after it.
- A `latest` that the dying rank 0 wrote before the others had their shards hides in which order
  tags were written. Then: any step not before that of the last promise nothing was written over.
- Where something was written over every promise, nothing may be whole: any save, or a start from
  the beginning, or one CheckpointError of one line, the same on all ranks. It is allowed nowhere
  else.
- What is loaded has the weights, masters and moments of its save, to the last bit. But when a save
  dies over another one of its name and step, nobody can tell whose shards are there, and a mixture
  is as good as either.
- The steps that are trained again have the losses of before (proof.py says it).
"""

import contextlib
import hashlib
import io
import itertools
import json
import os
import random
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import deepspeed
import torch
import torch.distributed as dist

import universal
from tests.support.commands import kill
from tests.support.ranks import launch
from tests.support.toy import begin, falling, make, snapshot, train

LIVES = 6
STEPS = 11  # of a life that does not come to its fatal save
LAST = 50  # the last step of any life


# --------------------------------------------------------------------------------------------------
# 1. a life


class Place(NamedTuple):
    """Where a rank dies in the fatal save: after so many files, and this part of the next one."""

    files: int
    part: float


class Plan(NamedTuple):
    """It trains so many steps, and saves every few under a name. saves: how many there were before.
    fatal: the number of the save in which it dies, each rank at its place."""

    ranks: int
    stage: int
    steps: int
    every: int
    name: str
    saves: int
    fatal: int
    places: dict[int, Place]


def digest(engine):
    """Of the weights, buffers, masters and moments of all ranks."""
    tensors = filter(torch.is_tensor, snapshot(engine).values())
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()


def an_hour_passes(folder):
    """Between two saves, and before anybody touches their folder: the loader goes by the times of
    files."""
    for path in Path(folder).rglob("*"):
        os.utime(path, (0, path.stat().st_mtime - 3600))


def dies_at(place):
    """From now on this rank comes to its place, and no further."""
    torch_save = torch.save
    numbers = itertools.count()

    def write(path, data):
        is_last = next(numbers) == place.files
        if place.part or not is_last:
            Path(path).write_bytes(data[: int(place.part * len(data))] if is_last else data)
        if is_last:
            kill()

    def save(thing, path, **options):
        memory = io.BytesIO()
        torch_save(thing, memory, **options)
        write(path, memory.getvalue())

    @contextlib.contextmanager
    def open_latest(path, mode):
        yield SimpleNamespace(write=lambda text: write(path, text.encode()))

    torch.save = save
    deepspeed.runtime.engine.open = open_latest


def live(plan, folder, ledger_path):
    """What every rank does. The ledger says what has happened, an object of JSON a line; what is
    printed is between them."""
    begin()
    rank = dist.get_rank()
    ledger = sys.stdout = open(ledger_path, "a", buffering=1)

    def note(**event):
        if rank == 0 or "refused" in event:
            ledger.write(json.dumps(event) + "\n")

    universal.install()
    engine = make(plan.stage, clip=1.0, scheduler=falling)
    try:
        path, state = engine.load_checkpoint(folder)
    except universal.CheckpointError as error:
        note(refused=str(error))
        kill()
    start = engine.global_steps
    tag = path and os.path.relpath(path, folder)
    note(loaded=tag, save=path and state["save"], step=start, digest=digest(engine))
    saves = itertools.count(plan.saves)
    for step in range(start + 1, min(start + plan.steps, LAST) + 1):
        train(engine, step)
        if step % plan.every == 0:
            tag = plan.name.format(step)
            save = next(saves)
            note(begun=save, tag=tag, step=step, digest=digest(engine))
            if rank == 0:
                an_hour_passes(folder)
            if save == plan.fatal and rank in plan.places:
                dies_at(plan.places[rank])
            engine.save_checkpoint(folder, tag=tag, client_state={"save": save})
            dist.barrier()
            note(back=save, tag=tag)
    kill()


def play_life(above, folder, plan):
    """(objects of the ledger, lines that were printed). Raises AssertionError where the life hangs,
    or ends by anything but the death that was planned, or where a step that is trained again
    differs."""
    ledger = Path(above, "ledger")
    ledger.write_text("")
    result = launch(above, plan.ranks, live, plan, str(folder), ledger, limit=300, grace=20)
    codes = result.codes.values()
    is_killed = "time limit" not in codes and -signal.SIGKILL in codes
    assert is_killed, f"{codes} {result.errors[-500:]}"
    lines = ledger.read_text().splitlines()
    events = [json.loads(line) for line in lines if line.startswith("{")]
    said = [line for line in lines if not line.startswith("{")]
    proofs = [line for line in said if "trained before" in line]
    assert all("differs by at most" in line for line in proofs), proofs
    return events, said


# --------------------------------------------------------------------------------------------------
# 2. what is in the folder, and what must be loaded


@dataclass
class Save:
    """An attempt to save. whole: is known to be."""

    step: int
    digest: str
    whole: bool = False


class Folder:
    """saves: all attempts, in their order. attempts: {tag: numbers of those under it}, as files of
    an earlier one may be there, too. promises: tags, each with the number of its save."""

    def __init__(self, place):
        self.saves = []
        self.empty(place)

    def empty(self, place):
        self.place = place
        self.attempts = {}
        self.promises = []

    def whole(self, tag):
        """The last attempt under a tag, if it is known to be whole; else None."""
        attempt = self.attempts[tag][-1]
        return attempt if self.saves[attempt].whole else None

    def expected(self):
        """The attempts that may be loaded, by the rules above. Empty: nothing may be whole."""
        whole = {self.whole(tag) for tag in self.attempts}
        kept = [(tag, attempt) for tag, attempt in self.promises if attempt in whole]
        if not kept:
            return set()
        tag, attempt = kept[-1]
        latest = Path(self.place, "latest")
        if latest.exists() and latest.read_text() != tag:
            step = self.saves[attempt].step
            return {number for number, save in enumerate(self.saves) if save.step >= step}
        return {*range(attempt, len(self.saves))}

    def check_loaded(self, expected, tag, number, step, digest):
        """Raises AssertionError for what should not be loaded."""
        wanted = f"one of {sorted(expected)} was expected"
        if tag is None:
            assert not expected, f"nothing was loaded, and {wanted}"
            return
        assert not expected or number in expected, f"{number} was loaded, and {wanted}"
        save = self.saves[number]
        attempts = self.attempts[tag]
        source = f"{number} was loaded from {tag}"
        assert number in attempts and step == save.step, f"{source}, at step {step}"
        mixed = [n for n in attempts if self.saves[n].step == step]
        if self.whole(tag) is None and len(mixed) > 1:
            save.digest = digest
        assert digest == save.digest, f"{source}, with other weights, masters or moments"
        save.whole = True
        attempts.remove(number)
        attempts.append(number)

    def follow(self, events, expected):
        """Go through the ledger of a life."""
        for event in events:
            match event:
                case {"loaded": tag, "save": number, "step": step, "digest": digest}:
                    self.check_loaded(expected, tag, number, step, digest)
                case {"begun": number, "tag": tag, "step": step, "digest": digest}:
                    self.saves.append(Save(step, digest))
                    self.attempts.setdefault(tag, []).append(number)
                case {"back": number, "tag": tag}:
                    self.saves[number].whole = True
                    self.promises.append((tag, number))

    def convert(self):
        """The newest, beside it, if nothing was written over it."""
        tag, attempt = self.promises[-1] if self.promises else ("", None)
        if tag and self.whole(tag) == attempt:
            universal.convert(self.place / tag, self.place / f"{tag}_universal")
            self.attempts[f"{tag}_universal"] = [attempt]


# --------------------------------------------------------------------------------------------------
# 3. a history


def plan_life(draw, before, saves):
    """before: the plan of the life before, if there was one. saves: how many there were."""
    every = draw.choice([2, 3])
    name = draw.choice(["checkpoint-{}", "checkpoint-{}", "last"])
    if before and draw.random() < 0.8:
        every = before.every
        name = before.name
    ranks = draw.randint(1, 4)
    stage = draw.choice([1, 2, 3])
    places = {}
    for rank in draw.sample(range(ranks), draw.randint(1, ranks)):
        files = 1 + (rank == 0 or stage == 3) + (rank == 0)  # model states, shard, `latest`
        places[rank] = Place(draw.randrange(files), draw.choice([0, 1e-9, 0.5, 0.95, 1]))
    # Two saves of other stages under one name are refused.
    name = f"{name.partition('.')[0]}.{stage}"
    return Plan(ranks, stage, STEPS, every, name, saves, saves + draw.randint(0, 3), places)


def play(seed, above):
    """Play a history below a folder. Raises AssertionError with what has happened."""
    folder = Folder(Path(above, "c"))
    plan = None
    story = []
    try:
        for number in range(LIVES):
            draw = random.Random(f"{seed} {number}")
            plan = plan_life(draw, plan, len(folder.saves))
            if draw.random() < 0.3:
                story.append("convert")
                an_hour_passes(folder.place)
                folder.convert()
            story.append(str(plan))
            expected = folder.expected()
            events, lines = play_life(above, folder.place, plan)
            story += lines
            if refusals := [event["refused"] for event in events if "refused" in event]:
                assert not expected, f"refused: {refusals[0]}"
                assert refusals == [refusals[0].replace("\n", " ")] * plan.ranks, refusals
                folder.empty(folder.place.with_name(f"{folder.place.name}n"))
            else:
                folder.follow(events, expected)
    except (AssertionError, universal.CheckpointError) as error:
        raise AssertionError("\n".join([f"seed {seed}, life {number}: {error}", *story])) from None
