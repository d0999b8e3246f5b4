"""Random lives of a training job, which dies in the middle of its saves and goes on as another one.

A life is a script that knows nothing of careful saving: install(), plain engine.save_checkpoint()
and engine.load_checkpoint(), names that come again, other ranks and another ZeRO stage than the
life before. In its fatal save each rank has a place of its own, drawn by the seed, where it dies,
or finds the disk full: in which file, and how much of it is written. So a seed's folders are the
same in every run. Between two lives someone converts, copies, moves, or edits `latest`.

What must be loaded. A save that came back on all ranks is a promise, and so is an edited `latest`.
- While nothing was written over the last promise and `latest` names it: that one, or a save that
was begun after it.
- A copy without the times of its files, and a `latest` that the dying rank 0 wrote before the
others had their shards,
  hide in which order tags were written. Then: any step not before that of the last promise nothing was written over.
- Where something was written over every promise, nothing may be whole: any save, or a start from
the beginning, or one
  CheckpointError of one line, the same on all ranks. It is allowed nowhere else.
- What is loaded has the masters and moments of its save, to the last bit. But when a save dies over
another one of its
  name and step, nobody can tell whose shards are there, and a mixture is as good as either.
- Every loss is within 1e-5 of one rank that was never killed. But bf16 departs from fp32 for good:
the steps of such a
  life, and of those that go on from its saves, are held to BF16_GAP instead.
"""

import contextlib
import errno
import functools
import hashlib
import io
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.lr_schedules import WarmupLR
from torch import nn
from toy import adam, begin, make, snapshot, train

import universal
from measure.ranks import launch

LIVES = 6
STEPS = 11  # of a life that does not come to its fatal save
LAST = 50  # the step of the reference's last loss: no history goes further
BF16_GAP = 0.02  # losses are around 1, and bf16 rounds each of a few sums by up to 2 ** -9


# -----------------------------------------------------------------------------
# 1. a life: what every rank runs
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 24)
        self.norm = nn.LayerNorm(24)
        self.b = nn.Linear(24, 3)

    def forward(self, x):
        return (self.b(self.norm(self.a(x)).tanh()) - 2 * x[:, :3].sin()).pow(2).mean()


def warm_up(optimizer):
    return WarmupLR(optimizer, warmup_max_lr=0.02, warmup_num_steps=LAST)


def digest(engine):
    """Of the masters and moments of all ranks."""
    found = hashlib.sha256()
    for name, value in snapshot(engine).items():
        if name.endswith(("fp32", "exp_avg", "exp_avg_sq")):
            found.update(value.numpy().tobytes())
    return found.hexdigest()


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def an_hour_passes(folder):
    """Between two saves, and before anybody touches their folder: the loader goes by the times of
    files."""
    for path in Path(folder).rglob("*"):
        os.utime(path, (0, path.stat().st_mtime - 3600))


def break_disk(file, part, full):
    """From now on this rank writes so many files, and a part of the next one; then it dies, or its
    disk is full."""
    torch_save = torch.save
    numbers = itertools.count()

    def write(path, data):
        last = next(numbers) == file
        if part or not last:
            Path(path).write_bytes(data[: int(part * len(data))] if last else data)
        if last and full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        if last:
            die()

    def save(thing, path, **options):
        memory = io.BytesIO()
        torch_save(thing, memory, **options)
        write(path, memory.getvalue())

    @contextlib.contextmanager
    def open_latest(path, mode):
        yield SimpleNamespace(write=lambda text: write(path, text.encode()))

    torch.save = save
    deepspeed.runtime.engine.open = open_latest


def live(plan):
    """Load, train and save as the plan says, and die. The ledger says what has happened, an object
    of JSON a line."""
    rank = dist.get_rank()
    folder = plan["folder"]
    ledger = open(plan["ledger"], "a", buffering=1)

    def note(**what):
        if rank == 0 or "refused" in what:
            ledger.write(json.dumps(what) + "\n")

    universal.install()
    engine = make(
        plan["stage"], Net, adam, clip=1.0, scheduler=warm_up, bf16={"enabled": plan["bf16"]}
    )
    try:
        with contextlib.redirect_stdout(ledger):
            path, state = engine.load_checkpoint(folder, tag=plan["tag"])
    except universal.CheckpointError as error:
        note(refused=str(error))
        die()
    tag = path and os.path.relpath(path, folder)
    note(
        loaded=tag,
        save=tag and state.get("save"),
        step=engine.global_steps,
        digest=tag and digest(engine),
    )
    saves = itertools.count(plan["saves"])
    first = engine.global_steps + 1
    for step in range(first, min(first + plan["steps"], LAST + 1)):
        note(step=step, loss=train(engine, step))
        if step % plan["every"] == 0:
            tag, save = plan["name"].format(step), next(saves)
            note(begun=save, tag=tag, step=step, digest=digest(engine))
            if rank == 0:
                an_hour_passes(folder)
            if save == plan["fatal"] and str(rank) in plan["places"]:
                break_disk(*plan["places"][str(rank)], plan["full"])
            engine.save_checkpoint(folder, tag=tag, client_state={"save": save})
            dist.barrier()
            note(back=save, tag=tag)
    die()


