# SPDX-License-Identifier: MIT
"""How ZeRO cuts parameters and their states into the shards of data-parallel ranks, and back.

Every rank holds flat tensors: one for a parameter group at ZeRO-1 and 2, for a sub-group at ZeRO-3.
Where a parameter lies in them is a formula (Cut), and a shard that says something else is refused.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

from universal.checkpoint.experts import ExpertDataGroup
from universal.checkpoint.types import SETTINGS, Limit, OptimizerState, Parameter, Problem
from universal.errors import CheckpointError
from universal.files.same import holds_elements, is_same
from universal.files.schema import expect, is_natural
from universal.files.sources import Extent, ReadItem, width
from universal.files.torch_file import (
    Stub,
    Tensor,
    extent_of,
    load,
    number_in,
    read_scalar,
    tensor_of,
)

# --------------------------------------------------------------------------------------------------
# 1. one shard


def is_count(value):
    return is_natural(value) and value > 0


def is_flat(value: Any) -> bool:
    tensor = tensor_of(value)
    return tensor is not None and len(tensor.size) == 1


def are_states(value):
    """Whether this is the "state" of PyTorch's optimizer: dicts under the parameters' numbers."""
    return isinstance(value, dict) and all(
        isinstance(state, dict) for key, state in value.items() if isinstance(key, int)
    )


NOT_CUT = "is not cut like the weights"
ABSENT = "is not on all ranks"
OTHER_KEYS = "the state dict"  # one with other keys than PyTorch's


def differs(rank):
    return f"differs between ranks 0 and {rank}"


def has_other_keys(value):
    """Whether this is a state dict with other keys than PyTorch's, as a wrapper may save."""
    return isinstance(value, dict) and not {"state", "param_groups"} & value.keys()


OPTIMIZER = {"state": are_states, "param_groups": [{"params": [is_natural]}]}
STAGE_3 = {
    "partition_count": is_count,
    "fp32_flat_groups": [is_flat],
    "optimizer_state_dict": (has_other_keys, OPTIMIZER),
}
STAGE_1_OR_2 = {
    "partition_count": ([is_count], is_count),
    "single_partition_of_fp32_groups": [is_flat],
    "base_optimizer_state": ([dict], has_other_keys, OPTIMIZER),
    "param_slice_mappings": [{str: Stub}],
    "group_paddings": [is_natural],
    "param_alignment_paddings?": (NoneType, [(NoneType, [is_natural])]),
}


class SavedShard(NamedTuple):
    """What one rank saved of the optimizer, in the same form at every stage.

    stage: 1, 2 or 3. optimizer_kind: of DeepSpeed's optimizer. content: as it was saved.
    optimizer: the state dict of PyTorch's optimizer. Lists with an entry for each flat tensor:
    masters, in fp32; slice_sizes: elements of one rank's slice, with its padding; ranks: the number
    of ranks that it is cut for.
    """

    path: Path
    stage: int
    optimizer_kind: str
    content: dict
    optimizer: dict
    masters: list[Tensor]
    slice_sizes: list[int]
    ranks: list[int]


class ModelParallelRank(NamedTuple):
    """What a model-parallel rank has saved, joined from its data-parallel ranks.

    model: rank 0's model states; its module has no trained parameters. shard: rank 0's. rests:
    {path of a shard: its shared_rest()}. lost: {name of a state that is not cut: why}. files: rank
    0's model states first. client_states: rank 0's, and None if another rank saved another one,
    or other buffers.
    """

    model: dict
    shard: SavedShard
    parameters: dict
    rests: dict[Path, dict]
    lost: dict[str, str]
    problems: list[Problem]
    files: list[Path]
    client_states: Sequence[dict]


