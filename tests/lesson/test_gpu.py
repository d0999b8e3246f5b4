"""demos/gpu.py with CPU ranks in the GPUs' place."""

import subprocess
import sys

import pytest
from helpers import ROOT

from demos.gpu import Lab
from harness.processes import Failed, run


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
