# SPDX-License-Identifier: MIT
"""Say what is in a folder of checkpoints, and what a resume would take.

    python -m universal.inspect checkpoints [--tag global_step100] [--quick] [--json]

The folder is the one with the tags, or a checkpoint. Exit code 0: all is whole; 1: a checkpoint is
damaged or incomplete; 2: there is none. --quick compares no checksums. This needs nothing but
Python 3.10."""

import argparse
import collections
import json
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from universal.byte_ranges import nbytes_of
from universal.checkpoint import describe, left_over, paths_of
from universal.console import bar, in_one_line
from universal.description import NEXT_STEPS, Described, Description
from universal.errors import CheckpointError
from universal.module_states import batch_of, client_state_of, config_of
from universal.next_steps import read_rows
from universal.stage_0 import NeedsEngine
from universal.tags import list_tags, newest_first
from universal.torch_file import Stub, verify

WORKERS = 4
PLAIN = (bool, int, float, str)

# --------------------------------------------------------------------------------------------------
# 1. the tags of a folder


def look(folder: str, tag: str | None = None, quick: bool = False, progress: bool = False) -> dict:
    """What is in a folder, as lists, dicts, numbers and text.

    Returns: {"folder", "tags": {name: {"problem": why it cannot be loaded, or None, ...}}, "takes":
        the tag that a resume would take, or None, "says": what a resume would say of the tags}.
    Raises: CheckpointError, if there is no checkpoint.
    """
    folder = Path(folder)
    says = []
    if any(folder.glob("*_states.pt")):
        above, names, order = folder, ["."], ["."]
    else:
        above, names = folder, list_tags(folder)
        order = newest_first(folder, says.append) if names else []
    if tag is not None:
        names = order = [tag] if (folder / tag).is_dir() else []
    if not names:
        raise CheckpointError(f"{folder if tag is None else folder / tag} holds no checkpoint")
    tags = {name: facts_of_folder(above / name) for name in names}
    takes = first_whole(above, order, tags, quick, progress)
    return {"folder": str(folder), "tags": tags, "takes": takes, "says": says}


def facts_of_folder(folder):
    try:
        described = describe(folder, WORKERS)
        return {"problem": None} | facts_of(described)
    except NeedsEngine as error:
        return {"problem": None, "odd": [str(error)]}
    except (CheckpointError, OSError) as error:
        return {"problem": str(error)}


def first_whole(above, order, tags, quick, progress):
    """The first tag that is whole, as load_checkpoint() tries them; notes in `tags` what is not."""
    for name in order:
        facts = tags[name]
        if not quick and not facts["problem"]:
            problems = damages(above / name, progress)
            facts["problem"] = "; ".join(problems) or None
            facts["checked"] = True
        if not facts["problem"]:
            return name
    return None


def damages(folder, progress):
    """Yields, of each file that does not match its checksums, why."""

    def damage(path):
        try:
            verify(path)
        except CheckpointError as error:
            return str(error)

    try:
        paths = paths_of(describe(folder, WORKERS).checkpoint)
    except NeedsEngine:
        paths = sorted(folder.glob("*_states.pt"))
    with ThreadPoolExecutor(WORKERS) as pool:
        with bar(sum(path.stat().st_size for path in paths), progress) as show_more:
            for path, problem in zip(paths, pool.map(damage, paths), strict=True):
                show_more(path.stat().st_size)
                if problem:
                    yield problem


# --------------------------------------------------------------------------------------------------
# 2. one of them


def facts_of(described: Described) -> dict[str, Any]:
    """What a checkpoint is."""
    checkpoint, raw = described
    model = raw.models[0]
    batch = batch_of(model)
    buffers, others = buffers_and_others(checkpoint, model)
    return {
        "step": model["global_steps"],
        "skipped": model["skipped_steps"],
        "samples": model.get("global_samples"),
        "universal": checkpoint.is_universal,
        "stage": stage_of(described),
        "ranks": model["dp_world_size"],
        "tensor": checkpoint.layout.tensor if checkpoint.layout else None,
        "pipeline": checkpoint.layout.pipeline if checkpoint.layout else None,
        "dtype": dtype_of(checkpoint, model),
        "deepspeed": model.get("ds_version"),
        "batch": batch and batch._asdict(),
        "optimizer": optimizer_facts(checkpoint, model),
        "scheduler": scheduler_facts(model),
        "parameters": count(checkpoint.parameters, lambda parameter: parameter.shape),
        "frozen": count(checkpoint.module.frozen, lambda shape: shape),
        "buffers": count(buffers, lambda tensor: tensor.size),
        "others": count(others, lambda tensor: tensor.size),
        "bytes": sum(path.stat().st_size for path in paths_of(checkpoint)),
        "files": len(paths_of(checkpoint)),
        "client_state": {key: shown(value) for key, value in client_state_of(model).items()},
        "next_steps": next_steps(checkpoint, model),
        "resumes_on": resumes_on(checkpoint, batch),
        "refused": [problem.text for problem in checkpoint.problems if problem.fatal],
        "odd": [problem.text for problem in checkpoint.problems if not problem.fatal]
        + left_over(checkpoint),
    }


