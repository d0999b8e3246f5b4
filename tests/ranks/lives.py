"""Random histories of a training job, which dies in the middle of its saves and goes on as another
one: play(seed, folder).

Each of its lives (life.py) has ranks and a ZeRO stage of its own, and names of checkpoints come
again at the same stage. In its fatal save each rank has a place of its own, drawn by the seed,
where it dies, or finds the disk full. So a seed's folders are the same in every run. Between two
lives someone converts, copies, moves, or edits `latest`.

What must be loaded. A save that came back on all ranks is a promise, and so is an edited `latest`.

- While nothing was written over the last promise and `latest` names it: that one, or a save that
  was begun after it.
- A copy without the times of its files, and a `latest` that the dying rank 0 wrote before the
  others had their shards, hide in which order tags were written. Then: any step not before that of
  the last promise nothing was written over.
- Where something was written over every promise, nothing may be whole: any save, or a start from
  the beginning, or one CheckpointError of one line, the same on all ranks. It is allowed nowhere
  else.
- What is loaded has the masters and moments of its save, to the last bit. But when a save dies over
  another one of its name and step, nobody can tell whose shards are there, and a mixture is as good
  as either.
- Every loss is within 1e-5 of one rank that was never killed. But bf16 departs from fp32 for good:
  the steps of such a life, and of those that go on from its saves, must be within BF16_GAP instead.
- universal.inspect, asked before each load, names the tag that is loaded then, and finds damaged
  what the load passes over.
"""

import contextlib
import functools
import random
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from life import LAST, Place, Plan, an_hour_passes, play_life

import universal
from universal.inspect import look

LIVES = 6
STEPS = 11  # of a life that does not come to its fatal save
FP32_GAP = 1e-5
BF16_GAP = 0.02  # losses are around 1, and bf16 rounds each of a few sums by up to 2 ** -9


@functools.cache
def reference():
    """{step: loss} of one rank that was never killed."""
    plan = Plan(ranks=1, steps=LAST, every=LAST + 1)
    with tempfile.TemporaryDirectory() as above:
        events, _ = play_life(above, Path(above, "none"), plan)
    return {event["step"]: event["loss"] for event in events if "loss" in event}


# --------------------------------------------------------------------------------------------------
# 1. what is in the folder, and what must be loaded


@dataclass
class Save:
    """An attempt to save. exact: its losses are within FP32_GAP. whole: is known to be."""

    step: int
    digest: str
    exact: bool
    whole: bool = False


class Promise(NamedTuple):
    """attempt: the number of the save. before: how many attempts there were before it."""

    tag: str
    attempt: int
    before: int


class Folder:
    """saves: all attempts, in their order. attempts: {tag: numbers of those under it}, as files of
    an earlier one may be there, too. copied: without the times of its files, and there is no newer
    promise."""

    def __init__(self, place):
        self.saves = []
        self.empty(place)

    def empty(self, place):
        self.place = place
        self.attempts = {}
        self.promises = []
        self.copied = False

    def whole(self, tag):
        """The last attempt under a tag, if it is known to be whole; else None."""
        attempt = self.attempts[tag][-1]
        return attempt if self.saves[attempt].whole else None

    def promise(self, tag):
        self.promises.append(Promise(tag, self.whole(tag), len(self.saves)))
        self.copied = False

    def newest(self):
        """The tag of the last promise, while nothing was written over it; else None."""
        if not self.promises:
            return None
        tag, attempt, _ = self.promises[-1]
        return tag if self.whole(tag) == attempt else None

    def expected(self, by_name):
        """The attempts that may be loaded, by the rules above. Empty: nothing may be whole."""
        whole = {self.whole(tag) for tag in self.attempts}
        kept = [promise for promise in self.promises if promise.attempt in whole]
        if not kept:
            return set()
        tag, attempt, before = kept[-1]
        latest = Path(self.place, "latest")
        if self.copied or not by_name and latest.exists() and latest.read_text() != tag:
            step = self.saves[attempt].step
            return {number for number, save in enumerate(self.saves) if save.step >= step}
        return {attempt} if by_name else {attempt, *range(before, len(self.saves))}

    def check_loaded(self, expected, tag, number, step, digest):
        """Whether the steps after it are exact. Raises AssertionError for what should not be
        loaded."""
        wanted = f"one of {sorted(expected)} was expected"
        if tag is None:
            assert not expected, f"nothing was loaded, and {wanted}"
            return True
        assert not expected or number in expected, f"{number} was loaded, and {wanted}"
        save = self.saves[number]
        attempts = self.attempts[tag]
        source = f"{number} was loaded from {tag}"
        assert number in attempts and step == save.step, f"{source}, at step {step}"
        mixed = [self.saves[n] for n in attempts if self.saves[n].step == step]
        if self.whole(tag) is None and len(mixed) > 1:
            save.digest = digest
            save.exact = all(attempt.exact for attempt in mixed)
        assert digest == save.digest, f"{source}, with other masters or moments"
        save.whole = True
        attempts.remove(number)
        attempts.append(number)
        return save.exact

    def follow(self, events, expected, exact):
        """Go through the ledger of a life. exact: whether it trains in fp32."""
        for event in events:
            match event:
                case {"loaded": tag, "save": number, "step": step, "digest": digest}:
                    exact = self.check_loaded(expected, tag, number, step, digest) and exact
                case {"step": step, "loss": loss}:
                    gap = abs(loss - reference()[step])
                    limit = FP32_GAP if exact else BF16_GAP
                    assert gap < limit, f"step {step} is {gap:.1e} off"
                case {"begun": number, "tag": tag, "step": step, "digest": digest}:
                    self.saves.append(Save(step, digest, exact))
                    self.attempts.setdefault(tag, []).append(number)
                case {"back": number, "tag": tag}:
                    self.saves[number].whole = True
                    self.promise(tag)


