"""What keeps load_checkpoint() from going on is one line, the same on all ranks, and soon: no rank
waits for ever."""

import contextlib
import datetime
import json
import os
import re
import signal
import time
import traceback
from pathlib import Path

import deepspeed
import plants
import pytest
import torch

import universal
from tests.support.commands import is_rank, slow
from tests.support.ranks import launch, run
from tests.support.toy import begin, make
from universal import resume as resume_module
from universal.checkpoint import zero
from universal.errors import RankFailed, RankSilent
from universal.load import collective, loader, reader, reshard

SCRIPT = "tests/ranks/damage.py"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a checkpoint of 3 ranks at ZeRO-1."""
    folder = tmp_path_factory.mktemp("saved")
    run(folder, 3, SCRIPT, 1, "save")
    return folder


def refusals(folder, *ranks):
    """What each of these ranks says."""
    lines = [json.loads((folder / f"outcome.{rank}.json").read_text())["error"] for rank in ranks]
    assert "\n" not in "".join(lines)
    return lines


def test_machines_without_a_shared_folder(saved):
    """A machine that has only the shards of its own ranks."""

    def patch():
        def look(folder):
            return {name: size for name, size in sizes.items() if "rank_2_" not in name}

        sizes = loader.sizes_of(saved / "t")
        if is_rank(1):
            loader.sizes_of = look
            reader.socket.gethostname = lambda: "another"

    run(saved, 2, SCRIPT, 1, "load", ".", patch=patch)
    refusal, other_refusal = refusals(saved, 0, 1)
    assert refusal == other_refusal and "must be shared, or mirror.gather() before" in refusal


def test_elements_that_no_rank_holds(saved):
    """The sum over all ranks tells, and all say it."""

    def patch():
        def less(engine, group):
            if is_rank(1):
                engine.flats[0].fragments.pop()
            return check_cover(engine, group)

        check_cover = reshard.check_cover
        reshard.check_cover = less

    run(saved, 2, SCRIPT, 1, "load", ".", patch=patch)
    refusal, other_refusal = refusals(saved, 0, 1)
    assert refusal == other_refusal
    placed, numel = map(int, re.findall(r"the ranks hold (\d+) of (\d+) elements", refusal)[0])
    assert placed < numel


def leave_where_a_rank_is_silent():
    """A patch: a process that is told so writes it down, and waits for nobody as it exits."""

    def load_or_leave(*args, **options):
        try:
            return load(*args, **options)
        except RankSilent as error:
            path = Path(f"outcome.{os.environ['RANK']}.json")
            path.write_text(json.dumps({"error": str(error)}))
            os._exit(1)

    load = universal.load_checkpoint
    universal.load_checkpoint = load_or_leave


@pytest.mark.parametrize(
    "by, gone", [(signal.SIGKILL, 1), (signal.SIGSTOP, 1), (signal.SIGSTOP, 0)]
)
def test_a_rank_that_vanishes(saved, by, gone):
    """The others end at once when it dies, and after the time that is set when it is stopped; rank
    0 names it, unless it died as they met. Rank 0 has the store, which then answers nobody."""
    (saved / "options.json").write_text(json.dumps({"timeout": 3}))

    def patch():
        def vanish(*args, **options):
            if is_rank(gone):
                os.kill(os.getpid(), by)
            request(*args, **options)

        request = reader.TensorReader.request
        reader.TensorReader.request = vanish
        leave_where_a_rank_is_silent()

    began = time.monotonic()
    launch(saved, 3, SCRIPT, 1, "load", ".", patch=patch, limit=20, grace=3)
    of_first, of_rank_2 = refusals(saved, 1 - gone, 2)
    assert time.monotonic() - began < 25
    assert "a rank does not answer" in of_rank_2, of_rank_2
    named = f"rank {gone} is not there|a rank was there a moment ago" if gone else "rank 0 is not"
    assert re.search(named, of_first), of_first


def test_a_rank_that_vanishes_where_it_has_met(saved):
    """Rank 0 has heard of all, and does not know which one does not hear it."""

    def patch():
        @contextlib.contextmanager
        def vanishing(*args):
            with telling(*args):
                yield
            if is_rank(1):
                os.kill(os.getpid(), signal.SIGKILL)

        telling = collective.telling
        collective.telling = vanishing
        leave_where_a_rank_is_silent()

    launch(saved, 3, SCRIPT, 1, "load", ".", patch=patch, limit=20, grace=3)
    of_first, of_rank_2 = refusals(saved, 0, 2)
    assert "a rank was there a moment ago, and is not now" in of_first, of_first
    assert "a rank does not answer" in of_rank_2, of_rank_2


@pytest.mark.parametrize("stage", [1, 3])
def test_a_load_outlasts_the_groups(tmp_path, stage):
    """A rank may read for longer than DeepSpeed's groups wait; each minute, a line of rank 0 names
    it. Rank 1's names rank 0, in an output of its own."""

    def main():
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed("gloo", timeout=datetime.timedelta(seconds=3))
        engine = make(stage)
        engine.save_checkpoint(".", tag="t")
        collective.MINUTE = 1
        for owner, name, rank in (
            (reader.TensorReader, "fetch", 1),
            (reshard, "restore_module", 1),
            (reader, "without_tensors", 0),
        ):
            good = getattr(owner, name)

            def slow(*args, good=good, rank=rank, **options):
                if is_rank(rank):
                    time.sleep(4)
                return good(*args, **options)

            setattr(owner, name, slow)
            assert universal.load_checkpoint(engine, ".", timeout=30)[0]
            setattr(owner, name, good)

    said = run(tmp_path, 2, main).splitlines()
    assert said.count("universal: rank 0 waits for rank 1: 3 min") == 2, said


