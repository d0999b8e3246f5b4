r"""Train the same GPT as a pipeline with tensor parallelism inside, ZeRO-1; save; resume on any
other layout. Start it from the root of the repository:

    deepspeed --num_gpus 8 --module examples.train_3d --pipeline_parallel 2 --tensor_parallel 2 \
        --run_name tp2_pp2_dp2 --checkpoint_dir ckpt_3d --checkpoint_interval 100
    deepspeed --num_gpus 4 --module examples.train_3d --pipeline_parallel 2 --tensor_parallel 2 \
        --run_name tp2_pp2_dp1 --checkpoint_dir ckpt_3d --resume --checkpoint_tag global_step100

It resumes on any layout. A pipeline numbers its layers, so its
parameters have other names than train.py's, and neither script resumes the other's checkpoints.
Also takes --elastic, --keep and --timeout, like train_elastic.py.
"""

import functools
import time
import warnings

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

from examples.train_elastic import argument_parser, positive, prepare, resume_and_train, start
from train import GPT, RANK, fail, micro_batch
from universal import batches


def parse_arguments():
    parser = argument_parser(__doc__)
    parser.set_defaults(
        checkpoint_dir="ckpt_3d", run_name="default_3d", train_micro_batch_size_per_gpu=32
    )
    for kind, shared in (("tensor", "each layer"), ("pipeline", "the layers")):
        parser.add_argument(
            f"--{kind}_parallel",
            type=positive,
            default=1,
            metavar="N",
            help=f"ranks share {shared}",
        )
    args = parser.parse_args()
    if args.n_head % args.tensor_parallel:
        fail(f"--n_head {args.n_head} does not divide by --tensor_parallel {args.tensor_parallel}")
    if args.pipeline_parallel > args.n_layer:
        fail(
            f"--pipeline_parallel {args.pipeline_parallel} stages want at least as many layers, "
            f"not {args.n_layer}"
        )
    if args.zero_stage > 1:
        fail(f"DeepSpeed's pipelines go with --zero_stage 1, not {args.zero_stage}")
    return args


# -----------------------------------------------------------------------------
# tensor parallelism: a column-parallel layer, then a row-parallel one, then one sum over the ranks


class Sum(torch.autograd.Function):
    """All-reduce in the forward pass, nothing in the backward pass."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Spread(torch.autograd.Function):
    """Nothing in the forward pass, all-reduce in the backward pass."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return Sum.apply(gradient, ctx.group), None


def shard(parameter, rank, ranks, dim=0, parts=1):
    """This rank's share of each of the `parts` that lie next to each other along dim."""
    shares = [part.chunk(ranks, dim)[rank] for part in parameter.detach().chunk(parts, dim)]
    share = nn.Parameter(torch.cat(shares, dim))
    share.model_parallel = True  # otherwise the gradient norm counts it on the first rank only
    return share


class Column(nn.Module):
    """A linear layer [in -> out] of which this rank has some outputs, from each of its `parts`
    (such as q, k and v)."""

    def __init__(self, linear, group, parts=1):
        super().__init__()
        rank = dist.get_rank(group)
        ranks = dist.get_world_size(group)
        self.weight = shard(linear.weight, rank, ranks, parts=parts)
        self.bias = shard(linear.bias, rank, ranks, parts=parts)
        self.group = group

    def forward(self, x):
        return F.linear(Spread.apply(x, self.group), self.weight, self.bias)


class Row(nn.Module):
    """A linear layer [in -> out] of which this rank has some inputs."""

    def __init__(self, linear, group):
        super().__init__()
        self.weight = shard(linear.weight, dist.get_rank(group), dist.get_world_size(group), dim=1)
        self.bias = nn.Parameter(linear.bias.detach().clone())
        self.group = group

    def forward(self, x):
        return Sum.apply(F.linear(x, self.weight), self.group) + self.bias


# -----------------------------------------------------------------------------
# the pipeline: every layer takes and returns (x [B, T, C], the key of the micro-batch's dropout)


