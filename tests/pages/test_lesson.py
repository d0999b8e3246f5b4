"""docs/lesson.ipynb: its cells run from top to bottom, its answers hold, and a wrong answer is
seen. In fewer steps than on the page, on forked ranks; `make lesson` runs it as a reader does."""

import contextlib
import faulthandler
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest

from measure.lesson import without_answers
from tests.pages.test_readme import broken_links
from tests.support import ROOT
from tests.support.ranks import launch

NOTEBOOK = json.loads((ROOT / "docs" / "lesson.ipynb").read_text())
CODE = {cell["id"]: cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"}
PAGE = "\n\n".join(
    "".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "markdown"
)
EXERCISES = dict(re.findall(r"\*\*Exercise (\d+)\.(.*?)(?=\*\*Exercise|\Z)", PAGE, re.S))
FENCED = re.compile(r"```python\n(.*?)```", re.S)
STEPS = 10
SAVED = 5
Popen = subprocess.Popen


class Forked:
    """Popen for a cell: what `deepspeed --master_port P --num_gpus N script.py ...` starts is
    forked, all else is started."""

    def __new__(cls, words, **options):
        return super().__new__(cls) if words[0] == "deepspeed" else Popen(words, **options)

    def __init__(self, words, **options):
        script = Path(words[5]).resolve()
        # A rank that gloo ends would print all that pytest has called.
        patch = faulthandler.disable
        result = launch(Path.cwd(), int(words[4]), script, *words[6:], patch=patch, grace=10)
        self.returncode = result.code
        self.stdout = (result.out + result.errors).splitlines(keepends=True)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


def execute(source, names):
    """Returns what the code prints; it leaves its names behind."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile("".join(source), "a cell", "exec"), names)
    return printed.getvalue()


@pytest.fixture(scope="module")
def lesson(work):
    """What the cells print, and the names that they leave behind. All have run, in a folder of
    their own."""
    for path in (ROOT / "docs", ROOT / "universal", ROOT / "requirements.txt", *ROOT.glob("*.py")):
        (work / path.name).symlink_to(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(work)
        patch.setattr(sys, "path", list(sys.path))
        patch.setattr(subprocess, "Popen", Forked)
        # To be as they were afterwards.
        for name in ("PATH", "CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR"):
            patch.setenv(name, os.environ.get(name, ""))
        patch.setenv("LESSON_STEPS", str(STEPS))
        patch.setenv("MPLBACKEND", "Agg")
        names = {"__name__": "__main__", "display": lambda figure: figure.canvas.draw()}
        printed = {name: execute(cell["source"], names) for name, cell in CODE.items()}
        yield SimpleNamespace(printed=printed, names=names)


def answer(number, names):
    """Run the folded code of an exercise."""
    (code,) = FENCED.findall(EXERCISES[number])
    return execute(code, names)


# -----------------------------------------------------------------------------
# top to bottom


def test_what_the_cells_print(lesson):
    printed = lesson.printed
    assert printed["install"] == "installed: nothing, all is there\n"
    assert printed["unequal"] == "ZeRO-1 finishes\nZeRO-2 fails\nZeRO-3 fails\n"
    error = "ZeRORuntimeException: The checkpoint being loaded used a DP world size of 4"
    assert error in printed["error"]
    assert "= 29632 parameters" in printed["look"] and 4 * 29632 == 118528 and "118,528" in PAGE
    assert "The TODO is still open" in printed["check"]
    assert "112 files are the same, bit for bit" in printed["check"]
    assert "84 of 84 tensors equal bit by bit" in printed["check"]
    assert "resumed from ckpt_lesson/mine" in printed["three"]
    assert "trained before on 4 ranks, now on 3: the loss differs by at most" in printed["three"]
    assert "written by 4 ranks, loaded on 2 without conversion" in printed["two"]


def test_2_and_3_ranks_go_on_and_a_lost_moment_shows_at_the_second_step(lesson):
    for gap in lesson.names["gaps"].values():
        assert list(gap) == list(range(SAVED + 1, STEPS + 1))
        assert gap[SAVED + 1] == 0 and 0 < max(gap.values()) < 1e-5
    gap = lesson.names["gaps_lost"]
    assert gap[SAVED + 1] == 0 and gap[SAVED + 2] > 1e-5
    assert f"WARNING: step {SAVED + 2}, trained before on 4 ranks" in lesson.printed["lost"]
    assert re.search("^ .* blocks.0.up.weight exp_avg$", lesson.printed["lost"], re.M)


def test_the_version_for_the_class_has_no_answers():
    notebook = without_answers(nbformat.read(ROOT / "docs" / "lesson.ipynb", 4))
    page = "".join(cell.source for cell in notebook.cells)
    assert "details" not in page and len(re.findall(r"\*\*Exercise \d", page)) == len(EXERCISES)
    assert not re.search("folded|new cell|lesson.ipynb", page)
    assert not any(cell.get("outputs") for cell in notebook.cells)


def test_a_command_that_fails_stops_the_notebook(lesson):
    with pytest.raises(RuntimeError, match="this command failed; the reason is above"):
        lesson.names["run"]("python ds_to_universal.py --input_folder missing")


# -----------------------------------------------------------------------------
# the converter

WRONG = [
    ("[at : at", "[at + 1 : 1 + at", "invalid for input of size"),
    ("cat(slices)", "cat(slices[::-1])", "numbers differ"),
    (".clone()", ".clone() + 1e-9", "numbers differ"),
    (".view(shape)", "", r"the shape is \(4096,\), should be \(64, 64\)"),
]


@pytest.mark.parametrize("right, wrong, message", WRONG)
def test_a_wrong_converter_fails(lesson, right, wrong, message):
    """Off by one, ranks in another order, a difference too small for any loss, a flat tensor."""
    (code,) = FENCED.findall(EXERCISES["3"])
    assert code.count(right) == 1
    names = dict(lesson.names)
    execute(code.replace(right, wrong), names)
    source = "".join(CODE["check"]["source"]).replace('"mine"', '"wrong"')
    with pytest.raises((AssertionError, RuntimeError), match=message):
        execute(source, names)


# -----------------------------------------------------------------------------
# accumulation


def test_traps(lesson):
    """Every trap shows where the page says that it does, and what is right does not."""
    measured = lesson.names["measured"]
    largest = {name: max(trap["gaps"]) for name, trap in measured.items()}
    # While the gradients are clipped, the loss does not show it.
    del largest["loss not divided"]
    right = {"no trap", "unequal sequences, weighted by tokens", "dropout by micro-batch"}
    whole = "whole local batch in every micro-step"
    assert {name for name in largest if largest[name] < 1e-5} == right | {whole}
    # None is compared with itself.
    assert all(largest[name] > 0 for name in right)
    norms = {name: trap["norm"] for name, trap in measured.items()}
    assert norms.pop("loss not divided") == pytest.approx(4, rel=1e-4)
    assert norms.pop("loss divided twice") == pytest.approx(1 / 4, rel=1e-4)
    # It has the norm of its last micro-step.
    del norms["optimizer step at every micro-step"]
    assert all(norm == pytest.approx(1, rel=0.05) for norm in norms.values())
    assert {name for name, trap in measured.items() if trap["sequences"] != 32} == {whole}
    assert measured[whole]["sequences"] == 4 * 32
    late = {"schedule at every micro-step"}
    assert {name for name, trap in measured.items() if trap["rate"] > 1.01} == late


def test_a_sum_in_bf16_stops_growing(lesson):
    growth = lesson.names["growth"]
    assert growth[8] == pytest.approx(8, rel=0.01) and growth[64] == pytest.approx(64, rel=0.05)
    assert 256 < growth[512] < 512 and growth[1024] == growth[512]


# -----------------------------------------------------------------------------
# homework


@pytest.mark.slow
def test_exercise_6(lesson):
    assert "112 files are the same" in answer("6", lesson.names)


@pytest.mark.slow
def test_exercise_8(lesson):
    printed = answer("8", lesson.names)
    assert "5 accumulation steps each; 3 of these 35 are repeats, with weight 0" in printed
    weights = ", ".join(f"({m}, {weight})" for m, weight in ((30, 35 / 32), (31, 35 / 32)))
    assert f"[{weights}, (0, 0.0), (1, 0.0), (2, 0.0)]" in printed
    assert "trained before on 4 ranks, now on 5: the loss differs by at most" in printed
    assert "computed again, with weight 0, and 15 of 15 losses are not 0" in printed
    assert max(lesson.names["gaps_five"]["five"].values()) < 1e-5


@pytest.mark.slow
def test_exercise_9(lesson):
    answer("9", lesson.names)
    gaps = lesson.names["gaps_third"]
    assert max(gaps["third_mended"].values()) < 1e-5
    assert gaps["third_stock"][SAVED + 1] == 0 and gaps["third_stock"][SAVED + 2] > 1e-5


def test_exercise_10(lesson):
    answer("10", lesson.names)
    assert 0 < lesson.names["exact_gap"] < 1e-12


# -----------------------------------------------------------------------------
# the page


def test_links():
    headings = {heading.replace(" ", "-") for heading in re.findall(r"^#+ (.*)$", PAGE, re.M)}
    assert {*re.findall(r"\]\(#([^)]+)\)", PAGE)} <= headings
    assert not [*broken_links("docs/lesson.ipynb", PAGE.replace("](#", ""))]


def test_it_is_committed_as_it_ran():
    """With no error, and no folder or host of the machine that ran it."""
    outputs = [output for cell in CODE.values() for output in cell["outputs"]]
    assert [cell["execution_count"] for cell in CODE.values()] == list(range(1, len(CODE) + 1))
    assert not [output for output in outputs if output["output_type"] == "error"]
    text = "".join("".join(output.get("text", "")) for output in outputs)
    assert text and not re.search(r"(?<![\w.])/\w|https?:|localhost", text)
