# SPDX-License-Identifier: MIT
"""Compare weights with their masters, rounded to the precision of the weights."""

import math
import struct

from universal.files.joined import strided
from universal.files.sources import ByteReader, Source
from universal.files.torch_file import Tensor

ROUNDED = ("float32", "float16", "bfloat16")  # precisions of weights beside float32 masters
COMPARED_WEIGHTS = 64  # elements of a weight that are compared with its masters
PLACES_IN_A_SLICE = 4  # the first may be the padding of an embedding


def has_values_of(weight: Tensor, masters: Source, reader: ByteReader) -> bool:
    """Whether a weight is its masters, rounded. A few elements of each rank's slice are compared;
    True if the dtypes cannot be."""
    if math.prod(weight.size) != masters.numel:
        return False
    if masters.dtype != "float32" or weight.dtype not in ROUNDED:
        return True
    in_order = strided("a weight", weight)  # stored in another order, as channels_last may be
    start = 0
    for _, _, numel in masters.parts(0, masters.numel):
        end = start + numel
        for place in range(start, end, max(COMPARED_WEIGHTS, numel // PLACES_IN_A_SLICE)):
            count = min(COMPARED_WEIGHTS, end - place)
            floats = reader.read(masters, place, count)
            if reader.read(in_order, place, count) != rounded(floats, weight.dtype):
                return False
        start = end
    return True


def rounded(floats: bytes, dtype: str) -> bytes:
    """The bytes of float32 numbers in one of the precisions ROUNDED."""
    if dtype == "float32":
        return floats
    numel = len(floats) // 4
    if dtype == "float16":
        numbers = struct.unpack(f"<{numel}f", floats)
        limited = [x if abs(x) < 65520 else math.copysign(math.inf, x) for x in numbers]
        return struct.pack(f"<{numel}e", *limited)
    halves = []  # bfloat16: half of a float, rounded to even
    for word in struct.unpack(f"<{numel}I", floats):
        is_odd = word >> 16 & 1
        halves.append((word + 0x7FFF + is_odd) >> 16)
    return struct.pack(f"<{numel}H", *halves)
