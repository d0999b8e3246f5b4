"""Shards in memory, twice: whatever dies, the next start goes on from the very step, on the ranks that are left, and no
bit differs. Machines are played: those of a run differ in MIRROR_ROOT, and what a dead one had is removed."""

import csv
import fcntl
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT

from harness.ranks import compare, launch, run

COMMON = ("--n_embd", 32, "--seq_len", 16, "--n_layer", 1, "--train_batch_size", 24, "--steps", 12, "--warmup_steps", 4)
COMMON = (*COMMON, "--train_micro_batch_size_per_gpu", 2, "--checkpoint_interval", 100, "--eval_interval", 3)


def cases(quick, *rest):
    """Parameters of a test: those of `make test`, and those that `make test-all` adds."""
    return [*quick, *(pytest.param(*case, marks=pytest.mark.slow) for case in rest)]


def steps(work, run_name):
    with open(work / "logs" / f"{run_name}.csv", newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file)]


@pytest.fixture(scope="module", autouse=True)
def uninterrupted(work):
    names = ("--exact", "--run_name", "uninterrupted", "--checkpoint_dir", "uninterrupted")
    run(work, 1, "train_elastic.py", *COMMON, *names)


def on_machines(name, *names, then=None):
    """A patch: the rank's machine is names[rank]; then() runs after that."""

    def patch():
        os.environ["MIRROR_ROOT"] = str(Path(f"{name}_{names[int(os.environ['RANK'])]}").resolve())
        if then:
            then()

    return patch


def train(work, name, machines, *arguments, then=None, launch=launch, **options):
    """One rank on each of `machines`, which may name one several times."""
    common = ("--elastic", "--mirror", 1, "--run_name", name, "--checkpoint_dir", name)
    common += ("--exact",) * ("bf16" not in arguments)
    patch = on_machines(name, *machines, then=then)
    return launch(work, len(machines), "train_elastic.py", *COMMON, *common, *arguments, patch=patch, **options)


def memory(work, name, machine):
    (folder,) = (work / f"{name}_{machine}").iterdir()
    return folder


def lose(work, name, *machines):
    for machine in machines:
        shutil.rmtree(work / f"{name}_{machine}")


def goes_on(work, name, machines, step, *arguments, wanted="uninterrupted"):
    """Start again on other machines: it does all steps after `step`, and the log has each step once."""
    out = train(work, name, machines, *arguments, launch=run)
    done = [line for line in out.splitlines() if line.startswith("step ")]
    assert len(done) == 12 - step and done[0].split()[1] == str(step + 1)
    assert steps(work, name) == list(range(1, 13))
    for column in ("loss", "val_loss", "grad_norm"):
        assert set(compare(work, wanted, name, column).values()) == {0.0}
    for machine in machines:  # the job is done
        assert not list((work / f"{name}_{machine}").iterdir())
    return out


def stops(rank, step, name="data.global_batch", what=signal.SIGKILL):
    """That rank is killed before the call of a function in that step; by default when it draws the step's data."""

    def then():
        import data
        from universal import mirror

        place = {"data": data, "mirror": mirror, "Mirror": mirror.Mirror}[name.split(".")[0]]
        function, draw, now = getattr(place, name.split(".")[1]), data.global_batch, [0]

        def wrapped(*arguments, **options):
            if now[0] == step and os.environ["RANK"] == str(rank):
                os.kill(os.getpid(), what)
            return function(*arguments, **options)

        def drawing(text, seed, number, *sizes):
            now[0] = number or now[0]  # 0: validation
            return (wrapped if place is data else draw)(text, seed, number, *sizes)

        setattr(place, name.split(".")[1], wrapped)
        data.global_batch = drawing

    return then


