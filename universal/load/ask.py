# SPDX-License-Identifier: MIT
"""Ask an optimizer what it does: its class steps a small tensor, whole and in two pieces.

ZeRO cuts parameters, and steps each piece as if it were a parameter. Whether an update depends on
where it is cut, and which numbers a rank then has for itself, no file says. A twin of the optimizer
shows it in milliseconds; one that cannot be asked gives no answer.
"""

import collections
import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from typing import Any, NamedTuple

import numpy
import torch
from torch.utils._python_dispatch import TorchDispatchMode

NUMEL, CUT = 600, 347  # elements of a tensor, and of its first piece
EARLY, MORE = 5, 4  # of the twin, and after a number was changed
NEGLIGIBLE = 1e-5  # a part of an update that is none
OF_A_GROUP = ("params", "param_names", "lr", "initial_lr")  # in which groups of a kind may differ


class Answer(NamedTuple):
    """What an optimizer did with small tensors.

    states: names in its state of a tensor after a step, but the step, of each group. settings:
    names in its groups. gap: how far the updates of pieces are from that of the whole, as a part of
    it. of_rank: names of numbers that each piece has for itself, in its state or its group. unread:
    they all, if none changes a further step. made: names of states after some steps, of all groups.
    on_all_ranks: those that every rank's has.
    """

    states: list[set[str]]
    settings: set[str]
    gap: float
    of_rank: set[str]
    unread: set[str]
    made: set[str] = frozenset()
    on_all_ranks: set[str] = frozenset()

    @property
    def depends_on_cut(self) -> bool:
        return not self.gap <= NEGLIGIBLE  # NaN does, too


def agreed(own: Answer | None, answers: list[Answer | None]) -> Answer | None:
    """This rank's own answer, with what those of all ranks have in common. Parameters may be of one
    rank alone. Returns: None if a rank has none."""
    if None in answers:
        return None
    return own._replace(
        of_rank=set().union(*(answer.of_rank for answer in answers)),
        unread=set.intersection(*(answer.unread for answer in answers)),
        on_all_ranks=set.intersection(*(answer.made for answer in answers)),
    )


class Meets(RuntimeError):
    """The optimizer meets other ranks in a step, and they are not there."""


class AloneMode(TorchDispatchMode):
    """Raises Meets in place of every operation of several ranks."""

    def __torch_dispatch__(self, operation, types, args=(), options=None):
        if operation.namespace == "c10d":
            raise Meets
        return operation(*args, **(options or {}))


def alone(optimizer):
    """A block in which an optimizer meets no other rank; torch's own never do, and are asked in
    half the time without it."""
    is_torchs = type(optimizer).__module__.startswith("torch.optim.")
    return contextlib.nullcontext() if is_torchs else AloneMode()


def ask(optimizer: torch.optim.Optimizer, saved: list[dict]) -> Answer | None:
    """Ask an optimizer, which is left as it is.

    saved: a checkpoint's parameter groups, whose values it is given. Returns: None if its step
    fails with such tensors.
    """
    if type(optimizer).__module__.startswith("deepspeed."):
        return None  # it has state outside of Python, where nothing can be put back
    groups = [
        group | {key: values[key] for key in group.keys() & values.keys() - {"params"}}
        for group, values in zip(optimizer.param_groups, chain(saved, repeat({})), strict=False)
    ]
    kinds = kinds_of(groups)
    try:
        with undisturbed(), alone(optimizer):
            answer = answer_of(optimizer, kinds)
    except Exception:
        return None
    pairs = zip(kinds, answer.states, strict=True)
    states = {id(group): names for of_kind, names in pairs for group in of_kind}
    return answer._replace(states=[states[id(group)] for group in groups])


