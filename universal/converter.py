# SPDX-License-Identifier: MIT
"""ZeRO checkpoint -> universal checkpoint: convert() finds, describes, writes, checks and publishes.

ds_to_universal.py is its command line, and describes the input and the output. Needs nothing but
Python 3.10."""

import contextlib
import functools
import math
import os
import shutil
import time
import warnings
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from universal.byte_ranges import (
    Reader,
    Slices,
    check_all,
    keep_open,
    nbytes_of,
)
from universal.checkpoint import describe, file_name, left_over
from universal.collective import AllGather, all_or_none, alone, merge_spans
from universal.console import bar
from universal.description import NEXT_STEPS
from universal.errors import CheckpointError, about
from universal.publish import beside, check_output, publish, sync, unfinished
from universal.tags import find_tag
from universal.torch_file import (
    pickled,
    verify,
    whole,
    write_pt,
)
from universal.zero import lost_states

# --------------------------------------------------------------------------------------------------
# 1. convert()


def convert(
    input_folder: str,
    output_folder: str | None = None,
    num_extract_workers: int = 4,
    num_merge_workers: int = 2,
    *,
    strict: bool = True,
    check: bool = False,
    progress: bool = False,
    rank: int = 0,
    ranks: int = 1,
    gather: AllGather = alone,
    zero3_before_0_19_3: bool = False,
) -> dict:
    """Convert the ZeRO checkpoint in input_folder, or in the folder below it that find_tag() finds,
    into a universal checkpoint at output_folder; default: the input's name with _universal
    appended.

    check=True reads the finished files back before they are published. strict=False leaves out,
    with a warning, what a universal checkpoint cannot hold. zero3_before_0_19_3 is for the ZeRO-3
    universal loader of older DeepSpeeds, which wants a tensor where all others want {"param": the
    tensor}. Several processes share the work, each as number `rank` of `ranks`; gather(value)
    returns the values of all. Raises CheckpointError if the input is not a whole ZeRO checkpoint,
    or the output folder holds something else; OSError if a disk fails. Nothing has then appeared at
    output_folder. Returns {"source", "output", "parameters", "bytes", "seconds"}; source is the
    folder of the tag."""
    began = time.perf_counter()
    opened = keep_open()
    with contextlib.ExitStack() as stack:
        with all_or_none(gather):
            source = find_tag(input_folder)
            output_folder = output_folder or f"{os.path.abspath(source)}_universal"
            output = Path(os.path.realpath(output_folder))
            if rank == 0:
                check_output(Path(os.path.realpath(source)), output)
            folder = beside(output, "unfinished")
            description = describe(source, num_extract_workers, opened)
            complain(description, strict)
            with about(source / "*_optim_states.pt"):
                files = files_of(description, zero3_before_0_19_3)
            if rank == 0:
                stack.enter_context(unfinished(output))
                for parent in {os.path.dirname(name) for name in files}:
                    os.makedirs(folder / parent, exist_ok=True)
        with all_or_none(gather):
            mine = jobs_of(files, ranks)[rank::ranks]
            spans = write_files(folder, files, mine, opened, num_merge_workers, progress)
            if rank:
                sync(folder)  # this machine's part; publish() does rank 0's
        spans = merge_spans(gather(spans))
        with all_or_none(gather):
            check_all(spans, opened, rank, ranks)
        with all_or_none(gather):
            if rank == 0:
                for name in files if check else ():
                    verify(folder / name)
                link_second_names(folder)
                if (source / NEXT_STEPS).is_file():
                    shutil.copyfile(source / NEXT_STEPS, folder / NEXT_STEPS)
                publish(folder, output)
    nbytes = sum(nbytes_of(source) for _, sources in files.values() for source in sources)
    done = {
        "source": source,
        "output": output_folder,
        "parameters": len(description.parameters),
        "bytes": nbytes,
    }
    return done | {"seconds": time.perf_counter() - began}


def complain(description, strict):
    """Refuse, or name in a warning, what the conversion would lose; warn of what is only odd."""
    if description.universal:
        raise CheckpointError(f"{description.folder} is a universal checkpoint already")
    for text in left_over(description):
        warnings.warn(text, stacklevel=3)
    for problem in description.problems:
        if problem.fatal and strict:
            raise CheckpointError(f"{problem.text} (--no_strict continues without it)")
        warnings.warn(problem.text, stacklevel=3)


