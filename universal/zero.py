# SPDX-License-Identifier: MIT
"""How ZeRO cuts parameters and their states into the shards of data-parallel ranks, and how they
are put together again. Needs nothing but Python 3.10."""

import itertools
import math
from typing import NamedTuple

from universal.byte_ranges import Slices
from universal.description import Parameter
from universal.errors import CheckpointError
from universal.torch_file import Tensor, begin_of, number, pickled, scalar, tensor_of

# --------------------------------------------------------------------------------------------------
# 1. one shard


def is_stage_3(optimizer):
    return "fp32_flat_groups" in optimizer


def class_of(optimizer):
    """The name of the class of DeepSpeed's optimizer that saved a shard."""
    if is_stage_3(optimizer):
        return "DeepSpeedZeroOptimizer_Stage3"
    return "DeepSpeedZeroOptimizer" if "zero_stage" in optimizer else "BF16_Optimizer"


def flat_groups(optimizer):
    """The fp32 slices, in a shard of any stage."""
    flats = optimizer[
        "fp32_flat_groups" if is_stage_3(optimizer) else "single_partition_of_fp32_groups"
    ]
    return [tensor_of(flat) for flat in flats]


def base_optimizer(optimizer):
    """The state dict of PyTorch's optimizer, in a shard of any stage."""
    base = optimizer["optimizer_state_dict" if is_stage_3(optimizer) else "base_optimizer_state"]
    if isinstance(
        base, list
    ):  # elastic_checkpoint: only states, without padding and hyperparameters
        step = (
            {"step": optimizer["base_optimizer_state_step"]}
            if "base_optimizer_state_step" in optimizer
            else {}
        )
        base = {
            "state": dict(enumerate(base)),
            "param_groups": [step | {"params": [i]} for i in range(len(base))],
        }
    return base


def beside_states(optimizer):
    """Two dicts: what PyTorch's optimizer keeps besides the states of its parameters, and besides
    its groups."""
    base = base_optimizer(optimizer)
    states = {key: value for key, value in base["state"].items() if not isinstance(key, int)}
    return states, {
        key: value for key, value in base.items() if key not in ("state", "param_groups")
    }


def settings_of(optimizer, opened):
    """{(group or None, key): value}: hyperparameters and what is besides the states; normally the
    same on all ranks."""
    groups = enumerate(base_optimizer(optimizer)["param_groups"])
    found = {
        (i, key): value for i, group in groups for key, value in group.items() if key != "params"
    }
    found |= {
        (None, key): value for beside in beside_states(optimizer) for key, value in beside.items()
    }
    return {key: scalar(value, opened) for key, value in found.items()}


def slice_size(optimizer, group):
    """How many elements of a group one rank's slice has at ZeRO-1/2, padding included."""
    size = flat_groups(optimizer)[group].size[0]
    return size + (
        optimizer["group_paddings"][group] if "zero_stage" in optimizer else 0
    )  # BF16_Optimizer saves it


def places(optimizer, group, shapes, ranks):
    """({name: (origin, share, base, numel) as in Slices}, elements of the group), from shapes
    {name: shape}.

    ZeRO-1/2: a group's parameters are laid end to end and cut into one slice per rank. The shard
    has these numbers, too, but with round_robin_gradients they are wrong. ZeRO-3: every parameter
    is cut by itself, ceil(numel / ranks) elements per rank."""
    counts = optimizer["partition_count"]
    found = {}
    at = 0
    if not isinstance(counts, int) and counts[group] != ranks:
        raise ValueError(f"group {group} is cut for {counts[group]} ranks and not for {ranks}")
    paddings = (optimizer.get("param_alignment_paddings") or {group: None})[group] or [0] * len(
        shapes
    )
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        numel = math.prod(shape)
        if is_stage_3(optimizer):
            found[name] = 0, math.ceil(numel / ranks), at, numel
            at += math.ceil(numel / ranks)
        else:
            found[name] = at, slice_size(optimizer, group), 0, numel
            at += numel + padding
    return found, at


def check_slices(optimizer, group, rank, ranks, found, end, round_robin):
    """Raise ValueError if this rank's slice is not cut like that. Returns how many elements it must
    hold."""
    if is_stage_3(optimizer):
        if flat_groups(optimizer)[group].size[0] != end:
            raise ValueError(f"group {group} is not cut for {ranks} ranks")
        return end
    size = slice_size(optimizer, group)
    begin = rank * size
    if end > ranks * size:
        raise ValueError(f"group {group} has {end} elements, its slices have fewer")
    wanted = {}
    for name, (at, share, _, numel) in found.items():
        first = max(at, begin)
        last = min(at + numel, begin + size)
        if share != size:
            raise CheckpointError(f"group {group} has a slice of another size")
        if first < last:
            wanted[name] = {"start": first - begin, "numel": last - first}
    said = {name: place.state for name, place in optimizer["param_slice_mappings"][group].items()}
    if said != wanted and not round_robin:
        name = next(name for name in (*wanted, *said) if said.get(name) != wanted.get(name))
        raise ValueError(f"{name} is not where param_slice_mappings says")
    return max(0, min(end - begin, size))


