"""The converter against DeepSpeed's own, on data-parallel checkpoints and on tensor- and
pipeline-parallel ones (tests/ranks/model_parallel.py): every tensor, every bit. And what inspect
and diff say of these."""

import shutil
from collections import OrderedDict

import pytest
import torch

from tests.support.commands import slow
from tests.support.conversions import assert_equal_to_deepspeed, not_converted
from tests.support.files import MODEL, edit, load
from tests.support.ranks import run
from universal.diff import diff
from universal.inspect import look

MODELS = "mp_rank_*_model_states.pt"


@pytest.mark.parametrize("stage", [1, 3])
def test_data_parallel(laid_out, tmp_path, stage):
    """Every weight and moment, also megabytes, which are read and written in pieces; the
    hyper-parameters, the loss scale, and all that the model states have but weights."""
    shapes = [OrderedDict(a=torch.Size((700_001,)), b=torch.Size((7, 90_000)))]
    shapes.append(OrderedDict(c=torch.Size((4,))))
    source = laid_out(stage, shapes=shapes)
    ours = tmp_path / "ours"
    assert_equal_to_deepspeed(source, tmp_path)
    optimizer = load(ours / "zero" / "optimizer_state.pt")
    expected = load(tmp_path / "theirs" / "zero" / "optimizer_state.pt")
    assert vars(optimizer["loss_scaler"]) == vars(expected["loss_scaler"])
    for key in ("param_groups", "dynamic_loss_scale"):
        assert optimizer[key] == expected[key]
    weights = {"module": None, "frozen_param_fragments": None}
    model, original = (load(min(folder.glob(f"*{MODEL}"))) for folder in (ours, source))
    assert model | weights == original | weights
    # No rank reads another one's shard again: the state of all has no tensor but the step, and each
    # file only its own.
    assert (ours / "zero" / "optimizer_state.pt").stat().st_size < 10_000
    nbytes = 3 * 4 * (700_001 + 7 * 90_000 + 4)
    sizes = [path.stat().st_size for path in (ours / "zero").rglob("*.pt")]
    assert nbytes < sum(sizes) < nbytes + 2500 * len(sizes)


def check_facts(folder, converted, kind):
    """inspect takes the only checkpoint there for what it is, and no bit of it is lost."""
    (facts,) = look(folder)["tags"].values()
    assert facts["checked"] and not facts["problem"] and not facts["unread_damage"]
    assert facts["kind"] == kind
    assert facts["batch"] == {"samples": 8, "micro": 2, "doubt": ""}
    (source,) = folder.glob("global_step*")
    assert diff(source, converted)["same"]


FLAGS = (
    "--n_head 4 --n_embd 32 --seq_len 14 --steps 3 --train_batch_size 8 "
    "--train_micro_batch_size_per_gpu 2 --checkpoint_interval 3 --checkpoint_dir c"
).split()


@pytest.mark.parametrize(
    "stage, tensor", [slow(1, 2), (3, 2), *(slow(stage, 4) for stage in (1, 2, 3))]
)
def test_autotp(tmp_path, stage, tensor):
    """AutoTP's affine maps: column, row, fused qkv, replicated."""
    flags = ("--zero_stage", stage, "--tensor_parallel", tensor)
    run(tmp_path, 4, "examples.train_tp_sp", *FLAGS, *flags)
    assert_equal_to_deepspeed(tmp_path / "c" / "global_step3", tmp_path)
    layout = {2: "tensor 2 x data 2", 4: "tensor 4"}[tensor]
    check_facts(tmp_path / "c", tmp_path / "ours", f"ZeRO-{stage}, 4 ranks ({layout})")


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
    if not changes:
        kind = "ZeRO-1, 8 ranks (tensor 2 x pipeline 2 x data 2)"
        check_facts(pipeline.parent, tmp_path / "ours", kind)


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
