# SPDX-License-Identifier: MIT
"""Keeps the global batch on any number of ranks.

    config |= batches.config(batch=256, micro_batch=64)
    engine, *_ = deepspeed.initialize(model=model, config=config, ...)
    for step in ...:
        for m, weight in batches.share(engine):
            loss = engine(*micro_batch(step, m))
            engine.backward(weight * loss)
            engine.step()

A step has 256 / 64 = 4 micro-batches, m = 0 to 3. Where the ranks do not divide them, some of the
ranks compute one again, with a loss of weight 0. On 3 ranks:

                           rank 0   rank 1   rank 2
    accumulation step 1      0        2        0, weight 0
    accumulation step 2      1        3        1, weight 0

At ZeRO-2 the ranks add their gradients in every accumulation step, at ZeRO-3 they also gather the
weights there, so a rank that took fewer steps would leave the others waiting. At ZeRO-1 they add
them in the last step only. Ranks take equally many there, too, so that one rule holds; it costs no
time, as rank 2 would wait for the others otherwise. A micro-batch of the same step, in training
mode, makes the same calls of ZeRO and has a loss as finite as the others'. DeepSpeed takes the mean
of all 6 losses; the mean of the 4 is wanted, so their weight is 6 / 4. Where the ranks divide the
micro-batches, every weight is 1, and nothing is computed twice.
"""

import dataclasses
import functools
import hashlib
import itertools
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from universal import guesses
from universal.advice import advice_on_batch, largest_divisor

if TYPE_CHECKING:
    import deepspeed
    import torch

# An entry of DeepSpeed's config, which DeepSpeed ignores, and saves with each checkpoint.
TRUE_BATCH = "universal_train_batch_size"
FLOATS = "floats "  # begins what tells samples that are floats alone, which ranks may draw anew
# Attributes of an engine whose objects copied the batch from its config.
BATCH_ATTRIBUTES = {
    "tput_timer": "batch_size",
    "batch_timer": "batch_size",  # a pipeline's
    "random_ltd_scheduler": "global_batch_size",
}


class Backward(NamedTuple):
    """A backward pass. micro_step: the calls of step() before it. forwards: the forward passes.
    is_local: no_sync(), or the like, has kept its gradients on this rank. is_lost: and step() adds
    them to no other rank's. has_weight: whether its loss is not 0; None if nobody has looked."""

    micro_step: int
    forwards: int
    is_local: bool
    is_lost: bool
    has_weight: "torch.Tensor | None" = None


@dataclasses.dataclass
class Ledger:
    """What the loop of an engine has dealt out, and what it has trained since the last step.

    sharers: as share() was told. dealt: Share.key of the Share that was dealt out last; None if
    none was. drawn: what tells the samples that this rank has drawn from; None if nothing does.
    is_compared: whether the ranks have compared both. forwards: the forward passes so far. outputs:
    tensors with gradients that the last one returned. ended: the micro-step of the last backward
    pass, if it ended a step.
    """

    sharers: int = 1
    dealt: tuple[int, int, int] | None = None
    drawn: str | None = None
    is_compared: bool = False
    forwards: int = 0
    outputs: int = 0
    ended: int | None = None
    backwards: list[Backward] = dataclasses.field(default_factory=list)

    def micro_batches(self, wanted: int) -> dict[Any, bool]:
        """What the backward passes were of, and whether a loss of it had a weight: as many
        micro-batches as calls of step(), or, as one step() may end them all, as forward passes or
        as backward passes: what gives the number wanted."""
        ways = [{}, {}, {}]
        for number, backward in enumerate(self.backwards):
            step = backward.micro_step
            for way, key in zip(ways, (step, (step, backward.forwards), number), strict=True):
                way[key] = way.get(key) or bool(backward.has_weight)
        if any(backward.is_local for backward in self.backwards):
            del ways[0]
        return next((way for way in ways if len(way) == wanted), ways[-2])