SENDS, COPIED = "mirror.exchange", "Mirror.remove_others"
TO_DISK, ALONE = "back to the disk", "is of one machine: it survives a rank's death, not the machine's"
# What happens: ranks on machines; how they end; machines lost; machines left; last step that counts; arguments; words.
LIVES = [
    ("a machine dies", "aabb", stops(2, 8), "b", "aa", 7, [3], ""),
    ("not held twice", "aabb", stops(3, 8, SENDS), "b", "aa", 7, [1], ""),  # step 8 is done, and not in the log
    ("neighbours", "abc", stops(1, 8), "bc", "ab", 5, [1, "--checkpoint_interval", 5], TO_DISK),  # shards are lost
]
MORE = [
    ("not logged", "aabb", stops(0, 8, COPIED), "a", "bb", 8, [1], ""),  # perhaps; but held twice
    ("no neighbours", "abcd", stops(1, 8), "bd", "ac", 7, [1], ""),  # a and c have what b and d had, and neither all
    ("one machine", "aa", stops(1, 8), "", "aa", 7, [1], ALONE),
    ("a machine dies, 1", "aabb", stops(2, 8), "b", "aa", 7, [1], ""),
    ("a machine dies, 2", "aabb", stops(2, 8), "b", "aa", 7, [2], ""),
    ("not held twice, 0 at 1", "aabb", stops(0, 8, SENDS), "a", "bb", 7, [1], ""),
    ("not held twice, 0 at 3", "aabb", stops(0, 8, SENDS), "a", "bb", 7, [3], ""),
    ("not held twice, 3 at 3", "aabb", stops(3, 8, SENDS), "b", "aa", 7, [3], ""),
    ("not logged, 1", "aabb", stops(1, 8, COPIED), "a", "bb", 8, [1], ""),
    ("not logged, 2", "aabb", stops(2, 8, COPIED), "b", "aa", 8, [1], ""),
    ("neighbours at first", "abc", stops(1, 8), "bc", "ab", 0, [1], TO_DISK),  # nothing was saved yet
    ("in the first copy", "aabb", stops(2, 1, SENDS), "b", "aa", 0, [1], TO_DISK),
    ("uneven", "aaab", stops(3, 8), "a", "b", 7, [1], ""),
    ("every fifth", "ab", stops(1, 9), "b", "a", 5, [1, "--mirror", 5], ""),  # the steps since are done again
    ("a rank hangs", "ab", stops(1, 8, SENDS, signal.SIGSTOP), "", "ab", 8, [1, "--timeout", 5], ""),
]


