"""demos/gpu.py with CPU ranks in the GPUs' place."""

import subprocess
import sys

import pytest
from helpers import ROOT


@pytest.mark.slow
def test_on_cpu_ranks(tmp_path):
    command = [sys.executable, ROOT / "demos" / "gpu.py", "--device", "cpu", "--output", tmp_path / "gpu.txt"]
    done = subprocess.run([*command, "--work", tmp_path / "work"], capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "gpu.txt").read_text()
    rows = [line.split() for line in text.splitlines() if line.startswith("--dtype")]
    assert len(rows) == 2 and all(row[-5] == "0.0e+00" for row in rows) and " - " not in text
