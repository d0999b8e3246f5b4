# SPDX-License-Identifier: MIT
"""Show what is in a folder of checkpoints, and which of them a resume takes.

    python -m universal.inspect checkpoints [--tag global_step100] [--ranks 3] [--quick] [--json]

The folder is the one with the tags, or a checkpoint. Every checksum of the checkpoint that a resume
would take is compared, but for --quick. --ranks prints how so many data-parallel ranks keep the
batch. --json prints what look() returns. Exit code 0: all checkpoints are complete; 2: one is
damaged or incomplete, or there is none. If the package is installed, the command is ds_inspect.
"""

import argparse
import contextlib
import json
import math
import os
import re
import sys
from collections import ChainMap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from universal import batches
from universal.advice import advice_on_batch, largest_divisor
from universal.batch.saved import CHOOSE, batch_of, client_signs, doubt_of
from universal.checkpoint.describe import describe, left_over, paths_of
from universal.checkpoint.module_states import client_state_of, config_of
from universal.checkpoint.same_step import check_same_step, weights_set
from universal.checkpoint.tags import choose_tag, is_checkpoint, list_tags, place_of
from universal.checkpoint.types import NEXT_STEPS, Checkpoint, Limit
from universal.errors import CheckpointError, Refused
from universal.files.processes import pool_of
from universal.files.schema import is_natural
from universal.files.torch_file import damages_in, load, number_in, read_scalar, tensor_of
from universal.proving.next_steps import read_rows
from universal.write.console import counted, in_one_line, print_screen, short, wrapped
from universal.write.converter import problem_of_loss

WORKERS = 4
SHOWN = 8  # tags, groups on the screen

# --------------------------------------------------------------------------------------------------
# 1. what is in a folder


def look(folder: str, tag: str | None = None, quick: bool = False) -> dict[str, Any]:
    """Returns {"folder", "takes": the tag that a resume takes, or None, "says":
    lines that it would print about the choice, "tags": {tag: facts}}.

    Facts are those of facts_of(), if it can be described, and "problem": why a resume would not
    load it, or None; "checked": whether checksums were compared; "unread_damage": damage in copies
    of weights that a resume does not read. tag: look at this one alone. quick: compare no
    checksums.

    Raises: CheckpointError, if there is no checkpoint; OSError.
    """
    folder = Path(folder)
    says = []
    places = places_in(folder, tag)
    order = [*places]
    if tag is None and folder not in places.values():
        choice = choose_tag(folder)
        order = [tag.name for tag in choice.to_try]
        says = choice.says
    looks = {name: look_at(place) for name, place in places.items()}
    tags = {name: facts for name, (facts, _) in looks.items()}
    takes = None
    for name in order:
        facts, checkpoint = looks[name]
        if not facts["problem"] and not quick:
            facts |= damage_of(places[name], checkpoint)
        if not facts["problem"]:
            takes = name
            break
    return {"folder": str(folder), "takes": takes, "says": says, "tags": tags}


def places_in(folder, tag):
    """Returns {tag: its folder}. folder: with tags, or a checkpoint. Raises CheckpointError without
    any."""
    if tag is not None:
        place = place_of(folder, tag)
        places = {tag: place} if place.is_dir() else {}
    elif is_checkpoint(folder):
        places = {os.path.basename(os.path.abspath(folder)): folder}
    else:
        places = {name: place_of(folder, name) for name in list_tags(folder)}
    if not places:
        more = ""
        if tag is None and (below := [*folder.glob("*/latest")]):
            newest = max(below, key=os.path.getmtime).parent
            more = f": look at {newest}, the newest in it"
        raise CheckpointError(f"{folder / (tag or '')} holds no checkpoint{more}")
    return places


def look_at(folder):
    """Returns the facts of a checkpoint, and the Checkpoint; None if it cannot be described."""
    facts = {"problem": None, "checked": False, "unread_damage": []}
    try:
        checkpoint = describe(folder, WORKERS)
        check_same_step(checkpoint)
        return facts | facts_of(checkpoint), checkpoint
    except Refused as error:
        return facts | {"refused": str(error)}, None
    except CheckpointError as error:
        return facts | {"problem": str(error)}, None


def number_of(value):
    """A number that a parameter group has, be it in a tensor."""
    return number_in(read_scalar(value))


def damage_of(folder, checkpoint):
    """Compare checksums. Returns three of the facts. checkpoint: None if saved without ZeRO."""
    paths = paths_of(checkpoint) if checkpoint else [*folder.glob("[!.]*_states.pt")]
    with pool_of(WORKERS, len(paths)) as pool:
        damages = dict(ChainMap(*pool.map(look_into, paths)))
    unread = weights_not_read(checkpoint, damages.keys()) if damages and checkpoint else set()
    needed = [text for place, text in damages.items() if place not in unread]
    return {
        "problem": "; ".join(needed) or None,
        "checked": True,
        "unread_damage": [text for place, text in damages.items() if place in unread],
    }


