"""measure/gpu.py: how its lines go side by side until the deadline."""

import math
import re
import sys
import time

import pytest

from measure import gpu
from tests.support import ROOT
from tests.support.commands import run_python


def table(folder, monkeypatch, lines, *words):
    """What main() writes of such lines, and its exit code."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(gpu, "end", math.inf)
    made = {name: lambda at, ranks, line=line: line for name, line in lines.items()}
    monkeypatch.setattr(gpu, "LINES", made)
    output = folder / "gpu.txt"
    words = ["gpu.py", "--device", "cpu", "--output", output, "--lines", *lines, *words]
    monkeypatch.setattr(sys, "argv", [*map(str, words)])
    code = None
    try:
        gpu.main()
    except SystemExit as stop:
        code = stop.code
    return output.read_text(), code


def test_a_failing_row(tmp_path, monkeypatch):
    """It is off, and the others are tried all the same."""

    def fails():
        raise ValueError("no such thing\nof all")

    good = gpu.Row("good", lambda: ("0.0e+00", False))
    lines = {"a": gpu.Line([gpu.Row("bad", fails), good]), "b": gpu.Line([good])}
    text, code = table(tmp_path, monkeypatch, lines)
    assert code == "measure/gpu.py: 1 rows are off"
    assert re.findall(r"^([ab]) +(\w+) +(.*)$", text, re.M) == [
        ("a", "bad", "ValueError: no such thing  OFF"),
        ("a", "good", "0.0e+00"),
        ("b", "good", "0.0e+00"),
    ]


def test_deadline(tmp_path, monkeypatch):
    """What it cuts off, and what comes after, was not tried."""
    monkeypatch.setattr(gpu, "LEAST", 1)
    rows = [gpu.Row("sleep", lambda: gpu.command("sleep", ["sleep", 60])) for _ in range(2)]
    lines = {name: gpu.Line(rows) for name in "ab"}
    began = time.monotonic()
    text, code = table(tmp_path, monkeypatch, lines, "--minutes", 0.05)
    assert code is None and text.count("  not tried: no time left\n") == 4
    assert time.monotonic() - began < 20


@pytest.mark.slow
def test_on_cpu_ranks(tmp_path):
    words = ["--device", "cpu", "--minutes", "30", "--output", "gpu.txt"]
    done = run_python(
        "-m", "measure.gpu", *words, folder=tmp_path, timeout=1900, PYTHONPATH=str(ROOT)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "gpu.txt").read_text()
    assert not re.search("OFF|no time", text)
    assert re.findall(r"^exact  .*  (\S+)$", text, re.M) == 5 * ["0.0e+00"]