def stage_of(described):
    """0 to 3, as it was saved: the Description's 1 is 2, too, and a universal one's is None."""
    stage = described.raw.optimizer.get("zero_stage")
    if isinstance(stage, Stub) and stage.args:
        return stage.args[0]
    config = config_of(described.raw.models[0], "zero_optimization")
    return config.get("stage", described.checkpoint.stage)


def dtype_of(checkpoint, model):
    for name in ("bf16", "fp16", "bfloat16"):
        if config_of(model, name).get("enabled"):
            return name.replace("bfloat16", "bf16")
    if checkpoint.layout and checkpoint.layout.bf16:
        return "bf16"
    return "fp32" if config_of(model) else None


def optimizer_facts(checkpoint, model):
    """{"type", "class": of DeepSpeed's, "states", "groups", "bytes": of all states}."""
    parameters = checkpoint.parameters.values()
    in_group = collections.Counter(parameter.group for parameter in parameters)
    groups = [
        {"parameters": in_group[i]}
        | {key: number for key, value in group.items() if (number := plain(value)) is not None}
        for i, group in enumerate(checkpoint.optimizer.param_groups)
    ]
    sources = [source for parameter in parameters for source in parameter.states.values()]
    return {
        "type": config_of(model, "optimizer").get("type"),
        "class": checkpoint.layout and checkpoint.layout.optimizer_class,
        "states": sorted({key for parameter in parameters for key in parameter.states}),
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
    return {"type": config_of(model, "scheduler").get("type"), "state": shown(state)}


def buffers_and_others(checkpoint, model):
    """({name: Tensor} of the buffers, and of what is neither that nor known to be frozen).

    The latter is what modules add to their state and, at ZeRO-1 and without ZeRO, where DeepSpeed
    saves no list of them, frozen parameters.
    """
    tensors = checkpoint.module.tensors
    buffers = {name: tensors[name] for name in tensors.keys() & {*model["buffer_names"]}}
    rest = tensors.keys() - buffers.keys() - checkpoint.module.frozen.keys()
    return buffers, {name: tensors[name] for name in rest}


def count(tensors, shape_of):
    elements = sum(math.prod(shape_of(tensor)) for tensor in tensors.values())
    return {"tensors": len(tensors), "elements": elements}


def shown(value):
    """A value in JSON: of what has no place there, the kind."""
    if value is None or isinstance(value, PLAIN):
        return value
    if isinstance(value, (list, tuple)) and len(value) <= 16:
        return [shown(part) for part in value]
    if isinstance(value, dict) and len(value) <= 16:
        return {str(key): shown(part) for key, part in value.items()}
    return type(value).__name__


def next_steps(checkpoint, model):
    """The steps after this one of which rows were written down."""
    path = checkpoint.folder / NEXT_STEPS
    rows = read_rows(path, model["global_steps"] + 1)[0] if path.is_file() else {}
    return sorted(rows)


def resumes_on(checkpoint: Description, batch: Any) -> dict[int, int]:
    """{ranks: bytes of optimizer state on each}, where global batch and micro-batch are the same.

    Of a model-parallel checkpoint, ranks of the same layout.
    """
    if batch is None:
        return {}
    layout = checkpoint.layout
    share = layout.tensor * layout.pipeline if layout else 1
    states = [source for p in checkpoint.parameters.values() for source in p.states.values()]
    nbytes = sum(map(nbytes_of, states))
    micro_batches, rest = divmod(batch.samples, batch.micro)
    divisors = [n for n in range(1, micro_batches + 1) if not micro_batches % n and not rest]
    return {n * share: -(-nbytes // (n * share)) for n in divisors}


# --------------------------------------------------------------------------------------------------
# 3. for people


def lines_of(found: dict) -> list[str]:
    """One screen."""
    tags = found["tags"]
    takes = found["takes"]
    lines = [f"{found['folder']}: a resume takes {takes or 'none of these'}"]
    lines += [f"  ({text})" for text in found["says"]]
    for name, facts in tags.items():
        mark = "*" if name == takes else " "
        whole = "whole" if facts.get("checked") else "complete"
        state = f"NOT WHOLE: {facts['problem']}" if facts["problem"] else whole
        kind = f"step {facts['step']}, {kind_of(facts)}, " if "step" in facts else ""
        lines.append(f"{mark} {name}: {kind}{state}")
    if takes:
        facts = tags[takes]
        rows = rows_of(facts) if "step" in facts else [("odd", text) for text in facts["odd"]]
        lines += ["", *(f"{label:>13}  {text}" for label, text in rows)]
    return lines


def kind_of(facts):
    stage = f"ZeRO-{facts['stage']}" if facts["stage"] else "no ZeRO"
    ranks = "1 rank" if facts["ranks"] == 1 else f"{facts['ranks']} ranks"
    if facts["universal"]:
        return f"universal (from {stage}, {ranks})"
    kind = f"{stage}, {ranks}"
    if facts["tensor"] * facts["pipeline"] > 1:
        kind += f" x {facts['tensor']} tensor x {facts['pipeline']} pipeline"
    return kind


def rows_of(facts):
    """(label, text) of each line about a checkpoint."""
    optimizer = facts["optimizer"]
    yield "saved by", f"DeepSpeed {facts['deepspeed']}, {kind_of(facts)}, {facts['dtype']}"
    samples = "" if facts["samples"] is None else f", {facts['samples']:,} samples"
    yield "step", f"{facts['step']} ({facts['skipped']} skipped){samples}"
    if batch := facts["batch"]:
        data = facts["ranks"]
        yield "batch", f"{batch['samples']} = {batch['micro']} x {batch['steps']} x {data} ranks"
    kind = optimizer["type"] or "of a type that is not saved"
    if optimizer["class"]:
        kind += f" in {optimizer['class']}"
    yield "optimizer", f"{kind}: {', '.join(optimizer['states'])}; {size(optimizer['bytes'])}"
    for i, group in enumerate(optimizer["groups"][:4]):
        text = ", ".join(f"{key} {group[key]}" for key in ("lr", "weight_decay") if key in group)
        yield f"group {i}", f"{group['parameters']} parameters, {text}"
    if more := optimizer["groups"][4:]:
        yield "", f"and {len(more)} more groups"
    scheduler = facts["scheduler"]
    words = f"{scheduler['type'] or ''} {scheduler['state']}".strip() if scheduler else "none"
    yield "scheduler", words if len(words) <= 90 else f"{words[:87]}..."
    parts = {"parameters": "trained", "frozen": "frozen", "buffers": "in buffers"}
    parts["others"] = "frozen or added by modules"
    texts = [
        f"{facts[key]['elements']:,} {what} ({facts[key]['tensors']} tensors)"
        for key, what in parts.items()
        if facts[key]["tensors"]
    ]
    yield "parameters", ", ".join(texts) or "none"
    yield "on disk", f"{size(facts['bytes'])} in {facts['files']} files"
    yield "client state", ", ".join(facts["client_state"]) or "none"
    steps = facts["next_steps"]
    yield "next steps", f"{steps[0]} to {steps[-1]} are written down" if steps else "none"
    if facts["resumes_on"]:
        sizes = [f"{ranks} ({size(nbytes)})" for ranks, nbytes in facts["resumes_on"].items()]
        yield "goes on on", f"{', '.join(sizes[:8])} ranks (bytes of optimizer state on each)"
    for text in facts["refused"]:
        yield "not converted", text
    for text in facts["odd"]:
        yield "odd", text


def size(nbytes):
    """In the largest of these units of which there is one."""
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")):
        if nbytes >= 1000**power:
            return f"{nbytes / 1000**power:.3g} {unit}"
    return f"{nbytes} bytes"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", help="the folder above the tags, or a checkpoint")
    parser.add_argument("--tag", help="look at this one alone")
    parser.add_argument("--quick", action="store_true", help="compare no checksums")
    parser.add_argument("--json", action="store_true", help="for machines")
    args = parser.parse_args()
    with in_one_line("universal.inspect"):
        found = look(args.folder, args.tag, args.quick, progress=not args.json)
    print(json.dumps(found, indent=1) if args.json else "\n".join(lines_of(found)))
    sys.exit(1 if any(facts["problem"] for facts in found["tags"].values()) else 0)


if __name__ == "__main__":
    main()
