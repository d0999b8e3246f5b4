"""Two checkpoints compared, `python -m universal.diff`: nothing differs between a checkpoint and
what it converts into; what was changed is what is named, and by how much."""

import math
import sys
from collections import OrderedDict

import pytest
import torch
from helpers import MODEL, edit, failed, flip, forked, load

import universal.diff
from universal import convert
from universal.diff import diff


def compared(*words):
    """The command's exit code, and what it says."""

    def work():
        sys.argv = ["diff.py", *map(str, words)]
        universal.diff.main()

    return forked(work)()


def add_buffers(model):
    model["module"]["view"] = torch.arange(12.0).view(3, 4).T
    model["module"]["nan"] = torch.tensor([math.nan, 1.0])
    model["buffer_names"] = ["view", "nan"]
    model["scores"] = [torch.ones(3), {"best": 1}]


@pytest.fixture(params=[1, 3])
def pair(request, laid_out, tmp_path):
    """A checkpoint, and what it converts into."""
    source = laid_out(request.param, add_buffers)
    convert(source, tmp_path / "u")
    return source, tmp_path / "u"


def change(path, act):
    saved = load(path)
    act(saved["param"])
    torch.save(saved, path)


def test_the_same(pair):
    found = diff(*pair)
    assert (found["same"], found["gaps"], found["others"]) == (True, [], [])
    assert found["tensors"] == found["equal"] == 3 * 3 + 2
    done = compared(*pair)
    assert (done.code, done.err) == (0, "") and "11 of 11 tensors are equal" in done.out


@pytest.mark.parametrize("chunk", [2, 1 << 20])
def test_numbers(pair, monkeypatch, chunk):
    """The largest gap of a tensor, in whichever chunk it is, how many elements differ, and what the
    tolerance permits."""
    source, output = pair
    monkeypatch.setattr(universal.diff, "CHUNK", chunk)
    shape = load(output / "zero" / "a" / "exp_avg.pt")["param"].shape
    number = torch.zeros(shape)
    number[1, 1], number[4, 2] = 0.5, -0.25
    change(output / "zero" / "a" / "exp_avg.pt", lambda tensor: tensor.add_(number))
    change(output / "zero" / "c" / "fp32.pt", lambda tensor: tensor[3:].fill_(math.nan))
    found = diff(source, output)
    of_c, of_a = found["gaps"]
    assert of_c.name == "c fp32" and of_c.absolute == math.inf and of_c.elements == 1
    assert of_a.name == "a exp_avg" and of_a.elements == 2
    assert of_a.absolute == pytest.approx(0.5, rel=1e-6)
    assert found["equal"] == found["tensors"] - 2 and not found["others"]
    change(output / "zero" / "c" / "fp32.pt", lambda t: t.copy_(whole(source, output, "c")))
    assert compared(source, output, "--tolerance", 0.6).code == 0
    done = compared(source, output, "--tolerance", 0.4)
    assert done.code == 1 and "5.0e-01" in done.out and "DIFFERENT" in done.out


def whole(source, output, name):
    """The weights as they were, converted once more."""
    convert(source, output.with_name("again"))
    return load(output.with_name("again") / "zero" / name / "fp32.pt")["param"]


CHANGES = {
    "scheduler: ": lambda model: model["lr_scheduler"].update(last_batch_iteration=7),
    "counter global_samples: ": lambda model: model.update(global_samples=7),
    "client state scores: ": lambda model: model["scores"][0].add_(1),
    "client state new is in the second alone": lambda model: model.update(new=None),
    "in the first alone (1): nan": lambda model: (
        model["module"].pop("nan"),
        model["buffer_names"].remove("nan"),
    ),
}


@pytest.mark.parametrize("words", CHANGES)
def test_the_rest(pair, words):
    """Each change is one line; nothing else is said."""
    source, output = pair
    for path in {MODEL, f"zero_pp_rank_0_{MODEL}"}:
        (output / path).unlink() if path != MODEL else edit(output, MODEL, CHANGES[words])
    found = diff(source, output)
    (line,) = found["others"]
    assert line.startswith(words) and not found["gaps"] and not found["same"]


def test_hyperparameters_and_step_counts(pair):
    source, output = pair
    edit(output / "zero", "optimizer_state.pt", lambda s: s["param_groups"][1].update(lr=1.0))
    torch.save(torch.tensor(99.0), output / "zero" / "b" / "step.pt")
    first, second = diff(source, output)["others"]
    assert first == "group 1 lr: 0.0001, 1.0" and second == "step of b: 100.0, 99.0"


def test_another_model(pair, laid_out, tmp_path):
    """Parameters that one lacks, or that have another shape."""
    source, output = pair
    other = source.rename(tmp_path / "before")
    shapes = [OrderedDict(a=torch.Size((3, 3)), d=torch.Size((7,)))]
    found = diff(other, laid_out(1, shapes=shapes))
    text = "\n".join(found["others"])
    for words in ("in the first alone (8): b exp_avg", "in the second alone (3): d exp_avg"):
        assert words in text
    assert "a fp32 is (5, 3) in the first, (3, 3) in the second" in text


def test_damage(pair, tmp_path):
    """Exit code 2, and the file, in a line: a comparison of damaged bytes says nothing."""
    source, output = pair
    flip(output / "zero" / "b" / "fp32.pt")
    failed(compared(source, output), 2, "universal.diff: error: ", "fp32.pt is damaged")
    failed(compared(source, tmp_path / "absent"), 2, "does not exist")
