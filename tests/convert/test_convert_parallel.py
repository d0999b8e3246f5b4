"""The converter against DeepSpeed's own on tensor- and pipeline-parallel checkpoints (tests/ranks/model_parallel.py),
bit by bit."""

import shutil

import pytest
from helpers import assert_equal_to_deepspeed, edit

from harness.ranks import run
from universal import CheckpointError, convert

AUTOTP = [(1, 4, 2), (2, 4, 4), (3, 3, 3)]  # stage, ranks, tensor-parallel ranks; the cross product is slow
SLOW = [(stage, *others) for stage in (1, 2, 3) for others in [(4, 2), (4, 4), (3, 3)]]
SLOW = [pytest.param(*change, marks=pytest.mark.slow) for change in SLOW if change not in AUTOTP]


@pytest.mark.parametrize("stage, ranks, tensor", [*AUTOTP, *SLOW])
def test_autotp(tmp_path, stage, ranks, tensor):
    """AutoTP's affine maps: column, row, fused qkv, replicated; a width that 3 ranks do not divide evenly."""
    run(tmp_path, ranks, "tests/ranks/model_parallel.py", tmp_path / "c", "autotp", stage, tensor)
    assert_equal_to_deepspeed(tmp_path / "c" / "global_step3", tmp_path)


@pytest.fixture(scope="module")
def pipeline(work):
    run(work, 8, "tests/ranks/model_parallel.py", work / "pipeline", "pipeline", 2, 2)
    return work / "pipeline" / "global_step3"


def with_info(source, target, **changes):
    """A copy of a checkpoint whose universal_checkpoint_info is another."""
    shutil.copytree(source, target)
    edit(target, "mp_rank_*_model_states.pt", lambda model: model["universal_checkpoint_info"].update(changes))
    return target


def test_pipeline(pipeline, tmp_path):
    """PP 2 x TP 2 x DP 2: tied embeddings, row, column, replicated, averaged, and two sub-parameters in one."""
    assert_equal_to_deepspeed(pipeline, tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"parameter_with_sub_params": [], "parameter_with_2_sub_params_cat_dim_0": [r".*up"]},
        {"parameter_with_sub_params": [], "vocabulary_parameter_patterns": [r".*up"], "original_vocab_size": 250},
        {"parameter_with_sub_params": [{"patterns": [r".*up"], "shape": (2, -1), "partition_dim": 0}]},
        {"parameter_with_sub_params": [{"patterns": [r".*up"], "shape": ((64, 128, 64), 32), "partition_dim": 0}]},
    ],
    ids=["two-sub-params", "padded-vocabulary", "count-of-sub-params", "unequal-sub-params"],
)
def test_other_layouts(pipeline, tmp_path, changes):
    """The same bytes, declared to be cut in other ways: both converters take them alike."""
    assert_equal_to_deepspeed(with_info(pipeline, tmp_path / "c", **changes), tmp_path)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"tp_replicated_parameter_patterns": [r".*up"]}, "differs on tensor-parallel rank 1"),
        ({"vocabulary_parameter_patterns": ["no such"]}, "patterns that match no parameter: no such"),
        ({"parameter_with_row_parallelism_patterns": [r".*down", r"1\.down"]}, "matches more than one pattern"),
        ({"pipeline_replicated_parameter_patterns": []}, "in two pipeline stages and is not declared as tied"),
        ({"affine_map": {"version": 2, "params": {}}}, "affine map of version 2"),
    ],
)
def test_wrong_description(pipeline, tmp_path, changes, words):
    source = with_info(pipeline, tmp_path / "c", **changes)
    if "parameter_with_sub_params" not in changes and "up" in str(changes):
        source = with_info(source, tmp_path / "d", parameter_with_sub_params=[])
    with pytest.raises(CheckpointError, match=words):
        convert(source, tmp_path / "u")
    assert not (tmp_path / "u").exists()


def test_no_description(pipeline, tmp_path):
    source = tmp_path / "c"
    shutil.copytree(pipeline, source)
    edit(source, "mp_rank_*_model_states.pt", lambda model: model.pop("universal_checkpoint_info"))
    with pytest.raises(CheckpointError, match="2 tensor-parallel ranks and no universal_checkpoint_info"):
        convert(source, tmp_path / "u")
