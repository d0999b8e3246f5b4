"""Writes the checkpoints that tests/convert/test_convert_equals_deepspeed.py converts: tensor
parallel by AutoTP, or a pipeline with tensor parallelism of its own.

    model_parallel.py FOLDER autotp STAGE TENSOR
    model_parallel.py FOLDER pipeline TENSOR PIPELINE
"""

import sys
from types import SimpleNamespace

import deepspeed
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.utils import groups
from toy import begin

from examples.train_3d import Spread, Sum
from train import GPT, load_text, micro_batch, parameter_groups

folder, kind, *degrees = sys.argv[1:]
begin()
torch.manual_seed(1)
text, _, _ = load_text(None, 16)
BATCH = SimpleNamespace(seed=0, seq_len=16, train_batch_size=8, train_micro_batch_size_per_gpu=8)
CONFIG = {
    "train_batch_size": 8,
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 1e-3}},
    "gradient_clipping": 1.0,
}


def autotp(stage, tensor):
    gpt = GPT(n_layer=1, n_head=4, n_embd=32, seq_len=16, dropout=0.0)
    specs = [
        {
            "patterns": [r".*qkv\.weight$"],
            "partition_type": "column",
            "shape": [3, -1],
            "partition_dim": 0,
        },
        {"patterns": [r".*up\.weight$"], "partition_type": "column"},
        {"patterns": [r".*(proj|down)\.weight$"], "partition_type": "row"},
    ]
    if tensor == 3:  # the heads do not divide by it, 128 neurons do it unevenly
        specs = [specs[1], {"patterns": [r".*down\.weight$"], "partition_type": "row"}]
    groups._init_tp_mesh_device(tensor)
    parallel = {
        "autotp_size": tensor,
        "partition_config": {"use_default_specs": False, "layer_specs": specs},
    }
    config = CONFIG | {"zero_optimization": {"stage": stage}, "tensor_parallel": parallel}
    config["train_micro_batch_size_per_gpu"] = micro = 8 // (dist.get_world_size() // tensor)
    engine, *_ = deepspeed.initialize(
        model=gpt, model_parameters=parameter_groups(gpt), config=config, mpu=groups
    )
    rows = slice(
        groups.get_data_parallel_rank() * micro, (groups.get_data_parallel_rank() + 1) * micro
    )
    for step in (1, 2, 3):
        inputs, targets = micro_batch(BATCH, text, step, 0)
        engine.backward(engine(inputs[rows], targets[rows]))
        engine.step()
    engine.save_checkpoint(folder, tag="global_step3")


class Embedding(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(256, width) * 0.02)

    def forward(self, tokens):
        return F.embedding(tokens, self.weight)


class Feed(nn.Module):
    """A column- and a row-parallel linear layer; up holds two sub-parameters, gate and value, side
    by side."""

    def __init__(self, width, tensor, rank):
        super().__init__()
        share = 4 * width // tensor
        generator = torch.Generator().manual_seed(width + rank)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Parameter(torch.randn(2 * share, width, generator=generator) * 0.1)
        self.down = nn.Parameter(torch.randn(width, share, generator=generator) * 0.1)
        self.drift = nn.Parameter(
            torch.randn(width, generator=generator) * 0.1
        )  # not kept alike: averaged

    def forward(self, x):
        gate, value = (Spread.apply(self.norm(x), GROUP) @ self.up.T).chunk(2, dim=-1)
        return x + Sum.apply(F.silu(gate) * value @ self.down.T + self.drift, GROUP)


def pipeline(tensor, stages):
    global GROUP
    data = dist.get_world_size() // (tensor * stages)
    topology = PipeModelDataParallelTopology(num_pp=stages, num_mp=tensor, num_dp=data)
    for ranks in topology.get_axis_comm_lists("model"):
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            GROUP, rank = group, ranks.index(dist.get_rank())
    embedding = [TiedLayerSpec("embedding", Embedding, 32, tied_weight_attr="weight")]
    head = TiedLayerSpec(
        "embedding",
        Embedding,
        32,
        forward_fn=lambda m, x: x @ m.weight.T,
        tied_weight_attr="weight",
    )
    module = PipelineModule(
        [
            *embedding,
            *(LayerSpec(Feed, 32, tensor, rank) for _ in range(4)),
            LayerSpec(nn.LayerNorm, 32),
            head,
        ],
        topology=topology,
        loss_fn=lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()),
    )
    module.universal_checkpoint_info = {
        "universal_checkpoint_version": 0.2,
        "pipeline_replicated_parameter_patterns": [r"tied_modules\.embedding\.weight"],
        "tp_replicated_parameter_patterns": [r".*norm\.(weight|bias)", r"5\.(weight|bias)"],
        "vocabulary_parameter_patterns": [],
        "parameter_to_average_patterns": [r".*drift"],
        "parameter_with_row_parallelism_patterns": [r".*down"],
        "parameter_with_sub_params": [
            {"patterns": [r".*up"], "shape": ((128, 128), 32), "partition_dim": 0}
        ],
    }
    module.universal_checkpoint_info["tp_replicated_parameter_patterns"] += [
        r"tied_modules\.embedding\.weight"
    ]
    config = CONFIG | {
        "train_micro_batch_size_per_gpu": 8 // (2 * data),
        "zero_optimization": {"stage": 1},
    }
    engine, *_ = deepspeed.initialize(
        model=module, model_parameters=module.parameters(), config=config
    )
    micro = 8 // (2 * data)
    for step in (1, 2, 3):
        inputs, targets = micro_batch(BATCH, text, step, 0)
        first = engine.grid.data_parallel_id * 2 * micro
        batches = [slice(first + m * micro, first + (m + 1) * micro) for m in range(2)]
        engine.train_batch(iter([(inputs[rows], targets[rows]) for rows in batches]))
    engine.save_checkpoint(folder, tag="global_step3")


{"autotp": autotp, "pipeline": pipeline}[kind](*map(int, degrees))
dist.barrier()
