"""demos/gpu.py with CPU ranks in the GPUs' place, and checkpoints that a GPU has saved."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT

import launch
import universal
from demos.gpu import Lab
from harness.processes import Failed, run
from harness.ranks import compare
from harness.ranks import run as forked

COMMON = ("--train_batch_size", 8, "--train_micro_batch_size_per_gpu", 2, "--steps", 4, "--n_embd", 32)


def on_a_gpu():
    """A patch: what torch.save writes was on a GPU."""
    import torch

    torch.serialization.location_tag = lambda storage: "cuda:0"


@pytest.fixture(scope="module")
def saved(work):
    common = (*COMMON, "--zero_stage", 2, "--checkpoint_dir", "c")
    forked(work, 2, "train.py", *common, "--run_name", "base", "--checkpoint_interval", 3, patch=on_a_gpu)
    universal.convert(work / "c" / "global_step3", work / "c" / "global_step3_universal")
    assert b"cuda:0" in (work / "c" / "global_step3" / "mp_rank_00_model_states.pt").read_bytes()
    return common


@pytest.mark.parametrize("ranks, how", [(2, "--resume"), (1, "--elastic"), (1, "--resume --universal_checkpoint")])
def test_a_machine_without_a_gpu_goes_on(work, saved, ranks, how):
    name = f"{ranks}{how}"
    tag = () if how == "--elastic" else ("--checkpoint_tag", "global_step3" + "_universal" * ("universal" in how))
    forked(work, ranks, "train.py", *saved, *how.split(), *tag, "--run_name", name)
    assert compare(work, "base", name)[4] <= 1e-6


def test_each_rank_has_its_gpu_before_they_speak(monkeypatch):
    """NCCL refuses two ranks on one card, and all_gather_object takes the card that is set."""
    done, gpu = [], SimpleNamespace(device_name=lambda: "cuda", set_device=lambda number: done.append(number))
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.setattr(launch, "get_accelerator", lambda: gpu)
    monkeypatch.setattr(launch.torch, "use_deterministic_algorithms", lambda *_, **__: None)
    monkeypatch.setattr(launch.deepspeed, "init_distributed", lambda **_: done.append("group"))
    launch.init_distributed()
    torch.backends.cuda.enable_flash_sdp(True)
    torch.backends.cuda.enable_mem_efficient_sdp(True)
    assert done == [3, "group"]


@pytest.mark.parametrize("value, problems", [(1e-7, 0), (1e-4, 1), (float("nan"), 1), (Failed("no nvcc"), 1)])
def test_what_is_off_is_said(tmp_path, value, problems):
    def measure():
        if isinstance(value, Failed):
            raise value
        return value

    lab = Lab("cpu", tmp_path, {})
    lab.line("x", measure, 1e-5)
    assert len(lab.problems) == problems and ("-" == lab.lines[0].split()[-1]) == isinstance(value, Failed)


def test_a_rank_that_fails_ends_the_others(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, time\nif os.environ['RANK'] == '1':\n    raise ValueError('no')\ntime.sleep(600)\n")
    with pytest.raises(Failed, match="ValueError: no"):
        run(tmp_path, 2, {}, script)
    script.write_text("import time\ntime.sleep(600)\n")
    with pytest.raises(Failed, match="not done after 1 seconds"):
        run(tmp_path, 2, {}, script, limit=1)


@pytest.mark.slow
def test_on_cpu_ranks(tmp_path):
    command = [sys.executable, ROOT / "demos" / "gpu.py", "--device", "cpu", "--output", tmp_path / "gpu.txt"]
    done = subprocess.run([*command, "--work", tmp_path / "work"], capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "gpu.txt").read_text()
    rows = [line.split() for line in text.splitlines() if line.startswith("--dtype")]
    assert len(rows) == 2 and all(row[-5] == "0.0e+00" for row in rows) and " - " not in text
