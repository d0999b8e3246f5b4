"""plot.py: the numbers of the table, the joined CSV, the exit code, and zero drawn as zero."""

import csv
import os
from unittest.mock import MagicMock

import pytest

import plot as script
from tests.support.commands import command

HEADER = "step,loss,val_loss,lr,grad_norm,loss_scale,tokens_per_second,seconds,"


def write(path, losses, val=None, layout="batch,micro_batch,accumulation,ranks", cells="48,8,2,3"):
    with open(path, "w") as file:
        file.write(f"{HEADER}{layout}\n")
        for step, loss in losses.items():
            validation = (val or {}).get(step, "")
            file.write(f"{step},{loss!r},{validation},0.1,1.0,1.0,100.0,0.5,{cells}\n")


def falling(begin, end):
    """{step: loss}; a sum with a power of two has no rounding error."""
    return {step: 5.0 - 0.25 * step for step in range(begin, end + 1)}


def plot(folder, *words):
    """What it says; it draws where an output is named."""

    def prepare():
        os.chdir(folder)
        if "--output" not in words:
            script.draw = lambda *_: MagicMock()

    return command(script.main, *words, before=prepare)


@pytest.fixture
def logs(tmp_path):
    write(tmp_path / "base.csv", falling(1, 10), {10: 2.75})
    write(tmp_path / "same.csv", falling(6, 10), {10: 2.75}, cells="32,8,2,3")
    off = {step: loss + 2.0**-10 * (step >= 8) for step, loss in falling(6, 10).items()}
    # Logs of before have the layout in one column.
    write(tmp_path / "off.csv", off, {10: 3.0}, layout="layout", cells="8 x 2 x 3")
    return tmp_path


def test_table_picture_and_csv(logs):
    result = plot(logs, "base.csv", "same.csv", "off.csv", "--output", "out/picture.png")
    assert result.code == 0 and "PASS" not in result.out, result.err
    rows = [" ".join(line.split()) for line in result.out.splitlines()]
    assert "base 8 x 2 x 3 = 48 1-10 baseline 2.0" in rows
    assert "same 8 x 2 x 3 - 16 = 32 6-10 0.0e+00 0.0e+00 5 of 5 0.0e+00 2.0" in rows
    assert "off 8 x 2 x 3 = 48 6-10 0.0e+00 9.8e-04 2 of 5 2.5e-01 2.0" in rows
    assert (logs / "out" / "picture.png").read_bytes()[:4] == b"\x89PNG"
    with open(logs / "out" / "picture.csv", newline="") as file:
        joined = list(csv.DictReader(file))
    assert [row["step"] for row in joined] == [str(step) for step in range(1, 11)]
    assert joined[8]["base loss"] == "2.75" and float(joined[8]["off loss"]) == 2.75 + 2.0**-10
    assert joined[0]["same loss"] == "" and joined[9]["off val_loss"] == "3.0"


def test_tolerance(logs):
    """A loss that is no number differs from every number, and from itself."""
    write(logs / "short.csv", falling(6, 8))
    write(logs / "nan.csv", dict.fromkeys(range(6, 11), float("nan")))
    # One name in two folders.
    (logs / "again").mkdir()
    (logs / "again" / "base.csv").symlink_to(logs / "off.csv")
    off = "differs by 9.8e-04 at step 8 (training), more than 0.0001\n"
    assert plot(logs, "base.csv", "off.csv", "--tolerance", 0.3).code == 0
    for run, tolerance, code, words in (
        ("same.csv", 0, 0, "PASS: 0.0e+00 <= 0\n"),
        ("again/base.csv", 1e-4, 1, f"plot.py: again/base.csv {off}"),
        ("off.csv", 1e-4, 1, f"plot.py: off {off}"),
        ("short.csv", 0, 1, "plot.py: the runs end at different steps: {'base': 10, 'short': 8}\n"),
        ("nan.csv", 1e9, 1, "plot.py: nan differs by inf at step 6 (training), more than 1e+09\n"),
        ("same.csv", "nan", 1, "more than nan\n"),
    ):
        result = plot(logs, "base.csv", run, "--tolerance", tolerance)
        assert result.code == code and ("PASS" in result.out) == (not code)
        assert (result.err or result.out).endswith(words)


TWO = ["base.csv", "bad.csv"]
SAME = ["base.csv", "same.csv"]
BAD = ["", "a,b\n1,2\n", "step,loss,val_loss\n", "step,loss,val_loss\n1,x,\n"]


