"""Tensor, pipeline and sequence parallelism, alone and together: from scratch every layout tracks one rank, and through
a universal checkpoint the loss goes on from any layout on any other. Dropout and clipping are on."""

import shutil
from pathlib import Path

import pytest
import torch
from helpers import assert_equal_to_deepspeed, fp16_is
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import universal
from harness.ranks import compare, launch, read_log, run

SHAPE = ("--n_layer", 2, "--n_head", 4, "--n_embd", 32, "--seq_len", 16, "--eval_interval", 2)
BATCH = ("--train_batch_size", 8, "--train_micro_batch_size_per_gpu", 2)
COMMON = (*SHAPE, *BATCH, "--steps", 4, "--warmup_steps", 2, "--checkpoint_interval", 2)
RESUME = ("--resume", "--universal_checkpoint", "--checkpoint_tag", "global_step2_universal")


def largest(work, baseline, run_name):
    return max(max(compare(work, baseline, run_name, c).values()) for c in ("loss", "val_loss", "grad_norm"))


def train(work, stage, data, tensor, sequence, name, *arguments, **options):
    """Run train.py on data x tensor x sequence ranks."""
    layout = ("--zero_stage", stage, "--tensor_parallel", tensor, "--sequence_parallel", sequence)
    return run(work, data * tensor * sequence, "train.py", *COMMON, *layout, "--run_name", name, *arguments, **options)


def start(work, name, script, *layout):
    """A run that saves, and the universal checkpoint of its step 2. script: train or train_3d of this file. Returns its
    output."""
    out = script(work, *layout, name, "--checkpoint_dir", name)
    universal.convert(work / name / "global_step2", work / name / "global_step2_universal", check=True)
    return out


def slow(*values):
    """What is one more combination of what `make test` tries: `make test-all`, and over 100 steps `make 3d`."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def one_rank(work):
    start(work, "one", train, 1, 1, 1, 1)


def goes_on(work, name, stage, *layout):
    resumed = f"{name}_to_{'x'.join(map(str, layout))}_at_{stage}"
    train(work, stage, *layout, resumed, "--checkpoint_dir", name, *RESUME)
    return largest(work, name, resumed)


TENSOR = (2, 2, 1), [(1, 2, 1), (2, 1, 1), (1, 4, 1)]  # the layout that saves, others that go on
SEQUENCE = (2, 1, 2), [(1, 1, 2), (2, 1, 1), (1, 1, 4)]
QUICK = [(2, (2, 2, 1), [(1, 4, 1)]), (3, (2, 1, 2), [(2, 1, 1)])]
SLOW = [slow(stage, *change) for stage, change in [(1, TENSOR), (2, TENSOR), (3, TENSOR), (1, SEQUENCE), (3, SEQUENCE)]]


@pytest.mark.parametrize("stage, layout, others", [*QUICK, *SLOW])
def test_one_of_them(work, one_rank, stage, layout, others):
    """From scratch like one rank; gone on with on the same layout to the bit, on others to 1e-5."""
    name = f"{'x'.join(map(str, layout))}_at_{stage}"
    start(work, name, train, stage, *layout)
    assert largest(work, "one", name) <= 1e-5
    assert goes_on(work, name, stage, *layout) == 0.0
    for other in others:
        assert goes_on(work, name, stage, *other) <= 1e-5


@pytest.mark.parametrize("stage", [3, slow(1), slow(2)])
def test_from_none(work, one_rank, stage):
    assert goes_on(work, "one", stage, 1, 2, 1) <= 1e-5


@pytest.mark.parametrize("stage", [3, slow(1), slow(2)])
def test_both(work, one_rank, stage):
    """Tensor and sequence parallelism at once, and how the batch is made up, printed."""
    name = f"tpsp_{stage}"
    out = start(work, name, train, stage, 1, 2, 2)
    assert "8 = 2 per rank x 4 accumulation steps x 1 data-parallel (4 ranks = 1 DP x 2 TP x 2 SP)" in out
    assert largest(work, "one", name) <= 1e-5
    if stage != 2:
        assert goes_on(work, name, stage, 1, 2, 2) == 0.0
        assert goes_on(work, name, 4 - stage, 2, 1, 1) <= 1e-5  # and to the other stage


def by_load_checkpoint():
    """A patch: the scripts load by universal.load_checkpoint(), and do not refuse another layout before."""
    import launch
    import universal

    def open_any(args, client_state):
        files = Path(args.checkpoint_dir, args.checkpoint_tag).glob("*mp_rank_00_model_states.pt")
        return torch.load(sorted(files)[0], mmap=True, weights_only=False)

    launch.open_checkpoint = open_any
    universal.install()


@pytest.mark.parametrize("stage", [1, slow(3)])
def test_load_checkpoint(work, stage):
    """Nothing is converted by hand. With tensor parallelism on one side load_checkpoint() converts by itself, once."""
    name = f"any_{stage}"
    train(work, stage, 2, 2, 1, name, "--checkpoint_dir", name)
    told = []
    for layout in ((2, 2, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)):
        resumed = f"{name}_on_{'x'.join(map(str, layout))}"
        arguments = ("--checkpoint_dir", name, "--resume", "--checkpoint_tag", "global_step2")
        told.append(train(work, stage, *layout, resumed, *arguments, patch=by_load_checkpoint))
        assert largest(work, name, resumed) <= (0.0 if layout == (2, 2, 1) else 1e-5)
    assert ["converting it into" in out for out in told] == [False, True, False, False]


def train_3d(work, tensor, pipeline, data, name, *arguments, **options):
    layout = ("--tensor_parallel", tensor, "--pipeline_parallel", pipeline, "--run_name", name)
    return run(work, tensor * pipeline * data, "train_3d.py", *COMMON, *layout, *arguments, **options)


@pytest.fixture(scope="module")
def pipeline(work, one_rank):
    start(work, "three", train_3d, 2, 2, 2)
    start(work, "flat", train_3d, 1, 1, 1)


def test_pipeline_from_scratch(work, pipeline):
    """The same GPT as train.py's, whatever the layout."""
    for name in ("flat", "three"):
        assert largest(work, "one", name) <= 1e-5


