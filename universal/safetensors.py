# SPDX-License-Identifier: MIT
"""Write the weights of a DeepSpeed checkpoint as one safetensors file, which transformers and
others read.

    python -m universal.safetensors checkpoints/global_step100 model.safetensors

The input is a ZeRO checkpoint, its parent folder, or a universal checkpoint. The file holds all
parameters, frozen ones too, and persistent buffers; tied weights once. Next to a config.json,
from_pretrained() reads it. This needs nothing but Python 3.10. If the package is installed, the
command is ds_to_safetensors.

A safetensors file consists of a length in 8 bytes, a JSON header that gives the dtype, shape and
place of every tensor, and the tensors one after the other."""

import argparse
import json
import math
import os
import struct
import time
import warnings
from pathlib import Path

from universal.blocks import Joined
from universal.byte_ranges import Reader, width
from universal.checkpoint import describe, left_over
from universal.console import bar, in_one_line, report
from universal.errors import CheckpointError, about
from universal.publish import sync, unfinished
from universal.tags import find_tag
from universal.torch_file import whole

FORMATS = {
    "float64": "F64",
    "float32": "F32",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
}
FORMATS |= {
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "bool": "BOOL",
    "complex64": "C64",
}
FORMATS |= {
    "bfloat16": "BF16",
    "float16": "F16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


def weights(folder, workers, strict):
    """{name: (shape, the source of its bytes)} for the parameters, in fp32, and for what else the
    module keeps."""
    description = describe(folder, workers)
    count = len(description.models)
    if count > 1 or description.models[0]["module"] is None:
        raise CheckpointError(
            f"{folder} has {count} model-parallel ranks or a pipeline: its weights are not exported"
        )
    for text in left_over(description):
        warnings.warn(text, stacklevel=3)
    found = {n: (p.shape, p.states["fp32"]) for n, p in description.parameters.items()}
    lost = []
    for name, tensor in description.kept.items():
        if tensor.dtype not in FORMATS:
            lost.append(name)
            continue
        stride = whole(tensor.dtype, b"", tensor.size).stride  # it may be a view
        block = (0, tensor.size, tensor.stride, tensor.offset, stride, 0)
        found[name] = tensor.size, Joined(name, (tensor.storage,), (block,), math.prod(tensor.size))
    for problem in [
        f"{folder}: safetensors has no place for {name}" for name in (*lost, *description.extra)
    ]:
        if strict:
            raise CheckpointError(f"{problem} (--no_strict leaves it out)")
        warnings.warn(problem, stacklevel=3)
    return found


def header_of(found):
    """(header, names in the order of the file). Wide elements come first, so that all are
    aligned."""
    order = sorted(found, key=lambda name: -width(found[name][1].dtype))
    places = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        shape, source = found[name]
        begin = end
        end += math.prod(shape) * width(source.dtype)
        places[name] = {
            "dtype": FORMATS[source.dtype],
            "shape": shape,
            "data_offsets": (begin, end),
        }
    header = json.dumps(places, ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header, order


def export(input_folder, path, workers=4, *, strict=True, progress=False):
    """Write the weights of a checkpoint to a safetensors file. strict=False leaves out what such a
    file cannot hold. Raises CheckpointError or OSError; no file of that name has then appeared.
    Returns {"source", "output", "parameters", "bytes", "seconds"}."""
    began = time.perf_counter()
    output = Path(os.path.realpath(path))
    source = find_tag(input_folder)
    reader = Reader()
    if output.suffix != ".safetensors" or output.is_dir():
        raise CheckpointError(f"{output} is not the name of a .safetensors file")
    found = weights(source, workers, strict)
    header, order = header_of(found)
    with (
        unfinished(output) as folder,
        bar(sum(s.numel * width(s.dtype) for _, s in found.values()), progress) as shown,
    ):
        with about(folder), open(folder / output.name, "xb", buffering=1 << 20) as file:
            file.write(header)
            for name in order:
                for chunk, _ in found[name][1].chunks(reader):
                    file.write(chunk)
                    shown(len(chunk))
            nbytes = file.tell() - len(header)
        reader.check()
        sync(folder)
        (folder / output.name).rename(output)
        sync(output.parent)
    done = {"source": source, "output": path, "parameters": len(found), "bytes": nbytes}
    return done | {"seconds": time.perf_counter() - began}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("input", help="ZeRO or universal checkpoint")
    parser.add_argument("output", help="the .safetensors file to write")
    parser.add_argument(
        "--no_strict",
        dest="strict",
        action="store_false",
        help="leave out what the file cannot hold",
    )
    args = parser.parse_args()
    with in_one_line("ds_to_safetensors"):
        done = export(args.input, args.output, strict=args.strict, progress=True)
    report(done)


if __name__ == "__main__":
    main()
