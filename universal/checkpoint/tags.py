# SPDX-License-Identifier: MIT
"""Which checkpoint in a folder is meant: the tags in it, and in which order to try them."""

import contextlib
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from universal.checkpoint.describe import BETWEEN_SAVES, MODEL_STATES_FILE
from universal.checkpoint.types import NEXT_STEPS
from universal.errors import CheckpointError, Refused
from universal.files.schema import expect, is_natural
from universal.files.torch_file import load

POINTERS = ("latest", "latest_universal")  # files that name a tag
# Folders beside a checkpoint, while it is written, replaced or removed: publish.py.
HIDDEN = re.compile(r"\.(.+)\.\d{19}\.(saving|unfinished|replaced|removed)")
POINTER = ".latest"  # in a folder until it has its name; then it becomes `latest`
# What a save, or a conversion, puts into the folder of a checkpoint.
WRITTEN = re.compile(
    r"((bf16|fp16)_)?((zero_pp|expp)_rank_\d+_)?mp_rank_\d+(_\d+)?_(model|optim)_states\.pt"
    rf"|layer_\d+[-_]\w+([-_]\w+)*_states\.pt|zero|{NEXT_STEPS}|\{POINTER}"
)


class Tag(NamedTuple):
    """A checkpoint in a folder. step, written: of its model states, and when they were written.

    is_original: whether DeepSpeed saved it; a conversion may be written long after its step, so its
    time says nothing.
    """

    name: str
    step: int
    written: float
    is_original: bool


class Choice(NamedTuple):
    """The checkpoints in a folder, in the order in which a resume tries them.

    to_try: that order. says: lines about what is passed over. name: the tag that `latest` names,
    complete or not, or the only tag; "" if there is neither.
    """

    to_try: list[Tag]
    says: list[str]
    name: str


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder has a checkpoint's files itself, and not in folders below."""
    return any(folder.glob("[!.]*_states.pt"))


def find_tag(folder: str | Path) -> Path:
    """The folder of the checkpoint that is meant: this one, or one of the tags in it. Raises
    CheckpointError if `latest` and a resume's choice differ: commands must not guess."""
    folder = Path(folder)
    if is_checkpoint(folder):
        return folder
    choice = choose_tag(folder)
    first = choice.to_try[0].name if choice.to_try else choice.name
    if first != choice.name:
        named = f"names {choice.name}" if choice.name else "names none"
        raise CheckpointError(
            f"{folder}: `latest` {named}, and a resume begins with {first}: name the folder of the "
            "one to take"
        )
    return place_of(folder, choice.name)


def restore_all(folder: Path) -> None:
    """Call restore() in folders_of_tags()."""
    for place in folders_of_tags(folder):
        restore(place)


def restore(folder: Path) -> None:
    """Give a checkpoint its name back if a process died while it replaced it. If the new one is
    there, a script's own files move to it from the old one."""
    for path in sorted(folder.glob(".*.replaced"), reverse=True):
        match = HIDDEN.fullmatch(path.name)
        output = match and path.with_name(match[1])
        with contextlib.suppress(OSError):  # another process does it, or nobody may
            if match and not output.exists():
                path.rename(output)
            for own in path.iterdir() if match else ():
                if not WRITTEN.fullmatch(own.name) and not (output / own.name).exists():
                    own.rename(output / own.name)


def put_aside(folder: Path) -> dict[str, Path]:
    """Returns {name: folder} of checkpoints to which restore() would give their names back."""
    matches = {path: HIDDEN.fullmatch(path.name) for path in sorted(folder.glob(".*.replaced"))}
    names = {path: match[1] for path, match in matches.items() if match}
    return {name: path for path, name in names.items() if not (folder / name).exists()}


def place_of(folder: Path, tag: str) -> Path:
    """The folder of a checkpoint, also while it is put aside."""
    path = folder / tag
    return put_aside(path.parent).get(path.name, path)


def is_original(folder: Path) -> bool:
    """Whether DeepSpeed saved a checkpoint, and no converter wrote it."""
    return not (folder / "zero").is_dir()


def latest_file(folder: Path, pointers: Sequence[str] = POINTERS) -> Path | None:
    """The first of these files that the folder has; None if it has none."""
    return next((folder / name for name in pointers if (folder / name).is_file()), None)


def named_by_latest(folder: Path, pointers: Sequence[str] = POINTERS) -> str:
    """The tag that latest_file() names; "" if there is no such file."""
    path = latest_file(folder, pointers)
    text = os.fsdecode(path.read_bytes()).strip().replace("\0", "?") if path else ""
    # Somebody may have written a path there, such as ./global_step100/
    return os.path.relpath(folder / text, folder) if text else ""


def folders_of_tags(folder: Path) -> set[Path]:
    """Returns the folder, and the one with the tag that `latest` names, such as epoch1/step5."""
    name = named_by_latest(folder)
    return {folder, (folder / name).parent if name else folder}