OUR_BUGS = [  # and the rank that has it
    # Rank 0 alone describes.
    (reader, "without_tensors", 0),
    (reader, "check_same_step", 0),
    (zero, "differences", 0),
    (loader, "choose_tag", 0),
    (loader, "compare", 1),
    (reshard, "read_states", 1),
]


def test_our_own_bug_is_no_damage(saved):
    """It ends a load without a tag, though the older checkpoint would load, and the rank that has
    it keeps its traceback."""

    def main():
        begin()
        engine = make(1)
        for module, function, rank in OUR_BUGS:
            good = getattr(module, function)

            def bad(*args, module=module, function=function, rank=rank, good=good):
                setattr(module, function, good)
                return {}["planted"] if is_rank(rank) else good(*args)

            setattr(module, function, bad)
            with pytest.raises(RankFailed, match="^KeyError: 'planted'$") as raised:
                universal.load_checkpoint(engine, ".", timeout=30)
            text = "".join(traceback.format_exception(raised.value))
            assert ('return {}["planted"]' in text) == is_rank(rank), text
            setattr(module, function, good)

    assert "passed over" not in run(saved, 2, main)


@pytest.mark.parametrize(
    "route, ranks, every",
    [("ZeRO-3", 3, 23)] + [slow(route, 3 if "ZeRO" in route else 2, 1) for route in plants.ROUTES],
)
def test_an_error_anywhere(tmp_path, route, ranks, every):
    """At the first and at the last call of each function of a load, on rank 0 or 1: all ranks end
    with that error, soon, and the engine can load after that."""
    run(tmp_path, ranks, plants.main, route, every)
    assert (tmp_path / "failures").read_text() == ""


def test_an_error_before_all_have_met(tmp_path):
    """Rank 1 fails while rank 0 still makes its process group: no other rank waits for that one."""

    def late(*args):
        group = gloo_group(*args)
        if is_rank(0):
            time.sleep(1)
        return group

    def patch():
        collective.gloo_group = late

    def main():
        torch.distributed.init_process_group("gloo")
        began = time.monotonic()
        with pytest.raises(MemoryError), collective.process_group(60) as ranks:
            if ranks.rank == 1:
                raise MemoryError
        assert time.monotonic() - began < 30
        torch.distributed.barrier()

    gloo_group = collective.gloo_group
    run(tmp_path, 3, main, patch=patch)


