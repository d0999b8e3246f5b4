# SPDX-License-Identifier: MIT
"""Read model states: the module without what the optimizer holds, the counters, the config.

At ZeRO-1 and 2 all data-parallel ranks share one file. At ZeRO-3 each rank has a file, with its
part of the frozen parameters and nothing of the trained ones."""

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import NoneType
from typing import Any

from universal.checkpoint.zero import Cut, Slices
from universal.errors import CheckpointError
from universal.files.same import is_same
from universal.files.schema import expect, is_natural, is_shape
from universal.files.sources import ExtentsOfRanks, RecordsOfFile, packed_extents
from universal.files.torch_file import (
    Tensor,
    contiguous,
    extent_of,
    load,
    tensor_of,
    trim_storage,
)

DEGREE = (NoneType, is_natural)
MODEL_STATES = {
    "param_shapes": [{str: is_shape}],
    "module": (NoneType, {str: object}),
    "buffer_names": [str],
    "frozen_param_shapes?": (NoneType, {str: is_shape}),
    "frozen_param_fragments?": (NoneType, {str: tensor_of}),
    "shared_params?": (NoneType, {str: str}),
    "dp_world_size": is_natural,
    "global_steps": is_natural,
    "skipped_steps": is_natural,
    "mp_world_size?": is_natural,
    "num_experts?": (NoneType, [is_natural]),
    "checkpoint_parallel_dimensions?": (NoneType, {"pp_degree?": DEGREE, "tp_degree?": DEGREE}),
    "universal_checkpoint_info?": (NoneType, dict),
}
OF_DEEPSPEED = {  # the keys that engine.save_checkpoint() writes itself
    "module",
    "buffer_names",
    "optimizer",
    "param_shapes",
    "frozen_param_shapes",
    "shared_params",
    "frozen_param_fragments",
    "lr_scheduler",
    "data_sampler",
    "random_ltd",
    "sparse_tensor_module_names",
    "skipped_steps",
    "global_steps",
    "global_samples",
    "dp_world_size",
    "mp_world_size",
    "num_experts",
    "checkpoint_parallel_dimensions",
    "universal_checkpoint_info",
    "ds_config",
    "ds_version",
    "ds_autoep_layers",
    "autoep_layers",
}
SAME_ON_ALL_RANKS = (
    "dp_world_size",
    "param_shapes",
    "buffer_names",
    "frozen_param_shapes",
    "global_steps",
)


def read_model_states(path: Path) -> dict:
    """Read a file of model states. Raises CheckpointError if it is not what DeepSpeed saves."""
    return expect(load(path), MODEL_STATES, path)


def read_own_states(
    path: Path, first_path: Path, first: dict, known: dict
) -> tuple[Sequence, bool]:
    """Returns what each rank saves for itself at ZeRO-3: its parts of the frozen parameters, from
    packed_extents(), and whether its client state or a buffer is another than rank 0's. first: rank
    0's model states. known: of load(), where nothing is frozen.

    Raises: CheckpointError, if parts are missing, or these model states are of another save.
    """
    keys = {"module": MODEL_STATES["module"]}
    names = first.get("frozen_param_shapes") or {}
    model = first
    if path != first_path:
        model = expect(load(path, None if names else known), keys, path)
    for key in SAME_ON_ALL_RANKS:
        if model.get(key) != first.get(key):
            raise CheckpointError(f"{path} has other {key} than {first_path.name}")
    parts = []
    for place, states in ((first_path, first), (path, model)):
        fragments = states.get("frozen_param_fragments") or {}
        expect(fragments, {str: tensor_of}, place)
        if missing := names.keys() - fragments.keys():
            raise CheckpointError(f"{place} has nothing of the frozen {min(missing)}")
        parts.append([extent_of(tensor_of(fragments[name])) for name in names])
    differs = not is_same(own_of(first), own_of(model))
    return packed_extents(parts[1], parts[0]), differs


