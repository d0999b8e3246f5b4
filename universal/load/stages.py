# SPDX-License-Identifier: MIT
"""Which layers of a pipeline a rank has, and which of them are tied."""

import operator
from collections.abc import Callable, Iterable

import torch

from universal.errors import CheckpointError
from universal.files.same import is_same

LocalName = Callable[[str], str | None]  # Engine.local_name(), of an entry of a checkpoint's module


def layers_of(module: torch.nn.Module) -> dict[str, str]:
    """{number: name of its module} of this rank's layers that are saved."""
    names = {}
    for name, layer in module.named_modules():
        names[layer] = name
    phases = [(module._local_start, module.forward_funcs)]
    if is_folded(module):
        starts = [start for start, _ in module.phase_bounds]
        phases = zip(starts, module.phase_funcs, strict=True)
    layers = {}
    for start, of_phase in phases:
        for number, layer in enumerate(of_phase, start):
            if layer in names:
                layers[str(number)] = names[layer]
    return layers


def layers_elsewhere(module: torch.nn.Module) -> dict[str, str]:
    """{number: name of its module} of all layers that share the key of a tied layer here of which
    this rank saves nothing: DeepSpeed writes no file for a layer with a forward_fn."""
    unsaved = {f"tied_modules.{key}" for key in module.tied_modules}
    unsaved.difference_update(layers_of(module).values())
    tied = {str(n): f"tied_modules.{key}" for n, key in tied_layers(module).items()}
    return {number: name for number, name in tied.items() if name in unsaved}


def tied_layers(module: torch.nn.Module) -> dict[int, str]:
    """{number: key} of the layers that a pipeline ties, on all of its stages."""
    specs = enumerate(getattr(module, "_layer_specs", ()))
    return {number: spec.key for number, spec in specs if hasattr(spec, "key")}


def shared_parameters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """This rank's that stages keep the same."""
    return [
        operator.attrgetter(path)(module.tied_modules[key])
        for key, paths in getattr(module, "tied_weight_attrs", {}).items()
        for path in paths
    ]


def is_folded(module: torch.nn.Module) -> bool:
    """Whether it is a DualPipeVModule: a rank has a stage of either end."""
    return hasattr(module, "phase_bounds")


def unsaved_names(
    module: torch.nn.Module, local_name: LocalName, model: dict, saved: Iterable[str]
) -> set[str]:
    """The names, in this rank's tied layers, of what its stage did not save and another layer of
    the same key did. This stage may have had other values, unless all stages keep them the same.

    model: rank 0's model states. saved: the names of entries of a checkpoint's module.
    """
    degrees = model.get("checkpoint_parallel_dimensions") or {}
    if not hasattr(module, "tied_modules") or degrees.get("pp_degree") == 1:
        return set()
    layers = layers_elsewhere(module)
    return {local_name(name) for name in saved if name.partition(".")[0] in layers}


def check_tied(module: torch.nn.Module, local_name: LocalName, saved: dict, strict: bool) -> None:
    """Check that stages agree about what is one tensor here, of a tied layer.

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
