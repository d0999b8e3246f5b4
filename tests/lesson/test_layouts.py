"""Tensor, pipeline and sequence parallelism, alone and together: from scratch every layout tracks one rank, and a
checkpoint of any layout goes on on any other. Dropout and clipping are on."""

import shutil

import pytest
import torch
from helpers import assert_equal_to_deepspeed, refused
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import universal
from harness.ranks import compare, launch, read_log, run

SHAPE = ("--n_layer", 2, "--n_head", 4, "--n_embd", 32, "--seq_len", 16, "--eval_interval", 2)
BATCH = ("--train_batch_size", 8, "--train_micro_batch_size_per_gpu", 2)
COMMON = (*SHAPE, *BATCH, "--steps", 4, "--warmup_steps", 2, "--checkpoint_interval", 2)
RESUME = ("--resume", "--checkpoint_tag", "global_step2")


def largest(work, baseline, run_name):
    return max(max(compare(work, baseline, run_name, c).values()) for c in ("loss", "val_loss", "grad_norm"))


def train(work, stage, data, tensor, sequence, name, *arguments, **options):
    """Run train_tp_sp.py on data x tensor x sequence ranks."""
    layout = ("--zero_stage", stage, "--tensor_parallel", tensor, "--sequence_parallel", sequence)
    arguments = (*COMMON, *layout, "--run_name", name, *arguments)
    return run(work, data * tensor * sequence, "train_tp_sp.py", *arguments, **options)


def train_3d(work, tensor, pipeline, data, name, *arguments, **options):
    layout = ("--tensor_parallel", tensor, "--pipeline_parallel", pipeline, "--run_name", name)
    return run(work, tensor * pipeline * data, "train_3d.py", *COMMON, *layout, *arguments, **options)


def start(work, name, script, *layout):
    """A run that saves. script: train or train_3d of this file. Returns its output."""
    return script(work, *layout, name, "--checkpoint_dir", name)


def goes_on(work, name, script, *layout):
    """The largest difference of a run that goes on from step 2 on this layout. On another one the checkpoint is
    converted, once, with nothing said of it on the command line."""
    resumed, converted = f"{name}_to_{'x'.join(map(str, layout))}", work / name / "global_step2_universal"
    before = converted.exists()
    out = script(work, *layout, resumed, "--checkpoint_dir", name, *RESUME)
    assert ("converting it into" in out) == (converted.exists() and not before)
    return largest(work, name, resumed)


def slow(*values):
    """What is one more combination of what `make test` tries: `make test-all`, and over 100 steps `make 3d`."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def one_rank(work):
    start(work, "one", train, 1, 1, 1, 1)


# ZeRO stage, the layout that saves, others that go on: data x tensor x sequence ranks
TENSOR, SEQUENCE = (2, 2, 1), (2, 1, 2)
QUICK = [(3, SEQUENCE, [(2, 1, 1)]), (2, TENSOR, [(1, 4, 1)])]
REST = [(stage, TENSOR, [(1, 2, 1), (2, 1, 1), (1, 4, 1), (1, 1, 2)]) for stage in (1, 2, 3)]
REST += [(stage, SEQUENCE, [(1, 1, 2), (2, 1, 1), (1, 1, 4)]) for stage in (1, 3)]


@pytest.mark.parametrize("stage, layout, others", [*QUICK, *(slow(*change) for change in REST)])
def test_one_of_them(work, one_rank, stage, layout, others):
    """From scratch like one rank; gone on with on the same layout to the bit, on others to 1e-5."""
    name = f"{'x'.join(map(str, layout))}_at_{stage}_{len(others)}"
    start(work, name, train, stage, *layout)
    assert largest(work, "one", name) <= 1e-5
    assert goes_on(work, name, train, stage, *layout) == 0.0
    for other in others:
        assert goes_on(work, name, train, stage, *other) <= 1e-5


@pytest.mark.parametrize("stage", [3, slow(1), slow(2)])
def test_from_none(work, one_rank, stage):
    assert goes_on(work, "one", train, stage, 1, 2, 1) <= 1e-5


@pytest.mark.parametrize("stage", [3, slow(1)])
def test_both(work, one_rank, stage):
    """Tensor and sequence parallelism at once, and on to the other stage without them."""
    out = start(work, f"tpsp_{stage}", train, stage, 1, 2, 2)
    assert "8 = 2 per rank x 4 accumulation steps x 1 ranks" in out
    assert largest(work, "one", f"tpsp_{stage}") <= 1e-5
    assert goes_on(work, f"tpsp_{stage}", train, stage, 1, 2, 2) == 0.0
    assert goes_on(work, f"tpsp_{stage}", train, 4 - stage, 2, 1, 1) <= 1e-5


# -----------------------------------------------------------------------------
# pipelines


@pytest.fixture(scope="module")
def pipeline(work, one_rank):
    start(work, "three", train_3d, 2, 2, 2)
    start(work, "flat", train_3d, 1, 1, 1)


def test_pipeline_from_scratch(work, pipeline):
    """The same GPT as train.py's, whatever the layout."""
    for name in ("flat", "three"):
        assert largest(work, "one", name) <= 1e-5


OTHERS = [(1, 1, 1), (2, 1, 2), *(slow(*layout) for layout in [(2, 2, 1), (1, 1, 2), (1, 2, 2)])]


def test_pipeline_same_layout(work, pipeline):
    assert goes_on(work, "three", train_3d, 2, 2, 2) == 0.0


