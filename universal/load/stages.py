# SPDX-License-Identifier: MIT
"""The layers of a pipeline that a rank has, and their tied parameters."""

from collections.abc import Callable

import torch

from universal.errors import CheckpointError
from universal.files.same import is_same

LocalName = Callable[[str], str | None]  # Engine.local_name(), of an entry of a checkpoint's module


def layers_of(module: torch.nn.Module) -> dict[str, str]:
    """Returns {layer number: its module's name} of this rank's layers that have a module."""
    names = {}
    for name, layer in module.named_modules():
        names[layer] = name
    layers = enumerate(module.forward_funcs, module._local_start)
    return {str(number): names[layer] for number, layer in layers if layer in names}


def check_tied(module: torch.nn.Module, local_name: LocalName, saved: dict, strict: bool) -> None:
    """Check that entries which become one tensor here, of a tied layer, are the same.

    saved: the entries of a checkpoint's module. Raises: CheckpointError, if strict.
    """
    if not strict or not hasattr(module, "tied_modules"):
        return
    first_names = {}
    for saved_name in sorted(saved):
        name = local_name(saved_name)
        first = first_names.setdefault(name, saved_name)
        if name and not is_same(saved[first], saved[saved_name]):
            raise CheckpointError(
                f"{first} and {saved_name} are of one tied layer, and differ: pipeline stages had "
                f"them for themselves; load_module_strict=False continues with {first}"
            )