def list_tags(folder: Path) -> list[str]:
    """The names of the checkpoints in a folder, complete or not: those of folders_of_tags()."""
    tags = set()
    for place in folders_of_tags(folder):
        tags.update(os.path.relpath(place / aside, folder) for aside in put_aside(place))
        for path in place.glob("[!.]*/[!.]*_rank_00_model_states.pt"):
            tags.add(os.path.relpath(path.parent, folder))
    return sorted(tags)


def rank_0_model_states(folder: Path) -> Path:
    """The path of rank 0's model states, at any stage."""
    plain = folder / MODEL_STATES_FILE
    of_stage_3 = folder / f"zero_pp_rank_0_{MODEL_STATES_FILE}"
    if plain.exists() or not any(folder.glob("zero_pp_*_model_states.pt")):
        return plain
    return of_stage_3


def step_of(path: Path) -> int:
    """The step in a file of model states. Raises CheckpointError."""
    return expect(load(path), {"global_steps": is_natural}, path)["global_steps"]


def choose_tag(folder: Path, converted_only: bool = False) -> Choice:
    """Order the checkpoints of a folder for a resume: the one that `latest` names, then the others,
    most steps first; those of more steps than that one, and those that a run has given up to go
    back, come last. A copy has no usable times: there `latest` alone tells which branch goes on.

    converted_only: pass over all but universal checkpoints. Raises: Refused.
    """
    places = {name: place_of(folder, name) for name in list_tags(folder)}
    names = [name for name in places if not (converted_only and is_original(places[name]))]
    saved = [name for name in names if is_original(places[name])]
    pointers = [*POINTERS]
    if converted_only:
        pointers.remove("latest")
    if saved:
        pointers.remove("latest_universal")
    name = named_by_latest(folder, pointers)
    tags, passed_over = read_tags({name: places[name] for name in names})
    says = [
        f"{name} is {path.name} since a save of it died: a load gives it its name back"
        for name, path in places.items()
        if path.name != os.path.basename(name)
    ]
    for tag, error in passed_over.items():
        if isinstance(error, Refused) and (tag == name or not tags):
            raise error
        says.append(f"{tag} is passed over: {type(error).__name__}: {error}")
    left = abandoned(tags) if name else set()  # copies have no usable times
    if any(tag.name == name for tag in left):
        left = set()  # the run has not gone back: the later one is a copy
    tags.sort(key=lambda tag: (tag not in left, tag.step, tag.is_original), reverse=True)
    named = [tag for tag in tags if tag.name == name]
    if named:
        pointer = latest_file(folder, pointers)
        later = [tag for tag in tags if tag.step > named[0].step]
        says += [
            f"`{pointer.name}` names {name}, which is taken, and {tag.name} is of a later step: to "
            f"take that one, `echo {shlex.quote(tag.name)} > {shlex.quote(str(pointer))}`"
            for tag in later[:1]
            if tag not in left
        ]
        tags = [*(tag for tag in tags if tag not in later), *later]
    elif name and name not in passed_over:
        missing = what_is_missing(folder / name, converted_only)
        says.append(f"`{latest_file(folder, pointers).name}` names {name}, which {missing}")
    elif not name and len(tags) > 1:
        absent = "` or `".join(pointers)
        says.append(f"{folder} has no `{absent}`: {tags[0].name} is of the most steps")
    candidates = [name] if name else saved or names
    meant = candidates[0] if len(candidates) == 1 else ""
    return Choice([*dict.fromkeys([*named, *tags])], says, meant)


def abandoned(tags):
    """The tags that a run has gone back behind: of more steps than one that was saved later."""
    return {
        tag
        for tag in tags
        for later in tags
        if later.is_original
        and later.step < tag.step
        and later.written > tag.written + BETWEEN_SAVES
    }


def read_tags(places):
    """Returns the Tags that can be read, and for the others the errors, by name. places: {name:
    folder}."""
    tags = []
    problems = {}
    for name, folder in places.items():
        try:
            path = rank_0_model_states(folder)
            written = path.stat().st_mtime
            tags.append(Tag(name, step_of(path), written, is_original(folder)))
        except (CheckpointError, OSError) as error:
            problems[name] = error
    return tags, problems


def checkpoints_near(folder: Path, step: int) -> list[tuple[Path, Tag]]:
    """Returns (place, Tag) of the checkpoints in a folder, most steps first; if the folder is named
    by this step, as Trainer's checkpoint-100 is, also of those named alike."""
    pattern = re.sub(r"\d+", "*", folder.name)
    is_of_step = str(step) in re.findall(r"\d+", folder.name)
    folders = folder.absolute().parent.glob(pattern) if is_of_step else [folder]
    near = []
    for place in folders:
        tags, _ = read_tags({name: place_of(place, name) for name in list_tags(place)})
        near += [(place / tag.name, tag) for tag in tags]
    return sorted(near, key=lambda pair: pair[1].step, reverse=True)


def what_is_missing(folder, converted_only):
    """Says why a folder is no checkpoint, after "which"."""
    if converted_only:
        return "holds no checkpoint that is converted"
    return (
        "lacks rank 0's model states"
        if any(folder.glob("[!.]*_states.pt"))
        else "holds no checkpoint"
    )