def look_into(path):
    """Returns {(path, offset of a record): what is wrong with it}."""
    try:
        return {(path, record.offset): text for record, text in damages_in(path)}
    except CheckpointError as error:
        return {(path, None): str(error)}


def weights_not_read(checkpoint, damaged):
    """Returns {(path, offset)} of weights in model states that a load does not read, as it reads
    their masters; but where a script has set some. damaged: such places, which tell nothing."""
    places = set()
    with contextlib.suppress(CheckpointError):
        changed = (weight.storage for _, weight in weights_set(checkpoint))
        if any((Path(of.path), of.offset) not in damaged for of in changed):
            return places
    for path in checkpoint.folder.glob("[!.]*model_states.pt"):
        with contextlib.suppress(CheckpointError):
            content = load(path)
            module = content.get("module") or content
            if layer := re.match(r"layer_(\d+)-", path.name):  # of a pipeline
                module = {f"{int(layer[1])}.{key}": module[key] for key in module}
            tensors = [tensor_of(module.get(name)) for name in checkpoint.parameters]
            places |= {(path, tensor.storage.offset) for tensor in tensors if tensor}
    return places


# --------------------------------------------------------------------------------------------------
# 2. one checkpoint


def facts_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns what is shown about a checkpoint, as JSON can hold it."""
    model = checkpoint.model
    batch = batch_of(model)
    steps = [*read_rows(checkpoint.folder / NEXT_STEPS, model["global_steps"] + 1)]
    states = dict.fromkeys(key for p in checkpoint.parameters.values() for key in p.states)
    kind = "universal"
    if checkpoint.layout:
        kind = f"ZeRO-{checkpoint.stage}, {checkpoint.layout.in_words(' ranks')}"
    reason = own_ranks_only(checkpoint)
    notes = left_over(checkpoint)
    for problem in (*checkpoint.problems, *problem_of_loss(checkpoint)):
        asks = ": a load on other ranks asks the optimizer whether it reads that"
        if problem.text != reason:
            notes.append(problem.text + asks * (problem.limit is Limit.NUMBER))
    if checkpoint.ranks_differ:
        differing = "the client states or buffers of its ranks differ"
        notes.append(f"{differing}: on other ranks all get rank 0's")
    return {
        "step": model["global_steps"],
        "kind": kind,
        "deepspeed": model.get("ds_version"),
        "batch": batch and batch._asdict() | {"doubt": doubt_of(batch.samples, model)},
        "optimizer": config_of(model, "optimizer").get("type"),
        "states": [*states],
        "groups": [
            {"rate": number_of(group.get("lr")), "decay": number_of(group.get("weight_decay"))}
            for group in checkpoint.optimizer.param_groups
        ],
        "scheduler": str(model.get("lr_scheduler") or "none")[:200],
        "tensors": len(checkpoint.parameters),
        "elements": sum(p.states["fp32"].numel for p in checkpoint.parameters.values()),
        "client_state": sorted(map(str, client_state_of(model))),
        "client_signs": client_signs(checkpoint.folder),
        "generating": generating(checkpoint, batch),
        "next_steps": steps and [steps[0], steps[-1]],
        "own_ranks_only": reason,
        "notes": notes,
    }


def generating(checkpoint, batch):
    """Returns how many completions one of TRL's Trainers has made at once, by the arguments that
    Trainer saves; None if they do not tell."""
    path = checkpoint.folder.absolute().parent / "training_args.bin"
    arguments = {}
    with contextlib.suppress(CheckpointError, OSError):
        arguments = getattr(load(path), "state", arguments)
    names = ("steps_per_generation", "gradient_accumulation_steps")
    steps, accumulation = (arguments.get(name) for name in names)
    if not (batch and is_natural(steps) and is_natural(accumulation) and accumulation):
        return None
    return batch.samples * steps // accumulation


def own_ranks_only(checkpoint):
    """Says why only the ranks that saved a checkpoint can load it; None if any number can."""
    problems = [p for p in checkpoint.problems if Limit.UNSAVED <= p.limit <= Limit.STATE]
    return min(problems, key=lambda problem: problem.limit).text if problems else None


# --------------------------------------------------------------------------------------------------
# 3. the screen


def lines_of(view: dict[str, Any], ranks: int | None = None) -> Iterator[str]:
    """Yields the lines of the screen. view: from look(). ranks: the number of data-parallel ranks
    that shall go on."""
    takes = view["takes"]
    yield f"{view['folder']}: " + (
        f"a resume takes {takes}" if takes else "no complete checkpoint: a resume would fail"
    )
    for text in view["says"]:
        if " is passed over: " not in text:  # the tag's own line says why
            yield from wrapped(f"  {text}")
    tags = view["tags"]
    names = sorted(tags, key=lambda name: (name != takes, not tags[name]["problem"]))
    for name in names[:SHOWN]:
        mark = "*" if name == takes else " "
        yield from wrapped(f"{mark} {name}: {state_in_words(tags[name])}")
    if len(names) > SHOWN:
        yield f"  and {len(names) - SHOWN} more"
    if takes and "step" in tags[takes]:
        yield ""
        for label, text in rows_of(tags[takes]):
            yield from wrapped(f"{label:>13}  {text}")
        if ranks is not None:
            yield ""
            yield from settings_on(tags[takes], ranks)


def state_in_words(facts):
    kind = f"step {facts['step']}, {facts['kind']}, " if "step" in facts else ""
    if facts["problem"]:
        return f"{kind}DAMAGED: {facts['problem']}"
    if "refused" in facts:
        return facts["refused"]
    if facts["unread_damage"]:
        return f"{kind}complete, but for what no resume reads: {facts['unread_damage'][0]}"
    return f"{kind}complete{', all checksums match' if facts['checked'] else ''}"


def rows_of(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields (label, text) for each row of a checkpoint's table."""
    yield "saved by", f"DeepSpeed {facts['deepspeed']}"
    text = "{samples} in micro-batches of {micro}{doubt}"
    yield "batch", text.format(**facts["batch"]) if facts["batch"] else "its config does not tell"
    kind = facts["optimizer"] or "type not recorded"
    yield "optimizer", f"{kind}: {', '.join(facts['states'])}"
    for i, group in enumerate(facts["groups"][:SHOWN]):
        rates = [f"{what} {short(rate)}" for what, rate in group.items() if rate is not None]
        yield f"group {i}", ", ".join(rates)
    if more := facts["groups"][SHOWN:]:
        yield "", f"and {len(more)} more"
    yield "scheduler", facts["scheduler"]
    elements, tensors = short(facts["elements"]), counted(facts["tensors"], "tensor")
    yield "parameters", f"{elements} trained ({tensors})"
    yield "client state", ", ".join(facts["client_state"]) or "none"
    steps = (
        "{} to {} are written down".format(*facts["next_steps"]) if facts["next_steps"] else "none"
    )
    yield "next steps", steps
    reason = facts["own_ranks_only"]
    yield "resumes on", f"its own ranks only: {reason}" if reason else "any number of ranks"
    for text in facts["notes"]:
        yield "note", text


