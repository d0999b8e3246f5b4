# SPDX-License-Identifier: MIT
"""Compare two checkpoints, whatever ranks, ZeRO stages or layouts saved them.

    python -m universal.diff checkpoints/global_step100 other/global_step100 [--tolerance 1e-6]

Compares every state of every parameter, in the precision in which it is saved; buffers and frozen
parameters; hyperparameters, the scheduler, the counters and the client state. Exit code 0: no
number of a tensor differs by more than the tolerance, and nothing else differs; 1: something does;
2: one of them is damaged, or there is none. Torch is needed only where numbers differ. If the
package is installed, the command is ds_diff.

--json prints an object with these keys:

    folders: the two that were compared
    tolerance: as it was given
    same: whether the exit code is 0
    tensors: how many both sides have
    equal: how many of them are equal bit by bit
    bytes: compared on each side
    gaps: the other tensors, the largest difference first
    others: what else differs, in lines

The keys of a gap:

    name: of the parameter and its state, or of the buffer
    of: its elements
    absolute: the largest difference; null if only one of two is a finite number
    relative: the largest, to the larger of two numbers; null likewise
    elements: how many differ
"""

import argparse
import json
import math
import os
import sys
from array import array
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from universal.checkpoint.describe import describe
from universal.checkpoint.module_states import client_state_of
from universal.checkpoint.tags import find_tag
from universal.checkpoint.types import Described
from universal.checkpoint.zero import is_computed_anew
from universal.errors import CheckpointError
from universal.files.joined import strided
from universal.files.same import is_same
from universal.files.sources import (
    ByteReader,
    Source,
    check_all,
    keep_open,
    nbytes_of,
    portions,
    width,
)
from universal.files.torch_file import Stub, Tensor, number_in
from universal.write.console import bar, in_one_line, print_screen
from universal.write.screen import WIDTH, counted, short, size, wrapped

THREADS = 4
PER_JOB = 1 << 24  # bytes that a thread compares in one go, and by which the progress bar moves
PER_READ = 1 << 18  # bytes
PER_GAP = 1 << 16  # elements of which torch gets copies in float64
WORST = 10
LONGEST_TEXT = 60
SIDES = ("first", "second")
COMPARED_COUNTERS = (
    "global_steps",
    "skipped_steps",
    "global_samples",
    "data_sampler",
    "random_ltd",
)

# --------------------------------------------------------------------------------------------------
# 1. what there is to compare


class Pair(NamedTuple):
    """Two sources of the same elements."""

    name: str
    first: Source
    second: Source


class Section(NamedTuple):
    """Elements of a pair."""

    pair: Pair
    start: int
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * width(self.pair.first.dtype)


def sources_of(described: Described) -> dict[str, tuple]:
    """{name: (shape, source)} of every state of every parameter, and of what else is a tensor."""
    checkpoint, raw = described
    parameters = checkpoint.parameters.items()
    keys = dict.fromkeys(key for _, parameter in parameters for key in parameter.states)
    sources = {
        f"{name} {key}": (parameter.shape, parameter.states[key])
        for key in keys  # so neighbors are read one after the other
        for name, parameter in parameters
        if key in parameter.states
    }
    tensors = checkpoint.module.tensors
    for name, tensor in tensors.items():
        sources[name] = (tensor.size, strided(name, tensor))
    return sources


def match(first: dict, second: dict) -> tuple[list[Pair], list[str]]:
    """The pairs of what has the same name, and in words what has no partner, or another dtype."""
    pairs = []
    words = []
    for side, lone in zip(SIDES, (first.keys() - second, second.keys() - first), strict=True):
        if lone:
            names = ", ".join(sorted(lone)[:3])
            words.append(f"in the {side} alone, {counted(len(lone), 'tensor')}: {names}")
    dtypes = {}
    for name in (name for name in first if name in second):
        (shape, source), (other_shape, other) = first[name], second[name]
        if source.dtype != other.dtype:
            dtypes.setdefault((source.dtype, other.dtype), []).append(name)
        # DeepSpeed's converter may leave only the number of elements.
        if tuple(shape) != tuple(other_shape) and (
            source.numel != other.numel or 1 not in (len(shape), len(other_shape))
        ):
            sizes = f"{tuple(shape)} in the first, {tuple(other_shape)} in the second"
            words.append(f"{name} is {sizes}")
        else:
            pairs.append(Pair(name, source, other))
    for (dtype, other), names in dtypes.items():
        of = f"{names[0]} and {len(names) - 1} more" if names[1:] else names[0]
        words.append(f"{dtype} in the first, {other} in the second: {of}")
    return pairs, words


