# SPDX-License-Identifier: MIT
"""Compare two checkpoints, whatever ranks, ZeRO stages or layouts saved them.

    python -m universal.diff checkpoints/global_step100 other/global_step100 [--tolerance 1e-6]

It compares every state of every parameter, in its saved precision; buffers and frozen
parameters; parameter groups, the scheduler, counters and the client state. Equal means the same
bits: -0 is not 0, and NaN is NaN. With --tolerance, numbers in tensors may differ by X; NaN equals
NaN alone. Exit code 0: equal; 1: different; 2: one is damaged, or there is none.
If the package is installed, the command is ds_diff.
"""

import argparse
import math
import os
import reprlib
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from universal.checkpoint.describe import describe
from universal.checkpoint.module_states import client_state_of
from universal.checkpoint.same_step import weights_set
from universal.checkpoint.tags import find_tag
from universal.checkpoint.types import Checkpoint, Limit
from universal.checkpoint.zero import Slices, is_computed_anew
from universal.files.joined import strided
from universal.files.same import is_same
from universal.files.sources import ByteReader, Source, nbytes_of
from universal.files.torch_file import number_in
from universal.write.console import in_one_line, print_screen, short, size, wrapped
from universal.write.publish import wait

THREADS = 4
PIECE = 1 << 18  # elements that are compared at once
WORST = 10
TOLD = 3  # differences of a kind that a line names
COUNTERS = ("global_steps", "skipped_steps", "global_samples", "data_sampler", "random_ltd")


def diff(first: str, second: str, tolerance: float = 0.0) -> dict[str, Any]:
    """Compare the checkpoints in two folders, or in those below them that find_tag() finds.

    Returns: {"folders", "tolerance", "same": whether they are equal, "tensors": how many both have,
    "equal": how many of these bit by bit, "bytes", "gaps": [Gap of another], the largest first,
    "others": what else differs, in lines}.
    Raises: CheckpointError, if one of them is damaged; OSError.
    """
    wait()  # for saves in the background
    checkpoints = [describe(find_tag(folder), THREADS) for folder in (first, second)]
    pairs, kinds = match(*map(tensors_of, checkpoints))
    words = differing("tensor", *kinds)
    rest, other = map(rest_of, checkpoints)
    for kind in rest | other:
        words += differing(kind, rest.get(kind, {}), other.get(kind, {}))
    words += dict.fromkeys(text for side in checkpoints for text in not_comparable(side))
    reader = ByteReader()
    equal = equal_flats(pairs, reader)
    others = [pair for pair in pairs if flat_of(pair) not in equal]
    gaps = [gap for gap in reader.in_threads(others, gap_of, THREADS) if gap.elements]
    reader.check()  # each record once, whatever tensors are in it
    gaps.sort(key=lambda gap: (-gap.absolute, gap.name))
    limit = tolerance or -1  # without one, numbers of other bits differ, even if by 0
    return {
        "folders": [os.fspath(checkpoint.folder) for checkpoint in checkpoints],
        "tolerance": tolerance,
        "same": not words and all(gap.absolute <= limit for gap in gaps),
        "tensors": len(pairs),
        "equal": len(pairs) - len(gaps),
        "bytes": sum(nbytes_of(source) for _, source, _ in pairs),
        "gaps": gaps,
        "others": words,
    }


# --------------------------------------------------------------------------------------------------
# 1. tensors


class Gap(NamedTuple):
    """The largest difference between two tensors. relative: to the larger number; infinity if one
    is not finite. elements: how many differ. of: how many there are."""

    name: str
    absolute: float
    relative: float
    elements: int
    of: int


def tensors_of(checkpoint: Checkpoint) -> dict[str, tuple[tuple, Source]]:
    """Returns {name: (shape, source)} of all states of parameters, and of all other tensors."""
    tensors = {
        f"{name} {key}": (parameter.shape, source)
        for name, parameter in checkpoint.parameters.items()
        for key, source in parameter.states.items()
    }
    names = checkpoint.module.keys() - checkpoint.parameters.keys()
    others = {name: checkpoint.module[name] for name in names}
    others |= {f"{name} set by a script": tensor for name, tensor in weights_set(checkpoint)}
    for name, tensor in others.items():
        tensors[name] = (tensor.size, strided(name, tensor))
    return tensors