SAME, FEWER_STAGES, ONE_RANK = (2, 2, 2), (2, 1, 2), (1, 1, 1)
OTHERS = [slow(layout) for layout in [(2, 2, 1), (1, 1, 2), (1, 2, 2)]]


@pytest.mark.parametrize("layout", [SAME, FEWER_STAGES, ONE_RANK, *OTHERS])
def test_pipeline_goes_on(work, pipeline, layout):
    name = f"three_to_{'x'.join(map(str, layout))}"
    train_3d(work, *layout, name, "--checkpoint_dir", "three", *RESUME)
    difference = largest(work, "three", name)
    assert difference == 0.0 if layout == (2, 2, 2) else difference <= 1e-5


@pytest.mark.parametrize("layout", [SAME, ONE_RANK, slow((2, 2, 1))])
def test_pipeline_load_checkpoint(work, pipeline, layout):
    folder, name = work / "three_alone", f"three_alone_to_{'x'.join(map(str, layout))}"
    shutil.copytree(work / "three" / "global_step2", folder / "global_step2", dirs_exist_ok=True)
    arguments = ("--checkpoint_dir", folder, "--resume", "--checkpoint_tag", "global_step2")
    train_3d(work, *layout, name, *arguments, patch=by_load_checkpoint)
    assert (folder / "global_step2_universal").exists() or layout == (2, 2, 2)
    assert largest(work, "three", name) <= (0.0 if layout == (2, 2, 2) else 1e-5)


def test_pipeline_from_one_rank(work, pipeline):
    """What one rank wrote is whole, and still says how two cut it."""
    train_3d(work, 2, 2, 1, "flat_to_2x2x1", "--checkpoint_dir", "flat", *RESUME)
    assert largest(work, "flat", "flat_to_2x2x1") <= 1e-5