# --------------------------------------------------------------------------------------------------
# 2. what happens to it between two lives


def convert(folder, draw):
    """The newest, beside it."""
    tag = folder.newest()
    if tag and not tag.endswith("_universal"):
        universal.convert(folder.place / tag, folder.place / f"{tag}_universal")
        folder.attempts[f"{tag}_universal"] = [folder.whole(tag)]


def edit_latest(folder, draw):
    """By hand, to another checkpoint that is complete."""
    tags = [tag for tag in folder.attempts if folder.whole(tag) is not None]
    if others := [tag for tag in tags if tag != folder.newest()]:
        tag = draw.choice(others)
        (folder.place / "latest").write_text(tag)
        folder.promise(tag)


def copy(folder, draw):
    """All files get new times, in the order of their names or in any other. But not where a save
    under the name of another step died: at ZeRO-3, nothing but times tells the new model states
    from those of the old shards."""
    if "last" in folder.attempts and folder.whole("last") is None:
        return
    source = folder.place
    folder.place = source.with_name(f"{source.name}c")
    files = sorted(path.relative_to(source) for path in source.rglob("*") if path.is_file())
    for name in draw.choice([files, draw.sample(files, len(files))]):
        (folder.place / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, folder.place / name)
    folder.copied = True


def move(folder, draw):
    """A converted checkpoint, alone into a new folder."""
    convert(folder, draw)
    if tags := [tag for tag in folder.attempts if tag.endswith("_universal")]:
        tag = draw.choice(tags)
        source = folder.place / tag
        attempts = folder.attempts[tag]
        folder.empty(folder.place.with_name(f"{folder.place.name}m"))
        folder.place.mkdir()
        source.rename(folder.place / tag)
        folder.attempts[tag] = attempts
        folder.promise(tag)


EVENTS = [convert, convert, edit_latest, edit_latest, copy, move, None, None, None, None]


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
    bf16 = draw.random() < 0.1
    plan = Plan(
        ranks=ranks,
        stage=stage,
        bf16=bf16,
        steps=STEPS,
        every=every,
        # Two saves of other stages or dtypes under one name are refused.
        name=f"{name.partition('.')[0]}.{stage}.{bf16:d}",
        saves=saves,
        fatal=saves + draw.randint(0, 3),
        full=draw.random() < 0.2,
    )
    places = {}
    for rank in draw.sample(range(ranks), draw.randint(1, ranks)):
        files = 1 + (rank == 0 or plan.stage == 3) + (rank == 0)  # model states, shard, `latest`
        places[rank] = Place(draw.randrange(files), draw.choice([0, 1e-9, 0.5, 0.95, 1]))
    return plan._replace(places=places)


def looked_at(place, tag):
    """What universal.inspect says of a folder; None if there is no such checkpoint."""
    with contextlib.suppress(universal.CheckpointError):
        return look(place, tag)


def check_view(view, events, lines):
    """Whether the load took the tag that inspect has named, or none; and whether each tag that it
    passed over before that one is damaged for both."""
    takes = view and view["takes"]
    for event in events:
        assert event.get("loaded", takes) == takes, f"inspect said {takes}: {event}"
        assert "refused" not in event or not takes, f"inspect said {takes}: {event}"
    for line in lines:
        if passed := re.match(r"universal: (\S+) is (not complete, and is )?passed over", line):
            assert view["tags"][passed[1]]["problem"], line


def play(seed, above):
    """Play a history below a folder. Returns what has happened, and what was printed, in lines.
    Raises AssertionError with them."""
    folder = Folder(Path(above, "c"))
    plan = None
    story = []
    try:
        for number in range(LIVES):
            draw = random.Random(f"{seed} {number}")
            plan = plan_life(draw, plan, len(folder.saves))
            if event := draw.choice(EVENTS):
                story.append(event.__name__)
                an_hour_passes(folder.place)
                event(folder, draw)
            if draw.random() < 0.15:
                plan = plan._replace(tag=folder.newest())
            story.append(str(plan))
            expected = folder.expected(plan.tag)
            view = looked_at(folder.place, plan.tag)
            events, lines = play_life(above, folder.place, plan)
            story += lines
            check_view(view, events, lines)
            if refusals := [event["refused"] for event in events if "refused" in event]:
                assert not expected, f"refused: {refusals[0]}"
                assert refusals == [refusals[0].replace("\n", " ")] * plan.ranks, refusals
                folder.empty(folder.place.with_name(f"{folder.place.name}n"))
            else:
                folder.follow(events, expected, not plan.bf16)
    except (AssertionError, universal.CheckpointError) as error:
        raise AssertionError("\n".join([f"seed {seed}, life {number}: {error}", *story])) from None
    return story
