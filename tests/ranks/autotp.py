"""Models of transformers, which AutoTP cuts for two ranks: play()."""

import torch
import torch.distributed as dist
import transformers
from layouts import reset_mesh

import universal
from tests.support.toy import begin, make

SMALL = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# AutoTP of DeepSpeed 0.19.8 refuses GPT-2, and Mixtral's experts: of the latter, attention is cut.
ATTENTION = [
    {"patterns": [r".*self_attn\.[qkv]_proj\.weight$"], "partition_type": "column"},
    {"patterns": [r".*self_attn\.o_proj\.weight$"], "partition_type": "row"},
]
MODELS = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig, {}),
    "mixtral": (
        transformers.MixtralForCausalLM,
        lambda **options: transformers.MixtralConfig(num_local_experts=2, **options),
        {"partition_config": {"use_default_specs": False, "layer_specs": ATTENTION}},
    ),
}


def engine_of(name, stage, degree, seed):
    model, config, options = MODELS[name]
    more = {"tensor_parallel": {"autotp_size": degree} | options} if degree > 1 else {}
    mpu = reset_mesh(degree)
    engine = make(stage, lambda: model(config(**SMALL)), seed=seed, batch=2, mpu=mpu, **more)
    weight = dict(engine.module.named_parameters())["model.layers.0.self_attn.q_proj.weight"]
    assert tuple(getattr(weight, "ds_shape", weight.shape)) == (32 // degree, 32)
    return engine


def losses(engine, steps):
    """Of all micro-batches of each step."""
    group = engine.seq_data_parallel_group
    share = engine.gradient_accumulation_steps()
    means = []
    for step in steps:
        total = torch.zeros((), dtype=torch.float64)
        for i in range(share):
            number = 10 * step + dist.get_rank(group) * share + i
            generator = torch.Generator().manual_seed(number)
            tokens = torch.randint(128, (1, 16), generator=generator)
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            total += loss.detach()
        dist.all_reduce(total, group=group)
        means.append(total.item() / 2)
    return means


def play(name, stage, degree, other):
    """Saved by ranks of one degree, and loaded by those of another."""
    begin()
    engine = engine_of(name, stage, degree, seed=1)
    losses(engine, (0, 1))
    engine.save_checkpoint(".", tag="t")
    truth = losses(engine, (2, 3))
    engine = engine_of(name, stage, other, seed=5)
    fresh = losses(engine, (2, 3))
    universal.load_checkpoint(engine, ".", "t")
    gaps = [abs(a - b) for a, b in zip(losses(engine, (2, 3)), truth, strict=True)]
    assert max(gaps) <= 1e-5, gaps
    assert max(abs(a - b) for a, b in zip(fresh, truth, strict=True)) > 1e-3
