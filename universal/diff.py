# SPDX-License-Identifier: MIT
"""Compare two checkpoints, whatever ranks, ZeRO stages or layouts saved them.

    python -m universal.diff checkpoints/global_step100 other/global_step100 [--tolerance 1e-6]

Compares every state of every parameter, in the precision in which it is saved; buffers; the
parameter groups' hyperparameters, the scheduler, the counters and the client state. Exit code 0: no
tensor differs by more than the tolerance, and nothing else; 1: something does; 2: one of them is
damaged, or there is none. Torch is needed only where tensors differ."""

import argparse
import heapq
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from universal.blocks import in_order_of_indices
from universal.byte_ranges import CHUNK, Reader, nbytes_of, width
from universal.checkpoint import describe
from universal.console import bar, in_one_line
from universal.description import Described
from universal.errors import CheckpointError
from universal.module_states import client_state_of
from universal.tags import find_tag
from universal.torch_file import Tensor, number_in, packed

WORST = 10
SIDES = ("first", "second")
COUNTERS = ("global_steps", "skipped_steps", "global_samples")

# --------------------------------------------------------------------------------------------------
# 1. tensors


class Gap(NamedTuple):
    """By how much two tensors differ, at most. elements: how many do.

    absolute: infinity, where only one is a number. relative: to the larger of the two.
    """

    absolute: float
    relative: float
    elements: int
    name: str


class Pair(NamedTuple):
    """Two sources (byte_ranges.py) of the same elements."""

    name: str
    first: Any
    second: Any

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.first)


def sources_of(described: Described) -> dict[str, tuple]:
    """{name: (shape, source)} of every state of every parameter, and of what else is a tensor."""
    checkpoint = described.checkpoint
    sources = {
        f"{name} {key}": (parameter.shape, source)
        for name, parameter in checkpoint.parameters.items()
        for key, source in parameter.states.items()
    }
    for name, tensor in checkpoint.module.tensors.items():
        sources[name] = (tensor.size, in_order_of_indices(name, tensor))
    return sources


def match(first: dict, second: dict) -> tuple[list[Pair], list[str]]:
    """The pairs of what has the same name, and in words what has no partner."""
    pairs = []
    words = []
    alone = first.keys() - second.keys(), second.keys() - first.keys()
    for side, lone in zip(SIDES, alone, strict=True):
        if lone:
            words.append(f"in the {side} alone ({len(lone)}): {', '.join(sorted(lone)[:3])}")
    for name in first.keys() & second.keys():
        (shape, source), (other_shape, other) = first[name], second[name]
        # DeepSpeed's converter may leave only the number of elements.
        if tuple(shape) != tuple(other_shape) and source.numel != other.numel:
            words.append(
                f"{name} is {tuple(shape)} in the first, {tuple(other_shape)} in the second"
            )
        else:
            pairs.append(Pair(name, source, other))
    return sorted(pairs), sorted(words)


def chunks(reader: Reader, source: Any) -> Iterator[bytes]:
    """The bytes of a source in chunks of CHUNK elements, whatever its own chunks are."""
    size = CHUNK * width(source.dtype)
    data = bytearray()
    for chunk, _ in reader.chunks(source):
        data += chunk
        while len(data) >= size:
            yield bytes(data[:size])
            del data[:size]
    yield bytes(data)


def compare(pair: Pair, readers: tuple[Reader, Reader], show_more: Any) -> Gap | None:
    """The Gap between two tensors; None if all of their bytes are the same."""
    absolute = relative = 0.0
    elements = 0
    same_dtype = pair.first.dtype == pair.second.dtype
    streams = map(chunks, readers, pair[1:])
    for first, second in zip(*streams, strict=True):
        show_more(len(first))
        if same_dtype and first == second:
            continue
        gap = gap_of(first, pair.first.dtype, second, pair.second.dtype)
        absolute = max(absolute, gap.absolute)
        relative = max(relative, gap.relative)
        elements += gap.elements
    return Gap(absolute, relative, elements, pair.name) if elements else None


def gap_of(first, dtype, second, other_dtype):
    """The Gap between chunks. Two of the same bits are equal, be they NaN; +0 and -0 are not."""
    import torch

    chunks = [torch.frombuffer(bytearray(first), dtype=getattr(torch, dtype))]
    chunks += [torch.frombuffer(bytearray(second), dtype=getattr(torch, other_dtype))]
    if dtype == other_dtype:
        bits = [chunk.view(torch.uint8).view(len(chunk), -1) for chunk in chunks]
        differ = (bits[0] != bits[1]).any(1)
    else:
        differ = chunks[0].double() != chunks[1].double()
    kind = torch.complex128 if any(chunk.is_complex() for chunk in chunks) else torch.float64
    a, b = (chunk[differ].to(kind) for chunk in chunks)
    if not len(a):
        return Gap(0.0, 0.0, 0, "")
    absolute = (a - b).abs().nan_to_num(math.inf, math.inf)
    larger = torch.maximum(a.abs(), b.abs())
    relative = torch.where(larger > 0, absolute / larger, 0).nan_to_num(math.inf, math.inf)
    return Gap(absolute.max().item(), relative.max().item(), len(a), "")


# --------------------------------------------------------------------------------------------------
# 2. all else


