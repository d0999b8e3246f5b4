"""The converter on what odd engines save (tests/ranks/odd_engine.py): tensors that are neither parameter nor buffer, a
buffer under two names, every kind of storage, shards without padding. And mixtures of experts, which it refuses."""

import pytest
import torch
from helpers import content, load, same_bits
from odd_engine import KINDS, STAGES

from harness.ranks import run
from universal import CheckpointError, convert


@pytest.fixture(scope="module")
def trained(work):
    run(work, 3, "tests/ranks/odd_engine.py")
    for tag in STAGES:
        convert(work / tag, work / f"u {tag}", check=True)
    return work


@pytest.mark.parametrize("tag", STAGES)
def test_everything_is_there(trained, tag):
    """Every weight; and of the module all that is no weight, under each of its names, in its own dtype."""
    truth, output = load(trained / f"truth {tag}.pt"), trained / f"u {tag}"
    model = load(output / "mp_rank_00_model_states.pt")
    assert len(truth["weights"]) == 6 and len(truth["kept"]) == 3 + 6 + len(KINDS)
    for name, wanted in truth["weights"].items():
        assert same_bits(load(output / "zero" / name / "fp32.pt")["param"], wanted), name
        assert load(output / "zero" / name / "step.pt") == 2
    # Of what has no elements it is arbitrary which belongs to a group, and which is another's second name.
    assert model["module"].keys() - {"empty.0", "empty.1"} == truth["kept"].keys()
    for name, wanted in truth["kept"].items():
        assert same_bits(model["module"][name], wanted), name
    assert torch.equal(model["masks"][0].to_dense(), torch.eye(3)) and model["masks"][1].dtype == torch.uint32


@pytest.mark.parametrize("stage", ["1", "2"])
def test_without_padding(trained, stage):
    """elastic_checkpoint: true leaves out padding and hyper-parameters, and nothing else."""
    rigid, elastic = (content(trained / f"u {tag}" / "zero") for tag in (stage, f"elastic {stage}"))
    groups = load(trained / f"u elastic {stage}" / "zero" / "optimizer_state.pt")["param_groups"]
    assert groups == [{"params": [0]}, {"params": [1]}]
    del rigid["optimizer_state.pt"], elastic["optimizer_state.pt"]
    assert rigid and rigid == elastic


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("kind", ["AutoEP's", "DeepSpeed's own"])
def test_experts_are_refused(laid_out, tmp_path, stage, kind):
    """With the way to go on."""
    layer = {"expert_key_prefix": "mlp.experts", "num_experts": 4, "num_local_experts": 2, "ep_size": 2}
    if kind == "AutoEP's":
        source = laid_out(stage, lambda model: model.update(ds_autoep_layers=[layer]))
    else:
        source = laid_out(stage)
        (source / "layer_0_expert_0_mp_rank_00_model_states.pt").touch()
    with pytest.raises(CheckpointError, match="has experts, .* DeepSpeed's own converter does AutoEP's"):
        convert(source, tmp_path / "u")
    assert not (tmp_path / "u").exists()
