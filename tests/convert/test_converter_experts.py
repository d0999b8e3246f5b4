"""ds_to_universal.py on mixtures of experts: refused by name, with the way to go on."""

import pytest
from helpers import edit

from universal import CheckpointError, convert


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("kind", ["AutoEP's", "DeepSpeed's own"])
def test_experts_are_refused(checkpoint, stage, kind):
    source = checkpoint(stage)
    if kind == "AutoEP's":
        layer = {"expert_key_prefix": "mlp.experts", "num_experts": 4, "num_local_experts": 2, "ep_size": 2}
        edit(source, "*_model_*", lambda model: model.update(ds_autoep_layers=[layer]))
    else:
        (source / "layer_0_expert_0_mp_rank_00_model_states.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="has experts, .* DeepSpeed's own converter does AutoEP's"):
        convert(source, source.parent / "u")
    assert not (source.parent / "u").exists()
