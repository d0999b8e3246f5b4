# SPDX-License-Identifier: MIT
"""How tensor-parallel ranks cut a parameter, by the checkpoint's universal_checkpoint_info.

Its entries are DeepSpeed's (deepspeed.checkpoint.constants), most of them lists of regular
expressions that match the names of parameters.
"""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from universal.checkpoint.types import Limit, Parameter, Problem
from universal.errors import CheckpointError
from universal.files.joined import AVERAGED, Block, Joined, blocks_along, resized, strided
from universal.files.schema import expect, is_natural, is_shape
from universal.files.torch_file import (
    Tensor,
    contiguous,
    contiguous_strides,
    known_class,
    stub,
)

REPLICATED = "tp_replicated_parameter_patterns"
AVERAGE = "parameter_to_average_patterns"
VOCABULARY = "vocabulary_parameter_patterns"
ROWS = "parameter_with_row_parallelism_patterns"
TWO_SUB_PARAMS = "parameter_with_2_sub_params_cat_dim_0"
LISTS = (REPLICATED, AVERAGE, VOCABULARY, ROWS, TWO_SUB_PARAMS)
SUB_PARAMS = "parameter_with_sub_params"
AFFINE = "affine_map"
TIED = "pipeline_replicated_parameter_patterns"
UNKNOWN_KEY = "autotp_unsupported_parameter_patterns"
INFO_KEY = "universal_checkpoint_info"  # a key of the model states, and an attribute of a model
OF_ONE_DEGREE = (AFFINE, "sub_param_shard_widths", "universal_checkpoint_version")


def is_pattern(value):
    try:
        return isinstance(value, str) and bool(re.compile(value))
    except re.error:
        return False


def are_patterns(value):
    return isinstance(value, (list, tuple, dict)) and all(map(is_pattern, value))


def is_rank(value):
    return is_natural(value) or isinstance(value, str) and value.isdecimal()


def is_place(value):
    """Whether a value is (offset, strides)."""
    return isinstance(value, (list, tuple)) and len(value) == 2 and is_shape([value[0], *value[1]])


INFO = dict.fromkeys([f"{key}?" for key in (*LISTS, TIED, UNKNOWN_KEY)], are_patterns) | {
    f"{SUB_PARAMS}?": [
        {"patterns": are_patterns, "shape": [(int, is_shape)], "partition_dim": is_natural}
    ],
    "sub_param_shard_widths?": {str: [is_shape]},
    "universal_checkpoint_version?": (int, float),
    "original_vocab_size?": is_natural,
    f"{AFFINE}?": {"version?": is_natural, "params": dict},
}
AFFINE_PARAMS = {
    is_pattern: {
        "logical_shape": is_shape,
        "ranks": {is_rank: {"pieces": [{"shape": is_shape, "source": is_place, "dest": is_place}]}},
    }
}


def for_another_degree(info: dict) -> dict:
    """The entries of a universal_checkpoint_info that hold for any tensor-parallel degree."""
    return {key: value for key, value in info.items() if key not in OF_ONE_DEGREE}


class PartMap(NamedTuple):
    """How the ranks' parts make up a parameter.

    shape: of the parameter. blocks: where its elements are in the parts; None if it is the mean of
    the parts.
    """

    shape: tuple
    blocks: tuple | None


