"""ds_to_universal.py by several processes without torch: who reads what, how they meet, and when they do not."""

import os
import signal
import subprocess

import pytest
from conftest import ROOT, SHAPES, command, content, edit, scramble

import ds_to_universal
from benchmarks.convert import lay_out
from ds_to_universal import convert


@pytest.fixture
def tmp_path(in_memory):
    return in_memory


def test_processes_share_the_reading(tmp_path):
    """Each of four reads a quarter of the shards, and what it needs of the first; the result is that of one."""
    lay_out(tmp_path / "c", SHAPES, 16, 3)
    edit(tmp_path / "c", "*_optim_*", scramble)
    convert(tmp_path / "c", tmp_path / "one")
    children, archive = [], ds_to_universal.Archive.__init__
    for rank in range(4):
        children.append(os.fork())
        if not children[-1]:
            signal.alarm(60)
            read = []
            ds_to_universal.Archive.__init__ = lambda self, path, read=read: (read.append(path), archive(self, path))[1]
            share = ds_to_universal.meet(rank, 4, tmp_path / "four")
            convert(tmp_path / "c", tmp_path / "four", rank=rank, ranks=4, share=share)
            os._exit(len(read))
    read = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert all(2 * 4 <= count <= 2 * 4 + 2 for count in read), read
    assert content(tmp_path / "one") == content(tmp_path / "four")
    assert not [path for path in tmp_path.iterdir() if path.name[0] == "."]


def start(source, output, *flags, patience=300, **environment):
    script = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import ds_to_universal as d; d.PATIENCE = {patience}\n"
    words = command(source, output, *flags)
    environment = {key: value for key, value in os.environ.items() if key != "TORCHELASTIC_RUN_ID"} | environment
    return subprocess.Popen(
        [words[0], "-c", script + "d.main()", *words[2:]], env=environment, stderr=subprocess.PIPE, text=True
    )


def test_left_over_environment(checkpoint, tmp_path):
    """RANK and WORLD_SIZE without a launcher: it works alone, and waits for nobody."""
    process = start(checkpoint(1), tmp_path / "u", patience=600, RANK="1", WORLD_SIZE="4", MASTER_ADDR="nowhere")
    assert process.communicate(timeout=60)[1] == "" and process.returncode == 0
    assert (tmp_path / "u").is_dir()


@pytest.mark.parametrize("rank", ["0", "1"])
def test_nobody_comes(checkpoint, tmp_path, rank):
    """It says for whom it waits and where, and ends."""
    process = start(checkpoint(1), tmp_path / "u", "--distributed", patience=2, RANK=rank, WORLD_SIZE="3")
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 2
    waits, ends = (error + "\n\n").splitlines()[:2]
    if rank == "0":
        assert "rank 0 of 3 waits for rank 1, 2 at" in waits and "rank 0 of 3 waited 2 s for rank 1, 2 at" in ends
    else:
        assert "rank 1 of 3 waits for rank 0 to write" in waits and str(tmp_path / ".u.meeting") in waits
    assert sorted(os.listdir(tmp_path)) == ["c"]


@pytest.mark.parametrize("mark", [{"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2"},
                                  {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}])  # fmt: skip
def test_marks_of_launchers(checkpoint, tmp_path, mark):
    process = start(checkpoint(1), tmp_path / "u", patience=1, **mark)
    assert "rank 0 of 2 waited 1 s" in process.communicate(timeout=60)[1] and process.returncode == 2


def test_note_of_another_meeting(checkpoint, tmp_path):
    """What a killed rank 0 left behind is no meeting, not even if somebody else listens there now."""
    source, note = checkpoint(1), tmp_path / ".u.meeting"
    with ds_to_universal.socket.create_server(("127.0.0.1", 0)) as server:
        note.write_text(f"127.0.0.1 {server.getsockname()[1]} secret")
        one = start(source, tmp_path / "u", "--distributed", patience=60, RANK="1", WORLD_SIZE="2")
        server.accept()[0].close()
        zero = start(source, tmp_path / "u", "--distributed", patience=60, RANK="0", WORLD_SIZE="2")
        assert [p.communicate(timeout=60)[1] for p in (zero, one)] and zero.returncode == one.returncode == 0
    assert sorted(os.listdir(tmp_path)) == ["c", "latest_universal", "u"]
