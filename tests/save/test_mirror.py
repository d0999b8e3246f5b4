"""Shards in memory, twice: whatever dies, the next start goes on from the very step, on the ranks
that are left, and no bit differs. Machines are played: those of a run differ in MIRROR_ROOT, and
what a dead one had is removed."""

import errno
import functools
import os
import random
import re
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from recipes import Words

import universal
from measure.logs import COLUMNS, compare, steps
from tests.support import ROOT, toy
from tests.support.commands import kill, only_if, run_python, slow, told_to_stop
from tests.support.files import MODEL, flip, folders_in
from tests.support.helpers import at_step
from tests.support.ranks import launch, run
from universal import mirror as mirrors
from universal.load.overrides import overridden
from universal.mirror import Mirror
from universal.save import snapshot as snapshots

COMMON = (
    "--n_embd 32 --seq_len 16 --n_layer 1 --train_batch_size 24 --steps 12 --warmup_steps 4 "
    "--train_micro_batch_size_per_gpu 2 --checkpoint_interval 5 --eval_interval 3"
).split()


@pytest.fixture(scope="module")
def uninterrupted(work):
    flags = "--exact --run_name uninterrupted --checkpoint_dir alone".split()
    run(work, 1, "examples.train_elastic", *COMMON, *flags)


def train(work, name, machines, *arguments, then=None, wait=True):
    """One rank on each of `machines`, which may name one several times. then() runs in each, before
    the script. wait: Mirror's. What they print is among the errors, where all ranks' is kept."""

    def patch():
        os.dup2(2, 1)
        machine = machines[int(os.environ["RANK"])]
        os.environ["MIRROR_ROOT"] = str(Path(f"{name}_{machine}").resolve())
        Mirror.__init__ = functools.partialmethod(Mirror.__init__, wait=wait)
        if then:
            then()

    flags = f"--exact --elastic --mirror 1 --run_name {name} --checkpoint_dir {name}".split()
    command = ("examples.train_elastic", *COMMON, *flags, *arguments)
    return launch(work, len(machines), *command, patch=patch, limit=120)


# At whose call a rank dies: as it sends its shards, when all have theirs twice, as it receives, and
# as it saves.
SENDS = "universal.mirror.exchange"
COPIED = "universal.mirror.Mirror.commit"
RECEIVES = "os.replace"
SAVES = "universal.mirror.Image"
# What the next start says.
TO_DISK = "back to the disk"
ALONE = "is of one machine: it survives a rank's death, not the machine's"
FIFTH = "--mirror 5"


class Life(NamedTuple):
    """Of a job, from a start to what ends it."""

    machines: str  # of each rank
    then: object  # a patch: what ends it
    lost: str  # machines that are gone afterwards
    last: int  # the last step that counts
    words: str = ""  # what the next start says
    flags: str = ""  # of this life


ALL_IN_ONE = [
    Life("aabb", at_step(4, 2), "b", 3, flags="--zero_stage 3"),
    # Step 8 is done, and not in the log.
    Life("aacc", at_step(8, 3, kill, SENDS), "c", 7),
    # b keeps its files of this attempt at step 8, which make no step with those of the next one.
    Life("ab", at_step(8, 1, kill, SENDS), "", 7),
    Life("ac", at_step(8, 1, kill, SENDS), "c", 7),
    Life("abb", at_step(9, 2, told_to_stop), "", 9, f"{TO_DISK}, all_in_one, at step 9", FIFTH),
    # Neighbours: shards are lost.
    Life("abc", at_step(12, 1), "bc", 10, TO_DISK),
]
IN_SENDING = Life("aabb", at_step(8, 0, kill, SENDS), "a", 7)
# The lives of a job, the machines of the last one, and the flags of all.
LONG = {
    # Step 8 is perhaps not in the log; but it is held twice.
    "not logged": ([Life("aabb", at_step(8, 0, kill, COPIED), "a", 8)], "bb", ""),
    # a and c have what b and d had, and neither has all.
    "no neighbours": ([Life("abcd", at_step(8, 1), "bd", 7)], "ac", ""),
    "in the first copy": ([Life("aabb", at_step(1, 2, kill, SENDS), "b", 0, TO_DISK)], "aa", ""),
    "one machine": ([Life("aa", at_step(8, 1), "", 7, ALONE)], "aa", ""),
    "uneven": ([Life("aaab", at_step(8, 3), "a", 7)], "b", ""),
    "killed as it saves": ([Life("ab", at_step(8, 1, kill, SAVES), "", 7)], "ab", "--zero_stage 3"),
    # Each has its own.
    "killed as it receives": ([Life("aabb", at_step(8, 0, kill, RECEIVES), "", 8)], "aabb", ""),
}
# Mirror's wait: without it a step whose copy was under way may be done again.
LIVES = [
    ("all in one", ALL_IN_ONE, "ab", "", True),
    ("not held twice, in the background", [IN_SENDING], "bb", "--zero_stage 3", False),
    slow("not held twice", [IN_SENDING], "bb", "--zero_stage 3", True),
    slow("all in one, in the background", ALL_IN_ONE, "ab", "", False),
]
LIVES += [slow(name, *job, True) for name, job in LONG.items()]
LIVES += [slow(f"{name}, in the background", *job, False) for name, job in LONG.items()]


