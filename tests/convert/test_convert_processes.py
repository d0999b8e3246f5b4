"""The converter by several processes: they share the work, and end together."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, content, converter, start_converter

from harness.ranks import PORT
from universal import convert

AT = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(PORT)}


def together(source, output, *flags, ranks=2, before=lambda rank: None, **environment):
    """What each of the processes has said."""
    ends = []
    for rank in range(ranks):
        mine = {"RANK": str(rank), "WORLD_SIZE": str(ranks)} | AT | environment
        ends.append(start_converter(source, output, *flags, before=lambda rank=rank: before(rank), **mine))
    return [end() for end in ends]


@pytest.mark.parametrize("stage", [1, 3])
def test_processes_share_the_work(laid_out, tmp_path, stage):
    """The result is the one of a single process, byte by byte, and each process has written a part of it."""
    source = laid_out(stage)
    convert(source, tmp_path / "one" / "u")

    def spy(rank):
        def hook(event, arguments):
            if event == "open" and ".u.unfinished/" in str(arguments[0]) and arguments[1] == "x":
                (tmp_path / f"rank{rank}").touch()

        sys.addaudithook(hook)

    done = together(source, tmp_path / "many" / "u", "--distributed", ranks=3, before=spy)
    assert [(one.code, one.err) for one in done] == 3 * [(0, "")]
    assert [one.out.count("3 parameters") for one in done] == [1, 0, 0]
    assert content(tmp_path / "one") == content(tmp_path / "many")
    assert all((tmp_path / f"rank{rank}").exists() for rank in range(3))
    assert sorted(os.listdir(tmp_path / "many")) == ["latest_universal", "u"]


SLOW = [pytest.param(*more, marks=pytest.mark.slow) for more in [("torchrun", 4), ("deepspeed", 2)]]


@pytest.mark.parametrize(("launcher", "ranks"), [("torchrun", 2), *SLOW], ids=str)
def test_launchers(laid_out, tmp_path, launcher, ranks):
    """Under the real ones no flag is needed, and one line of figures comes out."""
    source = laid_out(1)
    convert(source, tmp_path / "one" / "u")
    if launcher == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", ranks, "--master-port", PORT]
    else:
        command = [Path(sys.executable).with_name("deepspeed"), "--num_gpus", ranks, "--master_port", PORT]
    command += [ROOT / "ds_to_universal.py", "--input_folder", source, "--output_folder", tmp_path / "many" / "u"]
    environment = os.environ | {"LOCAL_SIZE": str(ranks)}
    words = list(map(str, command))
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and done.stdout.count("3 parameters") == 1, done.stderr
    assert content(tmp_path / "one") == content(tmp_path / "many")


def test_environment_that_a_launcher_has_left(laid_out, tmp_path):
    """RANK and WORLD_SIZE without a launcher: it works alone, and waits for nobody."""
    done = converter(laid_out(1), tmp_path / "u", RANK="1", WORLD_SIZE="4", MASTER_ADDR="nowhere")
    assert done.code == 0 and done.err == "" and (tmp_path / "u").is_dir()


@pytest.mark.parametrize("environment", [{"RANK": "0"}, {"RANK": "0", "WORLD_SIZE": "many"}])
def test_environment_that_says_too_little(laid_out, tmp_path, environment):
    done = converter(laid_out(1), tmp_path / "u", "--distributed", **environment)
    assert done.code == 2 and done.err.count("\n") == 1 and "need RANK and WORLD_SIZE" in done.err


@pytest.mark.parametrize("victim", [0, 1])
def test_dead_process(laid_out, tmp_path, victim):
    """One of two is killed in the middle of its work: nothing is published, the other says why and fails, and the next
    conversion is whole."""
    source = laid_out(1)

    def dies(rank):
        written = []

        def hook(event, arguments):
            if event == "open" and ".u.unfinished/" in str(arguments[0]) and arguments[1] == "x":
                written.append(arguments[0])
                if rank == victim and len(written) == 3:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)

    done = together(source, tmp_path / "o" / "u", "--distributed", before=dies)
    other = done[1 - victim]
    assert done[victim].code == -signal.SIGKILL and other.code not in (0, -signal.SIGALRM), other.err
    if victim:  # rank 0 speaks for all
        last = other.err.splitlines()[-1]  # gloo has a line of its own
        assert other.code == 2 and last.startswith("ds_to_universal: error: rank 0: a rank does not answer"), other.err
        assert not os.listdir(tmp_path / "o")
    assert not (tmp_path / "o" / "u").exists() and not (tmp_path / "o" / "latest_universal").exists()
    convert(source, tmp_path / "o" / "u")
    assert sorted(os.listdir(tmp_path / "o")) == ["latest_universal", "u"]


def test_processes_fail_together(tmp_path):
    """A mistake is said once, by rank 0, and all end with exit code 2."""
    done = together(tmp_path / "no", tmp_path / "u", "--distributed")
    assert [one.code for one in done] == [2, 2]
    assert done[0].err == f"ds_to_universal: error: {tmp_path}/no does not exist\n" and done[1].err == ""
