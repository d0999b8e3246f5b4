# SPDX-License-Identifier: MIT
"""What a file of model states says: the module without what the optimizer holds, and the rest of a
Description. Needs nothing but Python 3.10."""

import math

from universal.byte_ranges import Slices
from universal.description import Description
from universal.errors import CheckpointError
from universal.torch_file import Tensor, begin_of, compact, tensor_of, whole


def described(folder, models, optimizer, parameters, groups, **facts):
    module = models[0]["module"] or {}
    return Description(
        folder=folder,
        parameters=parameters,
        models=models,
        optimizer=optimizer,
        param_groups=groups,
        flats=[list(names) for names in models[0]["param_shapes"]],
        kept={name: tensor for name, tensor in module.items() if isinstance(tensor, Tensor)},
        extra=[name for name, thing in module.items() if not isinstance(thing, Tensor)],
        frozen=models[0].get("frozen_param_shapes") or {},
        **facts,
    )


def place_of(value):
    """What two names of the same tensor have in common."""
    tensor = tensor_of(value)
    return (tensor.storage, tensor.offset, tensor.size) if tensor else id(value)


def module_of(model, frozen, parameters, count):
    """({name: tensor}, names of what was not saved) for what no optimizer holds: buffers, whole
    frozen parameters, and what get_extra_state() or a hook of state_dict() has added. frozen: every
    rank's frozen parameters at ZeRO-3."""
    module = model["module"]
    kept = {}
    lost = []
    if not isinstance(module, dict):
        raise TypeError(f"module is {type(module).__name__}")
    shapes = (model.get("frozen_param_shapes") or {}) if frozen else {}
    for name, shape in shapes.items():
        numel = math.prod(shape)
        parts = [held[name] for held in frozen]
        share = math.prod(parts[0].size)
        if share * count < numel or any(math.prod(part.size) != share for part in parts):
            raise CheckpointError(
                f"{numel - share * count} elements of the frozen {name} are missing"
            )
        records, begins = zip(*(begin_of(part, share) for part in parts), strict=True)
        slices = Slices(parts[0].dtype, records, begins, 0, share, 0, numel)
        kept[name] = whole(parts[0].dtype, slices, shape)
    # DeepSpeed ignores a module's second name. Its tensors then share one storage, or one
    # placeholder.
    first_name = {place_of(module[name]): name for name in (*parameters, *shapes) if name in module}
    others = module.keys() - {*first_name.values(), *model["buffer_names"]}
    aliases = {
        name: first_name[place_of(module[name])]
        for name in others
        if place_of(module[name]) in first_name
    }
    if aliases:
        model["shared_params"] = aliases | (model.get("shared_params") or {})
    accounted = {*parameters, *(model.get("shared_params") or {}), *kept}
    for name in sorted(module.keys() - accounted):
        tensor = tensor_of(module[name])
        # Of a parameter in no group, which is neither trained nor frozen, ZeRO-3 saves only the
        # name.
        placeholder = frozen and tensor and 0 in tensor.size and not name.endswith("_extra_state")
        if placeholder and name not in model["buffer_names"]:
            lost.append(name)
        else:
            kept[name] = compact(tensor) if tensor else module[name]
    # A module may save its parameters under other names: then these are the placeholders.
    renamed = {*parameters, *shapes} - module.keys()
    return kept, (lost if len(lost) > len(renamed) else [])
