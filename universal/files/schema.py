# SPDX-License-Identifier: MIT
"""Check that what was read from a file is what a checkpoint has there, before we rely on it.

    MODEL_STATES = {"global_steps": is_natural, "param_shapes": [{str: is_shape}], "module?": dict}
    model = expect(load(path), MODEL_STATES, path)

A pattern is one of these:

    a class               the value is an instance of it
    a function            returns whether the value will do
    [pattern]             a list or tuple of such values
    {"key": pattern}      a dict with this key; "key?" may be absent
    {str: pattern}        a dict whose keys all fit this class, or function
    (pattern, pattern)    one of them fits
"""

from pathlib import Path
from types import NoneType
from typing import Any

from universal.errors import CheckpointError


def expect(content: Any, pattern: Any, path: Path) -> Any:
    """Return the content if it fits the pattern. Raises CheckpointError, naming what does not."""
    for misfit in misfits(content, pattern, ""):
        raise CheckpointError(f"{path} does not hold what a ZeRO checkpoint does: {misfit}")
    return content


def is_natural(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < 1 << 63


def is_shape(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and all(map(is_natural, value))


def misfits(value, pattern, name):
    """Yields, in words, what in a value does not fit. name: of the value; "" at the top."""
    if isinstance(pattern, tuple):
        misfits_of_choices = [[*misfits(value, choice, name)] for choice in pattern]
        if all(misfits_of_choices):
            yield from misfits_of_choices[-1]
    elif isinstance(pattern, list) and isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from misfits(item, pattern[0], f"{name}[{i}]")
    elif isinstance(pattern, dict) and isinstance(value, dict):
        for key, inner in pattern.items():
            yield from misfits_of_key(value, key, inner, name)
    elif not matches(value, pattern):
        yield f"{name or 'it'} is {shown(value)}"


def misfits_of_key(value, key, pattern, name):
    if not isinstance(key, str):
        yield from misfits([*value], [key], f"the keys of {name}")
        for each, item in value.items():
            yield from misfits(item, pattern, f"{name}[{each!r}]")
        return
    required = key.removesuffix("?")
    if required in value:
        yield from misfits(value[required], pattern, f"{name}.{required}".lstrip("."))
    elif key == required:
        yield f"{name or 'it'} has no {key}"


def matches(value, pattern):
    if isinstance(pattern, type):
        return isinstance(value, pattern)
    return callable(pattern) and pattern(value)


def shown(value):
    printable = (NoneType, bool, float, str, bytes)
    if isinstance(value, printable) or is_natural(value):
        return repr(value)[:60]
    return f"a {type(value).__name__}"
