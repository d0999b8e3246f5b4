"""measure/gpu.py, on CPU ranks in the GPUs' place."""

import re

import pytest

from tests.support import ROOT
from tests.support.commands import run_python


@pytest.mark.slow
def test_on_cpu_ranks(tmp_path):
    words = ["--device", "cpu", "--minutes", "30", "--output", "gpu.txt"]
    words += ["--lines", "fp32", "exact", "lion", "README"]
    done = run_python(
        "-m", "measure.gpu", *words, folder=tmp_path, timeout=1900, PYTHONPATH=str(ROOT)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "gpu.txt").read_text()
    assert not re.search("OFF|no time", text)
    assert re.findall(r"^exact  .*  (\S+)$", text, re.M) == 5 * ["0.0e+00"]
