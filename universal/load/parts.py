# SPDX-License-Identifier: MIT
"""The part of each parameter that this tensor-parallel rank of an engine has.

A description of a checkpoint has every parameter whole. The ranks of a tensor-parallel engine have
parts, and its model says how they are cut, in the format in which a checkpoint does
(tensor_parallel.py). The blocks that would join the ranks' parts also tell where this rank's
elements are in the whole.
"""

import math
from typing import NamedTuple

from universal.checkpoint.tensor_parallel import (
    AFFINE,
    INFO_KEY,
    PartMap,
    TensorParallel,
    for_another_degree,
)
from universal.checkpoint.types import Checkpoint
from universal.errors import CheckpointError
from universal.files.joined import Joined, part_of, strided
from universal.files.sources import Extent, Source
from universal.files.torch_file import Tensor, contiguous
from universal.load.collective import ProcessGroup
from universal.load.engine import Engine
from universal.load.flat import full_shape


class Parts(NamedTuple):
    """This tensor-parallel rank's part of every parameter that it has.

    rank, degree: of tensor parallelism. maps: by the parameter's name.
    """

    rank: int
    degree: int
    maps: dict[str, PartMap]

    def source(self, name: str, whole: Source, numel: int) -> Source:
        """A Source of this rank's part of a parameter, or of a state of it.

        whole: the Source of the whole. numel: of the part.
        """
        blocks = self.maps[name].blocks
        if isinstance(whole, Joined) and len(whole.parts) == self.degree:
            # The same parts as this engine has: none is joined. Each rank then gets its own part
            # back also where another degree would get a mean.
            own = whole.parts[self.rank]
            if whole.blocks == blocks or self.degree > 1 and own.numel == numel:
                return own
        if isinstance(whole, Joined) and self.rank:  # tensor-parallel rank 0 compares them
            whole = whole.without_copies()
        own = self.own_blocks(name)
        if numel == whole.numel and all(block.is_in_place for block in own):
            return whole
        return part_of(whole, self.maps[name].shape, own, numel)

    def own_blocks(self, name):
        """Returns this rank's blocks of a parameter."""
        return [block for block in self.maps[name].blocks or () if block.part == self.rank]

    def cuts(self, name: str, shape: tuple) -> bool:
        """Whether tensor() can cut this rank's part from a tensor of this shape."""
        part_map = self.maps.get(name)
        return part_map is not None and part_map.shape == shape and bool(self.own_blocks(name))

    def tensor(self, name: str, whole: Tensor, shape: tuple) -> Tensor:
        """This rank's part of a tensor. shape: of the part."""
        source = self.source(name, strided(name, whole), math.prod(shape))
        return contiguous(whole.dtype, source, shape)


def parts_of(engine: Engine, checkpoint: Checkpoint, group: ProcessGroup) -> Parts:
    """The Parts of this rank. Raises CheckpointError if neither model nor checkpoint tells
    them."""
    saved = checkpoint.model.get(INFO_KEY)
    degree = engine.layout().tensor
    rank = engine.tensor_rank
    names = dict(engine.module.named_parameters())  # the frozen ones, too
    names = {engine.global_name(name): names[name] for name in names}
    # The optimizer keeps a parameter that a script has replaced, to tie two.
    shapes = {name: full_shape(tensor) for name, tensor in (engine.parameters | names).items()}
    of_ranks = {rank: shapes}
    if degree > 1:
        for of_rank, others in group.all_gather((rank, shapes)):
            of_ranks[of_rank] = others | of_ranks.get(of_rank, {})  # of all pipeline stages
    # One rank needs it, too: its vocabulary may be padded.
    info = engine.cuts() or saved and for_another_degree(saved)
    if degree == 1 and not info:
        return Parts(rank, degree, {name: PartMap(shape, ()) for name, shape in shapes.items()})
    joiner = TensorParallel(info, degree, "this engine")
    if checkpoint.layout is None or checkpoint.layout.tensor != degree:
        check_same_cuts(joiner, TensorParallel(saved, 1, checkpoint.folder), shapes)
    maps = {}
    for name in shapes:
        if any(name not in of_rank for of_rank in of_ranks.values()):
            raise CheckpointError(f"not every tensor-parallel rank has a part of {name}")
        shapes_of_parts = [of_ranks[i][name] for i in range(degree)]
        maps[name] = joiner.part_map(name, shapes_of_parts)
        parts = [Extent("float32", None, 0, math.prod(shape)) for shape in shapes_of_parts]
        joiner.check_cover(name, maps[name], parts, math.prod(maps[name].shape))
    return Parts(rank, degree, maps)


def check_same_cuts(joiner, saved, names):
    """Raises CheckpointError if model and checkpoint cut a parameter in different ways.

    AutoTP's maps of every element hold for one degree alone, so they are not compared.
    """
    for name in sorted(names) if joiner.info and saved.info else ():
        here, there = (
            sorted(filter(of.matched(name).get, of.matched(name))) for of in (joiner, saved)
        )
        if here != there and AFFINE not in (*here, *there):
            raise CheckpointError(
                f"{name} is of {here} in the model's {INFO_KEY}, and of {there} in the checkpoint's"
            )
