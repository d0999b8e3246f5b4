"""Gradient accumulation: six layouts, one curve; each sequence once."""

import difflib
import re
import sys
from typing import NamedTuple

import pytest

from measure.logs import compare, read_log
from tests.support import ROOT
from tests.support.helpers import record_rows, refused, rows_of_steps
from tests.support.ranks import launch, run


class Layout(NamedTuple):
    script: str
    ranks: int
    micro: int
    accumulation: int


LAYOUTS = {
    "pt_32": Layout("grad_accu_pt.py", 1, 32, 1),
    "pt_8": Layout("grad_accu_pt.py", 1, 8, 4),
    "ds_32": Layout("grad_accu_ds.py", 1, 32, 1),
    "ds_8": Layout("grad_accu_ds.py", 1, 8, 4),
    "ds_8_ws2": Layout("grad_accu_ds.py", 2, 8, 2),
    "ds_8_ws3": Layout("grad_accu_ds.py", 3, 8, 2),
}
STEPS = 12
BATCH = 32


def sequences_of_steps(folder, name, ranks):
    return rows_of_steps(folder, name, ranks, BATCH, 8, STEPS)


@pytest.fixture(scope="module")
def trained(work):
    """What the six print."""
    printed = {}
    for name, (script, ranks, micro, _) in LAYOUTS.items():
        flags = (
            f"--run_name {name} --steps {STEPS} --train_batch_size {BATCH} "
            f"--train_micro_batch_size_per_gpu {micro}"
        ).split()
        printed[name] = run(work, ranks, script, *flags, patch=record_rows(name))
    return printed


@pytest.mark.parametrize("name", LAYOUTS)
def test_six_layouts_one_curve(work, trained, name):
    """PyTorch and DeepSpeed, one batch of 32 or 4 micro-batches or 2 on 2 or 3 ranks: 1e-5 over 12
    steps, and each of the 32 sequences of a step counts once."""
    _, ranks, micro, accumulation = LAYOUTS[name]
    count = BATCH // micro
    again = accumulation * ranks - count
    share = f"batch 32: micro-batches of {micro}, accumulation steps: {accumulation}\n"
    if "ds" in name:
        share += f"on each of {ranks} ranks; repeats, with weight 0: {again}\n"
    assert share in trained[name]
    for column in ("loss", "grad_norm"):
        gaps = compare(work, "pt_32", name, column)
        assert len(gaps) == STEPS and max(gaps.values()) <= 1e-5
    columns = read_log(work, name, "batch", "micro_batch", "accumulation", "ranks").values()
    values = [{*column.values()} for column in columns]
    assert values == [{BATCH}, {micro}, {accumulation}, {ranks}]
    whole = sequences_of_steps(work, "pt_32", ranks=1)
    assert sequences_of_steps(work, name, ranks) == whole


def test_the_data_differ_at_every_step_and_are_learned(work, trained):
    """So the curves had something to disagree about, and counting sequences means something."""
    steps = sequences_of_steps(work, "pt_32", ranks=1)
    assert [len(step) for step in steps] == [BATCH] * STEPS
    assert len({sequence for step in steps for sequence in step}) > 0.95 * BATCH * STEPS
    losses = read_log(work, "pt_32")["loss"]
    assert losses[1] > 5.5 and losses[STEPS] < 4.5


PYTORCH_ALONE = (
    r"device|model\(|backward\(|clip_grad_norm_|optimizer\."
    r"|accumulation, rest|for m in|mean \+=|log = open|row = \["
)
DEEPSPEED_ALONE = (
    r"deepspeed|distributed|dist\.|engine|environ|launcher|ranks?\b|micro_batches|devnull|config"
    r'|^    "train_|^    "gradient|^    "zero|^}'
)


def test_the_pair_is_alike():
    """The two scripts differ where PyTorch and DeepSpeed do: in set-up, in the two lines of a
    micro-batch that call the model or its engine, in what they do after the last one, and in how
    DeepSpeed's ranks share the micro-batches. All else is the same lines in the same order."""
    pytorch = (ROOT / "grad_accu_pt.py").read_text().splitlines()
    deepspeed = (ROOT / "grad_accu_ds.py").read_text().splitlines()
    alone = {"-": PYTORCH_ALONE, "+": DEEPSPEED_ALONE}
    diff = list(difflib.unified_diff(pytorch, deepspeed, n=0))[2:]
    lines = [line for line in diff if line[0] != "@"]
    assert len(lines) <= 48
    for line in lines:
        assert re.search(alone[line[0]], line[1:]), line


@pytest.mark.parametrize("script", ["grad_accu_pt.py", "grad_accu_ds.py"])
def test_each_stands_alone(script):
    """Of this repository it imports nothing; in PyTorch's not DeepSpeed either."""
    imported = re.findall(r"^(?:import|from) (\w+)", (ROOT / script).read_text(), re.M)
    packages = {"torch", "deepspeed"} if "_ds" in script else {"torch"}
    assert set(imported) - set(sys.stdlib_module_names) == packages


UNEVEN = "--train_batch_size must be a multiple of the micro-batch, 12, and is 32"


@pytest.mark.parametrize(
    "script, ranks, arguments, words",
    [
        ("grad_accu_pt.py", 1, ["--train_micro_batch_size_per_gpu", 12], UNEVEN),
        ("grad_accu_pt.py", 1, ["--steps", 0], "at least 1"),
        ("grad_accu_ds.py", 2, ["--zero_stage", 3], "unrecognized arguments: --zero_stage 3"),
        ("grad_accu_ds.py", 0, [], "start it with a launcher: deepspeed --num_gpus 1 grad_accu_ds"),
    ],
)
def test_refused(tmp_path, monkeypatch, script, ranks, arguments, words):
    """In one line, before anything is written."""
    monkeypatch.chdir(tmp_path)
    assert words in refused(monkeypatch, script, ranks, arguments)
    assert not (tmp_path / "logs").exists()


def test_one_rank_speaks(tmp_path):
    result = launch(tmp_path, 2, "grad_accu_ds.py", "--train_micro_batch_size_per_gpu", 12)
    assert result.code == 2 and result.out == "" and not (tmp_path / "logs").exists()
    assert result.errors == f"grad_accu_ds.py: error: {UNEVEN}\n"