def is_equal(a: Any, b: Any) -> bool:
    """Whether two values that were pickled are the same; tensors, in each of their bytes."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(is_equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and not is_tensor(a, b):
        return len(a) == len(b) and all(map(is_equal, a, b))
    if isinstance(a, (bool, int, float, str)) and a == b:
        return type(a) is type(b)
    return packed(a) == packed(b)


def is_tensor(*values):
    return any(isinstance(value, Tensor) for value in values)


def rest_of(described: Described) -> dict[str, Any]:
    """{what it is: value} of all that is in no tensor of a parameter or of the module."""
    checkpoint, raw = described
    model = raw.models[0]
    rest = {f"counter {key}": model.get(key) for key in COUNTERS}
    rest["scheduler"] = model.get("lr_scheduler")
    rest |= {f"client state {key}": value for key, value in client_state_of(model).items()}
    for i, group in enumerate(checkpoint.optimizer.param_groups):
        rest |= {f"group {i} {key}": group[key] for key in group if key != "params"}
    module = model["module"] or {}
    return rest | {f"module's {name}": module.get(name) for name in checkpoint.module.objects}


def scalars_of(described: Described) -> dict[str, Any]:
    """{state: {parameter: value}} of the states that have no value for each element."""
    scalars = {}
    for name, parameter in described.checkpoint.parameters.items():
        for key, value in parameter.scalars.items():
            scalars.setdefault(key, {})[name] = number_of(value)
    return scalars


def differing_scalars(first: dict, second: dict) -> list[str]:
    """In words, which of them are not the same; those of all parameters in one line."""
    words = []
    for key in sorted(first.keys() | second.keys()):
        ours, theirs = first.get(key, {}), second.get(key, {})
        common = ours.keys() & theirs.keys()
        names = sorted(name for name in common if not is_equal(ours[name], theirs[name]))
        if names:
            of = f"{names[0]} and {len(names) - 1} more" if names[1:] else names[0]
            words.append(f"{key} of {of}: {short(ours[names[0]])}, {short(theirs[names[0]])}")
        elif not common:
            words.append(f"{key} of parameters is in the {SIDES[not ours]} alone")
    return words


def number_of(value):
    """3.0 and 3 are one step count, and torch has both kinds."""
    try:
        return float(number_in(value))
    except (CheckpointError, TypeError, ValueError):
        return value


def differing(first: dict, second: dict) -> list[str]:
    """In words, what is not the same."""
    words = []
    absent = object()
    for key in sorted(first.keys() | second.keys()):
        values = first.get(key, absent), second.get(key, absent)
        if absent in values:
            words.append(f"{key} is in the {SIDES[values[0] is absent]} alone")
        elif not is_equal(*values):
            words.append(f"{key}: {short(values[0])}, {short(values[1])}")
    return words


def short(value):
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# --------------------------------------------------------------------------------------------------
# 3. the command


def diff(first: str, second: str, tolerance: float = 0.0, progress: bool = False) -> dict:
    """Compare the checkpoints in two folders, or in those below them that find_tag() finds.

    Returns: {"folders", "tensors", "equal": how many are so in every bit, "gaps": [Gap] of the
        others, the largest first, "others": what else differs, in words, "same": whether nothing
        differs but by the tolerance}. Raises: CheckpointError, OSError.
    """
    folders = [find_tag(folder) for folder in (first, second)]
    described = [describe(folder) for folder in folders]
    pairs, words = match(*map(sources_of, described))
    readers = Reader(), Reader()
    gaps = []
    with bar(sum(pair.nbytes for pair in pairs), progress) as show_more:
        for pair in pairs:
            if gap := compare(pair, readers, show_more):
                gaps.append(gap)
    for reader in readers:
        reader.check()
    words += differing(*map(rest_of, described))
    words += differing_scalars(*map(scalars_of, described))
    gaps.sort(reverse=True)
    return {
        "folders": [os.fspath(folder) for folder in folders],
        "tensors": len(pairs),
        "equal": len(pairs) - len(gaps),
        "gaps": gaps,
        "others": words,
        "same": not words and all(gap.absolute <= tolerance for gap in gaps),
    }


def lines_of(found: dict, tolerance: float) -> Iterator[str]:
    first, second = found["folders"]
    yield f"{first}, {second}: {found['equal']} of {found['tensors']} tensors are equal bit by bit"
    gaps = found["gaps"]
    if gaps:
        yield f"{'absolute':>9}  {'relative':>9}  {'elements':>9}  the largest differences"
    for gap in heapq.nlargest(WORST, gaps):
        yield f"{gap.absolute:9.1e}  {gap.relative:9.1e}  {gap.elements:9,}  {gap.name}"
    if len(gaps) > WORST:
        yield f"and {len(gaps) - WORST} more"
    words = found["others"]
    yield from words[: 2 * WORST]
    if len(words) > 2 * WORST:
        yield f"and {len(words) - 2 * WORST} more"
    worst = gaps[0].absolute if gaps else 0.0
    verdict = "SAME" if found["same"] else "DIFFERENT"
    more = f"{worst:.1e}, tolerance {tolerance:g}" if gaps else "nothing differs in a tensor"
    yield f"{verdict}: {more}"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("first", type=Path, help="a checkpoint, or the folder above it")
    parser.add_argument("second", type=Path)
    parser.add_argument(
        "--tolerance", type=float, default=0.0, help="how far apart numbers may be; default: 0"
    )
    args = parser.parse_args()
    with in_one_line("universal.diff"):
        found = diff(args.first, args.second, args.tolerance, progress=True)
    print("\n".join(lines_of(found, args.tolerance)))
    sys.exit(0 if found["same"] else 1)


if __name__ == "__main__":
    main()