def play_life(above, plan):
    """(objects of the ledger, lines that the loader has said) of a life below a folder; raises
    AssertionError where it hangs, or ends by anything but the death that was planned."""
    ledger = Path(above, "ledger")
    ledger.write_text("")
    words = json.dumps(plan | {"ledger": str(ledger)})
    result = launch(above, plan["ranks"], "tests/ranks/lives.py", words, limit=300, grace=20)
    assert "time limit" not in result.codes.values(), "it hangs"
    full = plan["full"] and "No space left" in result.errors
    killed = -signal.SIGKILL in result.codes.values()
    assert full or killed, f"{result.codes} {result.errors[-500:]}"
    told = ledger.read_text().splitlines()
    said = [line for line in told if line[0] != "{"]
    return [json.loads(line) for line in told if line[0] == "{"], said


@functools.cache
def reference():
    """{step: loss} of one rank that was never killed."""
    plan = {
        "ranks": 1,
        "stage": 1,
        "bf16": False,
        "tag": None,
        "saves": 0,
        "steps": LAST,
        "every": LAST + 1,
    }
    with tempfile.TemporaryDirectory() as above:
        lines, _ = play_life(above, plan | {"folder": f"{above}/none", "full": False})
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


# -----------------------------------------------------------------------------
# 2. what is in the folder, and what must be loaded
class Folder:
    """saves: of all attempts, in their order, {"step", "digest", "exact": held to 1e-5, "whole":
    known to be}."""

    def __init__(self, place):
        self.saves = []
        self.empty(place)

    def empty(self, place):
        self.place = place
        self.holds = {}  # {tag: [attempts]}: files of an earlier one may be there, too
        self.promises = []  # [(tag, attempt, number of attempts before it)]
        self.copied = False  # without the times of its files, and there is no newer promise

    def whole(self, tag):
        """The last attempt under a tag, if it is known to be whole; else None."""
        attempt = self.holds[tag][-1]
        return attempt if self.saves[attempt]["whole"] else None

    def promise(self, tag):
        self.promises.append((tag, self.whole(tag), len(self.saves)))
        self.copied = False

    def newest(self):
        """The tag of the last promise, while nothing was written over it; else None."""
        tag, attempt, _ = self.promises[-1] if self.promises else (None, None, 0)
        return tag if tag and self.whole(tag) == attempt else None

    def expected(self, by_name):
        """The attempts that may be loaded, by the rules above. Empty: nothing may be whole."""
        whole = {self.whole(tag) for tag in self.holds}
        kept = [promise for promise in self.promises if promise[1] in whole]
        if not kept:
            return set()
        tag, attempt, before = kept[-1]
        latest = Path(self.place, "latest")
        if self.copied or not by_name and latest.exists() and latest.read_text() != tag:
            step = self.saves[attempt]["step"]
            return {number for number, save in enumerate(self.saves) if save["step"] >= step}
        return {attempt} if by_name else {attempt, *range(before, len(self.saves))}

    def loaded(self, expected, tag, number, step, digest):
        """Whether the steps after it are held to 1e-5. Raises AssertionError for what should not be
        loaded."""
        if tag is None:
            assert not expected, f"nothing was loaded, and one of {sorted(expected)} was expected"
            return True
        assert not expected or number in expected, (
            f"{number} was loaded, and one of {sorted(expected)} was expected"
        )
        save = self.saves[number]
        attempts = self.holds[tag]
        assert number in attempts and step == save["step"], (
            f"{number} was loaded from {tag}, at step {step}"
        )
        mixed = [n for n in attempts if self.saves[n]["step"] == step]
        if self.whole(tag) is None and len(mixed) > 1:
            save["digest"] = digest
            save["exact"] = all(self.saves[n]["exact"] for n in mixed)
        assert digest == save["digest"], (
            f"{number} was loaded from {tag}, with other masters or moments"
        )
        save["whole"] = True
        attempts.remove(number)
        attempts.append(number)
        return save["exact"]

    def follow(self, lines, expected, exact):
        """Go through the ledger of a life. exact: whether its losses are held to 1e-5."""
        for line in lines:
            match line:
                case {"loaded": tag, "save": number, "step": step, "digest": code}:
                    exact = self.loaded(expected, tag, number, step, code) and exact
                case {"step": step, "loss": loss}:
                    gap = abs(loss - reference()[step])
                    assert gap < (1e-5 if exact else BF16_GAP), f"step {step} is {gap:.1e} off"
                case {"begun": number, "tag": tag}:
                    self.saves.append(line | {"exact": exact, "whole": False})
                    self.holds.setdefault(tag, []).append(number)
                case {"back": number, "tag": tag}:
                    self.saves[number]["whole"] = True
                    self.promise(tag)


