"""Shards in memory, twice: whatever dies, the next start goes on from the very step, on the ranks
that are left, and no bit differs. Machines are played: those of a run differ in MIRROR_ROOT, and
what a dead one had is removed."""

import fcntl
import functools
import operator
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import ROOT, at_step, hang, kill, told_to_stop

from measure.logs import compare, steps
from measure.ranks import launch, run

COMMON = (
    "--n_embd",
    32,
    "--seq_len",
    16,
    "--n_layer",
    1,
    "--train_batch_size",
    24,
    "--steps",
    12,
    "--warmup_steps",
    4,
)
COMMON = (
    *COMMON,
    "--train_micro_batch_size_per_gpu",
    2,
    "--checkpoint_interval",
    5,
    "--eval_interval",
    3,
)


@pytest.fixture(scope="module")
def uninterrupted(work):
    run(
        work,
        1,
        "examples.train_elastic",
        *COMMON,
        "--exact",
        "--run_name",
        "uninterrupted",
        "--checkpoint_dir",
        "alone",
    )


def train(work, name, machines, *arguments, then=None):
    """One rank on each of `machines`, which may name one several times. then() runs in each, before
    the script. What they print is among the errors, where all ranks' is kept."""

    def patch():
        os.dup2(2, 1)
        os.environ["MIRROR_ROOT"] = str(
            Path(f"{name}_{machines[int(os.environ['RANK'])]}").resolve()
        )
        if then:
            then()

    common = ("--exact", "--elastic", "--mirror", 1, "--run_name", name, "--checkpoint_dir", name)
    return launch(
        work,
        len(machines),
        "examples.train_elastic",
        *COMMON,
        *common,
        *arguments,
        patch=patch,
        limit=120,
    )


SENDS, COPIED = "universal.mirror.exchange", "universal.mirror.Mirror.remove_others"
RECEIVES, SAVES = "os.utime", "torch.save"
TO_DISK, ALONE = (
    "back to the disk",
    "is of one machine: it survives a rank's death, not the machine's",
)
FIFTH = ("--mirror", 5)
# Of each life of a job: ranks on machines, how it ends, machines lost, last step that counts, what
# the next start says, flags of its own. Then flags of all lives, and the machines of the last one.
ALL_IN_ONE = [
    ("aabb", at_step(4, 2), "b", 3, "", "--zero_stage", 3),
    ("aacc", at_step(8, 3, kill, SENDS), "c", 7, ""),  # step 8 is done, and not in the log
    (
        "ab",
        at_step(8, 1, kill, SENDS),
        "",
        7,
        "",
    ),  # b keeps its files of this attempt at step 8 ...
    ("ac", at_step(8, 1, kill, SENDS), "c", 7, ""),  # ... which make no step with those of this one
    ("abb", at_step(9, 2, told_to_stop), "", 9, f"{TO_DISK}, all_in_one, at step 9", *FIFTH),
    ("abc", at_step(12, 1), "bc", 10, TO_DISK),  # neighbours: shards are lost
]
LONG = {
    "a machine dies at 2": ([("aabb", at_step(8, 2), "b", 7, "")], [2], "aa"),
    "a machine dies at 3": ([("aabb", at_step(8, 2), "b", 7, "")], [3], "aa"),
    "not held twice, 0 at 1": ([("aabb", at_step(8, 0, kill, SENDS), "a", 7, "")], [1], "bb"),
    "not held twice, 0 at 3": ([("aabb", at_step(8, 0, kill, SENDS), "a", 7, "")], [3], "bb"),
    "not logged, 0": (
        [("aabb", at_step(8, 0, kill, COPIED), "a", 8, "")],
        [1],
        "bb",
    ),  # perhaps; but held twice
    "not logged, 2": ([("aabb", at_step(8, 2, kill, COPIED), "b", 8, "")], [1], "aa"),
    "no neighbours": (
        [("abcd", at_step(8, 1), "bd", 7, "")],
        [1],
        "ac",
    ),  # they have what b and d had, and neither all
    "neighbours at first": (
        [("abc", at_step(4, 1), "bc", 0, TO_DISK)],
        [1],
        "ab",
    ),  # nothing was saved yet
    "in the first copy": ([("aabb", at_step(1, 2, kill, SENDS), "b", 0, TO_DISK)], [1], "aa"),
    "one machine": ([("aa", at_step(8, 1), "", 7, ALONE)], [1], "aa"),
    "uneven": ([("aaab", at_step(8, 3), "a", 7, "")], [1], "b"),
    "every fifth": (
        [("ab", at_step(9, 1), "b", 5, "")],
        [1, *FIFTH],
        "a",
    ),  # the steps since are done again
    "a rank hangs": ([("ab", at_step(8, 1, hang, SENDS), "", 8, "")], [1, "--timeout", 5], "ab"),
    "killed as it saves, 1": ([("ab", at_step(8, 1, kill, SAVES), "", 7, "")], [1], "ab"),
    "killed as it saves, 3": ([("ab", at_step(8, 1, kill, SAVES), "", 7, "")], [3], "ab"),
    "killed as it receives": (
        [("aabb", at_step(8, 0, kill, RECEIVES), "", 8, "")],
        [1],
        "aabb",
    ),  # each has its own
    "one comes back": (
        [("aabb", at_step(8, 2), "", 7, ""), ("aa", at_step(11, 0), "", 10, "")],
        [1],
        "bbaa",
    ),
}
LIVES = [("all in one", ALL_IN_ONE, [1], "ab")]
LIVES += [pytest.param(name, *rest, marks=pytest.mark.slow) for name, rest in LONG.items()]


