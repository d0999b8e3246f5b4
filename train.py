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
import time
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

import elastic
import exact
import parallel
import universal
from checkpoint import go_on, report
from common import SHAPE, add_arguments, check_arguments, common_config, end_of_step, mean_loss, set_up
from data import fail, global_batch, positive
from model import GPT, parameter_groups


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    arg = parser.add_argument
    arg("--zero_stage", type=int, choices=[1, 2, 3], default=1)
    arg("--offload", action="store_true", help="keep the optimizer, at ZeRO-3 the parameters too, in CPU memory")
    arg("--sequence_parallel", type=positive, default=1, metavar="N", help="ranks that share each sequence")
    arg("--exact", action="store_true", help="every bit of the loss alike on any number of ranks; fp32")
    args = parser.parse_args()
    check_arguments(args, tensor_parallel=args.tensor_parallel, sequence_parallel=args.sequence_parallel)
    parallel.check(args)
    if args.exact and args.data_parallel < args.ranks:
        fail("--exact is for data parallelism: other kinds cut the sums inside the model, too")
    if args.exact and args.dtype != "fp32":
        fail(f"--exact needs --dtype fp32: sums in {args.dtype} have too few bits to be exact")
    if args.exact and args.offload:
        fail("--exact does not go with --offload: the optimizer of a CPU may round unlike that of a GPU")
    return args


def deepspeed_config(args):
    # ZeRO-3 multiplies in its own way, which rounds in its own way; unless it is told not to.
    zero = {"stage": args.zero_stage, "memory_efficient_linear": not args.exact}
    if args.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    if args.offload and args.zero_stage == 3:
        zero["offload_param"] = {"device": "cpu"}
    config = {
        # Two batch numbers; DeepSpeed derives the third, the accumulation steps, from them and the number of ranks.
        "train_batch_size": args.train_batch_size,
        "train_micro_batch_size_per_gpu": args.train_micro_batch_size_per_gpu,
        "zero_optimization": zero,
        "checkpoint": {"load_universal": args.universal_checkpoint},
    }
    return common_config(args) | config | parallel.config(args)


def resume(engine, args, checkpoint, client_state):
    """Load the checkpoint, an ordinary one on the ranks that wrote it, a universal one on any. Returns its step."""
    folder = Path(args.checkpoint_dir, args.checkpoint_tag)
    path, _ = engine.load_checkpoint(args.checkpoint_dir, tag=args.checkpoint_tag)
    assert path is not None, f"DeepSpeed did not load {args.checkpoint_tag}"  # it would start anew in silence
    if args.universal_checkpoint:
        universal.mend(engine, folder)  # DeepSpeed leaves some of it out
    report(engine, folder, checkpoint["run"], client_state)
    return checkpoint["run"]["step"]


def main():
    args = parse_arguments()
    degrees = f"{args.data_parallel} DP x {args.tensor_parallel} TP x {args.sequence_parallel} SP"
    layout = f"{args.ranks} rank{'s' * (args.ranks > 1)}"
    layout += f" = {degrees}" * (args.data_parallel < args.ranks) + f" at ZeRO-{args.zero_stage}"
    train, validation, client_state, checkpoint = set_up(args, "train.py", layout)

    model = GPT(**{name: getattr(args, name) for name in SHAPE})
    size = sum(p.numel() for p in model.parameters())
    data_rank, mpu = parallel.lay_out(args, model)  # without --tensor_parallel, --sequence_parallel: the rank, None
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=parameter_groups(model, weight_decay=0.1),
        config=deepspeed_config(args),
        mpu=mpu,
    )
    engine.lr_scheduler.step()  # without it DeepSpeed's schedule gives the first step a learning rate of 0

    batch, micro, device = args.train_batch_size, args.train_micro_batch_size_per_gpu, engine.device
    accumulation = engine.gradient_accumulation_steps()
    if dist.get_rank() == 0:
        print(f"{size:,} parameters, {args.dtype}, {layout}, on {device}, data {client_state['data']}")
        ranks = f"{args.data_parallel} GPUs"
        if args.data_parallel < args.ranks:
            ranks = f"{args.data_parallel} data-parallel ({args.ranks} ranks = {degrees})"
        print(f"{batch} = {micro} per GPU x {accumulation} accumulation steps x {ranks}", flush=True)
    done = 0
    if args.resume:
        done = resume(engine, args, checkpoint, client_state)
    elif args.elastic:
        done = go_on(engine, args, client_state)
    if args.exact:
        exact.install(engine)
    finish = end_of_step(engine, args, client_state, done)

    # The global batch is cut into micro-batches, numbered alike on every layout. This rank's are `mine`.
    mine = range(data_rank * accumulation, (data_rank + 1) * accumulation)
    losses = torch.zeros(batch // micro, dtype=torch.float64, device=device)
    copies = args.ranks // args.data_parallel

    def micro_batch(sequences, m):
        return (rows[m * micro : (m + 1) * micro].to(device) for rows in sequences)

    step = done
    for step in range(done + 1, args.steps + 1):
        start, lr = time.perf_counter(), engine.get_lr()[0]
        sequences = global_batch(train, args.seed, step, batch, args.seq_len)
        for m in mine:
            # Dropout belongs to the micro-batch, not to the rank.
            loss = engine(*micro_batch(sequences, m), key=(args.seed, step, m))
            engine.backward(loss)  # divides by the accumulation steps
            engine.step()  # does nothing until the last of them
            losses[m] = loss.detach()
        row = {"step": step, "loss": mean_loss(losses, copies), "lr": lr}
        row |= {"grad_norm": float(engine.get_global_grad_norm()), "seconds": time.perf_counter() - start}
        if step % args.eval_interval == 0 or step == args.steps:
            engine.eval()
            sequences = global_batch(validation, args.seed, 0, batch, args.seq_len)
            with torch.no_grad():
                for m in mine:
                    losses[m] = engine(*micro_batch(sequences, m))
            engine.train()
            row["val_loss"] = mean_loss(losses, copies)
        if finish(**row):
            break
    elastic.leave(finished=step == args.steps)


if __name__ == "__main__":
    main()
