"""Two checkpoints compared, `python -m universal.diff`: nothing differs between a checkpoint and
what it converts into; what was changed is what is named, and by how much."""

import argparse
import math
import re
import shutil
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch

import universal.diff
from tests.support.commands import command, failed, run_python
from tests.support.files import MODEL, each_state, edit, flip, load
from tests.support.harms import truncate
from tests.support.lay_out import lay_out
from universal import convert
from universal.diff import diff
from universal.files.same import is_same
from universal.files.torch_file import Tensor, trim_storage
from universal.files.torch_file import load as read_pt


def compared(*words, **options):
    return command(universal.diff.main, *words, **options)


def add_more(model):
    """Buffers, one of them a view, and of the client state a list with a tensor."""
    model["module"]["view"] = torch.arange(12.0).view(3, 4).T
    model["module"]["nan"] = torch.tensor([math.nan, 1.0])
    model["buffer_names"] = ["view", "nan"]
    model["scores"] = [torch.ones(3), {"best": 1}]


def test_objects(tmp_path):
    """As keys of a dict, in sets that have their own order, and storages without a tensor."""

    def read(name, numbers, last=b"z"):
        storage = torch.ones(3).untyped_storage()
        content = {b"a": 1, (b"x", 2): numbers, last: storage}
        torch.save(content, tmp_path / name)
        return read_pt(tmp_path / name)

    first, same = read("first", {0, 8}), read("same", {8, 0})
    assert is_same(first, same)
    assert not is_same(first, read("number", {0, 9}))
    assert not is_same(first, read("key", {0, 8}, b"y"))


@pytest.fixture(params=[1, 3])
def pair(request, laid_out, tmp_path):
    """A checkpoint, and what it converts into."""
    source = laid_out(request.param, add_more)
    convert(source, tmp_path / "u")
    return source, tmp_path / "u"


def change(path, act):
    saved = load(path)
    act(saved["param"])
    torch.save(saved, path)


def test_the_same(pair):
    view = diff(*pair)
    assert (view["same"], view["gaps"], view["others"]) == (True, [], [])
    assert view["tensors"] == view["equal"] == 3 * 3 + 2
    assert view["bytes"] == 4 * (3 * (15 + 7 + 4) + 12 + 2)
    done = compared(*pair)
    assert (done.code, done.err) == (0, "") and "11 of 11 tensors equal bit by bit" in done.out


@pytest.fixture
def twins(laid_out, tmp_path):
    """A converted checkpoint, and its copy."""
    convert(laid_out(1, add_more), tmp_path / "u")
    return tmp_path / "u", shutil.copytree(tmp_path / "u", tmp_path / "v")


@pytest.mark.parametrize("chunk", [4, 1 << 20])
def test_numbers(twins, monkeypatch, chunk):
    """The largest gap of a tensor, in whichever piece it is, how many elements differ, and what the
    tolerance permits."""
    monkeypatch.setattr(universal.diff, "PIECE", chunk)
    moment, masters = "zero/a/exp_avg.pt", "zero/c/fp32.pt"
    for folder in twins:
        change(folder / moment, lambda tensor: tensor.fill_(2))
    changed = twins[1] / moment
    change(changed, lambda tensor: tensor.put_(torch.tensor([4, 14]), torch.tensor([2.5, 1.5])))
    view = diff(*twins)
    assert view["gaps"] == [("a exp_avg", 0.5, 0.25, 2, 15)]
    assert view["equal"] == view["tensors"] - 1 and not view["others"]
    assert compared(*twins, "--tolerance", 0.6).code == 0
    done = compared(*twins, "--tolerance", 0.4)
    assert done.code == 1 and "5.0e-01" in done.out and "DIFFERENT" in done.out
    change(twins[1] / masters, lambda tensor: tensor[3:].fill_(math.nan))
    of_c, of_a = diff(*twins)["gaps"]
    assert (of_c.name, of_c.absolute, of_c.elements) == ("c fp32", math.inf, 1)
    assert of_a.elements == 2


