"""A model of transformers, which AutoTP cuts by itself for two ranks: play()."""

import torch
import transformers
from layouts import reset_mesh

import universal
from tests.support.toy import begin, make, train

SMALL = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))


def engine_of(stage, degree, seed):
    more = {"tensor_parallel": {"autotp_size": degree}} if degree > 1 else {}
    engine = make(stage, llama, seed=seed, batch=2, mpu=reset_mesh(degree), **more)
    weight = engine.module.model.layers[0].self_attn.q_proj.weight
    assert tuple(getattr(weight, "ds_shape", weight.shape)) == (32 // degree, 32)
    return engine


def forward(engine, number):
    tokens = torch.randint(128, (1, 16), generator=torch.Generator().manual_seed(number))
    return engine(input_ids=tokens, labels=tokens).loss


def losses(engine, steps):
    return [train(engine, step, forward=forward) for step in steps]


def play(stage, degree, other):
    """Saved by ranks of one degree, and loaded by those of another."""
    begin()
    engine = engine_of(stage, degree, seed=1)
    losses(engine, (0, 1))
    engine.save_checkpoint(".", tag="t")
    truth = losses(engine, (2, 3))
    engine = engine_of(stage, other, seed=5)
    fresh = losses(engine, (2, 3))
    universal.load_checkpoint(engine, ".", "t")
    gaps = [abs(a - b) for a, b in zip(losses(engine, (2, 3)), truth, strict=True)]
    assert max(gaps) <= (0 if degree == other else 1e-5), gaps
    assert max(abs(a - b) for a, b in zip(fresh, truth, strict=True)) > 1e-3