def read_shard(path: Path) -> SavedShard:
    """The shard in a file. Raises CheckpointError, if it is not what ZeRO saves."""
    content = expect(load(path), {"optimizer_state_dict": dict}, path)["optimizer_state_dict"]
    if "fp32_flat_groups" in content:
        expect(content, STAGE_3, path)
        kind = (3, "DeepSpeedZeroOptimizer_Stage3")
        optimizer = content["optimizer_state_dict"]
        flats = content["fp32_flat_groups"]
        paddings = [0] * len(flats)
    else:
        expect(content, STAGE_1_OR_2, path)
        kind = (2 if saved_stage(content) == 2 else 1, "DeepSpeedZeroOptimizer")
        optimizer = optimizer_of(content)
        flats = content["single_partition_of_fp32_groups"]
        paddings = content["group_paddings"]
        if "zero_stage" not in content:
            kind = (1, "BF16_Optimizer")
            paddings = [0] * len(flats)  # it saves the padding with the slice
    if has_other_keys(optimizer):
        groups = [{"params": [i]} for i in range(len(flats))]
        optimizer = {"state": {0: {OTHER_KEYS: optimizer}}, "param_groups": groups}
    ranks = content["partition_count"]
    ranks = [ranks] * len(flats) if isinstance(ranks, int) else ranks
    mappings = content.get("param_slice_mappings", flats)
    if not flats or len(flats) > min(len(paddings), len(ranks), len(mappings)):
        raise CheckpointError(f"{path} does not say of each flat tensor how it is cut")
    masters = [tensor_of(flat) for flat in flats]
    sizes = [flat.size[0] + n for flat, n in zip(masters, paddings, strict=False)]
    return SavedShard(path, *kind, content, optimizer, masters, sizes, ranks)


def saved_stage(content: dict) -> int | None:
    """The ZeRO stage that optimizer states name; None in those of BF16_Optimizer."""
    enum = content.get("zero_stage")
    return enum.args[0] if isinstance(enum, Stub) and enum.args else None


def optimizer_of(content):
    """The state dict of PyTorch's optimizer, at ZeRO-1 and 2."""
    optimizer = content["base_optimizer_state"]
    if isinstance(optimizer, dict):
        return optimizer
    # elastic_checkpoint saves a list of states, without padding and hyperparameters.
    settings = {}
    if "base_optimizer_state_step" in content:
        settings["step"] = content["base_optimizer_state_step"]
    groups = [settings | {"params": [i]} for i in range(len(optimizer))]
    return {"state": dict(enumerate(optimizer)), "param_groups": groups}


def extra_states(optimizer: dict) -> dict:
    """What PyTorch's optimizer keeps besides the states of its parameters."""
    return {key: value for key, value in optimizer["state"].items() if not isinstance(key, int)}


def extra_keys(optimizer: dict) -> dict:
    """What PyTorch's optimizer keeps besides its states and its groups."""
    return {key: value for key, value in optimizer.items() if key not in ("state", "param_groups")}


def optimizer_state(shard: SavedShard) -> OptimizerState:
    """The OptimizerState of a shard."""
    optimizer = shard.optimizer
    groups = optimizer["param_groups"]
    settings = {key: shard.content.get(key) for key in SETTINGS}
    return OptimizerState(groups, extra_states(optimizer), extra_keys(optimizer), settings)


def is_computed_anew(key: str, param_groups: list[dict]) -> bool:
    """Whether each step computes this state anew before it reads it, as Adafactor does its RMS."""
    return key == "RMS" and all("relative_step" in group for group in param_groups)


def shared_rest(shard: SavedShard, scalars: dict[str, dict]) -> dict:
    """Returns {(place, name): value} of all that ranks should have the same of: hyperparameters,
    scalars, and what is in neither.

    place: the number of a parameter group; the name of a flat tensor, for its scalars; or None.
    """
    rest = {
        (i, key): value
        for i, group in enumerate(shard.optimizer["param_groups"])
        for key, value in group.items()
        if key != "params"
    }
    extra = extra_states(shard.optimizer) | extra_keys(shard.optimizer)
    rest |= {(None, key): value for key, value in extra.items()}
    rest = {key: read_scalar(value) for key, value in rest.items()}
    return rest | {(name, key): of[key] for name, of in scalars.items() for key in of}


