"""Train a small GPT with DeepSpeed ZeRO, save ZeRO checkpoints, resume from them or from universal ones.

    deepspeed --num_gpus 4 train.py --train_batch_size 256 --train_micro_batch_size_per_gpu 64 --steps 200 \
        --checkpoint_dir ds_transformer_checkpoint --run_name default --checkpoint_interval 100

    deepspeed --num_gpus 2 train.py --resume --checkpoint_dir ds_transformer_checkpoint \
        --checkpoint_tag global_step100_universal --universal_checkpoint --run_name resume_uc \
        --train_batch_size 256 --train_micro_batch_size_per_gpu 64 --steps 200 --checkpoint_interval 400

The same commands run on GPUs and on CPUs. Data and dropout belong to (step, micro-batch), never to a rank: that is
why the loss does not notice on how many ranks it is computed.
"""

import argparse
import logging
import os
import shutil
import sys
import time
import warnings
import zipfile
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from model import GPT, Log, derive_seed, global_batch, load_data, parameter_groups

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def fail(message):
    """A user's mistake: one line from one rank, exit code 2."""
    if RANK != 0:
        time.sleep(15)  # the first rank to exit makes the launcher end the others, so rank 0 must be first
        os._exit(2)
    print(f"train.py: error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


# -----------------------------------------------------------------------------
# arguments


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = fail
    arg = parser.add_argument
    arg("--train_batch_size", type=int, default=256, help="sequences of one optimizer step, over all ranks")
    arg("--train_micro_batch_size_per_gpu", type=int, default=64, help="sequences of one forward pass on one rank")
    arg("--steps", type=int, default=200, help="optimizer steps of the whole run, a resumed part included")
    arg("--run_name", default="default", help="the log is logs/<run_name>.csv")
    arg("--zero_stage", type=int, choices=[1, 2, 3], default=1)
    arg("--dtype", choices=["fp32", "bf16", "fp16"], default="fp32", help="fp16 needs a GPU")
    arg("--offload", action="store_true", help="optimizer (at ZeRO-3 parameters too) in CPU memory")
    # checkpoints
    arg("--checkpoint_dir", default="ds_transformer_checkpoint")
    arg("--checkpoint_interval", type=int, default=100, help="steps from one checkpoint to the next")
    arg("--resume", action="store_true", help="go on from --checkpoint_dir/--checkpoint_tag")
    arg("--checkpoint_tag", help="default: what the file `latest` or `latest_universal` names")
    arg("--universal_checkpoint", action="store_true", help="the tag is a universal checkpoint")
    # optimizer
    arg("--lr", type=float, default=5e-3)
    arg("--warmup_steps", type=int, default=20)
    # model and data
    arg("--n_layer", type=int, default=2)
    arg("--n_head", type=int, default=4)
    arg("--n_embd", type=int, default=64)
    arg("--seq_len", type=int, default=32)
    arg("--dropout", type=float, default=0.1)
    arg("--data", metavar="FILE", help="any text; default: the source of Python's standard library")
    arg("--seed", type=int, default=1337)
    arg("--eval_interval", type=int, default=10, help="steps from one validation loss to the next")
    arg("--tensorboard", action="store_true", help="write the log to runs/ too (needs the tensorboard package)")
    arg("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher passes it
    return parser.parse_args()


def check_arguments(args):
    if "RANK" not in os.environ:
        fail("no launcher: start it as `deepspeed --num_gpus 4 train.py ...` or `torchrun --nproc-per-node 4 train.py ...`")
    batch, micro = args.train_batch_size, args.train_micro_batch_size_per_gpu
    for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "steps", "checkpoint_interval", "eval_interval"):
        if getattr(args, name) < 1:
            fail(f"--{name} must be at least 1, not {getattr(args, name)}")
    if batch % (micro * WORLD_SIZE):
        unit = micro * WORLD_SIZE
        sizes = ", ".join(str(unit * k) for k in sorted({max(1, batch // unit), batch // unit + 1}))
        micros = [m for m in range(1, batch + 1) if batch % (m * WORLD_SIZE) == 0]
        ranks = [r for r in range(1, batch + 1) if batch % (micro * r) == 0]
        fail(
            f"a batch of {batch} does not divide into micro-batches of {micro} on {WORLD_SIZE} ranks; what would: "
            f"--train_batch_size {sizes}; --train_micro_batch_size_per_gpu {micros or 'none'}; ranks {ranks or 'none'}"
        )
    if args.n_embd % args.n_head:
        fail(f"--n_embd {args.n_embd} does not divide into --n_head {args.n_head} heads")
    if args.dtype == "fp16" and not get_accelerator().is_fp16_supported():
        fail(f"--dtype fp16 does not run on {get_accelerator().device_name()}: use a GPU, or --dtype bf16 or fp32")
    if args.dtype == "bf16" and not get_accelerator().is_bf16_supported():
        fail(f"--dtype bf16 does not run on {get_accelerator().device_name()}: use --dtype fp32 or fp16")


# -----------------------------------------------------------------------------
# DeepSpeed


def deepspeed_config(args):
    zero = {"stage": args.zero_stage}
    if args.offload:
        # torch's AdamW also works on offloaded states, and needs no compiler
        zero |= {"offload_optimizer": {"device": "cpu"}}
        if args.zero_stage == 3:
            zero |= {"offload_param": {"device": "cpu"}}
    return {
        "train_batch_size": args.train_batch_size,
        "train_micro_batch_size_per_gpu": args.train_micro_batch_size_per_gpu,
        # the accumulation steps follow: train_batch_size / (micro batch x ranks)
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": args.dtype == "bf16"},
        "fp16": {"enabled": args.dtype == "fp16"},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": args.lr, "betas": [0.9, 0.95]}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {
                "total_num_steps": args.steps,
                "warmup_num_steps": args.warmup_steps,
                "warmup_min_ratio": 1 / args.warmup_steps,
                "cos_min_ratio": 0.1,
                "warmup_type": "linear",
            },
        },
        "checkpoint": {"load_universal": args.universal_checkpoint},
        "tensorboard": {"enabled": args.tensorboard, "output_path": "runs", "job_name": args.run_name},
    }


def set_up():
    """Process-wide settings, before the first collective."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    if get_accelerator().device_name() == "cpu":
        # The number of threads changes the order of additions: one per rank, so that runs can be compared.
        torch.set_num_threads(1)
        # Plain gloo: DeepSpeed's shared-memory all-reduce compiles for a minute and leaves 66 MB per rank in /dev/shm.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()


# -----------------------------------------------------------------------------
# checkpoints


def save(engine, args, state):
    """Write every rank's shard, then give the folder its name: a checkpoint that has its name is complete."""
    folder, tag = Path(args.checkpoint_dir), f"global_step{state['step']}"
    unfinished, old = folder / f"{tag}.unfinished", folder / f"{tag}.old"
    engine.save_checkpoint(folder, tag=unfinished.name, client_state={"run": state}, save_latest=False)
    if RANK == 0:
        if (folder / tag).exists():
            (folder / tag).rename(old)
        unfinished.rename(folder / tag)
        shutil.rmtree(old, ignore_errors=True)
        (folder / "latest.tmp").write_text(tag)
        (folder / "latest.tmp").rename(folder / "latest")
    dist.barrier()


def read_client_state(args):
    """The client state of the checkpoint to resume from, after every check that needs no engine."""
    folder = Path(args.checkpoint_dir)
    latest = folder / ("latest_universal" if args.universal_checkpoint else "latest")
    if args.checkpoint_tag is None:
        if not latest.is_file():
            fail(f"{latest} does not exist: give --checkpoint_tag")
        args.checkpoint_tag = latest.read_text().strip()
    folder = folder / args.checkpoint_tag
    if not folder.is_dir():
        tags = sorted(p.parent.name for p in folder.parent.glob("*/*model_states.pt"))
        fail(f"{folder} does not exist; tags there: {', '.join(dict.fromkeys(tags)) or 'none'}")
    if (folder / "zero").is_dir() != args.universal_checkpoint:
        fail(
            f"{folder} is an ordinary ZeRO checkpoint: leave out --universal_checkpoint, or convert it first"
            if args.universal_checkpoint
            else f"{folder} is a universal checkpoint: add --universal_checkpoint"
        )
    model_states = sorted(folder.glob("*mp_rank_00_model_states.pt"))
    if not model_states:
        fail(f"{folder} holds no *mp_rank_00_model_states.pt: it is not a complete checkpoint")
    for file in folder.rglob("*.pt"):
        if not zipfile.is_zipfile(file):  # the directory of the container is its end, so this sees any truncation
            fail(f"{file} is truncated or not a checkpoint file")
    checkpoint = torch.load(model_states[0], mmap=True, weights_only=True)
    if "run" not in checkpoint:
        fail(f"{model_states[0]} was not written by train.py")
    return checkpoint


def check_resume(args, checkpoint, state):
    """Refuse what could not go on as if nothing had happened."""
    folder, saved = Path(args.checkpoint_dir, args.checkpoint_tag), checkpoint["run"]
    ordinary = [] if args.universal_checkpoint else ["zero_stage"]
    for name in [*state, *ordinary]:
        if name in ("step", "zero_stage") and name not in ordinary:
            continue
        if name == "train_micro_batch_size_per_gpu" and args.dropout == 0:
            continue  # only the dropout masks belong to micro-batches
        if saved[name] != state[name]:
            fail(f"{name}: {folder} has {saved[name]}, this run has {state[name]}; the loss could not go on the same")
    ranks = checkpoint["dp_world_size"]
    if args.universal_checkpoint:
        for name in (name for group in checkpoint["param_shapes"] for name in group):
            for key in ("fp32", "exp_avg", "exp_avg_sq", "step"):
                if not (folder / "zero" / name / f"{key}.pt").is_file():
                    fail(f"{folder / 'zero' / name / key}.pt is missing")
    else:
        if ranks != WORLD_SIZE:
            fail(
                f"{folder} was written by {ranks} ranks and this run has {WORLD_SIZE}. Convert it: "
                f"python ds_to_universal.py --input_folder {folder} --output_folder {folder}_universal ; then resume "
                f"with --checkpoint_tag {args.checkpoint_tag}_universal --universal_checkpoint"
            )
        for rank in range(ranks):
            kinds = ["optim_states"] + (["model_states"] if args.zero_stage == 3 else [])
            for kind in kinds:
                if not list(folder.glob(f"*zero_pp_rank_{rank}_mp_rank_00_{kind}.pt")):
                    fail(f"{folder}/*zero_pp_rank_{rank}_mp_rank_00_{kind}.pt is missing")


def resume(engine, args, checkpoint):
    """Load the checkpoint, mend what DeepSpeed 0.19.8 leaves out, and say what was restored."""
    folder = Path(args.checkpoint_dir, args.checkpoint_tag)
    path, _ = engine.load_checkpoint(args.checkpoint_dir, tag=args.checkpoint_tag)
    assert path is not None, f"DeepSpeed did not load {folder}"
    optimizer, module = engine.optimizer.optimizer, engine.module
    if args.universal_checkpoint:
        groups = torch.load(folder / "zero" / "optimizer_state.pt", weights_only=False)["param_groups"]
        # ZeRO-3 gives every parameter group the hyper-parameters of group 0: biases and norms would decay.
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        # ZeRO-3 gives all sub-groups one tensor to count steps in: Adam would count each step once per sub-group.
        for moments in optimizer.state.values():
            moments["step"] = moments["step"].clone()
        # Frozen parameters and buffers are in no optimizer state, and the loader looks nowhere else.
        frozen = [p for p in module.parameters() if not p.requires_grad]
        names = [name for name, p in module.named_parameters() if not p.requires_grad]
        names += [name for name, _ in module.named_buffers()]
        whole = {name: checkpoint["module"][name] for name in names if name in checkpoint["module"]}
        with deepspeed.zero.GatheredParameters(frozen, modifier_rank=0, enabled=args.zero_stage == 3):
            module.load_state_dict(whole, strict=False)
    run = checkpoint["run"]
    taken = run["step"] - engine.skipped_steps
    steps = [int(moments["step"]) for moments in optimizer.state.values()]
    assert set(steps) == {taken}, f"the optimizer counts steps {steps}, the checkpoint {taken}"
    if RANK == 0:
        shown = "zero/<parameter>/*.pt" if args.universal_checkpoint else "*zero_pp_rank_*_optim_states.pt"
        count = sum(len(group) for group in checkpoint["param_shapes"])
        groups = ", ".join(f"lr {g['lr']:.3g} decay {g['weight_decay']:.3g}" for g in optimizer.param_groups)
        extra = [name for name in checkpoint["module"] if name in dict(module.named_buffers())]
        fixed = sum(not p.requires_grad for p in module.parameters())
        print(f"resumed from {folder}, {checkpoint['dp_world_size']} ranks then, {WORLD_SIZE} now")
        print(f"  {count} parameters, fp32 and two moments      {shown}")
        print(f"  optimizer: {taken} steps; groups: {groups}")
        print(f"  {fixed} frozen parameters, {len(extra)} buffers; schedule at {engine.lr_scheduler.last_batch_iteration}")
        print(f"  step {run['step']}, seed {run['seed']}, data {run['data']}", flush=True)
    return run["step"]


# -----------------------------------------------------------------------------
# training


def mean_loss(losses):
    """The mean over all micro-batches of all ranks, added in their global order whatever rank computed which."""
    dist.all_reduce(losses)
    return losses.mean().item()


def main():
    args = parse_arguments()
    check_arguments(args)
    try:
        train, validation, fingerprint = load_data(args.data, args.seq_len)
    except (OSError, ValueError) as error:
        fail(f"--data: {error}")
    micro = args.train_micro_batch_size_per_gpu
    accumulation = args.train_batch_size // (micro * WORLD_SIZE)
    shape = ("n_layer", "n_head", "n_embd", "seq_len", "dropout")
    tracked = (*shape, "train_batch_size", "train_micro_batch_size_per_gpu", "seed", "dtype")
    state = {name: getattr(args, name) for name in (*tracked, "steps", "lr", "warmup_steps", "zero_stage")}
    state |= {"step": 0, "data": fingerprint}
    checkpoint = read_client_state(args) if args.resume else None
    if checkpoint:
        check_resume(args, checkpoint, state)

    set_up()
    torch.manual_seed(args.seed)
    model = GPT(**{name: getattr(args, name) for name in shape})
    groups = parameter_groups(model, weight_decay=0.1)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=deepspeed_config(args))
    engine.lr_scheduler.step()  # DeepSpeed's schedule would give the first step a learning rate of 0
    if RANK == 0:
        parameters = sum(p.numel() for p in GPT(**{name: getattr(args, name) for name in shape}).parameters())
        print(f"{parameters:,} parameters, data {fingerprint}, {engine.device}, ZeRO-{args.zero_stage}, {args.dtype}")
        print(f"{args.train_batch_size} = {micro} per GPU x {accumulation} accumulation steps x {WORLD_SIZE} GPUs")
    state["step"] = resume(engine, args, checkpoint) if checkpoint else 0
    log = Log(args.run_name) if RANK == 0 else None

    # Of the global batch, rank r takes the micro-batches r * accumulation .. (r + 1) * accumulation - 1.
    mine = range(RANK * accumulation, (RANK + 1) * accumulation)

    def rows(m):
        return slice(m * micro, (m + 1) * micro)

    for step in range(state["step"] + 1, args.steps + 1):
        start, lr = time.perf_counter(), engine.get_lr()[0]
        inputs, targets = global_batch(train, args.seed, step, args.train_batch_size, args.seq_len)
        losses = torch.zeros(args.train_batch_size // micro, dtype=torch.float64, device=engine.device)
        for m in mine:
            torch.manual_seed(derive_seed(args.seed, step, m))  # dropout belongs to the micro-batch, not to the rank
            loss = engine(inputs[rows(m)].to(engine.device), targets[rows(m)].to(engine.device))
            engine.backward(loss)  # divides by the accumulation steps
            engine.step()  # acts after the last of them
            losses[m] = loss.detach()
        row = {"step": step, "loss": mean_loss(losses), "lr": lr}
        row["tokens_per_second"] = args.train_batch_size * args.seq_len / (time.perf_counter() - start)
        row["grad_norm"] = float(engine.get_global_grad_norm())
        row["loss_scale"] = float(engine.optimizer.cur_scale) if args.dtype == "fp16" else 1.0

        if step % args.eval_interval == 0 or step == args.steps:
            inputs, targets = global_batch(validation, args.seed, 0, args.train_batch_size, args.seq_len)
            losses.zero_()
            engine.eval()
            with torch.no_grad():
                for m in mine:
                    losses[m] = engine(inputs[rows(m)].to(engine.device), targets[rows(m)].to(engine.device))
            engine.train()
            row["val_loss"] = mean_loss(losses)
        if log:
            log.write(**row)
        if step % args.checkpoint_interval == 0:
            save(engine, args, state | {"step": step})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
