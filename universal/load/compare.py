# SPDX-License-Identifier: MIT
"""Compare a checkpoint with the engine that is to load it: parameters, optimizer, groups."""

import math

from universal.checkpoint.experts import expert_name
from universal.checkpoint.module_states import config_of
from universal.checkpoint.types import Checkpoint, Limit
from universal.checkpoint.zero import ABSENT, outer
from universal.errors import CheckpointError
from universal.files.same import is_same
from universal.files.torch_file import number_in
from universal.load.ask import Answer
from universal.load.collective import say
from universal.load.engine import Engine
from universal.load.overrides import LoadOptions
from universal.load.parts import Parts

WIDE_DTYPES = ("bf", "32", "None")  # parts of names of dtypes that need no loss scale
FRESH = "; load_optimizer_states=False continues with a fresh optimizer"


def compare_parameters(
    engine: Engine,
    checkpoint: Checkpoint,
    parts: Parts,
    options: LoadOptions,
    optimized: set[str],
    present: set[str],
) -> None:
    """Raises CheckpointError if the engine's parameters are not the checkpoint's.

    optimized, present: the names of parameters that the optimizers hold, and of all, on all ranks
    together. Where weights alone are loaded, it does not matter what was trained.
    """
    trained = checkpoint.parameters.keys()
    strict = options.load_module_strict
    if optimized and options.load_optimizer_states:
        check_same_names(optimized, trained, "trained", strict, "without their states")
    else:
        tied = tied_names(engine, checkpoint)
        known = trained | checkpoint.module.keys() | tied.keys()
        check_same_names(optimized - known, trained - present, "trained", strict)
    by_group = options.load_optimizer_states or engine.loads_scheduler(options)
    groups = engine.group_numbers() if by_group else {}
    # In the order of their names, so that all ranks tell of the same one.
    for name in sorted(checkpoint.parameters.keys() & engine.parameters.keys()):
        saved = checkpoint.parameters[name]
        shape = parts.maps[name].shape
        # DeepSpeed's converter may leave only the number of elements.
        is_flat = checkpoint.is_universal and saved.shape == (math.prod(shape),)
        if shape != saved.shape and not is_flat:
            raise CheckpointError(
                f"{name} is {shape} here, and {saved.shape} in the checkpoint: to resize it, begin "
                "with its weights"
            )
        param_group = groups.get(name, saved.group_number)
        if param_group != saved.group_number and not expert_name(name):
            raise CheckpointError(
                f"{name} is in parameter group {param_group}, and was in {saved.group_number}"
                f"{advice_on_groups(engine)}"
            )


def say_uneven_steps(engine: Engine, checkpoint: Checkpoint) -> None:
    """Warn where parameters have taken different numbers of steps, and this engine counts one for
    all of a flat tensor."""
    for flat in engine.flats:
        known = [checkpoint.parameters[n] for n in flat.names if n in checkpoint.parameters]
        scalars = {id(parameter.scalars): parameter.scalars for parameter in known}
        counts = [number_in(of["step"]) for of in scalars.values() if "step" in of]
        if len({*counts}) > 1:
            say(
                f"WARNING: parameters beside {flat.names[0]} have taken {sorted({*counts})} steps, "
                f"and this engine counts them together: they go on with {counts[0]}"
            )


def advice_on_groups(engine):
    """Says what to do where DeepSpeed drops a group of which a pipeline stage has nothing."""
    return "; give each stage a parameter of every group" if engine.is_pipeline() else ""


def check_same_names(
    live: set[str], saved: set[str], what: str, strict: bool, outcome: str = "left as it is"
) -> None:
    """Raises CheckpointError if names are on one side only; prints them if not strict."""
    one_sided = {
        "here, and not in the checkpoint": live - saved,
        "in the checkpoint, and not here": saved - live,
    }
    texts = [f"{what} {side} {listed(names)}" for side, names in one_sided.items() if names]
    cure = advice_on_names(live, saved)
    if texts and (strict or cure):
        cure = cure or "load_module_strict=False continues without"
        raise CheckpointError(f"{'; '.join(texts)}; {cure}")
    for text in texts:
        say(f"{text}: {outcome}")


