"""The converter by several processes: they share the work, and end together."""

import os
import resource
import signal
import time

import pytest

from tests.support import ROOT
from tests.support.commands import (
    at_event,
    converter,
    failed,
    makes_a_file,
    run_python,
    start_converter,
)
from tests.support.files import content
from tests.support.ranks import PORT
from universal import convert


def together(source, output, *flags, ranks=2, before=lambda rank: None, **environment):
    """What each of the processes has said. None waits a while for rank 0, which says what is
    wrong."""
    ends = []
    for rank in range(ranks):
        launched = {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(PORT),
        }
        launched |= environment

        def begin(rank=rank):
            before(rank)
            time.sleep = lambda seconds: None

        ends.append(start_converter(source, output, *flags, before=begin, **launched))
    return [end() for end in ends]


LAUNCHED = {
    "by_hand": (1, 3, ["--distributed"], {}),
    "by_deepspeed": (3, 2, ["--local_rank=0"], {}),
    "by_torchrun": (3, 2, [], {"TORCHELASTIC_RUN_ID": "1"}),
}


@pytest.mark.parametrize("stage, ranks, flags, more", LAUNCHED.values(), ids=LAUNCHED)
def test_processes_share_the_work(laid_out, tmp_path, stage, ranks, flags, more):
    """The result is the one of a single process, byte by byte, each process has written a part of
    it, and one line of figures comes out."""
    source = laid_out(stage)
    convert(source, tmp_path / "one" / "u")

    def spy(rank):
        at_event(1, makes_a_file, (tmp_path / f"rank{rank}").touch)

    ended = together(source, tmp_path / "many" / "u", *flags, ranks=ranks, before=spy, **more)
    assert [(process.code, process.err) for process in ended] == ranks * [(0, "")]
    figures = [process.out.count("3 parameters") for process in ended]
    assert figures == [1, *(ranks - 1) * [0]]
    assert content(tmp_path / "one") == content(tmp_path / "many")
    assert all((tmp_path / f"rank{rank}").exists() for rank in range(ranks))


@pytest.mark.slow
def test_torchrun(laid_out, tmp_path):
    """The same under the real one. (tests/lesson/test_launch.py has the deepspeed launcher.)"""
    source = laid_out(1)
    output = tmp_path / "many" / "u"
    convert(source, tmp_path / "one" / "u")
    launcher = f"-m torch.distributed.run --nproc-per-node 2 --master-port {PORT}".split()
    folders = ["--input_folder", source, "--output_folder", output]
    done = run_python(*launcher, ROOT / "ds_to_universal.py", *folders)
    assert done.returncode == 0 and done.stdout.count("3 parameters") == 1, done.stderr
    assert content(tmp_path / "one") == content(tmp_path / "many")


def test_environment_that_a_launcher_has_left(laid_out, tmp_path):
    """RANK and WORLD_SIZE without a launcher: it works alone, and waits for nobody. When told to,
    it needs both."""
    source = laid_out(1)
    done = converter(source, tmp_path / "u", RANK="1", WORLD_SIZE="4", MASTER_ADDR="nowhere")
    assert (done.code, done.err) == (0, "") and (tmp_path / "u").is_dir()
    for environment in ({"RANK": "0"}, {"RANK": "0", "WORLD_SIZE": "many"}):
        done = converter(source, tmp_path / "v", "--distributed", **environment)
        failed(done, 2, "need RANK and WORLD_SIZE")


@pytest.mark.parametrize("victim", [0, 1])
def test_dead_process(laid_out, tmp_path, victim):
    """One of two is killed in the middle of its work: nothing is published, the other says why and
    fails, and the next conversion is whole."""
    source = laid_out(1)
    output = tmp_path / "o" / "u"

    def dies(rank):
        if rank == victim:
            at_event(3, makes_a_file)

    ended = together(source, output, "--distributed", before=dies)
    other = ended[1 - victim]
    assert ended[victim].code == -signal.SIGKILL
    assert other.code not in (0, -signal.SIGALRM), other.err
    if victim:  # rank 0 speaks for all
        last = other.err.splitlines()[-1]  # gloo has a line of its own
        assert other.code == 2, other.err
        assert last.startswith("ds_to_universal: error: rank 0: a rank does not answer"), other.err
        assert not os.listdir(output.parent)
    assert not output.exists() and not output.with_name("latest_universal").exists()
    convert(source, output)
    assert sorted(os.listdir(output.parent)) == ["latest_universal", "u"]


def test_processes_fail_together(laid_out, tmp_path):
    """A mistake of all, or what is wrong with one of them, is said once, by rank 0, and all end
    with the same exit code."""
    rank_0, rank_1 = together(tmp_path / "no", tmp_path / "u", "--distributed")
    assert (rank_0.code, rank_1.code) == (2, 2)
    assert rank_0.err == f"ds_to_universal: error: {tmp_path}/no does not exist\n"
    assert rank_1.err == ""

    def full(rank):
        if rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    rank_0, rank_1 = together(laid_out(1), tmp_path / "u", "--distributed", before=full)
    assert (rank_0.code, rank_1.code) == (1, 1)
    assert "File too large" in rank_0.err and os.listdir(tmp_path) == ["c"]