@pytest.mark.parametrize("name, lives, last, flags, wait", LIVES)
def test_lives(work, uninterrupted, name, lives, last, flags, wait):
    """Killed, and memory lost with the machine: the job goes on at the very next step, on what is
    left, and no bit differs."""
    name = re.sub(r"\W+", "_", name)
    before = Life("", None, "", 0)
    for life in (*lives, Life(last, None, "", 12)):
        arguments = f"{flags} {life.flags}".split()
        logged = max(steps(work, name), default=0)
        result = train(work, name, life.machines, *arguments, then=life.then, wait=wait)
        assert (result.code == 0) == (life.then is None), result.errors
        assert before.words.replace("all_in_one", name) in result.errors, result.errors
        resumed = re.findall(r"^resumed from .* at step (\d+)$", result.errors, re.M)
        (reached,) = map(int, resumed or ["0"])
        assert reached in (before.last, before.last - (not wait)), result.errors
        next_step = re.search(r"^step +(\d+) \|", result.errors, re.M)
        assert not next_step or int(next_step[1]) == reached + 1
        back = "--mirror" in flags + before.flags or TO_DISK in before.words
        assert logged <= reached or back, "a step that was logged is done twice"
        for machine in life.lost:
            shutil.rmtree(work / f"{name}_{machine}")
        before = life
    assert steps(work, name) == list(range(1, 13))
    for column in COLUMNS:
        assert set(compare(work, "uninterrupted", name, column).values()) == {0.0}
    # The job is done.
    for machine in last:
        assert not list((work / f"{name}_{machine}").iterdir())


class Tied(toy.Net):
    def __init__(self):
        super().__init__()
        self.c = torch.nn.Linear(7, 5, bias=False)
        self.c.weight = self.b.weight


# Options of the engine; whether the weights are left out, as the masters have them.
WEIGHTS = [
    (1, {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1)}, False),
    (2, toy.BF16, True),
    (1, {"net": Tied}, True),
    (3, toy.BF16, True),
]


def test_weights_come_from_masters(tmp_path):
    """A copy has no weights that the masters give, and every bit of the engine comes back."""

    def play(name):
        stage, options, left_out = WEIGHTS[int(name)]
        engine = toy.make(stage, **options)
        Path("m").mkdir(exist_ok=True)
        mirror = Mirror(engine, "m", wait=True)
        for step in (1, 2):
            toy.train(engine, step)
            mirror.save({"step": step})
        truth = toy.snapshot(engine)
        (slot,) = Path("m").glob("step*")
        files = slot.glob("*mp_rank_00_model_states.pt")
        module = torch.load(next(files), weights_only=False)["module"]
        trained = {name for name, p in engine.module.named_parameters() if p.requires_grad}
        empty = {name for name in trained if not module[name].numel()}
        assert empty == (trained if left_out else set())
        assert module["calls"].numel() == 3 and (stage == 3 or module["frozen.weight"].numel())
        other = toy.make(stage, seed=7, **options)
        universal.load_checkpoint(other, "m", slot.name)
        assert not toy.differences(truth, toy.snapshot(other))

    def job():
        toy.begin()
        toy.in_turn(map(str, range(len(WEIGHTS))), play)

    run(tmp_path, 2, job)


def no_space(*_, **options):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# What fails on rank 0 at step 4: as it pickles, takes room, completes a file, or receives one; and
# on how many machines.
FAILURES = {"StoragePickler.dump": 1, "reserve": 1, "Image.seal": 1, "os.utime": 2}


