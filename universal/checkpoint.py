# SPDX-License-Identifier: MIT
"""Find everything in a DeepSpeed ZeRO checkpoint or a universal one: describe() does so without
reading tensors.

Part 1 handles one data-parallel checkpoint; part 2 joins those of tensor and pipeline parallel
ranks. Reads files with torch_file.py; needs nothing but Python 3.10."""

import itertools
import math
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from universal.torch_file import (
    CheckpointError,
    Joined,
    Slices,
    Tensor,
    about,
    begin_of,
    compact,
    cut_along,
    keep_open,
    load,
    number,
    own_name,
    pickled,
    scalar,
    stub,
    tensor_of,
    whole,
)

# -----------------------------------------------------------------------------
# 1. one data-parallel checkpoint, without reading tensors

MISSING = object()
BETWEEN_SAVES = (
    10  # seconds; the largest gap between the times of successive files of one save, or of its copy
)


class Parameter(NamedTuple):
    """shape: of the whole parameter. flat: the number of the flat tensor that holds it, which is
    the number of its dict in param_shapes; at ZeRO-3, of its sub-group. group: its parameter group.
    states: {state: Slices, or Joined for several tensor-parallel ranks}, fp32 first. scalars: {key:
    Tensor with its bytes, or plain value}, the rest of its optimizer state, the same for a whole
    flat tensor. how: what a state file says besides the tensor."""

    shape: tuple
    flat: int
    group: int
    states: dict
    scalars: dict
    how: dict


class Problem(NamedTuple):
    """What a conversion would lose. fatal: an error, unless --no_strict is given."""

    fatal: bool
    text: str


class Description(NamedTuple):
    """A ZeRO or universal checkpoint without its data. It can be pickled, to send it to other
    processes.

    stage: 1 (for ZeRO-2, too) or 3; 0 for BF16_Optimizer, None for universal folders. ranks: how
    many data-parallel ranks wrote it, or None. tensor, pipeline: the degrees. parameters: {name:
    Parameter}. flats: [[name]], in the order of the flat tensors. kept: {name: Tensor}, the module
    without trained parameters: buffers, frozen parameters, tensors of get_extra_state() or of a
    state_dict hook. extra: names of what is in the module and is not a tensor. frozen: as in the
    model states. param_groups: hyperparameters. uneven: {(flat, key): why}, optimizer states that
    differ by rank or are not cut like the weights. problems: what a conversion would lose. models:
    the model states of each model-parallel rank; optimizer: rank 0's optimizer state; both without
    shards. first: rank 0's file of model states. left: names of files that an earlier save under
    this name left behind."""

    folder: Path
    universal: bool
    stage: int
    bf16: bool
    ranks: int
    tensor: int
    pipeline: int
    parameters: dict
    flats: list
    kept: dict
    extra: list
    frozen: dict
    param_groups: list
    uneven: dict
    problems: list
    models: list
    optimizer: dict
    first: Path
    left: list


def find_tag(folder):
    """The folder with a checkpoint's files: this one, or the one in it that `latest` names, or the
    only one in it."""
    folder = Path(folder)
    if any(folder.glob("*_optim_states.pt")):
        return folder
    if (folder / "latest").is_file():
        return folder / named_by_latest(folder)
    tags = {path.parent for path in folder.glob("*/*_optim_states.pt")}
    if len(tags) > 1:
        names = ", ".join(sorted(tag.name for tag in tags))
        raise CheckpointError(
            f"{folder} holds several checkpoints, and no `latest` that names one: {names}"
        )
    return tags.pop() if tags else folder


def is_newer(universal, folder):
    """Whether the folder has been converted already, and no other folder was moved into its place
    since then."""
    made = universal / "zero" / "optimizer_state.pt"
    since = max(folder.stat().st_ctime, *(path.stat().st_mtime for path in folder.glob("*.pt")))
    return made.is_file() and made.stat().st_mtime >= since


def named_by_latest(folder):
    """The tag that `latest` names, or else `latest_universal`; "" if there is neither."""
    for path in (folder / "latest", folder / "latest_universal"):
        if path.is_file():
            return os.fsdecode(path.read_bytes()).strip().replace("\0", "?")
    return ""


