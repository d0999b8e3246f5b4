"""Checkpoints that Megatron-DeepSpeed itself wrote, in tests/data: 2 layers of width 16 with 4
heads, bf16, ZeRO-1, tensor-parallel degree 2. Converted as DeepSpeed does it; and
examples/megatron_info.py, which completes what Megatron says of how its weights are cut."""

import contextlib
import enum
import os
import re
import runpy
import sys
import tarfile
import types
from pathlib import Path

import pytest
import torch

import universal
from tests.support import ROOT
from tests.support.commands import command, failed
from tests.support.conversions import assert_equal_file, convert_with_deepspeed, not_converted
from tests.support.files import MODEL, content, edit, load
from universal.checkpoint.describe import describe

# The archive in tests/data, the files with the weights of each rank, the dicts in which they are
# there, and the first layer's name.
CHECKPOINTS = [
    ("megatron-tp2-pp2-dp2", "layer_02-model_{:02}-model_states.pt", (), "2."),
    (
        "megatron-tp2-dp2-no-pipeline",
        "mp_rank_{:02}_model_states.pt",
        ("module", "language_model", "encoder"),
        "layers.0.",
    ),
]
QKV = "self_attention.query_key_value"
DENSE = "self_attention.dense.weight"


@pytest.fixture(autouse=True)
def megatron(monkeypatch):
    """As much of Megatron as torch.load() imports for these files."""
    enums = types.ModuleType("megatron.core.enums")
    enums.ModelType = enum.Enum("ModelType", {"encoder_or_decoder": 1, "encoder_and_decoder": 2})
    enums.ModelType.__module__ = enums.__name__
    for module in (types.ModuleType("megatron"), types.ModuleType("megatron.core"), enums):
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.fixture(params=CHECKPOINTS, ids=lambda parts: parts[0])
def saved(request, tmp_path):
    """(folder, name of the first layer, [the layer's parameters on each rank])"""
    name, files, dicts, layer = request.param
    with tarfile.open(ROOT / "tests" / "data" / f"{name}.tar.xz") as archive:
        archive.extractall(tmp_path)  # of this repository
    folder = tmp_path / "global_step2"
    ranks = []
    for rank in range(2):
        weights = load(folder / files.format(rank))
        for key in dicts:
            weights = weights[key]
        ranks.append({key.removeprefix(layer): weight for key, weight in weights.items()})
    return folder, ".".join((*dicts[1:], layer)), ranks