def degrees_of(model: dict, mp_ranks: int, folder: Path) -> tuple[int, int]:
    """Returns the degrees of tensor and of pipeline parallelism. mp_ranks: their product.

    Older DeepSpeed does not save them: then a pipeline's files of layers are counted, since each
    tensor-parallel rank saves one for a layer.
    """
    degrees = model.get("checkpoint_parallel_dimensions") or {}
    pipeline = degrees.get("pp_degree") or 1
    if model["module"] is None and "pp_degree" not in degrees:
        endings = {path.name.partition("-")[2] for path in folder.glob("layer_*-model_states.pt")}
        pipeline = mp_ranks // max(1, len(endings))
    if model.get("mp_world_size") == 1:  # an mpu of sequence parallelism names its own degree
        return 1, pipeline
    return degrees.get("tp_degree") or max(1, mp_ranks // pipeline), pipeline


def names_beside(folder: Path, used: Iterable[Path]) -> list[str]:
    """Returns the names of shards and model states that are not used: an earlier save left them."""
    paths = {*folder.glob("[!.]*p_rank_*_states.pt"), *folder.glob("layer_*-model_states.pt")}
    return sorted({path.name for path in paths.difference(used)})


def files_of_layers(folder: Path, degree: int) -> dict[str, list[Path]]:
    """Find a pipeline's files of layers. Returns them for each tensor-parallel rank, by the end of
    their names.

    degree: of tensor parallelism; files of more ranks are left over from an earlier save. Raises:
    CheckpointError, if nothing tells which files those are.
    """
    files = {}
    for path in sorted(folder.glob("layer_*-model_states.pt")):
        ending = path.name.partition("-")[2]
        axes = re.sub(r"\d+", "", ending)  # none, or model_
        files.setdefault(axes, {}).setdefault(ending, []).append(path)
    of_saves = [by_rank for by_rank in files.values() if len(by_rank) >= degree]
    if len(of_saves) > 1:
        names = " and ".join(next(iter(by_rank.values()))[0].name for by_rank in of_saves)
        raise CheckpointError(
            f"{folder} holds {names}, which are of two saves: remove all files of the earlier one"
        )
    return dict([*of_saves[0].items()][:degree]) if of_saves else {}


def config_of(model: dict, *keys: str) -> dict:
    """DeepSpeed's config, or what it has under these keys; {} if only a path was saved."""
    config = model.get("ds_config")
    for key in keys:
        config = config.get(key) if isinstance(config, dict) else None
    return config if isinstance(config, dict) else {}


def client_state_of(model: dict) -> dict:
    """What the script has passed to save_checkpoint()."""
    return {key: value for key, value in model.items() if key not in OF_DEEPSPEED}


def own_of(model):
    """What a rank has for itself: its client state, and the values of its buffers."""
    module = model["module"] or {}
    return client_state_of(model), {name: module.get(name) for name in model["buffer_names"]}


def keep_untrained(
    model: dict, names: Any, fragments: tuple | None = None
) -> tuple[dict, list[str]]:
    """Remove trained parameters from the module of model states. Returns these, and the names of
    parameters that were not saved.

    What stays: buffers, frozen parameters, what get_extra_state() or a hook of state_dict() added.
    names: of the trained parameters. fragments: at ZeRO-3, from read_own_states() of each rank.

    Raises: CheckpointError, if parts of a frozen parameter are missing.
    """
    module = model["module"]
    frozen = model.get("frozen_param_shapes") or {}
    shapes = frozen if fragments else {}
    kept = {
        name: join_frozen(name, shape, number, model["frozen_param_fragments"][name], fragments)
        for number, (name, shape) in enumerate(shapes.items())
    }
    shared = model.get("shared_params") or {}
    if aliases := second_names(module, [*names, *shapes], model["buffer_names"]):
        shared = aliases | shared
        model = model | {"shared_params": shared}
    not_saved = []
    # DeepSpeed saves a layer of random-LTD without its wrapper's name.
    unwrapped = {name.replace(".random_ltd_layer", "") for name in names}
    for name in sorted(module.keys() - {*names, *unwrapped, *shared, *kept}):
        tensor = tensor_of(module[name])
        # Of a parameter in no group, which is neither trained nor frozen, ZeRO-3 saves only the
        # name.
        placeholder = fragments is not None and tensor and 0 in tensor.size
        if placeholder and not name.endswith("_extra_state") and name not in model["buffer_names"]:
            not_saved.append(name)
        else:
            kept[name] = trim_storage(tensor) if tensor else module[name]
    # A module may save its parameters under other names.
    renamed = {*names, *shapes} - module.keys()
    model = model | {"module": kept, "frozen_param_fragments": None}
    return model, not_saved if len(not_saved) > len(renamed) else []


def join_frozen(name, shape, number, fragment, fragments):
    """Join a frozen parameter from the parts that all ranks have of it at ZeRO-3. number: of the
    parameter. fragment: rank 0's part."""
    numel = math.prod(shape)
    first = extent_of(tensor_of(fragment))
    unlike = [of_rank for of_rank in fragments if not isinstance(of_rank, RecordsOfFile)]
    present = first.numel * len(fragments)
    if present < numel or any(parts[number].numel != first.numel for parts in unlike):
        raise CheckpointError(f"{numel - present} elements of the frozen {name} are missing")
    extents = ExtentsOfRanks(first, number, fragments)
    return contiguous(first.dtype, Slices(extents, Cut(0, first.numel, 0, numel)), shape)


def second_names(module, names, buffer_names):
    """Returns {second name of a tensor: its first name}, of ties that DeepSpeed does not list.

    They share one storage, or one placeholder. names: the possible first ones.
    """
    first_names = {identity(module[name]): name for name in names if name in module}
    others = sorted(module.keys() - {*first_names.values(), *buffer_names})
    return {
        name: first_names[identity(module[name])]
        for name in others
        if identity(module[name]) in first_names
    }


def identity(value: Any) -> Any:
    """What two names of the same tensor have in common."""
    tensor = tensor_of(value)
    return (tensor.storage, tensor.offset, tensor.size) if tensor else id(value)


def tensors_of_module(model: dict) -> dict[str, Tensor]:
    """The tensors among what keep_untrained() has left of a module."""
    module = model["module"] or {}
    return {name: value for name, value in module.items() if isinstance(value, Tensor)}


def modules_of_layers(folder: Path, degree: int, parameters: Iterable[str]) -> list[dict]:
    """Returns what a pipeline's files of layers hold besides these parameters, as {name: value} of
    each tensor-parallel rank. Names begin with the layer's number. Raises: CheckpointError, if the
    file of one of the parameters is missing.
    """
    wanted = {name.partition(".")[0] for name in parameters}
    modules = []
    for paths in files_of_layers(folder, degree).values() or [[]]:
        module = {}
        present = {str(int(path.name.removeprefix("layer_").partition("-")[0])) for path in paths}
        if missing := {prefix for prefix in wanted if prefix.isdecimal()} - present:
            layer = min(map(int, missing))
            raise CheckpointError(f"{folder} lacks the file layer_{layer:02d}-*model_states.pt")
        for path in paths:
            layer = int(path.name.removeprefix("layer_").partition("-")[0])
            entries = expect(load(path), {str: object}, path)
            module |= {f"{layer}.{key}": value for key, value in entries.items()}
        modules.append({name: module[name] for name in module if name not in parameters})
    return modules


def trimmed(module: dict) -> dict:
    """The entries, with every tensor's storage cut by trim_storage()."""
    tensors = {name: tensor_of(value) for name, value in module.items()}
    return module | {name: trim_storage(tensor) for name, tensor in tensors.items() if tensor}


def common_entries(modules: list[dict]) -> tuple[dict, list[str]]:
    """Returns the entries that are the same in all modules, and the names of the others."""
    entries = {}
    different = set()
    for module in modules:
        for name, value in module.items():
            first = entries.setdefault(name, value)
            # A dict may be a state_dict() itself, as Megatron saves them: it differs by rank.
            differs_by_rank = isinstance(value, dict) and not name.endswith("_extra_state")
            if not differs_by_rank and not is_same(first, value):
                different.add(name)
    for name in different:
        del entries[name]
    return entries, sorted(different)