def advice_on_names(live, saved):
    """Says what to do if names differ by what torch puts into them; "" otherwise."""
    if any("_orig_mod." in name for name in live - saved):
        return "torch.compile() names them: give DeepSpeed the model without it, model._orig_mod"
    if any("_orig_mod." in name for name in saved - live):
        return "torch.compile() has named them: compile the same modules here, too"
    if {"weight_g", "original0"} <= {name.rpartition(".")[2] for name in live ^ saved}:
        return "torch has two weight_norm(): take the one of before"
    return ""


def listed(names: set[str]) -> str:
    """The number of names, and the first ones."""
    return f"({len(names)}): {', '.join(sorted(names)[:5])}"


def check_any_trained(checkpoint: Checkpoint, optimized: set[str], present: set[str]) -> None:
    """Raises CheckpointError if the checkpoint and the engine have no trained parameter in common.

    A run would go on at the old step with initial weights. optimized, present: as in
    compare_parameters().
    """
    saved = checkpoint.parameters.keys() | checkpoint.module.keys()
    trained = checkpoint.parameters.keys()
    if trained and not optimized & saved and not trained & present:
        raise CheckpointError(
            f"nothing that is trained has the same name on both sides: here {listed(optimized)}; "
            f"in the checkpoint {listed(trained)}: "
            f"{advice_on_names(optimized, trained) or 'give the model the names of before'}"
        )


def compare_optimizer(
    engine: Engine,
    checkpoint: Checkpoint,
    answer: Answer | None,
    resharded: bool,
) -> None:
    """Raises CheckpointError if the checkpoint is of another optimizer, or lacks its states.

    answer: of the engine's optimizer. resharded: whether reshard.py will load it; if not,
    DeepSpeed's loader gives each rank its own groups and states.
    """
    for misfit in misfits_of_optimizer(engine, checkpoint, answer, resharded):
        raise CheckpointError(f"{misfit}{FRESH}")


def misfits_of_optimizer(engine, checkpoint, answer, resharded):
    """Yields, in words, how the checkpoint's optimizer differs from the engine's."""
    saved, model = checkpoint.optimizer, checkpoint.model
    groups = len(engine.param_groups)
    if resharded and len(saved.param_groups) != groups:
        yield (
            f"of another optimizer: it has {len(saved.param_groups)} parameter groups, "
            f"that of the engine {groups}{advice_on_groups(engine)}"
        )
    yield from other_optimizer(engine, checkpoint, answer)
    if hasattr(engine.optimizer, "backup_optimizer"):
        yield "DeepSpeed restores no state that offload_optimizer.ratio leaves on the GPU"
    if saved.left_out:
        yield f"converted without {', '.join(saved.left_out)} of the optimizer"
    stepped = model["global_steps"] > model["skipped_steps"]
    parameters = checkpoint.parameters
    numbers = engine.group_numbers()
    bare = [
        name
        for name, parameter in parameters.items()
        if not kept_of([parameter])
        and keeps_states(engine, answer, numbers.get(name, parameter.group_number))
    ]
    # DeepSpeed does not count what torch's GradScaler skips.
    if scaled_by_torch(model) and len(bare) == len(parameters):
        stepped &= any(parameters[name].scalars for name in bare)
    lost = any(problem.limit >= Limit.STATE for problem in checkpoint.problems)
    if bare and stepped and not lost:
        yield f"there is no optimizer state of {bare[0]}"


def other_optimizer(engine, checkpoint, answer):
    """Yields, in words, why the checkpoint is of another optimizer.

    It has other states, and other settings; or it lacks numbers that the engine's was made with.
    """
    names = {name for group in checkpoint.optimizer.param_groups for name in group}
    if "lr" not in names:
        return  # elastic_checkpoint
    if answer:
        states = kept_of(checkpoint.parameters.values())
        made = answer.made
        known = answer.settings.union(*engine.param_groups)
        if states and made and states != made and names != known:
            yield (
                f"of another optimizer: it has {sorted(states)}, that of the engine {sorted(made)}"
            )
        for problem in checkpoint.problems:
            if problem.state in answer.on_all_ranks and problem.text.endswith(ABSENT):
                yield problem.text
    defaults = getattr(engine.torch_optimizer, "defaults", {})
    numbers = {
        name
        for name, value in defaults.items()
        if isinstance(value, float | int | tuple) and not isinstance(value, bool)
    }
    if lacking := numbers - names:
        yield f"of another optimizer: its parameter groups have no {', '.join(sorted(lacking))}"


