# SPDX-License-Identifier: MIT
"""Find out which parameters an optimizer's tensors are, where a checkpoint was saved without ZeRO.

The state of the optimizer numbers them, group by group, and does not name them: the engine that
loads them tells their order, or else their shapes do, and their values where masters are saved."""

import itertools
import math
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

from universal.checkpoint.module_states import identity
from universal.errors import CheckpointError, naming
from universal.files.sources import ByteReader, OpenFile, Source, width
from universal.files.torch_file import Tensor, extent_of, tensor_of

ROUNDED = ("float32", "float16", "bfloat16")  # precisions of weights beside float32 masters
FIRST = 64  # elements of a weight that are compared with its masters
SAMPLES = 4  # of a weight: its first elements may be the padding of an embedding
ORDER = "the order of the parameters"
UNCLEAR = (
    "it does not say which parameters are in which group of the optimizer, and their shapes do not "
    "tell: load it without converting it"
)
UNKNOWN_ORDER = "is not known: the file does not tell it, and that of the engine does not fit"


class Told(NamedTuple):
    """What an engine tells of the parameters that its optimizer has.

    stages: of each of a pipeline's, by group, {parameter: its entry in the state of the module}, in
    the order in which the optimizer got them. tied: {number: key} of a pipeline's layers. shared:
    the parameters of these that are the same on all stages. is_model_first: whether the axis of
    tensor parallelism is before that of stages in the topology, which numbers the ranks. is_folded:
    whether it is DualPipeV, of which a rank has two stages, from both ends of the pipeline.
    """

    stages: Sequence[list[dict[str, str]]] = ()
    tied: dict[int, str] = {}
    shared: Set[str] = frozenset()
    is_model_first: bool = False
    is_folded: bool = False

    def by_group(self) -> list[dict[str, str]]:
        """The parameters of all stages together."""
        groups = []
        for of_stages in itertools.zip_longest(*self.stages, fillvalue={}):
            group = {}
            for of_stage in of_stages:
                group |= of_stage
            groups.append(group)
        return groups


Given = Callable[[], Told]


class NeedsEngine(CheckpointError):
    """The checkpoint may be whole, but only an engine can tell which parameters are trained."""


class Stepped(NamedTuple):
    """A tensor that PyTorch's optimizer steps, and the state that it keeps for it.

    masters: None where these are weights of the module. flat: whether they are those of a whole
    group, end to end. begin: the element where a parameter begins in them.
    """

    masters: Tensor | None
    state: dict[str, Any]
    flat: bool
    begin: int = 0


class SavedRank(NamedTuple):
    """What a model-parallel rank has saved.

    optimizer: DeepSpeed's state. base: the state dict of PyTorch's. weights: of trained_weights().
    groups: by parameter group. names: of the parameters that these are. lost: {(group, name): why a
    state has no place}.
    """

    path: Path
    model: dict
    optimizer: dict
    base: dict
    weights: dict[str, Tensor]
    groups: list[list[Stepped]]
    names: list[list[str]] = []
    lost: dict = {}


NOWHERE = Stepped(None, {}, False)


def trained_weights(module: dict, buffer_names: Iterable[str]) -> dict[str, Tensor]:
    """{name: Tensor} of a module without its buffers; tied weights have one of their names."""
    weights = {}
    for name, value in module.items():
        tensor = tensor_of(value)
        if tensor and name not in buffer_names and not name.endswith("_extra_state"):
            weights.setdefault(identity(value), (name, tensor))
    return dict(weights.values())


def stepped_groups(optimizer, base):
    """[[Stepped]], by parameter group."""
    masters = optimizer.get("fp32_groups") or optimizer.get("fp32_groups_flat")
    flat = "fp32_groups_flat" in optimizer
    groups = []
    if masters and len(masters) != len(base["param_groups"]):
        raise CheckpointError("the optimizer does not have master weights of each group")
    for i, group in enumerate(base["param_groups"]):
        numbers = group["params"]
        tensors = [None] * len(numbers)
        if masters:
            tensors = [masters[i]] if flat else masters[i]
        if len(tensors) != len(numbers):
            raise CheckpointError(f"group {i} does not have master weights of each parameter")
        states = [base["state"].get(number, {}) for number in numbers]
        if group.get("step") == 0:  # as FusedAdam and FusedLion write there
            states = with_step_of_last(states)
        of_group = []
        for tensor, state in zip(tensors, states, strict=True):
            of_group.append(Stepped(tensor_of(tensor), state, flat))
        groups.append(of_group)
    return groups


def stepping(group, groups):
    """What of a group has been trained. DeepSpeed gives each trained parameter a gradient, if only
    of zeros, and so a state: the others are frozen."""
    counted = any(stepped.state for of_group in groups for stepped in of_group)
    return [stepped for stepped in group if stepped.masters or stepped.state or not counted]


