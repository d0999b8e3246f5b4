"""Shards in memory, twice: whatever dies, the next start goes on from the very step, on the ranks that are left, and no
bit differs. Machines are played: those of a run differ in MIRROR_ROOT, and what a dead one had is removed."""

import csv
import fcntl
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.ranks import compare, launch, run

COMMON = ("--n_embd", 32, "--seq_len", 16, "--n_layer", 1, "--train_batch_size", 24, "--steps", 12, "--warmup_steps", 4)
COMMON = (*COMMON, "--train_micro_batch_size_per_gpu", 2, "--checkpoint_interval", 100, "--eval_interval", 3)


def steps(work, run_name):
    with open(work / "logs" / f"{run_name}.csv", newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file)]


@pytest.fixture(scope="module", autouse=True)
def uninterrupted(work):
    run(work, 1, "train.py", *COMMON, "--exact", "--run_name", "uninterrupted", "--checkpoint_dir", "uninterrupted")


def on_machines(name, *names, then=None):
    """A patch: the rank's machine is names[rank]; then() runs after that."""

    def patch():
        os.environ["MIRROR_ROOT"] = str(Path(f"{name}_{names[int(os.environ['RANK'])]}").resolve())
        if then:
            then()

    return patch


def train(work, name, machines, *arguments, then=None, launch=launch, **options):
    """One rank on each of `machines`, which may name one several times."""
    common = ("--exact", "--elastic", "--mirror", 1, "--run_name", name, "--checkpoint_dir", name)
    patch = on_machines(name, *machines, then=then)
    return launch(work, len(machines), "train.py", *COMMON, *common, *arguments, patch=patch, **options)


def memory(work, name, machine):
    (folder,) = (work / f"{name}_{machine}").iterdir()
    return folder


def lose(work, name, *machines):
    for machine in machines:
        shutil.rmtree(work / f"{name}_{machine}")


def goes_on(work, name, machines, step, *arguments):
    """Start again on other machines: it does all steps after `step`, and the log has each step once."""
    out = train(work, name, machines, *arguments, launch=run)
    done = [line for line in out.splitlines() if line.startswith("step ")]
    assert len(done) == 12 - step and done[0].split()[1] == str(step + 1)
    assert steps(work, name) == list(range(1, 13))
    for column in ("loss", "val_loss", "grad_norm"):
        assert set(compare(work, "uninterrupted", name, column).values()) == {0.0}
    for machine in machines:  # the job is done
        assert not list((work / f"{name}_{machine}").iterdir())
    return out


