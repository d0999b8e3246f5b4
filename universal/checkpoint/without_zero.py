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
from collections import Counter, OrderedDict
from collections.abc import Callable
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
    names_beside,
)
from universal.checkpoint.names import with_plain_names
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
from universal.files.same import holds_elements
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
)

MODEL_STATES_FILE = "mp_rank_00_model_states.pt"
SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
ROUNDED = ("float32", "float16", "bfloat16")  # precisions of weights beside float32 masters


# What an engine tells: by group, {parameter: its entry in the state of the module}, in the order in
# which the optimizer got them.
Given = Callable[[], list[dict[str, str]]]


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
ORDER = "the order of the parameters"
NO_OPTIMIZER = {"state": {}, "param_groups": []}


def read_whole(folder: Path) -> dict | None:
    """The model states of a checkpoint that was saved without ZeRO; None if there is none.

    BF16_Optimizer without ZeRO is none: it cuts its masters into shards. Raises: CheckpointError.
    """
    path = folder / MODEL_STATES_FILE
    if not path.exists():
        return None
    model = with_plain_names(expect(load(path), dict, path))
    optimizer = model.get("optimizer")
    cut = isinstance(optimizer, dict) and "single_partition_of_fp32_groups" in optimizer
    return model if model.get("param_shapes", {}) is None and not cut else None


