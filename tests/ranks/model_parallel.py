"""Writes the checkpoints that tests/convert/test_convert_equals_deepspeed.py converts: tensor
parallel by AutoTP, or a pipeline with tensor parallelism of its own.

    model_parallel.py FOLDER autotp STAGE TENSOR
    model_parallel.py FOLDER pipeline TENSOR PIPELINE
"""

import functools
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.utils import groups

from examples.train_3d import Spread, Sum
from tests.support.toy import begin, make
from train import GPT, load_text, micro_batch, parameter_groups

folder, kind, *degrees = sys.argv[1:]
begin()
torch.manual_seed(1)
text, _, _ = load_text(None, 16)
BATCH = SimpleNamespace(seed=0, seq_len=16, train_batch_size=8, train_micro_batch_size_per_gpu=8)
OPTIONS = {"batch": 8, "clip": 1.0}


def autotp(stage, tensor):
    gpt = GPT(n_layer=1, n_head=4, n_embd=32, seq_len=16, dropout=0.0)
    qkv = {"patterns": [r".*qkv\.weight$"], "partition_type": "column"}
    up = {"patterns": [r".*up\.weight$"], "partition_type": "column"}
    row = {"patterns": [r".*(proj|down)\.weight$"], "partition_type": "row"}
    specs = [qkv | {"shape": [3, -1], "partition_dim": 0}, up, row]
    if tensor == 3:  # the heads do not divide by it, 128 neurons do it unevenly
        specs = [up, row | {"patterns": [r".*down\.weight$"]}]
    groups._init_tp_mesh_device(tensor)
    cuts = {"use_default_specs": False, "layer_specs": specs}
    micro = 8 // (dist.get_world_size() // tensor)
    engine = make(
        stage,
        lambda: gpt,
        lambda _: torch.optim.AdamW(parameter_groups(gpt), lr=1e-3),
        micro=micro,
        mpu=groups,
        tensor_parallel={"autotp_size": tensor, "partition_config": cuts},
        **OPTIONS,
    )
    start = groups.get_data_parallel_rank() * micro
    rows = slice(start, start + micro)
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
        # Not the same on all ranks: averaged.
        self.drift = nn.Parameter(torch.randn(width, generator=generator) * 0.1)

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
            GROUP = group
            rank = ranks.index(dist.get_rank())
    tied = functools.partial(TiedLayerSpec, "embedding", Embedding, 32, tied_weight_attr="weight")
    layers = [LayerSpec(Feed, 32, tensor, rank) for _ in range(4)]
    head = tied(forward_fn=lambda m, x: x @ m.weight.T)
    module = PipelineModule(
        [tied(), *layers, LayerSpec(nn.LayerNorm, 32), head],
        topology=topology,
        loss_fn=lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()),
    )
    of_embedding = r"tied_modules\.embedding\.weight"
    gate_and_value = {"patterns": [r".*up"], "shape": ((128, 128), 32), "partition_dim": 0}
    module.universal_checkpoint_info = {
        "universal_checkpoint_version": 0.2,
        "pipeline_replicated_parameter_patterns": [of_embedding],
        "tp_replicated_parameter_patterns": [
            r".*norm\.(weight|bias)",
            r"5\.(weight|bias)",
            of_embedding,
        ],
        "vocabulary_parameter_patterns": [],
        "parameter_to_average_patterns": [r".*drift"],
        "parameter_with_row_parallelism_patterns": [r".*down"],
        "parameter_with_sub_params": [gate_and_value],
    }
    micro = 8 // (2 * data)
    engine = make(1, lambda: module, micro=micro, **OPTIONS)
    start = engine.grid.data_parallel_id * 2 * micro
    batches = [slice(start + m * micro, start + (m + 1) * micro) for m in range(2)]
    for step in (1, 2, 3):
        inputs, targets = micro_batch(BATCH, text, step, 0)
        engine.train_batch(iter([(inputs[rows], targets[rows]) for rows in batches]))
    engine.save_checkpoint(folder, tag="global_step3")


{"autotp": autotp, "pipeline": pipeline}[kind](*map(int, degrees))
dist.barrier()