class Flat(NamedTuple):
    """What one shard holds of a group, or of a ZeRO-3 sub-group."""

    states: dict  # {state: Tensor}
    scalars: dict  # {key: Tensor with its bytes, or plain value}
    odd: dict  # states that are not cut like the weights
    needed: int  # elements that the others must hold


def flat_states(optimizer, group, needed, opened):
    """Returns a Flat. A state with a value per element is as long as the fp32 slice, or longer by
    the padding."""
    flat = flat_groups(optimizer)[group]
    size = flat.size[0]
    longest = size if is_stage_3(optimizer) else slice_size(optimizer, group)
    states = {"fp32": flat}
    scalars = {}
    odd = {}
    for key, value in base_optimizer(optimizer)["state"].get(group, {}).items():
        tensor = tensor_of(value)
        if (
            tensor is None
            or math.prod(tensor.size) == 1
            and (not tensor.size or key == "step" or size > 1)
        ):
            scalars[key] = scalar(value, opened)
        elif (
            key not in states
            and key != "step"
            and len(tensor.size) == 1
            and size <= tensor.size[0] <= longest
        ):
            states[key] = tensor
        else:
            odd[key] = tensor
    return Flat(states, scalars, odd, needed)


# --------------------------------------------------------------------------------------------------
# 2. the shards of all ranks


MISSING = object()


def put_together(shards, ranks, groups, shapes, base):
    """({name: Parameter}, {(group, key): why it is uneven}), from the shards of all ranks."""
    parameters = {}
    uneven = {}
    group_of = {flat: i for i, group in enumerate(base["param_groups"]) for flat in group["params"]}
    for i, (names, _) in enumerate(groups):
        held = [found[i] for found in ranks]
        first = held[0]
        odd = {key for mine in held for key in mine.odd}
        for rank, mine in enumerate(held):
            if mine.states.keys() - odd != first.states.keys() - odd:
                raise CheckpointError(
                    f"{shards[rank]} has other optimizer states than {shards[0].name}"
                )
            step, wanted = (number(flat.scalars.get("step")) for flat in (mine, first))
            if step != wanted:
                raise CheckpointError(
                    f"{shards[rank]} is at optimizer step {step}, {shards[0].name} at {wanted}"
                )
        uneven |= {
            (i, key): why for key, why in differences([mine.scalars for mine in held]).items()
        }
        flats = {}
        for key in (key for key in first.states if key == "fp32" or key not in odd):
            tensors = [mine.states[key] for mine in held]
            for rank, tensor in enumerate(tensors):
                if tensor.dtype != tensors[0].dtype:
                    raise CheckpointError(
                        f"{shards[rank]}: {key} of group {i} is not what it is in {shards[0].name}"
                    )
            begins = (begin_of(mine.states[key], mine.needed) for mine in held)
            flats[key] = tensors[0].dtype, *zip(*begins, strict=True)
        momentum = whole_momentum(held, names) if "momentum_buffer" in odd else {}
        for key in sorted(odd - ({"momentum_buffer"} if momentum else set()), key=str):
            uneven[i, key] = "is not cut like the weights"
        for name, place in names.items():
            states = {key: Slices(*flat, *place) for key, flat in flats.items()}
            if momentum:
                states["momentum_buffer"] = momentum[name]
            shape = tuple(shapes[i][name])
            parameters[name] = Parameter(
                shape, i, group_of.get(i), states, first.scalars, {"cat_dim": 0}
            )
    return parameters, uneven


def differences(values):
    """{key: which ranks} for each key whose value is not the same on all ranks."""
    found = {}
    for rank, mine in enumerate(values):
        for key in {**values[0], **mine}:
            a, b = (held.get(key, MISSING) for held in (values[0], mine))
            if a != b and ({type(a), type(b)} & {Tensor, object} or pickled(a)[0] != pickled(b)[0]):
                found[key] = f"differs between ranks 0 and {rank}"
    return found


def whole_momentum(held, names):
    """{name: Slices} of Muon's momentum at ZeRO-1/2: a rank holds, end to end, the whole momentum
    of each parameter of which it has a part. Empty if the ranks' tensors do not have that
    length."""
    found = {}
    for rank, mine in enumerate(held):
        parts = {}
        for name, (origin, share, _, numel) in names.items():
            if rank * share - numel < origin < (rank + 1) * share:
                parts[name] = numel
        tensor = (mine.states | mine.odd).get("momentum_buffer")
        if tensor and tensor.size != (sum(parts.values()),):
            return {}
        at = 0
        for name, numel in parts.items() if tensor else ():
            record, begin = begin_of(tensor, at + numel)
            found.setdefault(name, Slices(tensor.dtype, (record,), (begin,), 0, numel, at, numel))
            at += numel
    return found if found.keys() == names.keys() else {}


def lost_states(uneven, parameters, optimizer):
    """The parts of the optimizer's state that are not per element."""
    keys = {
        key
        for p in parameters.values()
        for key, value in p.scalars.items()
        if value is not None and key != "step"
    }
    keys |= {*itertools.chain(*beside_states(optimizer))}
    return sorted({str(key) for key in keys} | {str(key) for _, key in uneven})
