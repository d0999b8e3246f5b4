"""CONTRIBUTING.md: its map has every file that people open, in the order of their imports; its
recipes work."""

import re

import pytest
import torch

import universal.checkpoint.describe
import universal.diff
import universal.files.sources
from tests.load import test_load_refuses
from tests.support import ROOT
from tests.support.commands import command, failed
from tests.support.files import flip, load, records, states
from universal.inspect import look

PAGE = (ROOT / "CONTRIBUTING.md").read_text()
MAP, RECIPES, TESTS = re.split("## Recipes|## Tests", PAGE)
FILES = [*ROOT.glob("*.py"), *ROOT.glob("universal/*.py"), *ROOT.glob("universal/*/[!_]*.py")]
# From the highest to the lowest.
CORE = ("universal.load", "universal.checkpoint", "universal.files")
ROOMS = ("universal.batch", "universal.proving", "universal.save", "universal.write", *CORE)
# Beside load/ and save/.
WITH_TORCH = (
    "patches",
    "training",
    "samples",
    "comparison",
    "resume",
    "mirror",
    "proof",
    "trainer",
    "losses",
    "rollouts",
    "exact",
    "elastic",
    "background",
    "diff",
)


def name_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported(path, indent=" *"):
    """Modules that a file imports, and what it imports from them."""
    lines = rf"^{indent}(?:from ([\w.]+) )?import (\([^)]*\)|.*)"
    for module, names in re.findall(lines, path.read_text(), re.M):
        for name in re.findall(r"[\w.]+", names):
            yield from (module, f"{module}.{name}") if module else (name,)


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
        above = {*order[: order.index(name)]} - {"universal", *ROOMS}
        faults += [(name, module) for module in imported(path) if module in above]
    return faults


def test_map():
    assert not wrong(MAP)


def test_rooms():
    """Their order in the map is that of their imports; torch and DeepSpeed come in at the highest
    alone."""
    assert [name for name in listed(MAP) if name in ROOMS] == [*ROOMS]
    for path in ROOT.glob("universal/**/*.py"):
        if path.parent.name not in ("load", "save", "start") and path.stem not in WITH_TORCH:
            packages = {module.split(".")[0] for module in imported(path, indent="")}
            assert not packages & {"torch", "deepspeed"}, path


def test_a_wrong_map_is_seen():
    (line,) = re.findall(r"^        engine\.py.*\n", MAP, re.M)
    without = MAP.replace(line, "")
    assert wrong(without) == [("universal.load.engine", "is not in the map")]
    flat = re.search(r"^        flat\.py.*\n", without, re.M)[0]
    assert ("universal.load.engine", "universal.load.flat") in wrong(
        without.replace(flat, flat + line)
    )


def test_one_name_one_thing():
    """No top-level name is defined twice, but for what several modules offer alike."""
    homes = dict.fromkeys(["main", "install", "before_load", "compare", "after_load"])
    for path in ROOT.glob("universal/**/*.py"):
        for name in re.findall(r"^(?:def |class |(?=\w+ = ))(\w+)", path.read_text(), re.M):
            assert homes.setdefault(name, path) in (path, None), (name, path)


@pytest.fixture
def recipe():
    """recipe(number, {what stands there: what the test has}, names): the block of code, run."""
    blocks = re.findall("```python\n(.*?)```", RECIPES, re.S)

    def run(number, replaced, names):
        code = blocks[number]
        for old, new in replaced.items():
            assert old in code
            code = code.replace(old, new)
        exec(code, names)
        return names

    return run


def test_one_tensor_is_read(recipe, laid_out):
    source = laid_out(1)
    parts = [next(iter(states(load(path))))["exp_avg"] for path in sorted(source.glob("*_optim_*"))]
    replaced = {"global_step100": str(source), "transformer.wte.weight": "a"}
    data = recipe(0, replaced, {})["data"]
    assert torch.equal(torch.frombuffer(data, dtype=torch.float32), torch.cat(parts)[:15])
    for path in source.glob("*_optim_*"):
        for record in records(path)[-3:]:  # of 3 states of the largest group
            flip(path, record)
    with pytest.raises(universal.CheckpointError, match="is damaged"):
        recipe(0, replaced, {})


def test_a_command_is_added(recipe, laid_out):
    source = laid_out(3)
    main = recipe(1, {}, {"__name__": "count"})["main"]
    assert command(main, source.parent).out == "26\n"
    for path in source.glob("*_optim_*"):
        path.write_bytes(b"")
    failed(command(main, source), 2, "ds_count: error: ", "is damaged")


def test_a_release_is_followed():
    """The constant that the steps name is there."""
    ((name, path),) = re.findall(r"`([A-Z_]+)`\s+in\s+`([\w/]+\.py)`", RECIPES)
    assert re.search(rf"^{name} = ", (ROOT / path).read_text(), re.M)


def test_a_damage_is_added(recipe, laid_out):
    """Of a row that the table has."""
    source = laid_out(1)
    row = recipe(2, {"Damage(": "row = Damage("}, dict(vars(test_load_refuses)))["row"]
    source.rename(source.with_name("t"))
    row.change(source.parent)
    (problem,) = (facts["problem"] for facts in look(source.parent)["tags"].values())
    known = test_load_refuses.DAMAGES[row.name].expected(1)
    verdict, says, _ = row.expected(1)
    assert says in problem and says in known[1] and verdict == known[0]