def test_bits(twins):
    """Equal is what has the same bits: -0 is not 0, whatever it is less 0; NaN is NaN. A tolerance
    permits numbers to be so far apart, and no NaN beside a number."""
    output, other = twins
    nan = torch.tensor(math.nan).view(torch.int32)
    for number, changed, gap in (
        (0.0, -0.0, 0.0),
        (1.0, 1.0 + 2**-23, 2**-23),
        (math.nan, (nan + 1).view(torch.float32).item(), 0.0),
        (math.nan, 1.0, math.inf),
        (math.inf, -math.inf, math.inf),
    ):
        for folder in (output, other):
            change(folder / "zero" / "b" / "exp_avg.pt", lambda b, number=number: b.fill_(number))
        assert diff(output, other)["same"]
        change(other / "zero" / "b" / "exp_avg.pt", lambda b, value=changed: b[2:4].fill_(value))
        view = diff(output, other)
        assert not view["same"] and view["equal"] == view["tensors"] - 1
        assert [(found.elements, found.absolute) for found in view["gaps"]] == [(2, gap)]
        assert diff(output, other, 1e-6)["same"] == (gap < 1e-6)


CHANGES = {
    "scheduler last_batch_iteration: 100, 7": lambda model: model["lr_scheduler"].update(
        last_batch_iteration=7
    ),
    "counter global_samples: 100, 7": lambda model: model.update(global_samples=7),
    "client state scores: [Tensor(": lambda model: model["scores"][0].add_(1),
    "client state new: 'nothing', None": lambda model: model.update(new=None),
    "tensor nan: ['float32', 2], 'nothing'": lambda model: (
        model["module"].pop("nan"),
        model["buffer_names"].remove("nan"),
    ),
    "tensor view: ['float32', 4, 3], ['float64', 4, 3]": lambda model: model["module"].update(
        view=model["module"]["view"].double()
    ),
    "module's word: 'nothing', 'x'": lambda model: model["module"].update(word="x"),
}


def endless(number):
    """A list that contains itself."""
    values = [number]
    values.append(values)
    return values


VIEW = torch.arange(12.0).view(3, 4)
SAME = (
    ({"a": [torch.ones(3)]}, {"a": (torch.ones(3),)}, True),
    (torch.zeros(3), torch.zeros(3, dtype=torch.int32), False),
    (VIEW[:, 1], torch.tensor([1.0, 5, 9]), True),
    (VIEW[0], VIEW[1], False),
    (VIEW.t(), VIEW.t().contiguous(), True),
    (torch.zeros(1), -torch.zeros(1), False),
    (torch.nn.Parameter(torch.ones(2)), torch.ones(2), True),
    ([3, math.nan, None], [3.0, math.nan, None], True),
    ({"a": 1}, {"a": 1, "b": None}, False),
    (argparse.Namespace(x=[torch.ones(2)]), argparse.Namespace(x=[torch.zeros(2)]), False),
    (argparse.Namespace(x=1), SimpleNamespace(x=1), False),
    (torch.float16, torch.bfloat16, False),
    (endless(1), endless(1), True),
    (endless(1), endless(2), False),
)


