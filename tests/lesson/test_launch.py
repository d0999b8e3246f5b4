"""The commands of the README through the real launchers, on the smallest run that says
something."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.files import folders_in
from tests.support.ranks import PORT

BIN = Path(sys.executable).parent
SMALL = (
    "--n_embd 32 --seq_len 16 --steps 4 --train_batch_size 8 --train_micro_batch_size_per_gpu 4 "
    "--checkpoint_interval 2"
).split()
BATCH = "batch 8: 2 micro-batches of 4 on 2 ranks, 1 accumulation step each"
LAUNCHERS = {
    "deepspeed": [BIN / "deepspeed", "--master_port", PORT, "--num_gpus", 2],
    "torchrun": [BIN / "torchrun", "--master-port", PORT, "--nproc-per-node", 2],
}


def start(folder, launcher, arguments=SMALL):
    """The exit code, and the output; whatever it has started ends with it."""
    process = subprocess.Popen(
        list(map(str, [*LAUNCHERS[launcher], ROOT / "train.py", *arguments])),
        cwd=folder,
        env=os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=180)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, output


def check_trained(folder, code, out):
    """It has trained, saved, and left nothing in shared memory."""
    assert code == 0, out
    assert BATCH in out and "step 4 | loss" in out
    assert not [*Path("/dev/shm").glob(f"*deepspeed*{PORT}*")]
    checkpoints = folder / "ds_transformer_checkpoint"
    assert folders_in(checkpoints) == ["global_step2", "global_step4"]
    assert (checkpoints / "latest").read_text() == "global_step4"


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_train(tmp_path, launcher):
    check_trained(tmp_path, *start(tmp_path, launcher))


# Python runs it at its start: torch then sees one GPU, unless CUDA_VISIBLE_DEVICES hides it. A rank
# that sees it writes a file.
ONE_GPU = """
    import os
    import sys
    from importlib import util


    class Torch:
        def find_spec(self, name, path=None, target=None):
            if name != "torch":
                return None
            sys.meta_path.remove(self)
            spec = util.find_spec("torch")
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                count = int(os.environ.get("CUDA_VISIBLE_DEVICES", "0").startswith("0"))
                if count and "RANK" in os.environ:
                    open("one_gpu", "w").close()
                module.cuda.device_count = lambda: count
                module.cuda.is_available = lambda: count > 0
                module.cuda.set_device = ["the GPU"][:count].__getitem__

            spec.loader.exec_module = exec_module
            return spec


    sys.meta_path.insert(0, Torch())
"""


def test_more_ranks_than_gpus(tmp_path, monkeypatch):
    """On one GPU, with what README says to export, though the deepspeed launcher sets the first
    anew."""
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(ONE_GPU))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    code, out = start(tmp_path, "deepspeed")
    assert "Setting CUDA_VISIBLE_DEVICES=0,1" in out and (tmp_path / "one_gpu").exists()
    check_trained(tmp_path, code, out)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_refuse(tmp_path, launcher):
    """Rank 1 has the same complaint. The launcher ends all ranks when one exits; rank 0's line
    comes out, once."""
    resume = [*SMALL, "--resume", "--checkpoint_tag", "global_step9"]
    code, out = start(tmp_path, launcher, arguments=resume)
    line = "train.py: error: ds_transformer_checkpoint/global_step9 does not exist"
    assert code == (1 if launcher == "torchrun" else 2) and out.count(line) == 1
