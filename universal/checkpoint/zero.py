# SPDX-License-Identifier: MIT
"""How ZeRO cuts parameters and their states into the shards of data-parallel ranks, and back.

Every rank holds flat tensors: one for a parameter group at ZeRO-1 and 2, for a sub-group at ZeRO-3.
Where a parameter lies in them is a formula (Cut), and a shard that says something else is refused.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

from universal.checkpoint.experts import Team
from universal.checkpoint.types import OptimizerState, Parameter, Problem
from universal.errors import CheckpointError
from universal.files.same import holds_elements, is_same
from universal.files.schema import expect, is_natural
from universal.files.sources import ByteRange, Extent, OpenFile
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
    """Whether this is the state of PyTorch's optimizer, in which parameters have numbers."""
    return isinstance(value, dict) and all(
        isinstance(state, dict) for key, state in value.items() if isinstance(key, int)
    )


OPTIMIZER = {"state": are_states, "param_groups": [{"params": [is_natural]}]}
STAGE_3 = {
    "partition_count": is_count,
    "fp32_flat_groups": [is_flat],
    "optimizer_state_dict": OPTIMIZER,
}
STAGE_1_OR_2 = {
    "partition_count": ([is_count], is_count),
    "single_partition_of_fp32_groups": [is_flat],
    "base_optimizer_state": ([dict], OPTIMIZER),
    "param_slice_mappings": [{str: Stub}],
    "group_paddings": [is_natural],
    "param_alignment_paddings?": (NoneType, [(NoneType, [is_natural])]),
}


class SavedShard(NamedTuple):
    """What one rank saved of the optimizer, in the same form at every stage.

    stage: 1, 2 or 3; 0 without ZeRO. optimizer_class: of DeepSpeed's. content: as it was saved.
    optimizer: the state dict of PyTorch's. Of each flat tensor: masters, in fp32; slice_sizes:
    elements of a rank's slice, padding included; ranks: how many ranks have a slice of it.
    """

    path: Path
    stage: int
    optimizer_class: str
    content: dict
    optimizer: dict
    masters: list[Tensor]
    slice_sizes: list[int]
    ranks: list[int]


class ModelParallelRank(NamedTuple):
    """A model-parallel rank, joined from its data-parallel ranks.

    model: rank 0's model states, with an untrained module. dtype: of Layout. shard: rank 0's.
    settings: as of settings_of(). files: rank 0's model states first.
    """

    model: dict
    dtype: str
    shard: SavedShard
    parameters: dict
    settings: dict
    rank_dependent: dict
    problems: list[Problem]
    files: list[Path]


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
    ranks = content["partition_count"]
    ranks = [ranks] * len(flats) if isinstance(ranks, int) else ranks
    mappings = content.get("param_slice_mappings", flats)
    if not flats or len(flats) > min(len(paddings), len(ranks), len(mappings)):
        raise CheckpointError(f"{path} does not say of each flat tensor how it is cut")
    masters = [tensor_of(flat) for flat in flats]
    sizes = [flat.size[0] + n for flat, n in zip(masters, paddings, strict=False)]
    return SavedShard(path, *kind, content, optimizer, masters, sizes, ranks)


def saved_stage(content: dict) -> int | None:
    """The ZeRO stage that the states of an optimizer name; BF16_Optimizer's name none."""
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


def extra_states(optimizer):
    """What PyTorch's optimizer keeps besides the states of its parameters."""
    return {key: value for key, value in optimizer["state"].items() if not isinstance(key, int)}


def extra_keys(optimizer):
    """What PyTorch's optimizer keeps besides its states and its groups."""
    return {key: value for key, value in optimizer.items() if key not in ("state", "param_groups")}


