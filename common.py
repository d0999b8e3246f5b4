"""What train.py and train_3d.py share and what is not their lesson: flags, process set-up, saving a checkpoint so that
it is never half there, and refusing to resume from one that would not go on as if nothing had happened."""

import argparse
import contextlib
import importlib.util
import itertools
import logging
import math
import os
import shutil
import signal
import sys
import warnings
import zipfile
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from model import accumulation_steps, fail, positive

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
SHAPE = ("n_layer", "n_head", "n_embd", "seq_len", "dropout")
# What a resumed run must have in common with the checkpoint's, or its loss could not go on as if nothing had happened.
TRACKED = (*SHAPE, "seed", "train_batch_size", "train_micro_batch_size_per_gpu", "dtype", "lr", "warmup_steps", "steps")


# -----------------------------------------------------------------------------
# arguments


def add_arguments(parser):
    parser.error = fail
    arg = parser.add_argument
    arg("--train_batch_size", type=positive, default=256, help="sequences of one optimizer step, over all ranks")
    arg("--train_micro_batch_size_per_gpu", type=positive, default=64, help="sequences of one forward pass on one rank")
    arg("--steps", type=positive, default=200, help="optimizer steps of the whole run, the resumed part included")
    arg("--run_name", default="default", help="the log is logs/<run_name>.csv")
    arg("--dtype", choices=["fp32", "bf16", "fp16"], default="fp32", help="fp16 needs a GPU")
    arg("--checkpoint_dir", default="ds_transformer_checkpoint")
    arg("--checkpoint_interval", type=positive, default=100, help="steps from one checkpoint to the next")
    arg("--resume", action="store_true", help="go on from --checkpoint_dir/--checkpoint_tag")
    arg("--checkpoint_tag", help="default: the one that the file `latest`, or `latest_universal`, names")
    arg("--universal_checkpoint", action="store_true", help="the tag is a universal checkpoint")
    arg("--tensor_parallel", type=positive, default=1, metavar="N", help="ranks that share each layer")
    arg("--lr", type=float, default=5e-3)
    arg("--warmup_steps", type=positive, default=20)
    arg("--n_layer", type=positive, default=2)
    arg("--n_head", type=positive, default=4)
    arg("--n_embd", type=positive, default=64)
    arg("--seq_len", type=positive, default=32)
    arg("--dropout", type=float, default=0.1)
    arg("--data", metavar="FILE", help="any text; default: the source of Python's standard library")
    arg("--seed", type=int, default=1337)
    arg("--eval_interval", type=positive, default=10, help="steps from one validation loss to the next")
    arg("--tensorboard", action="store_true", help="also write runs/<run_name> through DeepSpeed's monitor")
    arg("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher passes it


def check_arguments(args, **degrees):
    """degrees: the parallel sizes besides data parallelism, by flag. Sets args.data_parallel, what they leave of the
    ranks."""
    if "RANK" not in os.environ:
        script = Path(sys.argv[0]).name
        fail(f"start it with a launcher: deepspeed --num_gpus 4 {script}, or torchrun --nproc-per-node 4 {script}")
    if WORLD_SIZE % math.prod(degrees.values()):
        product = " x ".join(f"--{name} {n}" for name, n in degrees.items())
        fail(f"{WORLD_SIZE} ranks do not divide by {product}")
    args.data_parallel = WORLD_SIZE // math.prod(degrees.values())
    accumulation_steps(args.train_batch_size, args.train_micro_batch_size_per_gpu, args.data_parallel)
    if args.n_embd % args.n_head:
        fail(f"--n_embd {args.n_embd} does not divide into --n_head {args.n_head} heads")
    if args.tensorboard and not importlib.util.find_spec("tensorboard"):
        fail("--tensorboard needs its package: pip install tensorboard")
    device = get_accelerator()
    if not {"fp32": True, "bf16": device.is_bf16_supported(), "fp16": device.is_fp16_supported()}[args.dtype]:
        fail(f"--dtype {args.dtype} does not run on this {device.device_name()}: take another --dtype, or a GPU")


# -----------------------------------------------------------------------------
# processes


def set_up(fingerprint):
    """Process-wide settings, then the process group. All ranks must have the data of this fingerprint."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    if get_accelerator().device_name() == "cpu":
        # How many threads share a sum decides its last bits: one per rank, whatever the machine.
        torch.set_num_threads(1)
        # Plain gloo: DeepSpeed's shared-memory all-reduce compiles for a minute and leaves 66 MB per rank in /dev/shm.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    else:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        # The backward passes of the fused attentions add in any order.
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
    deepspeed.init_distributed()
    fingerprints = [None] * WORLD_SIZE
    dist.all_gather_object(fingerprints, fingerprint)
    for rank, other in enumerate(fingerprints):
        if other != fingerprints[0]:
            fail(f"rank {rank} has other data, {other}, than rank 0, {fingerprints[0]}: give both the same --data")


def stop_on_sigterm():
    """Returns a function that says, on all ranks alike, whether one of them was told to stop: the signal reaches them
    at different moments, and they must stop after the same step."""
    told = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(True))

    def stopping(device):
        votes = torch.tensor(float(bool(told)), device=device)
        dist.all_reduce(votes)
        return bool(votes)

    return stopping


# -----------------------------------------------------------------------------
# checkpoints


def save(engine, folder, client_state):
    """Write every rank's shard, then give the folder its name: a folder that has its name is complete."""
    folder, tag = Path(folder), f"global_step{client_state['step']}"
    unfinished, replaced = folder / f"{tag}.unfinished", folder / f"{tag}.replaced"
    if RANK == 0:
        shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was killed while it saved, on other ranks perhaps
    dist.barrier()
    engine.save_checkpoint(folder, tag=unfinished.name, client_state={"run": client_state}, save_latest=False)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        os.sync()  # a machine that goes down must not leave a whole folder with empty files
    dist.barrier()
    if RANK == 0:
        if (folder / tag).exists():
            shutil.rmtree(replaced, ignore_errors=True)
            (folder / tag).rename(replaced)
        unfinished.rename(folder / tag)
        (folder / "latest.unfinished").write_text(tag)
        (folder / "latest.unfinished").rename(folder / "latest")
        shutil.rmtree(replaced, ignore_errors=True)
    dist.barrier()


def whole(file):
    """The file, or a refusal where it is missing or truncated: a container's directory is its end."""
    if not zipfile.is_zipfile(file):
        fail(f"{file} is {'truncated' if file.exists() else 'missing'}: the checkpoint is not whole")
    return file


def open_checkpoint(args, client_state):
    """The model states of the checkpoint to resume from, a dict. Refuses, before any work, one that is not there, not
    whole, of the other kind, cut for another layout, or of another run than client_state describes."""
    folder = Path(args.checkpoint_dir)
    if args.checkpoint_tag is None:
        latest = folder / ("latest_universal" if args.universal_checkpoint else "latest")
        if not latest.is_file():
            fail(f"{latest} does not exist: give --checkpoint_tag")
        args.checkpoint_tag = latest.read_text().strip()
    folder = folder / args.checkpoint_tag
    if not folder.is_dir():  # killed between the two renames of save()? Some rank brings it back.
        with contextlib.suppress(OSError):
            folder.with_name(f"{folder.name}.replaced").rename(folder)
    if not folder.is_dir():
        tags = {file.parent.name for file in folder.parent.glob("*/*model_states.pt")}
        tags = sorted(tag for tag in tags if not tag.endswith((".unfinished", ".replaced")))
        fail(f"{folder} does not exist; in {folder.parent} there is: {', '.join(tags) or 'no checkpoint'}")
    if (folder / "zero").is_dir() != args.universal_checkpoint:
        if args.universal_checkpoint:
            fail(f"{folder} is an ordinary ZeRO checkpoint: leave out --universal_checkpoint, or convert it")
        fail(f"{folder} is a universal checkpoint: add --universal_checkpoint")

    prefix = "zero_pp_rank_{0}_" if (folder / "zero_pp_rank_0_mp_rank_00_model_states.pt").exists() else ""
    states = str(folder / (prefix + "mp_rank_{1:02d}_model_states.pt"))
    checkpoint = torch.load(whole(Path(states.format(0, 0))), mmap=True, weights_only=True)
    saved = checkpoint.get("run") or {}
    if saved.get("script") != client_state["script"]:
        writer = saved.get("script", "another script")
        fail(f"{folder} was written by {writer}, whose parameters have other names: {client_state['script']} cannot")
    for name, here in client_state.items():
        # Only dropout is drawn by the micro-batch.
        if name == "train_micro_batch_size_per_gpu" and args.dropout == 0 and not client_state.get("exact"):
            continue
        if name != "layout" and saved[name] != here:
            fail(f"{name} is {saved[name]} in {folder} and {here} here: the loss would not go on alike")
    if saved["layout"] != client_state["layout"] and not args.universal_checkpoint:
        fail(
            f"{folder} is cut for {saved['layout']}, and these are {client_state['layout']}. Convert it: python "
            f"ds_to_universal.py --input_folder {folder} --output_folder {folder}_universal; then resume with "
            f"--universal_checkpoint --checkpoint_tag {args.checkpoint_tag}_universal"
        )
    if RANK == 0:
        dimensions = checkpoint["checkpoint_parallel_dimensions"]
        for mp in range(dimensions["tp_degree"] * dimensions["pp_degree"]):
            shapes = torch.load(whole(Path(states.format(0, mp))), mmap=True, weights_only=True)["param_shapes"]
            if args.universal_checkpoint:
                needed = ("fp32", "exp_avg", "exp_avg_sq", "step")[: 3 if getattr(args, "zero_stage", 1) == 3 else 4]
                for name, state in itertools.product((n for group in shapes for n in group), needed):
                    whole(folder / "zero" / name / f"{state}.pt")
            else:
                for rank in range(checkpoint["dp_world_size"]):
                    whole(Path(states.format(rank, mp)))
                    kind = "bf16_" * (client_state["dtype"] == "bf16")
                    whole(folder / f"{kind}zero_pp_rank_{rank}_mp_rank_{mp:02d}_optim_states.pt")
        if args.universal_checkpoint:
            whole(folder / "zero" / "optimizer_state.pt")
    return checkpoint