def tags(folder):
    """The names of the checkpoints in a folder, whole or not. A tag like epoch1/step5 is a folder
    in a folder; such tags are found if they are next to the one that `latest` names."""
    found = set()
    for place in {folder, (folder / named_by_latest(folder)).parent}:
        for path in place.glob("[!.]*/*mp_rank_00_model_states.pt"):
            if not path.parent.name.endswith((".unfinished", ".replaced")):
                found.add(os.path.relpath(path.parent, folder))
    return sorted(found)


def first_models(folder):
    """Rank 0's file of model states. If two saves left one each, that of the newest whole
    checkpoint."""
    both = (
        folder / "mp_rank_00_model_states.pt",
        folder / "zero_pp_rank_0_mp_rank_00_model_states.pt",
    )
    found = [path for path in both if path.exists()]
    if len(found) == 2 and not (folder / "zero").is_dir() or len(find_shards(folder)) > 1:
        return describe(folder).first
    return found[0] if found else both[any(folder.glob("zero_pp_*_model_states.pt"))]


def newest_first(folder, say):
    """The tags in a folder, in the order in which to try to resume from them: first the one that
    `latest` names, unless there is a later one. say(text) reports what is skipped."""
    named, steps, written = named_by_latest(folder), {}, {}
    for name in tags(folder):
        try:
            path = first_models(folder / name)
            with about(path):
                steps[name] = int(load(path)["global_steps"])
            written[name] = path.stat().st_mtime
        except (CheckpointError, OSError) as error:
            say(f"{name} is passed over: {type(error).__name__}: {error}")
    # A tag of fewer steps that was saved later means that the run went back. Converted tags are
    # always late.
    saved = {name: not (folder / name / "zero").is_dir() for name in steps}
    given_up = {
        a
        for a in steps
        for b in steps
        if saved[b] and steps[b] < steps[a] and written[b] > written[a] + BETWEEN_SAVES
    }
    order = sorted(
        steps, key=lambda name: (name not in given_up, steps[name], saved[name]), reverse=True
    )
    # A job killed before it wrote `latest` leaves a newer tag. Others are from an earlier run, or
    # `latest` was edited.
    if named in steps:
        since = (
            (folder / ("latest" if (folder / "latest").is_file() else "latest_universal"))
            .stat()
            .st_mtime
        )
        later = [name for name in order if steps[name] > steps[named] and written[name] > since]
        if later:
            say(
                f"`latest` names {named}, and {later[0]} was written after it: the later one is taken, if it is whole"
            )
        return list(dict.fromkeys([*later, named, *order]))
    if named:
        say(f"`latest` names {named}, which holds no checkpoint")
    return order


def find_shards(folder):
    """The optimizer shards as {prefix of the file, its dtype: {model-parallel rank: {data-parallel
    rank: path}}}."""
    shards = {}
    for path in sorted(folder.glob("*_optim_states.pt")):
        match = re.fullmatch(
            r"(bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt", path.name
        )
        if match is None:
            raise CheckpointError(
                f"{path} is not the optimizer shard of a ZeRO checkpoint of dense layers"
            )
        prefix, rank, mp_rank = match.groups()
        shards.setdefault(prefix, {}).setdefault(int(mp_rank), {})[int(rank)] = path
    return shards


def is_stage_3(optimizer):
    return "fp32_flat_groups" in optimizer


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


class DataParallel(NamedTuple):
    """One model-parallel rank, joined from its data-parallel ranks."""

    model: dict  # rank 0's; `module` cut down to what no optimizer holds
    optimizer: dict  # rank 0's
    parameters: dict
    uneven: dict
    problems: list
    files: list  # rank 0's model states first


