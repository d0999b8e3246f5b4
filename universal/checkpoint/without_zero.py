# SPDX-License-Identifier: MIT
"""Describe a checkpoint that was saved without ZeRO as one of a single rank: nothing in it is cut.

DeepSpeed then writes one file, with the module and the optimizer's state_dict(). That numbers the
parameters, group by group, and does not name them: the engine that loads them tells their order, or
else their shapes do. Where the master weights are:

    fp32, torch_autocast     in the module
    FP16_Optimizer           fp32_groups_flat: those of a group, end to end
    FP16_UnfusedOptimizer    fp32_groups: a tensor for each parameter
"""

import itertools
import math
import struct
from collections import OrderedDict
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

from universal.checkpoint.module_states import (
    WITHOUT_ZERO,
    config_of,
    degrees_of,
    dtype_of_weights,
    identity,
    keep_untrained,
    module_state,
)
from universal.checkpoint.types import (
    Checkpoint,
    Described,
    Files,
    Layout,
    Parameter,
    RawStates,
)
from universal.checkpoint.zero import (
    OPTIMIZER,
    differences,
    is_flat,
    optimizer_state,
    problem_of_loss,
)
from universal.errors import CheckpointError, naming
from universal.files.joined import strided
from universal.files.schema import expect
from universal.files.sources import ByteReader, OpenFile
from universal.files.torch_file import (
    Tensor,
    extent_of,
    has_gaps,
    known_class,
    load,
    read_scalar,
    stub,
    tensor_of,
    trim_storage,
)

MODEL_STATES_FILE = "mp_rank_00_model_states.pt"
SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
ROUNDED = ("float32", "float16", "bfloat16")  # precisions of weights beside float32 masters


class NeedsEngine(CheckpointError):
    """The checkpoint may be whole, but only an engine can tell which parameters are trained."""


class Stepped(NamedTuple):
    """A tensor that PyTorch's optimizer steps, and the state that it keeps for it.

    masters: None where these are weights of the module. flat: whether they are those of a whole
    group, end to end. begin: the element where a parameter begins in them.
    """

    masters: Tensor | None
    state: dict[str, Any]
    flat: bool
    begin: int = 0


MASTERS = {"fp32_groups?": [[tensor_of]], "fp32_groups_flat?": [is_flat]}
NOWHERE = Stepped(None, {}, False)
NO_OPTIMIZER = {"state": {}, "param_groups": []}


def read_whole(folder: Path) -> dict | None:
    """The model states of a checkpoint that was saved without ZeRO; None if it was not."""
    path = folder / MODEL_STATES_FILE
    if not path.exists() or (folder / "zero").is_dir() or any(folder.glob("*_optim_states.pt")):
        return None
    model = expect(load(path), dict, path)
    return model if model.get("param_shapes") is None else None


def describe_whole(
    folder: Path, model: dict, names: list[list[str]] | None, opened: OpenFile
) -> Described:
    """A Checkpoint that was saved without ZeRO, and what was pickled.

    model: as of read_whole(). names: of the trained parameters, by group, in the order in which the
    optimizer got them; None if nobody knows. Without a place in the optimizer, parameters have
    their weights alone. Raises: CheckpointError.
    """
    path = folder / MODEL_STATES_FILE
    expect(model, WITHOUT_ZERO | {"optimizer?": (NoneType, dict)}, path)
    optimizer = model.get("optimizer") or NO_OPTIMIZER
    base = expect(optimizer.get("optimizer_state_dict", optimizer), OPTIMIZER, path)
    expect(optimizer, MASTERS, path)
    tensor, pipeline = degrees_of(model, len([*folder.glob("mp_rank_*_model_states.pt")]))
    with naming(path):
        weights = trained_weights(model) if tensor * pipeline == 1 else {}
        groups = stepped_groups(optimizer, base) if weights else []
        if names is None:
            names = names_by_shape(weights, groups, opened)
        names = [[name for name in of_group if name in weights] for of_group in names]
        parameters, unsliced = place_all(weights, names, groups, opened)
        shapes = [
            OrderedDict((name, weights[name].size) for name in of_group) for of_group in names
        ]
        model = model | {"optimizer": None, "param_shapes": shapes}
        dtype = dtype_of_weights(model, "bfloat16" in {weight.dtype for weight in weights.values()})
        if model["module"] is not None:
            model, _ = keep_untrained(model, parameters)
        settings = optimizer_settings(path, optimizer, model) | {"base_optimizer_state": base}
    param_groups = [group | {"params": [i]} for i, group in enumerate(base["param_groups"])]
    state = optimizer_state(base | {"param_groups": param_groups}, unsliced)
    description = Checkpoint(
        folder=folder,
        stage=0,
        ranks=model["dp_world_size"],
        layout=Layout(class_of(optimizer), 1, dtype, tensor, pipeline),
        parameters=parameters,
        flat_names=names,
        module=module_state(model),
        optimizer=state,
        files=Files(path, []),
        problems=problem_of_loss(path, parameters, state),
    )
    return Described(description, RawStates([model], settings))


