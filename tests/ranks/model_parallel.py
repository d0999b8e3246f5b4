"""model_parallel.py FOLDER: saves a pipeline of 2 stages with tensor parallelism of its own, on 2 x
2 x 2 ranks, which tests/convert/test_convert_equals_deepspeed.py converts."""

import functools
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

from examples.train_3d import Spread, Sum
from tests.support.toy import begin, make
from train import load_text, micro_batch

TENSOR = STAGES = DATA = 2


class Embedding(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(256, width) * 0.02)

    def forward(self, tokens):
        return F.embedding(tokens, self.weight)


class Feed(nn.Module):
    """A column- and a row-parallel linear layer; up holds two sub-parameters, gate and value, side
    by side."""

    def __init__(self, width, rank):
        super().__init__()
        share = 4 * width // TENSOR
        generator = torch.Generator().manual_seed(width + rank)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Parameter(torch.randn(2 * share, width, generator=generator) * 0.1)
        self.down = nn.Parameter(torch.randn(width, share, generator=generator) * 0.1)
        # Not the same on all ranks: averaged.
        self.drift = nn.Parameter(torch.randn(width, generator=generator) * 0.1)

    def forward(self, x):
        gate, value = (Spread.apply(self.norm(x), GROUP) @ self.up.T).chunk(2, dim=-1)
        return x + Sum.apply(F.silu(gate) * value @ self.down.T + self.drift, GROUP)


begin()
torch.manual_seed(1)
topology = PipeModelDataParallelTopology(num_pp=STAGES, num_mp=TENSOR, num_dp=DATA)
for ranks in topology.get_axis_comm_lists("model"):
    group = dist.new_group(ranks)
    if dist.get_rank() in ranks:
        GROUP = group
        rank = ranks.index(dist.get_rank())
tied = functools.partial(TiedLayerSpec, "embedding", Embedding, 32, tied_weight_attr="weight")
layers = [LayerSpec(Feed, 32, rank) for _ in range(4)]
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
engine = make(1, lambda: module, batch=8, micro=2, clip=1.0)
text, _, _ = load_text(None, 16)
args = SimpleNamespace(seed=0, seq_len=16, train_batch_size=8, train_micro_batch_size_per_gpu=2)
first = 2 * engine.grid.data_parallel_id
for step in (1, 2, 3):
    engine.train_batch(micro_batch(args, text, step, first + m) for m in (0, 1))
engine.save_checkpoint(sys.argv[1], tag="global_step3")
dist.barrier()