def write_files(folder, files, jobs, opened, workers, progress):
    """Write the files. Returns {record: what was read of it}, for check()."""

    def write_job(job):
        reader = Reader(opened)
        for name in job:
            write_pt(folder / name, *files[name], reader)
        return reader.spans

    sizes = [sum(nbytes_of(source) for name in job for source in files[name][1]) for job in jobs]
    spans = {}
    with ThreadPoolExecutor(workers) as pool, bar(sum(sizes), progress) as show_more:
        for found, nbytes in zip(pool.map(write_job, jobs), sizes, strict=True):
            show_more(nbytes)
            for record, more in found.items():
                spans.setdefault(record, array("Q")).extend(more)
    return spans


def link_second_names(folder):
    for path in folder.glob("mp_rank_*_model_states.pt"):
        second = path.with_name(f"zero_pp_rank_0_{path.name}")
        try:
            os.link(path, second)
        except OSError:  # a file system without hard links
            shutil.copyfile(path, second)


# --------------------------------------------------------------------------------------------------
# 2. what the result consists of


@functools.lru_cache(4096)
def state_pickle(dtype, shape, bare, *how):
    """The pickle of a state file, cached: layers and their states are alike, so few have to be
    made."""
    tensor = whole(dtype, Slices(dtype, (), (), 0, 0, 0, math.prod(shape)), shape)
    return pickled(tensor if bare else {"param": tensor} | dict(how))[0]


def global_state(description):
    """zero/optimizer_state.pt: what the loaders of ZeRO-1/2 and of ZeRO-3 ask for, without a
    shard."""
    groups = description.param_groups
    shards = (
        "base_optimizer_state",
        "param_slice_mappings",
        "single_partition_of_fp32_groups",
        "fp32_flat_groups",
    )
    state = {key: value for key, value in description.optimizer.items() if key not in shards}
    steps = (p.scalars.get("step") for p in description.parameters.values())
    step = next((step for step in steps if step is not None), groups[0].get("step"))
    state["param_groups"] = groups
    # The ZeRO-3 loader gives every group the first one's values. So leave out the values in which
    # the groups differ.
    shared = {
        key: value
        for key, value in groups[0].items()
        if all(group.get(key) == value for group in groups)
    }
    if left_out := lost_states(description.uneven, description.parameters, description.optimizer):
        state["left_out"] = left_out  # the loader asks for it
    state["optimizer_state_dict"] = {"state": {0: {"step": step}}, "param_groups": [shared]}
    if version := description.models[0].get(
        "ds_version"
    ):  # ZeRO-1/2's loader asks for it; ZeRO-3 does not save it
        state.setdefault("ds_version", version)
    return state


def files_of(description, bare=False):
    """{path below the output folder: (pickle, the sources of its tensors)}. bare: tensors without a
    dict around them."""
    files = {}
    steps = {}
    for name, parameter in description.parameters.items():
        folder = f"zero/{file_name(name)}"
        for key, source in parameter.states.items():
            if "/" in file_name(key):
                raise CheckpointError(f"{key!r} is a state's name that leads to another folder")
            data = state_pickle(source.dtype, parameter.shape, bare, *parameter.how.items())
            files[f"{folder}/{file_name(key)}.pt"] = data, [source]
        step = parameter.scalars.get("step")
        if step is not None:
            if id(step) not in steps:  # most parameters share one step
                steps[id(step)] = pickled(step)
            files[f"{folder}/step.pt"] = steps[id(step)]
    files["zero/optimizer_state.pt"] = pickled(global_state(description))
    return files | {
        f"mp_rank_{i:02d}_model_states.pt": pickled(model)
        for i, model in enumerate(description.models)
    }


def jobs_of(files, ranks):
    """The files, grouped into lists, so that neighbors in the shards are read, and checksummed, in
    one go."""
    names = list(files)
    count = max(1, min(64, len(names) // (8 * ranks)))
    return [names[i : i + count] for i in range(0, len(names), count)]
