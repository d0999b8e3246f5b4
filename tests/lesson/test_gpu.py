"""measure/gpu.py with CPU ranks in the GPUs' place."""

import os
import re
import subprocess
import sys

import pytest

from tests.support import ROOT


def gpu(folder, *arguments):
    """The rows of the table: {(run, what): result}."""
    command = [sys.executable, "-m", "measure.gpu", "--device", "cpu", *arguments]
    options = dict(cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)})
    done = subprocess.run(command, **options, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^\| (.*?) \| (.*?) \| (.*) \|$", done.stdout, re.M)
    return {(run, what): result for run, what, result in rows}


def test_the_machine(tmp_path):
    """What nobody has run says so."""
    rows = gpu(tmp_path, "--lines", "1", "9")
    assert rows["the machine", "ulimit -n"].isdigit()
    by_hand = {result for (run, _), result in rows.items() if run == "by hand"}
    assert by_hand == {"not tried"}


@pytest.mark.slow
def test_on_cpu_ranks(tmp_path):
    rows = gpu(tmp_path)
    exact = [result for (_, what), result in rows.items() if re.match("Test [13]|every bit", what)]
    assert len(exact) >= 4 and {*exact} == {"0.0e+00"}
    assert rows["README", "the CPU's"] == "exit code 0"
    assert not any("nan" in result or "off" in result for result in rows.values())
