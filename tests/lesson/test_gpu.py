"""measure/gpu.py with CPU ranks in the GPUs' place."""

import re
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_on_cpu_ranks(tmp_path):
    command = [sys.executable, "-m", "measure.gpu", "--device", "cpu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"Test [13] +0\.0e\+00$", done.stdout, re.M)) == 2, done.stdout