def unnamed_states(raw: RawStates) -> dict[str, Tensor]:
    """{name: Tensor} of the optimizer's states by the number of the parameter, if nobody knows the
    parameters' names."""
    states = (raw.optimizer.get("base_optimizer_state") or {}).get("state", {})
    return {
        f"parameter {number} {key}": tensor
        for number, state in states.items()
        if isinstance(state, dict)
        for key, value in state.items()
        if (tensor := tensor_of(value))
    }


def class_of(optimizer):
    """The name of the class of DeepSpeed's optimizer; "" where it is PyTorch's own."""
    if "fp32_groups_flat" in optimizer:
        return "FP16_Optimizer"
    return "FP16_UnfusedOptimizer" if "fp32_groups" in optimizer else ""


def trained_weights(model):
    """{name: Tensor} of the module without its buffers; tied weights have one of their names."""
    buffers = {*model["buffer_names"]}
    weights = {}
    for name, value in (model["module"] or {}).items():
        tensor = tensor_of(value)
        if tensor and name not in buffers and not name.endswith("_extra_state"):
            weights.setdefault(identity(value), (name, tensor))
    return dict(weights.values())


def stepped_groups(optimizer, base):
    """[[Stepped]], by parameter group."""
    masters = optimizer.get("fp32_groups") or optimizer.get("fp32_groups_flat")
    flat = "fp32_groups_flat" in optimizer
    groups = []
    if masters and len(masters) != len(base["param_groups"]):
        raise CheckpointError("the optimizer does not have master weights of each group")
    for i, group in enumerate(base["param_groups"]):
        tensors = [None] * len(group["params"])
        if masters:
            tensors = [masters[i]] if flat else masters[i]
        if len(tensors) != len(group["params"]):
            raise CheckpointError(f"group {i} does not have master weights of each parameter")
        states = [base["state"].get(number, {}) for number in group["params"]]
        if group.get("step") == 0:  # as FusedAdam and FusedLion write there
            states = with_step_of_last(states)
        groups.append(
            [Stepped(*pair, flat) for pair in zip(map(tensor_of, tensors), states, strict=True)]
        )
    # DeepSpeed gives each trained parameter a gradient, if only of zeros: the others are frozen.
    if not masters and any(stepped.state for group in groups for stepped in group):
        groups = [[stepped for stepped in group if stepped.state] for group in groups]
    return groups


def with_step_of_last(states):
    """FusedAdam counts the steps of a whole group in the state of its last parameter alone."""
    steps = [state["step"] for state in states if "step" in state]
    return [state | {"step": steps[-1]} if "step" in state else state for state in states]


def place_all(weights, names, groups, opened):
    """({name: Parameter}, {(group, name): why a state has no place}).

    A group whose parameters are not as many as the names gives them no place.
    """
    parameters = {}
    unsliced = {}
    for i, (of_group, group) in enumerate(itertools.zip_longest(names, groups, fillvalue=[])):
        places = places_of([weights[name] for name in of_group], group)
        for name, stepped in zip(of_group, places, strict=True):
            parameters[name], keys = describe_one(weights[name], i, stepped, opened)
            unsliced |= {(i, key): "is not cut like the weights" for key in keys}
        scalars = [parameters[name].scalars for name in of_group]
        unsliced |= {(i, key): "differs between parameters" for key in differences(scalars)}
    return parameters, unsliced


def places_of(weights, group):
    """The Stepped of each weight, in their order: a tensor of its own, or a place in the flat one.

    If the weights do not fill the group, nobody knows which is where: then all are NOWHERE.
    """
    if len(weights) == len(group):
        return group
    ends = [*itertools.accumulate(math.prod(weight.size) for weight in weights)]
    if group and group[0].flat and ends[-1:] == [math.prod(group[0].masters.size)]:
        return [group[0]._replace(begin=begin) for begin in (0, *ends[:-1])]
    return [NOWHERE] * len(weights)


def describe_one(weight, group, stepped, opened):
    """(the Parameter at a place, the names of its states that have another shape)."""
    masters = stepped.masters or weight
    numel = math.prod(weight.size)
    states = {"fp32": elements_in("fp32", masters, stepped.begin, numel)}
    scalars = {}
    unsliced = set()
    for key, value in stepped.state.items():
        tensor = tensor_of(value)
        if tensor and tensor.size == masters.size and key != "step":
            states[key] = elements_in(key, tensor, stepped.begin, numel)
        elif tensor is None or math.prod(tensor.size) == 1:
            scalars[key] = read_scalar(value, opened)
        else:
            unsliced.add(key)
    return Parameter(weight.size, group, group, states, scalars), unsliced


