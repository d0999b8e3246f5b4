# SPDX-License-Identifier: MIT
"""Find everything in a DeepSpeed ZeRO checkpoint or a universal one: describe() does so without
reading tensors.

Part 1 handles one data-parallel checkpoint; part 2 joins those of tensor and pipeline parallel
ranks; part 3 describes what a converter wrote. Needs nothing but Python 3.10."""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from universal.byte_ranges import keep_open
from universal.description import Parameter, Problem
from universal.errors import CheckpointError, about
from universal.module_states import described, module_of
from universal.stage_0 import describe_whole, is_whole
from universal.tensor_parallel import TensorParallel
from universal.torch_file import (
    Tensor,
    compact,
    load,
    number,
    pickled,
    scalar,
    slices_of,
    tensor_of,
)
from universal.zero import (
    base_optimizer,
    check_slices,
    class_of,
    differences,
    flat_groups,
    flat_states,
    is_stage_3,
    lost_states,
    places,
    put_together,
    settings_of,
)

BETWEEN_SAVES = (
    10  # seconds; the largest gap between the times of successive files of one save, or of its copy
)


def describe(folder, workers=4, opened=None, names=None):
    """The Description of the checkpoint in a folder. Reads no tensors but the optimizer's scalars,
    and runs no code. names: as in describe_whole(), if it was saved without ZeRO. Raises
    CheckpointError if files are missing, damaged, or not of the same checkpoint."""
    folder = Path(folder)
    opened = opened or keep_open()
    if not folder.is_dir():
        raise CheckpointError(f"{folder} does not exist")
    if is_whole(folder):
        return describe_whole(folder, names, opened)
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


# --------------------------------------------------------------------------------------------------
# 1. one data-parallel checkpoint


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


# --------------------------------------------------------------------------------------------------
# 2. tensor and pipeline parallelism


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
        modules = [rank.model["module"] for rank in ranks]
        if model["module"] is None:
            modules = modules_of_layers(folder, parameters)
        model["module"], different = common_entries(modules)
        if different:
            text = f"{folder}: {', '.join(different)} is in no optimizer, and not the same on all"
            problems.insert(0, Problem(True, f"{text} tensor-parallel ranks"))
        return described(
            folder,
            [rank.model for rank in ranks],
            first.optimizer,
            parameters,
            base_optimizer(first.optimizer)["param_groups"],
            universal=False,
            stage=3 if is_stage_3(first.optimizer) else 1,
            optimizer_class=class_of(first.optimizer),
            bf16=shards[0][0].name.startswith("bf16_"),
            ranks=model["dp_world_size"],
            tensor=tensor,
            pipeline=pipeline,
            uneven=dict(item for rank in ranks for item in rank.uneven.items()),
            problems=[problem for rank in ranks for problem in rank.problems] + problems,
            first=first.files[0],
            left=sorted({path.name for path in folder.glob("*mp_rank_*_states.pt")} - used),
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


def modules_of_layers(folder, parameters):
    """[{name: tensor}]: what a pipeline's files of its layers hold besides trained parameters.

    A name begins with the number of the layer. Each tensor-parallel rank has files of its own.
    """
    modules = {}
    for path in sorted(folder.glob("layer_*-model_states.pt")):
        layer, *ranks = path.name.removeprefix("layer_").split("-")
        module = modules.setdefault(tuple(ranks), {})
        with about(path):
            entries = {f"{int(layer)}.{key}": value for key, value in load(path).items()}
            for name in entries.keys() - parameters.keys():
                tensor = tensor_of(entries[name])
                module[name] = compact(tensor) if tensor else entries[name]
    return list(modules.values())


def common_entries(modules):
    """({name: tensor} of what is the same in all modules that have it, names of the others)."""
    contents = {}
    entries = {}
    for module in modules:
        for name, value in module.items():
            contents.setdefault(name, set()).add(content_of(value))
            entries[name] = value
    different = sorted(name for name, values in contents.items() if len(values) > 1)
    for name in different:
        del entries[name]
    return entries, different


def content_of(value):
    """What tells whether two entries of a module hold the same: tensors, by their checksums."""
    if not isinstance(value, Tensor):
        return pickled(value)[0]
    sums = tuple((record.crc, record.nbytes) for record in value.storage.records)
    return value._replace(storage=value.storage._replace(records=sums))


# --------------------------------------------------------------------------------------------------
# 3. universal checkpoints


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
                states[path.stem] = slices_of(tensor)
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
        optimizer_class=None,
        bf16=None,
        ranks=None,
        tensor=1,
        pipeline=1,
        uneven={},
        problems=[],
        first=paths[0],
        left=[],
    )
