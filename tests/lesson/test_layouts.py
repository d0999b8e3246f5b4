"""Tensor, pipeline and sequence parallelism, alone and together: from scratch every layout tracks
one rank, and a checkpoint of any layout goes on on any other. Dropout and clipping are on."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from measure.logs import largest, read_log
from tests.support.commands import slow
from tests.support.ranks import run
from universal.batches import Share
from universal.proving.next_steps import read_rows

COMMON = (
    "--n_layer 2 --n_head 4 --n_embd 32 --seq_len 16 --train_batch_size 8 "
    "--train_micro_batch_size_per_gpu 2 --steps 4 --warmup_steps 2 --eval_interval 2 "
    "--checkpoint_interval 2"
).split()
RESUME = "--resume --checkpoint_tag global_step2".split()


def difference(work, baseline, run_name):
    return max(largest(work, baseline, run_name).values())


def train(work, stage, data, tensor, sequence, name, *arguments):
    """Run train_tp_sp.py on data x tensor x sequence ranks. Returns its output."""
    flags = (
        f"--zero_stage {stage} --tensor_parallel {tensor} --sequence_parallel {sequence} "
        f"--run_name {name} --checkpoint_dir {name}"
    ).split()
    ranks = data * tensor * sequence
    return run(work, ranks, "examples.train_tp_sp", *COMMON, *flags, *arguments)


def train_3d(work, tensor, pipeline, data, name, *arguments):
    flags = (
        f"--tensor_parallel {tensor} --pipeline_parallel {pipeline} "
        f"--run_name {name} --checkpoint_dir {name}"
    ).split()
    ranks = tensor * pipeline * data
    return run(work, ranks, "examples.train_3d", *COMMON, *flags, *arguments)


def goes_on(work, name, script, *layout):
    """The largest difference of a run that goes on from step 2 on this layout. script: train or
    train_3d of this file."""
    resumed = f"{name}_to_{'x'.join(map(str, layout))}"
    out = script(work, *layout, resumed, "--checkpoint_dir", name, *RESUME)
    assert ", loaded on " in out
    assert not (work / name / "global_step2_universal").exists()
    return difference(work, name, resumed)


@pytest.fixture(scope="module")
def one_rank(work):
    train(work, 1, 1, 1, 1, "one")


# data x tensor x sequence ranks
BOTH = (1, 2, 2)


def test_one_of_them(work, one_rank):
    """From scratch like one rank; gone on with on the same layout to the bit, on others to 1e-5.
    `make 3d` tries every other change of layout and stage, over 100 steps."""
    out = train(work, 3, *BOTH, "both")
    assert str(Share(8, 2, 1)) in out
    assert difference(work, "one", "both") <= 1e-5
    assert goes_on(work, "both", train, 3, *BOTH) == 0.0
    assert goes_on(work, "both", train, 1, 2, 1, 1) <= 1e-5


# -----------------------------------------------------------------------------
# pipelines


@pytest.fixture(scope="module")
def pipeline(work, one_rank):
    """The same GPT as train.py's, on 4 ranks, and on one."""
    train_3d(work, 2, 2, 1, "three")
    train_3d(work, 1, 1, 1, "flat", "--tensorboard")
    for name in ("flat", "three"):
        assert difference(work, "one", name) <= 1e-5


# tensor x pipeline x data ranks
@pytest.mark.parametrize("layout", [(1, 1, 1), slow((2, 2, 1))])
def test_pipeline_goes_on(work, pipeline, layout):
    """On the same layout to the bit."""
    assert goes_on(work, "three", train_3d, *layout) <= (0.0 if layout == (2, 2, 1) else 1e-5)


@pytest.mark.slow
def test_pipeline_from_one_rank(work, pipeline):
    """What one rank wrote is whole, and still says how two cut it."""
    assert goes_on(work, "flat", train_3d, 2, 2, 1) <= 1e-5


def samples_of_next_steps(work, name):
    """Of the first tensor that a forward pass gets: a pipeline's labels are none of it."""
    rows = read_rows(work / name / "global_step2" / "next_steps.csv", 3)
    return [row.digests.split()[0] for row in rows.values()]


def test_pipelines_that_do_not_divide_the_micro_batches(work, pipeline):
    """4 on 3 pipelines: the proof's samples are those of one rank."""
    train_3d(work, 1, 2, 3, "three_pipelines")
    assert difference(work, "one", "three_pipelines") <= 1e-5
    samples = samples_of_next_steps(work, "flat")
    assert len(samples) == 2
    assert samples_of_next_steps(work, "three_pipelines") == samples


def test_tensorboard(work, pipeline):
    """--tensorboard writes the same losses as the log, in float32."""
    file = next((work / "runs" / "flat").rglob("*tfevents*"))
    board = EventAccumulator(str(file), {"scalars": 0}).Reload()
    for column, losses in read_log(work, "flat").items():
        events = {event.step: event.value for event in board.Scalars(column)}
        assert len(losses) == {"loss": 4, "val_loss": 2}[column]
        assert events == pytest.approx(losses, rel=1e-7, abs=0)
