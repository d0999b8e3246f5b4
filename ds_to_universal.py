# SPDX-License-Identifier: MIT
"""DeepSpeed ZeRO checkpoint -> universal checkpoint.

    python ds_to_universal.py --input_folder checkpoints/global_step100

writes checkpoints/global_step100_universal. The input may be the folder above, Trainer's checkpoint-500 for one.

Input, written by engine.save_checkpoint() on N ranks (ZeRO-1/2, then ZeRO-3):

    mp_rank_00_model_states.pt                         buffers, parameter shapes, schedule, client state
    [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt   rank R's slice of the flattened fp32 weights and moments

    zero_pp_rank_R_mp_rank_00_model_states.pt
    [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt   rank R's slice of every single parameter

Output, the same at every stage, so that it resumes on any number of ranks and at ZeRO 1, 2 and 3:

    zero/<parameter>/fp32.pt, exp_avg.pt, ...          {"param": the whole tensor in its shape, "cat_dim": 0}
    zero/<parameter>/step.pt                           the optimizer's step count
    zero/optimizer_state.pt                            loss scale and parameter groups, no shard
    mp_rank_00_model_states.pt                         as in the input; `module` keeps what no optimizer holds
    zero_pp_rank_0_mp_rank_00_model_states.pt          the same file under the name that ZeRO-3 looks for
    ../latest_universal                                the name of the output folder

A .pt file is a zip archive of one pickle and one stored record per tensor. Conversion only regroups byte ranges of
those records. So it is done without torch, needs nothing but Python 3.10, and runs no code of a checkpoint:
classes stay names. Each range is read once, checked against the archive's CRC-32 on the way, and written once.
"""

import argparse
import contextlib
import datetime
import os
import resource
from pathlib import Path

from universal import __version__
from universal.checkpoint import find_tag
from universal.converter import alone, beside, convert, end_group, in_one_line
from universal.torch_file import CheckpointError


def launched(distributed, local_rank):
    """(rank, ranks) of this process if a launcher started it, or --distributed asks for it: a platform or a training
    script, too, leaves RANK and WORLD_SIZE behind."""
    names = "RANK", "WORLD_SIZE"
    if not distributed and local_rank is None and "TORCHELASTIC_RUN_ID" not in os.environ:
        names = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"
    try:
        rank, ranks = (int(os.environ[name]) for name in names)
    except KeyError as error:
        if distributed:
            raise CheckpointError(f"--distributed needs {error} in the environment, as launchers set it") from None
        return 0, 1
    except ValueError as error:
        raise CheckpointError(f"{' and '.join(names)} in the environment are not numbers: {error}") from None
    return rank, ranks


@contextlib.contextmanager
def meet(rank, ranks, output, seconds):
    """Gives gather() for processes that a launcher has started: by torch.distributed, at MASTER_ADDR or, where the
    launcher names none, through a file beside the output, which all must see."""
    import torch.distributed as dist

    job = "_".join(os.environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    where = "env://"
    note = beside(output, f"meeting.{job}")
    if "MASTER_ADDR" not in os.environ:
        where = f"file://{note}"
        output.parent.mkdir(parents=True, exist_ok=True)
    try:
        patience = datetime.timedelta(seconds=seconds)
        store = next(dist.rendezvous(where, rank, ranks, timeout=patience))[0]
        store.set(f"rank {rank}", "is here")
        store.wait([f"rank {other}" for other in range(ranks)], patience)
    except Exception as error:
        note.unlink(missing_ok=True)
        problem = f"rank {rank} of {ranks}: not all processes came to {where} within {seconds:g} s"
        raise CheckpointError(f"{problem}: {str(error).splitlines()[0]}") from None
    # From here on a process waits for as long as another one writes; one that ends is noticed at once.
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=datetime.timedelta(days=1))

    def gather(value):
        values = [None] * ranks
        try:
            dist.all_gather_object(values, value)
        except RuntimeError:
            raise CheckpointError("another process of this conversion is gone: nothing is published") from None
        return values

    try:
        gather(None)
        note.unlink(missing_ok=True)  # all are connected; the store's own cleaning up misses it now and then
        yield gather
    finally:
        end_group()


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arg, hidden = parser.add_argument, argparse.SUPPRESS
    arg("--version", action="version", version=__version__)
    arg("--input_folder", required=True, help="ZeRO checkpoint, the folder with the *_states.pt files; or the one "
        "above it, where `latest` says which, or there is no other")  # fmt: skip
    arg("--output_folder", help="universal checkpoint to write; default: <the folder with the files>_universal")
    arg("--num_extract_workers", type=int, default=4, help="threads that open shards")
    arg("--num_merge_workers", type=int, default=2, help="threads that write parameters")
    arg("--no_strict", dest="strict", action="store_false", help="go on without what the result cannot hold")
    arg("--zero3_before_0_19_3", action="store_true", help="write for the universal loader of DeepSpeed before 0.19.3 "
        "at ZeRO-3: it fails on what others want (\"'dict' object has no attribute 'view'\")")  # fmt: skip
    arg("--verify", dest="check", action="store_true", help="read the result back before it is published")
    arg("--distributed", action="store_true", help="share the work with the other processes that RANK and WORLD_SIZE "
        "tell of; torchrun, deepspeed and srun need no flag")  # fmt: skip
    arg("--timeout", type=float, default=300, metavar="SECONDS", help="how long several processes wait to meet")
    arg("--inject_missing_state", action="store_true", help="accepted, as DeepSpeed's converter does; not needed here")
    arg("--keep_temp_folder", action="store_true", help="accepted; there is none")
    arg("--local_rank", type=int, help=hidden)  # the deepspeed launcher passes it
    arg("--safetensors", help=hidden)
    for flag in ("--trust", "--any_step"):  # of version 1.0; what they permitted needs no permission now
        arg(flag, action="store_true", help=hidden)
    for flag in ("--drop_states", "--unused_patterns"):
        arg(flag, dest="strict", action="store_false", help=hidden)
    args = parser.parse_args()
    if min(args.num_extract_workers, args.num_merge_workers) < 1:
        parser.error("--num_extract_workers and --num_merge_workers are at least 1")
    return args


def main():
    args = parse_arguments()
    program = "ds_to_universal.py"
    with in_one_line(program):
        if args.safetensors:
            raise CheckpointError("--safetensors is a command of its own now: python ds_to_safetensors.py INPUT FILE")
        rank, ranks = launched(args.distributed, args.local_rank)
    with contextlib.suppress(ValueError, OSError):  # every shard stays open, if the system permits it
        resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    with in_one_line(program, rank):
        output = args.output_folder or f"{os.path.abspath(find_tag(args.input_folder))}_universal"
        met = meet(rank, ranks, Path(os.path.realpath(output)), args.timeout)
        with met if ranks > 1 else contextlib.nullcontext(alone) as gather:
            done = convert(
                args.input_folder, output, args.num_extract_workers, args.num_merge_workers, strict=args.strict,
                check=args.check, progress=not rank, zero3_before_0_19_3=args.zero3_before_0_19_3, rank=rank,
                ranks=ranks, gather=gather,
            )  # fmt: skip
            gather(None)
    if not rank:
        rate = done["bytes"] / done["seconds"] / 1e9
        print(
            f"{done['source']} -> {output}: {done['parameters']} parameters, {done['bytes']:,} bytes, {done['files']} "
            f"files in {done['seconds']:.2f} s, {rate:.2f} GB/s"
        )


if __name__ == "__main__":
    main()
