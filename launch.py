"""How train.py and train_3d.py are started: their flags, DeepSpeed's config, the process group."""

import argparse
import datetime
import importlib.util
import logging
import math
import os
import sys
import warnings
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from deepspeed.accelerator import get_accelerator
from packaging.version import Version

from checkpoint import TRACKED, open_checkpoint
from data import accumulation_steps, fail, load_data, positive
from universal import elastic


def add_arguments(parser):
    parser.error = fail
    arg = parser.add_argument
    arg("--train_batch_size", type=positive, default=256, help="sequences of one optimizer step, over all ranks")
    arg("--train_micro_batch_size_per_gpu", type=positive, default=64, help="sequences of one forward pass on one rank")
    arg("--steps", type=positive, default=200, help="optimizer steps of the whole run, the resumed part included")
    arg("--run_name", default="default", help="the log is logs/<run_name>.csv")
    arg("--dtype", choices=["fp32", "bf16", "fp16"], default="fp32", help="fp16: where the GPU or the CPU has it")
    arg("--checkpoint_dir", default="ds_transformer_checkpoint")
    arg("--checkpoint_interval", type=positive, default=100, help="steps from one checkpoint to the next")
    arg("--resume", action="store_true", help="go on from --checkpoint_dir/--checkpoint_tag")
    arg("--checkpoint_tag", help="default: the one that the file `latest`, or `latest_universal`, names")
    arg("--universal_checkpoint", action="store_true", help="the tag is a universal checkpoint")
    arg("--elastic", action="store_true", help="start, or go on from the newest whole checkpoint of any layout")
    arg("--keep", type=positive, metavar="N", help="remove all but the N newest checkpoints; default: keep all")
    arg("--timeout", type=positive, default=600, help="seconds after which a silent rank is given up")
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


def count_ranks(args, **degrees):
    """degrees: the parallel sizes besides data parallelism, by flag. Sets args.ranks and args.data_parallel, what those
    sizes leave of them; the batch must divide among these."""
    if "RANK" not in os.environ:
        script = Path(sys.argv[0]).name
        fail(f"start it with a launcher: deepspeed --num_gpus 4 {script}, or torchrun --nproc-per-node 4 {script}")
    model_parallel = math.prod(degrees.values())
    if args.elastic:
        if args.resume or args.universal_checkpoint or args.checkpoint_tag:
            fail("--elastic finds the checkpoint by itself: leave out --resume and what belongs to it")
        try:
            elastic.enlist(args.train_batch_size, args.train_micro_batch_size_per_gpu, model_parallel)
        except ValueError as error:
            fail(error)
    args.ranks = int(os.environ["WORLD_SIZE"])
    if args.ranks % model_parallel:
        product = " x ".join(f"--{name} {n}" for name, n in degrees.items())
        fail(f"{args.ranks} ranks do not divide by {product}")
    args.data_parallel = args.ranks // model_parallel
    accumulation_steps(args.train_batch_size, args.train_micro_batch_size_per_gpu, args.data_parallel)


def check_arguments(args):
    if Version(deepspeed.__version__) < Version("0.16.4"):
        fail(f"it needs DeepSpeed 0.16.4 or newer, and finds {deepspeed.__version__}")
    if args.n_embd % args.n_head:
        fail(f"--n_embd {args.n_embd} does not divide into --n_head {args.n_head} heads")
    if args.tensorboard and not importlib.util.find_spec("tensorboard"):
        fail("--tensorboard needs its package: pip install tensorboard")
    device = get_accelerator()
    if not {"fp32": True, "bf16": device.is_bf16_supported(), "fp16": device.is_fp16_supported()}[args.dtype]:
        fail(f"--dtype {args.dtype} does not run on this {device.device_name()}: take another --dtype, or a GPU")


def base_config(args):
    """DeepSpeed's config but for what is cut in which way."""
    schedule = {"total_num_steps": args.steps, "warmup_num_steps": args.warmup_steps, "warmup_type": "linear"}
    schedule |= {"warmup_min_ratio": 1 / args.warmup_steps, "cos_min_ratio": 0.1}
    return {
        # torch's AdamW, offloaded too: the same arithmetic everywhere, and nothing to compile
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": args.lr, "betas": [0.9, 0.95]}},
        "zero_force_ds_cpu_optimizer": False,
        "scheduler": {"type": "WarmupCosineLR", "params": schedule},
        "gradient_clipping": 1.0,
        "steps_per_print": 1 << 30,
        "bf16": {"enabled": args.dtype == "bf16"},
        "fp16": {"enabled": args.dtype == "fp16"},
        "tensorboard": {"enabled": args.tensorboard, "output_path": "runs", "job_name": args.run_name},
    }


def init_distributed(timeout=600):
    """The process group, and the settings of a process that make it quiet and its sums the same every time. A rank
    that says nothing for `timeout` seconds ends the others' waiting."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    if get_accelerator().device_name() == "cpu":
        # How many threads share a sum decides its last bits: one per rank, whatever the machine.
        torch.set_num_threads(1)
        # Plain gloo: DeepSpeed's shared-memory all-reduce compiles for a minute and leaves 66 MB per rank in /dev/shm.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    else:
        # DeepSpeed does it with the engine; what the ranks tell each other before goes through their GPUs, too.
        get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", 0)))
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        # The backward passes of the fused attentions add in any order.
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
    timeout = datetime.timedelta(seconds=timeout)
    c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = timeout  # also of the groups that DeepSpeed makes
    deepspeed.init_distributed(timeout=timeout)


def set_up(args, script, layout):
    """Data, checkpoint and process group. Returns (training text, validation text, client state, model states of the
    checkpoint to resume from or None); refuses what cannot go on."""
    try:
        train, validation, fingerprint = load_data(args.data, args.seq_len)
    except (OSError, ValueError) as error:
        fail(f"--data: {error}")
    client_state = {name: getattr(args, name) for name in TRACKED if name in args}
    client_state |= {"data": fingerprint, "script": script, "layout": layout}
    checkpoint = open_checkpoint(args, client_state) if args.resume else None

    init_distributed(args.timeout)
    fingerprints = [None] * args.ranks
    dist.all_gather_object(fingerprints, fingerprint)
    for rank, other in enumerate(fingerprints):
        if other != fingerprints[0]:
            fail(f"rank {rank} has other data, {other}, than rank 0, {fingerprints[0]}: give both the same --data")
    torch.manual_seed(args.seed)
    return train, validation, client_state, checkpoint
