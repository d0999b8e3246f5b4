# SPDX-License-Identifier: MIT
"""Say what is in a folder of checkpoints, and where a resume can go on.

    python -m universal.inspect checkpoints [--tag global_step100] [--ranks 3] [--quick] [--json]

The folder is the one with the tags, or a checkpoint. Of the checkpoint that a resume would take,
every checksum is compared; not so with --quick. --ranks prints the lines of a config with which so
many data-parallel ranks keep the batch. Exit code 0: all checkpoints are complete; 1: one is
damaged or incomplete; 2: there is none. If the package is installed, the command is ds_inspect.

--json prints an object with these keys:

    folder: as it was given
    takes: the tag that a resume takes; null if there is none
    says: what a resume would print about the choice, in lines
    tags: {tag: what universal/checkpoint/facts.py lists}
    on_ranks: with --ranks: the settings, which it lists, too; null if no tag is taken
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from universal.checkpoint.describe import describe, paths_of
from universal.checkpoint.facts import facts_of, settings_on
from universal.checkpoint.names import plain_keys, with_plain_names
from universal.checkpoint.rounded import has_values_of
from universal.checkpoint.tags import choose_tag, is_checkpoint, list_tags
from universal.checkpoint.types import Checkpoint, Described
from universal.errors import CheckpointError
from universal.files.sources import (
    Record,
    checksum,
    join_crcs,
    keep_open,
    portions,
)
from universal.files.torch_file import load, records_of, tensor_of
from universal.write.console import bar, in_one_line, print_screen
from universal.write.screen import lines_of

WORKERS = 4
SPAN = 1 << 24  # bytes that a thread checks in one go, and by which the progress bar moves

# --------------------------------------------------------------------------------------------------
# 1. the tags of a folder


def look(
    folder: str,
    tag: str | None = None,
    quick: bool = False,
    ranks: int | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """What is in a folder, as lists, dicts, numbers and text, under the keys of --json.

    tag: look at this one alone. quick: compare no checksums. ranks: how many data-parallel ones
    shall go on. Raises: CheckpointError, if there is no checkpoint; OSError.
    """
    folder = Path(folder)
    says = []
    places = places_in(folder, tag, says)
    order = [*places]
    if tag is None and folder not in places.values():
        choice = choose_tag(folder)
        order = [tag.name for tag in choice.to_try]
        says += choice.says
    looks = {name: look_at(place) for name, place in places.items()}
    takes = first_whole(order, looks, quick, progress)
    tags = {name: known.facts for name, known in looks.items()}
    view = {"folder": str(folder), "takes": takes, "says": says, "tags": tags}
    if ranks is not None:
        view["on_ranks"] = settings_on(tags[takes], ranks) if takes else None
    return view


def places_in(folder, tag, says):
    """{tag: its folder}, of a folder with tags, or of a checkpoint. Raises CheckpointError."""
    if folder.is_dir() and not is_readable(folder):
        raise CheckpointError(f"{folder} cannot be read: permission denied")
    if tag is not None:
        places = {tag: folder / tag} if (folder / tag).is_dir() else {}
    elif is_checkpoint(folder):
        places = {os.path.basename(os.path.abspath(folder)): folder}
    else:
        places = {name: folder / name for name in list_tags(folder)}
        for place in folder.iterdir() if folder.is_dir() else ():
            if place.is_dir() and not is_readable(place):
                says.append(f"{place} cannot be read: permission denied")
    if not places:
        missing = folder if tag is None else folder / tag
        below = sorted({path.parent.name for path in folder.glob("*/latest")})
        more = f", but folders in it do: {', '.join(below)}" if below and tag is None else ""
        raise CheckpointError("; ".join([f"{missing} holds no checkpoint{more}", *says]))
    return places


def is_readable(folder):
    return os.access(folder, os.R_OK | os.X_OK)


class Look(NamedTuple):
    """facts: of the checkpoint in a folder, with "problem": why a resume would not load it, or
    None. paths: of its files, if it can be described."""

    folder: Path
    facts: dict[str, Any]
    paths: list[Path]


def look_at(folder: Path) -> Look:
    """What is in the folder of a checkpoint."""
    base = {"problem": None, "readable": True, "checked": False, "unread_damage": []}
    try:
        described = describe(folder, WORKERS)
        check_all_saved(described.checkpoint)
        check_steps_by_sample(described)
        return Look(folder, base | facts_of(described), paths_of(described.checkpoint))
    except CheckpointError as error:
        return Look(folder, base | {"problem": str(error)}, [])
    except OSError as error:
        return Look(folder, base | {"problem": str(error), "readable": False}, [])


def first_whole(order, looks, quick, progress):
    """The first tag that is whole, as load_checkpoint() tries them; notes in its facts what is
    not."""
    for name in order:
        facts = looks[name].facts
        if not quick and not facts["problem"]:
            facts |= checked(looks[name], progress)
        if not facts["problem"]:
            return name
        if not facts["readable"]:  # a resume ends with that, too
            return None
    return None


# --------------------------------------------------------------------------------------------------
# 2. what load_checkpoint() would find


def check_all_saved(checkpoint: Checkpoint) -> None:
    """Check that each state is as large as its parameter. Raises: CheckpointError."""
    for name, parameter in checkpoint.parameters.items():
        numel = math.prod(parameter.shape)
        for key, source in parameter.states.items():
            if source.numel < numel:
                raise CheckpointError(
                    f"{checkpoint.folder}: not all of the state {key} of {name} was saved"
                )


def check_steps_by_sample(described: Described) -> None:
    """Check that model states and shards are of one step, where nothing else has told.

    As reader.check_same_step() does, but of a sample: some elements of what each rank has of each
    parameter. Raises: CheckpointError.
    """
    checkpoint = described.checkpoint
    if not compares_weights(checkpoint):
        return
    path = checkpoint.files.model_states
    module = with_plain_names(load(path))["module"] or {}
    opened = keep_open()
    for name, parameter in checkpoint.parameters.items():
        weight = tensor_of(module.get(name))
        if weight is None or weight.size != parameter.shape:  # at ZeRO-3 it is empty
            continue
        if not has_values_of(weight, parameter.states["fp32"], opened):
            raise CheckpointError(
                f"{checkpoint.folder}: model states and shards are of different steps"
            )


def compares_weights(checkpoint):
    """Whether load_checkpoint() compares the weights in the model states with the masters."""
    if not checkpoint.is_data_parallel:
        return False
    scalars = [parameter.scalars for parameter in checkpoint.parameters.values()]
    counts_steps = any("step" in known for known in (*checkpoint.optimizer.param_groups, *scalars))
    return not counts_steps or not all(problem.loses_state for problem in checkpoint.problems)


class Span(NamedTuple):
    """A part of a record, which one thread reads."""

    record: Record
    start: int
    end: int


def checked(known, progress):
    """The facts that the checksums of a checkpoint's files tell."""
    damages = [*damages_of(known.paths, progress)]
    unread = weights_not_read(known.folder) if any(each.record for each in damages) else set()
    needed = [damage.text for damage in damages if place_of(damage.record) not in unread]
    others = [damage.text for damage in damages if place_of(damage.record) in unread]
    return {
        "problem": "; ".join(needed) or None,
        "readable": all(damage.readable for damage in damages),
        "checked": True,
        "unread_damage": others,
    }


