# SPDX-License-Identifier: MIT
"""What inspect.py prints: one screen of 100 columns, numbers with at most four digits."""

import json
import textwrap
from collections.abc import Iterator
from typing import Any

WIDTH = 100
MOST_TAGS = 8
LONGEST_PROBLEM = 400  # characters
MOST_GROUPS = 4
MOST_COLUMNS = 9
INDENT = " " * 15
UNITS = ("", " k", " M", " G", " T", " P")


def lines_of(view: dict[str, Any]) -> list[str]:
    """The screen. view: what look() returns."""
    lines = [*head(view)]
    if view["takes"]:
        lines.append("")
        facts = view["tags"][view["takes"]]
        for label, text in rows_of(facts):
            lines += wrapped(f"{label:>13}  {text}")
        lines += table(facts)
    if settings := view.get("on_ranks"):
        lines += ["", *settings_lines(settings)]
    return [line.rstrip() for line in lines]


def head(view):
    """What a resume takes, and a line of each tag: first that one, then those that are damaged."""
    tags = view["tags"]
    takes = view["takes"]
    yield f"{view['folder']}: a resume takes {takes or 'none'}"
    for text in view["says"]:
        if " is passed over: " not in text:  # the tag's own line says why
            yield from wrapped(f"  {text}")
    names = sorted(tags, key=lambda name: (name != takes, not tags[name]["problem"]))
    for name in names[:MOST_TAGS]:
        facts = tags[name]
        mark = "*" if name == takes else " "
        yield from wrapped(f"{mark} {name}: {state_in_words(facts)}")
        for text in facts["unread_damage"]:
            yield from wrapped(f"{INDENT}{text}")
    if len(names) > MOST_TAGS:
        yield f"  and {len(names) - MOST_TAGS} more"


def state_in_words(facts):
    if "step" not in facts:
        return f"NOT COMPLETE: {cut(facts['problem'])}"
    kind = f"step {facts['step']}, {kind_of(facts)}"
    if facts["problem"]:
        return f"{kind}, DAMAGED: {cut(facts['problem'])}"
    if facts["unread_damage"]:
        return f"{kind}, complete, but for damage that a resume does not read:"
    return f"{kind}, complete, all checksums match" if facts["checked"] else f"{kind}, complete"


def cut(text):
    return text if len(text) <= LONGEST_PROBLEM else f"{text[:LONGEST_PROBLEM]} ..."