def with_step_of_last(states):
    """FusedAdam counts the steps of a whole group in the state of its last parameter alone."""
    steps = [state["step"] for state in states if "step" in state]
    return [state | {"step": steps[-1]} if "step" in state else state for state in states]


def places_of(weights, names, group):
    """The Stepped of each weight, in their order: a tensor of its own, or a place in the flat one.

    If the weights do not fill the group, nobody knows which is where: then all are NOWHERE.
    """
    ends = [*itertools.accumulate(weights[name].numel for name in names)]
    if group and group[0].flat:
        whole = group[0]
        if ends and ends[-1] == whole.masters.numel:
            return [whole._replace(begin=begin) for begin in (0, *ends[:-1])]
    elif len(names) == len(group):
        return group
    return [NOWHERE] * len(names)


def is_nowhere(places):
    return any(stepped is NOWHERE for stepped in places)


# --------------------------------------------------------------------------------------------------
# the names


def named_ranks(
    ranks: list[SavedRank], given: list[dict[str, str]] | None, opened: OpenFile
) -> list[SavedRank]:
    """Tensor-parallel ranks, with names of their parameters. given: Told.by_group(), or None.

    All have the same order; if their shapes or values tell another one of each, nobody knows it.
    Raises: NeedsEngine, CheckpointError.
    """
    named = [named_rank(rank, given, opened) for rank in ranks]
    orders = [(rank.names, rank.lost) for rank in named]
    if all(order == orders[0] for order in orders):
        return named
    if given is None:
        raise NeedsEngine(UNCLEAR)
    weights = ranks[0].weights
    unplaced = {
        "groups": [],
        "names": [[name for name in of_group if name in weights] for of_group in given],
        "lost": {(None, ORDER): UNKNOWN_ORDER},
    }
    return [rank._replace(**unplaced) for rank in ranks]


def named_rank(rank, given, opened):
    """A rank, with names of its parameters."""
    with naming(rank.path):
        if given is None:
            groups = [stepping(group, rank.groups) for group in rank.groups]
            names = names_by_shape(rank.weights, groups, opened)
            return rank._replace(groups=groups, names=names)
        names, groups, unknown = names_in_order(rank.weights, rank.groups, given, opened)
        return rank._replace(groups=groups, names=names, lost=unknown)


def names_in_order(weights, groups, given, opened):
    """([[name]] by group, in the order of its tensors, [their Stepped], {(group, ORDER): why nobody
    knows them}).

    given: the engine's names. Raises: CheckpointError, if the file is damaged.
    """
    if not any(given):
        return [[] for _ in given], groups, {}
    homes = {name: i for i, of_group in enumerate(given) for name in of_group}
    names = []
    placed = []
    for i, (of_group, group) in enumerate(itertools.zip_longest(given, groups, fillvalue=())):
        known = [name for name in of_group if name in weights]
        allowed = [name for name in weights if homes.get(name, i) == i]
        orders = orders_of(weights, known, allowed, group, stepping(group, groups), opened)
        fitting = (order for order in orders if is_filled(weights, *order, opened))
        order, tensors = next(fitting, (known, []))
        names.append(order)
        placed.append(tensors)
    counts = Counter(itertools.chain(*names))
    repeated = {name for name, count in counts.items() if count > 1}
    unknown = {}
    for i, order in enumerate(names):
        if order and (not placed[i] or repeated.intersection(order)):
            names[i] = [name for name in order if homes.get(name) == i]
            placed[i] = []
            unknown[i, ORDER] = UNKNOWN_ORDER
    return names, placed, unknown


def orders_of(weights, known, allowed, group, trained, opened):
    """Yields (names, [Stepped]), which may be what is in a group: what the engine has, of all
    tensors, or of those that have been trained; and the same with what it does not have."""
    yield known, group
    yield known, trained
    if group and group[0].masters:
        mixed = order_by_values(weights, allowed, group, opened)
        fits = {*known} <= {*mixed}
    else:
        mixed = order_by_shapes(weights, allowed, group, opened)
        fits = [name for name in mixed if name in known] == known
    if known and fits:
        yield mixed, group


def order_by_values(weights, names, group, opened):
    """The names in the order of a group's masters; [] if several have the same values."""
    order = []
    left = [*names]
    while left:
        fitting = [name for name in left if is_next(weights, order, name, group, opened)]
        if len(fitting) != 1:
            break
        order += fitting
        left.remove(fitting[0])
    return order


def order_by_shapes(weights, names, group, opened):
    """The names that fit as the next tensor of a group, one by one; [] if others might, too."""
    order = []
    skipped = set()
    for name in names:
        if is_next(weights, order, name, group, opened):
            order.append(name)
        else:
            skipped.add(weights[name].size)
    shapeless = skipped and not all(stepped.state for stepped in group)
    doubtful = [name for name in order if weights[name].size in skipped]
    return [] if shapeless or doubtful else order