@pytest.mark.parametrize(
    "names, content, words",
    [
        *((TWO, content, "bad.csv") for content in BAD),
        (TWO, None, "bad.csv: no such file: has the run finished?"),
        (TWO, "step,loss,val_loss\n20,1.0,\n", "bad has no step in common with base"),
        (["base.csv"], None, "name two different logs, or more"),
        (["base.csv", "same.csv", "base.csv"], None, "name two different logs, or more"),
        ([*SAME, "--output", "same.png"], None, "would take the place of the log same.csv"),
        ([*SAME, "--output", "same.csv/a.png"], None, "same.csv/a.png cannot be written: "),
    ],
)
def test_refused(logs, names, content, words):
    if content is not None:
        (logs / "bad.csv").write_text(content)
    result = plot(logs, *names)
    assert result.code == 2 and result.err.count("\n") == 1 and words in result.err


def run(losses, val_loss=(), *layout):
    """layout: micro-batch, accumulation steps, ranks, batch."""
    return script.Run(losses, dict(val_loss), {}, script.Layout(*layout) if layout else None)


def draw(*runs):
    gaps = [script.differences(runs[0], other, "loss") for other in runs[1:]]
    return script.draw(script.in_words(dict(zip("abc", runs, strict=False))), gaps)


ONE, TWO = (8, 1, 1, 8), (4, 2, 1, 8)  # micro-batches


def test_zero_is_drawn_at_zero():
    """A log axis has no place for zero; the axis of the differences has."""
    top, strip = draw(run({1: 2.0, 2: 1.0}, (), *ONE), run({1: 2.0, 2: 1.001}, (), *TWO)).axes
    assert list(strip.lines[0].get_ydata()) == pytest.approx([0.0, 0.001])
    low, high = strip.get_ylim()
    zero, rounding = (strip.transData.transform((1, gap))[1] for gap in (0.0, 1e-7))
    assert low < 0 < 0.001 < high and strip.bbox.y0 < zero < rounding - 5  # can be told apart
    assert top.get_title() == "2 runs: the loss differs by 1.0e-03 at most"


def test_a_resumed_run_begins_the_picture():
    """Of the steps before the resume it shows two for five of those after it."""
    losses = {step: 1.0 + step for step in range(1, 201)}
    later = {step: loss for step, loss in losses.items() if step > 100}
    top, strip = draw(run(losses, {50: 1.0, 200: 2.0}), run(later, {200: 2.0})).axes
    (baseline, dots, *_) = top.lines
    assert (min(baseline.get_xdata()), max(baseline.get_xdata())) == (60, 200)
    assert list(dots.get_xdata()) == [200] and list(strip.lines[0].get_xdata()) == list(later)
    words = [top.get_title(), *(text.get_text() for text in top.get_legend().texts)]
    title = "Resumed after step 100: the loss is equal in every bit"
    assert words == [title, "a", "b", "validation loss (black: resumed)"]


# The step at which each run begins, its layout, and how the legend calls it.
LEGENDS = [
    {
        "a": (1, (64, 1, 4, 256), "4 ranks, uninterrupted"),
        "b": (101, (64, 1, 4, 256), "resumed on 4 ranks"),
        "c": (101, (64, 4, 1, 256), "resumed on 1 rank"),
    },
    {
        "pt_8": (1, (8, 4, 1, 32), "PyTorch, 4 micro-batches of 8"),
        "ds_ws2": (1, (8, 1, 2, 16), "DeepSpeed, 2 ranks, 1 micro-batch of 8"),
        "ds_ws3": (1, (8, 2, 3, 32), "DeepSpeed, 3 ranks, at most 2 micro-batches of 8"),
        "b": (1, (8, 4, 1, 32), "1 rank, 4 micro-batches of 8 (b)"),
        "c": (1, (8, 4, 1, 32), "1 rank, 4 micro-batches of 8 (c)"),
        "no_layout": (1, (), "no layout"),
    },
]


@pytest.mark.parametrize("legend", LEGENDS)
def test_legend(legend):
    """In words: what a run did, and its name only where two did the same."""
    runs = {name: run({begin: 1.0}, (), *layout) for name, (begin, layout, _) in legend.items()}
    assert list(script.in_words(runs)) == [words for *_, words in legend.values()]
