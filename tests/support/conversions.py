"""Conversions: refused, finished, or compared with those of DeepSpeed."""

import os
from types import SimpleNamespace

import pytest
import torch
from deepspeed.checkpoint import ds_to_universal as deepspeed_converter

import universal
from tests.support.files import content, load, parameters_in
from tests.support.toy import same


def convert_with_deepspeed(folder, output):
    """DeepSpeed's own converter, in this process."""
    options = SimpleNamespace(
        input_folder=str(folder),
        output_folder=str(output),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    deepspeed_converter.main(options)


def not_converted(source, *words, **options):
    """The conversion ends in one line with these words, and nothing appears."""
    before = sorted(os.listdir(source.parent))
    with pytest.raises(universal.CheckpointError) as error:
        universal.convert(source, source.parent / "u", **options)
    line = str(error.value)
    assert "\n" not in line and all(word in line for word in words), line
    assert sorted(os.listdir(source.parent)) == before


def settled(output, wanted):
    """The output is this, it is what latest_universal names, and nothing else lies beside it."""
    assert content(output) == wanted
    assert (output.parent / "latest_universal").read_text() == output.name
    assert set(os.listdir(output.parent)) == {"latest_universal", output.name}


def assert_equal_to_deepspeed(source, folder):
    """Convert source into folder/ours, and with DeepSpeed's converter into folder/theirs. Every
    file of DeepSpeed's zero/ but the second copy of tied weights is the same: tensors, shapes, how
    to cut them, step counts. Ours has the files of every parameter, and no others."""
    ours = folder / "ours" / "zero"
    theirs = folder / "theirs" / "zero"
    convert_with_deepspeed(source, theirs.parent)
    universal.convert(source, ours.parent, check=True)
    models = [load(path) for path in ours.parent.glob("mp_rank_*_model_states.pt")]
    tied = {name for model in models for name in model["shared_params"]}
    module = {name: tensor for model in models for name, tensor in (model["module"] or {}).items()}
    names = {name for model in models for group in model["param_shapes"] for name in group}
    their_names = parameters_in(theirs)
    assert parameters_in(ours) == names == their_names - {*tied, *module}
    # The loader of zero/ never reads what DeepSpeed writes there.
    for name in their_names & module.keys() - tied:
        assert torch.equal(load(theirs / name / "fp32.pt")["param"], module[name].float()), name
    for name in names:
        for state in ("exp_avg", "exp_avg_sq"):
            assert (theirs / name / f"{state}.pt").exists()
        for path in (theirs / name).glob("*.pt"):
            assert_equal_file(load(ours / path.relative_to(theirs)), load(path), path)


def assert_equal_file(got, expected, path):
    if path.stem == "step":
        assert torch.equal(got, expected)
        return
    if torch.is_tensor(expected):  # of ZeRO-3, without a shape
        expected = {"param": expected.view(got["param"].shape), "cat_dim": 0}
    assert same(got.pop("param"), expected.pop("param")) and got == expected, path
