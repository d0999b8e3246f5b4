# SPDX-License-Identifier: MIT
"""How tensor-parallel ranks cut a parameter, and how it is joined again. Needs nothing but Python
3.10."""

import math
import re

from universal.blocks import Joined, cut_along
from universal.description import Problem
from universal.errors import CheckpointError
from universal.torch_file import own_name, stub, whole


class TensorParallel:
    """How tensor-parallel ranks cut a parameter, by the checkpoint's universal_checkpoint_info.

    Its entries are DeepSpeed's (deepspeed/checkpoint/constants.py), most of them lists of regular
    expressions."""

    LISTS = (
        "tp_replicated_parameter_patterns",
        "parameter_to_average_patterns",
        "vocabulary_parameter_patterns",
        "parameter_with_row_parallelism_patterns",
        "parameter_with_2_sub_params_cat_dim_0",
    )

    def __init__(self, info, degree, folder):
        self.info = info or {}
        self.degree = degree
        self.folder = folder
        self.unused = set()
        self.problems = []
        if degree > 1 and not info:
            raise CheckpointError(
                f"{folder} has {degree} tensor-parallel ranks and no universal_checkpoint_info, which says how they "
                "are cut: it must be in the client state when the checkpoint is saved"
            )
        self.affine = self.info.get("affine_map") or {"params": {}}
        if self.affine.get("version", 1) > 1:
            raise CheckpointError(
                f"{folder}: affine map of version {self.affine['version']}, and only 1 is known"
            )
        rows = "parameter_with_row_parallelism_patterns"
        subs = self.info.get("parameter_with_sub_params", [])
        if degree > 1:
            self.unused = {pattern for key in self.LISTS for pattern in self.info.get(key, [])}
            self.unused |= {pattern for sub in subs for pattern in sub["patterns"]}
        elif info and not (self.info.get(rows) or self.affine["params"]):
            text = f"{folder}: universal_checkpoint_info names no row-parallel weights ({rows}): if there are some, "
            self.problems = [
                Problem(False, text + "the result is wrong on more than one tensor-parallel rank")
            ]

    def match(self, patterns, name):
        matched = [pattern for pattern in patterns if re.match(pattern, name)]
        self.unused -= set(matched)
        if len(matched) > 1:
            raise CheckpointError(
                f"{self.folder}: {name} matches more than one pattern: {', '.join(matched)}"
            )
        return matched[0] if matched else None

    def tied(self, name):
        return self.match(self.info.get("pipeline_replicated_parameter_patterns", []), name)

    def how_cut(self, name, shapes):
        """(shape of the whole, blocks or None for a mean, what the loader needs to cut it again)
        for the parameter that has these shapes on its ranks. On one rank it is whole, but the file
        must still say how more ranks would cut it."""
        found = {key: self.match(self.info.get(key, []), name) for key in self.LISTS}
        sub = next(
            (
                s
                for s in self.info.get("parameter_with_sub_params", [])
                if self.match(s["patterns"], name)
            ),
            None,
        )
        affine = self.match(self.affine["params"], name)
        two = found["parameter_with_2_sub_params_cat_dim_0"]
        if self.match(self.info.get("autotp_unsupported_parameter_patterns") or {}, name):
            raise CheckpointError(f"{self.folder}: DeepSpeed did not record how {name} is cut")
        # For layers that no category describes (bigcode, codegen, shared QK) AutoTP saves a map of
        # every element. So look for the map first.
        if affine:
            shape, blocks = self.affine_blocks(name, self.affine["params"][affine])
            return shape, blocks, {}
        # Every rank has the whole: compare them, and take one.
        if found["tp_replicated_parameter_patterns"]:
            stride = whole("", b"", shapes[0]).stride
            return (
                shapes[0],
                tuple((rank, shapes[0], stride, 0, stride, 0) for rank in range(self.degree)),
                {},
            )
        # Every rank has the whole, but computed its own, such as a LayerNorm that is not
        # synchronized: take the mean.
        if found["parameter_to_average_patterns"]:
            return shapes[0], None, {}
        # Q, K and V in one matrix, or a gate and its value: each is cut by itself, so a rank has a
        # part of each.
        if sub and not two:
            return self.sub_parameters(name, shapes, sub)
        # All else is cut along one dimension: row-parallel weights along the input, others along
        # the first.
        dim = 1 if found["parameter_with_row_parallelism_patterns"] and not two else 0
        size = [sum(s[d] for s in shapes) if d == dim else n for d, n in enumerate(shapes[0])]
        parts, how = (2, {"cat_dim": 0, "param_n_sub_params": 2}) if two else (1, {"cat_dim": dim})
        blocks = cut_along(dim, size, parts * [[s[dim] // parts for s in shapes]]) if size else ()
        # The vocabulary was padded to a multiple of the ranks.
        if found["vocabulary_parameter_patterns"]:
            return (
                (self.info["original_vocab_size"], *size[1:]),
                blocks,
                how | {"vocab_tensor": True},
            )
        return tuple(size), blocks, how

    def affine_blocks(self, name, entry):
        blocks = []
        for rank, shard in entry["ranks"].items():
            for piece in shard["pieces"]:
                if piece.get("scale", 1.0) != 1.0:
                    raise CheckpointError(
                        f"{self.folder}: {name} is stored scaled, its states cannot be converted"
                    )
                (there, full_stride) = piece["source"]
                (here, stride) = piece["dest"]
                blocks.append((int(rank), piece["shape"], stride, here, full_stride, there))
        return tuple(entry["logical_shape"]), tuple(blocks)

    def sub_parameters(self, name, shapes, sub):
        dim = sub["partition_dim"]
        spec = sub["shape"][sub["partition_dim"]]
        total = sum(math.prod(shape) for shape in shapes)
        if isinstance(spec, int):  # before version 0.4: a number of sub-parameters of equal size
            spec = (sum(shape[dim] for shape in shapes) // spec,) * spec
        widths = [[size // self.degree] * self.degree for size in spec]
        if self.info.get("universal_checkpoint_version", 0.0) >= 0.4:
            widths = self.info["sub_param_shard_widths"][self.match(sub["patterns"], name)]
        if [sum(width) for width in widths] != list(spec):
            raise CheckpointError(
                f"{self.folder}: the widths of {name}, {widths}, do not make up its sizes {spec}"
            )
        size = [sum(n) if isinstance(n, (tuple, list)) else n for n in sub["shape"]]
        size[dim] = sum(spec)
        if -1 in size:
            size[size.index(-1)] = total // -math.prod(size)
        if math.prod(size) != total:
            raise CheckpointError(
                f"{self.folder}: {name} has {total} elements, which do not make up {size}"
            )
        shape = tuple(spec if d == dim else n for d, n in enumerate(sub["shape"]))
        state = {"patterns": sub["patterns"], "shape": shape, "partition_dim": dim}
        described = stub(
            own_name("deepspeed.checkpoint.universal_checkpoint", "SubparamShape"), (), state=state
        )
        return tuple(size), cut_along(dim, size, widths), {"sub_param_shape": described}

    def join(self, name, parts):
        """One Parameter from those of the tensor-parallel ranks."""
        if self.degree == 1 and not self.info:
            return parts[0]
        shape, blocks, how = self.how_cut(name, [part.shape for part in parts])
        states = {}
        numel = math.prod(shape)
        for key in parts[0].states:
            slices = tuple(part.states[key] for part in parts)
            if len({part.dtype for part in slices}) > 1 or numel > sum(
                part.numel for part in slices
            ):
                raise CheckpointError(
                    f"{self.folder}: the shards of {name} do not cover its elements exactly once"
                )
            if self.degree == 1 and not self.affine["params"]:
                states[key] = slices[0]._replace(numel=numel)
            else:
                states[key] = Joined(f"{key} of {name}", slices, blocks, numel)
        return parts[0]._replace(shape=shape, states=states, how=how)
