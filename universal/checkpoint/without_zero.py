# SPDX-License-Identifier: MIT
"""Describe the model-parallel ranks of a checkpoint that was saved without ZeRO: of each, one file.

DeepSpeed writes into it the module, but a pipeline's, whose layers have files of their own, and the
optimizer's state_dict(). Where the master weights are:

    fp32, torch_autocast     in the module
    FP16_Optimizer           fp32_groups_flat: those of a group, end to end
    FP16_UnfusedOptimizer    fp32_groups: a tensor for each parameter
"""

import itertools
from collections import OrderedDict
from pathlib import Path
from types import NoneType

from universal.checkpoint.module_states import (
    WITHOUT_ZERO,
    config_of,
    degrees_of,
    dtype_of_weights,
    keep_untrained,
)
from universal.checkpoint.names import names_of_now, with_plain_names
from universal.checkpoint.order import (
    NOWHERE,
    Given,
    SavedRank,
    named_ranks,
    places_of,
    stepped_groups,
    stepping,
    trained_weights,
)
from universal.checkpoint.pipeline import split_pipeline
from universal.checkpoint.types import Parameter, RawStates
from universal.checkpoint.zero import (
    OPTIMIZER,
    ModelParallelRank,
    SavedShard,
    differences,
    is_flat,
    optimizer_state,
    problem_of_loss,
    settings_of,
)
from universal.errors import CheckpointError, naming
from universal.files.joined import strided
from universal.files.same import holds_elements
from universal.files.schema import expect
from universal.files.sources import OpenFile
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
MASTERS = {"fp32_groups?": [[tensor_of]], "fp32_groups_flat?": [is_flat]}
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


def describe_whole(
    folder: Path, model: dict, given: Given | None, opened: OpenFile
) -> tuple[list[ModelParallelRank], int, int]:
    """(the ranks of a Checkpoint that was saved without ZeRO, tensor, pipeline degree).

    model: as of read_whole(). given: what an engine tells of the parameters; None if nobody does.
    Without a place in the optimizer, parameters have their weights alone. Raises: CheckpointError.
    """
    path = folder / MODEL_STATES_FILE
    if model.get("num_experts"):
        raise CheckpointError(f"{path} has experts, which without ZeRO are not described")
    mp_ranks = len([*folder.glob("mp_rank_*_model_states.pt")])
    tensor, pipeline = degrees_of(model, mp_ranks, folder)
    paths = [folder / f"mp_rank_{i:02d}_model_states.pt" for i in range(tensor * pipeline)]
    told = None if given is None else given()
    by_group = None if told is None else told.by_group()
    ranks = [
        read_rank(path, load(path) if i else model, by_group or []) for i, path in enumerate(paths)
    ]
    problems = []
    if model["module"] is None:
        ranks, problems = split_pipeline(folder, ranks, tensor, told, opened)
    else:
        ranks = named_ranks(ranks, by_group, opened)
    described = [describe_rank(rank, opened) for rank in ranks]
    described[0].problems.extend(problems)
    return described, tensor, pipeline


def read_rank(path, model, given):
    """The SavedRank in a file of model states."""
    expect(model, WITHOUT_ZERO | {"optimizer?": (NoneType, dict)}, path)
    optimizer = model.get("optimizer") or NO_OPTIMIZER
    base = expect(optimizer.get("optimizer_state_dict", optimizer), OPTIMIZER, path)
    expect(optimizer, MASTERS, path)
    with naming(path):
        model = with_names_of_parameters(with_plain_names(model), given)
        weights = trained_weights(model["module"] or {}, model["buffer_names"])
        return SavedRank(path, model, optimizer, base, weights, stepped_groups(optimizer, base))


def describe_rank(rank, opened):
    """The ModelParallelRank of a SavedRank."""
    with naming(rank.path):
        parameters, unsliced = place_all(rank.weights, rank.names, rank.groups, opened)
        unsliced |= rank.lost
        shapes = [
            OrderedDict((name, rank.weights[name].size) for name in of_group if name in parameters)
            for of_group in rank.names
        ]
        model = rank.model | {"optimizer": None, "param_shapes": shapes}
        is_bf16 = "bfloat16" in {weight.dtype for weight in rank.weights.values()}
        dtype = dtype_of_weights(model, is_bf16)
        if model["module"] is not None:
            model, _ = keep_untrained(model, parameters)
        content = optimizer_settings(rank.path, rank.optimizer, model)
        content |= {"base_optimizer_state": rank.base}
    param_groups = [group | {"params": [i]} for i, group in enumerate(rank.base["param_groups"])]
    optimizer = rank.base | {"param_groups": param_groups}
    shard = SavedShard(rank.path, 0, class_of(rank.optimizer), content, optimizer, [], [], [])
    return ModelParallelRank(
        model=model,
        dtype=dtype,
        shard=shard,
        parameters=parameters,
        flat_names=rank.names,
        settings=settings_of(shard, opened),
        rank_dependent=unsliced,
        problems=problem_of_loss(rank.path, parameters, optimizer_state(optimizer, unsliced)),
        files=[rank.path],
    )


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


def with_names_of_parameters(model, given):
    """The model states, in which the entries of the module have the names of the parameters: a
    wrapper gives them names that its state_dict() takes back."""
    names = {entry: name for of_group in given for name, entry in of_group.items()}
    if model["module"] is None:
        return model
    names |= names_of_now(model["module"], names.values())
    if all(entry == name for entry, name in names.items()):
        return model
    module = {names.get(entry, entry): value for entry, value in model["module"].items()}
    return model | {"module": module}


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
            if weights[name].numel and (stepped is NOWHERE or is_among(stepped, trained)):
                parameters[name], keys = describe_one(weights[name], i, stepped, opened)
                unsliced |= {(i, key): "is not cut like the weights" for key in keys}
                chosen.append(parameters[name].scalars)
        unsliced |= {(i, key): "differs between parameters" for key in differences(chosen)}
    return parameters, unsliced


def is_among(stepped, trained):
    """Whether a tensor is trained: of a flat one, all parameters are."""
    return stepped.flat or any(stepped is other for other in trained)


def describe_one(weight, group, stepped, opened):
    """(the Parameter at a place, the names of its states that have another shape)."""
    masters = stepped.masters or weight
    numel = weight.numel
    whole = {masters.numel}
    states = {"fp32": elements_in("fp32", masters, stepped.begin, numel)}
    scalars = {}
    unsliced = set()
    for key, value in stepped.state.items():
        tensor = tensor_of(value)
        if tensor and tensor.size == masters.size and key != "step":
            states[key] = elements_in(key, tensor, stepped.begin, numel)
        elif tensor is None and masters.numel > 1 and holds_elements(value, whole):
            unsliced.add(key)
        elif tensor is None or tensor.numel == 1:
            scalars[key] = read_scalar(value, opened)
        else:
            unsliced.add(key)
    return Parameter(weight.size, group, group, states, scalars), unsliced


def elements_in(key, tensor, begin, numel):
    """Where elements of a tensor are, in the order of its indices."""
    if has_gaps(tensor) and numel:
        return strided(key, tensor)
    return extent_of(tensor, begin + numel).part(begin, numel)


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