def rank_dependent(ranks: list[ModelParallelRank]) -> dict[str, str]:
    """Returns {name of a state: why only the rank that saved it can load it}.

    ranks: of one pipeline stage. Raises: CheckpointError, if their optimizer steps differ.
    """
    lost = {}
    rests = {path: rest for rank in ranks for path, rest in rank.rests.items()}
    first, *_ = paths = [*rests]
    for (place, key), rank in differences([*rests.values()]).items():
        if key == "step" and isinstance(place, str):
            path = paths[rank]
            here, there = (number_in(rests[of].get((place, key))) for of in (path, first))
            raise CheckpointError(f"{path} is at optimizer step {here}, {first.name} at {there}")
        lost[key] = differs(rank)
    for rank in ranks:
        lost |= rank.lost
    return lost


def problems_of_ranks(dependent: dict[str, str], param_groups: list[dict]) -> list[Problem]:
    """Returns a Problem for each state of rank_dependent()."""
    return [
        Problem(
            Limit.STATE if why in (NOT_CUT, ABSENT) else Limit.NUMBER,
            f"{key} of the optimizer {why}",
            key,
        )
        for key, why in dependent.items()
        if not is_computed_anew(key, param_groups)
    ]


# --------------------------------------------------------------------------------------------------
# 2. where a parameter lies


class Cut(NamedTuple):
    """A formula for where a parameter lies in the flat tensors of its ranks.

    ZeRO-1 and 2: the parameters of a group are laid end to end and cut into one slice per rank.
        origin: the element of the group at which the parameter begins. share: elements of a slice.
        start: 0.
    ZeRO-3: every parameter is cut by itself.
        origin: 0. share: ceil(numel / ranks), which each rank has of it. start: the element of
        every rank's flat tensor at which it begins.

        Cut(origin=1000, share=256, start=0, numel=300)  # elements 1000 to 1299 of the group: on
                                                         # ranks 3, 4 and 5
        Cut(origin=0, share=75, start=512, numel=300)    # on each of 4 ranks, elements 512 to 586
                                                         # of its flat tensor
    """

    origin: int
    share: int
    start: int
    numel: int


