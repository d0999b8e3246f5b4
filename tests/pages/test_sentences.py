"""Docstrings and signatures: a docstring's first sentence stands by itself, and a function that
another file calls says what it returns."""

import ast
import collections
import re

from tests.support import ROOT

OURS = sorted(
    path
    for pattern in ("*.py", "universal/**/*.py", "examples/*.py", "measure/**/*.py", "docs/*.py")
    for path in ROOT.glob(pattern)
)
# A preposition or a conjunction that nothing stands before, or a literal.
FRAGMENT = re.compile(
    r"(Of|That|Those|In|As|By|With|Without|For|From|At|On|To|But|Which|Whose|Where|When|If|Once"
    r"|None|Beside|Until|Into|And|Or|Over|Under|Ahead|After|Before|Both)\b|[^A-Z]"
)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def definitions(tree):
    return [node for node in ast.walk(tree) if isinstance(node, (*FUNCTIONS, ast.ClassDef))]


def fragments(tree):
    """The docstrings of functions and classes that begin as no sentence does."""
    texts = [ast.get_docstring(node) for node in definitions(tree)]
    return [text.splitlines()[0] for text in texts if text and FRAGMENT.match(text)]


def test_first_sentences():
    for path in OURS:
        assert not fragments(ast.parse(path.read_text())), path


def test_a_fragment_is_seen():
    lines = ["Of all ranks.", "{name: value} of a group.", "In which a rank waits.", "Returns a."]
    functions = [f'def f():\n    """{line}"""\n' for line in lines]
    assert fragments(ast.parse("".join(functions))) == lines[:3]


PACKAGE = [path for path in OURS if path.is_relative_to(ROOT / "universal")]
TREES = {path: ast.parse(path.read_text()) for path in PACKAGE}
NAMES = collections.Counter(
    name for tree in TREES.values() for name in {node.name for node in definitions(tree)}
)


def used_by(path):
    """Names that a file imports, or takes as attributes."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield node.attr


USED = {path: {*used_by(path)} for path in OURS}


def without_returns(path, tree):
    """Yields functions of a name that no other file defines, which another file uses, and which do
    not say what they return."""
    used = set().union(*(names for other, names in USED.items() if other != path))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    for node in [*tree.body, *(method for holder in classes for method in holder.body)]:
        if isinstance(node, FUNCTIONS) and node.name in used and NAMES[node.name] == 1:
            if not node.returns:
                yield node.name


def test_returns():
    faults = {str(path): [*without_returns(path, tree)] for path, tree in TREES.items()}
    assert not any(faults.values()), {path: names for path, names in faults.items() if names}


def test_a_function_that_says_nothing_is_seen():
    path = ROOT / "universal" / "checkpoint" / "tags.py"
    said = "def choose_tag(folder) -> None: ..."
    assert not [*without_returns(path, ast.parse(said))]
    assert [*without_returns(path, ast.parse(said.replace(" -> None", "")))] == ["choose_tag"]