def describe_ranks(folder, mp_rank, shards, pool, opened):
    low = min(shards)
    with about(shards[low]):
        first = load(shards[low])["optimizer_state_dict"]
        count = first["partition_count"]
        count = range(
            count if isinstance(count, int) else max(count)
        ).stop  # a TypeError if it is not a number
    for missing in (r for r in range(count) if r not in shards):
        name = shards[low].name.replace(f"_rank_{low}_", f"_rank_{missing}_", 1)
        raise CheckpointError(f"{folder / name} is missing")
    prefixes = [f"zero_pp_rank_{r}_" for r in range(count)] if is_stage_3(first) else [""]
    paths = [folder / f"{prefix}mp_rank_{mp_rank:02d}_model_states.pt" for prefix in prefixes]
    model, frozen = read_models(paths, shards[low], count, pool)
    if list(folder.glob("layer_*_expert_*")) or model.get("ds_autoep_layers"):
        raise CheckpointError(
            f"{folder} has experts, which are not converted: DeepSpeed's own converter does AutoEP's"
        )
    with about(shards[low]):
        groups = [places(first, i, names, count) for i, names in enumerate(model["param_shapes"])]
        config = (
            model["ds_config"] if isinstance(model["ds_config"], dict) else {}
        )  # older versions: a file's path
        round_robin = (config.get("zero_optimization") or {}).get("round_robin_gradients")

    def read_shard(rank):
        """[Flat] of a rank, and its settings_of()."""
        path = shards[rank]
        with about(path):
            optimizer = first if rank == low else load(path)["optimizer_state_dict"]
            if len(flat_groups(optimizer)) != len(groups):
                raise CheckpointError(
                    f"{path} has another number of parameter groups than {paths[0].name}"
                )
            found = []
            for i, (names, end) in enumerate(groups):
                needed = check_slices(optimizer, i, rank, count, names, end, round_robin)
                found.append(flat_states(optimizer, i, needed, opened))
            return found, settings_of(optimizer, opened)

    ranks, settings = zip(*pool.map(read_shard, range(count)), strict=True)
    with about(shards[low]):
        parameters, uneven = put_together(
            shards, ranks, groups, model["param_shapes"], base_optimizer(first)
        )
        uneven |= differences(settings)
    files = [*paths, *(shards[rank] for rank in range(count))]
    problems = other_steps(paths[0], files[len(paths) :], model, parameters, is_stage_3(first))
    if lost := ", ".join(lost_states(uneven, parameters, first)):
        text = f"{shards[low]}: {lost} of the optimizer: a universal checkpoint has no place for"
        problems.append(Problem(True, f"{text} what belongs to no single element"))
    with about(paths[0]):
        if model["module"] is not None:
            model["module"], lost = module_of(model, frozen, parameters, count)
            # The other tensor-parallel ranks have the same names, but only rank 0's shared_params
            # says which are tied.
            if lost and not mp_rank:
                problem = f"{paths[0]}: no parameter group holds {', '.join(lost)}, and DeepSpeed saved nothing of it"
                problems.append(Problem(True, problem))
            model["frozen_param_fragments"] = None
    return DataParallel(model, first, parameters, uneven, problems, files)


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


def other_steps(path, shards, model, parameters, stage_3):
    """[a Problem] if the optimizer is of another step than the module, for example after a start
    from weights alone. At ZeRO-3 only the files' times tell that from a save that was killed
    between model states and shards."""
    with about(path):
        wanted = model["global_steps"] - model["skipped_steps"]
    steps = {number(p.scalars.get("step")) for p in parameters.values()} - {None, wanted}
    if not steps:
        return []
    text = f"{path} is of step {wanted}, the optimizer of step {sorted(steps)}"
    if (
        stage_3
        and path.stat().st_mtime > max(shard.stat().st_mtime for shard in shards) + BETWEEN_SAVES
    ):
        raise CheckpointError(
            f"{text} and older: a save was killed before its shards (or was copied: touch the shards)"
        )
    return [Problem(False, text)]


def read_models(paths, shard, count, pool):
    """(rank 0's model states, [{frozen parameter: Tensor} of every rank] or None)."""
    model = load(paths[0])
    with about(paths[0]):
        if model["dp_world_size"] != count:
            raise CheckpointError(
                f"{paths[0]} is of {model['dp_world_size']} ranks, {shard.name} of {count}"
            )

    def read_model(path):
        state = load(path)
        with about(path):
            for key in (
                "dp_world_size",
                "param_shapes",
                "buffer_names",
                "frozen_param_shapes",
                "global_steps",
            ):
                if state.get(key) != model.get(key):
                    raise CheckpointError(f"{path} has other {key} than {paths[0].name}")
            names = model.get("frozen_param_shapes") or {}
            return {name: tensor_of(state["frozen_param_fragments"][name]) for name in names}

    # At ZeRO-1 and 2 all ranks share one file, in which frozen parameters are whole.
    return model, list(pool.map(read_model, paths)) if "zero_pp_rank_" in paths[0].name else None


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
    for name in sorted({*model["buffer_names"], *module} - accounted):
        tensor = tensor_of(module[name])
        # Of a parameter in no group, which is neither trained nor frozen, ZeRO-3 saves only the
        # name.
        placeholder = frozen and tensor and 0 in tensor.size and not name.endswith("_extra_state")
        if placeholder and name not in model["buffer_names"]:
            lost.append(name)
        else:
            kept[name] = compact(tensor) if tensor else module[name]
    return kept, lost


