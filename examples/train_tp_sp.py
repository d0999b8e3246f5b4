r"""Trains like train.py, but several ranks compute one micro-batch together: tensor parallelism
(DeepSpeed's AutoTP) and sequence parallelism (Ulysses), at ZeRO 1, 2 and 3. Start it from the root
of the repository:

    deepspeed --num_gpus 4 --module examples.train_tp_sp --tensor_parallel 2 --run_name tp2_dp2 \
        --checkpoint_dir ckpt_tp --checkpoint_interval 100
    deepspeed --num_gpus 2 --module examples.train_tp_sp --sequence_parallel 2 --run_name sp2 \
        --checkpoint_dir ckpt_tp --resume --checkpoint_tag global_step100

It resumes on any layout. Checkpoints of train.py have the layout
with both degrees 1, so this script resumes them, too. Also takes --elastic, --keep and --timeout,
like train_elastic.py.
"""

import functools

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.utils import groups

from examples.train_elastic import (
    argument_parser,
    positive,
    prepare,
    resume_and_train,
    rows_of,
    start,
)
from train import GPT, RANK, derive_seed, fail


def parse_arguments():
    parser = argument_parser(__doc__)
    for what in ("tensor", "sequence"):
        parser.add_argument(
            f"--{what}_parallel", type=positive, default=1, metavar="N", help=f"ranks to a {what}"
        )
    args = parser.parse_args()
    tensor = args.tensor_parallel
    sequence = args.sequence_parallel
    if args.n_head % (tensor * sequence):
        fail(
            f"--n_head {args.n_head} does not divide by "
            f"--tensor_parallel {tensor} x --sequence_parallel {sequence}"
        )
    if args.seq_len % sequence:
        fail(f"--seq_len {args.seq_len} does not divide by --sequence_parallel {sequence}")
    return args


# -----------------------------------------------------------------------------
# sequence parallelism: this rank computes the i-th of n equal parts of every sequence


def causal_attention(q, k, v):
    """Returns the attention of q, k and v, all [B, T, heads, head_dim], in the same shape."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class UlyssesAttention(nn.Module):
    """The Attention of train.py where each rank has a part of the sequences: it swaps that for the
    whole sequences of a part of the heads, and back."""

    def __init__(self, attention, group):
        super().__init__()
        self.head_dim = attention.head_dim
        self.qkv = attention.qkv
        self.proj = attention.proj
        ulysses = DistributedAttention(causal_attention, group, scatter_idx=2, gather_idx=1)
        self.attend = functools.partial(ulysses, batch_dim_idx=0)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(2, (3, -1, self.head_dim)).unbind(2)
        return self.proj(self.attend(q, k, v).flatten(2))


class PartOfDropout(nn.Dropout):
    """The Dropout of train.py, with this rank's part of the whole sequences' mask."""

    def __init__(self, p, i, n):
        super().__init__(p)
        self.i = i
        self.n = n

    def forward(self, x, key):
        if not self.training:
            return x
        B, T, C = x.shape
        generator = torch.Generator(x.device).manual_seed(derive_seed(*key))
        noise = torch.rand(B, self.n * T, C, device=x.device, generator=generator)
        return x * (noise.chunk(self.n, dim=1)[self.i] >= self.p) / (1 - self.p)


class PartOfGPT(GPT):
    """The GPT of train.py, for the i-th of n equal parts of every sequence. group: of the n
    ranks."""

    def share_sequences(self, i, n, group):
        self.i = i
        self.n = n
        for block in self.blocks:
            block.attn = UlyssesAttention(block.attn, group)
            block.drop = PartOfDropout(block.drop.p, i, n)

    def forward(self, inputs, targets, key=()):
        positions = torch.arange(inputs.size(1)).to(inputs).chunk(self.n)[self.i]
        x = self.wte(inputs[:, positions]) + self.wpe(positions)
        for i, block in enumerate(self.blocks):
            x = block(x, (*key, i))
        logits = self.lm_head(self.ln_f(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets[:, positions].flatten())


def build(args, *shape):
    """Returns the GPT, of parts of the sequences if ranks share sequences.

    Tensor-parallel ranks are neighbors; next come the ranks that share a sequence, then the
    data-parallel ones.
    """
    tensor = args.tensor_parallel
    sequence = args.sequence_parallel
    if tensor > 1:
        groups._init_tp_mesh_device(tensor)
    if sequence == 1:
        return GPT(*shape)
    model = PartOfGPT(*shape)
    for first_rank in range(0, dist.get_world_size(), tensor * sequence):
        for i in range(tensor):
            ranks = range(first_rank + i, first_rank + tensor * sequence, tensor)
            group = dist.new_group(ranks)
            if RANK in ranks:
                model.share_sequences(ranks.index(RANK), sequence, group)
    return model


def autotp(degree):
    """The entries of DeepSpeed's config for tensor parallelism."""
    layers = [
        {
            "patterns": [r".*qkv\.weight$"],
            "partition_type": "column",
            "shape": [3, -1],
            "partition_dim": 0,
        },
        {"patterns": [r".*up\.weight$"], "partition_type": "column"},
        {"patterns": [r".*(proj|down)\.weight$"], "partition_type": "row"},
    ]
    partition = {"use_default_specs": False, "layer_specs": layers}
    return {"tensor_parallel": {"autotp_size": degree, "partition_config": partition}}


def main():
    args = parse_arguments()
    tensor = args.tensor_parallel
    sequence = args.sequence_parallel
    ranks = prepare(args, tensor * sequence)
    # DeepSpeed knows nothing of sequence parallelism: it takes a rank's part of a sequence for a
    # sequence. All parts have the same size, so the mean of the gradients over all ranks is right,
    # at every ZeRO stage.
    changes = autotp(tensor) | {"mpu": groups} if tensor > 1 else {}
    engine, text, held_out, run = start(args, ranks, functools.partial(build, args), **changes)
    rows = rows_of(engine, args, text, held_out, sharers=sequence)
    resume_and_train(engine, args, run, rows)


if __name__ == "__main__":
    main()