class Embedding(nn.Module):
    """The tied embedding: the first layer and, transposed, the last."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())

    def forward(self, inputs):
        tokens, key = inputs
        return F.embedding(tokens, self.weight), key


class Positions(Embedding):
    def forward(self, inputs):
        x, key = inputs
        return x + self.weight, key


class Layer(nn.Module):
    def __init__(self, block, number, group):
        super().__init__()
        block.attn.qkv = Column(block.attn.qkv, group, parts=3)
        block.attn.proj = Row(block.attn.proj, group)
        block.up = Column(block.up, group)
        block.down = Row(block.down, group)
        self.block = block
        self.number = number

    def forward(self, inputs):
        x, key = inputs
        return self.block(x, (*key.tolist(), self.number)), key


class Norm(nn.LayerNorm):
    def forward(self, inputs):
        return super().forward(inputs[0])


def build(args, loss_function, *shape):
    """Build the whole GPT on every rank, so that training starts the same on every layout, and keep
    this rank's part."""
    stages = args.pipeline_parallel
    tensor = args.tensor_parallel
    ranks = dist.get_world_size()
    data = ranks // (stages * tensor)
    topology = PipeModelDataParallelTopology(num_pp=stages, num_mp=tensor, num_dp=data)
    for members in topology.get_axis_comm_lists("model") or [[rank] for rank in range(ranks)]:
        # All ranks take part in the making of each group.
        candidate = dist.new_group(members)
        if RANK in members:
            group = candidate
    gpt = GPT(*shape)
    norm = Norm(args.n_embd)
    norm.load_state_dict(gpt.ln_f.state_dict())
    tied = functools.partial(
        TiedLayerSpec, "wte", Embedding, gpt.wte.weight, tied_weight_attr="weight"
    )
    layers = [
        tied(),
        Positions(gpt.wpe.weight),
        *(Layer(block, i, group) for i, block in enumerate(gpt.blocks)),
        norm,
        tied(forward_fn=lambda embedding, x: x @ embedding.weight.T),
    ]
    # Every stage gets a Layer, so it has both parameter groups: DeepSpeed's loader matches groups
    # by number.
    module = PipelineModule(
        layers, topology=topology, loss_fn=loss_function, partition_method="type:Layer"
    )
    module.universal_checkpoint_info = describe_cuts(args.n_embd, number_of_norm=len(layers) - 2)
    return module


def describe_cuts(width, number_of_norm):
    """Returns how to join the ranks' parts, by patterns of the parameters' names; DeepSpeed saves
    it."""
    qkv = (width, width, width)
    return {
        "universal_checkpoint_version": 0.2,
        "pipeline_replicated_parameter_patterns": [r"tied_modules\.wte\.weight"],
        "tp_replicated_parameter_patterns": [
            r"tied_modules\.wte\.weight",
            r"1\.weight",
            r".*ln_\d\.(weight|bias)",
            rf"{number_of_norm}\.(weight|bias)",
            r".*(proj|down)\.bias",
        ],
        "parameter_with_row_parallelism_patterns": [r".*(proj|down)\.weight"],
        "vocabulary_parameter_patterns": [],
        "parameter_to_average_patterns": [],
        "parameter_with_sub_params": [
            {"patterns": [r".*qkv\.weight"], "shape": (qkv, width), "partition_dim": 0},
            {"patterns": [r".*qkv\.bias"], "shape": (qkv,), "partition_dim": 0},
        ],
    }


# -----------------------------------------------------------------------------
# training


def train_pipeline(engine, args, text, held_out, losses, done):
    """Trains like train() in train.py, with a pipeline's train_batch(). losses: of the
    micro-batches; the loss function of the last stage adds them."""
    share = batches.share(engine)

    def micro_batches(text, step):
        for m, weight in share:
            inputs, targets = micro_batch(args, text, step, m)
            yield (inputs, torch.tensor([args.seed, step, m])), (targets, torch.tensor(weight))

    def mean():
        total = sum(losses, torch.zeros((), dtype=torch.float64, device=engine.device))
        losses.clear()
        dist.all_reduce(total)
        # Each of the tensor-parallel ranks has counted it.
        return total.item() / (share.accumulation * share.ranks * args.tensor_parallel)

    for step in range(done + 1, args.steps + 1):
        began = time.perf_counter()
        lr = engine.get_lr()[0]
        engine.train_batch(micro_batches(text, step))
        row = {
            "step": step,
            "loss": mean(),
            "lr": lr,
            "grad_norm": float(engine.get_global_grad_norm()),
            "loss_scale": getattr(engine.optimizer, "loss_scale", 1.0),  # BF16_Optimizer has none
            "seconds": time.perf_counter() - began,
            "batch": share.batch,
            "micro_batch": share.micro_batch,
            "accumulation": share.accumulation,
            "ranks": share.ranks,
        }
        row["tokens_per_second"] = args.train_batch_size * args.seq_len / row["seconds"]
        if step % args.eval_interval == 0 or step == args.steps:
            engine.eval_batch(micro_batches(held_out, 0), num_micro_batches=share.accumulation)
            row["val_loss"] = mean()
        yield row


def main():
    args = parse_arguments()
    losses = []

    def loss_function(logits, labels):
        targets, weight = labels
        loss = weight * F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        losses.append(loss.detach())
        return loss

    # DeepSpeed uses this broadcast once, to make the tied weights equal; no gradient has to flow
    # through it.
    warnings.filterwarnings("ignore", message="c10d::broadcast_")
    ranks = prepare(args, args.pipeline_parallel * args.tensor_parallel)
    engine, text, held_out, run = start(args, ranks, functools.partial(build, args, loss_function))
    rows = functools.partial(train_pipeline, engine, args, text, held_out, losses)
    resume_and_train(engine, args, run, rows)


if __name__ == "__main__":
    main()