def pieces_of(pairs: Iterable[Pair]) -> Iterator[Section]:
    for pair in pairs:
        numel = pair.first.numel
        per_piece = max(1, PER_JOB // width(pair.first.dtype))
        for start in range(0, numel, per_piece):
            yield Section(pair, start, min(per_piece, numel - start))


# --------------------------------------------------------------------------------------------------
# 2. tensors


class Gap(NamedTuple):
    """By how much two tensors differ, at most. elements: how many do.

    absolute: infinity, where only one is a number. relative: to the larger of the two.
    """

    absolute: float
    relative: float
    elements: int

    def joined(self, other: "Gap") -> "Gap":
        return Gap(
            max(self.absolute, other.absolute),
            max(self.relative, other.relative),
            self.elements + other.elements,
        )


NO_GAP = Gap(0.0, 0.0, 0)


def compare(piece: Section, readers: tuple[ByteReader, ByteReader]) -> Gap:
    """By how much the elements of a piece differ. Raises: CheckpointError, OSError."""
    sources = piece.pair[1:]
    dtypes = [source.dtype for source in sources]
    per_read = max(1, PER_READ // max(map(width, dtypes)))
    end = piece.start + piece.numel
    gap = NO_GAP
    for start in range(piece.start, end, per_read):
        numel = min(per_read, end - start)
        first, second = (
            reader.read(source, start, numel)
            for reader, source in zip(readers, sources, strict=True)
        )
        if dtypes[0] != dtypes[1] or first != second:
            gap = gap.joined(gap_of(first, second, *dtypes))
    return gap


def gap_of(first: bytearray, second: bytearray, dtype: str, other_dtype: str) -> Gap:
    """The Gap between elements. Two of the same bits are equal, be they NaN; +0 and -0 are not."""
    try:
        import torch
    except ImportError:
        raise CheckpointError("numbers differ, and only torch tells by how much") from None
    a = torch.frombuffer(first, dtype=getattr(torch, dtype))
    b = torch.frombuffer(second, dtype=getattr(torch, other_dtype))
    gap = NO_GAP
    for parts in zip(a.split(PER_GAP), b.split(PER_GAP), strict=True):
        gap = gap.joined(gap_of_tensors(*parts))
    return gap


def gap_of_tensors(a, b):
    import torch

    kind = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    if a.dtype == b.dtype:
        bits = [part.view(torch.uint8).view(len(part), -1) for part in (a, b)]
        differ = (bits[0] != bits[1]).any(1)
    else:
        differ = a.to(kind) != b.to(kind)
    a, b = a[differ].to(kind), b[differ].to(kind)
    if not len(a):
        return NO_GAP
    absolute = (a - b).abs().nan_to_num(math.inf, math.inf)
    larger = torch.maximum(a.abs(), b.abs())
    relative = torch.where(larger > 0, absolute / larger, 0).nan_to_num(math.inf, math.inf)
    return Gap(absolute.max().item(), relative.max().item(), len(a))


def compare_all(pairs: list[Pair], progress: bool) -> dict[str, Gap]:
    """The Gap of each pair, by its name.

    Raises: CheckpointError, also if what was read does not match its checksum; OSError.
    """
    opened = keep_open()

    def compare_job(job):
        readers = ByteReader(opened), ByteReader(opened)
        return [compare(piece, readers) for piece in job], readers

    gaps = {pair.name: NO_GAP for pair in pairs}
    spans = {}
    jobs = [*portions(pieces_of(pairs), lambda piece: piece.nbytes, PER_JOB)]
    total = sum(piece.nbytes for job in jobs for piece in job)
    with ThreadPoolExecutor(THREADS) as pool, bar(total, progress) as show_more:
        for job, (of_job, readers) in zip(jobs, pool.map(compare_job, jobs), strict=True):
            for piece, gap in zip(job, of_job, strict=True):
                gaps[piece.pair.name] = gaps[piece.pair.name].joined(gap)
                show_more(piece.nbytes)
            for reader in readers:
                for record, more in reader.spans.items():
                    spans.setdefault(record, array("Q")).extend(more)
    check_all(spans, opened)
    return gaps


# --------------------------------------------------------------------------------------------------
# 3. all else


def rest_of(described: Described) -> dict[str, Any]:
    """{what it is: value} of all that is in no tensor of a parameter or of the module."""
    checkpoint, raw = described
    model = raw.models[0]
    optimizer = checkpoint.optimizer
    rest = {f"counter {key}": model[key] for key in COMPARED_COUNTERS if model.get(key) is not None}
    rest["scheduler"] = model.get("lr_scheduler")
    rest |= {f"client state {key}": value for key, value in client_state_of(model).items()}
    for i, group in enumerate(optimizer.param_groups):
        rest |= {f"group {i} {key}": group[key] for key in group if key != "params"}
    extra = optimizer.extra_states | optimizer.extra_keys
    rest |= {f"optimizer's {key}": value for key, value in extra.items()}
    scaler = raw.optimizer.get("loss_scaler")
    if isinstance(scaler, Stub) and isinstance(scaler.state, dict) and scaler.state.get("dynamic"):
        rest["loss scale"] = {key: scaler.state.get(key) for key in ("cur_scale", "cur_iter")}
    module = model["module"] or {}
    return rest | {f"module's {name}": module.get(name) for name in checkpoint.module.objects}


ABSENT = object()


def differing(first: dict, second: dict) -> list[str]:
    """In words, what is not the same; of dicts, which of their entries."""
    words = []
    for key in sorted(first.keys() | second.keys(), key=str):
        values = first.get(key, ABSENT), second.get(key, ABSENT)
        if ABSENT in values:
            words.append(f"{key} is in the {SIDES[values[0] is ABSENT]} alone")
        elif all(isinstance(value, dict) for value in values):
            words += (f"{key} {text}" for text in differing(*values))
        elif not is_same(*values):
            words.append(f"{key}: {', '.join(texts_of(values))}")
    return words


def scalars_of(described: Described) -> dict[str, dict]:
    """{state: {parameter: value}} of the states that have no value for each element."""
    scalars = {}
    for name, parameter in described.checkpoint.parameters.items():
        for key, value in parameter.scalars.items():
            if not is_computed_anew(key, described.checkpoint.optimizer.param_groups):
                scalars.setdefault(key, {})[name] = number_of(value)
    return scalars


def number_of(value):
    """3.0 and 3 are one step count, and torch has both kinds."""
    try:
        return float(number_in(value))
    except (CheckpointError, TypeError, ValueError):
        return value


def differing_scalars(first: dict, second: dict) -> list[str]:
    """In words, which of them are not the same; those of all parameters in one line."""
    words = []
    for key in sorted(first.keys() | second.keys()):
        values, others = first.get(key, {}), second.get(key, {})
        common = values.keys() & others.keys()
        names = sorted(name for name in common if not is_same(values[name], others[name]))
        if names:
            of = f"{names[0]} and {len(names) - 1} more" if names[1:] else names[0]
            pair = texts_of((values[names[0]], others[names[0]]))
            words.append(f"{key} of {of}: {', '.join(pair)}")
        elif not common:
            words.append(f"{key} of parameters is in the {SIDES[not values]} alone")
    return words


def not_comparable(described: Described) -> Iterator[str]:
    """In words, what belongs to a rank, and has no partner on others."""
    checkpoint = described.checkpoint
    for key in sorted({str(key) for _, key in checkpoint.optimizer.rank_dependent}):
        yield f"{checkpoint.folder}: {key} of the optimizer belongs to a rank: it is not compared"
    for problem in checkpoint.problems:
        if problem.of_ranks:
            yield f"{problem.text}: the first alone is compared"


def texts_of(values):
    """Two values in words: short, if that tells them apart."""
    texts = [short(value) for value in values]
    if texts[0] == texts[1]:
        texts = [*map(repr, values)]
    return [text_of(*pair) for pair in zip(values, texts, strict=True)]


def text_of(value, text):
    if isinstance(value, Tensor):
        return f"a tensor of {tuple(value.size)}"
    if isinstance(value, Stub):
        return f"a {type(value).__qualname__}"
    return text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 3]}..."


