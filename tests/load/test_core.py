"""How much of the package a plain load runs: what somebody has to know who wants to follow it. And
its plan."""

import json
import math
import os
import re

import profiled
import pytest

from tests.support.ranks import run
from universal.load import reshard

# Of rank 0; by parameters of one kind of parallelism, without experts, frozen weights or buffers.
FUNCTIONS, FILES, TYPES = 337, 37, 42
PLANNED = (
    r"universal: rank \d reads (\S+), bytes (\d+) to (\d+), "
    r"to (\w+) of (\S+), elements (\d+) to (\d+)\n"
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("met")
    run(folder, 4, profiled.save, 3)
    return folder


def test_a_plain_load(saved):
    run(saved, 3, profiled.load, 3)
    functions, types = json.loads((saved / "met.json").read_text())
    assert 100 < len(functions) <= FUNCTIONS, functions
    assert len({file for file, _ in functions}) <= FILES
    assert 10 < len(types) <= TYPES, types


def test_a_plan(saved, monkeypatch):
    """All ranks together read each element of each state once, and each byte of a file once."""

    def patch():
        file = open(f"plan.{os.environ['RANK']}", "a", buffering=1)
        reshard.print_line = lambda line: file.write(f"{line}\n")

    monkeypatch.setenv("UNIVERSAL_DEBUG", "1")
    run(saved, 3, profiled.load, 3, patch=patch)
    lines = [
        line for path in saved.glob("plan.*") for line in re.findall(PLANNED, path.read_text())
    ]
    elements, places = {}, {}
    for path, first, last, state, name, begin, end in lines:
        places.setdefault(path, []).append((int(first), int(last)))
        elements.setdefault((state, name), set()).update([(int(begin), int(end))])
    shapes = {name: parameter.shape for name, parameter in profiled.Plain().named_parameters()}
    assert {*elements} == {(s, name) for s in ("fp32", "exp_avg", "exp_avg_sq") for name in shapes}
    for (_, name), spans in elements.items():
        ends = sorted(spans)
        assert ends[0][0] == 0 and max(end for _, end in ends) == math.prod(shapes[name])
        assert all(end == begin for (_, end), (begin, _) in zip(ends, ends[1:], strict=False))
    for spans in map(sorted, places.values()):
        assert all(end <= begin for (_, end), (begin, _) in zip(spans, spans[1:], strict=False))