def test_a_copy_that_fails(tmp_path):
    """On one rank: a line, the step before stays, and the next one is copied."""

    def play(name):
        place, _, function = name.rpartition(".")
        machines = FAILURES[name]
        engine = toy.make(1)
        mirror = Mirror(engine, f"m{dist.get_rank() % machines}", every=2)
        target = getattr(snapshots, place, os if place else mirrors)
        for step in range(1, 7):
            toy.train(engine, step)
            with pytest.MonkeyPatch.context() as patched:
                if step == 4 and toy.is_rank_0():
                    patched.setattr(target, function, no_space)
                mirror.save({"step": step})
                assert mirror.finish() == {4: 2, 5: 2}.get(step, step // 2 * 2)

    def job():
        toy.begin()
        toy.in_turn(FAILURES, play)

    lines = [line for line in run(tmp_path, 2, job).splitlines() if "WARNING" in line]
    line = "mirror.py: WARNING: step 4 is not copied: OSError: [Errno 28] No space left on device"
    assert lines == [line] * len(FAILURES)


def test_refusals(tmp_path):
    """A mirror takes no folder that holds anything else, that another job uses, or that has no room
    for two steps; it leaves what comes later."""

    def job():
        toy.begin()
        engine = toy.make(3, lambda: Words(30_000))
        toy.train(engine, 1)
        with pytest.raises(ValueError, match="m holds data, so it is not for this job alone"):
            Mirror(engine, "m")
        with overridden(shutil, disk_usage=lambda path: SimpleNamespace(free=0)):
            with pytest.raises(ValueError, match="has room for 0.0 MB, and needs ") as refusal:
                Mirror(engine, "full")
        mirror = Mirror(engine, "own", wait=True)
        mirror.save({"step": 1})
        with pytest.raises(ValueError, match="own is in use by another job"):
            Mirror(engine, "own")
        needed = 1e6 * float(re.search(r"needs ([0-9.]+) MB", str(refusal.value))[1])
        room = 2 * sum(path.stat().st_size for path in Path("own").glob("step*/*"))
        assert room <= needed <= 1.5 * room
        dist.barrier()
        Path("own", "later").mkdir(exist_ok=True)
        assert mirror.gather("c") == mirror.folder
        mirror.close()
        dist.barrier()
        assert os.listdir("own") == ["later"]
        mirror = Mirror(engine, "empty")
        if toy.is_rank_0():  # which leads, and is slower than the other
            mirror.remove = lambda names: (time.sleep(0.5), Mirror.remove(mirror, names))
        for _ in range(2):
            mirror.close()
        assert not toy.is_rank_0() or not Path("empty").exists()

    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "data").touch()
    run(tmp_path, 2, job, limit=60)
    assert (tmp_path / "m" / "data").exists()


def cannot_be_read():
    """A patch: machine a cannot read a file of its memory."""
    verify = mirrors.verify

    def verify_others(path):
        if "_a/" in str(path) and path.name == SHARD:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        verify(path)

    mirrors.verify = verify_others


def of_another_step(path):
    """The file of step 5 in its place."""
    shutil.copy(path.parents[3] / "removed" / "global_step5" / path.name, path)


SHARD = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
# What happens to a file in the memory of these machines, and at the next start.
DAMAGES = {
    "flipped": [("a", SHARD, flip, None), ("ab", SHARD, flip, None)],
    "removed": [("a", SHARD, os.remove, None), ("ab", MODEL, of_another_step, None)],
    "unreadable": [("a", SHARD, os.stat, cannot_be_read)],
}


@pytest.mark.parametrize("name", [only_if(name == "flipped", name) for name in DAMAGES])
def test_damaged_copies(work, name):
    """A job ends with its last step in the memory of two machines, and step 5 on the disk, and
    again. Where one's copy of a file is damaged, the other one's is taken; where both are, the
    disk. The file's time stays."""
    assert train(work, name, "ab", then=at_step(8, 1)).code != 0
    for step, (machines, file, harm, then) in enumerate(DAMAGES[name], 7):
        for machine in machines:
            (path,) = work.glob(f"{name}_{machine}/*/step*/{file}")
            written = path.stat().st_mtime_ns
            harm(path)
            if path.exists():
                os.utime(path, ns=(written, written))
        result = train(work, name, "ab", then=then or at_step(step + 2, 1))
        both = machines == "ab"
        assert f"at step {5 if both else step}\n" in result.errors, result.errors
        assert (f"{TO_DISK}, {name}, at step 5" in result.errors) == both
        assert ("; removed" in result.errors) == (harm in (flip, os.stat))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_soak(tmp_path, stage):
    """Two minutes of random events. The seed is printed; --seed repeats it."""
    words = ("-m", "measure.elastic", "--soak", 2, "--zero_stage", stage)
    result = run_python(*words, folder=tmp_path, timeout=1200, PYTHONPATH=str(ROOT))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "every step once in the log, and no bit differs" in result.stdout