@pytest.mark.parametrize("name, lives, flags, last", LIVES)
def test_lives(work, uninterrupted, name, lives, flags, last):
    """Killed, and memory lost with the machine: the job goes on at the very next step, on what is
    left, and no bit differs."""
    name, since, said = re.sub(r"\W+", "_", name), 0, ""
    for machines, then, lost, step, words, *own in [*lives, (last, None, "", 12, "")]:
        result = train(work, name, machines, "--zero_stage", *flags, *own, then=then)
        assert (result.code == 0) == (then is None) and said in result.errors, result.errors
        assert re.findall(r"^resumed from .* at step (\d+)$", result.errors, re.M) == [
            str(since)
        ] * (since > 0)
        first = re.search(r"^step +(\d+) \|", result.errors, re.M)
        assert not first or int(first[1]) == since + 1
        logged = max(steps(work, name), default=0)
        assert logged <= step or "--mirror" in flags or TO_DISK in words, (
            "a step is going to be done twice"
        )
        for machine in lost:
            shutil.rmtree(work / f"{name}_{machine}")
        since, said = step, words
    assert steps(work, name) == list(range(1, 13))
    for column in ("loss", "val_loss", "grad_norm"):
        assert set(compare(work, "uninterrupted", name, column).values()) == {0.0}
    for machine in last:  # the job is done
        assert not list((work / f"{name}_{machine}").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_soak(tmp_path, stage):
    """Two minutes of random events. The seed is printed; --seed repeats it."""
    command = [sys.executable, "-m", "measure.elastic", "--soak", "2", "--zero_stage", str(stage)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1200)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "every step once in the log, and no bit differs" in result.stdout


SIZES = [
    (1, "aabb"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [(3, "abc"), (1, "aaa"), (3, "aaa")]),
]


@pytest.mark.parametrize("stage, machines", SIZES)
def test_refusals(work, stage, machines):
    """No room in the memory: for a slot, and beside it another one, or all of a step after a loss.
    Or a folder that another job holds for as long as it lives."""

    def full():
        shutil.disk_usage = lambda path: SimpleNamespace(free=0)

    name, model = f"room{stage}{machines}", ("--zero_stage", stage, "--n_embd", 128)
    result = train(work, name, machines, *model, then=full)
    assert result.code == 2 and "has room for 0.0 MB, and needs " in result.errors
    needed = 1e6 * float(re.search(r"needs ([0-9.]+) MB", result.errors)[1])
    assert train(work, name, machines, *model, then=at_step(3, 0, kill, COPIED)).code != 0
    memory = [next((work / f"{name}_{machine}").iterdir()) for machine in machines]
    held = os.open(memory[0], os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    result = train(work, name, machines, *model)
    os.close(held)
    assert (
        result.code == 2
        and f"{name}_a" in result.errors
        and "is in use by another job" in result.errors
    )
    slots = [max(folder.glob("step*")) for folder in memory]
    assert {int(slot.name[4:13]) for slot in slots} == {3}
    sizes = [{path.name: path.stat().st_size for path in slot.iterdir()} for slot in slots]
    step, whole = (
        max(sum(slot.values()) for slot in sizes),
        sum(functools.reduce(operator.or_, sizes).values()),
    )
    # It counts Adam's states and weights in fp32, as if every machine had all.
    assert step + max(step, whole) <= needed <= 1.75 * (step + max(step, whole))


# -----------------------------------------------------------------------------
# a script that is not ours

# With a frozen layer and two groups. At a resume all has other values, so what is not restored is
# seen.
ENGINE = """
import os, signal, sys, threading
import deepspeed, torch
import toy


def two_groups(parameters):
    first, *others = parameters
    return torch.optim.AdamW([{"params": others}, {"params": [first], "lr": 1e-3}], lr=1e-2)


toy.begin()
engine = toy.make(stage, optimizer=two_groups, micro=2, seed=1 + os.path.exists("record"))


def number():
    return float(sum(p.detach().norm() for p in engine.module.parameters()))
"""
# A step is that of own_loop.py. Rank 0 writes down what is done, and a number that all ranks have.
STEPS = f"""
exec(open({str(ROOT / "examples" / "own_loop.py")!r}).read())
one_step = train_step


def train_step(engine, dataset, step):
    if os.environ.get("KILLED") == os.environ["RANK"] and step == done + int(os.environ["STEP"]):
        threading.Timer(float(os.environ["AFTER"]), os.kill, [os.getpid(), signal.SIGKILL]).start()
    one_step(engine, dataset, step)
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


def own_script(folder, total, mirrored):
    """The lines of docs/elastic.md, around an engine that is not ours; they record what they do."""
    (lines,) = re.findall(
        r"```python\n(.*?Mirror\(.*?)```", (ROOT / "docs" / "elastic.md").read_text(), re.S
    )
    lines = lines.replace('"/dev/shm/job"', 'os.environ["MIRROR_FOLDER"]')
    if not mirrored:
        lines = lines.replace("mirror.gather(folder)", "folder").replace(
            "if step == steps:\n    mirror.close()\n", ""
        )
        lines = "".join(line for line in lines.splitlines(True) if "irror" not in line)
    done = r"mirror\.save\({" if mirrored else r"train_step\("
    lines = re.sub(r"(.*load_checkpoint.*\n.*\n)", r'\1record("from", done)\n', lines)
    lines = re.sub(rf"(.*{done}.*\n)", r'\1    record("did", step, loss)\n', lines)
    values = f"batch, micro, stage, steps, every, folder = 12, 2, 2, {total}, 100, 'c'\n"
    lines = lines.replace("...  # deepspeed.initialize()\n", ENGINE + STEPS)
    (folder / "own.py").write_text(f"import os\n{values}{lines}")


def recorded(folder):
    """[(step, its number)] that were done, and {step} that they resumed from."""
    words = [line.split() for line in (folder / "record").read_text().splitlines()]
    did = [(int(word[1]), float(word[2])) for word in words if word[0] == "did"]
    return did, {int(word[1]) for word in words if word[0] == "from"}


def own_machines(**changes):
    """A patch: each rank is on a machine of its own."""

    def patch():
        machine = Path(f"machine{os.environ['RANK']}").resolve()
        os.environ |= {"MIRROR_FOLDER": str(machine), "LOCAL_RANK": "0"} | changes

    return patch


@pytest.mark.parametrize("kills", [0, 1, pytest.param(20, marks=pytest.mark.slow)])
def test_lines_for_other_scripts(tmp_path, kills):
    """At ZeRO-2 with a frozen layer and two groups. 4 ranks of which 3 divide the batch are told to
    stop after step 5. With a mirror: one of three machines is killed, at any moment of a step. No
    step is done twice, and the weights are those of a run that nothing happened to."""
    total, script, dice = 20 + 15 * kills, tmp_path / "own.py", random.Random(7)
    (tmp_path / "alone").mkdir()
    own_script(tmp_path / "alone", total, mirrored=False)
    run(tmp_path / "alone", 1, tmp_path / "alone" / "own.py")
    wanted = dict(recorded(tmp_path / "alone")[0])
    own_script(tmp_path, total, mirrored=kills > 0)
    result = launch(tmp_path, 4, script, patch=own_machines(TOLD="1"))
    assert result.code == 143 and max(recorded(tmp_path)[0])[0] == 5, result.errors
    for number in range(kills):
        rank, step, seconds = map(
            str, (dice.randrange(3), dice.randrange(1, 8), dice.uniform(0, 0.05))
        )
        result = launch(
            tmp_path, 3, script, patch=own_machines(KILLED=rank, STEP=step, AFTER=seconds)
        )
        assert result.code != 0, f"{number} kills, and the job is done"
        assert "back to the disk" not in result.out
        shutil.rmtree(tmp_path / f"machine{rank}")
    assert launch(tmp_path, 3 if kills else 2, script, patch=own_machines()).code == 0
    did, resumed = recorded(tmp_path)
    done = [step for step, _ in did]
    assert len(done) == len(set(done)) and {*done, *resumed} - {0} == set(range(1, total + 1))
    assert max(abs(number - wanted[step]) for step, number in did) < 1e-5
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


TAGS = ["global_step6", "global_step8"]  # of every second one the last two
DISKS = [("a", "cb", "ab"), ("a", "b", "aabb"), ("b", "ca", "bbaa")]
DISKS = [pytest.param(stage, *disks, marks=pytest.mark.slow) for stage in (1, 3) for disks in DISKS]


@pytest.mark.parametrize("stage, lost, replaced, machines", [(1, "a", "cb", "ab"), *DISKS[1:]])
def test_disks_of_their_own(work, uninterrupted, stage, lost, replaced, machines):
    """Each has the shards of its own ranks. Where a machine is replaced by an empty one, there is
    no start from scratch, and what is missing is named; when its disk is back, they go on."""
    name = f"disks{stage}{machines}"

    def train(machines, then=None):
        flags = (
            "--exact",
            "--elastic",
            "--keep",
            2,
            "--checkpoint_interval",
            2,
            "--zero_stage",
            stage,
        )
        patch = on_disks(name, machines, then)
        return launch(
            work,
            len(machines),
            "examples.train_elastic",
            *COMMON,
            *flags,
            "--run_name",
            name,
            patch=patch,
        )

    assert train("aabb", at_step(10, 0)).code != 0
    for machine, ranks in (("a", "01"), ("b", "23")):
        assert (
            sorted(path.name for path in (work / f"{name}_{machine}").iterdir() if path.is_dir())
            == TAGS
        )
        shards = sorted(
            path.name for path in (work / f"{name}_{machine}" / TAGS[1]).glob("*optim_states.pt")
        )
        assert "".join(shard.split("_")[3] for shard in shards) == ranks
    (work / f"{name}_{lost}").rename(work / "away")
    (work / f"{name}_b" / "latest").unlink(
        missing_ok=True
    )  # rank 0 alone writes it, unless train.py saves
    result = train(
        replaced, then=lambda: os.dup2(2, 1)
    )  # all ranks' errors are kept, and of one what it prints
    assert result.code != 0 and steps(work, name) == list(range(1, 10))
    first = (
        "zero_pp_rank_0_mp_rank_00" if stage == 3 else "mp_rank_00_model_states.pt is on no machine"
    )
    assert (first if lost == "a" else "zero_pp_rank_2_mp_rank_00") in result.errors
    (work / "away").rename(work / f"{name}_{lost}")
    result = train(machines)
    assert result.code == 0 and "at step 8\n" in result.out, result.errors
    assert steps(work, name) == list(range(1, 13))
    assert set(compare(work, "uninterrupted", name).values()) == {0.0}


AGAIN = """
import universal
from universal import mirror

if what == "load":
    _, state = universal.load_checkpoint(engine, mirror.gather(sys.argv[2]))
else:
    state = {"save": what}
    for _ in range(2 * engine.gradient_accumulation_steps()):
        engine.backward(engine(torch.full((2, 8), float(len(what)))))
        engine.step()
    engine.save_checkpoint(sys.argv[2], tag="t", client_state=state)
with deepspeed.zero.GatheredParameters([*engine.module.parameters()]):
    print(state["save"], number())
"""


@pytest.mark.parametrize("stage", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_saved_again_by_fewer(tmp_path, stage):
    """3 machines save a checkpoint, then 2 of them, by plain engine.save_checkpoint(), under the
    same name. The third one joins again, with shards of the first save, and all continue from the
    second."""

    def play(machines, what):
        (tmp_path / "again.py").write_text(f"stage, what = {stage}, {what!r}\n{ENGINE}{AGAIN}")
        return run(
            tmp_path, len(machines), tmp_path / "again.py", patch=on_disks("disk", machines)
        ).splitlines()

    *_, first = play("caabbb", "first")
    *_, second = play("ab", "second")
    assert first != second
    *_, loaded = play("cab", "load")
    assert loaded == second
    for machine in "cab":
        shards = sorted((tmp_path / f"disk_{machine}").glob("t/*optim_states.pt"))
        assert [path.name.split("_rank_")[1] for path in shards] == ["0_mp", "1_mp"]
