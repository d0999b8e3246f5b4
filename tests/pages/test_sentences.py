"""Docstrings and signatures: a docstring's first sentence stands by itself, and a function that
another file calls says what it returns."""

import collections
import re

from tests.support import ROOT

TEXTS = {
    path: path.read_text()
    for pattern in ("*.py", "universal/**/*.py", "examples/*.py", "measure/**/*.py", "docs/*.py")
    for path in ROOT.glob(pattern)
}
# A preposition or a conjunction that nothing stands before, or a literal.
FRAGMENT = re.compile(
    r"(Of|That|Those|In|As|By|With|Without|For|From|At|On|To|But|Which|Whose|Where|When|If|Once"
    r"|None|Beside|Until|Into|And|Or|Over|Under|Ahead|After|Before|Both)\b|[^A-Z]"
)


def fragments(text):
    """The docstrings of functions and classes that begin as no sentence does."""
    lines = re.findall(r':\n +"""(.*?)(?:"""|$)', text, re.M)
    return [line for line in lines if FRAGMENT.match(line)]


def test_first_sentences():
    assert not [line for text in TEXTS.values() for line in fragments(text)]


def test_a_fragment_is_seen():
    lines = ["Of all ranks.", "{name: value} of a group.", "In which a rank waits.", "Returns a."]
    functions = [f'def f():\n    """{line}"""\n' for line in lines]
    assert fragments("".join(functions)) == lines[:3]


PACKAGE = {path: text for path, text in TEXTS.items() if path.is_relative_to(ROOT / "universal")}
DEFINITION = re.compile(r"\b(?:def|class) (\w+)")
# Of a function, or a method, that does not say what it returns: parentheses within its arguments.
SAYS_NOTHING = re.compile(
    r"^(?:def |    def (?=\w+\(\s*self))(\w+)\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\):", re.M
)
NAMES = collections.Counter(
    name for text in PACKAGE.values() for name in {*DEFINITION.findall(text)}
)


def used_by(text):
    """Names that a file imports, or takes as attributes."""
    imports = re.findall(r"^ *from .* import (\([^)]*\)|.*)", text, re.M)
    return {*re.findall(r"\w+", " ".join(imports)), *re.findall(r"(?<=[\w\])]\.)\w+", text)}


USED = {path: used_by(text) for path, text in TEXTS.items()}


def without_returns(path, text):
    """Functions of a name that no other file defines, which another file uses, and which do not
    say what they return."""
    used = set().union(*(names for other, names in USED.items() if other != path))
    return [name for name in SAYS_NOTHING.findall(text) if name in used and NAMES[name] == 1]


def test_returns():
    assert not [name for item in PACKAGE.items() for name in without_returns(*item)]


def test_a_function_that_says_nothing_is_seen():
    path = ROOT / "universal" / "checkpoint" / "tags.py"
    said = "def choose_tag(folder) -> None: ..."
    assert not without_returns(path, said)
    assert without_returns(path, said.replace(" -> None", "")) == ["choose_tag"]