def optimizer_state(optimizer: dict, rank_dependent: dict) -> OptimizerState:
    """What the state dict of PyTorch's optimizer holds besides the states of parameters."""
    extra = extra_states(optimizer), extra_keys(optimizer)
    groups = optimizer["param_groups"]
    kept = {of: why for of, why in rank_dependent.items() if not is_computed_anew(of[1], groups)}
    return OptimizerState(groups, *extra, kept)


def is_computed_anew(key: str, param_groups: list[dict]) -> bool:
    """Whether each step computes a state before it reads it: Adafactor's RMS of the weights."""
    return key == "RMS" and all("relative_step" in group for group in param_groups)


def settings_of(shard: SavedShard, opened: OpenFile) -> dict:
    """{(group or None, name): value}, normally the same on all ranks.

    Hyperparameters, and what is besides the states and the groups.
    """
    settings = {
        (i, key): value
        for i, group in enumerate(shard.optimizer["param_groups"])
        for key, value in group.items()
        if key != "params"
    }
    extra = extra_states(shard.optimizer) | extra_keys(shard.optimizer)
    settings |= {(None, key): value for key, value in extra.items()}
    return {key: read_scalar(value, opened) for key, value in settings.items()}


# --------------------------------------------------------------------------------------------------
# 2. where a parameter lies