def kept_of(parameters):
    """The names of what the optimizer keeps of parameters, besides masters and steps."""
    names = {outer(name) for of in parameters for name in (*of.states, *of.scalars)}
    return {*map(str, names)} - {"fp32", "step"}


def keeps_states(engine, answer, number):
    """Whether the optimizer makes states of a group at once. If it gives no answer, the settings
    tell."""
    if answer and number is not None:
        return bool(answer.states[number])
    settings = engine.param_groups[number or 0]
    return "betas" in settings or bool(settings.get("momentum"))


def in_groups_of(engine: Engine, checkpoint: Checkpoint) -> Checkpoint:
    """Returns the checkpoint with an entry for each parameter group of the engine.

    DeepSpeed splits a group if a rank has many experts, so their number may change. Raises:
    CheckpointError, if a group here has experts from groups with different settings.
    """
    origins = {}  # {group here: groups in which its parameters were saved}, all by number
    for name, number in engine.group_numbers().items():
        if name in checkpoint.parameters:
            origins.setdefault(number, set()).add(checkpoint.parameters[name].group_number)
    has_experts = any(map(expert_name, engine.parameters))
    if not has_experts or len(origins) < len(engine.param_groups):  # the latter fit no groups
        return checkpoint
    saved = checkpoint.optimizer
    groups = []
    for number, group in enumerate(engine.param_groups):
        kept = {key: group[key] for key in ("params", "name") if key in group}
        settings, *others = [saved.param_groups[origin] | kept for origin in origins[number]]
        if any(other != settings for other in others):
            raise CheckpointError(f"group {number} has experts of groups with different settings")
        groups.append(settings)
    scheduler = dict(checkpoint.model["lr_scheduler"] or {})
    for key, values in scheduler.items():
        if isinstance(values, list) and len(values) == len(saved.param_groups):
            scheduler[key] = [values[min(origins[number])] for number in sorted(origins)]
    models = [checkpoint.model | {"lr_scheduler": scheduler}]
    return checkpoint._replace(optimizer=saved._replace(param_groups=groups), models=models)


def rounded_names(entries: list) -> set[str]:
    """The buffers and frozen weights that the engine has in a narrower dtype than the checkpoint,
    as words. entries: those of reshard.read_module()."""
    return {
        f"{entry.name} ({str(entry.target.dtype).removeprefix('torch.')})"
        for entry in entries
        if entry.target is not None and entry.target.dtype.itemsize < entry.value.dtype.itemsize
    }


def scaled_by_torch(model):
    """Whether torch's GradScaler scaled the loss, as it does for an autocast to float16."""
    saved = config_of(model, "torch_autocast")
    return saved.get("enabled") and not any(part in str(saved.get("dtype")) for part in WIDE_DTYPES)


def say_lost_scale(engine: Engine, model: dict) -> None:
    """Warn if the loss scale was torch_autocast's, which is in no file. model: model states."""
    scale = engine.autocast_scale()
    if scale and scaled_by_torch(model):
        say(
            f"WARNING: no file holds the loss scale of torch_autocast, which is {scale:g} now: "
            "steps may be skipped until it is what it was"
        )


def check_tied(engine: Engine, saved: dict, strict: bool) -> None:
    """Check that entries which become one tensor here, of a tied layer, are the same.

    saved: the entries of a checkpoint's module. Raises: CheckpointError, if strict.
    """
    if not strict or not hasattr(engine.module, "tied_modules"):
        return
    first_names = {}
    for saved_name in sorted(saved):
        name = engine.local_name(saved_name)
        first = first_names.setdefault(name, saved_name)
        if name and not is_same(saved[first], saved[saved_name]):
            raise CheckpointError(
                f"{first} and {saved_name} are of one tied layer, and differ: pipeline stages had "
                f"them for themselves; load_module_strict=False continues with {first}"
            )


def tied_names(engine: Engine, checkpoint: Checkpoint) -> dict[str, str]:
    """Returns {parameter: the trained one that it was tied to}, of those that are tied no more."""
    shared = checkpoint.model.get("shared_params") or {}
    own = engine.parameters.keys() - checkpoint.parameters.keys()
    return {name: shared[name] for name in own if shared.get(name) in checkpoint.parameters}