@pytest.mark.parametrize("tensor, pipelines, data", OTHERS)
def test_pipeline_goes_on(work, pipeline, tensor, pipelines, data):
    assert goes_on(work, "three", train_3d, tensor, pipelines, data) <= 1e-5


def test_pipeline_from_one_rank(work, pipeline):
    """What one rank wrote is whole, and still says how two cut it."""
    assert goes_on(work, "flat", train_3d, 2, 2, 1) <= 1e-5


def test_more_stages(work):
    """3 stages of one layer each: each has something of both parameter groups."""
    for name, layout, resume in (("stages", (1, 3, 1), ()), ("stages_to_1", (1, 1, 1), RESUME)):
        train_3d(work, *layout, name, "--n_layer", 3, "--checkpoint_dir", "stages", *resume)
    assert largest(work, "stages", "stages_to_1") <= 1e-5


def test_a_stage_without_a_parameter_group(work, pipeline, tmp_path):
    """DeepSpeed's loader would give the one group of such a stage's state to another: refused."""
    shutil.copytree(work / "three" / "global_step2", tmp_path / "c")
    for mp in (2, 3):
        for path in (tmp_path / "c").glob(f"*mp_rank_{mp:02d}_*"):
            state = torch.load(path, weights_only=False)
            if "param_shapes" in state:
                del state["param_shapes"][1]
            else:
                state = state["optimizer_state_dict"]
                del state["single_partition_of_fp32_groups"][1], state["group_paddings"][1]
                del state["param_slice_mappings"][1], state["base_optimizer_state"]["param_groups"][1]
                state = {"optimizer_state_dict": state}
            torch.save(state, path)
    with pytest.raises(universal.CheckpointError, match="a pipeline stage lacks a parameter group"):
        universal.convert(tmp_path / "c", tmp_path / "u")


@pytest.mark.slow
def test_pipeline_in_bf16(work):
    for name, layout, resume in (("bf", (2, 2, 1), ()), ("bf_same", (2, 2, 1), RESUME), ("bf_1", (1, 1, 1), RESUME)):
        train_3d(work, *layout, name, "--dtype", "bf16", "--checkpoint_dir", "bf", *resume)
    assert largest(work, "bf", "bf_same") == 0.0
    assert 0 < max(compare(work, "bf", "bf_1").values()) <= 1e-2


def test_bit_equal_to_deepspeed(work, pipeline, tmp_path):
    """DeepSpeed's converter, where it is right, writes the same for what these scripts save."""
    assert_equal_to_deepspeed(work / "three" / "global_step2", tmp_path)


def test_weights_cut_in_another_way_are_seen(work, pipeline, tmp_path):
    """The control: the same checkpoint, with the shards of the row-parallel weights put together as columns are. It
    loads without an error."""
    shutil.copytree(work / "three" / "global_step2", tmp_path / "c" / "global_step2")
    for path in (tmp_path / "c" / "global_step2").glob("mp_rank_*"):
        state = torch.load(path, weights_only=False)
        state["universal_checkpoint_info"]["parameter_with_row_parallelism_patterns"] = []
        torch.save(state, path)
    train_3d(work, 1, 1, 1, "wrong", *RESUME, "--checkpoint_dir", tmp_path / "c")
    assert max(compare(work, "three", "wrong").values()) > 1e-2


TP, PP, SP = "--tensor_parallel", "--pipeline_parallel", "--sequence_parallel"
REFUSED = [
    ("train_tp_sp.py", 3, (TP, 3), "--n_head 4 does not divide by --tensor_parallel 3 x --sequence_parallel 1"),
    ("train_tp_sp.py", 2, (SP, 2, "--seq_len", 15), "--seq_len 15 does not divide by --sequence_parallel 2"),
    ("train_tp_sp.py", 2, (TP, 4, "--elastic"), "none of 1 to 2 ranks trains micro-batches of 2, 4 ranks to each"),
    ("train_3d.py", 3, (PP, 2), "3 ranks do not divide by 2"),
    ("train_3d.py", 3, (PP, 3), "--pipeline_parallel 3 stages want at least as many layers, not 2"),
    ("train_3d.py", 3, (TP, 3), "--n_head 4 does not divide by --tensor_parallel 3"),
    ("train_3d.py", 1, ("--zero_stage", 2), "DeepSpeed's pipelines go with --zero_stage 1, not 2"),
]


@pytest.mark.parametrize(("script", "ranks", "arguments", "words"), REFUSED)
def test_refused(monkeypatch, script, ranks, arguments, words):
    assert words in refused(monkeypatch, script, ranks, (*COMMON, *arguments))


@pytest.mark.parametrize("script, name", [("train_tp_sp.py", "three"), ("train_3d.py", "one")])
def test_names_of_a_pipeline_are_others(work, pipeline, script, name):
    result = launch(work, 1, script, *COMMON, "--checkpoint_dir", name, *RESUME)
    assert result.code == 2 and result.errors.count("\n") == 1
    assert "trained here, and not in the checkpoint" in result.errors


def test_tensorboard(work):
    """--tensorboard writes the same losses as the log, in float32."""
    train_3d(work, 1, 1, 1, "board", "--tensorboard")
    board = EventAccumulator(str(next((work / "runs" / "board").rglob("*tfevents*"))), {"scalars": 0}).Reload()
    for column, losses in read_log(work, "board").items():
        events = {event.step: event.value for event in board.Scalars(column)}
        assert len(losses) == {"loss": 4, "val_loss": 2}[column]
        assert events == pytest.approx(losses, rel=1e-7, abs=0)
