# SPDX-License-Identifier: MIT
"""Find everything in a DeepSpeed ZeRO checkpoint or a universal one, without reading its tensors.

In a ZeRO checkpoint every rank has saved a file of optimizer states, a shard. describe() joins the
shards of all data-parallel ranks (zero.py), then what tensor-parallel ranks have of each parameter
(tensor_parallel.py), then the stages of a pipeline.
"""

import functools
import itertools
import re
from concurrent.futures import Executor
from pathlib import Path

from universal.checkpoint.converted import describe_universal
from universal.checkpoint.experts import expert_data_groups, read_experts
from universal.checkpoint.module_states import (
    client_state_of,
    common_entries,
    config_of,
    degrees_of,
    files_of_layers,
    keep_untrained,
    modules_of_layers,
    names_beside,
    read_model_states,
    read_own_states,
    tensors_of_module,
    trimmed,
)
from universal.checkpoint.pipeline import without_tied
from universal.checkpoint.tensor_parallel import INFO_KEY, TensorParallel
from universal.checkpoint.types import (
    UNSAVED,
    Checkpoint,
    Layout,
    Limit,
    Problem,
    kind_with_unsaved,
)
from universal.checkpoint.zero import (
    ModelParallelRank,
    cut_flat,
    differences,
    join_slices,
    optimizer_state,
    problems_of_ranks,
    rank_dependent,
    read_shard,
    read_slice,
    shared_rest,
)
from universal.errors import CheckpointError, Refused, adding_path
from universal.files.processes import pool_of
from universal.files.same import is_same
from universal.files.schema import expect
from universal.files.sources import ByteReader
from universal.files.torch_file import load, number_in, tensor_of

# Seconds; the largest gap between the times of successive files of one save, or of its copy.
BETWEEN_SAVES = 10
MODEL_STATES_FILE = "mp_rank_00_model_states.pt"


def describe(folder: str | Path, workers: int = 4, pool: Executor | None = None) -> Checkpoint:
    """Describe the checkpoint in a folder. Runs no code that is in it.

    Reads no tensors but the optimizer's scalars, and, for tied layers, some elements of weights.
    pool: in place of so many threads or processes.

    Raises: CheckpointError, if files are missing, damaged, or not of the same checkpoint; Refused,
        if it was saved without ZeRO, or twice.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} does not exist")
    shards = find_shards(folder)
    if (folder / "zero").is_dir() and not shards:
        with pool or pool_of(workers, 0) as pool:
            return describe_universal(folder, pool)
    check_one_save(folder)
    if is_without_zero(folder):
        raise Refused(
            f"{folder} was saved without ZeRO: resume it without ZeRO, which any number of "
            f'data-parallel ranks can, or begin with its weights: "module" in {MODEL_STATES_FILE}'
        )
    if not shards:
        nothing = "it is no ZeRO checkpoint, nor a folder above"
        if (folder / MODEL_STATES_FILE).exists():
            nothing = f'copy them, or begin with its weights: "module" in {MODEL_STATES_FILE}'
        elif any(folder.glob("zero_pp_rank_*_model_states.pt")):
            nothing = "copy them, as at ZeRO-3 they hold the weights"
        raise CheckpointError(f"{folder} holds no *_optim_states.pt: {nothing}")
    (shards,) = shards.values()
    files = sum(map(len, shards.values()))
    with pool or pool_of(workers, files) as pool:
        return describe_zero(folder, shards, pool)


def is_without_zero(folder: Path) -> bool:
    """Whether a checkpoint was saved without ZeRO. Raises CheckpointError."""
    path = folder / MODEL_STATES_FILE
    return path.exists() and expect(load(path), dict, path).get("param_shapes", {}) is None


def check_one_save(folder: Path) -> None:
    """Raises Refused if two saves, of other stages or dtypes, are mixed under one name."""
    shards = find_shards(folder)
    names = (MODEL_STATES_FILE, f"zero_pp_rank_0_{MODEL_STATES_FILE}")
    is_converted = (folder / "zero").is_dir()  # for every stage
    of_two_stages = not is_converted and all((folder / name).exists() for name in names)
    if of_two_stages or len(shards) > 1:
        raise Refused(
            f"{folder} was saved twice under its name, at other stages or in other dtypes: move "
            "the files of the earlier save away"
        )


def find_shards(folder: Path) -> dict:
    """Find the optimizer shards in a folder.

    Returns: {prefix of the file, its dtype: {model-parallel rank: {data-parallel rank: path}}}.
    """
    shards = {}
    for path in sorted(folder.glob("[!.]*_optim_states.pt")):
        match = re.fullmatch(
            r"(bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt", path.name
        )
        if match:
            prefix, rank, mp_rank = match.groups()
            shards.setdefault(prefix, {}).setdefault(int(mp_rank), {})[int(rank)] = path
    return shards


def left_over(checkpoint: Checkpoint) -> list[str]:
    """Returns a list with a line about files of an earlier save; without such, an empty one."""
    names = checkpoint.left_over
    if not names:
        return []
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return [
        f"{checkpoint.folder} was saved again under its name; left over from before, and ignored: "
        f"{', '.join(names[:3])}{more}"
    ]


def paths_of(checkpoint: Checkpoint) -> list[Path]:
    """The checkpoint's own .pt files: none of an earlier save, and none that a script has added."""
    folder = checkpoint.folder
    paths = [*folder.glob("[!.]*_states.pt")]
    if checkpoint.is_universal:
        paths += folder.glob("zero/**/[!.]*.pt")
    return sorted(path for path in paths if path.name not in checkpoint.left_over)


