"""measure/gpu.py with CPU ranks in the GPUs' place."""

import re

import pytest

from tests.support import ROOT
from tests.support.commands import run_python


def gpu(folder, *arguments):
    """The rows of the table: {(run, what): result}."""
    words = ("-m", "measure.gpu", "--device", "cpu", *arguments)
    done = run_python(*words, folder=folder, timeout=3000, PYTHONPATH=str(ROOT))
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
