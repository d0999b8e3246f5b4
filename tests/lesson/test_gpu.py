"""measure/gpu.py with CPU ranks in the GPUs' place."""

import os
import re
import subprocess
import sys

import pytest
from helpers import ROOT


@pytest.mark.slow
def test_on_cpu_ranks(tmp_path):
    command = [sys.executable, "-m", "measure.gpu", "--device", "cpu"]
    options = dict(cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
    done = subprocess.run(command, **options, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"Test [13] +0\.0e\+00$", done.stdout, re.M)) == 2, done.stdout
