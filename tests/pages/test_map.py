"""CONTRIBUTING.md: its map has every file that people open, in the order of their imports; its tests exist."""

import ast
import re

from helpers import ROOT

PAGE = (ROOT / "CONTRIBUTING.md").read_text()
MAP = PAGE.split("## Tests")[0]
FILES = [*ROOT.glob("*.py"), *ROOT.glob("universal/*.py")]


def mapped(text):
    """Modules in the order of the map: "train", "universal", "universal.loader"."""
    lines = re.findall(r"^ {4}( {2})?(\w+)\.py", text, re.M)
    return [("universal." * bool(indented) + name).removesuffix(".__init__") for indented, name in lines]


def imported(path):
    """Modules of this repository that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def wrong(text):
    """[(file, what it imports from above it)], and files that the map lacks."""
    order, found = mapped(text), []
    for path in FILES:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if name not in order:
            found.append((name, "is not in the map"))
            continue
        above = order[: order.index(name)]
        found += [(name, other) for other in imported(path) if other in above and other != "universal"]
    return found


def test_map():
    assert not wrong(MAP)
    assert len(MAP.splitlines()) <= 40


def test_a_wrong_map_is_seen():
    lines = MAP.splitlines(True)
    (ranks,) = (line for line in lines if line.startswith("      ranks.py"))
    without = [line for line in lines if line is not ranks]
    assert wrong("".join(without)) == [("universal.ranks", "is not in the map")]
    assert ("universal.ranks", "universal.converter") in wrong("".join([*without, ranks]))


def named_in(page):
    return re.findall(r"tests/\w+/test_\w+\.py", page)


def missing(names):
    return [name for name in names if not (ROOT / name).is_file()]


def test_every_promise_has_its_test():
    """The table names every file of tests once, and none that is not there."""
    rows = [line for line in PAGE.splitlines() if line.startswith("|")]
    named = named_in("\n".join(rows))
    assert not missing(named) and len(set(named)) == len(named)
    assert set(named) == {path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/*/test_*.py")}
    assert missing(["tests/load/test_nothing.py"])