def settings_on(facts: dict[str, Any], ranks: int) -> Iterator[str]:
    """Yields what to paste so that this number of data-parallel ranks keeps the batch."""
    if ranks < 1:
        raise CheckpointError(f"--ranks {ranks} is none")
    if facts["own_ranks_only"]:
        raise CheckpointError(f"it resumes on its own ranks only: {facts['own_ranks_only']}")
    if not facts["batch"]:
        raise CheckpointError("its config names no batch")
    batch, micro, doubt = facts["batch"].values()
    heading = f"the batch was {batch}{doubt}: {CHOOSE}"
    if not doubt:
        try:
            share = batches.Share(batch, micro, ranks)
        except ValueError as error:
            raise CheckpointError(error) from error
        heading = str(share)
    yield from wrapped(heading)
    names = facts["client_signs"] + facts["client_state"]
    lines = advice_on_batch(None if doubt else batch, micro, *names)
    yield from (f"  {line}" for line in lines)
    if facts["generating"] and not doubt:
        yield from wrapped(f"  {stock_rollouts(batch, micro, facts['generating'], ranks)}")


def stock_rollouts(batch: int, micro: int, generated: int, ranks: int) -> str:
    """Says what keeps both batches of a Trainer of TRL that generates, where AnyRanksRollouts is
    not used. generated: completions that are made at once."""
    both = f"the batch of {batch} and the {generated} completions that are made at once"
    shared = math.gcd(batch, generated)
    if shared % ranks:
        fitting = [str(n) for n in range(1, shared + 1) if shared % n == 0]
        return (
            f"TRL alone keeps {both} on no {counted(ranks, 'rank')}, but on {', '.join(fitting)}; "
            f"on any with `UNIVERSAL_BATCH={batch} python -m universal` before the command, or "
            "with universal.rollouts.AnyRanksRollouts"
        )
    own = largest_divisor(shared // ranks, micro)
    return (
        f"TRL alone keeps {both} with per_device_train_batch_size={own}, "
        f"gradient_accumulation_steps={batch // own // ranks}, "
        f"steps_per_generation={generated // own // ranks}, without generation_batch_size, and "
        "draws other completions"
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", help="the folder above the tags, or a checkpoint")
    parser.add_argument("--tag", help="look at this one alone")
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="print how N data-parallel ranks keep the batch"
    )
    parser.add_argument("--quick", action="store_true", help="compare no checksums")
    parser.add_argument("--json", action="store_true", help="for programs")
    args = parser.parse_args()
    with in_one_line("universal.inspect"):
        view = look(args.folder, args.tag, args.quick)
        lines = (
            [json.dumps(view, indent=1, default=str)] if args.json else lines_of(view, args.ranks)
        )
        print_screen("\n".join(lines))
    tags = view["tags"].values()
    sys.exit(2 if any(facts["problem"] or facts["unread_damage"] for facts in tags) else 0)


if __name__ == "__main__":
    main()