def match(first, second):
    """Returns [(name, source, source)] of what can be compared, and for each side {name: [dtype,
    *shape]}."""
    pairs = []
    kinds = [
        {name: [source.dtype, *shape] for name, (shape, source) in tensors.items()}
        for tensors in (first, second)
    ]
    for name in first.keys() & second.keys():
        shape, source = first[name]
        other_shape, other = second[name]
        if source.numel == other.numel:
            pairs.append((name, source, other))
            if 1 in (len(shape), len(other_shape)):  # DeepSpeed's converter may flatten it
                kinds[1][name] = [other.dtype, *shape]
    return pairs, kinds


def flat_of(pair):
    """What is the same for all tensors of one flat tensor that both sides have cut alike, such as
    exp_avg of a parameter group; None for any other."""
    _, first, second = pair
    # Each frozen parameter of ZeRO-3 has extents of its own, which are no flat tensor.
    is_cut = all(isinstance(of, Slices) and type(of.extents) is tuple for of in (first, second))
    if is_cut and (first.cut, first.dtype) == (second.cut, second.dtype):
        return id(first.extents), id(second.extents)


def equal_flats(pairs: list[tuple], reader: ByteReader) -> set:
    """Compare what ranks have of the flat tensors that both sides have cut alike: a few long reads
    in place of one for each parameter and rank. Returns flat_of() of those that are equal."""
    flats = {flat_of(pair): pair for pair in pairs}
    flats.pop(None, None)
    jobs = [
        (flat, *extents)
        for flat, (_, first, second) in flats.items()
        for extents in zip(first.extents, second.extents, strict=False)
    ]

    def differs(job, reader):
        _, first, second = job
        return first.numel != second.numel or any(a != b for a, b in pieces(first, second, reader))

    results = [*reader.in_threads(jobs, differs, THREADS)]
    different = {flat for (flat, *_), is_other in zip(jobs, results, strict=True) if is_other}
    for flat, *extents in jobs:
        for extent in extents * (flat in different):
            reader.spans.pop(extent.record, None)  # it is read again
    return flats.keys() - different


def pieces(first: Source, second: Source, reader: ByteReader) -> Iterator[tuple]:
    """Yields the bytes of both, PIECE elements at a time."""
    for start in range(0, first.numel, PIECE):
        numel = min(PIECE, first.numel - start)
        yield reader.read(first, start, numel), reader.read(second, start, numel)


def gap_of(pair: tuple[str, Source, Source], reader: ByteReader) -> Gap:
    """Compare two tensors. Returns their Gap, of 0 elements if they are equal."""
    name, first, second = pair
    gap = Gap(name, 0.0, 0.0, 0, first.numel)
    for a, b in pieces(first, second, reader):
        if a != b or first.dtype != second.dtype:
            absolute, relative, elements = compare(a, first.dtype, b, second.dtype)
            gap = gap._replace(
                absolute=max(gap.absolute, absolute),
                relative=max(gap.relative, relative),
                elements=gap.elements + elements,
            )
    return gap


def compare(data: bytearray, dtype: str, other: bytearray, other_dtype: str) -> tuple:
    """Returns the largest absolute and relative differences, and how many numbers differ."""
    import torch  # 2 seconds, which equal checkpoints do without

    a = torch.frombuffer(data, dtype=getattr(torch, dtype))
    b = torch.frombuffer(other, dtype=getattr(torch, other_dtype))
    wide = torch.complex128 if a.is_complex() else torch.float64
    x = a.to(wide)
    y = b.to(wide)
    differ = x != y
    if a.dtype == b.dtype:
        bits = a.view(torch.uint8) != b.view(torch.uint8)
        differ = bits.view(len(a), -1).any(1)
    absolute = (x - y).abs()
    absolute[~differ | x.isnan() & y.isnan()] = 0
    absolute = absolute.nan_to_num(math.inf, math.inf)
    larger = torch.maximum(x.abs(), y.abs())
    relative = (absolute / larger).nan_to_num(0, math.inf)
    return absolute.max().item(), relative.max().item(), differ.sum().item()