def test_more_stages(work):
    """3 stages of one layer each: each has something of both parameter groups."""
    for name, layout, resume in (("stages", (1, 3, 1), ()), ("stages_to_1", (1, 1, 1), RESUME)):
        train_3d(work, *layout, name, "--n_layer", 3, "--checkpoint_dir", "stages", *resume)
        if not resume:
            universal.convert(work / "stages" / "global_step2", work / "stages" / "global_step2_universal")
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
@pytest.mark.parametrize("dtype", ["bf16"])
def test_pipeline_dtype(work, dtype):
    for name, layout, resume in (("bf", (2, 2, 1), ()), ("bf_same", (2, 2, 1), RESUME), ("bf_1", (1, 1, 1), RESUME)):
        train_3d(work, *layout, name, "--dtype", dtype, "--checkpoint_dir", "bf", *resume)
        if not resume:
            universal.convert(work / "bf" / "global_step2", work / "bf" / "global_step2_universal")
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
    universal.convert(tmp_path / "c" / "global_step2", tmp_path / "c" / "global_step2_universal")
    options = ("--tensor_parallel", 1, "--pipeline_parallel", 1, "--run_name", "wrong", *RESUME)
    run(work, 1, "train_3d.py", *COMMON, *options, "--checkpoint_dir", tmp_path / "c")
    assert max(compare(work, "three", "wrong").values()) > 1e-2


@pytest.mark.parametrize(
    ("script", "ranks", "arguments", "words"),
    [
        ("train.py", 2, ("--checkpoint_dir", "three", *RESUME), "was written by train_3d.py, whose parameters have"),
        ("train_3d.py", 2, ("--checkpoint_dir", "one", *RESUME), "was written by train.py, whose parameters have"),
        (
            "train_3d.py",
            4,
            ("--checkpoint_dir", "three", "--resume", "--checkpoint_tag", "global_step2"),
            "is cut for 8 ranks = 2",
        ),
        ("train_3d.py", 4, ("--checkpoint_dir", "no", *RESUME), "no/global_step2_universal does not exist"),
        ("train_3d.py", 4, ("--pipeline_parallel", 3), "4 ranks do not divide by --pipeline_parallel 3"),
        (
            "train_3d.py",
            3,
            ("--pipeline_parallel", 3),
            "--pipeline_parallel 3 stages want at least as many layers, not",
        ),
        ("train_3d.py", 3, ("--tensor_parallel", 3), "--n_head 4 does not divide by --tensor_parallel 3"),
        ("train_3d.py", 1, ("--dtype", "fp16"), "--dtype fp16 does not run on this cpu"),
    ],
)
def test_refused(work, pipeline, script, ranks, arguments, words):
    """By rank 0, before it meets the others: they need not run."""
    command = (script, *COMMON, "--run_name", "refused", *arguments)
    result = launch(work, ranks, *command, patch=fp16_is(False), started=1, limit=60)
    assert result.code == 2 and result.errors.count("\n") == 1 and words in result.errors, result.errors
    assert result.errors.startswith(f"{script}: error: ") and not (work / "logs" / "refused.csv").exists()


@pytest.mark.parametrize("script", ["train.py", "train_3d.py"])
def test_fp16_where_the_device_has_it(tmp_path, script):
    """test_refused has the other half: the device decides, and a CPU can have fp16, too."""
    arguments = (*SHAPE, *BATCH, "--steps", 4, "--dtype", "fp16", "--run_name", "half")
    run(tmp_path, 2, script, *arguments, patch=fp16_is(True))
    log = read_log(tmp_path, "half", "loss", "loss_scale")
    assert len(log["loss"]) == 4 and all(0 < loss < 6 for loss in log["loss"].values())
    assert log["loss_scale"][1] > 1  # it is fp16 that trains


@pytest.mark.parametrize("script", ["train.py", "train_3d.py"])
def test_tensorboard(work, script):
    """--tensorboard writes the same losses as the log, in float32."""
    name = f"board_{script[:-3]}"
    run(work, 1, script, *COMMON, "--steps", 4, "--tensorboard", "--run_name", name, "--checkpoint_dir", name)
    board = EventAccumulator(str(next((work / "runs" / name).rglob("*tfevents*"))), {"scalars": 0}).Reload()
    for column, losses in read_log(work, name).items():
        events = {event.step: event.value for event in board.Scalars(column)}
        assert len(losses) == {"loss": 4, "val_loss": 2}[column]
        assert events == pytest.approx(losses, rel=1e-7, abs=0)
