"""CONTRIBUTING.md: its map has every file that people open, in the order of their imports; its
tests exist."""

import ast
import re

from helpers import ROOT

PAGE = (ROOT / "CONTRIBUTING.md").read_text()
MAP, TESTS = PAGE.split("## Tests")
FILES = [*ROOT.glob("*.py"), *ROOT.glob("universal/*.py")]


def imported(path):
    """Modules of this repository that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def wrong(text):
    """[(file, what it imports from above it)], and files that the map lacks."""
    modules = re.findall(r"^ {4}([\w.]+)\.py", text.replace("\n      ", "\n    universal."), re.M)
    order = [module.removesuffix(".__init__") for module in modules]
    faults = []
    for path in FILES:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if name not in order:
            faults.append((name, "is not in the map"))
            continue
        above = {*order[: order.index(name)]} - {"universal"}
        faults += [(name, module) for module in imported(path) if module in above]
    return faults


def test_map():
    assert not wrong(MAP)


def test_a_wrong_map_is_seen():
    (line,) = re.findall(r"^      reader\.py.*\n", MAP, re.M)
    without = MAP.replace(line, "")
    assert wrong(without) == [("universal.reader", "is not in the map")]
    assert ("universal.reader", "universal.flat") in wrong(without + line)


def test_every_promise_has_its_test():
    """The table names every file of tests once, and none that is not there."""
    rows = "\n".join(line for line in TESTS.splitlines() if line.startswith("|"))
    named = re.findall(r"tests/\w+/test_\w+\.py", rows)
    files = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/*/test_*.py")]
    assert sorted(named) == sorted(files)
