"""docs/troubleshooting.md: every message that it quotes is in the sources of the program that
prints it."""

import ast
import functools
import importlib.util
import re
from pathlib import Path

import pytest

from tests.support import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
OURS = [*ROOT.glob("*.py"), *ROOT.glob("universal/**/*.py"), ROOT / "examples/megatron_info.py"]
DEEPSPEED, TRANSFORMERS = (
    Path(importlib.util.find_spec(package).origin).parent
    for package in ("deepspeed", "transformers")
)
SOURCES = {  # section: files
    "DeepSpeed": [DEEPSPEED / "runtime/engine.py", DEEPSPEED / "runtime/config.py"],
    "Trainer": [TRANSFORMERS / "integrations/deepspeed.py"],
    "This repository": OURS,
    "A resume that is not the same": [
        *ROOT.glob("universal/pro*/*.py"),
        ROOT / "universal/proof.py",
    ],
}
ELSEWHERE = (  # in other files
    "The size of tensor a (...) must match the size of tensor b (...) at non-singleton dimension 0",
    "assert len(self.ckpt_list) > 0",
    "'dict' object has no attribute 'view'",
)


def messages(page):
    """[(section, message)]."""
    for section in re.split(r"^## ", page, flags=re.M)[1:]:
        for message in re.findall(r"^### `(.*?)`(?=$|, )", section, re.M):
            yield section.split("\n")[0], message


def strings(source):
    """Every string of a source, with "..." for what is filled in."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = [
                part.value if isinstance(part, ast.Constant) else "..." for part in node.values
            ]
            yield " ".join("".join(parts).split())
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield " ".join(node.value.split())


@functools.cache
def printed(section):
    """All strings of a section's sources."""
    texts = "\n".join(path.read_text() for path in SOURCES[section])
    return "\n".join(re.sub(r"[.\s]*\.\.\.\s*", "...", line) for line in strings(texts))


def is_printed(section, message):
    return re.sub(r"\s*\.\.\.\s*", "...", message).strip(".") in printed(section)


MESSAGES = [*messages(PAGE)]


@pytest.mark.parametrize(
    "section, message", [pair for pair in MESSAGES if pair[1] not in ELSEWHERE]
)
def test_message(section, message):
    assert is_printed(section, message)


def test_a_wrong_message_is_seen():
    assert {*ELSEWHERE} < {message for _, message in MESSAGES} and len(MESSAGES) >= 25
    assert not is_printed("DeepSpeed", "Unable to find newest file at ...")


def test_every_variable_of_ours_is_on_a_page():
    files = [*ROOT.glob("*.py"), *ROOT.glob("universal/**/*.py"), *ROOT.glob("measure/*.py")]
    ours = r'"((?:TORCH(?!_CPP)|DS(?!_TEST)|CUBLAS|OMP)_[A-Z_]+)"'
    used = re.findall(ours, "".join(path.read_text() for path in files))
    pages = "".join(path.read_text() for path in (ROOT / "README.md", *ROOT.glob("docs/*.md")))
    assert used and {*used} <= {*re.findall(r"[A-Z]+_[A-Z_]+", pages)}