def test_a_rank_that_does_not_connect(tmp_path):
    """The others wait as long as told, and not as long as the store, and the environment and the
    store are as before: other processes may be in a group that a script makes."""

    def main():
        torch.distributed.init_process_group("gloo")
        store = torch.distributed.distributed_c10d._get_default_store()
        before = dict(os.environ), store.timeout
        gloo = torch.distributed.ProcessGroupGloo
        if is_rank(1):
            torch.distributed.ProcessGroupGloo = {}.__getitem__
        began = time.monotonic()
        with pytest.raises(TypeError if is_rank(1) else RankSilent), collective.process_group(5):
            pass
        assert time.monotonic() - began < 4
        torch.distributed.ProcessGroupGloo = gloo
        os.environ.pop(collective.CARD, None)
        before[0].pop(collective.CARD, None)
        assert (dict(os.environ), store.timeout) == before
        with collective.process_group(60) as group:
            assert group.all_gather(group.rank) == [0, 1, 2]

    run(tmp_path, 3, main)


OPERATIONS = {
    "meet": lambda group: group.meet(),
    "all_gather": lambda group: group.all_gather(group.rank),
    "exchange": lambda group: group.exchange([group.rank, None, "a"]),
    "sum": lambda group: group.sum([1]),
    "on_rank_0": lambda group: group.on_rank_0(lambda: "a"),
    "the end": lambda group: None,
}


def test_blocks_in_blocks(tmp_path):
    """What one rank fails with in a block, the others raise in whatever they do meanwhile, and all
    go on after that block. The lowest rank's error wins, on all; each rank keeps its traceback."""

    def fail(group, failing, operation, words):
        with group.all_or_none():
            if group.rank in failing:
                raise KeyError(f"{words} {group.rank}")
            operation(group)

    def main():
        torch.distributed.init_process_group("gloo")
        with collective.process_group(20) as group:
            for name, operation in OPERATIONS.items():
                for failing in ({0}, {1}, {2}, {0, 2}, {1, 2}, {0, 1, 2}):
                    with pytest.raises(RankFailed) as raised:
                        fail(group, failing, operation, name)
                    assert str(raised.value) == f"KeyError: '{name} {min(failing)}'"
                    cause = raised.value.__cause__
                    assert repr(cause) == (
                        f'KeyError("{name} {group.rank}")' if group.rank in failing else "None"
                    ).replace('"', "'")
                    assert group.all_gather(group.rank) == [0, 1, 2]
            error = MemoryError(group.rank)
            with pytest.raises(MemoryError, match="1") as raised, group.all_or_none():
                if group.rank:
                    raise error
            assert (raised.value is error) == (group.rank == 1)
        # One has left the inner block, and fails outside.
        for name, operation in OPERATIONS.items():
            for failing in range(3):
                words = f"KeyError: '{name}'"
                with pytest.raises(RankFailed, match=words), collective.process_group(20) as group:
                    with group.all_or_none():
                        group.meet()
                    if group.rank == failing:
                        raise KeyError(name)
                    with group.all_or_none():
                        operation(group)
                    with pytest.raises(collective.OtherFailed):
                        group.meet()
                    raise collective.OtherFailed

    run(tmp_path, 3, main)


def test_what_it_needs(monkeypatch):
    """A DeepSpeed that is too old, and a second copy of the package, are each one line before
    anything is read."""
    monkeypatch.setattr(loader.deepspeed, "__version__", "0.15.4+cpu")
    too_old = r"needs DeepSpeed 0\.16\.4 or newer, and finds 0\.15\.4"
    with pytest.raises(universal.CheckpointError, match=too_old):
        resume_module.check_requirements("nowhere", None)
    copy = "/elsewhere/loader.py"
    monkeypatch.setattr(loader.deepspeed.DeepSpeedEngine, "universal", copy, raising=False)
    with pytest.raises(universal.CheckpointError, match=f"two copies of universal: {copy} is"):
        universal.install()
