"""ds_to_universal.py by several processes: when they meet, and when they do not. test_parallel.py has them at work."""

import os
import subprocess

import pytest
from helpers import command

from harness.ranks import PORT

LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_PROCID")


@pytest.fixture
def tmp_path(in_memory):
    return in_memory


def start(source, output, *flags, **environment):
    environment = {key: value for key, value in os.environ.items() if key not in LAUNCHERS} | environment
    return subprocess.Popen(command(source, output, *flags), env=environment, stderr=subprocess.PIPE, text=True)


def test_left_over_environment(checkpoint, tmp_path):
    """RANK and WORLD_SIZE without a launcher: it works alone, and waits for nobody."""
    process = start(checkpoint(1), tmp_path / "u", RANK="1", WORLD_SIZE="4", MASTER_ADDR="nowhere")
    assert process.communicate(timeout=60)[1] == "" and process.returncode == 0
    assert (tmp_path / "u").is_dir()


AT_AN_ADDRESS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(PORT)}


@pytest.mark.parametrize("where", [AT_AN_ADDRESS, {}], ids=["address", "file"])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_nobody_comes(checkpoint, tmp_path, rank, where):
    """It says in one line where it waited, and ends; nothing is left."""
    flags = ("--distributed", "--timeout", "2")
    process = start(checkpoint(1), tmp_path / "u", *flags, RANK=rank, WORLD_SIZE="3", **where)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 2
    assert sorted(os.listdir(tmp_path)) == ["c"]
    if rank == "0":  # it speaks for all
        line = error.splitlines()[-1]
        assert "error: rank 0 of 3: not all processes came to " in line and " within 2 s: " in line
        assert ("env://" if where else str(tmp_path / ".u.meeting")) in line and "Traceback" not in error


def test_each_alone_says_so(checkpoint, tmp_path):
    done = start(checkpoint(1), tmp_path / "u", "--distributed", RANK="0")
    assert "error: --distributed needs 'WORLD_SIZE' in the environment" in done.communicate(timeout=60)[1]
    done = start(checkpoint(1), tmp_path / "u", "--distributed", RANK="0", WORLD_SIZE="many")
    assert "RANK and WORLD_SIZE in the environment are not numbers" in done.communicate(timeout=60)[1]
    assert done.returncode == 2


@pytest.mark.parametrize("mark", [{"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2"},
                                  {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}])  # fmt: skip
def test_marks_of_launchers(checkpoint, tmp_path, mark):
    process = start(checkpoint(1), tmp_path / "u", "--timeout", "1", **mark, **AT_AN_ADDRESS)
    assert "rank 0 of 2: not all processes came" in process.communicate(timeout=60)[1] and process.returncode == 2


def test_no_torch_for_one_process(checkpoint, tmp_path):
    """It is imported where there are several; one process does without, and does not have to have it."""
    words = command(checkpoint(1), tmp_path / "u")
    script = "import runpy, sys; sys.modules['torch'] = None; sys.argv = sys.argv[1:]; "
    script += "runpy.run_path(sys.argv[0], run_name='__main__')"
    subprocess.run([words[0], "-c", script, *words[1:]], check=True, timeout=60)
    assert (tmp_path / "u").is_dir()