# --------------------------------------------------------------------------------------------------
# 1. the data-parallel ranks of one model-parallel rank


def describe_one_rank(folder, mp_rank, paths, pool):
    """Describe one model-parallel rank from its shards. paths: {data-parallel rank: path}."""
    shard = read_shard(paths[min(paths)])
    ranks = max(shard.ranks)
    check_present(folder, paths, ranks)
    model_paths = model_states_of(folder, mp_rank, shard)
    model = read_model_states(model_paths[0])
    config = config_of(model)
    if config.get("data_parallel_size") and config.get("sequence_parallel_size", 1) > 1:
        raise Refused(
            f"{folder}: data_parallel_size beside sequence_parallel_size makes a mesh, whose ranks "
            "DeepSpeed lets train apart and save under the same names: give initialize() an mpu"
        )
    if (folder / "offloaded_tensors").exists() and may_be_on_nvme(model):
        raise CheckpointError(f"{folder} has NVMe-offloaded states, which are not converted")
    experts = read_experts(folder, model)
    if experts.files:  # they may be all that is trained, and are cut for fewer ranks
        ranks = model["dp_world_size"]
        check_present(folder, paths, ranks)
    shards = [paths[rank] for rank in range(ranks)]
    if model["dp_world_size"] != ranks:
        raise CheckpointError(
            f"{model_paths[0]} is of {model['dp_world_size']} ranks, {shards[0].name} of {ranks}"
        )
    client_states = [client_state_of(model)]
    fragments = None  # at ZeRO-1 and 2 frozen parameters are whole
    if shard.stage == 3:
        of_rank_0 = {"first_path": model_paths[0], "first": model}
        read = functools.partial(read_own_states, known={}, **of_rank_0)
        fragments, differ = zip(*pool.map(read, model_paths), strict=True)
        client_states += [None] * any(differ)
    parameters, rests, lost = describe_shards(shard, shards, model, experts, pool)
    problems = []
    if model["module"] is not None:
        model = model | {"module": model["module"] | experts.state}
        with adding_path(model_paths[0]):
            model, not_saved = keep_untrained(model, parameters, fragments)
        # Only rank 0's shared_params says which are tied.
        if not_saved and not mp_rank:
            text = (
                f"{model_paths[0]}: no parameter group holds {', '.join(not_saved)}, "
                "and DeepSpeed saved nothing of it"
            )
            problems.append(Problem(Limit.FILES, text))
    files = [*model_paths, *experts.files, *shards]
    return ModelParallelRank(model, shard, parameters, rests, lost, problems, files, client_states)


