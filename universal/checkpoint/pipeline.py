# SPDX-License-Identifier: MIT
"""Tied layers, which the stages of a pipeline share."""

from universal.checkpoint.rounded import has_values_of
from universal.files.joined import Joined
from universal.files.sources import ByteReader
from universal.files.torch_file import has_gaps, tensor_of


def is_tied(name: str) -> bool:
    """Whether this is the name of a parameter that several layers of a pipeline share."""
    return name.startswith("tied_modules.")


def without_tied(module: dict, rank: int, parameters: dict, reader: ByteReader) -> dict:
    """Remove tied parameters from what the files of a pipeline's layers hold.

    An entry is tied if it has the values of a tied parameter of that name: an untied layer may use
    the name, too. module: {layer number.name: value}. rank: the tensor-parallel rank that saved it.
    """
    parts = {}
    for name in filter(is_tied, parameters):
        masters = parameters[name].states["fp32"]
        parts[name] = masters.parts[rank] if isinstance(masters, Joined) else masters

    def is_of_tied(entry):
        weight = tensor_of(module[entry])
        if weight is None or has_gaps(weight):
            return False
        rest = entry.partition(".")[2]
        same_key = [name for name in parts if name.split(".", 2)[2] == rest]
        return any(has_values_of(weight, parts[name], reader) for name in same_key)

    return {entry: value for entry, value in module.items() if not is_of_tied(entry)}