@dataclasses.dataclass(frozen=True)
class Share:
    """This rank's part of every step.

    batch: samples of a step, on all ranks. micro_batch: samples of a forward pass on one rank.
    ranks, rank: data-parallel ones. is_exact: exact.py takes the mean, and not DeepSpeed. ledger:
    of its engine. Raises ValueError if the batch is no multiple of the micro-batch.
    """

    batch: int
    micro_batch: int
    ranks: int
    rank: int = 0
    is_exact: bool = False
    ledger: Ledger = dataclasses.field(default_factory=Ledger, compare=False, repr=False)

    def __post_init__(self):
        fitting = largest_divisor(self.batch or 1, self.micro_batch)
        if fitting != self.micro_batch or not self.batch:
            raise ValueError(
                f"a batch of {self.batch} does not divide into micro-batches of "
                f"{self.micro_batch}, but into those of {fitting}"
            )

    @property
    def micro_batches(self) -> int:
        """The micro-batches of a step, on all ranks."""
        return self.batch // self.micro_batch

    @property
    def accumulation(self) -> int:
        """Accumulation steps, the same number on every rank."""
        return -(-self.micro_batches // self.ranks)

    @property
    def repeats(self) -> int:
        """Micro-batches that are computed again, on all ranks."""
        return self.accumulation * self.ranks - self.micro_batches

    @property
    def weight(self) -> float:
        """The weight of the loss of a micro-batch that is not computed again."""
        return 1.0 if self.is_exact else self.accumulation * self.ranks / self.micro_batches

    @property
    def weighted(self) -> int:
        """How many of this rank's micro-batches have a weight: the first ones that it computes."""
        rest = self.micro_batches - self.rank * self.accumulation
        return min(max(rest, 0), self.accumulation)

    @property
    def key(self) -> tuple[int, int, int]:
        """What tells it from Shares of other batches."""
        return self.batch, self.micro_batch, self.accumulation

    def __iter__(self) -> Iterator[tuple[int, float]]:
        """Returns the number of the micro-batch and the weight of its loss, for each accumulation
        step. From now on the engine's steps are to train what is dealt here."""
        self.ledger.dealt = self.key
        return self.places()

    def places(self) -> Iterator[tuple[int, float]]:
        """Yields what iter() returns, for who trains nothing by it."""
        begin = self.rank * self.accumulation
        for place in range(begin, begin + self.accumulation):
            weight = self.weight if place < self.micro_batches else 0.0
            yield place % self.micro_batches, weight

    def __str__(self) -> str:
        """Says, for example: batch 256: 4 micro-batches of 64 on 3 ranks, 2 accumulation steps
        each; 2 of these 6 are repeats, with weight 0"""
        repeats = ""
        if self.repeats:
            are = "is a repeat" if self.repeats == 1 else "are repeats"
            places = self.accumulation * self.ranks
            repeats = f"; {self.repeats} of these {places} {are}, with weight 0"
        return (
            f"batch {self.batch}: {amount(self.micro_batches, 'micro-batch', 'es')} of "
            f"{self.micro_batch} on {amount(self.ranks, 'rank')}, "
            f"{amount(self.accumulation, 'accumulation step')} each{repeats}"
        )


def amount(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"


def config(batch: int, micro_batch: int, ranks: int | None = None) -> dict[str, Any]:
    """The entries of DeepSpeed's config for a batch. From now on no engine trains another one than
    its config names.

    ranks: data-parallel ones; default: all that the launcher has started. Raises ValueError if the
    batch is no multiple of the micro-batch, or there was no launcher.
    """
    ranks = ranks or int(os.environ.get("WORLD_SIZE", 0))
    if not ranks:
        raise ValueError("WORLD_SIZE is not set: start a launcher, or name the number of ranks")
    install()
    return {
        "train_batch_size": None,  # DeepSpeed's, which is a product
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": Share(batch, micro_batch, ranks).accumulation,
        TRUE_BATCH: batch,
    }


def share(engine: "deepspeed.DeepSpeedEngine", sharers: int = 1) -> Share:
    """This rank's part of every step. The config may also have "train_batch_size" alone.

    From now on engine.train_batch_size(), and what DeepSpeed counts by it, is the true batch.
    sharers: ranks that compute a micro-batch together, and are data-parallel ranks to DeepSpeed, as
    those of a sequence parallelism of which it knows nothing. Raises ValueError if the engine takes
    other accumulation steps, or deals out samples itself, where some would have no weight.
    """
    result = named_share(engine, sharers)
    accumulation = engine.gradient_accumulation_steps()
    if result.accumulation != accumulation:
        raise ValueError(
            f"{result.micro_batches} micro-batches on {result.ranks} data-parallel ranks need "
            f"{result.accumulation} accumulation steps, and the config says {accumulation}"
        )
    if engine.training_data is not None:
        check_loader(result)
    install()
    result.ledger.sharers = sharers
    engine._config.train_batch_size = result.batch
    for name, attribute in BATCH_ATTRIBUTES.items():
        if hasattr(engine, name):
            setattr(getattr(engine, name), attribute, result.batch)
    return result


def named_share(engine: "deepspeed.DeepSpeedEngine", sharers: int | None = None) -> Share:
    """The Share of the batch that an engine's config names, or else of what its steps train.
    sharers: as in share(); None for those of its last call."""
    ledger = ledger_of(engine)
    sharers = sharers or ledger.sharers
    group = sharing_group(engine)
    if engine.data_parallel_group is None:  # DeepSpeed's own sequence parallelism
        sharers = engine.sequence_parallel_size
    micro_batch = engine.train_micro_batch_size_per_gpu()
    ranks = group.size() // sharers
    trained = micro_batch * engine.gradient_accumulation_steps() * ranks
    written = engine._config._param_dict  # the config, also where engine.config is a file's name
    batch = written.get(TRUE_BATCH, trained)
    is_exact = hasattr(engine, "divides_gradients")
    return Share(batch, micro_batch, ranks, group.rank() // sharers, is_exact, ledger)


def sharing_group(engine):
    """The ranks that share out the batch."""
    group = engine.data_parallel_group
    return engine.seq_data_parallel_group if group is None else group


def ledger_of(engine: "deepspeed.DeepSpeedEngine") -> Ledger:
    return vars(engine).setdefault("universal_ledger", Ledger())


# --------------------------------------------------------------------------------------------------
# the batch that is named is the batch that is trained


def install() -> None:
    """Refuse, from now on, every step that trains another batch than its engine's config names.

    set_train_batch_size() names another batch.
    """
    from universal import patches

    patches.patch("batches", **WRAPPERS)


def before_load(engine: "deepspeed.DeepSpeedEngine") -> None:
    """A loop that is resumed is watched, also without install()."""
    install()


def is_named(engine):
    """Whether the script has told this package, by the config or by share(), what to train."""
    return TRUE_BATCH in engine._config._param_dict or ledger_of(engine).dealt is not None


def is_to_compare(engine):
    """Whether the ranks have yet to compare what they trained: of a batch of DeepSpeed's own rule,
    one rank alone may have asked for a share, and none has a weight of 0."""
    return TRUE_BATCH in engine._config._param_dict and not ledger_of(engine).is_compared


def counted_forward(method, engine, *inputs, **named):
    from torch.utils._pytree import tree_leaves

    ledger = ledger_of(engine)
    ledger.forwards += 1
    result = method(engine, *inputs, **named)
    ledger.outputs = sum(getattr(leaf, "requires_grad", False) for leaf in tree_leaves(result))
    return result


def counted_backward(method, engine, loss, *args, **options):
    has_weight = None
    if is_to_compare(engine):
        has_weight = (loss.detach().abs() > 0).any()
    result = method(engine, loss, *args, **options)
    note_backward(engine, has_weight)
    ledger = ledger_of(engine)
    ledger.ended = guesses.say_if_lost(engine, ledger.ended)
    return result


def counted_epilogue(method, engine):
    """The end of a backward pass, which the script may have called on the loss itself."""
    result = method(engine)
    if not getattr(engine, "_running_engine_backward", True):
        note_backward(engine)
        guesses.say_if_divided_twice(engine, ledger_of(engine).outputs)
    return result


def note_backward(engine, has_weight=None):
    if not is_named(engine):
        return
    ledger = ledger_of(engine)
    is_local = getattr(engine, "inside_no_sync_ctxt", False)
    is_added_later = getattr(engine.optimizer, "_coalesce_grad_reduction", False)
    is_managed = getattr(engine, "managed_gradient_accumulation", lambda: True)()
    is_lost = is_local and is_managed and not is_added_later
    passed = Backward(engine.micro_steps, ledger.forwards, is_local, is_lost, has_weight)
    ledger.backwards.append(passed)


def checked_loader(method, engine, *args, **options):
    """DeepSpeed's loader; with a sampler of the script's, that is what deals out the samples."""
    given = dict(zip(("dataset", "batch_size", "route", "", "data_sampler"), args, strict=False))
    given |= options
    if given.get("route", "train") == "train" and not given.get("data_sampler"):
        check_loader(named_share(engine))
    return method(engine, *args, **options)


def check_loader(share):
    """Raises ValueError if DeepSpeed's own loader would draw more samples than are trained."""
    if share.repeats:
        raise ValueError(
            f"{share.ranks} ranks do not divide {share.micro_batches} micro-batches, and "
            "DeepSpeed's loader of training_data would draw more: give a DataLoader a "
            'batches.Sampler; for an evaluation, call deepspeed_io(..., route="eval")'
        )


def checked_step(method, engine, *args, **options):
    """Raises ValueError, the same on all ranks, if the step trains another batch than is named."""
    share, ledger = named_share(engine), ledger_of(engine)
    asked = os.environ.get("UNIVERSAL_BATCH", str(share.batch))
    if not asked.isdecimal() or int(asked) != share.batch:
        guesses.say_once(
            engine,
            f"UNIVERSAL_BATCH={asked} has no effect here (it has in Trainers under `python -m "
            f"universal`): this step trains {share.batch} samples",
        )
    guesses.say_of_settings(engine)
    if not is_named(engine):
        return method(engine, *args, **options)
    try:
        check_gradient(engine, share)
        trained = ledger.micro_batches(share.accumulation)
        weighted = compare_ranks(engine, ledger, sum(trained.values()))
        check_batch(engine, share, ledger, len(trained))
        check_weights(engine, share, weighted)
    finally:
        ledger.backwards.clear()
    samples = engine.global_samples
    result = method(engine, *args, **options)
    engine.global_samples = samples + share.batch  # DeepSpeed may count by accumulation steps
    return result


def compare_ranks(engine, ledger, weighted):
    """Raises ValueError, before the first step, if the ranks draw from different samples. Returns
    how many losses had a weight, on all ranks; later 0."""
    from torch import distributed as dist

    if not is_to_compare(engine):
        return 0
    ledger.is_compared = True
    group = sharing_group(engine)
    ranks = [None] * group.size()
    dist.all_gather_object(ranks, (ledger.dealt, ledger.drawn, weighted), group=group)
    dealt, drawn, weighted = zip(*ranks, strict=True)
    if len({*dealt}) > 1:  # by one rank alone, for a line of its log
        ledger.dealt = None
    if len({*drawn}) > 1 and all(str(of_rank).startswith(FLOATS) for of_rank in drawn):
        guesses.say_once(
            engine,
            "the ranks draw different floats: it is right if they augment the same samples, and "
            "wrong if each has a part of the stream: each must read the whole one",
        )
    elif len({*drawn}) > 1:
        raise ValueError(
            "the ranks draw from different samples: give each the whole data set in the same "
            "order, without a DistributedSampler, shuffled by a seed and set_epoch(); what deals "
            "it out gives each rank its part"
        )
    return sum(weighted)


def check_batch(engine, share, ledger, count):
    """Raises ValueError if the micro-batches that went backward since the last step are not those
    of the batch. count: how many; 0 if nobody has seen them."""
    if hasattr(engine, "is_first_stage"):
        if not (engine.is_first_stage() or engine.is_last_stage()):
            return  # a pipeline's stages between them draw no samples
    if ledger.dealt and ledger.dealt != share.key:
        raise ValueError(
            f"the loop deals out a batch of {ledger.dealt[0]}, and the engine's is {share.batch}: "
            "call batches.share(engine) again after set_train_batch_size()"
        )
    steps = engine.gradient_accumulation_steps()
    count = count or steps
    is_dealt = ledger.dealt or not share.repeats
    is_lost = any(backward.is_lost for backward in ledger.backwards[-1:])
    if is_dealt and count == share.accumulation and not is_lost:
        return
    trained = share.micro_batch * count * share.ranks
    module = type(engine).__module__
    ends = ""
    if count != steps or is_lost:
        ends = (
            f". The config has {steps} accumulation steps: after the backward() of the last one, "
            "outside no_sync(), comes the step() that updates"
        )
    raise ValueError(
        f"the config names a batch of {share.batch}, and this step trains {trained} samples, "
        f"{share.micro_batch} x {count} accumulation steps x {share.ranks} ranks{ends}. To keep "
        + "\n  ".join([f"{share.batch}:", *advice_on_batch(share.batch, share.micro_batch, module)])
    )


def check_weights(engine, share, weighted):
    """Raises ValueError if losses that were dealt out with weight 0 had one."""
    ranks = sharing_group(engine).size()
    if weighted * share.ranks > share.micro_batches * ranks:
        raise ValueError(
            f"{share.repeats} micro-batches of a step are computed again, with weight 0, and "
            f"{weighted} of {share.accumulation * ranks} losses are not 0: call "
            "engine.backward(weight * loss) with the weights of batches.share(engine)"
        )


def check_gradient(engine: "deepspeed.DeepSpeedEngine", share: Share) -> None:
    """Raises ValueError if the gradient is not the mean over the ranks."""
    factor, key = gradient_factor(engine._config._param_dict, sharing_group(engine).size())
    if factor != 1:
        raise ValueError(
            f"{key} in the config makes the gradient {factor:.4g} times the mean of the batch of "
            f"{share.batch}, and another on other ranks: take it out, and multiply each loss by "
            "the factor that the run began with"
        )


def gradient_factor(config: dict[str, Any], ranks: int) -> tuple[float, str]:
    """Returns by how much DeepSpeed's gradient is more than the mean over so many data-parallel
    ranks, and the key of the config that makes it so."""
    zero = config.get("zero_optimization")
    zero = zero if isinstance(zero, dict) else {}
    key = "gradient_allreduce_op"
    if str(config.get(key)).lower() == "sum":
        return ranks, key
    key = "gradient_predivide_factor"
    is_left_out = zero.get("stage") == 3 and zero.get("reduce_scatter") is False
    if is_left_out and not config.get("prescale_gradients") and config.get(key) == ranks:
        return 1 / ranks, key  # stage3.py divides by both, and multiplies by none
    return 1, key


def name_batch(method, engine, batch):
    if ledger_of(engine).backwards:
        raise ValueError(
            "set_train_batch_size() within a step, whose micro-batches are of the batch of before: "
            "call it after a step()"
        )
    is_between = engine.micro_steps % engine.gradient_accumulation_steps() == 0
    method(engine, batch)
    if is_between:
        engine.micro_steps = 0  # a step ends where the new accumulation steps divide it
        ledger_of(engine).ended = None
    written = engine._config._param_dict  # a new one: other engines may have the same
    name = TRUE_BATCH if TRUE_BATCH in written else "train_batch_size"
    changes = {name: batch, "gradient_accumulation_steps": engine.gradient_accumulation_steps()}
    engine.config = engine._config._param_dict = written | changes


# DeepSpeed's methods that are watched.
WRAPPERS = {
    "forward": counted_forward,
    "backward": counted_backward,
    "_backward_epilogue": counted_epilogue,
    "_take_model_step": checked_step,  # at the last micro-batch
    "set_train_batch_size": name_batch,
    "deepspeed_io": checked_loader,
}


def derive_seed(*key: int | str) -> int:
    """An unrelated seed for each key, such as (seed, epoch), the same in every Python."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1  # 63 bits, as a seed may be a signed number


class Sampler:
    """A batch_sampler for a DataLoader: this rank's micro-batches, from any step on.

        share = batches.share(engine)
        sampler = batches.Sampler(len(dataset), share)
        sampler.set_step(done + 1)
        loader = iter(DataLoader(dataset, batch_sampler=sampler))
        for step in range(done + 1, steps + 1):
            for m, weight in share:
                inputs = next(loader)

    The samples of a step are the same on any number of ranks. Steps are counted from 1, through
    all epochs, without an end. shuffle: each epoch has an order of its own, drawn from the seed;
    otherwise it is that of the data set. drop_last: each epoch leaves out the samples at its end
    that do not fill a step; otherwise the first ones of the next epoch fill that step.
    """

    def __init__(
        self,
        samples: int,
        share: Share,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
    ):
        """Begin at step 1. samples: the size of the data set. Raises ValueError if it fills no
        step."""
        self.share = share
        self.samples = samples
        self.seed = seed
        self.shuffle = shuffle
        self.epoch_samples = samples - samples % share.batch if drop_last else samples
        self.step = 1
        if not self.epoch_samples:
            raise ValueError(f"{samples} samples do not fill a batch of {share.batch}")

    def set_step(self, step: int) -> None:
        """Set the step, from 1, at which the next DataLoader to iterate begins."""
        self.step = step

    def __iter__(self) -> Iterator[list[int]]:
        kind = (self.samples, self.epoch_samples, self.seed, self.shuffle, self.step)
        ledger = self.share.ledger
        ledger.drawn = repr(kind)
        known = {None, self.share.key, ledger.dealt}
        order = functools.lru_cache(maxsize=2)(self.order)
        for step in itertools.count(self.step):
            if ledger.dealt not in known:
                raise ValueError(
                    f"this Sampler deals out a batch of {self.share.batch}, and the loop one of "
                    f"{ledger.dealt[0]}: make a new one of batches.share(engine), whose set_step() "
                    "counts in steps of the new batch"
                )
            for m, _ in self.share.places():
                begin = (step - 1) * self.share.batch + m * self.share.micro_batch
                numbers = range(begin, begin + self.share.micro_batch)
                places = [divmod(number, self.epoch_samples) for number in numbers]
                yield [int(order(epoch)[place]) for epoch, place in places]

    def order(self, epoch: int) -> "torch.Tensor | range":
        """The data set's indices in the order of an epoch, the first of which is 0."""
        if not self.shuffle:
            return range(self.samples)
        import torch

        generator = torch.Generator().manual_seed(derive_seed(self.seed, epoch))
        return torch.randperm(self.samples, generator=generator)