@pytest.mark.parametrize("checksums", [True, False])
def test_what_is_the_same(tmp_path, checksums):
    """Whatever file it is in."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(checksums)
    try:
        for a, b, same in SAME:
            torch.save(a, tmp_path / "a.pt")
            torch.save([0, b], tmp_path / "b.pt")
            loaded = read_pt(tmp_path / "a.pt"), read_pt(tmp_path / "b.pt")[1]
            assert is_same(*loaded) is is_same(*reversed(loaded)) is same, (a, b)
            trimmed = [trim_storage(x) if isinstance(x, Tensor) else x for x in loaded]
            assert is_same(*trimmed) is same, (a, b)
    finally:
        torch.serialization.set_crc32_options(before)


@pytest.mark.parametrize("words", CHANGES)
def test_the_rest(pair, words):
    """Each change is one line; nothing else is said."""
    source, output = pair
    (output / f"zero_pp_rank_0_{MODEL}").unlink()
    edit(output, MODEL, CHANGES[words])
    view = diff(source, output)
    (line,) = view["others"]
    assert line.startswith(words) and not view["gaps"] and not view["same"]
    assert compared(source, output, "--tolerance", 10).code == 1


def test_hyperparameters_and_step_counts(pair):
    """Also numbers that differ far behind the point; of many of a kind, one line."""
    source, output = pair
    rate = 1e-4 + 1e-16
    edit(output / "zero", "optimizer_state.pt", lambda s: s["param_groups"][1].update(lr=rate))
    for name in "ab":
        torch.save(torch.tensor(99.0), output / "zero" / name / "step.pt")
    lines = diff(source, output)["others"]
    assert lines == [f"group 1 lr: 0.0001, {rate!r}", "step of a: 100.0, 99.0; b: 100.0, 99.0"]


def test_another_model(pair, laid_out, tmp_path):
    """Parameters that one lacks, or that have another shape: one screen."""
    source, _ = pair
    other = source.rename(tmp_path / "before")
    shapes = [OrderedDict(a=torch.Size((3, 3)), d=torch.Size((7,)))]
    shapes.append(OrderedDict((f"{'layer.' * 20}{i}", torch.Size((2,))) for i in range(20)))
    done = compared(other, laid_out(1, shapes=shapes))
    text = " ".join(done.out.split())
    for words in (
        "tensor a fp32: ['float32', 5, 3], ['float32', 3, 3]; ",
        "; and 71 more",
        "group of b: 0, 'nothing'; ",
    ):
        assert words in text, text
    assert done.code == 1 and len(done.out.splitlines()) <= 40, done.out


def test_what_belongs_to_a_rank_is_not_said_to_be_equal(laid_out):
    add = each_state(lambda state: state.update(rows=torch.ones(3)))
    source = laid_out(1, shard=add)
    (line,) = diff(source, source)["others"]
    assert "rows of the optimizer belongs to a rank: it is not compared" in line


def test_damage(pair, tmp_path):
    """Exit code 2, and the file, in a line: a comparison of damaged bytes says nothing. Of both
    sides, and also where all that was compared is equal."""
    source, output = pair
    absent = tmp_path / "absent"
    failed(compared(source, absent), 2, "universal.diff: error: ", "does not exist")
    flip(output / "zero" / "b" / "fp32.pt")
    failed(compared(source, output), 2, "universal.diff: error: ", "fp32.pt is damaged")
    failed(compared(output, output), 2, "universal.diff: error: ", "fp32.pt is damaged")
    (path,) = source.glob("*rank_1*optim*")
    truncate(path)
    failed(compared(source, output), 2, path.name)


@pytest.mark.parametrize("stage", [1, 3])
def test_shards_of_many_ranks(stage, tmp_path):
    """Flat tensors that both sides have cut alike are compared whole, by processes of their own:
    what is in one of them is named by its parameter, and counted once."""
    first, second = tmp_path / "a", tmp_path / "b"
    groups = [{f"layer.{i}": torch.Size((9, 7)) for i in range(5)}, {"bias": torch.Size((50,))}]
    lay_out(first, groups, 40, stage)
    shutil.copytree(first, second)

    def compared_by_a_process():
        return run_python("-m", "universal.diff", first, second)

    done = compared_by_a_process()
    assert done.returncode == 0 and "18 of 18 tensors equal bit by bit" in done.stdout, done.stderr
    edit(second, "*_rank_7_*optim_states.pt", each_state(lambda state: state["exp_avg"].add_(1)))
    done = compared_by_a_process()
    assert done.returncode == 1, done.stderr
    named = re.findall(r"(\d+) of \d+ +(\S+ \S+)$", done.stdout, re.M)
    assert named and {name.split()[1] for _, name in named} == {"exp_avg"}
    assert f"{18 - len(named)} of 18 tensors equal" in done.stdout
    flip(next(second.glob("*_rank_20_*optim_states.pt")))
    done = compared_by_a_process()
    assert done.returncode == 2 and "_rank_20_" in done.stderr and "damaged" in done.stderr
    done = run_python("-m", "universal.inspect", second)
    assert done.returncode == 2 and "_rank_20_" in done.stdout and not done.stderr
    next(second.glob("*_rank_17_*optim_states.pt")).unlink()
    done = compared_by_a_process()
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "_rank_17_" in done.stderr
