# SPDX-License-Identifier: MIT
"""ZeRO checkpoint -> universal checkpoint: convert() finds, describes, writes, checks and
publishes.

ds_to_universal.py is its command line, and describes the input and the output. Uses checkpoint.py
and torch_file.py; needs nothing but Python 3.10."""

import contextlib
import ctypes
import errno
import fcntl
import functools
import math
import os
import re
import shutil
import sys
import time
import warnings
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from universal.checkpoint import describe, file_name, find_tag, left_over, lost_states
from universal.collective import AllGather, all_or_none, alone, merge_spans
from universal.torch_file import (
    CheckpointError,
    Reader,
    Slices,
    about,
    check_all,
    keep_open,
    nbytes_of,
    pickled,
    verify,
    whole,
    write_pt,
)

# -----------------------------------------------------------------------------
# 3. what the result consists of


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


# -----------------------------------------------------------------------------
# 4. publishing: nothing gets its final name before it is on the disk


def beside(output, what):
    return output.with_name(f".{output.name}.{what}")


def check_output(source, output):
    """Check that the output is new, or a universal checkpoint and nothing else, and does not
    contain the source."""
    entry = re.compile(
        r"zero|(zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt|layer_.*_model_states\.pt"
    )
    pointer = output.parent / "latest_universal"
    if source == output or output in source.parents:
        raise CheckpointError(
            f"{output} is not a universal checkpoint but holds the input: name another output folder"
        )
    if pointer == output or pointer.is_dir():
        raise CheckpointError(
            f"{pointer} is the name of the file that points to the output, and not of a folder"
        )
    if output.exists():
        others = (
            [path.name for path in output.iterdir() if not entry.fullmatch(path.name)]
            if output.is_dir()
            else []
        )
        if others or not (output / "zero" / "optimizer_state.pt").is_file():
            held = f": it holds {min(others)}" if others else ""
            raise CheckpointError(
                f"{output} exists and is not a universal checkpoint{held}: it is left as it is"
            )


@contextlib.contextmanager
def locked(folder, made):
    """Keep other conversions out of the folder. made: this conversion has just made it, so nobody
    else holds it."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"another conversion to the same folder is running: it writes to {folder}"
            ) from None
        except (
            OSError
        ) as error:  # a file system without locks: the folder itself serves as the lock
            if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
                raise
            if not made:
                text = f"{folder} belongs to another conversion that runs, or was killed; if so: rm -r '{folder}'"
                raise CheckpointError(text) from None
        if not os.path.samestat(os.fstat(lock), os.stat(folder)):
            raise CheckpointError(f"another conversion has just replaced {folder}")
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def unfinished(output):
    """An empty folder next to the output, to write into; removed in the end unless it was
    published. First removes what a killed conversion left."""
    folder = beside(output, "unfinished")
    old = beside(output, "replaced")
    with contextlib.ExitStack() as stack:
        if output.exists():  # whoever has just given it this name still holds its lock
            stack.enter_context(locked(output, True))
        made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=not made)
        stack.enter_context(locked(folder, made))
        mine = os.stat(folder)
        if old.exists() and not output.exists():
            old.rename(output)
        shutil.rmtree(old, ignore_errors=True)
        if old.exists():  # if another user's, it stays, and must not be in the way
            old.rename(beside(output, f"replaced.{time.time_ns()}"))
        for left in folder.iterdir():
            shutil.rmtree(
                left, ignore_errors=True
            ) if left.is_dir() and not left.is_symlink() else left.unlink()
        try:
            yield folder
        finally:
            if folder.exists() and os.path.samestat(mine, os.stat(folder)):
                shutil.rmtree(folder, ignore_errors=True)
                beside(output, "pointer").unlink(missing_ok=True)


def publish(folder, output, latest="latest_universal"):
    """Write everything to the disk, give the finished folder its final name, and let the file
    `latest` point to it. If this is interrupted, the output is either the old or the new one, and
    whole. For a moment the old one is next to its place; the next conversion then moves it back."""
    old = beside(output, "replaced")
    pointer = beside(output, "pointer")
    pointer.write_bytes(os.fsencode(output.name))
    sync(folder)
    if output.exists():
        output.rename(old)
    folder.rename(output)
    pointer.rename(output.with_name(latest))
    sync(output.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync(folder):
    """Write everything in the file system of this folder to the disk."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if libc.syncfs(descriptor):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(folder))
    finally:
        os.close(descriptor)


# -----------------------------------------------------------------------------
# 5. convert(); several processes


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
                publish(folder, output)
    nbytes = sum(nbytes_of(source) for _, sources in files.values() for source in sources)
    done = {
        "source": source,
        "output": output_folder,
        "parameters": len(description.parameters),
        "bytes": nbytes,
    }
    return done | {"seconds": time.perf_counter() - began}


def report(done):
    print(
        f"{done['source']} -> {done['output']}: {done['parameters']} parameters, {done['bytes']:,} bytes in "
        f"{done['seconds']:.2f} s, {done['bytes'] / done['seconds'] / 1e9:.2f} GB/s"
    )


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


@contextlib.contextmanager
def bar(total, progress):
    """Yields a function that moves a progress bar, if there is a terminal, and tqdm, which comes
    with DeepSpeed."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda nbytes: None
        return
    with tqdm(
        total=total, unit="B", unit_scale=True, disable=not progress or None
    ) as shown:  # None: no terminal
        yield shown.update


@contextlib.contextmanager
def in_one_line(program, rank=0):
    """Rank 0 prints an error, and every warning, as one line on standard error; after an error the
    process ends."""

    def say(kind, text):
        if not rank:
            print(
                f"{program}: {kind}: {' '.join(str(text).splitlines())}",
                file=sys.stderr,
                flush=True,
            )

    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")
    warnings.showwarning = lambda message, *rest: say("warning", message)
    warnings.simplefilter("always", UserWarning)
    try:
        yield
        return
    except CheckpointError as error:
        code = 2
        say("error", error)
    except (OSError, MemoryError) as error:
        code = 1
        say("error", error if str(error) else "out of memory")
    except KeyboardInterrupt:
        code = 130
    if not rank:
        sys.exit(code)
    time.sleep(5)  # rank 0 prints it, so this rank must not make the launcher kill rank 0 first
    os._exit(code)
