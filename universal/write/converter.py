# SPDX-License-Identifier: MIT
"""Convert a ZeRO checkpoint to a universal one: describe, write, check, publish.

ds_to_universal.py is its command line, and describes the input and the output.
"""

import functools
import math
import os
import shutil
import time
import warnings
from pathlib import Path

from universal.checkpoint.converted import file_name
from universal.checkpoint.describe import describe, find_shards, left_over
from universal.checkpoint.experts import expert_name
from universal.checkpoint.same_step import weights_set
from universal.checkpoint.tags import find_tag, restore_all
from universal.checkpoint.tensor_parallel import INFO_KEY, TensorParallel
from universal.checkpoint.types import NEXT_STEPS, Checkpoint, Limit, Problem
from universal.checkpoint.zero import is_computed_anew
from universal.errors import CheckpointError, adding_path
from universal.files.sources import ByteReader, Extent, nbytes_of
from universal.files.torch_file import contiguous, trim_storage, verify
from universal.files.torch_writer import Pickled, pickled, write_pt
from universal.lines import bar
from universal.write.publish import check_output, publish, unfinished, wait

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
    zero3_before_0_19_3: bool = False,
) -> dict:
    """Convert the checkpoint in a folder, or in the one below it that find_tag() finds.

    output_folder: by default the input's name with _universal appended. check: read the finished
    files back before they are published. The others are flags of ds_to_universal.py.

    Returns: {"source": the tag's folder, "output", "parameters", "bytes", "seconds"}.
    Raises: CheckpointError, if the input is not a complete checkpoint, or the output folder holds
        something else; OSError, if a disk fails. Nothing has then appeared at output_folder.
    """
    began = time.perf_counter()
    restore_all(Path(input_folder))
    wait()  # for saves in the background
    source = find_tag(input_folder)
    output_folder = output_folder or f"{os.path.abspath(source)}_universal"
    output = Path(os.path.realpath(output_folder))
    check_output(Path(os.path.realpath(source)), output)
    checkpoint = describe(source, num_extract_workers)
    check_lossless(checkpoint, strict)
    keep_weights(checkpoint, strict)
    files = files_of(checkpoint, zero3_before_0_19_3)
    with unfinished(output) as folder:
        write_output(folder, files, num_merge_workers, progress)
        finish(folder, source, output, files if check else {})
    return {
        "source": source,
        "output": output_folder,
        "parameters": len(checkpoint.parameters),
        "bytes": sum(map(size_of, files.values())),
        "seconds": time.perf_counter() - began,
    }


def check_lossless(checkpoint, strict):
    """Raise CheckpointError for what the conversion would lose, or warn of it if not strict."""
    if checkpoint.is_universal:
        raise CheckpointError(f"{checkpoint.folder} is a universal checkpoint already")
    if any(map(expert_name, (*checkpoint.parameters, *checkpoint.module))):
        raise CheckpointError(
            f"{checkpoint.folder} has experts, which are not converted: load_checkpoint() needs no "
            "conversion"
        )
    for text in left_over(checkpoint):
        warnings.warn(text, stacklevel=3)
    for problem in [*checkpoint.problems, *problem_of_loss(checkpoint)]:
        text = problem.text
        if problem.limit is Limit.RANKS:
            raise CheckpointError(text)
        if problem.limit is Limit.UNSAVED:
            text = f"{checkpoint.folder}: {text}"
        if problem.limit in (Limit.FILES, Limit.UNSAVED) and strict:
            raise CheckpointError(f"{text} (--no_strict continues without it)")
        if problem.limit < Limit.STATE:  # problem_of_loss() names those
            warnings.warn(text, stacklevel=3)


def lost_states(checkpoint):
    """The names of the optimizer's states that a universal checkpoint has no place for: those
    without a value for each element, but for the step."""
    optimizer = checkpoint.optimizer
    names = {*optimizer.extra_states, *optimizer.extra_keys}
    names |= {problem.state for problem in checkpoint.problems} - {None}
    for parameter in checkpoint.parameters.values():
        # A None alone is what a new state has, too; beside others it may tell that these are made.
        if len(parameter.states) > 1 or any(v is not None for v in parameter.scalars.values()):
            names |= parameter.scalars.keys() - {"step"}
    return sorted(
        {str(name) for name in names if not is_computed_anew(name, optimizer.param_groups)}
    )


def problem_of_loss(checkpoint: Checkpoint) -> list[Problem]:
    """Returns a list with a Problem if a conversion would lose states; otherwise an empty one."""
    names = ", ".join(lost_states(checkpoint))
    if checkpoint.is_universal or not names:
        return []
    (shards,) = find_shards(checkpoint.folder).values()
    text = (
        f"{shards[0][0]}: {names} of the optimizer: a universal checkpoint has no place for what "
        "belongs to no single element"
    )
    return [Problem(Limit.FILES, text)]


