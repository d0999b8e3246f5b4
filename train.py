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

import parallel
import universal
from checkpoint import go_on, report
from data import Log, fail, global_batch, positive
from launch import add_arguments, base_config, check_arguments, count_ranks, set_up
from model import GPT, parameter_groups
from saving import in_memory, remove_old, save
from universal import elastic, exact


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    arg = parser.add_argument
    arg("--zero_stage", type=int, choices=[1, 2, 3], default=1)
    arg("--offload", action="store_true", help="keep the optimizer, at ZeRO-3 the parameters too, in CPU memory")
    arg("--sequence_parallel", type=positive, default=1, metavar="N", help="ranks that share each sequence")
    arg("--exact", action="store_true", help="every bit of the loss alike on any number of ranks; fp32")
    arg("--mirror", type=positive, metavar="K", help="with --elastic: hold every K-th step in memory, on two machines")
    args = parser.parse_args()
    count_ranks(args, tensor_parallel=args.tensor_parallel, sequence_parallel=args.sequence_parallel)
    check_arguments(args)
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
    return base_config(args) | config | parallel.config(args)


def build(args):
    """Returns (engine, which of the data-parallel ranks this is, number of parameters)."""
    model = GPT(args.n_layer, args.n_head, args.n_embd, args.seq_len, args.dropout)
    size = sum(p.numel() for p in model.parameters())
    data_rank, mpu = parallel.lay_out(args, model)  # without --tensor_parallel, --sequence_parallel: the rank, None
    groups = parameter_groups(model, weight_decay=0.1)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=deepspeed_config(args), mpu=mpu)
    engine.lr_scheduler.step()  # without it DeepSpeed's schedule gives the first step a learning rate of 0
    return engine, data_rank, size


def resume(engine, args, checkpoint, client_state):
    """Load the checkpoint, an ordinary one on the ranks that wrote it, a universal one on any. Returns its run."""
    if not args.resume:
        return {"step": 0}
    folder = Path(args.checkpoint_dir, args.checkpoint_tag)
    path, _ = engine.load_checkpoint(args.checkpoint_dir, tag=args.checkpoint_tag)
    assert path is not None, f"DeepSpeed did not load {args.checkpoint_tag}"  # it would start anew in silence
    if args.universal_checkpoint:
        universal.mend(engine, folder)  # DeepSpeed leaves some of it out
    report(engine, folder, checkpoint["run"], client_state)
    return checkpoint["run"]


def mean_loss(losses, args):
    """The mean over the micro-batches of all ranks; a rank has zeros where the others have losses, so no order matters.
    Zeroes the losses."""
    dist.all_reduce(losses)
    mean = losses.mean().item() / (args.ranks // args.data_parallel)  # so many ranks have the same loss
    losses.zero_()
    return mean


def main():
    args = parse_arguments()
    ranks, data_parallel = parallel.in_words(args)
    layout = f"{ranks} at ZeRO-{args.zero_stage}"
    train, validation, client_state, checkpoint = set_up(args, "train.py", layout)
    engine, data_rank, size = build(args)
    batch, micro = args.train_batch_size, args.train_micro_batch_size_per_gpu
    accumulation, device = engine.gradient_accumulation_steps(), engine.device
    if dist.get_rank() == 0:
        print(f"{size:,} parameters, {args.dtype}, {layout}, on {device}, data {client_state['data']}")
        print(f"{batch} = {micro} per rank x {accumulation} accumulation steps x {data_parallel}", flush=True)
    mirror = in_memory(engine, args)
    run = go_on(engine, args, client_state, mirror) if args.elastic else resume(engine, args, checkpoint, client_state)
    if args.exact:
        exact.install(engine)
    stop = elastic.listen(device)  # for SIGTERM; on all ranks stop() says the same
    cut = f"{micro} x {accumulation} x {args.data_parallel}"
    if dist.get_rank() == 0:
        log = Log(args.run_name, cut, run["step"], run.get("row"))

    # The global batch is cut into micro-batches, numbered alike on every layout. This rank's are `mine`.
    mine = range(data_rank * accumulation, (data_rank + 1) * accumulation)
    losses = torch.zeros(batch // micro, dtype=torch.float64, device=device)

    def micro_batch(sequences, m):
        return (rows[m * micro : (m + 1) * micro].to(device) for rows in sequences)

    step = done = run["step"]
    for step in range(done + 1, args.steps + 1):
        start = time.perf_counter()
        row = {"step": step, "lr": engine.get_lr()[0], "layout": cut}
        sequences = global_batch(train, args.seed, step, batch, args.seq_len)
        for m in mine:
            loss = engine(*micro_batch(sequences, m), key=(args.seed, step, m))  # whose dropout is not the rank's
            engine.backward(loss)  # divides by the accumulation steps
            engine.step()  # does nothing until the last of them
            losses[m] = loss.detach()
        row["loss"] = mean_loss(losses, args)
        row |= {"grad_norm": float(engine.get_global_grad_norm()), "loss_scale": engine.optimizer.loss_scale}
        row["seconds"] = time.perf_counter() - start
        row["tokens_per_second"] = batch * args.seq_len / row["seconds"]
        if step % args.eval_interval == 0 or step == args.steps:
            engine.eval()
            sequences = global_batch(validation, args.seed, 0, batch, args.seq_len)
            with torch.no_grad():
                for m in mine:
                    losses[m] = engine(*micro_batch(sequences, m))
            engine.train()
            row["val_loss"] = mean_loss(losses, args)
        if mirror:
            mirror({"run": client_state | {"step": step, "row": row}})  # the next start logs it, if this one cannot
        if dist.get_rank() == 0:
            log.write(**row)
            engine.monitor.write_events([(name, row[name], step) for name in ("loss", "val_loss") if name in row])
        if (told := stop()) or step % args.checkpoint_interval == 0:
            save(engine, args.checkpoint_dir, client_state | {"step": step})
            remove_old(args.checkpoint_dir, args.keep)
        if told:
            break
    if mirror and step == args.steps:
        mirror.close()
    elastic.leave(finished=step == args.steps)


if __name__ == "__main__":
    main()
