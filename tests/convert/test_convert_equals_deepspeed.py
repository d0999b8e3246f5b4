"""The converter against DeepSpeed's own, on checkpoints of train.py and on tensor- and
pipeline-parallel ones (tests/ranks/model_parallel.py): every tensor, every bit."""

import itertools
import shutil
from collections import OrderedDict

import pytest
import torch

from tests.support.commands import slow
from tests.support.conversions import assert_equal_to_deepspeed, not_converted
from tests.support.files import MODEL, edit, load
from tests.support.helpers import frozen_and_buffer
from tests.support.ranks import run

MODELS = "mp_rank_*_model_states.pt"
# Parameters that divide among no number of ranks, and some smaller than it.
COMMON = (
    "--n_embd 36 --n_head 3 --seq_len 14 --steps 3 --train_batch_size 12 "
    "--train_micro_batch_size_per_gpu 1 --checkpoint_interval 3 --checkpoint_dir c"
).split()


def quick(cases, others):
    """The cases of `make test`, and those that `make test-all` adds."""
    return [*cases, *(slow(*case) for case in others if case not in cases)]


CASES = [(1, "bf16", 3, frozen_and_buffer), (2, "fp32", 1, None), (3, "bf16", 4, frozen_and_buffer)]
OTHERS = [
    *itertools.product((1, 2, 3), ("fp32", "bf16"), (1, 3, 4), (None,)),
    (2, "bf16", 4, frozen_and_buffer),
]


@pytest.mark.parametrize("stage, dtype, ranks, variant", quick(CASES, OTHERS))
def test_data_parallel(tmp_path, stage, dtype, ranks, variant):
    """Every weight and moment; the hyper-parameters, the loss scale, and all that the model states
    have but weights."""
    flags = [*COMMON, "--zero_stage", stage, "--dtype", dtype]
    run(tmp_path, ranks, "train.py", *flags, patch=variant)
    source = tmp_path / "c" / "global_step3"
    ours = tmp_path / "ours"
    assert_equal_to_deepspeed(source, tmp_path)
    assert load(ours / "zero" / "wte.weight" / "step.pt").item() == 3
    optimizer = load(ours / "zero" / "optimizer_state.pt")
    expected = load(tmp_path / "theirs" / "zero" / "optimizer_state.pt")
    assert vars(optimizer["loss_scaler"]) == vars(expected["loss_scaler"])
    for key in ("param_groups", "dynamic_loss_scale"):
        assert optimizer[key] == expected[key]
    model = load(ours / MODEL)
    original = load(min(source.glob(f"*{MODEL}")))
    for state in (model, original):
        del state["module"], state["frozen_param_fragments"]
    assert model == original
    # No rank reads another one's shard again: the state of all has no tensor but the step, and each
    # file only its own.
    assert (ours / "zero" / "optimizer_state.pt").stat().st_size < 10_000
    numel = sum(shape.numel() for group in model["param_shapes"] for shape in group.values())
    sizes = [path.stat().st_size for path in (ours / "zero").rglob("*.pt")]
    assert 3 * 4 * numel < sum(sizes) < 3 * 4 * numel + 2500 * len(sizes)


@pytest.mark.parametrize("stage", [1, 3])
def test_more_than_a_chunk(laid_out, tmp_path, stage):
    """Megabytes, which are read and written in pieces: the checksums in the files are right,
    too."""
    shapes = [OrderedDict(a=torch.Size((700_001,)), b=torch.Size((7, 90_000)))]
    assert_equal_to_deepspeed(laid_out(stage, shapes=shapes), tmp_path)


AUTOTP = [(stage, *sizes) for stage in (1, 2, 3) for sizes in [(4, 2), (4, 4)]]


@pytest.mark.parametrize("stage, ranks, tensor", quick([(1, 4, 2), (3, 4, 4)], AUTOTP))
def test_autotp(tmp_path, stage, ranks, tensor):
    """AutoTP's affine maps: column, row, fused qkv, replicated."""
    flags = ["--n_head", 4, "--n_embd", 32, "--zero_stage", stage, "--tensor_parallel", tensor]
    run(tmp_path, ranks, "examples.train_tp_sp", *COMMON, *flags)
    assert_equal_to_deepspeed(tmp_path / "c" / "global_step3", tmp_path)


@pytest.fixture(scope="module")
def pipeline(work):
    run(work, 8, "tests/ranks/model_parallel.py", work / "pipeline")
    return work / "pipeline" / "global_step3"


def with_info(source, target, lacking=None, **changes):
    """A copy of a checkpoint whose universal_checkpoint_info is another. lacking: a key that its
    model states lack."""
    shutil.copytree(source, target)
    edit(target, MODELS, lambda model: model["universal_checkpoint_info"].update(changes))
    edit(target, MODELS, lambda model: model.pop(lacking, None))
    return target


def sub_params(*shape):
    """What declares that each weight "up" consists of sub-parameters."""
    description = {"patterns": UP, "shape": shape, "partition_dim": 0}
    return {"parameter_with_sub_params": [description]}


UP = [r".*up"]
NO_SUB_PARAMS = {"parameter_with_sub_params": []}
PADDED = {"vocabulary_parameter_patterns": UP, "original_vocab_size": 250}
DESCRIPTIONS = {
    "as_it_is": {},
    "two_sub_params": NO_SUB_PARAMS | {"parameter_with_2_sub_params_cat_dim_0": UP},
    "padded_vocabulary": NO_SUB_PARAMS | PADDED,
    "count_of_sub_params": sub_params(2, -1),
    "unequal_sub_params": sub_params((64, 128, 64), 32),
}


@pytest.mark.parametrize("changes", DESCRIPTIONS.values(), ids=DESCRIPTIONS)
def test_pipeline(pipeline, tmp_path, changes):
    """PP 2 x TP 2 x DP 2: tied embeddings, row, column, replicated, averaged, and two
    sub-parameters in one. And the same bytes, declared to be cut in other ways: both converters
    take them alike."""
    assert_equal_to_deepspeed(with_info(pipeline, tmp_path / "c", **changes), tmp_path)


def test_pipeline_without_degrees(pipeline, tmp_path):
    """Of a DeepSpeed that does not save them: the files of a layer tell."""
    source = with_info(pipeline, tmp_path / "c", lacking="checkpoint_parallel_dimensions")
    assert_equal_to_deepspeed(source, tmp_path)


WRONG_DESCRIPTIONS = {
    "replicated": (
        NO_SUB_PARAMS | {"tp_replicated_parameter_patterns": UP},
        "differs on tensor-parallel rank 1",
    ),
    "two_patterns": (
        {"parameter_with_row_parallelism_patterns": [r".*down", r"1\.down"]},
        "matches more than one pattern",
    ),
    "not_tied": (
        {"pipeline_replicated_parameter_patterns": []},
        "in two pipeline stages and is not declared as tied",
    ),
    "later_affine_map": ({"affine_map": {"version": 2, "params": {}}}, "affine map of version 2"),
    "no_such_parameter": (
        {"vocabulary_parameter_patterns": ["no such"]},
        "patterns that match no parameter: no such (--no_strict",
    ),
}


@pytest.mark.parametrize("changes, words", WRONG_DESCRIPTIONS.values(), ids=WRONG_DESCRIPTIONS)
def test_wrong_description(pipeline, tmp_path, changes, words):
    not_converted(with_info(pipeline, tmp_path / "c", **changes), words)


def test_no_description(pipeline, tmp_path):
    source = with_info(pipeline, tmp_path / "c", lacking="universal_checkpoint_info")
    not_converted(source, "2 tensor-parallel ranks and no universal_checkpoint_info")