# -----------------------------------------------------------------------------
# 3. what happens to it between two lives
def convert(folder, r):
    """The newest, beside it."""
    tag = folder.newest()
    if tag and not tag.endswith("_universal"):
        universal.convert(folder.place / tag, folder.place / f"{tag}_universal")
        folder.holds[f"{tag}_universal"] = [folder.whole(tag)]


def edit_latest(folder, r):
    """By hand, to another checkpoint that is whole."""
    tags = [tag for tag in folder.holds if folder.whole(tag) is not None]
    if others := [tag for tag in tags if tag != folder.newest()]:
        tag = r.choice(others)
        (folder.place / "latest").write_text(tag)
        folder.promise(tag)


def copy(folder, r):
    """All files get new times, in the order of their names or in any other. But not where a save
    under the name of another step died: at ZeRO-3, nothing but times tells the new model states
    from those of the old shards."""
    if "last" not in folder.holds or folder.whole("last") is not None:
        source, folder.place = folder.place, folder.place.with_name(f"{folder.place.name}c")
        files = sorted(path.relative_to(source) for path in source.rglob("*") if path.is_file())
        for name in r.choice([files, r.sample(files, len(files))]):
            (folder.place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, folder.place / name)
        folder.copied = True


def move(folder, r):
    """A converted checkpoint, alone into a new folder."""
    convert(folder, r)
    if tags := [tag for tag in folder.holds if tag.endswith("_universal")]:
        tag = r.choice(tags)
        source, attempts = folder.place / tag, folder.holds[tag]
        folder.empty(folder.place.with_name(f"{folder.place.name}m"))
        folder.place.mkdir()
        source.rename(folder.place / tag)
        folder.holds[tag] = attempts
        folder.promise(tag)


# -----------------------------------------------------------------------------
# 4. a history
def plan_life(r, before, saves):
    """before: the plan of the life before. saves: how many there were."""
    names = {
        "every": r.choice([2, 3]),
        "name": r.choice(["checkpoint-{}", "checkpoint-{}", "last"]),
    }
    if before and r.random() < 0.8:
        names = {key: before[key] for key in names}
    plan = names | {
        "ranks": r.randint(1, 4),
        "stage": r.choice([stage for stage in (1, 2, 3) if stage != before.get("stage")]),
        "bf16": r.random() < 0.1,
        "steps": STEPS,
        "saves": saves,
        "fatal": saves + r.randint(0, 3),
        "full": r.random() < 0.2,
        "places": {},
    }
    for rank in r.sample(range(plan["ranks"]), r.randint(1, plan["ranks"])):
        files = 1 + (rank == 0 or plan["stage"] == 3) + (rank == 0)  # model states, shard, `latest`
        plan["places"][rank] = [r.randrange(files), r.choice([0, 1e-9, 0.5, 0.95, 1])]
    return plan


def play(seed, above):
    """Play a history below a folder. Raises AssertionError with all that has happened."""
    folder = Folder(Path(above, "c"))
    plan, story = {}, []
    try:
        for number in range(LIVES):
            r = random.Random(f"{seed} {number}")
            plan = plan_life(r, plan, len(folder.saves))
            if event := r.choice(
                [convert, convert, edit_latest, edit_latest, copy, move, None, None, None, None]
            ):
                story.append(event.__name__)
                an_hour_passes(folder.place)
                event(folder, r)
            plan["tag"] = folder.newest() if r.random() < 0.15 else None
            story.append(json.dumps(plan))
            expected = folder.expected(plan["tag"])
            lines, said = play_life(above, plan | {"folder": str(folder.place)})
            story += said
            if refusals := [line["refused"] for line in lines if "refused" in line]:
                assert not expected, f"refused: {refusals[0]}"
                assert refusals == [refusals[0].replace("\n", " ")] * plan["ranks"], refusals
                folder.empty(folder.place.with_name(f"{folder.place.name}n"))
                continue
            folder.follow(lines, expected, not plan["bf16"])
    except (AssertionError, universal.CheckpointError) as error:
        raise AssertionError("\n".join([f"seed {seed}, life {number}: {error}", *story])) from None


if __name__ == "__main__":
    begin()
    live(json.loads(sys.argv[1]))
