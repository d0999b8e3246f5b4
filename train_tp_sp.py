"""Trains like train.py, but several ranks compute one micro-batch together: tensor parallelism
(DeepSpeed's AutoTP) and sequence parallelism (Ulysses), at ZeRO 1, 2 and 3.

    deepspeed --num_gpus 4 train_tp_sp.py --tensor_parallel 2 --steps 200 --run_name tp2_dp2 \
        --checkpoint_dir ckpt_tp --checkpoint_interval 100
    deepspeed --num_gpus 2 train_tp_sp.py --sequence_parallel 2 --steps 200 --run_name sp2 --resume \
        --checkpoint_dir ckpt_tp --checkpoint_tag global_step100

A resume on another layout converts the checkpoint first. Checkpoints of train.py have the layout
with both degrees 1, so this script resumes them, too. Also takes --elastic, --keep and --timeout,
like train_elastic.py. """

import functools

import torch.distributed as dist
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.utils import groups

from data import fail, positive
from model import GPT, causal_attention
from train import start, train
from train_elastic import arguments, go_on, prepare


def parse_arguments():
    parser = arguments(__doc__)
    for what in ("tensor", "sequence"):
        parser.add_argument(
            f"--{what}_parallel", type=positive, default=1, metavar="N", help=f"ranks to a {what}"
        )
    args = parser.parse_args()
    tensor, sequence = args.tensor_parallel, args.sequence_parallel
    if args.n_head % (tensor * sequence):
        fail(
            f"--n_head {args.n_head} does not divide by --tensor_parallel {tensor} x --sequence_parallel {sequence}"
        )
    if args.seq_len % sequence:
        fail(f"--seq_len {args.seq_len} does not divide by --sequence_parallel {sequence}")
    return args


def build(args, *shape):
    """Returns the GPT, with Ulysses attention and its part of the sequences if ranks share
    sequences. Tensor-parallel ranks are neighbors; next come the ranks that share a sequence, then
    the data-parallel ones."""
    model, rank = GPT(*shape), dist.get_rank()
    tensor, sequence = args.tensor_parallel, args.sequence_parallel
    if tensor > 1:
        groups._init_tp_mesh_device(tensor)
    if sequence > 1:
        for first in range(0, dist.get_world_size(), tensor * sequence):
            for i in range(tensor):
                ranks = range(first + i, first + tensor * sequence, tensor)
                group = dist.new_group(ranks)
                if rank in ranks:
                    mine = group
        for (
            block
        ) in model.blocks:  # Ulysses: swap a part of the sequence for a part of the heads, and back
            ulysses = DistributedAttention(causal_attention, mine, scatter_idx=2, gather_idx=1)
            block.attn.attend = functools.partial(ulysses, batch_dim_idx=0)
        model.part = (rank // tensor % sequence, sequence)
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
    tensor, sequence = args.tensor_parallel, args.sequence_parallel
    prepare(args, tensor * sequence)
    # DeepSpeed knows nothing of sequence parallelism: it takes a rank's part of a sequence for a
    # sequence. All parts have the same size, so the mean of the gradients over all ranks is right,
    # at every ZeRO stage.
    changes = {"train_batch_size": args.train_batch_size * sequence}
    if tensor > 1:
        changes |= autotp(tensor) | {"mpu": groups}
    engine, texts, run = start(args, functools.partial(build, args), **changes)
    go_on(engine, args, run, functools.partial(train, engine, args, texts))


if __name__ == "__main__":
    main()
