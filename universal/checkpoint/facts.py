# SPDX-License-Identifier: MIT
"""What a checkpoint is, in lists, dicts, numbers and text: who saved it and how, what is in it, and
on how many ranks it can go on. inspect.py prints it.

The keys of a tag; one that cannot be described has the first four, which inspect.py adds:

    problem: why a resume does not take it; null if nothing is wrong
    readable: false if the system refuses to read a file: a resume ends then, and takes no other
    checked: whether its checksums were compared
    unread_damage: damage in what a resume does not read: copies of weights in the model states
    step: optimizer steps
    skipped: of these, how many overflowed
    samples: DeepSpeed's count
    universal: whether it was converted
    stage: ZeRO's, as it was saved; of a universal one, that of its source
    ranks: those among which ZeRO cuts: data x sequence
    layout: {"tensor", "pipeline", "sequence", "expert"}: how many ranks share one
    experts: the number of experts of each layer
    dtype: of the forward pass
    deepspeed: the version that saved it
    batch: {"samples", "micro", "steps", "ranks", "micro_batches"}: global batch, micro-batch,
        accumulation steps, data-parallel ranks; null if the config does not tell
    optimizer: {"type", "class": DeepSpeed's, "states", "groups": counts and hyperparameters,
        "bytes": of all states}
    scheduler: {"type", "state"}
    trained: {"tensors", "elements"}
    frozen: the same, of parameters that no optimizer holds
    buffers: the same
    added: the same, of what modules add to their state
    bytes: of its files
    files: how many
    client_state: its keys
    next_steps: [first, last] of the steps that are written down, to be compared when they are
        trained again
    own_ranks_only: why no other number of ranks will do; null if any will
    goes_on: for each number of ranks: {"ranks": data-parallel, "gpus", "steps", "efficiency",
        "nbytes": of states on each GPU}
    not_converted: what a conversion would lose
    notes: what is unusual

The keys of on_ranks; if `problem` is a text, it has the first two:

    ranks: data-parallel
    problem: why there are no settings
    batch: the global batch
    steps: accumulation steps
    efficiency: the part of the computed micro-batches that counts
    config: entries of DeepSpeed's config
    training_arguments: of TrainingArguments, and of LLaMA-Factory's YAML
"""

import collections
import math
from typing import Any, NamedTuple

from universal.batches import TRUE_BATCH
from universal.checkpoint.describe import BF16_SECTIONS, left_over, paths_of
from universal.checkpoint.module_states import client_state_of, config_of, degrees_of
from universal.checkpoint.next_steps import read_rows
from universal.checkpoint.types import NEXT_STEPS, Checkpoint, Described
from universal.checkpoint.zero import saved_stage
from universal.files.schema import is_natural
from universal.files.sources import nbytes_of

PLAIN = (bool, int, float, str)
LONGEST = 16  # list or dict of which all is shown
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def facts_of(described: Described) -> dict[str, Any]:
    """What a checkpoint is, but for the first four keys of a tag."""
    checkpoint, raw = described
    model = raw.models[0]
    layout = layout_of(described)
    batch = batch_of(model)
    optimizer = optimizer_facts(described)
    steps = written_steps(checkpoint, model)
    paths = paths_of(checkpoint)
    return {
        "step": model["global_steps"],
        "skipped": model["skipped_steps"],
        "samples": model.get("global_samples"),
        "universal": checkpoint.is_universal,
        "stage": stage_of(described),
        "ranks": model["dp_world_size"],
        "layout": layout,
        "experts": model.get("num_experts") or [],
        "dtype": dtype_of(checkpoint, model),
        "deepspeed": model.get("ds_version"),
        "batch": batch and batch._asdict() | {"micro_batches": batch.micro_batches},
        "optimizer": optimizer,
        "scheduler": scheduler_facts(model),
        **elements_of(checkpoint, raw.models),
        "bytes": sum(path.stat().st_size for path in paths),
        "files": len(paths),
        "client_state": sorted(map(str, client_state_of(model))),
        "next_steps": steps and [steps[0], steps[-1]],
        "own_ranks_only": own_ranks_only(checkpoint),
        "goes_on": goes_on(described, layout, batch, optimizer["bytes"]),
        "not_converted": [problem.text for problem in checkpoint.problems if problem.loses_state],
        "notes": [problem.text for problem in checkpoint.problems if not problem.loses_state]
        + left_over(checkpoint)
        + note_of_batches(model, batch),
    }