@pytest.mark.parametrize("name, machines, then, lost, left, step, arguments, words", cases(LIVES, *MORE))
def test_lives(work, name, machines, then, lost, left, step, arguments, words):
    """Killed, and memory lost with the machine: the job goes on at the very next step, on what is left."""
    name, arguments = name.replace(" ", "_").replace(",", ""), ("--zero_stage", *arguments)
    assert train(work, name, machines, *arguments, then=then, limit=120).code != 0
    logged = max(steps(work, name), default=0)
    assert logged <= step or "--mirror" in arguments or words == TO_DISK, "a step is going to be done twice"
    lose(work, name, *lost)
    assert words in goes_on(work, name, left, step, *arguments)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bf16(work, stage):
    """On as many ranks as before, because sums in bf16 are not exact."""
    name, common = f"half{stage}", ("--dtype", "bf16", "--zero_stage", stage)
    run(
        work,
        2,
        "train_elastic.py",
        *COMMON,
        *common,
        "--run_name",
        f"bf16_{stage}",
        "--checkpoint_dir",
        f"bf16_{stage}",
    )
    train(work, name, "ab", *common, then=stops(1, 8))
    lose(work, name, "b")
    goes_on(work, name, "ab", 7, *common, wanted=f"bf16_{stage}")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_killed_while_it_saves(work, stage):
    """Half of what a rank saves is there, under the file's own name, but not in the slot."""

    def then():
        save = torch.save

        def saving(state, path, *arguments, **options):
            save(state, path, *arguments, **options)
            if (
                "optim_states" in str(path)
                and ".own1" in str(path)
                and max(steps(Path(), f"saves{stage}"), default=0) == 7
            ):
                os.truncate(path, os.path.getsize(path) // 2)
                os.kill(os.getpid(), signal.SIGKILL)

        torch.save = saving

    train(work, f"saves{stage}", "ab", "--zero_stage", stage, then=then)
    goes_on(work, f"saves{stage}", "ab", 7, "--zero_stage", stage)


@pytest.mark.slow
def test_killed_while_it_receives(work):
    """Half a file is no file. Each machine has its own, so that step 8 is whole."""

    def then():
        rename = Path.rename

        def renaming(self, target):
            if os.environ["RANK"] == "0" and self.suffix == ".part" and "/step000000008" in str(target):
                os.kill(os.getpid(), signal.SIGKILL)
            return rename(self, target)

        Path.rename = renaming

    train(work, "half", "aabb", then=then)
    assert list(memory(work, "half", "a").glob("step000000008*/*.part")) and max(steps(work, "half")) == 7
    goes_on(work, "half", "aabb", 8)


@pytest.mark.slow
def test_an_old_machine_comes_back(work):
    """Its memory is of step 7, and the job went on without it."""
    train(work, "back", "aabb", then=stops(2, 8))
    shutil.copytree(work / "back_b", work / "kept")
    lose(work, "back", "b")
    train(work, "back", "aa", then=stops(0, 11))
    shutil.move(work / "kept", work / "back_b")
    goes_on(work, "back", "bbaa", 10)


def test_two_attempts_at_a_step(work):
    """Files of the first attempt at step 8, which b brings back, do not make up a step with those of the second."""
    train(work, "twice", "ab", then=stops(1, 8, "mirror.exchange"))
    shutil.move(work / "twice_b", work / "away")
    train(work, "twice", "ac", then=stops(1, 8, "mirror.exchange"))
    lose(work, "twice", "c")
    shutil.move(work / "away", work / "twice_b")
    goes_on(work, "twice", "ab", 7)


def test_the_disk_is_newer(work):
    """Told to stop, the job has saved step 9; the memory, of every fifth step, is of step 5."""
    result = train(work, "newer", "ab", "--mirror", 5, then=stops(0, 9, what=signal.SIGTERM))
    assert result.code == 143
    assert "back to the disk, newer, at step 9" in goes_on(work, "newer", "abb", 9, "--mirror", 5)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_soak(tmp_path, stage):
    """Two minutes of random events. The seed is printed; --seed repeats it."""
    command = [sys.executable, ROOT / "demos" / "machines.py", "--soak", "2", "--zero_stage", str(stage)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1200)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "every step once in the log, and no bit differs" in result.stdout


# -----------------------------------------------------------------------------
# a script that is not ours

HEAD = """
import os, signal


def record(*words):
    if engine.global_rank == 0:
        with open("record", "a") as file:
            print(*words, file=file)
"""
INITIALIZE = """
import deepspeed, torch

torch.set_num_threads(1)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Linear(16, 8))
model[0].requires_grad_(False)  # from elsewhere, and only in the checkpoint
if os.path.exists("record") and "did" in open("record").read():
    torch.nn.init.zeros_(model[0].weight)
groups = [{"params": [model[2].weight, model[3].weight]}, {"params": [model[2].bias, model[3].bias], "lr": 1e-3}]
config = {
    "train_batch_size": batch, "train_micro_batch_size_per_gpu": micro, "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 1e-2}},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)


def train_step(engine, dataset, step):
    accumulation, rank = engine.gradient_accumulation_steps(), engine.global_rank
    for m in range(rank * accumulation, (rank + 1) * accumulation):
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(100 * step + m))
        engine.backward((engine(x) - x).square().mean())
        engine.step()
    if step == 5 and rank == 1 and os.environ.get("TOLD"):
        os.kill(os.getpid(), signal.SIGTERM)
    return float(engine.module[3].weight.detach().norm())
"""


def told_to_stop():
    os.environ["TOLD"] = "1"


def killed_in_between(rank, seconds):
    """A patch: that rank is killed so many seconds after it has gathered, wherever it is then."""

    def patch():
        from universal import mirror

        gather, own = mirror.Mirror.gather, os.environ["RANK"]
        os.environ |= {"MIRROR_FOLDER": str(Path(f"machine{own}").resolve()), "LOCAL_RANK": "0"}

        def gathering(self, folder):
            found = gather(self, folder)
            if own == str(rank):
                threading.Timer(seconds, os.kill, [os.getpid(), signal.SIGKILL]).start()
            return found

        mirror.Mirror.gather = gathering

    return patch


def own_script(folder, total, every, mirrored=True):
    """The lines of docs/elastic.md, around an engine that is not ours; they record what they do."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "elastic.md").read_text(), re.S)
    (lines,) = [block for block in blocks if "Mirror(" in block]
    lines = lines.replace('"/dev/shm/job"', 'os.environ["MIRROR_FOLDER"]')
    if not mirrored:
        lines = lines.replace("mirror.gather(folder)", "folder").replace("if step == steps:\n    mirror.close()\n", "")
        lines = "".join(line for line in lines.splitlines(True) if "irror" not in line)
    done = r"mirror\({" if mirrored else r"train_step\("
    lines = re.sub(r"(.*load_checkpoint.*\n)", r'\1record("from", state.get("step", 0))\n', lines)
    lines = re.sub(rf"(.*{done}.*\n)", r'\1    record("did", step, loss)\n', lines)
    values = f"batch, micro, steps, every, folder, dataset = 12, 2, {total}, {every}, 'c', None\n"
    (folder / "own.py").write_text(values + HEAD + lines.replace("...  # deepspeed.initialize()\n", INITIALIZE))


def recorded(folder):
    """([(step, loss)] that were done, {step} that they resumed from), and all is as before."""
    words = [line.split() for line in (folder / "record").read_text().splitlines()]
    (folder / "record").unlink()
    shutil.rmtree(folder / "c")
    did = [(int(word[1]), float(word[2])) for word in words if word[0] == "did"]
    return did, {int(word[1]) for word in words if word[0] == "from"}


def test_elastic_lines_for_other_scripts(tmp_path):
    """4 ranks of which 3 divide the batch, told to stop after step 5, then 2 ranks, then 3 of a job that is done."""
    own_script(tmp_path, 9, 3, mirrored=False)
    assert launch(tmp_path, 1, tmp_path / "own.py").code == 0
    wanted, _ = recorded(tmp_path)
    codes = [launch(tmp_path, ranks, tmp_path / "own.py", patch=told_to_stop).code for ranks in (4, 2, 3)]
    assert codes == [143, 0, 0]
    did, resumed = recorded(tmp_path)
    assert [step for step, _ in did] == list(range(1, 10)) and resumed == {0, 5, 9}
    assert max(abs(loss - dict(wanted)[step]) for step, loss in did) < 1e-5


@pytest.mark.parametrize("times", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_lines_for_other_scripts(tmp_path, times):
    """At ZeRO-2 with a frozen layer and two groups: one of three machines is killed, at any moment of a step. No step
    is done twice, and the weights are those of a run that nothing happened to."""
    total = 60 + 30 * times
    own_script(tmp_path, total, 100)
    assert launch(tmp_path, 3, tmp_path / "own.py", patch=killed_in_between(None, 0)).code == 0
    wanted, _ = recorded(tmp_path)
    dice = random.Random(7)
    for kills in range(times):
        rank = dice.randrange(3)
        result = launch(tmp_path, 3, tmp_path / "own.py", patch=killed_in_between(rank, dice.uniform(0, 0.6)))
        assert result.code != 0, f"{kills} kills, and the job is done"
        assert "back to the disk" not in result.out
        shutil.rmtree(tmp_path / f"machine{rank}")
    assert launch(tmp_path, 3, tmp_path / "own.py", patch=killed_in_between(None, 0)).code == 0
    did, resumed = recorded(tmp_path)
    done = [step for step, _ in did]
    assert len(done) == len(set(done)) and {*done, *resumed} - {0} == set(range(1, total + 1))
    assert max(abs(value - dict(wanted)[step]) for step, value in did) < 1e-5


# -----------------------------------------------------------------------------
# checkpoints on the disk of each machine


def on_disks(name, *names, then=None):
    """A patch: each machine, names[rank], has a folder of its own in the place of --checkpoint_dir."""

    def patch():
        rank = int(os.environ["RANK"])
        os.environ["LOCAL_RANK"] = str(names[:rank].count(names[rank]))
        sys.argv += ["--checkpoint_dir", str(Path(f"{name}_{names[rank]}").resolve())]
        if then:
            then()

    return patch


def train_on_disks(work, name, machines, *arguments, launch=run, **options):
    common = ("--exact", "--elastic", "--run_name", name, "--checkpoint_interval", 2, *arguments)
    return launch(work, len(machines), "train_elastic.py", *COMMON, *common, patch=on_disks(name, *machines, **options))


def saved_on_disks(work, name, stage):
    """By 4 ranks on machines a and b; each has the shards of its own ranks, of two steps."""
    then = stops(0, 10)
    train_on_disks(work, name, "aabb", "--zero_stage", stage, "--keep", 2, launch=launch, then=then)
    for machine in "ab":
        assert sorted(path.name for path in (work / f"{name}_{machine}").iterdir() if path.is_dir()) == TAGS
        shards = sorted(path.name for path in (work / f"{name}_{machine}" / TAGS[1]).glob("*optim_states.pt"))
        assert [shard.split("_")[3] for shard in shards] == [str(2 * "ab".index(machine) + i) for i in range(2)]


TAGS = ["global_step6", "global_step8"]  # of every second one the last two


@pytest.mark.parametrize(
    "stage, machines", cases([(3, "ab")], (1, "ab"), (1, "aabb"), (3, "aabb"), (1, "bbaa"), (3, "bbaa"))
)
def test_disks_of_their_own(work, stage, machines):
    name = f"disks{stage}{machines}"
    saved_on_disks(work, name, stage)
    out = train_on_disks(work, name, machines, "--zero_stage", stage)
    assert "at step 8\n" in out and steps(work, name) == list(range(1, 13))
    assert set(compare(work, "uninterrupted", name).values()) == {0.0}


EMPTY = [(1, "cb", "a")], (1, "b", "a"), (1, "ca", "b"), (3, "ca", "b"), (3, "b", "a"), (3, "cb", "a")


@pytest.mark.parametrize("stage, machines, lost", cases(*EMPTY))
def test_an_empty_disk(work, stage, machines, lost):
    """A machine is replaced by an empty one: no start from scratch, and what is missing is named."""
    name = f"empty{stage}{machines}"
    saved_on_disks(work, name, stage)
    shutil.rmtree(work / f"{name}_{lost}")
    (work / f"{name}_b" / "latest").unlink(missing_ok=True)  # rank 0 alone writes it, unless train.py saves
    said = {"then": lambda: os.dup2(2, 1)}  # launch() returns what all ranks say to stderr, and of one what it prints
    result = train_on_disks(work, name, machines, "--zero_stage", stage, launch=launch, **said)
    assert result.code != 0 and steps(work, name) == list(range(1, 10))
    missing = "zero_pp_rank_0_mp_rank_00" if stage == 3 else "mp_rank_00_model_states.pt is on no machine"
    assert (missing if lost == "a" else "zero_pp_rank_2_mp_rank_00") in result.errors


AGAIN = """
import os, sys
import deepspeed, torch
import universal
from universal import mirror

torch.set_num_threads(1)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed()
stage, what, folder = int(sys.argv[1]), sys.argv[2], sys.argv[4]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
config = {"train_batch_size": 12, "zero_optimization": {"stage": stage},
          "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 1e-2}}}
engine, *_ = deepspeed.initialize(model=model, config=config)
if what == "load":
    _, state = universal.load_checkpoint(engine, mirror.gather(folder))
else:
    state = {"save": what}
    for _ in range(2):
        engine.backward(engine(torch.full((12 // engine.dp_world_size, 8), float(len(what)))).square().mean())
        engine.step()
    engine.save_checkpoint(folder, tag="t", client_state=state)
with deepspeed.zero.GatheredParameters([*model.parameters()]):
    print(state["save"], float(sum(p.norm() for p in model.parameters())))
"""


@pytest.mark.parametrize("stage", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_saved_again_by_fewer(tmp_path, stage):
    """4 machines save a checkpoint, then 2 of them, by plain engine.save_checkpoint(), under the same name. A third one
    joins, with the first model states and a shard of 4, and all continue from the second save."""
    (tmp_path / "again.py").write_text(AGAIN)

    def play(machines, what):
        patch = on_disks("disk", *machines)
        return run(tmp_path, len(machines), tmp_path / "again.py", stage, what, patch=patch).splitlines()

    (first,), (second,) = play("cabd", "first"), play("ab", "second")
    assert first != second
    *_, loaded = play("cab", "load")
    assert loaded == second
    for machine in "cab":
        shards = sorted(
            path.name.split("_rank_")[1] for path in (tmp_path / f"disk_{machine}").glob("t/*optim_states.pt")
        )
        assert shards == ["0_mp", "1_mp"]


# -----------------------------------------------------------------------------
# refusals


def test_refusals(work):
    """No room in the memory, or a folder that another job holds for as long as it lives."""

    def small():
        shutil.disk_usage = lambda path: SimpleNamespace(free=400_000)

    result = train(work, "lock", "ab", then=small)
    assert result.code == 2 and "has room for 0.4 MB, and needs " in result.errors
    train(work, "lock", "ab", then=stops(1, 3))
    held = os.open(memory(work, "lock", "b"), os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    result = train(work, "lock", "ab")
    os.close(held)
    assert result.code == 2 and "lock_b" in result.errors and "is in use by another job" in result.errors
    goes_on(work, "lock", "ab", 2)


ROOMS = [], (1, "aabb"), (3, "abc"), (1, "aaa"), (1, "abc"), (2, "aabb"), (3, "aabb"), (3, "aaa")


@pytest.mark.parametrize("stage, machines", cases(*ROOMS))
def test_room(work, stage, machines):
    """What is counted before the first step: a slot, and beside it another one, or all of a step after a loss."""

    def room():
        shutil.disk_usage = lambda path: SimpleNamespace(free=0)

    name, model = f"room{stage}{machines}", ("--zero_stage", stage, "--n_embd", 128)
    result = train(work, name, machines, *model, then=room)
    needed = float(re.search(r"needs ([0-9.]+) MB", result.errors)[1]) * 1e6
    shutil.rmtree(work / f"{name}_a")
    train(work, name, machines, *model, then=stops(0, 5, "Mirror.remove_others"))
    slots, everything = {}, {}
    for machine in machines:
        slot = max(memory(work, name, machine).glob("step*"))
        assert int(slot.name[4:13]) == 5
        slots[machine] = {path.name: path.stat().st_size for path in slot.iterdir()}
        everything |= slots[machine]
    whole, step = sum(everything.values()), max(sum(slot.values()) for slot in slots.values())
    # It counts Adam's states and weights in fp32, as if every machine had all.
    assert step + max(step, whole) <= needed <= 1.75 * (step + max(step, whole))