class Slices(NamedTuple):
    """A Source of a parameter's elements, in the flat tensors of its ranks."""

    extents: Sequence[Extent]
    cut: Cut

    @property
    def dtype(self) -> str:
        return self.extents[0].dtype

    @property
    def numel(self) -> int:
        return self.cut.numel

    def parts(self, start: int, numel: int) -> Iterator[tuple[Extent, int, int]]:
        """Yields where the elements from `start` on are: (Extent, first one in it, how many)."""
        rank, position = divmod(self.cut.origin + start, self.cut.share or 1)
        while numel:
            count = min(self.cut.share - position, numel)
            yield self.extents[rank], self.cut.start + position, count
            numel -= count
            rank += 1
            position = 0

    def reads(self, buffer: memoryview, start: int) -> Iterator[ReadItem]:
        size = width(self.dtype)
        begin = 0
        for extent, first, count in self.parts(start, len(buffer) // size):
            end = begin + count * size
            yield from extent.reads(buffer[begin:end], first)
            begin = end


class FlatCut(NamedTuple):
    """A formula for where the parameters of a flat tensor lie in its slices.

    number: of the flat tensor. name: with its kind, "group 3", or at ZeRO-3 "sub-group 3".
    data_group: the ranks that have its slices. cuts: {a parameter's name in the shards: Cut}.
    share: elements of a slice. numel: elements of all slices, without padding at the end.
    """

    number: int
    name: str
    data_group: ExpertDataGroup
    cuts: dict
    share: int
    numel: int


def cut_flat(shard: SavedShard, number: int, shapes: dict, data_group: ExpertDataGroup) -> FlatCut:
    """Compute how a flat tensor is cut. shapes: {name: shape} of its parameters, in their order.

    param_slice_mappings says so, too (check_mapping()), but is wrong with round_robin_gradients.

    Raises: CheckpointError, if the shard has other sizes.
    """
    name = f"{'sub-group' if shard.stage == 3 else 'group'} {number}"
    ranks = len(data_group.ranks)
    size = shard.slice_sizes[number]
    if shard.ranks[number] != ranks:
        raise CheckpointError(f"{name} is cut for {shard.ranks[number]} ranks and not for {ranks}")
    paddings = [0] * len(shapes)
    if of_groups := shard.content.get("param_alignment_paddings"):
        paddings = dict(enumerate(of_groups)).get(number) or paddings
    if len(paddings) != len(shapes):
        raise CheckpointError(f"{name} has another number of param_alignment_paddings")
    cuts = {}
    end = 0
    for (parameter, shape), padding in zip(shapes.items(), paddings, strict=True):
        numel = math.prod(shape)
        if shard.stage == 3:
            share = -(-numel // ranks)
            cuts[parameter] = Cut(0, share, end, numel)
            end += share
        else:
            cuts[parameter] = Cut(end, size, 0, numel)
            end += numel + padding
    if shard.stage == 3:
        return FlatCut(number, name, data_group, cuts, end, end * ranks)
    if end > ranks * size:
        raise CheckpointError(f"{name} has {end} elements, its slices have fewer")
    return FlatCut(number, name, data_group, cuts, size, end)


def check_mapping(shard: SavedShard, flat_cut: FlatCut, begin: int) -> None:
    """Raises CheckpointError unless param_slice_mappings says the same of a slice.

    begin: the first element of the flat tensor that the slice has. ZeRO-1 and 2 alone.
    """
    mapping = {}
    for name, cut in flat_cut.cuts.items():
        start = max(cut.origin, begin)
        end = min(cut.origin + cut.numel, begin + cut.share)
        if start < end:
            mapping[name] = {"start": start - begin, "numel": end - start}
    mappings = shard.content["param_slice_mappings"][flat_cut.number]
    saved = {name: address.state for name, address in mappings.items()}
    for name in (*mapping, *saved):
        if saved.get(name) != mapping.get(name):
            raise CheckpointError(f"{name} is not where param_slice_mappings says")


# --------------------------------------------------------------------------------------------------
# 3. the shards of all ranks


class StatePath(tuple):
    """The name of a state that the optimizer keeps within a dict, list or tuple: the keys to it."""

    def __str__(self):
        return ".".join(map(str, self))


def outer(key: Any) -> Any:
    """The name of a state in the optimizer, also of one within a dict."""
    return key[0] if isinstance(key, StatePath) else key


class SliceState(NamedTuple):
    """The optimizer's state of one tensor, sorted by its form.

    states: {name: Tensor} with a value for each element, "fp32" first; within a dict, list or
    tuple, under a StatePath. scalars: {name: value, or Tensor with its bytes}; of a dict, list or
    tuple, what is no such Tensor, with None in its place. others: {name: what is neither}, not cut
    like the weights.
    """

    states: dict
    scalars: dict
    others: dict


def slice_state(masters: Tensor, state: dict, longest: int) -> SliceState:
    """Sort an optimizer's state of a tensor into a SliceState. masters: the tensor's fp32 elements.
    longest: the number of elements that a state may have with padding."""
    result = SliceState({"fp32": masters}, {}, {})

    def has_elements(tensor):
        is_flat = len(tensor.size) == len(masters.size) == 1
        in_length = is_flat and masters.numel <= tensor.numel <= longest
        return tensor.size == masters.size or in_length

    def sort(value, path):
        """Sorts what a value holds. Returns it with None in place of each state."""
        key = path[0] if len(path) == 1 else StatePath(path)
        tensor = tensor_of(value)
        if path == (OTHER_KEYS,):
            result.others[OTHER_KEYS] = value
        elif tensor is None and type(value) is dict:
            return {inner: sort(value[inner], (*path, inner)) for inner in value}
        elif tensor is None and type(value) in (list, tuple):
            return type(value)(sort(inner, (*path, i)) for i, inner in enumerate(value))
        elif tensor and key not in ("fp32", "step") and has_elements(tensor):
            result.states[key] = tensor
            return None
        in_an_object = masters.numel > 1 and holds_elements(value, {masters.numel, longest})
        if tensor.numel != 1 if tensor else in_an_object:
            result.others[path[0]] = state[path[0]]
        return read_scalar(value)

    for key, value in state.items():
        rest = sort(value, (key,))
        if key not in result.states and key not in result.others:
            result.scalars[key] = rest
    return result


def read_slice(shard: SavedShard, rank: int, flat_cut: FlatCut, trust_mapping: bool) -> SliceState:
    """A rank's optimizer state of its slice of a flat tensor. Raises CheckpointError.

    trust_mapping: compare param_slice_mappings, too.
    """
    number = flat_cut.number
    share = shard.slice_sizes[number]
    if share != flat_cut.share:
        raise CheckpointError(f"{flat_cut.name} has a slice of another size")
    begin = flat_cut.data_group.ranks.index(rank) * share
    if trust_mapping and shard.stage < 3:
        check_mapping(shard, flat_cut, begin)
    result = slice_state(shard.masters[number], shard.optimizer["state"].get(number, {}), share)
    step = number_in(result.scalars.get("step"))
    expect({"step": step}, {"step": (NoneType, int, float)}, shard.path)
    return result


def join_slices(
    flat_cut: FlatCut, slices: dict[Path, SliceState], shapes: dict, group_number: int | None
) -> tuple[dict, dict[str, str]]:
    """Join the ranks' slices of a flat tensor. Returns its parameters by name, and {name of a state
    that is not cut like the weights: why}.

    slices: of all ranks, by the paths of their shards. Raises: CheckpointError, if they do not fit.
    """
    (first_path, first), *_ = slices.items()
    others = {}
    for rank, (path, of_rank) in enumerate(slices.items()):
        others |= dict.fromkeys(of_rank.others, NOT_CUT)
        kinds, kinds_of_first = (
            {key: state.dtype for key, state in of.states.items()} for of in (of_rank, first)
        )
        for key, _ in kinds.items() ^ kinds_of_first.items():
            if key == "fp32":
                raise CheckpointError(
                    f"{path}: fp32 of {flat_cut.name} is not what it is in {first_path.name}"
                )
            in_both = key in kinds and key in kinds_of_first
            others.setdefault(outer(key), differs(rank) if in_both else ABSENT)
    of_group = [[*slices.values()][rank] for rank in flat_cut.data_group.ranks]
    share = flat_cut.share
    numels = [max(0, min(flat_cut.numel - i * share, share)) for i in range(len(of_group))]
    momentum = uncut_momentum(of_group, flat_cut.cuts) if "momentum_buffer" in others else {}
    extents = {
        key: tuple(map(extent_of, (of_rank.states[key] for of_rank in of_group), numels))
        for key in first.states
        if key == "fp32" or outer(key) not in others
    }
    if momentum:
        del others["momentum_buffer"]
    parameters = {}
    for name, cut in flat_cut.cuts.items():
        states = {key: Slices(extents[key], cut) for key in extents}
        if momentum:
            states["momentum_buffer"] = momentum[name]
        parameters[flat_cut.data_group.global_name(name)] = Parameter(
            tuple(shapes[name]), group_number, states, of_group[0].scalars
        )
    return parameters, others


def uncut_momentum(of_ranks, cuts):
    """Returns {parameter: the Extent of its momentum}, as Muon keeps it at ZeRO-1 and 2.

    A rank has the momentum of every parameter that its slice touches, uncut, end to end. Empty if
    the tensors have another length.
    """
    momentum = {}
    for rank, of_rank in enumerate(of_ranks):
        numels = {}
        for name, cut in cuts.items():
            if rank * cut.share - cut.numel < cut.origin < (rank + 1) * cut.share:
                numels[name] = cut.numel
        tensor = tensor_of((of_rank.states | of_rank.others).get("momentum_buffer"))
        if tensor is None:
            continue
        if tensor.size != (sum(numels.values()),):
            return {}
        start = 0
        for name, numel in numels.items():
            momentum.setdefault(name, extent_of(tensor).part(start, numel))
            start += numel
    return momentum if momentum.keys() == cuts.keys() else {}


def differences(values: list[dict]) -> dict:
    """Returns {key: the first rank whose value differs from rank 0's}. values: of each rank."""
    differing = {}
    for rank, of_rank in enumerate(values):
        for key in {**values[0], **of_rank}:
            in_both = key in values[0] and key in of_rank
            if not in_both or not is_same(values[0][key], of_rank[key]):
                differing.setdefault(key, rank)
    return differing