# --------------------------------------------------------------------------------------------------
# 1. who saved it, and how


def stage_of(described):
    """0 to 3, also of what was converted; BF16_Optimizer has a stage in the config alone."""
    config = config_of(described.raw.models[0], "zero_optimization")
    return saved_stage(described.raw.optimizer) or config.get("stage", described.checkpoint.stage)


def layout_of(described):
    """{"tensor", "pipeline", "sequence", "expert": how many ranks share one, of the ranks that
    saved it}."""
    checkpoint, raw = described
    model = raw.models[0]
    if checkpoint.layout:
        tensor, pipeline = checkpoint.layout.tensor, checkpoint.layout.pipeline
    else:
        tensor, pipeline = degrees_of(model, len(raw.models), checkpoint.folder)
    counts = raw.optimizer.get("partition_count")
    expert = model["dp_world_size"] // min(counts) if isinstance(counts, list) else 1
    return {
        "tensor": tensor,
        "pipeline": pipeline,
        "sequence": sequence_degree(model),
        "expert": expert if model.get("num_experts") else 1,
    }


def dtype_of(checkpoint, model):
    """That of the forward pass; None where nothing tells it."""
    for name in (*BF16_SECTIONS, "fp16"):
        if config_of(model, name).get("enabled") is True:
            return "fp16" if name == "fp16" else "bf16"
    if checkpoint.layout and checkpoint.layout.dtype != "fp32":
        return checkpoint.layout.dtype
    autocast = config_of(model, "torch_autocast")
    if autocast.get("enabled") is True:
        return f"fp32, autocast to {autocast.get('dtype', 'float16')}"
    return "fp32" if config_of(model) else None


class Batch(NamedTuple):
    """samples: of a step, on all ranks. micro: of a micro-batch. steps: of accumulation. ranks: the
    data-parallel ones, of which each computes micro-batches of its own."""

    samples: int
    micro: int
    steps: int
    ranks: int

    @property
    def micro_batches(self) -> int | None:
        """How many make up the batch; None if they are not of one size."""
        count, rest = divmod(self.samples, self.micro)
        return None if rest else count


