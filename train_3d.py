"""Train the same GPT as a pipeline with tensor parallelism inside, ZeRO-1; save; resume on any other layout.

    deepspeed --num_gpus 8 train_3d.py --pipeline_parallel 2 --tensor_parallel 2 --steps 200 --run_name tp2_pp2_dp2 \
        --train_batch_size 256 --train_micro_batch_size_per_gpu 32 --checkpoint_dir ckpt_3d --checkpoint_interval 100
    python ds_to_universal.py --input_folder ckpt_3d/global_step100 --output_folder ckpt_3d/global_step100_universal
    deepspeed --num_gpus 4 train_3d.py --pipeline_parallel 2 --tensor_parallel 2 --steps 200 --run_name tp2_pp2_dp1 \
        --train_batch_size 256 --train_micro_batch_size_per_gpu 32 --checkpoint_dir ckpt_3d \
        --resume --universal_checkpoint

A pipeline numbers its layers, so its parameters have other names than train.py's: the checkpoints of the two do not
resume each other.
"""

import argparse
import functools
import time
import warnings
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

import universal
from checkpoint import go_on, report
from data import Log, fail, global_batch, positive
from launch import add_arguments, base_config, check_arguments, count_ranks, set_up
from model import GPT, parameter_groups
from saving import remove_old, save
from universal import elastic


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.set_defaults(checkpoint_dir="ckpt_3d", run_name="default_3d", train_micro_batch_size_per_gpu=32)
    arg = parser.add_argument
    arg("--pipeline_parallel", type=positive, default=1, metavar="N", help="stages that share the layers")
    args = parser.parse_args()
    count_ranks(args, pipeline_parallel=args.pipeline_parallel, tensor_parallel=args.tensor_parallel)
    check_arguments(args)
    if args.n_head % args.tensor_parallel:
        fail(f"--n_head {args.n_head} does not divide by --tensor_parallel {args.tensor_parallel}")
    if args.pipeline_parallel > args.n_layer:
        fail(f"--pipeline_parallel {args.pipeline_parallel} stages want at least as many layers, not {args.n_layer}")
    return args


# -----------------------------------------------------------------------------
# tensor parallelism: a column-parallel layer, then a row-parallel one, and one sum over the ranks


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
    """This rank's share of each of the `parts` that lie side by side along dim."""
    mine = [part.chunk(ranks, dim)[rank] for part in parameter.detach().chunk(parts, dim)]
    mine = nn.Parameter(torch.cat(mine, dim))
    mine.model_parallel = True  # else the gradient norm counts it on the first rank only
    return mine


class Column(nn.Module):
    """This rank's outputs of a linear layer [in -> out]; of each of its `parts`, as of q, k and v."""

    def __init__(self, linear, group, parts=1):
        super().__init__()
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self.weight, self.bias = (shard(p, rank, ranks, parts=parts) for p in (linear.weight, linear.bias))
        self.group = group

    def forward(self, x):
        return F.linear(Spread.apply(x, self.group), self.weight, self.bias)


class Row(nn.Module):
    """A linear layer [in -> out] of which this rank has some inputs."""

    def __init__(self, linear, group):
        super().__init__()
        self.weight = shard(linear.weight, dist.get_rank(group), dist.get_world_size(group), dim=1)
        self.bias, self.group = nn.Parameter(linear.bias.detach().clone()), group

    def forward(self, x):
        return Sum.apply(F.linear(x, self.weight), self.group) + self.bias


# -----------------------------------------------------------------------------
# the pipeline: every layer takes and gives (x [B, T, C], key of the micro-batch's dropout)


class Embedding(nn.Module):
    """The tied one: first layer, and, turned round, the last."""

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
        block.attn.qkv, block.attn.proj = Column(block.attn.qkv, group, parts=3), Row(block.attn.proj, group)
        block.up, block.down = Column(block.up, group), Row(block.down, group)
        self.block, self.number = block, number

    def forward(self, inputs):
        x, key = inputs
        return self.block(x, (*key.tolist(), self.number) if self.training else None), key


class Norm(nn.LayerNorm):
    def forward(self, inputs):
        return super().forward(inputs[0])


def build(args, loss_function):
    """Every rank builds the whole GPT, so that it starts alike on every layout, and keeps its part."""
    topology = PipeModelDataParallelTopology(
        num_pp=args.pipeline_parallel, num_mp=args.tensor_parallel, num_dp=args.data_parallel
    )
    for ranks in topology.get_axis_comm_lists("model") or [[rank] for rank in range(args.ranks)]:
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = group
    gpt = GPT(args.n_layer, args.n_head, args.n_embd, args.seq_len, args.dropout)
    norm = Norm(args.n_embd)
    norm.load_state_dict(gpt.ln_f.state_dict())
    tied = functools.partial(TiedLayerSpec, "wte", Embedding, gpt.wte.weight, tied_weight_attr="weight")
    layers = [tied(), Positions(gpt.wpe.weight), *(Layer(block, i, mine) for i, block in enumerate(gpt.blocks)), norm]
    layers.append(tied(forward_fn=lambda embedding, x: x @ embedding.weight.T))
    # A Layer for every stage, hence both parameter groups: DeepSpeed's loader takes groups by their number.
    module = PipelineModule(layers, topology=topology, loss_fn=loss_function, partition_method="type:Layer")
    D = args.n_embd
    module.universal_checkpoint_info = {  # how the ranks' parts make up the whole; DeepSpeed saves it with them
        "universal_checkpoint_version": 0.2,
        "pipeline_replicated_parameter_patterns": [r"tied_modules\.wte\.weight"],
        "tp_replicated_parameter_patterns": [
            r"tied_modules\.wte\.weight",
            r"1\.weight",
            r".*ln_\d\.(weight|bias)",
            rf"{len(layers) - 2}\.(weight|bias)",
            r".*(proj|down)\.bias",
        ],
        "parameter_with_row_parallelism_patterns": [r".*(proj|down)\.weight"],
        "vocabulary_parameter_patterns": [],
        "parameter_to_average_patterns": [],
        "parameter_with_sub_params": [
            {"patterns": [r".*qkv\.weight"], "shape": ((D, D, D), D), "partition_dim": 0},
            {"patterns": [r".*qkv\.bias"], "shape": ((D, D, D),), "partition_dim": 0},
        ],
    }
    return module


def deepspeed_config(args):
    return base_config(args) | {
        "zero_optimization": {"stage": 1},
        "train_batch_size": args.train_batch_size,
        "train_micro_batch_size_per_gpu": args.train_micro_batch_size_per_gpu,
        "checkpoint": {"load_universal": args.universal_checkpoint},
    }


# -----------------------------------------------------------------------------
# training


def start_engine(args):
    """Returns (engine, a list that gets the loss of each micro-batch in turn on the last stage)."""
    seen = []

    def loss_function(logits, targets):
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        seen.append(loss.detach())
        return loss

    # DeepSpeed makes the tied weights equal by it, once; no gradient is to go through that.
    warnings.filterwarnings("ignore", message="c10d::broadcast_")
    module = build(args, loss_function)
    groups = parameter_groups(module, weight_decay=0.1)
    engine, *_ = deepspeed.initialize(model=module, model_parameters=groups, config=deepspeed_config(args))
    engine.lr_scheduler.step()  # without it DeepSpeed's schedule gives the first step a learning rate of 0
    return engine, seen


def resume(engine, args, checkpoint, client_state):
    """As train.py does. Returns the checkpoint's step."""
    if args.elastic:
        return go_on(engine, args, client_state)["step"]
    if not args.resume:
        return 0
    folder = Path(args.checkpoint_dir, args.checkpoint_tag)
    path, _ = engine.load_checkpoint(args.checkpoint_dir, tag=args.checkpoint_tag)
    assert path is not None, f"DeepSpeed did not load {folder}"
    if args.universal_checkpoint:
        universal.mend(engine, folder)
    report(engine, folder, checkpoint["run"], client_state)
    return checkpoint["run"]["step"]


def main():
    args = parse_arguments()
    degrees = f"{args.ranks} ranks = {args.data_parallel} DP x {args.tensor_parallel} TP x {args.pipeline_parallel} PP"
    train, validation, client_state, checkpoint = set_up(args, "train_3d.py", degrees)
    engine, seen = start_engine(args)
    batch, micro = args.train_batch_size, args.train_micro_batch_size_per_gpu
    accumulation = engine.gradient_accumulation_steps()
    if dist.get_rank() == 0:
        arithmetic = f"{batch} = {micro} per rank x {accumulation} accumulation steps"
        print(f"{arithmetic} x {args.data_parallel} data-parallel ({degrees})", flush=True)
    done = resume(engine, args, checkpoint, client_state)
    stop = elastic.listen(engine.device)
    if dist.get_rank() == 0:
        log = Log(args.run_name, f"{micro} x {accumulation} x {args.data_parallel}", done)
    data_rank = engine.grid.get_data_parallel_rank()
    mine = range(data_rank * accumulation, (data_rank + 1) * accumulation)
    losses = torch.zeros(batch // micro, dtype=torch.float64, device=engine.device)

    def micro_batches(sequences, step):
        inputs, targets = sequences
        for m in mine:
            rows = slice(m * micro, (m + 1) * micro)
            yield (inputs[rows], torch.tensor([args.seed, step, m])), targets[rows]

    def mean_of_seen():
        losses.zero_()
        if engine.is_last_stage():
            losses[mine.start : mine.stop] = torch.stack(seen)
        seen.clear()
        dist.all_reduce(losses)
        return losses.mean().item() / args.tensor_parallel  # each loss was there so many times

    step = done
    for step in range(done + 1, args.steps + 1):
        start = time.perf_counter()
        row = {"step": step, "lr": engine.get_lr()[0]}
        sequences = global_batch(train, args.seed, step, batch, args.seq_len)
        engine.train_batch(micro_batches(sequences, step))
        row["loss"] = mean_of_seen()
        row["grad_norm"] = float(engine.get_global_grad_norm())
        row["seconds"] = time.perf_counter() - start
        if step % args.eval_interval == 0 or step == args.steps:
            sequences = global_batch(validation, args.seed, 0, batch, args.seq_len)
            engine.eval_batch(micro_batches(sequences, 0), num_micro_batches=accumulation)
            row["val_loss"] = mean_of_seen()
        if dist.get_rank() == 0:
            speed = batch * args.seq_len / row["seconds"]
            log.write(**row, loss_scale=engine.optimizer.loss_scale, tokens_per_second=speed)
            engine.monitor.write_events([(name, row[name], step) for name in ("loss", "val_loss") if name in row])
        told = stop()
        if told or step % args.checkpoint_interval == 0:
            save(engine, args.checkpoint_dir, client_state | {"step": step})
            remove_old(args.checkpoint_dir, args.keep)
        if told:
            break
    elastic.leave(finished=step == args.steps)


if __name__ == "__main__":
    main()
