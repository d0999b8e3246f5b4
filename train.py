"""Train a small GPT with DeepSpeed ZeRO; save ZeRO checkpoints; resume from them, or from universal ones.

    deepspeed --num_gpus 4 train.py --train_batch_size 256 --train_micro_batch_size_per_gpu 64 --steps 200 \
        --checkpoint_dir ds_transformer_checkpoint --run_name default --checkpoint_interval 100

    deepspeed --num_gpus 2 train.py --resume --checkpoint_dir ds_transformer_checkpoint \
        --checkpoint_tag global_step100_universal --universal_checkpoint --run_name resume_uc \
        --train_batch_size 256 --train_micro_batch_size_per_gpu 64 --steps 200 --checkpoint_interval 400

The same commands run on GPUs and on CPUs. Data and dropout belong to (step, micro-batch), never to a rank: that is
why the loss does not notice how many ranks compute it.
"""

import argparse
import functools
import math
import time
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.utils import groups
from torch.utils.serialization import config as torch_files

from common import (
    RANK,
    SHAPE,
    TRACKED,
    WORLD_SIZE,
    add_arguments,
    check_arguments,
    open_checkpoint,
    save,
    set_up,
    stop_on_sigterm,
)
from model import GPT, Log, causal_attention, fail, global_batch, load_data, parameter_groups, positive

# -----------------------------------------------------------------------------
# arguments


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    arg = parser.add_argument
    arg("--zero_stage", type=int, choices=[1, 2, 3], default=1)
    arg("--offload", action="store_true", help="keep the optimizer, at ZeRO-3 the parameters too, in CPU memory")
    arg("--sequence_parallel", type=positive, default=1, metavar="N", help="ranks that share each sequence")
    arg("--exact", action="store_true", help="every bit of the loss alike on any number of ranks; fp32")
    return parser.parse_args()


def check(args):
    tensor, sequence = args.tensor_parallel, args.sequence_parallel
    check_arguments(args, tensor_parallel=tensor, sequence_parallel=sequence)
    if args.n_head % (tensor * sequence):
        fail(f"--n_head {args.n_head} does not divide by --tensor_parallel {tensor} x --sequence_parallel {sequence}")
    if args.seq_len % sequence:
        fail(f"--seq_len {args.seq_len} does not divide by --sequence_parallel {sequence}")
    if args.exact and tensor * sequence > 1:
        fail("--exact is for data parallelism: other kinds cut the sums inside the model, too")
    if args.exact and args.dtype != "fp32":
        fail(f"--exact needs --dtype fp32: sums in {args.dtype} have too few bits to be exact")
    if args.exact and args.offload:
        fail("--exact does not go with --offload: the optimizer of a CPU may round unlike that of a GPU")


# -----------------------------------------------------------------------------
# DeepSpeed


def parallel_ranks(args, model):
    """Tensor-parallel ranks are neighbours, then come those that share a sequence, then the data-parallel ones. Gives
    the model the attention of its kind, and returns (data-parallel rank, part of the sequence)."""
    tensor, sequence = args.tensor_parallel, args.sequence_parallel
    if tensor > 1:
        groups._init_tp_mesh_device(tensor)
    if sequence > 1:
        for first in range(0, WORLD_SIZE, tensor * sequence):
            for i in range(tensor):
                ranks = range(first + i, first + tensor * sequence, tensor)
                group = dist.new_group(ranks)
                if RANK in ranks:
                    mine = group
        for block in model.blocks:  # Ulysses: from a part of the sequence to a part of the heads, and back
            ulysses = DistributedAttention(causal_attention, mine, scatter_idx=2, gather_idx=1)
            block.attn.attend = functools.partial(ulysses, batch_dim_idx=0)
    return RANK // (tensor * sequence), (RANK // tensor % sequence, sequence)


