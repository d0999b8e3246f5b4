"""Exit codes: one meaning each, in every command, as the table of docs/inspect.md says."""

import re
import shutil

import pytest

import ds_to_universal
import measure.weights
import plot
import universal.diff
import universal.inspect
from tests.support import ROOT
from tests.support.commands import command
from tests.support.files import MODEL, edit, flip
from universal import convert, elastic

LOG = "step,loss,val_loss,lr\n1,{0},,0.1\n"
CASES = {
    "inspect, complete": (universal.inspect.main, "c", 0),
    "inspect, damage": (universal.inspect.main, "damaged", 2),
    "inspect, a wrong word": (universal.inspect.main, "c --ranks x", 2),
    "diff, equal": (universal.diff.main, "c u", 0),
    "diff, different": (universal.diff.main, "c other", 1),
    "diff, damage": (universal.diff.main, "c damaged", 2),
    "diff, without ZeRO": (universal.diff.main, "c plain", 2),
    "converter": (ds_to_universal.main, "--input_folder c --output_folder new", 0),
    "converter, a file in the way": (
        ds_to_universal.main,
        "--input_folder c --output_folder a/b",
        2,
    ),
    "plot, equal": (plot.main, "a same --tolerance 0", 0),
    "plot, different": (plot.main, "a b --tolerance 0", 1),
    "plot, none": (plot.main, "a absent", 2),
    "weights, none": (measure.weights.main, "absent absent absent", 2),
}


@pytest.fixture
def work(laid_out, tmp_path, monkeypatch):
    laid_out(3).rename(tmp_path / "other")
    source = laid_out(1)
    convert(source, tmp_path / "u")
    shutil.copytree(source, tmp_path / "damaged")
    flip(min((tmp_path / "damaged").glob("*_optim_*")))
    for name, loss in (("a", 1.0), ("same", 1.0), ("b", 2.0)):
        (tmp_path / name).write_text(LOG.format(loss))
    shutil.copytree(source, tmp_path / "plain")
    for shard in (tmp_path / "plain").glob("*_optim_*"):
        shard.unlink()
    edit(tmp_path / "plain", MODEL, lambda model: model.update(param_shapes=None))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", CASES)
def test_commands(work, name):
    main, words, code = CASES[name]
    done = command(main, *words.split())
    assert done.code == code and "Traceback" not in done.err, done.err


def test_the_table():
    """What it has is what there is."""
    page = (ROOT / "docs" / "inspect.md").read_text()
    rows = re.findall(r"^\| (\d[\d, ]*) \|", page, re.M)
    assert rows == ["0", "1", "2", f"130, {elastic.STOPPED}"]
