"""The core names none of what is added to it: where the files of an addition are deleted, and its
names in resume.ADD_ONS, checkpoints still load on other ranks."""

import re
import shutil

import pytest

from tests.support import ROOT
from tests.support.commands import run_python, slow

CORE = ("load", "checkpoint", "files", "errors", "lines", "patches")
# What is added, by the folder of its tests, with its names in resume.py; files that stand on it go
# with it.
ADDED = {
    "batch": ("batches batch advice guesses trainer rollouts", "batches saved"),
    "proof": ("proof proving", "proof"),
    "save": ("background mirror save elastic", "background plain"),
    "look": ("inspect diff", ""),
    "convert": ("write", ""),
    "exact": ("exact", ""),
}
SCRIPT = """
import sys

from tests.support.case import case, cases_of, restored, saved, test_case


@case(saved(), quick_stages=(1, 3), quick_ranks=(1, 3))
def loads(stage):
    restored(stage)


CASES = cases_of(sys.modules[__name__])
"""
# Lines of resume.py.
LISTS = re.compile(r"^(from universal[.\w]* import |ADD_ONS = \()(\w[^)\n]*)(,?\)|)$", re.M)
UNIVERSAL = ROOT / "universal"


def imported(path):
    """The modules of this package that a file imports anywhere, without the package's name."""
    text = path.read_text()
    names = re.findall(r"^ *from universal\.([\w.]+) import", text, re.M)
    for listed in re.findall(r"^ *from universal import (\([^)]*\)|.*)", text, re.M):
        names += re.findall(r"\w+", listed)
    return {name.split(".")[0] for name in names}


def files_of(name):
    path = UNIVERSAL / name
    return [*path.rglob("*.py")] if path.is_dir() else [path.with_suffix(".py")]


def test_the_core_names_no_addition():
    assert all(imported(path) <= {*CORE} for name in CORE for path in files_of(name))
    rooms = {*" ".join(files for files, _ in ADDED.values()).split()}
    known = {*CORE, *rooms, "resume", "start", "__init__", "__main__", "__pycache__", "py"}
    assert {path.name.split(".")[0] for path in UNIVERSAL.iterdir()} <= known


def with_dependents(files):
    """These files, and what imports any of them."""
    gone = {*files}
    rooms = [name for files, _ in ADDED.values() for name in files.split()]
    while more := {
        name
        for name in rooms
        if name not in gone and any(imported(path) & gone for path in files_of(name))
    }:
        gone |= more
    return gone


def copy_without(names, folder):
    """A copy of the package and of tests/ in which some of ADDED are deleted."""
    shutil.copytree(UNIVERSAL, folder / "universal")
    shutil.copytree(ROOT / "tests", folder / "tests")
    shutil.copy(ROOT / "pyproject.toml", folder)
    gone = with_dependents(name for added in names for name in ADDED[added][0].split())
    for room in names:
        shutil.rmtree(folder / "tests" / room)
    for name in gone:
        for path in (folder / "universal" / name, folder / "universal" / f"{name}.py"):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    words = [
        word for files, words in ADDED.values() if {*files.split()} & gone for word in words.split()
    ]
    resume = folder / "universal" / "resume.py"
    resume.write_text(LISTS.sub(without(words), resume.read_text()))
    (folder / "tests" / "load" / "test_core.py").write_text(SCRIPT)


def without(words):
    """Returns a function that takes these names out of a line of resume.py, or the whole line."""

    def shortened(line):
        begin, names, end = line.groups()
        left = [name for name in names.split(", ") if name not in words]
        return (
            begin + ", ".join(left) + end.replace(")", ",)")
            if left
            else "ADD_ONS = ()"
            if end
            else ""
        )

    return shortened


@pytest.mark.parametrize("names", [[*ADDED], *(slow([name]) for name in ADDED)], ids="+".join)
def test_deleted(tmp_path, names):
    copy_without(names, tmp_path)
    words = ["-q", "-p", "no:cacheprovider", "tests/load/test_core.py"]
    done = run_python("-m", "pytest", *words, folder=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout
