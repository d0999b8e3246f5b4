"""The recipes of docs/troubleshooting.md do what they say, on 2 ranks and on 3."""

import pytest
import recipes
import torch

from tests.support.case import cases_of, test_case  # noqa: F401

CASES = cases_of(recipes)


def test_weights_in_bf16_and_several_files(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 64, "n_positions": 8}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    exec(recipes.IN_BF16.replace("5GB", "4KB"), {"model": model, "torch": torch})
    assert len([*tmp_path.glob("model/*.safetensors")]) > 1
    again = transformers.AutoModelForCausalLM.from_pretrained("model")
    assert again.dtype == torch.bfloat16
    assert torch.equal(again.transformer.wte.weight, model.transformer.wte.weight)
