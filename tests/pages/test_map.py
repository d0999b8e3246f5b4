"""CONTRIBUTING.md: its map has every file that people open, in the order of their imports; its
tests exist."""

import ast
import re

from tests.support import ROOT

PAGE = (ROOT / "CONTRIBUTING.md").read_text()
MAP, TESTS = PAGE.split("## Tests")
FILES = [*ROOT.glob("*.py"), *ROOT.glob("universal/*.py"), *ROOT.glob("universal/*/[!_]*.py")]
ROOMS = ("files", "checkpoint", "write", "load")  # from the lowest to the highest
PACKAGES = {"universal", *(f"universal.{room}" for room in ROOMS)}
WITH_TORCH = ("resume", "mirror", "proof", "trainer", "exact", "elastic")  # beside load/


def name_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported(path, wherever=True):
    """Modules that a file imports; not wherever: only those that are imported with it."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if wherever else tree.body:
        if isinstance(node, ast.ImportFrom):
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def listed(text):
    """The modules of the map, in its order."""
    parents = {4: "", 6: "universal."}
    for indent, name in re.findall(r"^( {4,8})([\w.]+)(?=/ |\.py)", text, re.M):
        if len(indent) == 6:
            parents[8] = f"universal.{name}."
        yield (parents[len(indent)] + name).removesuffix(".__init__")


def wrong(text):
    """[(file, what it imports from above it)], and files that the map lacks."""
    order = [*listed(text)]
    faults = []
    for path in FILES:
        name = name_of(path)
        if path.parent.name == "start":
            continue
        if name not in order:
            faults.append((name, "is not in the map"))
            continue
        above = {*order[: order.index(name)]} - {
            "universal",
            *(f"universal.{room}" for room in ROOMS),
        }
        faults += [(name, module) for module in imported(path) if module in above]
    return faults


def upward(room, modules):
    """Those that are of a higher room, or of no room."""
    allowed = ("universal.errors", "universal.batches")
    allowed += tuple(f"universal.{name}" for name in ROOMS[: ROOMS.index(room) + 1])
    ours = (module for module in modules if module.startswith("universal."))
    return [module for module in ours if not module.startswith(allowed)]


def test_map():
    assert not wrong(MAP)


def test_a_wrong_map_is_seen():
    (line,) = re.findall(r"^        reader\.py.*\n", MAP, re.M)
    without = MAP.replace(line, "")
    assert wrong(without) == [("universal.load.reader", "is not in the map")]
    flat = re.search(r"^        flat\.py.*\n", without, re.M)[0]
    assert ("universal.load.reader", "universal.load.flat") in wrong(
        without.replace(flat, flat + line)
    )


def test_rooms():
    """No room imports a higher one; torch and DeepSpeed come in at the highest alone."""
    assert upward("files", ["universal.errors", "universal.checkpoint.zero", "os"])
    for path in ROOT.glob("universal/**/*.py"):
        room = path.parent.name
        if room in ROOMS:
            assert not upward(room, imported(path)), path
        if room not in ("load", "start") and path.stem not in WITH_TORCH:
            packages = {module.split(".")[0] for module in imported(path, wherever=False)}
            assert not packages & {"torch", "deepspeed"}, path


def test_every_promise_has_its_test():
    """The table names every file of tests once, and none that is not there."""
    rows = "\n".join(line for line in TESTS.splitlines() if line.startswith("|"))
    named = re.findall(r"tests/\w+/test_\w+\.py", rows)
    files = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/*/test_*.py")]
    assert sorted(named) == sorted(files)