def may_be_on_nvme(model):
    """Whether the optimizer was on NVMe, or the config does not tell.

    The folder offloaded_tensors alone proves nothing: an earlier save may have left it.
    """
    offload = config_of(model, "zero_optimization", "offload_optimizer")
    return not config_of(model) or offload.get("device") == "nvme"


def check_present(folder, paths, ranks):
    """Raises CheckpointError, if a rank's shard is missing."""
    missing = [rank for rank in range(ranks) if rank not in paths]
    if missing:
        first, *others = missing
        lowest = min(paths)
        name = paths[lowest].name.replace(f"_rank_{lowest}_", f"_rank_{first}_", 1)
        also = f", as are those of ranks {', '.join(map(str, others))}" if others else ""
        raise CheckpointError(
            f"{folder / name} is missing{also}: a save was interrupted, or they are on another "
            "machine's disk: copy them from there"
        )


def model_states_of(folder, mp_rank, shard):
    """The files of model states: one for all data-parallel ranks; at ZeRO-3 one for each."""
    name = f"mp_rank_{mp_rank:02d}_model_states.pt"
    if shard.stage < 3:
        return [folder / name]
    return [folder / f"zero_pp_rank_{rank}_{name}" for rank in range(max(shard.ranks))]


def describe_shards(first, paths, model, experts, pool):
    """Join the shards of all data-parallel ranks. Returns {name: Parameter}, {path of a shard: its
    shared_rest()}, and {name of a state that is not cut: why}.

    first: rank 0's shard. paths: of all shards.
    """
    shapes = model["param_shapes"]
    zero_config = config_of(model, "zero_optimization")
    # Wrong with round_robin_gradients, of which a file's path says nothing.
    trust_mapping = isinstance(model.get("ds_config"), dict)
    trust_mapping = trust_mapping and not zero_config.get("round_robin_gradients")
    check_group_count(first, shapes)
    with adding_path(paths[0]):
        flat_cuts = [
            cut_flat(first, i, names, data_group)
            for i, names in enumerate(shapes)
            for data_group in expert_data_groups(
                names, first.ranks[i], len(paths), model, experts.counts
            )
        ]

    read = functools.partial(read_slices, paths, shapes, flat_cuts, trust_mapping)
    slices, rests = zip(*pool.map(read, range(len(paths))), strict=True)
    param_groups = first.optimizer["param_groups"]
    group_of = {flat: i for i, group in enumerate(param_groups) for flat in group["params"]}
    parameters = {}
    lost = {}
    with adding_path(paths[0]):
        for flat_cut in flat_cuts:
            number = flat_cut.number
            of_flat = {path: of[flat_cut.name] for path, of in zip(paths, slices, strict=True)}
            joined, others = join_slices(flat_cut, of_flat, shapes[number], group_of.get(number))
            parameters |= joined
            lost |= others
    return parameters, dict(zip(paths, rests, strict=True)), lost


def read_slices(paths, shapes, flat_cuts, trust_mapping, rank):
    """Returns {flat tensor: SliceState} of a rank, and its shared_rest()."""
    shard = read_shard(paths[rank])
    check_group_count(shard, shapes)
    with adding_path(paths[rank]):
        slices = {
            flat_cut.name: read_slice(shard, rank, flat_cut, trust_mapping)
            for flat_cut in flat_cuts
            if rank in flat_cut.data_group.ranks
        }
        scalars = {name: of_flat.scalars for name, of_flat in slices.items()}
        return slices, shared_rest(shard, scalars)


def check_group_count(shard, shapes):
    if len(shard.masters) != len(shapes):
        raise CheckpointError(
            f"{shard.path} has another number of flat tensors than the model states"
        )


def other_steps(ranks, parameters):
    """Returns a list with a Problem if the optimizer is of another step than the module.

    A run that began with weights alone is right to save such a checkpoint. At ZeRO-3 only the
    files' times tell it from a save that was killed between model states and shards: raises
    CheckpointError for that.
    """
    model, path, stage = ranks[0].model, ranks[0].files[0], ranks[0].shard.stage
    if kind_with_unsaved(config_of(model, "zero_optimization")):
        return []  # ZenFlow and SuperOffload step at other times
    text = text_of_steps(path, model, [of.scalars.get("step") for of in parameters.values()])
    if not text:
        return []
    written = max(shard.stat().st_mtime for rank in ranks for shard in rank.rests)
    if stage == 3 and path.stat().st_mtime > written + BETWEEN_SAVES:
        raise CheckpointError(
            f"{text} and older: the save was killed between the two, so name another tag. If you "
            "only copied the files, run `touch` on its *_optim_states.pt"
        )
    return [Problem(Limit.DOUBT, text)]


