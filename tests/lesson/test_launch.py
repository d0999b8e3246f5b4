"""The commands of the README through the real launchers, on the smallest run that says
something."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import universal
from measure.logs import compare
from tests.support import ROOT
from tests.support.commands import slow
from tests.support.files import folders_in
from tests.support.ranks import PORT, run

BIN = Path(sys.executable).parent
SMALL = (
    "--n_embd 32 --seq_len 16 --steps 4 --train_batch_size 8 --train_micro_batch_size_per_gpu 4 "
    "--checkpoint_interval 2"
).split()
BATCH = "8 = 4 x 2 micro-batches; 2 = 1 accumulation steps x 2 ranks"
LAUNCHERS = {
    "deepspeed": [BIN / "deepspeed", "--master_port", PORT, "--num_gpus", 2],
    "torchrun": [BIN / "torchrun", "--master-port", PORT, "--nproc-per-node", 2],
}
NODES = f"--hostfile hostfile --no_ssh --master_addr 127.0.0.1 --master_port {PORT}".split()


def start(folder, *launchers, script="train.py", arguments=SMALL):
    """Exit codes, and the output of all; whatever they have started ends with them."""
    options = {
        "cwd": folder,
        "env": os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"},
        "start_new_session": True,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
    }
    commands = [[*launcher, ROOT / script, *arguments] for launcher in launchers]
    running = [subprocess.Popen(list(map(str, command)), **options) for command in commands]
    try:
        outputs = [process.communicate(timeout=180)[0] for process in running]
    except subprocess.TimeoutExpired:
        for process in running:
            os.killpg(process.pid, signal.SIGKILL)
        raise
    return [process.returncode for process in running], "".join(outputs)


def shared_memory():
    return {path.name for path in Path("/dev/shm").glob("*deepspeed*")}


@pytest.mark.parametrize("launcher", ["deepspeed", slow("torchrun")])
def test_train(tmp_path, launcher):
    """It trains, saves, and leaves nothing in shared memory."""
    before = shared_memory()
    codes, out = start(tmp_path, LAUNCHERS[launcher])
    assert codes == [0], out
    assert BATCH in out and "step 4 | loss" in out
    assert shared_memory() <= before
    folder = tmp_path / "ds_transformer_checkpoint"
    assert folders_in(folder) == ["global_step2", "global_step4"]
    assert (folder / "latest").read_text() == "global_step4"


# Python runs it at its start: torch then sees one GPU, unless CUDA_VISIBLE_DEVICES hides it.
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
                module.cuda.device_count = lambda: count
                module.cuda.is_available = lambda: count > 0
                module.cuda.set_device = ["the GPU"][:count].__getitem__

            spec.loader.exec_module = exec_module
            return spec


    sys.meta_path.insert(0, Torch())
"""


@pytest.fixture
def one_gpu(tmp_path, monkeypatch):
    """The processes that a test starts are on a machine with one GPU, and nothing is exported."""
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(ONE_GPU))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}:{ROOT / 'tests'}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("DS_ACCELERATOR")


@pytest.mark.parametrize("script", ["train.py", slow("grad_accu_ds.py")])
def test_more_ranks_than_gpus(tmp_path, one_gpu, monkeypatch, script):
    """With what README says to export, though the deepspeed launcher sets the first anew."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    few = "--steps 1 --train_batch_size 8 --train_micro_batch_size_per_gpu 4".split()
    codes, out = start(tmp_path, LAUNCHERS["deepspeed"], script=script, arguments=few)
    assert "Setting CUDA_VISIBLE_DEVICES=0,1" in out
    assert codes == [0] and "loss" in out, out


@pytest.mark.parametrize("module, cards", [("conftest", 0), ("measure.exact", 0), ("torch", 1)])
def test_tests_and_measurements_see_no_gpu(tmp_path, one_gpu, module, cards):
    """Of which there may be fewer than ranks."""
    code = f"import {module}, torch; print(torch.cuda.device_count())"
    printed = subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path, text=True)
    assert printed.splitlines()[-1] == str(cards)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_refuse(tmp_path, launcher):
    """Rank 1 has the same complaint. The launcher ends all ranks when one exits; rank 0's line
    comes out, once."""
    resume = [*SMALL, "--resume", "--checkpoint_tag", "global_step9"]
    codes, out = start(tmp_path, LAUNCHERS[launcher], arguments=resume)
    line = "train.py: error: ds_transformer_checkpoint/global_step9 does not exist"
    assert codes != [0] and out.count(line) == 1
    assert launcher == "torchrun" or codes == [2]


@pytest.mark.slow
def test_two_nodes(tmp_path):
    """A launcher on each of two nodes, without ssh, both nodes being this machine: they train, save
    into one folder; one node converts it, and goes on."""
    (tmp_path / "hostfile").write_text("127.0.0.1 slots=1\nlocalhost slots=1\n")
    nodes = [[BIN / "deepspeed", *NODES, "--node_rank", node] for node in (0, 1)]
    codes, out = start(tmp_path, *nodes, arguments=[*SMALL, "--run_name", "two_nodes"])
    assert codes == [0, 0] and out.count(BATCH) == 1, out
    tag = tmp_path / "ds_transformer_checkpoint" / "global_step2"
    universal.convert(tag, f"{tag}_universal")
    assert (tag.parent / "latest_universal").read_text() == "global_step2_universal"
    resume = "--resume --universal_checkpoint --run_name one_node".split()
    run(tmp_path, 1, "train.py", *SMALL, *resume)
    assert max(compare(tmp_path, "two_nodes", "one_node").values()) <= 1e-5
