# SPDX-License-Identifier: MIT
"""Which layers of a pipeline a rank has, and which of them are tied."""

import operator
from collections.abc import Callable

import torch

from universal.checkpoint.names import plain_name
from universal.errors import CheckpointError
from universal.files.same import is_same


def layers_of(module: torch.nn.Module) -> dict[str, str]:
    """{number: name of its module} of this rank's layers that are saved."""
    modules = module.named_modules()
    names = {layer: plain_name(f"{name}.").removesuffix(".") for name, layer in modules}
    starts = [start for start, _ in getattr(module, "phase_bounds", [(module._local_start, None)])]
    functions = getattr(module, "phase_funcs", [module.forward_funcs])
    return {
        str(number): names[layer]
        for start, of_phase in zip(starts, functions, strict=True)
        for number, layer in enumerate(of_phase, start)
        if layer in names
    }


def layers_elsewhere(module: torch.nn.Module) -> dict[str, str]:
    """The same of all layers that are tied with some of which this rank saves nothing.

    DeepSpeed saves nothing of a layer with a forward_fn.
    """
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


def is_model_first(module: torch.nn.Module) -> bool:
    """Whether the topology's axis of tensor parallelism is before that of stages."""
    axes = module.topology().get_axis_names()
    return "pipe" in axes and "model" in axes[: axes.index("pipe")]


def is_folded(module: torch.nn.Module) -> bool:
    """Whether it is a DualPipeVModule: a rank has a stage of either end."""
    return hasattr(module, "phase_bounds")


def check_tied(local_name: Callable[[str], str | None], saved: dict, strict: bool) -> None:
    """Check that stages agree about what is one tensor here, of a tied layer.

    local_name: of an entry of a checkpoint's module. Raises: CheckpointError, if strict.
    """
    first_names = {}
    for saved_name in sorted(saved) if strict else ():
        name = local_name(saved_name)
        first = first_names.setdefault(name, saved_name)
        if name and not is_same(saved[first], saved[saved_name]):
            raise CheckpointError(
                f"{first} and {saved_name} are of one tied layer, and differ: pipeline stages had "
                f"them for themselves; load_module_strict=False continues with {first}"
            )
