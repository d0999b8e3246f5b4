"""examples/forty_lines.py: the converter in 40 lines writes what ds_to_universal.py writes."""

import sys

import pytest
import torch
from helpers import ROOT

import universal
from harness.ranks import run

# Two groups that do not divide by 4, parameters that do not, and some smaller than the number of ranks.
OPTIONS = ("--n_embd", 33, "--n_head", 3, "--seq_len", 14, "--train_batch_size", 12, "--steps", 3)
OPTIONS = (*OPTIONS, "--train_micro_batch_size_per_gpu", 1, "--checkpoint_interval", 3, "--checkpoint_dir", "c")


def forty_lines():
    return (ROOT / "examples" / "forty_lines.py").read_text()


def assert_equal(ours, theirs, where):
    """Type, structure, and every bit of every tensor."""
    assert type(ours) is type(theirs), where
    if isinstance(ours, torch.Tensor):
        assert (ours.dtype, ours.shape, ours.requires_grad) == (theirs.dtype, theirs.shape, False), where
        assert ours.contiguous().numpy().tobytes() == theirs.contiguous().numpy().tobytes(), where
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), where
        for key in ours:
            assert_equal(ours[key], theirs[key], f"{where}: {key}")
    elif isinstance(ours, (list, tuple)) and not isinstance(ours, torch.Size):
        assert len(ours) == len(theirs), where
        for a, b in zip(ours, theirs, strict=True):
            assert_equal(a, b, where)
    else:
        assert ours == theirs or vars(ours) == vars(theirs), where


def compare_with_the_real_one(folder, stage, lines, monkeypatch):
    run(folder, 4, "train.py", *OPTIONS, "--zero_stage", stage)
    source = folder / "c" / "global_step3"
    universal.convert(source, folder / "real")
    monkeypatch.setattr(sys, "argv", ["forty_lines.py", str(source)])
    exec(compile(lines, "forty_lines.py", "exec"), {"__name__": "__main__"})
    ours, real = source.with_name("global_step3_universal"), folder / "real"
    files = [sorted(path.relative_to(f).as_posix() for path in f.rglob("*.pt")) for f in (ours, real)]
    assert files[0] == files[1] and len(files[0]) == 28 * 4 + 3
    for name in files[0]:
        assert_equal(*(torch.load(f / name, weights_only=False) for f in (ours, real)), name)
    assert (folder / "c" / "latest_universal").read_text() == ours.name


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_forty_lines(tmp_path, stage, monkeypatch):
    lines = forty_lines()
    assert len([line for line in lines.splitlines() if line]) <= 40
    compare_with_the_real_one(tmp_path, stage, lines, monkeypatch)


@pytest.mark.parametrize(
    "stage, right, wrong",
    [
        (1, "[at : at + shape.numel()]", "[at + 1 : at + 1 + shape.numel()]"),
        (3, "-(-shape.numel() // len(slices))", "shape.numel() // len(slices)"),
        (3, "key=lambda file: int(", "key=lambda file: -int("),
    ],
)
def test_a_wrong_line_is_seen(tmp_path, stage, right, wrong, monkeypatch):
    lines = forty_lines()
    assert lines.count(right) == 1
    with pytest.raises((AssertionError, RuntimeError)):
        compare_with_the_real_one(tmp_path, stage, lines.replace(right, wrong), monkeypatch)