# --------------------------------------------------------------------------------------------------
# 4. the command


def diff(first: str, second: str, tolerance: float = 0.0, progress: bool = False) -> dict[str, Any]:
    """Compare the checkpoints in two folders, or in those below them that find_tag() finds.

    Returns: lists, dicts, numbers and text; the module's docstring explains each key.
    Raises: CheckpointError, if one of them is damaged, or cannot be read.
    """
    try:
        folders = [find_tag(folder) for folder in (first, second)]
        described = [describe(folder, THREADS) for folder in folders]
        pairs, words = match(*map(sources_of, described))
        gaps = compare_all(pairs, progress)
        words += differing(*map(rest_of, described))
        words += differing_scalars(*map(scalars_of, described))
        words += dict.fromkeys(text for side in described for text in not_comparable(side))
    except OSError as error:
        raise CheckpointError(error) from error
    worst = [
        {"name": pair.name, "of": pair.first.numel} | gaps[pair.name]._asdict()
        for pair in pairs
        if gaps[pair.name].elements
    ]
    worst.sort(key=lambda gap: (-gap["absolute"], gap["name"]))
    return {
        "folders": [os.fspath(folder) for folder in folders],
        "tolerance": tolerance,
        "same": not words and all(gap["absolute"] <= tolerance for gap in worst),
        "tensors": len(pairs),
        "equal": len(pairs) - len(worst),
        "bytes": sum(nbytes_of(pair.first) for pair in pairs),
        "gaps": worst,
        "others": words,
    }


