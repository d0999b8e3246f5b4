"""The commands of the README through the real launchers, on the smallest run that says something."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

from harness.ranks import PORT, compare, run

BIN = Path(sys.executable).parent
SMALL = ["--n_embd", "32", "--seq_len", "16", "--steps", "4", "--train_batch_size", "8"]
SMALL += ["--train_micro_batch_size_per_gpu", "4", "--checkpoint_interval", "2"]
LAUNCHERS = {
    "deepspeed": [str(BIN / "deepspeed"), "--master_port", str(PORT), "--num_gpus", "2"],
    "torchrun": [str(BIN / "torchrun"), "--master-port", str(PORT), "--nproc-per-node", "2"],
}


def start(folder, launcher, *arguments):
    """Its exit code and output; whatever it started ends with it."""
    command = [*LAUNCHERS[launcher], str(ROOT / "train.py"), *arguments]
    path = f"{BIN}:{os.environ['PATH']}"
    process = subprocess.Popen(
        command, cwd=folder, env=os.environ | {"PATH": path}, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        out, _ = process.communicate(timeout=150)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, out


def shared_memory():
    return {path.name for path in Path("/dev/shm").glob("*deepspeed*")}


@pytest.mark.parametrize("launcher", ["deepspeed", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_train(tmp_path, launcher):
    """It trains, saves, and leaves nothing in shared memory."""
    before = shared_memory()
    code, out = start(tmp_path, launcher, *SMALL)
    assert code == 0, out
    assert "8 = 4 per rank x 1 accumulation steps x 2 ranks" in out and "step    4 | loss" in out
    assert shared_memory() <= before
    folder = tmp_path / "ds_transformer_checkpoint"
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["global_step2", "global_step4"]
    assert (folder / "latest").read_text() == "global_step4"


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_refuse(tmp_path, launcher):
    """Rank 1 has the same complaint. The launcher ends all ranks when one exits; rank 0's line comes out, once."""
    code, out = start(tmp_path, launcher, *SMALL, "--resume", "--checkpoint_tag", "global_step9")
    assert code != 0 and out.count("train.py: error: ds_transformer_checkpoint/global_step9 does not exist") == 1
    assert launcher == "torchrun" or code == 2


@pytest.mark.slow
def test_two_nodes(tmp_path):
    """A launcher on each of two nodes, without ssh, both nodes being this machine: they train, save into one folder and
    convert it together; one node goes on."""
    (tmp_path / "hostfile").write_text("127.0.0.1 slots=1\nlocalhost slots=1\n")
    nodes = [BIN / "deepspeed", "--hostfile", "hostfile", "--no_ssh", "--master_addr", "127.0.0.1"]

    def on_both(script, *arguments):
        command = [*nodes, "--master_port", PORT, "--node_rank"]
        running = [
            subprocess.Popen(
                list(map(str, [*command, node, ROOT / script, *arguments])), cwd=tmp_path,
                env=os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for node in (0, 1)
        ]  # fmt: skip
        outputs = [node.communicate(timeout=180)[0] for node in running]
        assert [node.returncode for node in running] == [0, 0], outputs
        return "".join(outputs)

    out = on_both("train.py", *SMALL, "--run_name", "two_nodes")
    assert out.count("8 = 4 per rank x 1 accumulation steps x 2 ranks") == 1
    folder = tmp_path / "ds_transformer_checkpoint"
    tag = folder / "global_step2"
    out = on_both("ds_to_universal.py", "--input_folder", tag, "--output_folder", f"{tag}_universal")
    assert out.count("28 parameters") == 1 and (folder / "latest_universal").read_text() == "global_step2_universal"
    resume = ("--resume", "--universal_checkpoint", "--run_name", "one_node")
    run(tmp_path, 1, "train.py", *SMALL, *resume)
    assert max(compare(tmp_path, "two_nodes", "one_node").values()) <= 1e-5