def test_a_rank_without_a_state(saved):
    """As of an earlier save with another optimizer."""

    def change(shard):
        for state in shard["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            del state["exp_avg"]

    edit(saved[0], "*_mp_rank_01_optim_states.pt", change)
    with pytest.raises(
        universal.CheckpointError, match="ranks have other states of .* than rank 0"
    ):
        universal.convert(saved[0])


@pytest.mark.parametrize("saved", CHECKPOINTS[:1], indirect=True)
def test_weights_that_a_script_set(saved):
    """A load takes them of no tensor parallelism; so they are named, and nothing is written."""
    folder, layer, _ = saved
    edit(folder, "layer_02-model_01-*", lambda weights: weights[DENSE].add_(1))
    words = f"1 of the module's weights are not the optimizer's masters ({layer}{DENSE})"
    not_converted(folder, words, "--no_strict")
    with pytest.warns(UserWarning, match="which alone are kept"):
        universal.convert(folder, strict=False)


def test_equal_to_deepspeed(saved, tmp_path):
    """DeepSpeed's converter fails itself where `module` is nested: after the states are written,
    before the rest."""
    source, _, _ = saved
    ours = tmp_path / "ours"
    theirs = tmp_path / "theirs"
    universal.convert(source, ours, check=True)
    nested = load(source / MODEL)["module"] is not None
    with pytest.raises(AttributeError) if nested else contextlib.nullcontext():
        convert_with_deepspeed(source, theirs)
    names = [path.relative_to(theirs) for path in (theirs / "zero").glob("*/*.pt")]
    assert len(names) >= 84 and len([*(ours / "zero").glob("*/*.pt")]) == len(names)
    for name in names:
        assert_equal_file(load(ours / name), load(theirs / name), name)
    for path in source.glob("mp_rank_*_model_states.pt"):
        wanted = load(path)
        got = load(ours / path.name)
        assert wanted.keys() == got.keys() and repr(wanted) == repr(got)
        assert wanted["args"].lr == got["args"].lr


def run_example(*words):
    script = str(ROOT / "examples" / "megatron_info.py")
    return command(lambda: runpy.run_path(script, run_name="__main__"), *words)


def test_the_weights_alone(saved, tmp_path, monkeypatch):
    """The lines of docs/converter.md give every parameter whole."""
    page = (ROOT / "docs/converter.md").read_text()
    [lines] = re.findall(r"^```python\n(zero = .*?)^```", page, re.M | re.S)
    folder, *_ = saved
    universal.convert(folder, tmp_path / "global_step100_universal")
    monkeypatch.chdir(tmp_path)
    names = {"Path": Path, "torch": torch}
    exec(lines, names)
    parameters = describe(folder).parameters
    assert {name: tuple(weight.shape) for name, weight in names["weights"].items()} == {
        name: parameter.shape for name, parameter in parameters.items()
    }


def test_what_megatron_leaves_out(saved):
    """How Q, K and V lie in one matrix; saved at degree 1, which weights are cut by rows; how many
    rows of the vocabulary are trained, padding, too: without the entries, the whole is not what the
    ranks have. The entries are all that changes in the files."""
    folder, name, ranks = saved
    spoilt = {"parameter_with_row_parallelism_patterns": [], "original_vocab_size": 250}
    edit(folder, MODEL, lambda model: model["universal_checkpoint_info"].update(spoilt))
    before = load(folder / MODEL)
    files = content(folder)
    vocabulary = next(iter(before["param_shapes"][0]))
    wanted = {name + DENSE: torch.cat([rank[DENSE] for rank in ranks], dim=1)}
    for key in (f"{QKV}.weight", f"{QKV}.bias"):
        thirds = zip(*(rank[key].chunk(3) for rank in ranks), strict=True)
        wanted[name + key] = torch.cat([part for third in thirds for part in third])

    def converted(output):
        """Whether each weight is as wanted, and the rows of the vocabulary."""
        zero = folder.parent / output / "zero"
        universal.convert(folder, zero.parent)
        weights = {key: load(zero / key / "fp32.pt")["param"] for key in (*wanted, vocabulary)}
        equal = [torch.equal(weights[key].bfloat16(), tensor) for key, tensor in wanted.items()]
        return equal, weights[vocabulary]

    equal, rows = converted("as_it_is")
    assert not any(equal) and rows.shape == (250, 16)
    printed = run_example(folder).out
    for words in ("query_key_value", "dense_4h_to_h", "original_vocab_size: 256, was 250"):
        assert words in printed
    equal, all_rows = converted("completed")
    assert all(equal)
    assert all_rows.shape == (256, 16)
    assert torch.equal(all_rows[:250], rows) and all_rows[250:].any()
    assert run_example(folder).out == "nothing is missing\n"

    after = load(folder / MODEL)
    files_after = content(folder)
    assert files.pop(MODEL) != files_after.pop(MODEL) and files == files_after
    info, completed = (model.pop("universal_checkpoint_info") for model in (before, after))
    assert repr(before) == repr(after) and completed | info == completed | spoilt


def test_refusals(saved, tmp_path):
    """No folder, no checkpoint, a damaged one: nothing is changed."""
    folder, _, _ = saved
    os.truncate(folder / MODEL, 1000)
    before = content(tmp_path)
    for arguments, words in (
        ((), "name the folder"),
        ((tmp_path,), "holds no"),
        ((folder,), f"{MODEL} is damaged"),
    ):
        done = run_example(*arguments)
        failed(done, 2, "megatron_info.py: error: ", words)
    assert content(tmp_path) == before
