"""Tensor parallelism (DeepSpeed's AutoTP) and sequence parallelism (Ulysses) for train.py."""

import functools

import torch.distributed as dist
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.utils import groups

from data import fail
from model import causal_attention


def check(args):
    tensor, sequence = args.tensor_parallel, args.sequence_parallel
    if args.n_head % (tensor * sequence):
        fail(f"--n_head {args.n_head} does not divide by --tensor_parallel {tensor} x --sequence_parallel {sequence}")
    if args.seq_len % sequence:
        fail(f"--seq_len {args.seq_len} does not divide by --sequence_parallel {sequence}")


def in_words(args):
    """All ranks, and the data-parallel ones of them."""
    ranks = f"{args.ranks} ranks"
    if args.ranks == 1:
        ranks = "1 rank"
    data_parallel = f"{args.data_parallel} ranks"
    if args.data_parallel < args.ranks:
        ranks += f" = {args.data_parallel} DP"
        ranks += f" x {args.tensor_parallel} TP"
        ranks += f" x {args.sequence_parallel} SP"
        data_parallel = f"{args.data_parallel} data-parallel ({ranks})"
    return ranks, data_parallel


def lay_out(args, model):
    """Tensor-parallel ranks are neighbours, then come those that share a sequence, then the data-parallel ones. Gives
    the model the attention of its kind and its part of the sequences. Returns (data-parallel rank, mpu for DeepSpeed).
    """
    tensor, sequence, rank = args.tensor_parallel, args.sequence_parallel, dist.get_rank()
    if tensor > 1:
        groups._init_tp_mesh_device(tensor)
    if sequence > 1:
        for first in range(0, dist.get_world_size(), tensor * sequence):
            for i in range(tensor):
                ranks = range(first + i, first + tensor * sequence, tensor)
                group = dist.new_group(ranks)
                if rank in ranks:
                    mine = group
        for block in model.blocks:  # Ulysses: from a part of the sequence to a part of the heads, and back
            ulysses = DistributedAttention(causal_attention, mine, scatter_idx=2, gather_idx=1)
            block.attn.attend = functools.partial(ulysses, batch_dim_idx=0)
        model.part = (rank // tensor % sequence, sequence)
    return rank // (tensor * sequence), groups if tensor > 1 else None


def config(args):
    """What DeepSpeed's config must have besides, or instead."""
    # Of sequence parallelism DeepSpeed knows nothing: it takes a rank's part of a sequence for a sequence. The loss
    # being the mean over parts of one size, the mean of the gradients over all ranks is right, at every ZeRO stage.
    changes = {"train_batch_size": args.train_batch_size * args.sequence_parallel}
    if args.tensor_parallel > 1:
        layers = [
            {"patterns": [r".*qkv\.weight$"], "partition_type": "column", "shape": [3, -1], "partition_dim": 0},
            {"patterns": [r".*up\.weight$"], "partition_type": "column"},
            {"patterns": [r".*(proj|down)\.weight$"], "partition_type": "row"},
        ]
        partition = {"use_default_specs": False, "layer_specs": layers}
        changes["tensor_parallel"] = {"autotp_size": args.tensor_parallel, "partition_config": partition}
    return changes