def kinds_of(groups):
    """Returns lists of groups with the same settings, the highest rate first: one of each list is
    asked, as many groups take as long."""
    kinds = {}
    for group in sorted(groups, key=lambda group: -float(group.get("lr") or 0)):
        settings = {key: group[key] for key in group if key not in OF_A_GROUP}
        kinds.setdefault(repr(settings), []).append(group)
    return [*kinds.values()]


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Leave random numbers as they are in this block, and compile nothing."""
    eager = torch.compiler.set_stance("force_eager")
    with keeping_generators(), torch.enable_grad(), eager, torch.device("cpu"):
        yield


@contextlib.contextmanager
def keeping_generators(device: torch.device | None = None) -> Iterator[None]:
    """Leave the default generators as they are: Python's, numpy's, torch's, and a device's."""
    of_python, of_numpy = random.getstate(), numpy.random.get_state()
    kind = device.type if device else "cpu"
    devices = [] if kind == "cpu" else [device]
    try:
        with torch.random.fork_rng(devices, device_type=kind):
            yield
    finally:
        random.setstate(of_python)
        numpy.random.set_state(of_numpy)


class Run(NamedTuple):
    """Updates of a part of each tensor, a row each; names of states of each after a step; numbers
    before the last MORE steps, by their places; and the twin."""

    updates: torch.Tensor
    states: list[set[str]]
    numbers: dict
    twin: Any


class Trial(NamedTuple):
    """What twins of an optimizer step: a tensor of each kind of groups, and its gradients."""

    optimizer: torch.optim.Optimizer
    kinds: list[list[dict]]
    start: torch.Tensor
    gradients: torch.Tensor

    def run(self, begin: int, end: int, change: Callable | None = None) -> Run:
        """Step the elements from `begin` to `end`. change: as of numbers_of()."""
        tensors = [torch.nn.Parameter(row[begin:end].clone()) for row in self.start]
        twin = twin_of(self.optimizer, self.kinds, tensors)
        for step, gradient in enumerate(self.gradients):
            if step == EARLY:
                numbers = numbers_of(twin, change)
            torch.default_generator.manual_seed(step)  # leaves those of devices alone
            for tensor, row in zip(tensors, gradient, strict=True):
                tensor.grad = row[begin:end].clone()
            type(twin).step(twin)
            if step == 0:
                states = states_of(twin)
        updates = torch.stack([*tensors]).detach() - self.start[:, begin:end]
        return Run(updates, states, numbers, twin)

    def is_read(self, name: str, first: Run, second: Run) -> bool:
        """Whether a number of the first piece changes a step, if it is the second's, or a large or
        a negative one."""
        for change in (second.numbers.get, enlarged, opposite):
            with contextlib.suppress(ArithmeticError):
                changed = self.run(0, CUT, of_name(name, change))
                if torch.equal(changed.updates, first.updates):
                    continue
            return True
        return False


def of_name(name, change):
    """Returns a change of the places of this name alone."""
    return lambda place, value: change(place, value) if place[-1] == name else None


def answer_of(optimizer, kinds):
    """Returns an Answer, with the states of each kind. Raises what the optimizer raises."""
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(len(kinds), NUMEL, generator=generator) * 0.3
    shape = (EARLY + MORE, len(kinds), NUMEL)
    gradients = torch.randn(shape, generator=generator) * torch.linspace(0.1, 3, NUMEL)
    trial = Trial(optimizer, kinds, start, gradients)
    whole = trial.run(0, NUMEL)
    settings = set().union(*whole.twin.param_groups)
    made = set().union(*states_of(whole.twin))
    answer = Answer(whole.states, settings, 0.0, set(), set(), made)
    if not whole.updates.any():
        return answer  # it takes no such tensors
    first, second = trial.run(0, CUT), trial.run(CUT, NUMEL)
    joined = torch.cat([first.updates, second.updates], dim=1)
    gap = (joined - whole.updates).abs().max() / whole.updates.abs().max()

    of_rank = {
        place[-1]
        for place, value in first.numbers.items()
        if not is_equal(value, second.numbers.get(place))
    }
    unread = {name for name in of_rank if not trial.is_read(name, first, second)}
    if unread != of_rank:
        unread = set()  # a step that reads one of them may read more in time
    return answer._replace(gap=gap.item(), of_rank=of_rank - unread, unread=unread)


def states_of(twin):
    """Returns the names in a twin's state of each tensor, but the step."""
    kept = [twin.state.get(group["params"][0], {}) for group in twin.param_groups]
    return [{*map(str, state)} - {"step"} for state in kept]


def twin_of(optimizer, kinds, tensors):
    """An optimizer of the same class with the same attributes, without state, for other tensors,
    one of each kind of groups."""
    kind = type(optimizer)
    twin = object.__new__(type(kind.__name__, (kind,), {"__del__": lambda _: None}))
    memo = {id(optimizer.state): collections.defaultdict(dict)}
    for groups, tensor in zip(kinds, tensors, strict=True):
        memo |= {id(parameter): tensor for group in groups for parameter in group["params"]}
    for name, value in vars(optimizer).items():
        # A scheduler puts its own step() there, which steps the optimizer itself.
        if "hooks" in name or not (callable(value) and hasattr(kind, name)):
            vars(twin)[name] = type(value)() if "hooks" in name else copied(value, memo)
    twin.state = memo[id(optimizer.state)]
    twin.param_groups = [
        {**copied(group, memo), "params": [tensor]}
        for (group, *_), tensor in zip(kinds, tensors, strict=True)
    ]
    if callable(getattr(twin, "train", None)):
        twin.train()
    return twin


def copied(value, memo):
    """A copy of a value; the value itself where nothing can copy it."""
    try:
        return copy.deepcopy(value, memo)
    except Exception:
        return value


def numbers_of(twin: Any, change: Callable | None) -> dict:
    """Returns {place: number or other value that is no tensor of elements} of a twin's groups and
    states, and gives those their changed values for which change(place, value) returns one."""
    numbers = {}
    for i, group in enumerate(twin.param_groups):
        for kind, values in enumerate((group, twin.state.get(group["params"][0], {}))):
            for name, value in values.items():
                if name == "params" or torch.is_tensor(value) and value.numel() != 1:
                    continue
                place = (i, kind, name)
                numbers[place] = copy.deepcopy(value)
                changed = change and change(place, value)
                if changed is not None:
                    values[name] = copy.deepcopy(changed)
    return numbers


def enlarged(_, value):
    """A number as large as none was in the run; other values are as they are."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return abs(value) * 1000 + 1 if is_number or torch.is_tensor(value) else value


def opposite(place, value):
    large = enlarged(place, value)
    return large if large is value else -large


def is_equal(a, b):
    """Whether two numbers are the same; other values, if they say so."""
    if isinstance(a, dict | list | tuple):
        return True  # of their numbers nobody asks
    with contextlib.suppress(Exception):
        return bool(a == b) or bool(a != a and b != b)
    return False