class Damage(NamedTuple):
    """record: that does not match its checksum; None if the file as a whole cannot be read.
    readable: whether the system lets it be read."""

    text: str
    record: Record | None
    readable: bool = True


def place_of(record):
    return record and (record.path, record.offset)


def damages_of(paths, progress):
    """Yields the Damages of files."""
    opened = keep_open()

    def read_directory(path):
        return attempt(lambda: records_of(path))

    def read_spans(spans):
        return [
            attempt(lambda span=span: checksum(opened, span.record, span.start, span.end))
            for span in spans
        ]

    with ThreadPoolExecutor(WORKERS) as pool:
        directories = [*pool.map(read_directory, paths)]
        yield from (found for found in directories if isinstance(found, Damage))
        records = [found for found in directories if not isinstance(found, Damage)]
        jobs = [*portions(spans_of(records), lambda span: span.end - span.start, SPAN)]
        crcs = {}
        with bar(sum(map(nbytes_in, jobs)), progress) as show_more:
            for job, of_job in zip(jobs, pool.map(read_spans, jobs), strict=True):
                for span, crc in zip(job, of_job, strict=True):
                    crcs[span.record] = appended(crcs.get(span.record), crc, span)
                show_more(nbytes_in(job))
    for name, record in itertools.chain.from_iterable(found.items() for found in records):
        crc = crcs.get(record, 0)
        if isinstance(crc, Damage):
            yield crc
        elif record.crc not in (crc, None):
            text = f"{record.path} is damaged: {name} does not match its checksum"
            yield Damage(text, record)


def attempt(read):
    """What read() returns, or the Damage that it meets."""
    try:
        return read()
    except (CheckpointError, OSError) as error:
        return Damage(str(error), None, isinstance(error, CheckpointError))


def appended(crc, more, span):
    """The checksum of a record up to the end of a span, from those of what precedes it and of it;
    or the Damage in one of them."""
    if crc is None or isinstance(crc, Damage):
        return more if crc is None else crc
    return more if isinstance(more, Damage) else join_crcs(crc, more, span.end - span.start)


def spans_of(directories):
    for records in directories:
        for record in records.values():
            for start in range(0, record.nbytes, SPAN):
                yield Span(record, start, min(start + SPAN, record.nbytes))


def nbytes_in(spans):
    return sum(span.end - span.start for span in spans)


def weights_not_read(folder):
    """{(path, offset)} of the trained weights in model states: a resume reads the masters."""
    checkpoint = describe(folder, WORKERS).checkpoint
    places = set()
    if compares_weights(checkpoint):
        return places
    for path in paths_of(checkpoint):
        if path.name.endswith("model_states.pt"):
            with contextlib.suppress(CheckpointError):  # a second name, which a conversion leaves
                content = load(path)
                module = plain_keys(content.get("module") or content)
                tensors = [tensor_of(module.get(name)) for name in checkpoint.parameters]
                places |= {place_of(tensor.storage) for tensor in tensors if tensor}
    return places


# --------------------------------------------------------------------------------------------------
# 3. the command


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", help="the folder above the tags, or a checkpoint")
    parser.add_argument("--tag", help="look at this one alone")
    parser.add_argument(
        "--ranks", type=positive, metavar="N", help="data-parallel ranks that shall go on"
    )
    parser.add_argument("--quick", action="store_true", help="compare no checksums")
    parser.add_argument("--json", action="store_true", help="for machines")
    args = parser.parse_args()
    with in_one_line("universal.inspect"):
        view = look(args.folder, args.tag, args.quick, args.ranks, progress=not args.json)
    print_screen(json.dumps(view, indent=1) if args.json else "\n".join(lines_of(view)))
    damaged = (facts["problem"] or facts["unread_damage"] for facts in view["tags"].values())
    sys.exit(1 if any(damaged) else 0)


def positive(text):
    number = int(text)
    if number < 1:
        raise ValueError
    return number


if __name__ == "__main__":
    main()