def text_of_steps(path: Path, model: dict, counts: list) -> str:
    """Says that an optimizer is of another step than model states; "" if it is not.

    path: of the model states. counts: the optimizer's counts of steps, or None.
    """
    step = model["global_steps"] - model["skipped_steps"]
    steps = {*map(number_in, counts)} - {None, step}
    return f"{path} is of step {step}, the optimizer of step {sorted(steps)}" if steps else ""


# --------------------------------------------------------------------------------------------------
# 2. tensor and pipeline parallelism


def describe_zero(folder, shards, pool):
    """Describe a ZeRO checkpoint. shards: {model-parallel rank: {data-parallel rank: path}}."""
    lowest = min(shards)
    first = describe_one_rank(folder, lowest, shards[lowest], pool)
    tensor, pipeline = degrees_of(first.model, len(shards), folder)
    check_complete(folder, shards, tensor, pipeline)
    others = [describe_one_rank(folder, i, shards[i], pool) for i in range(1, tensor * pipeline)]
    ranks = [first, *others]
    return join_all(folder, by_stage(ranks, tensor), tensor, pipeline)


def by_stage(ranks, tensor):
    """Sort ModelParallelRanks so that those of a pipeline stage follow each other.

    They have the same parameters. tensor: the degree of tensor parallelism.
    """
    names = [frozenset(rank.parameters) for rank in ranks]
    numbers = [names.index(of_rank) for of_rank in names]
    if any(numbers.count(number) != tensor for number in numbers):
        return ranks
    return [ranks[i] for i in sorted(range(len(ranks)), key=numbers.__getitem__)]


def join_all(folder, ranks, tensor, pipeline):
    """Join all ModelParallelRanks into a Checkpoint."""
    first = ranks[0]
    info = first.model.get(INFO_KEY)
    joiner = TensorParallel(info, tensor, folder)
    parameters, dependent, untied = join_mp_ranks(folder, ranks, joiner)
    optimizer = optimizer_state(first.shard)
    problems = other_steps(ranks, parameters)
    used = {path for rank in ranks for path in rank.files}
    modules = [rank.model["module"] for rank in ranks]
    nothing = {}
    if modules[0] is None:
        nothing = None  # as DeepSpeed has it
        used.update(itertools.chain(*files_of_layers(folder, tensor).values()))
        modules = untied_modules(folder, tensor, parameters)
    module, more_problems = join_modules(folder, modules, ranks[0].model, joiner)
    problems += other_groups(folder, ranks, tensor) + untied + more_problems
    problems += problems_of_ranks(dependent, optimizer.param_groups)
    problems += joiner.problems()
    models = [ranks[0].model | {"module": module or nothing}, *(rank.model for rank in ranks[1:])]
    client_states = [state for rank in ranks for state in rank.client_states]
    kind = kind_with_unsaved(config_of(first.model, "zero_optimization"))
    if kind:
        problems.append(Problem(Limit.UNSAVED, UNSAVED[kind]))
    layout = Layout(
        optimizer_kind=kind or first.shard.optimizer_kind,
        shards=first.model["dp_world_size"],
        is_bf16=first.shard.path.name.startswith("bf16_"),
        tensor=tensor,
        pipeline=pipeline,
    )
    return Checkpoint(
        folder=folder,
        stage=first.shard.stage,
        layout=layout,
        parameters=parameters,
        module=tensors_of_module(models[0]),
        optimizer=optimizer,
        model_states=first.files[0],
        left_over=names_beside(folder, used),
        problems=[*(problem for rank in ranks for problem in rank.problems), *problems],
        models=models,
        shard=first.shard.content,
        ranks_differ=not all(is_same(client_states[0], s) for s in client_states[1:]),
    )