def deepspeed_config(args):
    # ZeRO-3 multiplies in its own way, which rounds in its own way; unless it is told not to.
    zero = {"stage": args.zero_stage, "memory_efficient_linear": not args.exact}
    if args.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    if args.offload and args.zero_stage == 3:
        zero["offload_param"] = {"device": "cpu"}
    tensor_parallel = {
        "autotp_size": args.tensor_parallel,
        "partition_config": {
            "use_default_specs": False,
            "layer_specs": [
                {"patterns": [r".*qkv\.weight$"], "partition_type": "column", "shape": [3, -1], "partition_dim": 0},
                {"patterns": [r".*up\.weight$"], "partition_type": "column"},
                {"patterns": [r".*(proj|down)\.weight$"], "partition_type": "row"},
            ],
        },
    }
    return {
        # Two batch numbers; DeepSpeed derives the third, the accumulation steps, from them and the number of ranks.
        # Of sequence parallelism it knows nothing: it takes a rank's part of a sequence for a sequence. The loss being
        # the mean over parts of one size, the mean of the gradients over all ranks is right, at every ZeRO stage.
        "train_batch_size": args.train_batch_size * args.sequence_parallel,
        "train_micro_batch_size_per_gpu": args.train_micro_batch_size_per_gpu,
        "zero_optimization": zero,
        # torch's AdamW, offloaded too: the same arithmetic everywhere, and nothing to compile
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": args.lr, "betas": [0.9, 0.95]}},
        "zero_force_ds_cpu_optimizer": False,
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {
                "total_num_steps": args.steps,
                "warmup_num_steps": args.warmup_steps,
                "warmup_min_ratio": 1 / args.warmup_steps,
                "warmup_type": "linear",
                "cos_min_ratio": 0.1,
            },
        },
        "gradient_clipping": 1.0,
        "bf16": {"enabled": args.dtype == "bf16"},
        "fp16": {"enabled": args.dtype == "fp16"},
        "checkpoint": {"load_universal": args.universal_checkpoint},
        "tensorboard": {"enabled": args.tensorboard, "output_path": "runs", "job_name": args.run_name},
    } | ({"tensor_parallel": tensor_parallel} if args.tensor_parallel > 1 else {})


# -----------------------------------------------------------------------------
# --exact


def round_gradients(parameters, micro_batches, accumulation):
    """Round the gradients of the micro-batches so that the order in which they are added can not matter.

    Floating-point addition is exact as long as all terms and sums are multiples of one grid and have at most 24 bits.
    Of every element, the largest share |gradient / micro_batches| that any micro-batch has, on any rank, is known
    before the first addition: a hook keeps the gradients of this rank's micro-batches, and hands on zeros, until the
    last of them. The grid of the element is then the finest on which no sum of micro-batches can pass 24 bits; adding
    and subtracting 1.5 * 2^23 grids rounds to it. ZeRO divides by the number of ranks before it adds, so it is given
    multiples of that number. All this takes the memory of `accumulation` gradients.
    Returns {parameter's index: sum of this rank's shares}, filled by the last backward pass of a step.
    """
    totals = {}
    terms = 1 << (max(micro_batches, 4) - 1).bit_length()  # a power of two
    device = parameters[0].device
    multiples = torch.arange(0, 2**24, WORLD_SIZE, dtype=torch.float32, device=device)
    assert torch.equal(multiples / WORLD_SIZE, torch.arange(len(multiples), device=device)), "inexact division"

    def hook(i, kept):
        def rounded(gradient):
            kept.append(gradient / micro_batches)
            if len(kept) < accumulation:
                return torch.zeros_like(gradient)
            peak = torch.stack(kept).abs().amax(0).clamp(min=2.0**-100).nan_to_num(nan=math.inf)
            dist.all_reduce(peak, op=dist.ReduceOp.MAX)
            limit = peak / torch.frexp(peak).mantissa  # the next power of two, exactly
            assert (peak <= limit).all(), "--exact: a gradient is not finite, or its sum may pass 24 bits"
            shift = 1.5 * 2**23 * (terms * limit / 2**24)
            totals[i] = sum((share + shift) - shift for share in kept)
            kept.clear()
            return totals[i] * WORLD_SIZE

        return rounded

    for i, parameter in enumerate(parameters):
        parameter.register_hook(hook(i, []))
    return totals


def exact_norm(totals):
    """The norm of the whole gradient: every rank has all of it, and sums the squares in the same order."""
    gradient = torch.cat([totals[i].flatten() for i in range(len(totals))])
    dist.all_reduce(gradient)
    return gradient.double().norm().float()