def batch_of(model: dict) -> Batch | None:
    """From the config, which names one or two of the three numbers, or all; None if it names none.

    DeepSpeed's own rule, but for TRUE_BATCH, and where ranks share sequences.
    """
    true, batch, micro, steps = numbers_of(model)
    ranks = saved_ranks(model) // sequence_degree(model)
    samples = true or batch or micro and micro * (steps or 1) * ranks
    if not samples:
        return None
    micro = micro or max(1, samples // ((steps or 1) * ranks))
    return Batch(samples, micro, steps or -(-samples // (micro * ranks)), ranks)


def has_other_batches(model: dict, batch: Batch) -> bool:
    """Whether DeepSpeed's count of samples is not one of steps of this batch.

    set_train_batch_size() changes the batch, and not the config. Ranks that share sequences are
    counted each.
    """
    samples = model.get("global_samples")
    computed = batch.micro * batch.steps * batch.ranks  # more than TRUE_BATCH, perhaps
    counts = [model["global_steps"] * count for count in (batch.samples, computed)]
    return bool(samples) and samples not in counts and batch.ranks == saved_ranks(model)


def note_of_batches(model, batch):
    """[that the config may not name the batch of the last steps], or []."""
    if batch is None or not has_other_batches(model, batch):
        return []
    samples, steps = model["global_samples"], model["global_steps"]
    return [f"the batch is its config's, but its {samples} samples in {steps} steps are of others"]


def numbers_of(model):
    """Those of TRUE_BATCH and BATCH_KEYS; None where there is none."""
    config = config_of(model)
    values = [config.get(key) for key in (TRUE_BATCH, *BATCH_KEYS)]
    return [value if is_natural(value) and value else None for value in values]


def saved_ranks(model):
    return max(1, model["dp_world_size"])


def sequence_degree(model: dict) -> int:
    """How many ranks shared a sequence. ZeRO counts them all, and the batch only one of them.

    DeepSpeed saves it nowhere. It follows from the batch, if enough of that is known.
    """
    ranks = saved_ranks(model)
    true, batch, micro, steps = numbers_of(model)
    named = config_of(model).get("sequence_parallel_size")
    samples = model.get("global_samples")  # a float, if ranks share sequences
    known = isinstance(samples, (int, float)) and samples > 0
    degrees = [named if is_natural(named) else None]
    if true and batch:  # DeepSpeed was told that each part of a sequence is one
        degrees.append(batch / true)
    elif batch and micro and steps:
        degrees.append(micro * steps * ranks / batch)
    elif batch and micro:
        micro_batches = batch / micro
        degrees += (n for n in range(1, ranks + 1) if micro_batches * n % ranks == 0)
    elif micro and not true and known:
        degrees.append(micro * (steps or 1) * ranks * model["global_steps"] / samples)
    return next((int(n) for n in degrees if n and n == int(n) and ranks % n == 0), 1)


# --------------------------------------------------------------------------------------------------
# 2. what is in it


def optimizer_facts(described):
    """{"type", "class": of DeepSpeed's, "states", "groups", "bytes": of the states of all}."""
    checkpoint, raw = described
    parameters = checkpoint.parameters.values()
    in_group = collections.defaultdict(list)
    for parameter in parameters:
        in_group[parameter.group_number].append(parameter.shape)
    groups = [
        totals_of(in_group[i])
        | {key: number for key, value in group.items() if (number := plain(value)) is not None}
        for i, group in enumerate(checkpoint.optimizer.param_groups)
    ]
    sources = [source for parameter in parameters for source in parameter.states.values()]
    names = [key for parameter in parameters for key in parameter.states]
    return {
        "type": config_of(raw.models[0], "optimizer").get("type"),
        "class": checkpoint.layout.optimizer_class if checkpoint.layout else None,
        "states": [*dict.fromkeys(names)],
        "groups": groups,
        "bytes": sum(map(nbytes_of, sources)),
    }


def plain(value):
    """A number or text, or a tuple of them; None of anything else, such as a group's `params`."""
    if isinstance(value, tuple):
        return value if all(isinstance(part, PLAIN) for part in value) else None
    return value if isinstance(value, PLAIN) else None


def scheduler_facts(model):
    state = model.get("lr_scheduler")
    if state is None:
        return None
    return {"type": config_of(model, "scheduler").get("type"), "state": json_of(state)}


def json_of(value):
    """A value in JSON: of what has no place there, the kind."""
    if value is None or isinstance(value, PLAIN):
        return value
    if isinstance(value, (list, tuple)) and len(value) <= LONGEST:
        return [json_of(part) for part in value]
    if isinstance(value, dict) and len(value) <= LONGEST:
        return {str(key): json_of(part) for key, part in value.items()}
    return type(value).__name__


def elements_of(checkpoint: Checkpoint, models: list[dict]) -> dict[str, Any]:
    """{"trained", "frozen", "buffers", "added": counts}, by what holds the tensors.

    DeepSpeed saves no list of what is frozen at ZeRO-1 and without ZeRO: there it is all that is
    neither trained nor a buffer. What modules add to their state is told from it by its name alone.
    """
    module = checkpoint.module
    shapes = {name: tensor.size for name, tensor in module.tensors.items()} | module.frozen
    buffers = {name for model in models for name in model["buffer_names"]} - module.frozen.keys()
    listed = models[0].get("frozen_param_shapes") is not None
    kinds = {"trained": [], "frozen": [], "buffers": [], "added": []}
    for name, shape in shapes.items():
        frozen = name in module.frozen or not listed and not name.endswith("_extra_state")
        kind = "buffers" if name in buffers else "frozen" if frozen else "added"
        kinds[kind].append(shape)
    kinds["trained"] += [parameter.shape for parameter in checkpoint.parameters.values()]
    return {kind: totals_of(of_kind) for kind, of_kind in kinds.items()}


def totals_of(shapes):
    sizes = [math.prod(shape) for shape in shapes]
    return {"tensors": len(sizes), "elements": sum(sizes)}


def written_steps(checkpoint, model):
    """The steps after this one that were written down, to be compared when they are trained
    again."""
    return sorted(read_rows(checkpoint.folder / NEXT_STEPS, model["global_steps"] + 1)) or None


# --------------------------------------------------------------------------------------------------
# 3. where it can go on


def own_ranks_only(checkpoint: Checkpoint) -> str | None:
    """Why it goes on only on the ranks that saved it; None if any number will do."""
    layout = checkpoint.layout
    if layout and layout.unsaved:
        return f"no file holds {layout.unsaved}"
    for text in (problem.text for problem in checkpoint.problems if problem.of_ranks):
        return text
    for (_, key), why in checkpoint.optimizer.rank_dependent.items():
        return f"{key} of the optimizer {why}"
    return None


class Division(NamedTuple):
    """What each of so many data-parallel ranks does of a batch.

    gpus: as many, if several share a micro-batch. steps: of accumulation. efficiency: the part of
    the micro-batches computed that counts. nbytes: of the optimizer's states on each GPU.
    """

    ranks: int
    gpus: int
    steps: int | None
    efficiency: float | None
    nbytes: int


def goes_on(described: Described, layout: dict, batch: Batch | None, nbytes: int) -> list[dict]:
    """The Shares of 1 to twice as many data-parallel ranks; of its own alone, if no others do."""
    checkpoint = described.checkpoint
    sequence = layout["sequence"]
    ranks = saved_ranks(described.raw.models[0]) // sequence
    together = layout["tensor"] * layout["pipeline"]
    numbers = [ranks] if own_ranks_only(checkpoint) else range(1, 2 * ranks + 1)
    shares = []
    for n in numbers:
        steps, efficiency = accumulation(batch, n)
        pieces = together * sequence * n
        share = Division(n, n * together * sequence, steps, efficiency, -(-nbytes // pieces))
        shares.append(share._asdict())
    return shares


def accumulation(batch: Batch | None, ranks: int) -> tuple[int | None, float | None]:
    """(steps, efficiency) with the same batch and micro-batch on so many data-parallel ranks."""
    if batch is None or batch.micro_batches is None:
        return None, None
    steps = -(-batch.micro_batches // ranks)
    return steps, batch.micro_batches / (steps * ranks)


def settings_on(facts: dict[str, Any], ranks: int) -> dict[str, Any]:
    """What a config needs so that so many data-parallel ranks keep the batch, and a line in
    "problem" if they cannot: the keys of on_ranks."""
    settings = {"ranks": ranks, "problem": None}
    (own, *others) = facts["goes_on"]
    if facts["own_ranks_only"] and ranks != own["ranks"]:
        reason = f"it goes on only on {own['ranks']}: {facts['own_ranks_only']}"
        return settings | {"problem": reason}
    if facts["batch"] is None or facts["batch"]["micro_batches"] is None:
        return settings | {"problem": "its config names no batch that micro-batches make up"}
    batch = Batch(*(facts["batch"][key] for key in Batch._fields))
    steps, efficiency = accumulation(batch, ranks)
    config = {"train_micro_batch_size_per_gpu": batch.micro, "gradient_accumulation_steps": steps}
    if efficiency == 1 and facts["layout"]["sequence"] == 1:
        config["train_batch_size"] = batch.samples
    else:  # DeepSpeed would take the product of these two and the ranks for the batch
        config[TRUE_BATCH] = batch.samples
    return settings | {
        "batch": batch.samples,
        "steps": steps,
        "efficiency": efficiency,
        "config": config,
        "training_arguments": {
            "per_device_train_batch_size": batch.micro,
            "gradient_accumulation_steps": steps,
        },
    }
