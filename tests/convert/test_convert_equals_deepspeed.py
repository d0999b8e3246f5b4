"""The converter against DeepSpeed's own, on checkpoints of train.py: every tensor, every bit."""

import pytest
from helpers import assert_equal_to_deepspeed, frozen_and_buffer, load

from harness.ranks import run

MODEL = "mp_rank_00_model_states.pt"
# Parameters that divide among no number of ranks, and some smaller than it.
COMMON = ("--n_embd", 36, "--n_head", 3, "--seq_len", 14, "--train_batch_size", 12, "--steps", 3)
COMMON = (*COMMON, "--train_micro_batch_size_per_gpu", 1, "--checkpoint_interval", 3)


# Every stage, both dtypes, every number of ranks; the other combinations are slow.
CASES = [(1, "bf16", 4, frozen_and_buffer(1)), (2, "fp32", 1, None), (3, "bf16", 4, frozen_and_buffer(1))]
CASES += [(3, "fp32", 3, None)]
SLOW = [(stage, dtype, ranks, None) for stage in (1, 2, 3) for dtype in ("fp32", "bf16") for ranks in (1, 3, 4)]
SLOW += [(2, "bf16", 4, frozen_and_buffer(1))]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW if case not in CASES]


@pytest.mark.parametrize("stage, dtype, ranks, variant", CASES)
def test_bit_equal_to_deepspeed(tmp_path, stage, dtype, ranks, variant):
    """Every weight and moment; the hyper-parameters, the loss scale, and all that the model states have but weights."""
    layout = ("--zero_stage", stage, "--dtype", dtype, "--checkpoint_dir", "c")
    run(tmp_path, ranks, "train.py", *COMMON, *layout, patch=variant)
    source, ours = tmp_path / "c" / "global_step3", tmp_path / "ours"
    assert_equal_to_deepspeed(source, tmp_path)
    assert load(ours / "zero" / "wte.weight" / "step.pt").item() == 3
    a, b = (load(tmp_path / name / "zero" / "optimizer_state.pt") for name in ("ours", "theirs"))
    assert vars(a["loss_scaler"]) == vars(b["loss_scaler"]) and type(a["loss_scaler"]) is type(b["loss_scaler"])
    assert a["param_groups"] == b["param_groups"] and a["dynamic_loss_scale"] == b["dynamic_loss_scale"]
    model, original = load(ours / MODEL), load(min(source.glob(f"*{MODEL}")))
    for state in (model, original):
        del state["module"], state["frozen_param_fragments"]
    assert model == original
    # No rank reads another one's shard again: the state of all has no tensor but the step, and each file only its own.
    assert (ours / "zero" / "optimizer_state.pt").stat().st_size < 10_000
    size = sum(shape.numel() for group in model["param_shapes"] for shape in group.values())
    files = list((ours / "zero").rglob("*.pt"))
    assert 3 * 4 * size < sum(path.stat().st_size for path in files) < 3 * 4 * size + 2500 * len(files)