def keep_weights(checkpoint, strict):
    """Add the weights that a script has set in the module to the model states, where a load finds
    them. Raises CheckpointError where none would, if strict."""
    weights = dict(weights_set(checkpoint))
    if not weights:
        return
    text = (
        f"{checkpoint.folder}: {len(weights)} of the module's weights are not the optimizer's "
        f"masters ({min(weights)})"
    )
    if checkpoint.is_data_parallel:
        warnings.warn(f"{text}: both are kept", stacklevel=3)
        checkpoint.model["module"].update((name, trim_storage(weights[name])) for name in weights)
    elif strict:
        raise CheckpointError(f"{text}, which alone are kept (--no_strict continues without them)")
    else:
        warnings.warn(f"{text}, which alone are kept", stacklevel=3)


def write_output(folder, files, workers, progress):
    """Write the files, and compare what was read with its checksums."""

    def write_job(job, reader):
        for name in job:
            write_pt(folder / name, files[name], reader)
        return sum(size_of(files[name]) for name in job)

    for parent in {os.path.dirname(name) for name in files}:
        os.makedirs(folder / parent, exist_ok=True)
    # Parameters that are neighbors in the shards are read, and checksummed, in one go.
    names = list(files)
    count = max(1, min(64, len(names) // 8))
    jobs = [names[i : i + count] for i in range(0, len(names), count)]
    reader = ByteReader()
    total = sum(map(size_of, files.values()))
    with bar(total, progress) as show_more:
        for nbytes in reader.in_threads(jobs, write_job, workers):
            show_more(nbytes)
    reader.check()


def finish(folder, source, output, to_verify):
    """Add links and next_steps.csv, and publish the output. to_verify: files to read again."""
    for name in to_verify:
        verify(folder / name)
    for path in folder.glob("mp_rank_*_model_states.pt"):
        # The name under which ZeRO-3 looks for it.
        second = path.with_name(f"zero_pp_rank_0_{path.name}")
        try:
            os.link(path, second)
        except OSError:  # a file system without hard links
            shutil.copyfile(path, second)
    if (source / NEXT_STEPS).is_file():
        shutil.copyfile(source / NEXT_STEPS, folder / NEXT_STEPS)
    publish(folder, output, output.with_name("latest_universal"))


def size_of(file):
    """The bytes of all tensors in a file to be written."""
    return sum(map(nbytes_of, file.sources))


# --------------------------------------------------------------------------------------------------
# 2. what the result consists of


def files_of(checkpoint: Checkpoint, bare: bool = False) -> dict[str, Pickled]:
    """The files of the output, by path. bare: save tensors without a dict around them."""
    files = {}
    info = checkpoint.model.get(INFO_KEY)
    pickled_step = functools.cache(pickled)  # most parameters share one step
    cuts = TensorParallel(info, checkpoint.layout.tensor, checkpoint.folder)
    with adding_path(checkpoint.folder / "*_optim_states.pt"):
        for name, parameter in checkpoint.parameters.items():
            folder = f"zero/{file_name(name)}"
            cut_info = cuts.cut_info(name, parameter.shape).items()
            for key, source in parameter.states.items():
                if "/" in file_name(key):
                    raise CheckpointError(f"{key!r} is a state's name that leads to another folder")
                data = state_pickle(source.dtype, parameter.shape, bare, *cut_info)
                files[f"{folder}/{file_name(key)}.pt"] = Pickled(data, [source])
            step = parameter.scalars.get("step")
            if step is not None:
                files[f"{folder}/step.pt"] = pickled_step(step)
        files["zero/optimizer_state.pt"] = pickled(shared_state(checkpoint))
        for mp_rank, model in enumerate(checkpoint.models):
            files[f"mp_rank_{mp_rank:02d}_model_states.pt"] = pickled(model)
    return files


@functools.lru_cache(4096)
def state_pickle(dtype, shape, bare, *cut_info):
    """The pickle in a state's file. Cached, as layers are alike."""
    tensor = contiguous(dtype, Extent(dtype, None, 0, math.prod(shape)), shape)
    return pickled(tensor if bare else {"param": tensor} | dict(cut_info)).data


# The keys of a shard with the states of parameters, at ZeRO-1 to 3.
SHARDS = (
    "base_optimizer_state",
    "param_slice_mappings",
    "single_partition_of_fp32_groups",
    "fp32_flat_groups",
)


def shared_state(checkpoint):
    """Returns the content of zero/optimizer_state.pt: what DeepSpeed's loaders of every stage ask
    for."""
    groups = checkpoint.optimizer.param_groups
    state = {key: value for key, value in checkpoint.shard.items() if key not in SHARDS}
    state["param_groups"] = groups
    if left_out := lost_states(checkpoint):
        state["left_out"] = left_out  # the loader asks for it
    # The ZeRO-3 loader gives every group the first one's values. So leave out the values in which
    # the groups differ.
    shared = {
        key: value
        for key, value in groups[0].items()
        if all(group.get(key) == value for group in groups)
    }
    steps = (parameter.scalars.get("step") for parameter in checkpoint.parameters.values())
    step = next((step for step in steps if step is not None), groups[0].get("step"))
    state["optimizer_state_dict"] = {"state": {0: {"step": step}}, "param_groups": [shared]}
    # ZeRO-1 and 2 ask for the version, and ZeRO-3 does not save it.
    if version := checkpoint.model.get("ds_version"):
        state.setdefault("ds_version", version)
    return state