# -----------------------------------------------------------------------------
# a script that is not ours

# With a frozen layer and two groups. At a resume all has other values, so what is not restored is
# seen.
ENGINE = """
import os, signal, sys, threading
import deepspeed, torch
from tests.support import toy


def two_groups(parameters):
    first, *others = parameters
    return torch.optim.AdamW([{"params": others}, {"params": [first], "lr": 1e-3}], lr=1e-2)


toy.begin()
engine = toy.make(stage, optimizer=two_groups, seed=1 + os.path.exists("record"), **config)


def number():
    return float(sum(p.detach().norm() for p in engine.module.parameters()))
"""
# A step is that of own_loop.py. Rank 0 writes down what is done, and a number that all ranks have.
STEPS = f"""
exec(open({str(ROOT / "examples" / "own_loop.py")!r}).read())
one_step = train_step


def train_step(engine, samples, step):
    if os.environ.get("KILLED") == os.environ["RANK"] and step == done + 3:
        threading.Timer(float(os.environ["AFTER"]), os.kill, [os.getpid(), signal.SIGKILL]).start()
    one_step(engine, samples, step)
    if step == 5 and os.environ.get("TOLD") == os.environ["RANK"]:
        os.kill(os.getpid(), signal.SIGTERM)
    return number()


def record(*words):
    if engine.global_rank == 0:
        with open("record", "a") as file:
            print(*words, file=file)


rows = torch.randn(150, 8, generator=torch.Generator().manual_seed(1))
dataset = torch.utils.data.TensorDataset(rows)
"""


TOTAL = 20  # steps


def own_script(folder):
    """The lines of docs/elastic.md, around an engine that is not ours; they record what they do."""
    page = (ROOT / "docs" / "elastic.md").read_text()
    (lines,) = re.findall(r"```python\n(.*?Mirror\(.*?)```", page, re.S)
    lines = lines.replace('"/dev/shm/job", every=1', 'os.environ["MIRROR_FOLDER"]')
    lines = re.sub(r"(.*load_checkpoint.*\n.*\n)", r'\1record("from", done)\n', lines)
    lines = re.sub(r"(.*mirror\.save\({.*\n)", r'\1    record("did", step, loss)\n', lines)
    values = f"batch, micro, stage, steps, every, folder = 12, 2, 2, {TOTAL}, 100, 'c'\n"
    values += "config = {'train_batch_size': None}\n"
    lines = lines.replace("...  # deepspeed.initialize()\n", ENGINE + STEPS)
    (folder / "own.py").write_text(f"import os\n{values}{lines}")


def recorded(folder):
    """[(step, its number)] that were done, and {step} that they resumed from."""
    words = [line.split() for line in (folder / "record").read_text().splitlines()]
    done = [(int(word[1]), float(word[2])) for word in words if word[0] == "did"]
    return done, {int(word[1]) for word in words if word[0] == "from"}


def own_machines(**changes):
    """A patch: each rank is on a machine of its own."""

    def patch():
        machine = Path(f"machine{os.environ['RANK']}").resolve()
        os.environ |= {"MIRROR_FOLDER": str(machine), "LOCAL_RANK": "0"} | changes

    return patch


def test_lines_for_other_scripts(tmp_path):
    """At ZeRO-2 with a frozen layer and two groups. 4 machines, whose ranks do not divide the
    batch, are told to stop after step 5; of 3 one is killed, at any moment of a step. A step is
    done twice only if its copy was under way, or that of the step before, and the weights are those
    of a run that nothing happened to."""
    alone = tmp_path / "alone"
    alone.mkdir()
    own_script(alone)
    run(alone, 1, alone / "own.py", patch=own_machines())
    wanted = dict(recorded(alone)[0])
    script = tmp_path / "own.py"
    own_script(tmp_path)
    result = launch(tmp_path, 4, script, patch=own_machines(TOLD="1"))
    assert result.code == 143 and max(recorded(tmp_path)[0])[0] == 5, result.errors
    moment = str(random.uniform(0, 0.05))
    result = launch(tmp_path, 3, script, patch=own_machines(KILLED="2", AFTER=moment))
    assert result.code != 0 and "back to the disk" not in result.out
    shutil.rmtree(tmp_path / "machine2")
    run(tmp_path, 2, script, patch=own_machines())
    done, resumed = recorded(tmp_path)
    numbers = [step for step, _ in done]
    assert len(numbers) - len(set(numbers)) <= 2
    assert {*numbers, *resumed} - {0} == set(range(1, TOTAL + 1))
    assert max(abs(norm - wanted[step]) for step, norm in done) < 1e-5
    assert not (tmp_path / "machine0").exists()