def elements_in(key, tensor, begin, numel):
    """Where elements of a tensor are, in the order of its indices."""
    if has_gaps(tensor) and numel:
        return strided(key, trim_storage(tensor))
    return extent_of(tensor, begin + numel).part(begin, numel)


# --------------------------------------------------------------------------------------------------
# which parameters the optimizer's tensors are, where no engine tells


def names_by_shape(weights, groups, opened):
    """[[name]] by group, if shapes, and values where masters are saved, leave one choice.

    They do if each weight fits in one group at most, as its next tensor, and if those that fit in
    none, which are frozen, have other shapes. Raises CheckpointError if they do not.
    """
    if not weights:
        raise NeedsEngine(
            "a pipeline or tensor-parallel ranks saved it without ZeRO, which nobody converts: "
            "it loads on its own layout only"
        )
    names = [[] for _ in groups]
    frozen = set()
    unclear = not groups
    for name, weight in weights.items():
        fitting = []
        for of_group, group in zip(names, groups, strict=True):
            if is_next([weights[before] for before in of_group], weight, group, opened):
                fitting.append(of_group)
        unclear |= len(fitting) > 1
        for of_group in fitting:
            of_group.append(name)
        if not fitting:
            frozen.add(weight.size)
    for of_group, group in zip(names, groups, strict=True):
        chosen = [weights[name] for name in of_group]
        unclear |= NOWHERE in places_of(chosen, group)
        unclear |= any(weight.size in frozen for weight in chosen)
    if unclear:
        raise NeedsEngine(
            "it does not say which parameters are in which group of the optimizer, and their "
            "shapes do not tell: load it without converting it"
        )
    return names


def is_next(before, weight, group, opened):
    """Whether a weight may be what the optimizer's group has after those before."""
    begin = 0
    if group and group[0].flat:
        (stepped,) = group
        begin = sum(math.prod(other.size) for other in before)
        fits = begin + math.prod(weight.size) <= math.prod(stepped.masters.size)
    elif len(before) < len(group):
        stepped = group[len(before)]
        tensors = [tensor_of(value) for value in (stepped.masters, *stepped.state.values())]
        shapes = {tensor.size for tensor in tensors if tensor}
        fits = not shapes or weight.size in shapes
    else:
        return False
    return fits and (stepped.masters is None or is_rounded(weight, stepped.masters, begin, opened))


def is_rounded(weight, masters, begin, opened):
    """Whether a weight is what its masters are in its precision, as far as its first elements."""
    numel = min(math.prod(weight.size), 64)
    reader = ByteReader(opened)
    halves = reader.read(extent_of(weight, numel), 0, numel)
    floats = reader.read(extent_of(masters, begin + numel), begin, numel)
    return halves == rounded(floats, weight.dtype)


def rounded(floats: bytes, dtype: str) -> bytes:
    """The bytes of float32 numbers in one of the precisions ROUNDED."""
    if dtype == "float32":
        return floats
    numel = len(floats) // 4
    if dtype == "float16":
        numbers = struct.unpack(f"<{numel}f", floats)
        limited = [x if abs(x) < 65520 else math.copysign(math.inf, x) for x in numbers]
        return struct.pack(f"<{numel}e", *limited)
    words = struct.unpack(f"<{numel}I", floats)  # bfloat16: half of a float, rounded to even
    halves = [(word + 0x7FFF + (word >> 16 & 1)) >> 16 for word in words]
    return struct.pack(f"<{numel}H", *halves)


# --------------------------------------------------------------------------------------------------
# the rest


def optimizer_settings(path, optimizer, model):
    """What the optimizer keeps besides, as ZeRO's would save it."""
    settings = {
        key: optimizer[key] for key in ("dynamic_loss_scale", "clip_grad") if key in optimizer
    }
    if not optimizer.get("dynamic_loss_scale"):
        return settings
    expect(optimizer, dict.fromkeys(SCALE, object), path)
    config = config_of(model, "fp16")
    hysteresis = config.get("hysteresis", 2)
    scaler = {
        "dynamic": True,
        "min_scale": config.get("min_loss_scale", 1),
        "delayed_shift": hysteresis,
        "cur_hysteresis": hysteresis,
        "consecutive_hysteresis": config.get("consecutive_hysteresis", False),
        "raise_error_at_min_scale": True,
        "dtype": known_class("torch", "float16"),
    }
    scaler |= {key: optimizer[key] for key in SCALE}
    name = known_class("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler")
    return settings | {"loss_scaler": stub(name, (), state=scaler), "overflow": False}
