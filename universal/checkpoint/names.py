# SPDX-License-Identifier: MIT
"""The names of parameters and buffers, without what torch.compile() puts into them, and those of
weight normalization before torch 2.1.

A compiled module has all its own in a part `_orig_mod`: a checkpoint of it is of the same model as
one that was not compiled.
"""

import re
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

COMPILED = re.compile(r"(?<!\w)_orig_mod\\?\.")  # in a pattern, too
PARAMETRIZED = re.compile(r"(?<!\w)parametrizations\.(\w+)\.original([01])$")
NAMING = (
    "buffer_names",
    "param_shapes",
    "frozen_param_shapes",
    "frozen_param_fragments",
    "shared_params",
    "universal_checkpoint_info",
)


def plain_name(name: str) -> str:
    """The name that it has if nothing is compiled; also of a prefix that ends with a dot."""
    return COMPILED.sub("", name)


def names_of_now(saved: Iterable[str], present: Iterable[str]) -> dict[str, str]:
    """{saved name: the present one} where a tensor has the one name by torch.nn.utils.weight_norm()
    and the other by parametrizations.weight_norm(): nothing else has changed."""
    present = {*present}
    names = former_names(present)
    names |= {new: old for old, new in former_names(saved).items() if old in present}
    return names


def former_names(names):
    """{name by torch.nn.utils.weight_norm(): name} of these by parametrizations.weight_norm()."""
    matches = {name: PARAMETRIZED.search(name) for name in names}
    return {
        f"{name[: match.start()]}{match[1]}_{'gv'[int(match[2])]}": name
        for name, match in matches.items()
        if match
    }


def plain_keys(entries: dict) -> dict:
    """{plain name: value}; the dict itself, if it has no other names, or two would be the same."""
    names = {key: plain_name(key) if isinstance(key, str) else key for key in entries}
    plain = class_of_dict(entries)((name, entries[key]) for key, name in names.items())
    return plain if plain.keys() != entries.keys() and len(plain) == len(entries) else entries


def class_of_dict(entries):
    return OrderedDict if isinstance(entries, OrderedDict) else dict


def with_plain_names(model: dict) -> dict:
    """Model states with the plain names; themselves, if they have no others."""
    plain = {key: renamed(model[key]) for key in NAMING if key in model}
    if isinstance(model.get("module"), dict):
        plain["module"] = plain_keys(model["module"])
    changed = {key: value for key, value in plain.items() if value != model[key]}
    return model | changed if changed else model


def renamed(value: Any) -> Any:
    if isinstance(value, str):
        return plain_name(value)
    if isinstance(value, list):
        return [renamed(item) for item in value]
    if isinstance(value, dict):
        items = plain_keys(value).items()
        return class_of_dict(value)((key, renamed(item)) for key, item in items)
    return value