# -----------------------------------------------------------------------------
# checkpoints on the disk of each machine


def on_disks(name, names, then=None):
    """A patch: each machine, names[rank], has a folder of its own in the place of
    --checkpoint_dir."""

    def patch():
        rank = int(os.environ["RANK"])
        os.environ["LOCAL_RANK"] = str(names[:rank].count(names[rank]))
        sys.argv += ["--checkpoint_dir", str(Path(f"{name}_{names[rank]}").resolve())]
        if then:
            then()

    return patch


# The machine that is lost, those that start without it, those that do when it is back, and what is
# missing in between.
DISKS = [
    (1, "a", "cb", "ab", "mp_rank_00_model_states.pt is on no machine"),
    slow(3, "a", "b", "aabb", "zero_pp_rank_0_mp_rank_00"),
    slow(1, "b", "ca", "bbaa", "zero_pp_rank_2_mp_rank_00"),
]


@pytest.mark.parametrize("stage, lost, replaced, machines, missing", DISKS)
def test_disks_of_their_own(work, uninterrupted, stage, lost, replaced, machines, missing):
    """Each has the shards of its own ranks. Where a machine is replaced by an empty one, there is
    no start from scratch, and what is missing is named; when its disk is back, they go on."""
    name = f"disks{stage}{machines}"
    flags = (
        f"--exact --elastic --keep 2 --checkpoint_interval 2 --zero_stage {stage} --run_name {name}"
    ).split()

    def train(machines, then=None):
        patch = on_disks(name, machines, then)
        return launch(work, len(machines), "examples.train_elastic", *COMMON, *flags, patch=patch)

    assert train("aabb", at_step(10, 0)).code != 0
    for machine, ranks in (("a", "01"), ("b", "23")):
        folder = work / f"{name}_{machine}"
        assert folders_in(folder) == ["global_step6", "global_step8"]
        shards = sorted(path.name for path in folder.glob("global_step8/*optim_states.pt"))
        assert "".join(shard.split("_")[3] for shard in shards) == ranks
    (work / f"{name}_{lost}").rename(work / "away")
    # Rank 0 alone writes it, unless train.py saves.
    (work / f"{name}_b" / "latest").unlink(missing_ok=True)
    # All ranks' errors are kept, and of one what it prints.
    result = train(replaced, then=lambda: os.dup2(2, 1))
    assert result.code != 0 and steps(work, name) == list(range(1, 10))
    assert missing in result.errors
    (work / "away").rename(work / f"{name}_{lost}")
    result = train(machines)
    assert result.code == 0 and "at step 8\n" in result.out, result.errors
    assert steps(work, name) == list(range(1, 13))
    assert set(compare(work, "uninterrupted", name).values()) == {0.0}


@pytest.mark.parametrize("stage", [3, slow(2)])
def test_saved_again_by_fewer(tmp_path, stage):
    """3 machines save a checkpoint, then 2 of them, by plain engine.save_checkpoint(), under the
    same name. The third one joins again, with shards of the first save, and all continue from the
    second."""

    def save(step):
        toy.begin()
        engine = toy.make(stage)
        toy.train(engine, step)
        engine.save_checkpoint(sys.argv[-1], tag="t")
        toy.save_truth(toy.snapshot(engine))

    def load():
        toy.begin()
        engine = toy.make(stage, seed=7)
        universal.load_checkpoint(engine, mirrors.gather(sys.argv[-1]))
        assert not toy.differences(toy.read_truth(), toy.snapshot(engine))

    run(tmp_path, 3, save, 1, patch=on_disks("disk", "cab"))
    run(tmp_path, 2, save, 2, patch=on_disks("disk", "ab"))
    run(tmp_path, 3, load, patch=on_disks("disk", "cab"))
    for machine in "cab":
        shards = sorted((tmp_path / f"disk_{machine}").glob("t/*optim_states.pt"))
        assert [path.name.split("_rank_")[1] for path in shards] == ["0_mp", "1_mp"]