def sub_sizes(sizes, width):
    """Returns the sizes of sub-parameters along a dimension. Before version 0.4 `sizes` is their
    number alone: they are equal parts of `width`."""
    return (width // max(sizes, 1),) * min(sizes, width) if isinstance(sizes, int) else sizes


class TensorParallel:
    """Joins the parameters of a checkpoint's tensor-parallel ranks.

    unused: patterns of universal_checkpoint_info that have matched no parameter yet.
    """

    def __init__(self, info: dict | None, degree: int, folder: Path):
        if degree > 1 and not info:
            raise CheckpointError(
                f"{folder} has {degree} tensor-parallel ranks and no universal_checkpoint_info, "
                "which says how they cut parameters: set it on the model"
            )
        self.info = expect(info or {}, INFO, folder)
        self.degree = degree
        self.folder = folder
        subs = self.info.get(SUB_PARAMS, [])
        lists = [self.info.get(key, []) for key in LISTS] + [sub["patterns"] for sub in subs]
        self.patterns = set().union(*lists)
        affine = self.info.get(AFFINE, {"params": {}})
        if affine.get("version", 1) > 1:
            raise self.error(f"affine map of version {affine['version']}, and only 1 is known")
        self.affine_params = expect(affine["params"], AFFINE_PARAMS, folder)
        self.unused = set(self.patterns)

    def error(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.folder}: {text}")

    def problems(self) -> list[Problem]:
        """Returns a list with a Problem if something may be wrong with universal_checkpoint_info.
        Call it when all parameters are joined."""
        if self.degree > 1 and self.unused:
            names = ", ".join(sorted(self.unused))
            text = f"{self.folder}: {INFO_KEY} has patterns that match no parameter: {names}"
            return [Problem(Limit.FILES, text)]
        if self.degree > 1 or not self.info or self.info.get(ROWS) or self.affine_params:
            return []
        text = (
            f"{self.folder}: universal_checkpoint_info names no row-parallel weights ({ROWS}): "
            "if there are some, the result is wrong on more than one tensor-parallel rank"
        )
        return [Problem(Limit.DOUBT, text)]

    def describes(self, name: str) -> bool:
        """Whether a pattern matches: parameters that none matches are cut along dimension 0."""
        return any(re.match(pattern, name) for pattern in (*self.patterns, *self.affine_params))

    def match(self, patterns, name):
        """The pattern that matches a name, or None. Raises CheckpointError if several do."""
        matched = [pattern for pattern in patterns if re.match(pattern, name)]
        self.unused -= set(matched)
        if len(matched) > 1:
            raise self.error(f"{name} matches more than one pattern: {', '.join(matched)}")
        return matched[0] if matched else None

    def is_tied(self, name: str) -> bool:
        """Whether several pipeline stages may have the parameter."""
        return self.match(self.info.get(TIED, []), name) is not None

    def join(self, name: str, parts: list[Parameter]) -> Parameter:
        """Join the Parameters of the tensor-parallel ranks into one. Raises CheckpointError."""
        if self.degree == 1 and not self.info:
            return parts[0]
        if any(part.states.keys() != parts[0].states.keys() for part in parts):
            raise self.error(f"tensor-parallel ranks have other states of {name} than rank 0")
        part_map = self.part_map(name, [part.shape for part in parts])
        numel = math.prod(part_map.shape)
        states = {}
        for key in parts[0].states:
            sources = tuple(part.states[key] for part in parts)
            self.check_cover(name, part_map, sources, numel)
            if self.degree == 1 and not self.affine_params and numel == sources[0].numel:
                states[key] = sources[0]
            else:
                states[key] = Joined(f"{key} of {name}", sources, part_map.blocks, numel)
        return parts[0]._replace(shape=part_map.shape, states=states)

    def join_tensor(self, name: str, parts: list[Tensor]) -> Tensor:
        """Join the tensors under one name in the ranks' modules, such as a frozen parameter."""
        states = [{"frozen": strided(name, part)} for part in parts]
        shapes = [tuple(part.size) for part in parts]
        parameters = [
            Parameter(shape, None, state, {}) for shape, state in zip(shapes, states, strict=True)
        ]
        joined = self.join(name, parameters)
        return contiguous(parts[0].dtype, joined.states["frozen"], joined.shape)

    def check_cover(self, name, part_map, sources, numel):
        """Raises CheckpointError if the parts do not make up the parameter's `numel` elements."""
        dtypes = {source.dtype for source in sources}
        fitting = [
            block.part < len(sources) and block.fits(sources[block.part])
            for block in part_map.blocks or ()
        ]
        covered = numel <= sum(source.numel for source in sources) and all(fitting)
        if len(dtypes) > 1 or not covered:
            raise self.error(f"the shards of {name} do not cover its elements exactly once")
        if part_map.blocks is None and not dtypes <= AVERAGED:
            raise self.error(f"{name} is of {dtypes.pop()}, of which there is no mean")

    def matched(self, name: str) -> dict[str, Any]:
        """Returns {key of the info: its pattern or entry that matches the name, or None}."""
        matched = {key: self.match(self.info.get(key, []), name) for key in LISTS}
        subs = self.info.get(SUB_PARAMS, [])
        matched[SUB_PARAMS] = next((sub for sub in subs if self.match(sub["patterns"], name)), None)
        matched[AFFINE] = self.match(self.affine_params, name)
        return matched

    def part_map(self, name: str, shapes: Sequence[tuple]) -> PartMap:
        """The PartMap of a parameter. shapes: of the ranks' parts. Raises CheckpointError.

        A single rank has all of it, perhaps with a padded vocabulary.
        """
        matched = self.matched(name)
        if self.match(self.info.get(UNKNOWN_KEY, {}), name):
            raise self.error(f"DeepSpeed did not record how {name} is cut")
        # For layers that no category describes (bigcode, codegen, shared QK) AutoTP saves a map of
        # every element. So look for the map first.
        if matched[AFFINE]:
            return self.join_affine(name, self.affine_params[matched[AFFINE]])
        # Every rank has the whole: compare them, and take one.
        if matched[REPLICATED]:
            strides = contiguous_strides(shapes[0])
            blocks = [Block(i, shapes[0], strides, 0, strides, 0) for i in range(self.degree)]
            return PartMap(shapes[0], tuple(blocks))
        # Every rank has the whole, but computed its own, such as a LayerNorm that is not
        # synchronized: take the mean.
        if matched[AVERAGE]:
            return PartMap(shapes[0], None)
        # Q, K and V in one matrix, or a gate and its value: each is cut by itself, so a rank has a
        # part of each.
        if matched[SUB_PARAMS] and not matched[TWO_SUB_PARAMS]:
            return self.join_sub_params(name, shapes, matched[SUB_PARAMS])
        return self.join_along(name, shapes, matched)

    def join_along(self, name, shapes, matched):
        """Join parts along one dimension: 1 for row-parallel weights, 0 for others."""
        count = 2 if matched[TWO_SUB_PARAMS] else 1
        dim = 1 if matched[ROWS] and count == 1 else 0
        shape = shapes[0]
        blocks = ()
        if shape:
            widths = self.widths_along(name, dim, shapes)
            shape = resized(shape, dim, sum(widths))
            blocks = blocks_along(dim, shape, count * [[width // count for width in widths]])
        # The vocabulary was padded to a multiple of the ranks.
        if matched[VOCABULARY]:
            if "original_vocab_size" not in self.info:
                raise self.error(f"{INFO_KEY} has {VOCABULARY} and no original_vocab_size")
            shape = (self.info["original_vocab_size"], *shape[1:])
        return PartMap(shape, blocks)

    def cut_info(self, name: str, shape: tuple) -> dict:
        """What DeepSpeed's universal loader needs to cut a parameter of this shape."""
        matched = self.matched(name)
        if matched[AFFINE] or matched[REPLICATED] or matched[AVERAGE]:
            return {}
        if matched[SUB_PARAMS] and not matched[TWO_SUB_PARAMS]:
            sub_params = matched[SUB_PARAMS]
            dim = sub_params["partition_dim"]
            declared = sub_params["shape"]
            state = {
                "patterns": sub_params["patterns"],
                "shape": resized(declared, dim, sub_sizes(declared[dim], shape[dim])),
                "partition_dim": dim,
            }
            cls = known_class("deepspeed.checkpoint.universal_checkpoint", "SubparamShape")
            return {"sub_param_shape": stub(cls, (), state=state)}
        info = {"cat_dim": 0}
        if matched[TWO_SUB_PARAMS]:
            info["param_n_sub_params"] = 2
        elif matched[ROWS]:
            info["cat_dim"] = 1
        if matched[VOCABULARY]:
            info["vocab_tensor"] = True
        return info

    def widths_along(self, name, dim, shapes):
        """The sizes of the ranks' parts along a dimension. Raises CheckpointError."""
        if any(dim >= len(shape) for shape in shapes):
            raise self.error(f"{name} has the shape {shapes[0]}, and is cut along dimension {dim}")
        return [shape[dim] for shape in shapes]

    def join_affine(self, name, entry):
        """Join parts by AutoTP's map of every element."""
        blocks = []
        for rank, shard in entry["ranks"].items():
            for piece in shard["pieces"]:
                if piece.get("scale", 1.0) != 1.0:
                    raise self.error(f"{name} is stored scaled, its states cannot be converted")
                whole_offset, whole_stride = piece["source"]
                offset, stride = piece["dest"]
                block = Block(
                    part=int(rank),
                    shape=tuple(piece["shape"]),
                    stride=tuple(stride),
                    offset=offset,
                    whole_stride=tuple(whole_stride),
                    whole_offset=whole_offset,
                )
                blocks.append(block)
        return PartMap(tuple(entry["logical_shape"]), tuple(blocks))

    def join_sub_params(self, name, shapes, sub_params):
        """Join parts of a parameter made of sub-parameters, each of which is cut by itself."""
        dim = sub_params["partition_dim"]
        declared = sub_params["shape"]
        total = sum(map(math.prod, shapes))
        width = sum(self.widths_along(name, dim, [*shapes, declared])[:-1])
        sizes = sub_sizes(declared[dim], width)
        widths = [[size // self.degree] * self.degree for size in sizes]
        if self.info.get("universal_checkpoint_version", 0.0) >= 0.4:
            pattern = self.match(sub_params["patterns"], name)
            widths = self.info.get("sub_param_shard_widths", {}).get(pattern, [])
        if [sum(of_sub) for of_sub in widths] != list(sizes):
            raise self.error(f"the widths of {name}, {widths}, do not make up its sizes {sizes}")
        shape = [n if isinstance(n, int) else sum(n) for n in declared]
        shape[dim] = sum(sizes)
        if -1 in shape:
            shape[shape.index(-1)] = total // max(-math.prod(shape), 1)
        if math.prod(shape) != total:
            raise self.error(f"{name} has {total} elements, which do not make up {shape}")
        return PartMap(tuple(shape), blocks_along(dim, shape, widths))
