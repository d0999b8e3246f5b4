# SPDX-License-Identifier: MIT
"""Describe a universal checkpoint: the output of our converter, or of DeepSpeed's.

DeepSpeed's leaves the weights in `module`; from ZeRO-3 also rank 0's part of frozen weights, rank
0's shard in optimizer_state.pt, and states that are flat, without their shapes.
"""

import functools
import math
import os
from concurrent.futures import Executor
from pathlib import Path

from universal.checkpoint.experts import expert_name
from universal.checkpoint.module_states import read_model_states, tensors_of_module
from universal.checkpoint.types import (
    SETTINGS,
    Checkpoint,
    OptimizerState,
    Parameter,
)
from universal.checkpoint.zero import OPTIMIZER
from universal.errors import CheckpointError
from universal.files.schema import expect
from universal.files.torch_file import extent_of, load, read_scalar, tensor_of, trim_storage

PARAM_GROUPS = {"param_groups": OPTIMIZER["param_groups"]}


def file_name(name: str) -> str:
    """The name of a parameter or a state as part of a path, in UTF-8 whatever the locale.

    Raises: CheckpointError, if it cannot be a path, or leads out of the folder.
    """
    plain = isinstance(name, str) and name == os.path.normpath(name) and "\0" not in name
    if plain and name not in (".", "..") and not name.startswith(("../", "/")):
        encoded = name.encode(errors="replace")  # half of a surrogate pair
        if encoded.decode() == name:
            return os.fsdecode(encoded)
    raise CheckpointError(
        f"{name!r} is the name of a parameter or a state, and cannot be that of a file"
    )


def describe_universal(folder: Path, pool: Executor) -> Checkpoint:
    """Describe the universal checkpoint in a folder.

    Raises: CheckpointError, if files are missing or damaged.
    """
    paths = paths_of_model_states(folder)
    models = [read_model_states(path) for path in paths]
    flats = {
        name: flat
        for model in models
        for flat, names in enumerate(model["param_shapes"])
        for name in names
    }
    if any(map(expert_name, flats)):
        raise CheckpointError(f"{folder} is a universal checkpoint of experts, which is not read")
    path = folder / "zero" / "optimizer_state.pt"
    optimizer = expect(load(path), dict, path)
    content = optimizer
    if not content.get("param_groups"):
        content = expect(optimizer, {"optimizer_state_dict": dict}, path)["optimizer_state_dict"]
    param_groups = expect(content, PARAM_GROUPS, path)["param_groups"]
    step = read_step(path, optimizer)
    group_of = {flat: i for i, group in enumerate(param_groups) for flat in group["params"]}

    places = [(path.parent / file_name(name), group_of.get(flats[name])) for name in flats]
    read_all = pool.map(functools.partial(read_parameter, step), places)
    parameters = dict(zip(flats, read_all, strict=True))
    check_states(folder, parameters, flats)
    models = [model | {"module": untrained_entries(model, parameters)} for model in models]
    settings = {key: optimizer.get(key) for key in SETTINGS}
    left_out = optimizer.get("left_out")
    return Checkpoint(
        folder=folder,
        stage=None,
        layout=None,
        parameters=parameters,
        module=tensors_of_module(models[0]),
        optimizer=OptimizerState(param_groups, {}, {}, settings, left_out),
        model_states=paths[0],
        left_over=[],
        problems=[],
        models=models,
        shard=optimizer,
    )


def paths_of_model_states(folder):
    paths = sorted(folder.glob("mp_rank_*_model_states.pt"))
    paths = paths or sorted(folder.glob("[!.]*_model_states.pt"))
    if not paths:
        raise CheckpointError(
            f"{folder} holds no *_model_states.pt: it is not a checkpoint of DeepSpeed"
        )
    return paths


def read_step(path, optimizer):
    """Returns {"step": of all parameters} from the shard that DeepSpeed's converter leaves of
    ZeRO-3; {} if there is none."""
    if "fp32_flat_groups" not in optimizer:
        return {}
    expect(optimizer, {"optimizer_state_dict": OPTIMIZER}, path)
    state = optimizer["optimizer_state_dict"]["state"].get(0, {})
    return {"step": read_scalar(state["step"])} if "step" in state else {}


def read_parameter(scalars, place):
    """Read a Parameter: each file in its folder is one of its states. place: that folder, and the
    number of its group."""
    folder, group_number = place
    tensors = {}
    masters = folder / "fp32.pt"
    for path in [masters, *sorted(set(folder.glob("[!.]*.pt")) - {masters})]:
        content = load(path)
        if path.stem == "step":
            scalars = {"step": read_scalar(content)}
        else:
            expect(content, (tensor_of, {"param": tensor_of}), path)
            tensors[path.stem] = tensor_of(content["param"] if type(content) is dict else content)
    return Parameter(
        shape=tuple(tensors["fp32"].size),
        group_number=group_number,
        states={key: extent_of(tensor) for key, tensor in tensors.items()},
        scalars=scalars,
    )


def check_states(folder, parameters, flats):
    """Raises CheckpointError if a parameter lacks a state that another one of its flat tensor
    has."""
    keys = {}
    for name, parameter in parameters.items():
        keys.setdefault(flats[name], set()).update(parameter.states)
    for name, parameter in parameters.items():
        for key in keys[flats[name]]:
            source = parameter.states.get(key)
            if source is None or source.numel < math.prod(parameter.shape):
                raise CheckpointError(f"{folder}: not all of the state {key} of {name} was saved")


def untrained_entries(model, parameters):
    """The module's entries without trained parameters, and without parts of frozen ones."""
    shapes = model.get("frozen_param_shapes") or {}
    shared = model.get("shared_params") or {}
    entries = {}
    for name, value in (model["module"] or {}).items():
        tensor = tensor_of(value)
        partial = name in shapes and (tensor is None or tensor.size != tuple(shapes[name]))
        if name not in parameters and name not in shared and not partial:
            entries[name] = trim_storage(tensor) if tensor else value
    return entries