def untied_modules(folder, tensor, parameters):
    """Returns what a pipeline's layers hold besides these parameters, tied ones included, as {name:
    value} of each tensor-parallel rank."""
    modules = modules_of_layers(folder, tensor, parameters)
    reader = ByteReader()
    return [
        trimmed(without_tied(module, rank, parameters, reader))
        for rank, module in enumerate(modules)
    ]


def check_complete(folder, shards, tensor, pipeline):
    """Raises CheckpointError if a model-parallel rank has no shards."""
    absent = (mp_rank for mp_rank in range(tensor * pipeline) if mp_rank not in shards)
    if missing := list(itertools.islice(absent, 100)):
        names = ", ".join(f"mp_rank_{mp_rank:02d}" for mp_rank in missing)
        raise CheckpointError(
            f"{folder} has {tensor} tensor x {pipeline} pipeline ranks, and lacks {names}"
        )


def other_groups(folder, ranks, degree):
    """Returns a list with a Problem if pipeline stages have different parameter groups.

    DeepSpeed drops a group of which a stage has nothing, and numbers the others anew. degree: of
    tensor parallelism.
    """
    first, *others = [rank.shard.optimizer["param_groups"] for rank in ranks[::degree]]
    different = differences([next(iter(rank.rests.values())) for rank in ranks[::degree]])
    same = all(len(groups) == len(first) for groups in others)
    if same and not any(isinstance(place, int) for place, _ in different):
        return []
    text = (
        f"{folder}: a pipeline stage lacks a parameter group that others have, or has another: "
        "give each stage a parameter of every group"
    )
    return [Problem(Limit.RANKS, text)]


def join_mp_ranks(folder, ranks, joiner):
    """Join the parameters of all ModelParallelRanks. Returns {name: Parameter}, {name of a state:
    why it depends on the rank}, and a Problem for each parameter that stages have twice, untied.
    """
    model = ranks[0].model
    for rank in ranks:
        for key in ("global_steps", "dp_world_size"):
            if rank.model[key] != model[key]:
                raise CheckpointError(
                    f"{folder}: its model-parallel ranks are of different saves: {key} differs"
                )
    joined = {}
    dependent = {}
    untied = {}
    for stage in range(0, len(ranks), joiner.degree):
        of_stage = ranks[stage : stage + joiner.degree]
        parts = [rank.parameters for rank in of_stage]
        if any(part.keys() != parts[0].keys() for part in parts):
            raise CheckpointError(
                f"{folder}: tensor-parallel ranks of stage {stage} hold different parameters"
            )
        dependent |= rank_dependent(of_stage)
        for name in parts[0]:
            if name not in joined:
                joined[name] = joiner.join(name, [part[name] for part in parts])
            elif not joiner.is_tied(name):
                text = f"{folder}: {name} is in two pipeline stages and is not declared as tied"
                untied[name] = Problem(Limit.RANKS, text)
    return joined, dependent, [*untied.values()]


def join_modules(folder, modules, model, joiner):
    """Join the modules of the tensor-parallel ranks. Returns {name: value}, and a list with a
    Problem if they differ.

    model: the model states of rank 0.
    """
    module, different = common_entries(modules)
    for name in frozen_parameters(modules, model, different, joiner):
        module[name] = joiner.join_tensor(name, [of_rank[name] for of_rank in modules])
    different = [name for name in different if name not in module]
    text = (
        f"{folder}: {', '.join(different)} is in no optimizer, and not the same on all "
        "tensor-parallel ranks"
    )
    return module, [Problem(Limit.FILES, text)] if different else []


def frozen_parameters(modules, model, different, joiner):
    """The names of frozen parameters that tensor-parallel ranks may have cut.

    ZeRO-1 saves no list of them: then those that a pattern describes, or that differ between ranks
    and are no buffers.
    """
    if len(modules) < 2:
        return []
    named = [name for name in modules[0] if joiner.describes(name)]
    names = model.get("frozen_param_shapes") or {*different, *named} - {*model["buffer_names"]}
    return [
        name
        for name in sorted(names)
        if all(name in module and tensor_of(module[name]) for module in modules)
    ]