def screen_lines(view: dict[str, Any]) -> Iterator[str]:
    """The screen. view: what diff() returns."""
    first, second = view["folders"]
    yield from wrapped(f"{first} and {second}:")
    tensors = counted(view["tensors"], "tensor")
    yield f"{view['equal']} of {tensors} equal bit by bit, {size(view['bytes'])} compared"
    gaps = view["gaps"]
    if gaps:
        yield f"{'absolute':>10}{'relative':>10}{'elements':>20}"
    for gap in gaps[:WORST]:
        elements = f"{short(gap['elements'])} of {short(gap['of'])}"
        line = f"{gap['absolute']:10.1e}{gap['relative']:10.1e}{elements:>20}  "
        yield line + fitting(gap["name"], WIDTH - len(line))
    if len(gaps) > WORST:
        yield f"and {counted(len(gaps) - WORST, 'more tensor')}"
    words = view["others"]
    for text in words[: 2 * WORST]:
        yield from wrapped(text)
    if len(words) > 2 * WORST:
        yield f"and {len(words) - 2 * WORST} more lines"
    yield verdict(view)


def fitting(name, width):
    """A name of at most so many characters: its middle goes."""
    half = (width - 3) // 2
    return name if len(name) <= width else f"{name[:half]}...{name[-half:]}"


def verdict(view):
    if not view["tensors"]:
        return "DIFFERENT: no tensor is in both"
    limit = f", and may by {view['tolerance']:g}" if view["tolerance"] else ""
    numbers = "both have the same bits"
    if view["gaps"]:
        numbers = f"numbers differ by at most {view['gaps'][0]['absolute']:.1e}{limit}"
    if view["same"]:
        return f"EQUAL: {numbers}, and all else is the same"
    rest = ", and other things differ (see above)" if view["others"] else ""
    return f"DIFFERENT: {numbers}{rest}"


def jsonable(view):
    """JSON has no infinity."""
    gaps = [
        {key: None if value == math.inf else value for key, value in gap.items()}
        for gap in view["gaps"]
    ]
    return view | {"gaps": gaps}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("first", help="a checkpoint, or the folder above it")
    parser.add_argument("second")
    parser.add_argument(
        "--tolerance",
        type=tolerance,
        default=0.0,
        metavar="X",
        help="how far apart numbers of tensors may be; default: 0",
    )
    parser.add_argument("--json", action="store_true", help="for machines")
    args = parser.parse_args()
    with in_one_line("universal.diff"):
        view = diff(args.first, args.second, args.tolerance, progress=not args.json)
    text = json.dumps(jsonable(view), indent=1) if args.json else "\n".join(screen_lines(view))
    print_screen(text)
    sys.exit(0 if view["same"] else 1)


def tolerance(text):
    number = float(text)
    if not number >= 0:
        raise ValueError
    return number


if __name__ == "__main__":
    main()
