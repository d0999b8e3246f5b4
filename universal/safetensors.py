# SPDX-License-Identifier: MIT
"""Write the weights of a DeepSpeed checkpoint as one safetensors file, which transformers and
others read.

    python -m universal.safetensors checkpoints/global_step100 model.safetensors

The input is a ZeRO checkpoint, its parent folder, or a universal checkpoint. The file holds all
parameters, frozen ones too, and persistent buffers; tied weights once. Next to a config.json,
from_pretrained() reads it. If the package is installed, the
command is ds_to_safetensors.

A safetensors file consists of a length in 8 bytes, a JSON header that gives the dtype, shape and
place of every tensor, and the tensors one after the other."""

import argparse
import json
import os
import struct
import time
import warnings
from pathlib import Path
from typing import NamedTuple

from universal.checkpoint.describe import describe, left_over
from universal.checkpoint.tags import find_tag
from universal.errors import CheckpointError, naming
from universal.files.joined import strided
from universal.files.sources import ByteReader, Source, nbytes_of, width
from universal.write.console import bar, in_one_line, report, totals
from universal.write.publish import sync, unfinished

FORMAT_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "bool": "BOOL",
    "complex64": "C64",
    "bfloat16": "BF16",
    "float16": "F16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


class Weight(NamedTuple):
    """A tensor of the file. source: of its elements."""

    shape: tuple
    source: Source


def weights_of(folder: Path, workers: int, strict: bool) -> dict[str, Weight]:
    """The parameters, in fp32, and what else the module keeps, by name."""
    checkpoint, raw = describe(folder, workers)
    count = len(raw.models)
    if count > 1 or raw.models[0]["module"] is None:
        raise CheckpointError(
            f"{folder} has {count} model-parallel ranks or a pipeline: its weights are not exported"
        )
    for text in left_over(checkpoint):
        warnings.warn(text, stacklevel=3)
    weights = {
        name: Weight(parameter.shape, parameter.states["fp32"])
        for name, parameter in checkpoint.parameters.items()
    }
    for name, tensor in checkpoint.module.tensors.items():
        weights[name] = Weight(tensor.size, strided(name, tensor))
    lost = [name for name, weight in weights.items() if weight.source.dtype not in FORMAT_NAMES]
    for name in (*lost, *checkpoint.module.objects):
        problem = f"{folder}: safetensors has no place for {name}"
        if strict:
            raise CheckpointError(f"{problem} (--no_strict leaves it out)")
        warnings.warn(problem, stacklevel=3)
    return {name: weight for name, weight in weights.items() if name not in lost}


def in_file_order(weights):
    """Wide elements come first, so that all are aligned."""
    return dict(sorted(weights.items(), key=lambda item: -width(item[1].source.dtype)))


def header_of(weights):
    """What a file begins with that has these weights, in their order."""
    entries = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, source) in weights.items():
        begin = end
        end += nbytes_of(source)
        entries[name] = {
            "dtype": FORMAT_NAMES[source.dtype],
            "shape": shape,
            "data_offsets": (begin, end),
        }
    header = json.dumps(entries, ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header


def export(
    input_folder: str, path: str, workers: int = 4, *, strict: bool = True, progress: bool = False
) -> dict:
    """Write the weights of a checkpoint to a safetensors file.

    strict=False leaves out what such a file cannot hold.

    Returns: {"source", "output", "parameters", "bytes", "seconds"}.

    Raises: CheckpointError or OSError; no file of that name has then appeared.
    """
    began = time.perf_counter()
    output = Path(os.path.realpath(path))
    source = find_tag(input_folder)
    reader = ByteReader()
    if output.suffix != ".safetensors" or output.is_dir():
        raise CheckpointError(f"{output} is not the name of a .safetensors file")
    weights = in_file_order(weights_of(source, workers, strict))
    sizes = [nbytes_of(weight.source) for weight in weights.values()]
    with unfinished(output) as folder, bar(sum(sizes), progress) as show_more:
        with naming(folder), open(folder / output.name, "xb", buffering=1 << 20) as file:
            file.write(header_of(weights))
            for weight in weights.values():
                for chunk, _ in reader.chunks(weight.source):
                    file.write(chunk)
                    show_more(len(chunk))
        reader.check()
        sync(folder)
        (folder / output.name).rename(output)
        sync(output.parent)
    return totals(source, path, weights, sizes, began)


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
