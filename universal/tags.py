# SPDX-License-Identifier: MIT
"""Which checkpoint in a folder is meant: the tags in it, and in which order to try them. Needs
nothing but Python 3.10."""

import os
from pathlib import Path

from universal.checkpoint import BETWEEN_SAVES, describe, find_shards
from universal.errors import CheckpointError
from universal.expect import expect, is_natural
from universal.stage_0 import MODEL_STATES
from universal.torch_file import load


def find_tag(folder):
    """The folder with a checkpoint's files: this one, or the one in it that `latest` names, or the
    only one in it."""
    folder = Path(folder)
    if any(folder.glob("*_optim_states.pt")) or (folder / MODEL_STATES).exists():
        return folder
    if (folder / "latest").is_file():
        return folder / named_by_latest(folder)
    tags = {path.parent for path in folder.glob("*/*_optim_states.pt")}
    tags |= {path.parent for path in folder.glob(f"*/{MODEL_STATES}")}
    tags = {tag for tag in tags if not (tag / "zero").is_dir()}
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


def latest_file(folder, converted_only=False):
    """`latest`, or else `latest_universal`; the latter alone, if only converted checkpoints count.
    None, if there is neither."""
    names = ["latest_universal"] if converted_only else ["latest", "latest_universal"]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def named_by_latest(folder, converted_only=False):
    """The tag that latest_file() names; "" if there is no such file."""
    path = latest_file(folder, converted_only)
    text = os.fsdecode(path.read_bytes()).strip().replace("\0", "?") if path else ""
    # Somebody may have written a path there, such as ./global_step100/
    return os.path.relpath(folder / text, folder) if text else ""


def list_tags(folder):
    """The names of the checkpoints in a folder, whole or not. A tag like epoch1/step5 is a folder
    in a folder; such tags are found if they are next to the one that `latest` names."""
    found = set()
    for place in {folder, (folder / named_by_latest(folder)).parent}:
        for path in place.glob("[!.]*/*mp_rank_00_model_states.pt"):
            if not path.parent.name.endswith((".unfinished", ".replaced")):
                found.add(os.path.relpath(path.parent, folder))
    return sorted(found)


def rank_0_model_states(folder: Path) -> Path:
    """Rank 0's file; if two saves left one each, that of the newest whole checkpoint."""
    plain = folder / MODEL_STATES
    of_stage_3 = folder / f"zero_pp_rank_0_{MODEL_STATES}"
    both = plain.exists() and of_stage_3.exists() and not (folder / "zero").is_dir()
    if both or len(find_shards(folder)) > 1:
        return describe(folder).checkpoint.files.model_states
    if plain.exists() or of_stage_3.exists():
        return plain if plain.exists() else of_stage_3
    # Which of them is missing?
    return of_stage_3 if any(folder.glob("zero_pp_*_model_states.pt")) else plain


def step_of(path: Path) -> int:
    """The step of a file of model states. Raises CheckpointError."""
    return expect(load(path), {"global_steps": is_natural}, path)["global_steps"]


def newest_first(folder, say, converted_only=False):
    """The tags in a folder, in the order in which to try to resume from them: first the one that
    `latest` names, unless there is a later one. say(text) reports what is skipped."""
    named, steps, written = named_by_latest(folder, converted_only), {}, {}
    for name in list_tags(folder):
        if converted_only and not (folder / name / "zero").is_dir():
            continue
        try:
            path = rank_0_model_states(folder / name)
            steps[name] = step_of(path)
            written[name] = path.stat().st_mtime
        except (CheckpointError, OSError) as error:
            say(f"{name} is passed over: {type(error).__name__}: {error}")
    # A tag of fewer steps that was saved later means that the run went back. Converted tags are
    # always late.
    saved = {name: not (folder / name / "zero").is_dir() for name in steps}
    given_up = {
        a: b
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
        since = latest_file(folder, converted_only).stat().st_mtime
        later = [name for name in order if steps[name] > steps[named] and written[name] > since]
        if later:
            say(
                f"`latest` names {named}, and {later[0]} was written after it: the later one is "
                "taken, if it is whole"
            )
        return list(dict.fromkeys([*later, named, *order]))
    if named:
        say(f"`latest` names {named}, which holds no checkpoint")
    last = max(steps, key=steps.get, default=None)
    if last in given_up:
        say(
            f"{given_up[last]} was written after {last}, so that run went back; if they were "
            "copied, and have the times of the copy, tell which tag to load"
        )
    return order
