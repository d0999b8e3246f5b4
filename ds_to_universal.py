# SPDX-License-Identifier: MIT
"""DeepSpeed ZeRO checkpoint -> universal checkpoint.

    python ds_to_universal.py --input_folder checkpoints/global_step100

writes checkpoints/global_step100_universal. The input may also be the parent folder, such as
Trainer's checkpoint-500.

Input, written by engine.save_checkpoint() on N ranks (ZeRO-1/2, then ZeRO-3):

    mp_rank_00_model_states.pt                    buffers, shapes, schedule, client state
    [bf16_]zero_pp_rank_R_..._optim_states.pt     rank R's slice of all weights and moments

    zero_pp_rank_R_mp_rank_00_model_states.pt
    [bf16_]zero_pp_rank_R_..._optim_states.pt     rank R's slice of every single parameter

Output, the same for every stage, so it resumes on any number of ranks and at ZeRO 1, 2 and 3:

    zero/<parameter>/fp32.pt, exp_avg.pt, ...     {"param": the whole tensor, "cat_dim": 0}
    zero/<parameter>/step.pt                      the optimizer's step count
    zero/optimizer_state.pt                       loss scale and parameter groups, no shard
    mp_rank_00_model_states.pt                    as in the input, without trained parameters
    zero_pp_rank_0_mp_rank_00_model_states.pt     the same file by the name that ZeRO-3 looks for
    ../latest_universal                           the name of the output folder

The conversion has five steps, each a function in universal/:

    find_tag()       checkpoint/tags.py      the folder with the files, if its parent was given
    describe()       checkpoint/describe.py  which bytes of which shards make up each parameter
    write_output()   write/converter.py      each byte range is read once and written once
    check_all()      files/sources.py        compares what was read with the CRC-32 of every record
    publish()        write/publish.py        once all is on the disk, names the folder

A .pt file is a zip archive of one pickle and one stored record per tensor (torch_file.py).
Conversion only regroups byte ranges of those records, so it works without torch, needs nothing but
Python 3.10, and runs no code in a checkpoint: classes are copied by name."""

import argparse
import contextlib
import resource

from universal import __version__
from universal.write.console import in_one_line, report
from universal.write.converter import convert


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arg = parser.add_argument
    arg("--version", action="version", version=__version__)
    arg(
        "--input_folder",
        required=True,
        help="ZeRO checkpoint, the folder with the *_states.pt files; or the one "
        "above it, where `latest` says which, or there is no other",
    )
    arg(
        "--output_folder",
        help="universal checkpoint to write; default: <the folder with the files>_universal",
    )
    arg("--num_extract_workers", type=int, default=4, help="threads that open shards")
    arg("--num_merge_workers", type=int, default=2, help="threads that write parameters")
    arg(
        "--no_strict",
        dest="strict",
        action="store_false",
        help="go on without what the result cannot hold",
    )
    arg(
        "--zero3_before_0_19_3",
        action="store_true",
        help="write for the universal loader of DeepSpeed before 0.19.3 "
        "at ZeRO-3: it fails on what others want (\"'dict' object has no attribute 'view'\")",
    )
    arg(
        "--verify",
        dest="check",
        action="store_true",
        help="read the result back before it is published",
    )
    add_unused_flags(arg)
    args = parser.parse_args()
    if min(args.num_extract_workers, args.num_merge_workers) < 1:
        parser.error("--num_extract_workers and --num_merge_workers are at least 1")
    return args


def add_unused_flags(arg):
    """Add those that DeepSpeed's converter has and this needs not."""
    arg(
        "--inject_missing_state",
        action="store_true",
        help="accepted, as DeepSpeed's converter does; not needed here",
    )
    arg("--keep_temp_folder", action="store_true", help="accepted; there is none")


def raise_file_limit():
    """Let every shard stay open, if the system permits it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main():
    args = parse_arguments()
    raise_file_limit()
    with in_one_line("ds_to_universal"):
        done = convert(
            args.input_folder,
            args.output_folder,
            args.num_extract_workers,
            args.num_merge_workers,
            strict=args.strict,
            check=args.check,
            progress=True,
            zero3_before_0_19_3=args.zero3_before_0_19_3,
        )
    report(done)


if __name__ == "__main__":
    main()
