"""A small Mixtral whose experts DeepSpeed's AutoEP takes apart: saved, and loaded by install()."""

import json
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.module_inject.auto_ep import AutoEP
from transformers import MixtralConfig, MixtralForCausalLM

import universal
from tests.support.toy import begin


def make_engine(size):
    # It fails with some versions of transformers, and only router logits need it.
    AutoEP._retarget_transformers_output_recorders = lambda *_: None
    shape = MixtralConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        attn_implementation="eager",
    )
    model = MixtralForCausalLM(shape)
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 2},
        "expert_parallel": {
            "enabled": True,
            "autoep_size": size,
            "preset_model": "mixtral",
            "use_grouped_mm": False,
        },
    }
    parameters = list(model.parameters())
    return deepspeed.initialize(model=model, model_parameters=parameters, config=config)[0]


def save(size):
    begin()
    engine = make_engine(size)
    ids = torch.zeros(1, 6, dtype=torch.long)
    engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
    engine.step()
    engine.save_checkpoint(".", tag="t")
    dist.barrier()


def load(size):
    """Writes what install() says to NAME.RANK.json."""
    begin()
    universal.install()
    engine = make_engine(size)
    said = "loaded"
    try:
        engine.load_checkpoint(".")
    except universal.CheckpointError as error:
        said = str(error)
    Path(f"{size}.{dist.get_rank()}.json").write_text(json.dumps(said))
    dist.barrier()
