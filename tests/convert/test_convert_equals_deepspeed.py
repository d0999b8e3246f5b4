"""The converter against DeepSpeed's own, on checkpoints of train.py and on tensor- and
pipeline-parallel ones (tests/ranks/model_parallel.py): every tensor, every bit."""

import shutil
from collections import OrderedDict

import pytest
import torch
from helpers import assert_equal_to_deepspeed, edit, frozen_and_buffer, load, not_converted

from measure.ranks import run

MODEL = "mp_rank_00_model_states.pt"
# Parameters that divide among no number of ranks, and some smaller than it.
COMMON = ("--n_embd", 36, "--n_head", 3, "--seq_len", 14, "--train_batch_size", 12, "--steps", 3)
COMMON = (
    *COMMON,
    "--train_micro_batch_size_per_gpu",
    1,
    "--checkpoint_interval",
    3,
    "--checkpoint_dir",
    "c",
)


def quick(cases, others):
    """The cases of `make test`, and those that `make test-all` adds."""
    return [
        *cases,
        *(pytest.param(*case, marks=pytest.mark.slow) for case in others if case not in cases),
    ]


CASES = [(1, "bf16", 3, frozen_and_buffer), (2, "fp32", 1, None), (3, "bf16", 4, frozen_and_buffer)]
OTHERS = [
    (stage, dtype, ranks, None)
    for stage in (1, 2, 3)
    for dtype in ("fp32", "bf16")
    for ranks in (1, 3, 4)
]


@pytest.mark.parametrize(
    "stage, dtype, ranks, variant", quick(CASES, [*OTHERS, (2, "bf16", 4, frozen_and_buffer)])
)
def test_data_parallel(tmp_path, stage, dtype, ranks, variant):
    """Every weight and moment; the hyper-parameters, the loss scale, and all that the model states
    have but weights."""
    run(
        tmp_path, ranks, "train.py", *COMMON, "--zero_stage", stage, "--dtype", dtype, patch=variant
    )
    source, ours = tmp_path / "c" / "global_step3", tmp_path / "ours"
    assert_equal_to_deepspeed(source, tmp_path)
    assert load(ours / "zero" / "wte.weight" / "step.pt").item() == 3
    a, b = (load(tmp_path / name / "zero" / "optimizer_state.pt") for name in ("ours", "theirs"))
    assert vars(a["loss_scaler"]) == vars(b["loss_scaler"]) and type(a["loss_scaler"]) is type(
        b["loss_scaler"]
    )
    assert (
        a["param_groups"] == b["param_groups"]
        and a["dynamic_loss_scale"] == b["dynamic_loss_scale"]
    )
    model, original = load(ours / MODEL), load(min(source.glob(f"*{MODEL}")))
    for state in (model, original):
        del state["module"], state["frozen_param_fragments"]
    assert model == original
    # No rank reads another one's shard again: the state of all has no tensor but the step, and each
    # file only its own.
    assert (ours / "zero" / "optimizer_state.pt").stat().st_size < 10_000
    size = sum(shape.numel() for group in model["param_shapes"] for shape in group.values())
    files = list((ours / "zero").rglob("*.pt"))
    assert (
        3 * 4 * size < sum(path.stat().st_size for path in files) < 3 * 4 * size + 2500 * len(files)
    )


@pytest.mark.parametrize("stage", [1, 3])
def test_more_than_a_chunk(laid_out, tmp_path, stage):
    """Megabytes, which are read and written in pieces: the checksums in the files are right,
    too."""
    shapes = [OrderedDict(a=torch.Size((700_001,)), b=torch.Size((7, 90_000)))]
    assert_equal_to_deepspeed(laid_out(stage, shapes=shapes), tmp_path)


AUTOTP = [(stage, *sizes) for stage in (1, 2, 3) for sizes in [(4, 2), (4, 4), (3, 3)]]


@pytest.mark.parametrize("stage, ranks, tensor", quick([(1, 4, 2), (2, 4, 4), (3, 3, 3)], AUTOTP))
def test_autotp(tmp_path, stage, ranks, tensor):
    """AutoTP's affine maps: column, row, fused qkv, replicated; a width that 3 ranks do not divide
    evenly."""
    run(tmp_path, ranks, "tests/ranks/model_parallel.py", tmp_path / "c", "autotp", stage, tensor)
    assert_equal_to_deepspeed(tmp_path / "c" / "global_step3", tmp_path)


@pytest.fixture(scope="module")
def pipeline(work):
    run(work, 8, "tests/ranks/model_parallel.py", work / "pipeline", "pipeline", 2, 2)
    return work / "pipeline" / "global_step3"


def with_info(source, target, **changes):
    """A copy of a checkpoint whose universal_checkpoint_info is another."""
    shutil.copytree(source, target)
    edit(
        target,
        "mp_rank_*_model_states.pt",
        lambda model: model["universal_checkpoint_info"].update(changes),
    )
    return target


NONE = {"parameter_with_sub_params": []}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        NONE | {"parameter_with_2_sub_params_cat_dim_0": [r".*up"]},
        NONE | {"vocabulary_parameter_patterns": [r".*up"], "original_vocab_size": 250},
        {
            "parameter_with_sub_params": [
                {"patterns": [r".*up"], "shape": (2, -1), "partition_dim": 0}
            ]
        },
        {
            "parameter_with_sub_params": [
                {"patterns": [r".*up"], "shape": ((64, 128, 64), 32), "partition_dim": 0}
            ]
        },
    ],
    ids=[
        "as it is",
        "two sub-params",
        "padded vocabulary",
        "count of sub-params",
        "unequal sub-params",
    ],
)
def test_pipeline(pipeline, tmp_path, changes):
    """PP 2 x TP 2 x DP 2: tied embeddings, row, column, replicated, averaged, and two
    sub-parameters in one. And the same bytes, declared to be cut in other ways: both converters
    take them alike."""
    assert_equal_to_deepspeed(with_info(pipeline, tmp_path / "c", **changes), tmp_path)


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            NONE | {"tp_replicated_parameter_patterns": [r".*up"]},
            "differs on tensor-parallel rank 1",
        ),
        (
            {"parameter_with_row_parallelism_patterns": [r".*down", r"1\.down"]},
            "matches more than one pattern",
        ),
        (
            {"pipeline_replicated_parameter_patterns": []},
            "in two pipeline stages and is not declared as tied",
        ),
        ({"affine_map": {"version": 2, "params": {}}}, "affine map of version 2"),
        (
            {"vocabulary_parameter_patterns": ["no such"]},
            "patterns that match no parameter: no such (--no_strict",
        ),
        (None, "2 tensor-parallel ranks and no universal_checkpoint_info"),
    ],
)
def test_wrong_description(pipeline, tmp_path, changes, words):
    source = with_info(pipeline, tmp_path / "c", **changes or {})
    if changes is None:
        edit(
            source,
            "mp_rank_*_model_states.pt",
            lambda model: model.pop("universal_checkpoint_info"),
        )
    not_converted(source, words)
