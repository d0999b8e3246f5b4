# SPDX-License-Identifier: MIT
"""Which checkpoint in a folder is meant: the tags in it, and in which order to try them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from universal.checkpoint.describe import BETWEEN_SAVES, describe, find_shards
from universal.checkpoint.order import Told
from universal.checkpoint.without_zero import MODEL_STATES_FILE
from universal.errors import CheckpointError
from universal.files.schema import expect, is_natural
from universal.files.torch_file import load


class Tag(NamedTuple):
    """A checkpoint in a folder. step, written: of its model states, and when they were written.

    is_saved: whether DeepSpeed saved it. A conversion may have been written long after its step, so
    its time says nothing of where the run went.
    """

    name: str
    step: int
    written: float
    is_saved: bool


def is_checkpoint(folder: Path) -> bool:
    """Whether it has a checkpoint's files, and is not the folder above."""
    return any(folder.glob("*_states.pt"))


def find_tag(folder: str | Path) -> Path:
    """The folder with a checkpoint's files: this one, or the one in it that `latest` names, or the
    only one in it that is not converted. What writes or compares takes no other for it, as a
    resume does (newest_first). Raises CheckpointError, if there are several."""
    folder = Path(folder)
    if is_checkpoint(folder):
        return folder
    if (folder / "latest").is_file():
        return folder / named_by_latest(folder)
    tags = [tag for tag in list_tags(folder) if is_saved(folder / tag)]
    if len(tags) > 1:
        raise CheckpointError(
            f"{folder} holds several checkpoints, and no `latest` that names one: {', '.join(tags)}"
        )
    return folder / tags[0] if tags else folder


def is_saved(folder: Path) -> bool:
    """Whether a checkpoint is as DeepSpeed saved it, and not converted."""
    return not (folder / "zero").is_dir()


def latest_file(folder, converted_only=False):
    """`latest`, or else `latest_universal`; the latter alone, if only converted checkpoints count.
    None, if there is neither."""
    names = ["latest_universal"] if converted_only else ["latest", "latest_universal"]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def named_by_latest(folder: Path, converted_only: bool = False) -> str:
    """The tag that latest_file() names; "" if there is no such file."""
    path = latest_file(folder, converted_only)
    text = os.fsdecode(path.read_bytes()).strip().replace("\0", "?") if path else ""
    # Somebody may have written a path there, such as ./global_step100/
    return os.path.relpath(folder / text, folder) if text else ""


def list_tags(folder: Path) -> list[str]:
    """The names of the checkpoints in a folder, whole or not. A tag like epoch1/step5 is a folder
    in a folder; such tags are found if they are next to the one that `latest` names."""
    tags = set()
    name = named_by_latest(folder)
    for place in {folder, (folder / name).parent if name else folder}:
        for path in place.glob("[!.]*/*mp_rank_00_model_states.pt"):
            if not path.parent.name.endswith((".unfinished", ".replaced")):
                tags.add(os.path.relpath(path.parent, folder))
    return sorted(tags)


def rank_0_model_states(folder: Path) -> Path:
    """Rank 0's file; if two saves left one each, that of the newest whole checkpoint."""
    plain = folder / MODEL_STATES_FILE
    of_stage_3 = folder / f"zero_pp_rank_0_{MODEL_STATES_FILE}"
    present = [path for path in (plain, of_stage_3) if path.exists()]
    both = len(present) == 2 and is_saved(folder)
    if both or len(find_shards(folder)) > 1:
        return describe(folder, given=Told).checkpoint.files.model_states  # no engine is needed
    if present:
        return present[0]
    # Which of them is missing?
    return of_stage_3 if any(folder.glob("zero_pp_*_model_states.pt")) else plain


def step_of(path: Path) -> int:
    """The step of a file of model states. Raises CheckpointError."""
    return expect(load(path), {"global_steps": is_natural}, path)["global_steps"]


def newest_first(folder: Path, say: Callable, converted_only: bool = False) -> list[str]:
    """The tags in a folder, in the order in which to try to resume from them: first the one that
    `latest` names, unless there is a later one. say(text) reports what is skipped."""
    tags = []
    passed_over = set()
    for name in list_tags(folder):
        saved = is_saved(folder / name)
        if saved and converted_only:
            continue
        try:
            path = rank_0_model_states(folder / name)
            tags.append(Tag(name, step_of(path), path.stat().st_mtime, saved))
        except (CheckpointError, OSError) as error:
            passed_over.add(name)
            say(f"{name} is passed over: {type(error).__name__}: {error}")
    # A tag of fewer steps that was saved later means that the run went back.
    given_up = {
        tag: later
        for tag in tags
        for later in tags
        if later.is_saved and later.step < tag.step and later.written > tag.written + BETWEEN_SAVES
    }
    last = max(tags, key=lambda tag: tag.step, default=None)
    tags.sort(key=lambda tag: (tag not in given_up, tag.step, tag.is_saved), reverse=True)
    name = named_by_latest(folder, converted_only)
    file = "latest_universal" if converted_only else "latest"
    # A job killed before it wrote `latest` leaves a newer tag. Others are from an earlier run, or
    # `latest` was edited.
    for named in [tag for tag in tags if tag.name == name]:
        since = latest_file(folder, converted_only).stat().st_mtime
        later = [tag for tag in tags if tag.step > named.step and tag.written > since]
        if later:
            say(
                f"`{file}` names {name}, and {later[0].name} was written after it: the later one "
                "is taken, if it is complete"
            )
        return [tag.name for tag in dict.fromkeys([*later, named, *tags])]
    if name and name not in passed_over:
        say(f"`{file}` names {name}, which {what_it_lacks(folder / name, converted_only)}")
    if last in given_up:
        say(
            f"{given_up[last].name} was written after {last.name}, so that run went back; if they "
            "were copied, and have the times of the copy, tell which tag to load"
        )
    return [tag.name for tag in tags]


def what_it_lacks(tag, converted_only):
    """Why a folder is no checkpoint."""
    if converted_only:
        return "holds no checkpoint that is converted"
    return "lacks rank 0's model states" if any(tag.glob("*_states.pt")) else "holds no checkpoint"