# -----------------------------------------------------------------------------
# checkpoints


def resume(engine, args, checkpoint, client_state):
    """Load the checkpoint, mend what DeepSpeed 0.19.8 leaves out, and print what was restored from where."""
    # Else every rank reads every parameter whole, to take its own part of it. AutoTP also sends tensors as files in
    # memory, which cannot be mapped.
    torch_files.load.mmap = args.tensor_parallel == 1
    path, _ = engine.load_checkpoint(args.checkpoint_dir, tag=args.checkpoint_tag)
    assert path is not None, f"DeepSpeed did not load {args.checkpoint_tag}"
    folder, run = Path(args.checkpoint_dir, args.checkpoint_tag), checkpoint["run"]
    module, optimizer = engine.module, engine.optimizer.optimizer
    frozen = {name: p for name, p in module.named_parameters() if not p.requires_grad}
    buffers = [name for name, _ in module.named_buffers() if name in checkpoint["buffer_names"]]
    if args.universal_checkpoint:
        saved = torch.load(folder / "zero/optimizer_state.pt", mmap=True, weights_only=False)["param_groups"]
        # ZeRO-3 gives every parameter group the hyper-parameters of group 0: biases and norms would decay.
        for group, saved_group in zip(optimizer.param_groups, saved, strict=True):
            group.update({key: value for key, value in saved_group.items() if key != "params"})
        # ZeRO-3 lets all groups share one step count: Adam would advance it once per group.
        for state in optimizer.state.values():
            state["step"] = state["step"].clone()
        # Frozen parameters and buffers are in no optimizer, and the loader looks nowhere else.
        with deepspeed.zero.GatheredParameters(list(frozen.values()), modifier_rank=0, enabled=args.zero_stage == 3):
            module.load_state_dict({name: checkpoint["module"][name] for name in (*frozen, *buffers)}, strict=False)
    counts = {int(state["step"]) for state in optimizer.state.values()}
    assert counts == {run["step"] - engine.skipped_steps}, f"optimizer at {counts}, checkpoint at {run['step']}"
    if RANK == 0:
        decay = ", ".join(f"{group['weight_decay']:g}" for group in optimizer.param_groups)
        number, models = sum(map(len, checkpoint["param_shapes"])), Path(path).name
        schedule = f"step {engine.lr_scheduler.last_batch_iteration}, learning rate {engine.get_lr()[0]:.3e}"
        shards = "zero/<parameter>/*.pt" if args.universal_checkpoint else "*zero_pp_rank_*_optim_states.pt"
        print(f"resumed from {folder}: {run['layout']} then, {client_state['layout']} now")
        for what, value, file in (
            ("parameters", f"{number} with fp32 weight and both moments", shards),
            (
                "optimizer",
                f"step {counts.pop()}, weight decay {decay}, loss scale {engine.optimizer.loss_scale:g}",
                shards,
            ),
            ("schedule", schedule, models),
            ("model", f"{len(frozen)} frozen parameters, {len(buffers)} buffers", models),
            ("data, dropout", f"from step {run['step'] + 1} of seed {run['seed']}", models),
        ):
            print(f"  {what:<14} {value:<50} {file}", flush=True)
    return run["step"]


# -----------------------------------------------------------------------------
# training