# --------------------------------------------------------------------------------------------------
# 2. all else


def rest_of(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    """Returns {kind: {name: value}} of all that tensors_of() does not return."""
    optimizer = checkpoint.optimizer
    model = checkpoint.model
    scaler = getattr(checkpoint.shard.get("loss_scaler"), "state", None) or {}
    objects = model["module"] or {}
    rest = {
        "counter": {key: model.get(key) for key in COUNTERS} | {"scale": scaler.get("cur_scale")},
        "client state": client_state_of(model),
        "optimizer's": optimizer.extra_states | optimizer.extra_keys,
        "module's": {name: objects[name] for name in objects.keys() - checkpoint.module.keys()},
        "group of": {name: p.group_number for name, p in checkpoint.parameters.items()},
    }
    scheduler = model.get("lr_scheduler")
    rest["scheduler"] = scheduler if isinstance(scheduler, dict) else {"state": scheduler}
    for i, group in enumerate(optimizer.param_groups):
        rest[f"group {i}"] = group | {"params": None}
    for name, parameter in checkpoint.parameters.items():
        for key, value in parameter.scalars.items():
            if not is_computed_anew(key, optimizer.param_groups):
                rest.setdefault(f"{key} of", {})[name] = number_in(value)
    return rest


def differing(kind: str, first: dict, second: dict) -> list[str]:
    """Returns a list with a line that names differences of a kind; without any, an empty one."""
    texts = []
    for name in first | second:
        a, b = first.get(name, "nothing"), second.get(name, "nothing")
        if not is_same(a, b):
            texts.append(f"{name}: {reprlib.repr(a)}, {reprlib.repr(b)}")
    if len(texts) > TOLD:
        texts[TOLD:] = [f"and {len(texts) - TOLD} more"]
    return [f"{kind} {'; '.join(texts)}"] if texts else []


def not_comparable(checkpoint):
    """Yields in words what belongs to one rank, and so is not compared."""
    for problem in checkpoint.problems:
        if problem.state is not None:
            of_rank = f"{problem.state} of the optimizer belongs to a rank"
            yield f"{checkpoint.folder}: {of_rank}: it is not compared"
        if problem.limit is Limit.RANKS:
            yield f"{problem.text}: the first alone is compared"


# --------------------------------------------------------------------------------------------------
# 3. the command


def screen_lines(view: dict[str, Any]) -> list[str]:
    """Returns the lines of the screen. view: what diff() returns."""
    gaps = view["gaps"]
    first, second = view["folders"]
    lines = [
        f"{first} and {second}:",
        f"{view['equal']} of {view['tensors']} tensors equal bit by bit, "
        f"{size(view['bytes'])} compared",
    ]
    if gaps:
        lines.append(f"{'absolute':>10}{'relative':>10}{'elements':>20}")
    for gap in gaps[:WORST]:
        elements = f"{short(gap.elements)} of {short(gap.of)}"
        numbers = f"{gap.absolute:10.1e}{gap.relative:10.1e}{elements:>20}"
        lines.append(f"{numbers}  {gap.name}")
    if len(gaps) > WORST:
        lines.append(f"and {len(gaps) - WORST} more tensors")
    for text in view["others"]:
        lines += wrapped(text)
    numbers = "both have the same bits"
    if gaps:
        limit = f", and may by {view['tolerance']:g}" if view["tolerance"] else ""
        numbers = f"numbers differ by at most {gaps[0].absolute:.1e}{limit}"
    if view["same"]:
        return [*lines, f"EQUAL: {numbers}, and all else is the same"]
    rest = ", and other things differ (see above)" if view["others"] else ""
    return [*lines, f"DIFFERENT: {numbers}{rest}"]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("first", help="a checkpoint, or the folder above it")
    parser.add_argument("second")
    parser.add_argument("--tolerance", type=float, default=0.0, metavar="X")
    args = parser.parse_args()
    with in_one_line("universal.diff"):
        view = diff(args.first, args.second, args.tolerance)
        print_screen("\n".join(screen_lines(view)))
    sys.exit(0 if view["same"] else 1)


if __name__ == "__main__":
    main()