def kind_of(facts):
    stage = f"ZeRO-{facts['stage']}" if facts["stage"] else "without ZeRO"
    ranks = facts["ranks"]
    layout = facts["layout"]
    degrees = {"data": ranks // layout["sequence"]} | layout
    sharing = degrees.pop("expert")
    ways = [f"{count} {way}" for way, count in degrees.items() if count > 1]
    text = f"{stage}, {counted(ranks, 'rank')}"
    if ways and ways != [f"{ranks} data"]:
        text = f"{stage}, {' x '.join(ways)}-parallel ranks"
    for count in facts["experts"][:1]:
        text += f", {count} experts shared by {sharing}"
    return f"universal (from {text})" if facts["universal"] else text


def wrapped(text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, subsequent_indent=INDENT, break_long_words=False, break_on_hyphens=False
    )


# --------------------------------------------------------------------------------------------------
# 1. one checkpoint


def rows_of(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(label, text) of what is said about a checkpoint."""
    dtype = facts["dtype"] or "a precision that is not saved"
    yield "saved by", f"DeepSpeed {facts['deepspeed']}, {kind_of(facts)}, {dtype}"
    samples = "" if facts["samples"] is None else f", {short(facts['samples'])} samples"
    yield "step", f"{facts['step']} ({facts['skipped']} skipped){samples}"
    yield "batch", batch_text(facts["batch"])
    yield from optimizer_rows(facts["optimizer"])
    yield "scheduler", scheduler_text(facts["scheduler"])
    yield "parameters", elements_text(facts)
    yield "on disk", f"{size(facts['bytes'])} in {counted(facts['files'], 'file')}"
    yield "client state", ", ".join(facts["client_state"]) or "none"
    steps = facts["next_steps"]
    yield (
        "next steps",
        f"{steps[0]} to {steps[1]} are written down" if steps else "none are written down",
    )
    for text in facts["not_converted"]:
        yield "not converted", text
    for text in facts["notes"]:
        yield "note", text


def batch_text(batch):
    if batch is None:
        return "its config does not tell"
    samples, micro, steps, ranks = map(batch.get, ("samples", "micro", "steps", "ranks"))
    product = f"{micro} x {counted(steps, 'step')} x {counted(ranks, 'rank')}"
    computed = micro * steps * ranks
    if computed == samples:
        return f"{samples} = {product}"
    return f"{samples}, of the {computed} = {product} that are computed"


def optimizer_rows(optimizer):
    kinds = filter(None, (optimizer["type"], optimizer["class"]))
    kind = " in ".join(kinds) or "of a type that is not saved"
    states = ", ".join(optimizer["states"]) or "no states"
    yield "optimizer", f"{kind}: {states}; {size(optimizer['bytes'])}"
    groups = optimizer["groups"]
    for i, group in enumerate(groups[:MOST_GROUPS]):
        rates = {"rate": group.get("lr"), "decay": group.get("weight_decay")}
        texts = [f"{what} {short(rate)}" for what, rate in rates.items() if rate is not None]
        if group["tensors"]:
            texts.append(f"{short(group['elements'])} in {counted(group['tensors'], 'parameter')}")
        yield f"group {i}", ", ".join(texts)
    if len(groups) > MOST_GROUPS:
        yield "", f"and {len(groups) - MOST_GROUPS} more groups"


def scheduler_text(scheduler):
    if not scheduler:
        return "none"
    state = scheduler["state"]
    if isinstance(state, dict):
        numbers = [
            f"{key} {short(value)}"
            for key, value in state.items()
            if isinstance(value, (int, float)) and not key.startswith("_")
        ]
        state = ", ".join(numbers[:3])
    return f"{scheduler['type'] or 'of a type that is not saved'}: {state}"


def elements_text(facts):
    parts = {
        "trained": "trained",
        "frozen": "frozen",
        "buffers": "in buffers",
        "added": "added by modules",
    }
    texts = []
    for key, what in parts.items():
        elements, tensors = short(facts[key]["elements"]), facts[key]["tensors"]
        if tensors:
            texts.append(f"{elements} {what} ({counted(tensors, 'tensor')})")
    return ", ".join(texts) or "none"


def table(facts):
    """Where it goes on: a column for each number of ranks."""
    shares = chosen(facts["goes_on"])
    if facts["own_ranks_only"]:
        yield from wrapped(f"{'goes on':>13}  on its own ranks only: {facts['own_ranks_only']}")
    rows = {
        "resumes on": ("ranks", str),
        "GPUs": ("gpus", str),
        "steps": ("steps", str),
        "efficiency": ("efficiency", percent),
        "states each": ("nbytes", size),
    }
    if all(share["gpus"] == share["ranks"] for share in shares):
        del rows["GPUs"]
    if shares[0]["steps"] is None:
        del rows["steps"], rows["efficiency"]
    for label, (key, in_words) in rows.items():
        cells = " ".join(f"{in_words(share[key]):>8}" for share in shares)
        unit = " ranks" if key == "ranks" else ""
        yield f"{label:>13}  {cells}{unit}"


def chosen(shares):
    """All of them, or those that people ask for: some ranks less, half as many, twice as many."""
    if len(shares) <= MOST_COLUMNS:
        return shares
    ranks = len(shares) // 2
    wanted = {1, ranks // 2, ranks - 8, ranks - 4, ranks - 2, ranks - 1, ranks, 2 * ranks}
    return [share for share in shares if share["ranks"] in wanted]


# --------------------------------------------------------------------------------------------------
# 2. the lines of a config


def settings_lines(settings):
    ranks = counted(settings["ranks"], "data-parallel rank")
    if settings["problem"]:
        yield from wrapped(f"on {ranks}: {settings['problem']}")
        return
    batch, efficiency = settings["batch"], settings["efficiency"]
    micro = settings["config"]["train_micro_batch_size_per_gpu"]
    steps = counted(settings["steps"], "accumulation step")
    yield f"on {ranks}: {steps}, efficiency {percent(efficiency)}"
    any_ranks = efficiency < 1
    made = f", or **universal.batches.config({batch}, {micro})" if any_ranks else ""
    yield f"  DeepSpeed's config{made}:"
    yield from (f"    {json.dumps(key)}: {value}," for key, value in settings["config"].items())
    arguments = settings["training_arguments"]
    switch = f", with UNIVERSAL_BATCH={batch} python -m universal" if any_ranks else ""
    yield f"  Trainer script or LLaMA-Factory's YAML{switch}:"
    yield from (f"    {key}: {value}" for key, value in arguments.items())
    yield "  transformers, without that:" if any_ranks else "  transformers:"
    if any_ranks:
        yield "    class MyTrainer(AnyRanks, Trainer): pass    # from universal.trainer"
    words = ", ".join(f"{key}={value}" for key, value in arguments.items())
    yield f"    TrainingArguments({words}, ...)"


# --------------------------------------------------------------------------------------------------
# 3. numbers


def short(number: Any) -> str:
    """A number in at most four digits, and k, M, G, T or P. Other values as they are."""
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return str(number)
    power = 0
    while power < 5 and abs(float(f"{number / 1000**power:.4g}")) >= (1000 if power else 10000):
        power += 1
    return f"{number / 1000**power:.4g}{UNITS[power]}"


def size(nbytes: int) -> str:
    text = short(nbytes)
    return f"{text}B" if " " in text else f"{text} B"


def percent(efficiency):
    return "" if efficiency is None else f"{100 * efficiency:.3g} %"


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