def main():
    args = parse_arguments()
    check(args)
    try:
        train, validation, fingerprint = load_data(args.data, args.seq_len)
    except (OSError, ValueError) as error:
        fail(f"--data: {error}")
    degrees = f"{args.data_parallel} DP x {args.tensor_parallel} TP x {args.sequence_parallel} SP"
    ranks = "1 rank" if WORLD_SIZE == 1 else f"{WORLD_SIZE} ranks"
    layout = f"{ranks}{f' = {degrees}' if args.data_parallel < WORLD_SIZE else ''} at ZeRO-{args.zero_stage}"
    client_state = {name: getattr(args, name) for name in (*TRACKED, "exact")}
    client_state |= {"data": fingerprint, "script": "train.py", "layout": layout}
    checkpoint = open_checkpoint(args, client_state) if args.resume else None

    set_up(fingerprint)
    torch.manual_seed(args.seed)
    model = GPT(**{name: getattr(args, name) for name in SHAPE})
    size = sum(p.numel() for p in model.parameters())
    data_rank, part = parallel_ranks(args, model)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=parameter_groups(model, weight_decay=0.1),
        config=deepspeed_config(args),
        mpu=groups if args.tensor_parallel > 1 else None,
    )
    engine.lr_scheduler.step()  # without it DeepSpeed's schedule gives the first step a learning rate of 0

    batch, micro, device = args.train_batch_size, args.train_micro_batch_size_per_gpu, engine.device
    accumulation = engine.gradient_accumulation_steps()
    if RANK == 0:
        print(f"{size:,} parameters, {args.dtype}, {layout}, on {device}, data {fingerprint}")
        ranks = f"{args.data_parallel} GPUs"
        if args.data_parallel < WORLD_SIZE:
            ranks = f"{args.data_parallel} data-parallel ({WORLD_SIZE} ranks = {degrees})"
        print(f"{batch} = {micro} per GPU x {accumulation} accumulation steps x {ranks}", flush=True)
    done = resume(engine, args, checkpoint, client_state) if checkpoint else 0
    if args.exact:
        trained = [p for p in model.parameters() if p.requires_grad]
        totals = round_gradients(trained, batch // micro, accumulation)
        clip = engine.optimizer.unscale_and_clip_grads
        engine.optimizer.unscale_and_clip_grads = lambda gradients, _: clip(gradients, norm)
    log = Log(args.run_name, f"{micro} x {accumulation} x {args.data_parallel}", done) if RANK == 0 else None

    # The global batch is cut into micro-batches, numbered alike on every layout. This rank's are `mine`.
    mine = range(data_rank * accumulation, (data_rank + 1) * accumulation)
    losses = torch.zeros(batch // micro, dtype=torch.float64, device=device)
    stopping = stop_on_sigterm()
    positions = slice(part[0] * args.seq_len // part[1], (part[0] + 1) * args.seq_len // part[1])

    def micro_batch(sequences, m):
        return (rows[m * micro : (m + 1) * micro, positions].to(device) for rows in sequences)

    def mean_loss():
        dist.all_reduce(losses)  # data-parallel ranks have zeros where the others have losses: no order matters
        mean = losses.mean().item() / (args.tensor_parallel * args.sequence_parallel)
        losses.zero_()
        return mean

    for step in range(done + 1, args.steps + 1):
        start, lr = time.perf_counter(), engine.get_lr()[0]
        sequences = global_batch(train, args.seed, step, batch, args.seq_len)
        for m in mine:
            # Dropout belongs to the micro-batch, not to the rank.
            loss = engine(*micro_batch(sequences, m), key=(args.seed, step, m), part=part)
            # Divides by the accumulation steps, which --exact has done.
            engine.backward(loss, scale_wrt_gas=not args.exact)
            if args.exact and m == mine[-1]:
                norm = exact_norm(totals)
            engine.step()  # does nothing until the last of them
            losses[m] = loss.detach()
        norm = norm if args.exact else engine.get_global_grad_norm()
        row = {"step": step, "loss": mean_loss(), "lr": lr, "grad_norm": float(norm)}
        row |= {"loss_scale": engine.optimizer.loss_scale, "seconds": time.perf_counter() - start}
        row["tokens_per_second"] = batch * args.seq_len / row["seconds"]
        if step % args.eval_interval == 0 or step == args.steps:
            engine.eval()
            sequences = global_batch(validation, args.seed, 0, batch, args.seq_len)
            with torch.no_grad():
                for m in mine:
                    losses[m] = engine(*micro_batch(sequences, m), part=part)
            engine.train()
            row["val_loss"] = mean_loss()
        if log:
            log.write(**row)
            engine.monitor.write_events([(name, row[name], step) for name in ("loss", "val_loss") if name in row])
        stop = stopping(device)
        if step % args.checkpoint_interval == 0 or stop:
            save(engine, args.checkpoint_dir, client_state | {"step": step})
        if stop:
            break
    dist.barrier()  # a rank that leaves early can take the others down
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