def stops(rank, step, name="data.global_batch", what=signal.SIGKILL):
    """That rank is killed before the call of a function in that step; by default when it draws the step's data."""

    def then():
        import data
        import mirror

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


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_machine_dies(work, stage):
    """2 of 4 ranks are killed in step 8, and their machine's memory is gone: step 8 is the next one, on 2 ranks."""
    name = f"dies{stage}"
    result = train(work, name, "aabb", "--zero_stage", stage, then=stops(2, 8))
    assert result.code != 0 and steps(work, name) == list(range(1, 8)), result.errors
    lose(work, name, "b")
    goes_on(work, name, "aa", 7, "--zero_stage", stage)


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("stage", [1, 3])
def test_killed_while_it_sends(work, stage, rank):
    """Step 8 is done, but not held twice, and not in the log: step 7 is, and 8 is done for the first time."""
    name = f"sends{stage}{rank}"
    result = train(work, name, "aabb", "--zero_stage", stage, then=stops(rank, 8, "mirror.exchange"))
    assert result.code != 0 and steps(work, name) == list(range(1, 8)), result.errors
    assert len(list(memory(work, name, "a").glob("step*"))) == 2
    lose(work, name, "ab"[rank // 2])
    left = "ba"[rank // 2]
    goes_on(work, name, 2 * left, 7, "--zero_stage", stage)


def test_killed_while_it_receives(work):
    """Half a file is no file. Each machine has its own, so that step 8 is whole."""

    def then():
        rename = Path.rename

        def renaming(self, target):
            if self.name == ".part0" and "/step000000008" in str(target):
                os.kill(os.getpid(), signal.SIGKILL)
            return rename(self, target)

        Path.rename = renaming

    train(work, "half", "aabb", then=then)
    assert (memory(work, "half", "a") / ".part0").is_file() and max(steps(work, "half")) == 7
    goes_on(work, "half", "aabb", 8)


def test_killed_in_the_first_copy(work):
    """There is no step before it, in memory or on the disk: the job starts anew, and says so."""
    train(work, "first", "aabb", then=stops(2, 1, "mirror.exchange"))
    lose(work, "first", "b")
    assert "back to the disk, first, at step 0" in goes_on(work, "first", "aa", 0)


@pytest.mark.parametrize("rank", range(4))
def test_killed_when_the_copies_are_there(work, rank):
    """One machine has still the older step, too; of step 8 all is there, but perhaps not its row in the log."""
    name = f"older{rank}"
    train(work, name, "aabb", then=stops(rank, 8, "Mirror.keep"))
    assert max(steps(work, name)) in (7, 8)
    lose(work, name, "ab"[rank // 2])
    goes_on(work, name, 2 * "ba"[rank // 2], 8)


def test_machines_that_are_not_neighbours(work):
    """b and d of four are lost; what they had is on c and a, and neither of these has all."""
    train(work, "four", "abcd", then=stops(1, 8))
    lose(work, "four", "b", "d")
    assert len(list(memory(work, "four", "a").glob("step*/*"))) == 3  # of 5 files
    goes_on(work, "four", "ac", 7)


def test_uneven_machines(work):
    train(work, "uneven", "aaab", then=stops(3, 8))
    lose(work, "uneven", "a")
    goes_on(work, "uneven", "b", 7)


@pytest.mark.parametrize("saved", [0, 5])
def test_two_neighbours(work, saved):
    """Shards are lost: back to the disk, or to the start where nothing was saved yet."""
    name = f"neighbours{saved}"
    interval = ("--checkpoint_interval", saved or 100)
    train(work, name, "abc", *interval, then=stops(1, 8))
    lose(work, name, "b", "c")
    out = goes_on(work, name, "ab", saved, *interval)
    assert f"back to the disk, {name}, at step {saved}" in out


def test_an_old_machine_comes_back(work):
    """Its memory is of step 7, and the job went on without it."""
    train(work, "back", "aabb", then=stops(2, 8))
    shutil.copytree(work / "back_b", work / "kept")
    lose(work, "back", "b")
    train(work, "back", "aa", then=stops(0, 11))
    shutil.move(work / "kept", work / "back_b")
    goes_on(work, "back", "bbaa", 10)


def test_the_disk_is_newer(work):
    """Told to stop, the job has saved step 9; the memory, of every fifth step, is of step 5."""
    result = train(work, "newer", "ab", "--mirror", 5, then=stops(0, 9, what=signal.SIGTERM))
    assert result.code == 143
    assert "back to the disk, newer, at step 9" in goes_on(work, "newer", "abb", 9, "--mirror", 5)


def test_every_fifth_step(work):
    """The steps since the last copy are done again."""
    train(work, "fifth", "ab", "--mirror", 5, then=stops(1, 9))
    assert steps(work, "fifth") == list(range(1, 9))
    lose(work, "fifth", "b")
    goes_on(work, "fifth", "a", 5, "--mirror", 5)


def test_one_machine(work):
    """A rank dies, and nothing is lost; a line says against what it does not help."""
    train(work, "alone", "aa", then=stops(1, 8))
    assert "is of one machine: it survives processes that die, but not the machine" in goes_on(work, "alone", "aa", 7)


def test_a_rank_hangs_while_it_sends(work):
    """It is given up after --timeout seconds. No memory is lost: what each rank has of its own makes up step 8."""
    hang = stops(1, 8, "mirror.exchange", signal.SIGSTOP)
    result = train(work, "hangs", "ab", "--timeout", 5, then=hang, limit=60)
    assert result.code == 1 and "Timed out waiting 5000ms" in result.errors
    goes_on(work, "hangs", "ab", 8)


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
    return launch(work, len(machines), "train.py", *COMMON, *common, patch=on_disks(name, *machines, **options))


def saved_on_disks(work, name, stage):
    """By 4 ranks on machines a and b; each has the shards of its own ranks, of two steps."""
    then = stops(0, 10)
    train_on_disks(work, name, "aabb", "--zero_stage", stage, "--keep", 2, launch=launch, then=then)
    for machine in "ab":
        assert sorted(path.name for path in (work / f"{name}_{machine}").iterdir() if path.is_dir()) == TAGS
        shards = sorted(path.name for path in (work / f"{name}_{machine}" / TAGS[1]).glob("*optim_states.pt"))
        assert [shard.split("_")[3] for shard in shards] == [str(2 * "ab".index(machine) + i) for i in range(2)]


TAGS = ["global_step6", "global_step8"]  # of every second one the last two


@pytest.mark.parametrize("machines", ["ab", "aabb", "bbaa"])
@pytest.mark.parametrize("stage", [1, 3])
def test_disks_of_their_own(work, stage, machines):
    name = f"disks{stage}{machines}"
    saved_on_disks(work, name, stage)
    out = train_on_disks(work, name, machines, "--zero_stage", stage)
    assert "at step 8," in out and steps(work, name) == list(range(1, 13))
    assert set(compare(work, "uninterrupted", name).values()) == {0.0}


@pytest.mark.parametrize("machines, lost", [("b", "a"), ("ca", "b"), ("cb", "a")])
@pytest.mark.parametrize("stage", [1, 3])
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


# -----------------------------------------------------------------------------
# refusals


def test_refusals(work):
    """Each one line, said before the first step."""

    def refused(words, machines, *arguments, then=None, code=2, name="refused"):
        result = train(work, name, machines, *arguments, then=then)
        assert result.code == code and words in result.errors and "step    1" not in result.out, result.errors

    def small():
        shutil.disk_usage = lambda path: SimpleNamespace(free=400_000)

    refused("has room for 0.4 MB, and needs ", "ab", then=small)
    train(work, "refused", "ab", then=stops(1, 3))
    refused("seed is 1337 in ", "ab", "--seed", 1)


def test_another_job(work):
    """It holds the folder for as long as it lives."""
    train(work, "lock", "ab", then=stops(1, 3))
    held = os.open(memory(work, "lock", "b"), os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    result = train(work, "lock", "ab")
    os.close(held)
    assert result.code == 2 and "lock_b" in result.errors and "is in use by another job" in result.errors
    goes_on(work, "lock", "ab", 2)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("machines", ["aabb", "aaa", "abc"])
def test_room(work, stage, machines):
    """What is counted before the first step: a slot, and beside it another one, or all of a step after a loss."""

    def room():
        shutil.disk_usage = lambda path: SimpleNamespace(free=0)

    name = f"room{stage}{machines}"
    result = train(work, name, machines, "--zero_stage", stage, then=room)
    needed = float(re.search(r"needs ([0-9.]+) MB", result.errors)[1]) * 1e6
    shutil.rmtree(work / f"{name}_a")
    train(work, name, machines, "--zero_stage", stage, then=stops(0, 5, "Mirror.keep"))
    slots, everything = {}, {}
    for machine in machines:
        slot = max(memory(work, name, machine).glob("step*"))
        assert int(slot.name[4:13]) == 5
        slots[machine] = {path.name: path.stat().st_size for path in slot.iterdir()}
        everything |= slots[machine]
    whole, step = sum(everything.values()), max(sum(slot.values()) for slot in slots.values())
    # It counts Adam's states and weights in fp32, as if one machine had all model states.
    assert step + max(step, whole) <= needed <= 1.5 * (step + max(step, whole))