def is_filled(weights, names, group, opened):
    """Whether these are the parameters of a group, as far as shapes and values tell."""
    if not names or is_nowhere(places_of(weights, names, group)):
        return False
    return all(is_next(weights, names[:i], name, group, opened) for i, name in enumerate(names))


def names_by_shape(weights, groups, opened):
    """[[name]] by group, if shapes, and values where masters are saved, leave one choice.

    They do if each weight fits in one group at most, as its next tensor, and if those that fit in
    none, which are frozen, have other shapes. Raises CheckpointError if they do not.
    """
    names = [[] for _ in groups]
    frozen = set()
    for name, weight in weights.items():
        fitting = []
        for of_group, group in zip(names, groups, strict=True):
            if is_next(weights, of_group, name, group, opened):
                fitting.append(of_group)
        if len(fitting) > 1:
            raise NeedsEngine(UNCLEAR)
        for of_group in fitting:
            of_group.append(name)
        if not fitting:
            frozen.add(weight.size)
    for of_group, group in zip(names, groups, strict=True):
        like_frozen = [name for name in of_group if weights[name].size in frozen]
        if like_frozen or is_nowhere(places_of(weights, of_group, group)):
            raise NeedsEngine(UNCLEAR)
    if not names:
        raise NeedsEngine(UNCLEAR)
    return names


def is_next(weights, before, name, group, opened):
    """Whether a weight of this name may be what the optimizer's group has after those before."""
    weight = weights[name]
    begin = 0
    if group and group[0].flat:
        (stepped,) = group
        begin = sum(weights[other].numel for other in before)
        fits = begin + weight.numel <= stepped.masters.numel
    elif len(before) < len(group):
        stepped = group[len(before)]
        tensors = [tensor_of(value) for value in (stepped.masters, *stepped.state.values())]
        shapes = {tensor.size for tensor in tensors if tensor}
        fits = not shapes or weight.size in shapes
    else:
        return False
    return fits and (stepped.masters is None or is_rounded(weight, stepped.masters, begin, opened))


def is_rounded(weight, masters, begin, opened):
    """Whether a weight is what its masters are in its precision, as far as its first elements."""
    if weight.dtype not in ROUNDED:
        return True
    numel = min(weight.numel, FIRST)
    floats = ByteReader(opened).read(extent_of(masters, begin + numel), begin, numel)
    return beginning(weight, opened) == rounded(floats, weight.dtype)


def has_shapes(optimizer: dict, shapes: list[list[tuple]]) -> bool:
    """Whether a rank's optimizer, saved without ZeRO, has states of tensors of these shapes, which
    are by group."""
    base = optimizer.get("optimizer_state_dict", optimizer)
    numbers = [group["params"] for group in base["param_groups"]]
    if [len(of_group) for of_group in numbers] != [len(of_group) for of_group in shapes]:
        return False
    pairs = zip(itertools.chain(*numbers), itertools.chain(*shapes), strict=True)
    return all(
        not tensor_of(value) or tensor_of(value).size in ((), shape)
        for number, shape in pairs
        for value in base["state"].get(number, {}).values()
    )


def beginning(weight: Tensor, opened: OpenFile) -> bytes:
    """Its first elements."""
    numel = min(weight.numel, FIRST)
    return bytes(ByteReader(opened).read(extent_of(weight, numel), 0, numel))


def has_values_of(weight: Tensor, masters: Source, opened: OpenFile) -> bool:
    """Whether a weight is what its masters are in its precision, as far as elements in several
    places of what each rank has of them. Where dtypes do not tell, it is."""
    if math.prod(weight.size) != masters.numel:
        return False
    if masters.dtype != "float32" or weight.dtype not in ROUNDED:
        return True
    reader = ByteReader(opened)
    start = 0
    for part in masters.ranges(0, masters.numel):
        numel = part.nbytes // width(masters.dtype)
        end = start + numel
        for place in range(start, end, max(FIRST, numel // SAMPLES)):
            count = min(FIRST, end - place)
            floats = reader.read(masters, place, count)
            if reader.read(extent_of(weight), place, count) != rounded(floats, weight.dtype):
                return False
        start = end
    return True


def rounded(floats: bytes, dtype: str) -> bytes:
    """The bytes of float32 numbers in one of the precisions ROUNDED."""
    if dtype == "float32":
        return floats
    numel = len(floats) // 4
    if dtype == "float16":
        numbers = struct.unpack(f"<{numel}f", floats)
        limited = [x if abs(x) < 65520 else math.copysign(math.inf, x) for x in numbers]
        return struct.pack(f"<{numel}e", *limited)
    halves = []  # bfloat16: half of a float, rounded to even
    for word in struct.unpack(f"<{numel}I", floats):
        is_odd = word >> 16 & 1
        halves.append((word + 0x7FFF + is_odd) >> 16)
    return struct.pack(f"<{numel}H", *halves)