# -----------------------------------------------------------------------------
# 2. tensor and pipeline parallelism; describe()


class TensorParallel:
    """How tensor-parallel ranks cut a parameter, by the checkpoint's universal_checkpoint_info.

    Its entries are DeepSpeed's (deepspeed/checkpoint/constants.py), most of them lists of regular
    expressions."""

    LISTS = (
        "tp_replicated_parameter_patterns",
        "parameter_to_average_patterns",
        "vocabulary_parameter_patterns",
        "parameter_with_row_parallelism_patterns",
        "parameter_with_2_sub_params_cat_dim_0",
    )

    def __init__(self, info, degree, folder):
        self.info = info or {}
        self.degree = degree
        self.folder = folder
        self.unused = set()
        self.problems = []
        if degree > 1 and not info:
            raise CheckpointError(
                f"{folder} has {degree} tensor-parallel ranks and no universal_checkpoint_info, which says how they "
                "are cut: it must be in the client state when the checkpoint is saved"
            )
        self.affine = self.info.get("affine_map") or {"params": {}}
        if self.affine.get("version", 1) > 1:
            raise CheckpointError(
                f"{folder}: affine map of version {self.affine['version']}, and only 1 is known"
            )
        rows = "parameter_with_row_parallelism_patterns"
        subs = self.info.get("parameter_with_sub_params", [])
        if degree > 1:
            self.unused = {pattern for key in self.LISTS for pattern in self.info.get(key, [])}
            self.unused |= {pattern for sub in subs for pattern in sub["patterns"]}
        elif info and not (self.info.get(rows) or self.affine["params"]):
            text = f"{folder}: universal_checkpoint_info names no row-parallel weights ({rows}): if there are some, "
            self.problems = [
                Problem(False, text + "the result is wrong on more than one tensor-parallel rank")
            ]

    def match(self, patterns, name):
        matched = [pattern for pattern in patterns if re.match(pattern, name)]
        self.unused -= set(matched)
        if len(matched) > 1:
            raise CheckpointError(
                f"{self.folder}: {name} matches more than one pattern: {', '.join(matched)}"
            )
        return matched[0] if matched else None

    def tied(self, name):
        return self.match(self.info.get("pipeline_replicated_parameter_patterns", []), name)

    def how_cut(self, name, shapes):
        """(shape of the whole, blocks or None for a mean, what the loader needs to cut it again)
        for the parameter that has these shapes on its ranks. On one rank it is whole, but the file
        must still say how more ranks would cut it."""
        found = {key: self.match(self.info.get(key, []), name) for key in self.LISTS}
        sub = next(
            (
                s
                for s in self.info.get("parameter_with_sub_params", [])
                if self.match(s["patterns"], name)
            ),
            None,
        )
        affine = self.match(self.affine["params"], name)
        two = found["parameter_with_2_sub_params_cat_dim_0"]
        if self.match(self.info.get("autotp_unsupported_parameter_patterns") or {}, name):
            raise CheckpointError(f"{self.folder}: DeepSpeed did not record how {name} is cut")
        # For layers that no category describes (bigcode, codegen, shared QK) AutoTP saves a map of
        # every element. So look for the map first.
        if affine:
            shape, blocks = self.affine_blocks(name, self.affine["params"][affine])
            return shape, blocks, {}
        # Every rank has the whole: compare them, and take one.
        if found["tp_replicated_parameter_patterns"]:
            stride = whole("", b"", shapes[0]).stride
            return (
                shapes[0],
                tuple((rank, shapes[0], stride, 0, stride, 0) for rank in range(self.degree)),
                {},
            )
        # Every rank has the whole, but computed its own, such as a LayerNorm that is not
        # synchronized: take the mean.
        if found["parameter_to_average_patterns"]:
            return shapes[0], None, {}
        # Q, K and V in one matrix, or a gate and its value: each is cut by itself, so a rank has a
        # part of each.
        if sub and not two:
            return self.sub_parameters(name, shapes, sub)
        # All else is cut along one dimension: row-parallel weights along the input, others along
        # the first.
        dim = 1 if found["parameter_with_row_parallelism_patterns"] and not two else 0
        size = [sum(s[d] for s in shapes) if d == dim else n for d, n in enumerate(shapes[0])]
        parts, how = (2, {"cat_dim": 0, "param_n_sub_params": 2}) if two else (1, {"cat_dim": dim})
        blocks = cut_along(dim, size, parts * [[s[dim] // parts for s in shapes]]) if size else ()
        # The vocabulary was padded to a multiple of the ranks.
        if found["vocabulary_parameter_patterns"]:
            return (
                (self.info["original_vocab_size"], *size[1:]),
                blocks,
                how | {"vocab_tensor": True},
            )
        return tuple(size), blocks, how

    def affine_blocks(self, name, entry):
        blocks = []
        for rank, shard in entry["ranks"].items():
            for piece in shard["pieces"]:
                if piece.get("scale", 1.0) != 1.0:
                    raise CheckpointError(
                        f"{self.folder}: {name} is stored scaled, its states cannot be converted"
                    )
                (there, full_stride) = piece["source"]
                (here, stride) = piece["dest"]
                blocks.append((int(rank), piece["shape"], stride, here, full_stride, there))
        return tuple(entry["logical_shape"]), tuple(blocks)

    def sub_parameters(self, name, shapes, sub):
        dim = sub["partition_dim"]
        spec = sub["shape"][sub["partition_dim"]]
        total = sum(math.prod(shape) for shape in shapes)
        if isinstance(spec, int):  # before version 0.4: a number of sub-parameters of equal size
            spec = (sum(shape[dim] for shape in shapes) // spec,) * spec
        widths = [[size // self.degree] * self.degree for size in spec]
        if self.info.get("universal_checkpoint_version", 0.0) >= 0.4:
            widths = self.info["sub_param_shard_widths"][self.match(sub["patterns"], name)]
        if [sum(width) for width in widths] != list(spec):
            raise CheckpointError(
                f"{self.folder}: the widths of {name}, {widths}, do not make up its sizes {spec}"
            )
        size = [sum(n) if isinstance(n, (tuple, list)) else n for n in sub["shape"]]
        size[dim] = sum(spec)
        if -1 in size:
            size[size.index(-1)] = total // -math.prod(size)
        if math.prod(size) != total:
            raise CheckpointError(
                f"{self.folder}: {name} has {total} elements, which do not make up {size}"
            )
        shape = tuple(spec if d == dim else n for d, n in enumerate(sub["shape"]))
        state = {"patterns": sub["patterns"], "shape": shape, "partition_dim": dim}
        described = stub(
            own_name("deepspeed.checkpoint.universal_checkpoint", "SubparamShape"), (), state=state
        )
        return tuple(size), cut_along(dim, size, widths), {"sub_param_shape": described}

    def join(self, name, parts):
        """One Parameter from those of the tensor-parallel ranks."""
        if self.degree == 1 and not self.info:
            return parts[0]
        shape, blocks, how = self.how_cut(name, [part.shape for part in parts])
        states = {}
        numel = math.prod(shape)
        for key in parts[0].states:
            slices = tuple(part.states[key] for part in parts)
            if len({part.dtype for part in slices}) > 1 or numel > sum(
                part.numel for part in slices
            ):
                raise CheckpointError(
                    f"{self.folder}: the shards of {name} do not cover its elements exactly once"
                )
            if self.degree == 1 and not self.affine["params"]:
                states[key] = slices[0]._replace(numel=numel)
            else:
                states[key] = Joined(f"{key} of {name}", slices, blocks, numel)
        return parts[0]._replace(shape=shape, states=states, how=how)


def describe(folder, workers=4, opened=None):
    """The Description of the ZeRO or universal checkpoint in a folder. Reads no tensors but the
    optimizer's scalars, and runs no code. Raises CheckpointError if files are missing, damaged, or
    not of the same checkpoint."""
    folder = Path(folder)
    opened = opened or keep_open()
    if not folder.is_dir():
        raise CheckpointError(f"{folder} does not exist")
    with ThreadPoolExecutor(workers) as pool:
        if (folder / "zero").is_dir():
            return describe_universal(folder, pool, opened)
        found, problems = [], []
        for shards in find_shards(folder).values():
            try:
                one = describe_shards(folder, shards, pool, opened)
                found.append(
                    (
                        not one.problems,
                        one.models[0]["global_steps"],
                        shards[0][0].stat().st_mtime,
                        one,
                    )
                )
            except CheckpointError as error:
                problems.append(str(error))
    if found:
        # Saved again under the same name in another dtype, both may be whole. Copies have no usable
        # times; the doubt is about the step.
        newest = max(written for _, _, written, _ in found) - BETWEEN_SAVES
        return max((one for one in found if one[2] > newest), key=lambda one: one[:3])[3]
    nothing = f"{folder} holds no *_optim_states.pt: it is no ZeRO checkpoint, nor a folder above"
    raise CheckpointError("; ".join(problems) or nothing)


def describe_shards(folder, shards, pool, opened):
    """The Description of the checkpoint that has these shards."""
    if (folder / "offloaded_tensors").exists():
        raise CheckpointError(f"{folder} has NVMe-offloaded states, which are not converted")
    first = describe_ranks(folder, min(shards), shards[min(shards)], pool, opened)
    with about(folder):
        model = first.model
        degrees = model.get("checkpoint_parallel_dimensions") or {}
        pipeline = degrees.get("pp_degree") or (1 if model["module"] is not None else len(shards))
        tensor = degrees.get("tp_degree") or len(shards) // pipeline
        if missing := set(range(tensor * pipeline)) - shards.keys():
            names = ", ".join(f"mp_rank_{mp:02d}" for mp in sorted(missing))
            raise CheckpointError(
                f"{folder} has {tensor} tensor x {pipeline} pipeline ranks, and lacks {names}"
            )
        others = [
            describe_ranks(folder, mp, shards[mp], pool, opened)
            for mp in range(1, tensor * pipeline)
        ]
        ranks = [first, *others]
        used = {path.name for rank in ranks for path in rank.files}
        parameters, problems = join_ranks(
            folder, ranks, tensor, model.get("universal_checkpoint_info")
        )
        return described(
            folder,
            [rank.model for rank in ranks],
            first.optimizer,
            parameters,
            base_optimizer(first.optimizer)["param_groups"],
            universal=False,
            stage=3 if is_stage_3(first.optimizer) else int("zero_stage" in first.optimizer),
            bf16=shards[0][0].name.startswith("bf16_"),
            ranks=model["dp_world_size"],
            tensor=tensor,
            pipeline=pipeline,
            uneven=dict(item for rank in ranks for item in rank.uneven.items()),
            problems=[problem for rank in ranks for problem in rank.problems] + problems,
            first=first.files[0],
            left=sorted({path.name for path in folder.glob("*mp_rank_*_states.pt")} - used),
        )


def left_over(description):
    """[a line about what an earlier save left in the folder], or []."""
    left = description.left
    text = (
        f"{description.folder} was saved again under its name; left over from before, and ignored: "
    )
    return (
        [text + ", ".join(left[:3]) + (f" and {len(left) - 3} more" if left[3:] else "")]
        if left
        else []
    )


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


def join_ranks(folder, ranks, tensor, info):
    """({name: Parameter}, problems), joined from the model-parallel ranks of each pipeline
    stage."""
    for rank in ranks:
        for key in ("global_steps", "dp_world_size"):
            if rank.model[key] != ranks[0].model[key]:
                raise CheckpointError(
                    f"{folder}: its model-parallel ranks are of different saves: {key} differs"
                )
        if len(rank.model["param_shapes"]) != len(
            ranks[0].model["param_shapes"]
        ):  # the loader goes by number
            raise CheckpointError(
                f"{folder}: a pipeline stage lacks a parameter group that others have"
            )
    joined = {}
    cuts = TensorParallel(info, tensor, folder)
    for stage in range(0, len(ranks), tensor):
        parts = [rank.parameters for rank in ranks[stage : stage + tensor]]
        if any(part.keys() != parts[0].keys() for part in parts):
            raise CheckpointError(
                f"{folder}: tensor-parallel ranks of stage {stage} hold different parameters"
            )
        for name in parts[0]:
            if name not in joined:
                joined[name] = cuts.join(name, [part[name] for part in parts])
            elif not cuts.tied(name):
                raise CheckpointError(
                    f"{folder}: {name} is in two pipeline stages and is not declared as tied"
                )
    if cuts.unused:
        text = f"{folder}: universal_checkpoint_info has patterns that match no parameter: "
        cuts.problems.append(Problem(True, text + ", ".join(sorted(cuts.unused))))
    return joined, cuts.problems


def file_name(name):
    """A name from the checkpoint as part of a path, in UTF-8 whatever the locale; it must not point
    out of the folder."""
    plain = isinstance(name, str) and name == os.path.normpath(name) and "\0" not in name
    if not plain or name in (".", "..") or name.startswith(("../", "/")):
        raise CheckpointError(
            f"{name!r} is the name of a parameter or a state, and cannot be that of a file"
        )
    return os.fsdecode(name.encode())


def describe_universal(folder, pool, opened):
    """Describes the output of our converter or DeepSpeed's. The latter leaves weights in `module`,
    and at ZeRO-3 also rank 0's part of frozen ones, its whole shard in optimizer_state.pt, and
    tensors without their shape."""
    paths = sorted(folder.glob("mp_rank_*_model_states.pt")) or sorted(
        folder.glob("*_model_states.pt")
    )
    if not paths:
        raise CheckpointError(
            f"{folder} holds no *_model_states.pt: it is not a checkpoint of DeepSpeed"
        )
    models = [load(path) for path in paths]
    file = folder / "zero" / "optimizer_state.pt"
    with about(file):
        optimizer = load(file)
        base = base_optimizer(optimizer) if is_stage_3(optimizer) else {"state": {}}
        common = {
            key: scalar(value, opened)
            for key, value in base["state"].get(0, {}).items()
            if key == "step"
        }
        groups = optimizer.get("param_groups") or optimizer["optimizer_state_dict"]["param_groups"]
        group_of = {flat: i for i, group in enumerate(groups) for flat in group["params"]}

    def read_parameter(name, flat):
        place = folder / "zero" / file_name(name)
        states = {}
        scalars = common
        how = {}
        shape = None
        for path in [place / "fp32.pt", *sorted(set(place.glob("*.pt")) - {place / "fp32.pt"})]:
            with about(path):
                content = load(path)
                if path.stem == "step":
                    scalars = {"step": scalar(content, opened)}
                    continue
                how = (
                    {key: value for key, value in content.items() if key != "param"}
                    if type(content) is dict
                    else how
                )
                tensor = tensor_of(content["param"] if type(content) is dict else content)
                states[path.stem] = Slices.of(tensor)
                shape = tensor.size if path.stem == "fp32" else shape
        return name, Parameter(tuple(shape), flat, group_of.get(flat), states, scalars, how)

    with about(paths[0]):
        names = {
            name: flat
            for model in models
            for flat, names in enumerate(model["param_shapes"])
            for name in names
        }
        parameters = dict(pool.map(read_parameter, names, names.values()))
        for model in models:
            frozen = model.get("frozen_param_shapes") or {}
            module = model["module"] or {}
            gone = {*parameters, *(model.get("shared_params") or {})}
            gone |= {
                n
                for n in frozen.keys() & module.keys()
                if tuple(module[n].size) != tuple(frozen[n])
            }
            pairs = (
                (name, tensor_of(module[name]) or module[name])
                for name in module
                if name not in gone
            )
            model["module"] = {
                name: compact(t) if isinstance(t, Tensor) else t for name, t in pairs
            }
    return described(
        folder,
        models,
        optimizer,
        parameters,
        groups,
        universal=True,
        stage=None,
        bf16=None,
        ranks=None,
        tensor=1,
        pipeline=1,
        uneven={},
        problems=[],
        first=paths[0],
        left=[],
    )
