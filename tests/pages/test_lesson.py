"""docs/lesson.md: its exercises, done by their own commands, have the answers that it gives."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

from harness.ranks import compare, launch, read_log

PAGE = (ROOT / "docs" / "lesson.md").read_text()


def commands(start):
    """Those of the first block after `start`, up to the next heading or exercise."""
    text = re.split(r"\n## |\n\*\*\d+\. ", PAGE.split(start, 1)[1])[0]
    return [line.split("      #")[0].strip() for line in re.findall(r"^    (\S.*)$", text, re.M)]


def do(folder, start):
    """Runs these commands in the folder. Returns [(exit code, what it prints)]. What a launcher starts is forked."""
    found = []
    for command in commands(start):
        words = [word for word in shlex.split(command) if not re.match(r"\w+=", word)]
        if words[0] == "deepspeed":
            script = words[3] if words[3] == "train.py" else str(folder / words[3])
            result = launch(folder, int(words[2]), script, *words[4:], limit=600)
            found.append((result.code, result.out + result.errors))
        else:
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            options = dict(shell=True, cwd=folder, env=os.environ | {"PATH": path}, timeout=120)
            result = subprocess.run(command, capture_output=True, text=True, **options)
            found.append((result.returncode, result.stdout + result.stderr))
    return found


def succeed(folder, start):
    found = do(folder, start)
    assert found and not any(code for code, _ in found), found
    return [out for _, out in found]


@pytest.fixture(scope="module")
def folder(work):
    """The repository's files, as a reader has them, and nothing that a run has left there."""
    for path in ROOT.iterdir():
        if path.suffix == ".py" or path.name == "examples":
            (work / path.name).symlink_to(path)
    return work


@pytest.fixture(scope="module")
def trained(folder):
    """The commands of the first two sections."""
    looked = succeed(folder, "## A look into a shard")[1]
    numbers, names = map(eval, looked.splitlines())
    assert sum(numbers) == 118528 // 4 and "29,632" in PAGE and len(names) == len(set(names))
    succeed(folder, "## The proof")
    gaps = compare(folder, "default", "forty")
    assert gaps[101] == 0 and 0 < max(gaps.values()) <= 1e-5
    return folder


def test_every_exercise_has_a_folded_answer():
    section = PAGE.split("## Ten exercises")[1]
    parts = re.split(r"^\*\*(\d+)\. ", section, flags=re.M)[1:]
    assert parts[::2] == [str(n) for n in range(1, 11)]
    assert all(part.count("<details>") == part.count("</details>") == 1 for part in parts[1::2])


def test_the_lines_shown_are_the_file_s():
    source = (ROOT / "examples" / "forty_lines.py").read_text()
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert len(blocks) == 2 and all(block in source for block in blocks)


def test_a_minute_is_not_lost():
    minutes = [int(m) for m in re.findall(r"^\| (\d+) \|", PAGE, re.M)]
    assert sum(minutes) == 90


@pytest.mark.slow
def test_2_the_hidden_trap(folder):
    succeed(folder, "**2. The hidden trap.**")
    norms = [read_log(folder, name, "grad_norm")["grad_norm"][1] for name in ("right", "wrong")]
    assert norms[1] == pytest.approx(4 * norms[0], rel=1e-3)
    assert 1e-3 < max(compare(folder, "right", "wrong").values()) < 0.1


@pytest.mark.slow
def test_6_a_lost_moment(trained):
    succeed(trained, "**6. A lost moment.**")
    gaps = compare(trained, "default", "lost")
    assert gaps[101] == 0 and gaps[102] > 1e-4


def test_7_the_rounding_of_a_share(folder):
    (folder / "out").mkdir(exist_ok=True)
    train, right, edit, wrong = do(folder, "**7. The rounding of a share.**")
    assert (train[0], right[0], edit[0], wrong[0]) == (0, 0, 0, 1), (train, right, edit, wrong)
    assert re.search(r"`(shape .*?)`", PAGE)[1] in wrong[1]


@pytest.mark.slow
def test_8_dropout_by_rank(trained):
    (trained / "out").mkdir(exist_ok=True)
    succeed(trained, "**8. Dropout by rank.**")
    assert max(compare(trained, "default", "by_rank_4").values()) == 0
    assert compare(trained, "default", "by_rank_2")[101] > 1e-4


def test_9_from_8_to_6(folder):
    ((code, out),) = do(folder, "**9. From 8 GPUs to 6.**")
    assert code == 2 and "240 or 288" in out and "4 or 8 ranks" in out


@pytest.mark.slow
def test_10_where_the_difference_comes_from(folder):
    succeed(folder, "**10. Where 1e-07 comes from.**")
    assert max(compare(folder, "bits_4", "bits_2").values()) == 0
