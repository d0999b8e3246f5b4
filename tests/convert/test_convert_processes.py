"""The converter by several processes: they share the work, and end together."""

import os
import resource
import signal
import subprocess
import sys
import time

import pytest
from helpers import ROOT, at_event, content, converter, failed, makes_a_file, start_converter

from measure.ranks import PORT
from universal import convert


def together(source, output, *flags, ranks=2, before=lambda rank: None, **environment):
    """What each of the processes has said. None waits a while for rank 0, which says what is
    wrong."""
    ends = []
    for rank in range(ranks):
        more = {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(PORT),
        }
        begin = lambda rank=rank: before(rank) or setattr(time, "sleep", lambda seconds: None)  # noqa: E731
        ends.append(start_converter(source, output, *flags, before=begin, **more | environment))
    return [end() for end in ends]


LAUNCHED = [
    (1, 3, ("--distributed",), {}),
    (3, 2, ("--local_rank=0",), {}),
    (3, 2, (), {"TORCHELASTIC_RUN_ID": "1"}),
]


@pytest.mark.parametrize(
    "stage, ranks, flags, more", LAUNCHED, ids=["by hand", "by deepspeed", "by torchrun"]
)
def test_processes_share_the_work(laid_out, tmp_path, stage, ranks, flags, more):
    """The result is the one of a single process, byte by byte, each process has written a part of
    it, and one line of figures comes out."""
    source = laid_out(stage)
    convert(source, tmp_path / "one" / "u")
    spy = lambda rank: at_event(1, makes_a_file, (tmp_path / f"rank{rank}").touch)  # noqa: E731
    done = together(source, tmp_path / "many" / "u", *flags, ranks=ranks, before=spy, **more)
    assert [(one.code, one.err) for one in done] == ranks * [(0, "")]
    assert [one.out.count("3 parameters") for one in done] == [1, *(ranks - 1) * [0]]
    assert content(tmp_path / "one") == content(tmp_path / "many")
    assert all((tmp_path / f"rank{rank}").exists() for rank in range(ranks))


@pytest.mark.slow
def test_torchrun(laid_out, tmp_path):
    """The same under the real one. (tests/lesson/test_launch.py has the deepspeed launcher.)"""
    source, output = laid_out(1), tmp_path / "many" / "u"
    convert(source, tmp_path / "one" / "u")
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        2,
        "--master-port",
        PORT,
    ]
    words = [
        *launch,
        ROOT / "ds_to_universal.py",
        "--input_folder",
        source,
        "--output_folder",
        output,
    ]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and done.stdout.count("3 parameters") == 1, done.stderr
    assert content(tmp_path / "one") == content(tmp_path / "many")


def test_environment_that_a_launcher_has_left(laid_out, tmp_path):
    """RANK and WORLD_SIZE without a launcher: it works alone, and waits for nobody. When told to,
    it needs both."""
    source = laid_out(1)
    done = converter(source, tmp_path / "u", RANK="1", WORLD_SIZE="4", MASTER_ADDR="nowhere")
    assert (done.code, done.err) == (0, "") and (tmp_path / "u").is_dir()
    for environment in ({"RANK": "0"}, {"RANK": "0", "WORLD_SIZE": "many"}):
        failed(
            converter(source, tmp_path / "v", "--distributed", **environment),
            2,
            "need RANK and WORLD_SIZE",
        )


@pytest.mark.parametrize("victim", [0, 1])
def test_dead_process(laid_out, tmp_path, victim):
    """One of two is killed in the middle of its work: nothing is published, the other says why and
    fails, and the next conversion is whole."""
    source = laid_out(1)

    dies = lambda rank: at_event(3, makes_a_file) if rank == victim else None  # noqa: E731
    done = together(source, tmp_path / "o" / "u", "--distributed", before=dies)
    other = done[1 - victim]
    assert done[victim].code == -signal.SIGKILL and other.code not in (0, -signal.SIGALRM), (
        other.err
    )
    if victim:  # rank 0 speaks for all
        last = other.err.splitlines()[-1]  # gloo has a line of its own
        assert other.code == 2 and last.startswith(
            "ds_to_universal: error: rank 0: a rank does not answer"
        ), other.err
        assert not os.listdir(tmp_path / "o")
    assert (
        not (tmp_path / "o" / "u").exists() and not (tmp_path / "o" / "latest_universal").exists()
    )
    convert(source, tmp_path / "o" / "u")
    assert sorted(os.listdir(tmp_path / "o")) == ["latest_universal", "u"]


def test_processes_fail_together(laid_out, tmp_path):
    """A mistake of all, or what is wrong with one of them, is said once, by rank 0, and all end
    with the same exit code."""
    done = together(tmp_path / "no", tmp_path / "u", "--distributed")
    assert [one.code for one in done] == [2, 2]
    assert (
        done[0].err == f"ds_to_universal: error: {tmp_path}/no does not exist\n"
        and done[1].err == ""
    )
    full = lambda rank: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)) if rank else None  # noqa: E731
    done = together(laid_out(1), tmp_path / "u", "--distributed", before=full)
    assert (
        [one.code for one in done] == [1, 1]
        and "File too large" in done[0].err
        and os.listdir(tmp_path) == ["c"]
    )