def describe_whole(folder: Path, model: dict, given: Given | None, opened: OpenFile) -> Described:
    """A Checkpoint that was saved without ZeRO, and what was pickled.

    model: as of read_whole(). given: what an engine tells of the parameters; None if nobody does.
    Without a place in the optimizer, parameters have their weights alone. Raises: CheckpointError.
    """
    path = folder / MODEL_STATES_FILE
    expect(model, WITHOUT_ZERO | {"optimizer?": (NoneType, dict)}, path)
    optimizer = model.get("optimizer") or NO_OPTIMIZER
    base = expect(optimizer.get("optimizer_state_dict", optimizer), OPTIMIZER, path)
    expect(optimizer, MASTERS, path)
    if model.get("num_experts"):
        raise CheckpointError(f"{path} has experts, which without ZeRO are not described")
    tensor, pipeline = degrees_of(model, len([*folder.glob("mp_rank_*_model_states.pt")]))
    used = [folder / f"mp_rank_{i:02d}_model_states.pt" for i in range(tensor * pipeline)]
    with naming(path):
        given = None if given is None else given()
        model = with_names_of_parameters(model, given or [])
        weights = trained_weights(model) if tensor * pipeline == 1 else {}
        groups = stepped_groups(optimizer, base) if weights else []
        unknown = {}
        if given is None:
            groups = [stepping(group, groups) for group in groups]
            names = names_by_shape(weights, groups, opened)
        else:
            names, groups, unknown = names_in_order(weights, groups, given, opened)
        parameters, unsliced = place_all(weights, names, groups, opened)
        unsliced |= unknown
        shapes = [
            OrderedDict((name, weights[name].size) for name in of_group if name in parameters)
            for of_group in names
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
        files=Files(path, names_beside(folder, used)),
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
    return groups


def stepping(group, groups):
    """What of a group has been trained. DeepSpeed gives each trained parameter a gradient, if only
    of zeros, and so a state: the others are frozen."""
    counted = any(stepped.state for of_group in groups for stepped in of_group)
    return [stepped for stepped in group if stepped.masters or stepped.state or not counted]


def with_step_of_last(states):
    """FusedAdam counts the steps of a whole group in the state of its last parameter alone."""
    steps = [state["step"] for state in states if "step" in state]
    return [state | {"step": steps[-1]} if "step" in state else state for state in states]


def place_all(weights, names, groups, opened):
    """({name: Parameter}, {(group, name): why a state has no place}).

    names: of the tensors of each group, in their order; if they do not fill it, nobody knows which
    is where. What is frozen, or has no elements, is no trained parameter.
    """
    parameters = {}
    unsliced = {}
    for i, (of_group, group) in enumerate(itertools.zip_longest(names, groups, fillvalue=[])):
        trained = stepping(group, groups)
        chosen = []
        for name, stepped in zip(of_group, places_of(weights, of_group, group), strict=True):
            if math.prod(weights[name].size) and (stepped is NOWHERE or is_among(stepped, trained)):
                parameters[name], keys = describe_one(weights[name], i, stepped, opened)
                unsliced |= {(i, key): "is not cut like the weights" for key in keys}
                chosen.append(parameters[name].scalars)
        unsliced |= {(i, key): "differs between parameters" for key in differences(chosen)}
    return parameters, unsliced


def is_among(stepped, trained):
    """Whether a tensor is trained: of a flat one, all parameters are."""
    return stepped.flat or any(stepped is other for other in trained)


def places_of(weights, names, group):
    """The Stepped of each weight, in their order: a tensor of its own, or a place in the flat one.

    If the weights do not fill the group, nobody knows which is where: then all are NOWHERE.
    """
    ends = [*itertools.accumulate(math.prod(weights[name].size) for name in names)]
    if group and group[0].flat:
        if ends[-1:] == [math.prod(group[0].masters.size)]:
            return [group[0]._replace(begin=begin) for begin in (0, *ends[:-1])]
    elif len(names) == len(group):
        return group
    return [NOWHERE] * len(names)


def is_nowhere(places):
    return any(stepped is NOWHERE for stepped in places)


def describe_one(weight, group, stepped, opened):
    """(the Parameter at a place, the names of its states that have another shape)."""
    masters = stepped.masters or weight
    numel = math.prod(weight.size)
    whole = {math.prod(masters.size)}
    states = {"fp32": elements_in("fp32", masters, stepped.begin, numel)}
    scalars = {}
    unsliced = set()
    for key, value in stepped.state.items():
        tensor = tensor_of(value)
        if tensor and tensor.size == masters.size and key != "step":
            states[key] = elements_in(key, tensor, stepped.begin, numel)
        elif tensor is None and math.prod(masters.size) > 1 and holds_elements(value, whole):
            unsliced.add(key)
        elif tensor is None or math.prod(tensor.size) == 1:
            scalars[key] = read_scalar(value, opened)
        else:
            unsliced.add(key)
    return Parameter(weight.size, group, group, states, scalars), unsliced


def elements_in(key, tensor, begin, numel):
    """Where elements of a tensor are, in the order of its indices."""
    if has_gaps(tensor) and numel:
        return strided(key, tensor)
    return extent_of(tensor, begin + numel).part(begin, numel)


# --------------------------------------------------------------------------------------------------
# which parameters the optimizer's tensors are


def with_names_of_parameters(model, given):
    """The model states, in which the entries of the module have the names of the parameters: a
    wrapper gives them names that its state_dict() takes back."""
    names = {entry: name for of_group in given for name, entry in of_group.items()}
    if model["module"] is None or all(entry == name for entry, name in names.items()):
        return model
    module = {names.get(entry, entry): value for entry, value in model["module"].items()}
    return model | {"module": module}


def names_in_order(weights, groups, given, opened):
    """([[name]] by group, in the order of its tensors, [their Stepped], {(group, ORDER): why nobody
    knows them}).

    given: the engine's names. Raises: CheckpointError, if the file is damaged.
    """
    if not any(given):
        return [[] for _ in given], groups, {}
    homes = {name: i for i, of_group in enumerate(given) for name in of_group}
    names = []
    placed = []
    for i, (of_group, group) in enumerate(itertools.zip_longest(given, groups, fillvalue=())):
        known = [name for name in of_group if name in weights]
        allowed = [name for name in weights if homes.get(name, i) == i]
        orders = orders_of(weights, known, allowed, group, stepping(group, groups), opened)
        fitting = (order for order in orders if is_filled(weights, *order, opened))
        order, tensors = next(fitting, (known, []))
        names.append(order)
        placed.append(tensors)
    counts = Counter(itertools.chain(*names))
    unknown = {}
    for i, order in enumerate(names):
        if order and (not placed[i] or max(counts[name] for name in order) > 1):
            names[i] = [name for name in order if homes.get(name) == i]
            placed[i] = []
            unknown[i, ORDER] = "is not that of the engine, and the file does not tell it"
    return names, placed, unknown


def orders_of(weights, known, allowed, group, trained, opened):
    """Yields (names, [Stepped]), which may be what is in a group: what the engine has, of all
    tensors, or of those that have been trained; and the same with what it does not have."""
    yield known, group
    yield known, trained
    order = order_by_values if group and group[0].masters else order_by_shapes
    mixed = order(weights, allowed, group, opened)
    if known and {*known} <= {*mixed}:
        if group[0].masters or [name for name in mixed if name in known] == known:
            yield mixed, group


def order_by_values(weights, names, group, opened):
    """The names in the order of a group's masters; [] if several have the same values."""
    order = []
    left = [*names]
    while left:
        before = [weights[name] for name in order]
        fitting = [name for name in left if is_next(before, weights[name], group, opened)]
        if len(fitting) != 1:
            break
        order += fitting
        left.remove(fitting[0])
    return order


def order_by_shapes(weights, names, group, opened):
    """The names that fit as the next tensor of a group, one by one; [] if others might, too."""
    order = []
    skipped = set()
    for name in names:
        if is_next([weights[before] for before in order], weights[name], group, opened):
            order.append(name)
        else:
            skipped.add(weights[name].size)
    shapeless = skipped and not all(stepped.state for stepped in group)
    return [] if shapeless or any(weights[name].size in skipped for name in order) else order


def is_filled(weights, names, group, opened):
    """Whether these are the parameters of a group, as far as shapes and values tell."""
    chosen = [weights[name] for name in names]
    if not names or is_nowhere(places_of(weights, names, group)):
        return False
    return all(is_next(chosen[:i], weight, group, opened) for i, weight in enumerate(chosen))


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
        unclear |= is_nowhere(places_of(weights, of_group, group))
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
    if weight.dtype not in ROUNDED:
        return True
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