class Cut(NamedTuple):
    """Where a parameter lies in the flat tensors of its ranks: a formula, not a list of pieces.

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
    """A Source: the elements of a parameter, in the flat tensors of its ranks."""

    extents: tuple[Extent, ...]
    cut: Cut

    @property
    def dtype(self) -> str:
        return self.extents[0].dtype

    @property
    def numel(self) -> int:
        return self.cut.numel

    def ranges(self, start: int, numel: int) -> Iterator[ByteRange]:
        rank, position = divmod(self.cut.origin + start, self.cut.share or 1)
        while numel:
            count = min(self.cut.share - position, numel)
            yield from self.extents[rank].ranges(self.cut.start + position, count)
            numel -= count
            rank += 1
            position = 0


class FlatCut(NamedTuple):
    """Where the parameters of a flat tensor lie in its slices.

    number: of the flat tensor, which `name` gives with its kind: group 3, or at ZeRO-3 sub-group 3.
    team: the ranks that have its slices. cuts: by the names in the shards. numel: of all
    parameters.
    """

    number: int
    name: str
    team: Team
    cuts: dict
    numel: int


def cut_flat(shard: SavedShard, number: int, shapes: dict, team: Team) -> FlatCut:
    """How a flat tensor is cut.

    The shard says so, too (check_slice), but with round_robin_gradients it is wrong.

    Raises: CheckpointError, if this is not what the shard is like.
    """
    flat_name = f"{'sub-group' if shard.stage == 3 else 'group'} {number}"
    ranks = len(team.ranks)
    if shard.ranks[number] != ranks:
        raise CheckpointError(
            f"{flat_name} is cut for {shard.ranks[number]} ranks and not for {ranks}"
        )
    paddings = [0] * len(shapes)
    if of_groups := shard.content.get("param_alignment_paddings"):
        paddings = dict(enumerate(of_groups)).get(number) or paddings
    if len(paddings) != len(shapes):
        raise CheckpointError(f"{flat_name} has another number of param_alignment_paddings")
    cuts = {}
    end = 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        numel = math.prod(shape)
        if shard.stage == 3:
            share = -(-numel // ranks)
            cuts[name] = Cut(0, share, end, numel)
            end += share
        else:
            cuts[name] = Cut(end, shard.slice_sizes[number], 0, numel)
            end += numel + padding
    return FlatCut(number, flat_name, team, cuts, end)


def check_slice(shard: SavedShard, rank: int, flat_cut: FlatCut, trust_mapping: bool) -> int:
    """Check that this rank's slice of a flat tensor is cut like that.

    Returns: how many elements it must hold. Raises: CheckpointError.
    """
    number = flat_cut.number
    size = shard.slice_sizes[number]
    ranks = shard.ranks[number]
    if shard.stage == 3:
        if size != flat_cut.numel:
            raise CheckpointError(f"{flat_cut.name} is not cut for {ranks} ranks")
        return size
    if flat_cut.numel > ranks * size:
        raise CheckpointError(
            f"{flat_cut.name} has {flat_cut.numel} elements, its slices have fewer"
        )
    begin = flat_cut.team.ranks.index(rank) * size
    mapping = {}
    for name, cut in flat_cut.cuts.items():
        if cut.share != size:
            raise CheckpointError(f"{flat_cut.name} has a slice of another size")
        start = max(cut.origin, begin)
        end = min(cut.origin + cut.numel, begin + size)
        if start < end:
            mapping[name] = {"start": start - begin, "numel": end - start}
    mappings = shard.content["param_slice_mappings"]
    saved = {name: address.state for name, address in mappings[number].items()}
    for name in (*mapping, *saved):
        if trust_mapping and saved.get(name) != mapping.get(name):
            raise CheckpointError(f"{name} is not where param_slice_mappings says")
    return max(0, min(flat_cut.numel - begin, size))


# --------------------------------------------------------------------------------------------------
# 3. the shards of all ranks


class FlatStates(NamedTuple):
    """What one shard holds of a flat tensor.

    states: {name: Tensor}, fp32 first. scalars: {name: value, or Tensor with its bytes}. unsliced:
    states that are not cut like the weights. numel: the elements that the others must hold.
    """

    states: dict
    scalars: dict
    unsliced: dict
    numel: int

    @property
    def step(self) -> Any:
        return number_in(self.scalars.get("step"))


def read_flat(shard: SavedShard, number: int, numel: int, opened: OpenFile) -> FlatStates:
    """The states of a flat tensor. One with a value for each element is as long as the fp32 slice,
    or longer by the padding. Raises CheckpointError."""
    masters = shard.masters[number]
    size = masters.size[0]
    states = {"fp32": masters}
    scalars = {}
    unsliced = {}
    for key, value in shard.optimizer["state"].get(number, {}).items():
        tensor = tensor_of(value)
        if tensor is None and size > 1 and holds_elements(value, {size, shard.slice_sizes[number]}):
            unsliced[key] = value
        elif tensor is None or is_scalar(tensor, key, size):
            scalars[key] = read_scalar(value, opened)
        elif (
            key not in ("fp32", "step")
            and len(tensor.size) == 1
            and size <= tensor.size[0] <= shard.slice_sizes[number]
        ):
            states[key] = tensor
        else:
            unsliced[key] = tensor
    flat_states = FlatStates(states, scalars, unsliced, numel)
    expect({"step": flat_states.step}, {"step": (NoneType, int, float)}, shard.path)
    return flat_states


def is_scalar(tensor, key, size):
    """Whether a tensor is of one element for another reason than that its slice is so short."""
    return tensor.numel == 1 and (not tensor.size or key == "step" or size > 1)


def join_shards(
    shards: list[Path],
    states: list[list[FlatStates]],
    flat_cuts: list[FlatCut],
    param_shapes: list[dict],
    param_groups: list[dict],
) -> tuple[dict, dict]:
    """({name: Parameter}, {(flat tensor, name): why a state depends on the rank}).

    shards, states: of every rank. Raises: CheckpointError, if the shards are not of one save.
    """
    parameters = {}
    rank_dependent = {}
    group_of = {flat: i for i, group in enumerate(param_groups) for flat in group["params"]}
    for number, flat_name, team, cuts, _ in flat_cuts:
        of_all = [flats[number] for flats in states]
        of_ranks = [of_all[rank] for rank in team.ranks]
        unsliced = set().union(*(flat.unsliced for flat in of_all))
        check_same_states(shards, of_all, unsliced)
        sliced = {
            key: slices_of([shards[rank] for rank in team.ranks], key, flat_name, of_ranks)
            for key in of_ranks[0].states
            if key == "fp32" or key not in unsliced
        }
        momentum = whole_momentum(of_ranks, cuts) if "momentum_buffer" in unsliced else {}
        if momentum:
            unsliced.remove("momentum_buffer")
        for key, why in differences([flat.scalars for flat in of_all]).items():
            rank_dependent[number, key] = why
        for key in sorted(unsliced, key=str):
            rank_dependent[number, key] = "is not cut like the weights"
        for name, cut in cuts.items():
            states_of_name = {key: slices._replace(cut=cut) for key, slices in sliced.items()}
            if momentum:
                states_of_name["momentum_buffer"] = momentum[name]
            parameters[team.global_name(name)] = Parameter(
                shape=tuple(param_shapes[number][name]),
                flat_number=number,
                group_number=group_of.get(number),
                states=states_of_name,
                scalars=of_ranks[0].scalars,
            )
    return parameters, rank_dependent


def check_same_states(shards, of_ranks, unsliced):
    """Raises CheckpointError if shards have states of other names, or of other steps."""
    first = of_ranks[0]
    for path, flat in zip(shards, of_ranks, strict=True):
        if flat.states.keys() - unsliced != first.states.keys() - unsliced:
            raise CheckpointError(f"{path} has other optimizer states than {shards[0].name}")
        if flat.step != first.step:
            raise CheckpointError(
                f"{path} is at optimizer step {flat.step}, {shards[0].name} at {first.step}"
            )


def slices_of(shards, key, flat_name, of_ranks):
    """The Slices of a state of a flat tensor as a whole."""
    extents = []
    for path, flat in zip(shards, of_ranks, strict=True):
        extents.append(extent_of(flat.states[key], flat.numel))
        if extents[-1].dtype != extents[0].dtype:
            raise CheckpointError(
                f"{path}: {key} of {flat_name} is not what it is in {shards[0].name}"
            )
    return Slices(tuple(extents), Cut(0, 0, 0, 0))


def whole_momentum(of_ranks, cuts):
    """{name: Extent} of Muon's momentum at ZeRO-1 and 2.

    A rank holds, end to end, the whole momentum of each parameter of which it has a part. Empty if
    the ranks' tensors do not have that length.
    """
    momentum = {}
    for rank, flat in enumerate(of_ranks):
        numels = {}
        for name, cut in cuts.items():
            if rank * cut.share - cut.numel < cut.origin < (rank + 1) * cut.share:
                numels[name] = cut.numel
        tensor = (flat.states | flat.unsliced).get("momentum_buffer")
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
    """{key: which ranks} for each key whose value is not the same on all ranks."""
    differing = {}
    for rank, of_rank in enumerate(values):
        for key in {**values[0], **of_rank}:
            in_both = key in values[0] and key in of_rank
            if not in_both or not is_same(values[0][key], of_rank[key]):
                differing[key] = f"differs between ranks 0 and {rank}"
    return differing


def lost_states(parameters: dict, optimizer: OptimizerState) -> list[str]:
    """The names of the optimizer's states that are not per element."""
    names = {*optimizer.extra_states, *optimizer.extra_keys}
    names |= {name for _, name in optimizer.rank_dependent}
    for parameter in parameters.values():
        scalars = parameter.scalars
        names |= {key for key in scalars if scalars[key] is not None and key != "step"}
    names = {name for name in names if not is_computed_anew(name, optimizer.param_groups)}
    return sorted({str(name) for name in names})


def problem_of_loss(path: Path, parameters: dict, optimizer: OptimizerState) -> list[Problem]:
    """[the Problem that states have no place in a universal checkpoint], or []."""
    names = ", ".join(lost_states(parameters, optimizer))
    text = (
        f"{path}: {names} of the optimizer: a universal checkpoint has no place for what belongs "
        "to no single element"
    )
    return [Problem(True, text, of_conversion=True)] if names else []
