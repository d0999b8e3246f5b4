# SPDX-License-Identifier: MIT
"""Hugging Face's Trainer on any number of ranks, at the same global batch:

    class MyTrainer(AnyRanks, Trainer): ...

    config = {**batches.config(batch=16, micro_batch=2), "zero_optimization": {"stage": 3}}
    TrainingArguments(
        deepspeed=config,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=config["gradient_accumulation_steps"],
        ...
    )

accelerate, whose DataLoader Trainer uses, gives micro-batch m of a step to rank m % ranks. Where
the ranks do not divide a step's micro-batches, its first ones follow once more, with a loss of
weight 0, so that every rank has the same number. The last step of an epoch, which may be shorter,
is filled in the same way.

Each rank reads a stream, an IterableDataset, from its start, in the process that trains; workers
only collate.

fill_steps() does this for a loop over accelerate's DataLoader, as in examples/accelerate_loop.py.
"""

import dataclasses
import functools
import hashlib
import itertools
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy
import torch
from torch.utils import data
from torch.utils._pytree import tree_leaves, tree_map_only

from universal import batches
from universal.advice import largest_divisor
from universal.batch.losses import NUMBER, LossKind, kind_of_loss, times_router_loss
from universal.load.collective import say
from universal.load.overrides import overridden

# What keeps the batch where AnyRanks cannot.
BY_HAND = (
    "leave UNIVERSAL_BATCH (AnyRanks) out, choose a number of ranks that divides the batch, and "
    "set gradient_accumulation_steps to batch / (per_device_train_batch_size x ranks)"
)


class IndexIsSample(data.Dataset):
    """A data set whose indices are the samples, for a stream: its samples have no numbers."""

    def __getitem__(self, sample: Any) -> Any:
        return sample

    def __len__(self):  # for the sampler that Trainer makes, and PaddedBatchSampler replaces
        return 1


class PaddedBatchSampler:
    """A batch sampler: this rank's micro-batches of an epoch, as many in each step.

    micro_batches: of all ranks, without repeats: lists of sample numbers; of a stream, of samples.
    length: how many; infinite for a stream. epoch, begin: to be set before an epoch begins: its
    number, and its first step to deal, from 0.
    """

    epoch = None
    begin = 0
    skipped = 0  # so many empty micro-batches come before, for Trainer to skip
    first_step = None

    def __init__(self, micro_batches: Iterable[list], share: batches.Share, length: float):
        self.micro_batches = micro_batches
        self.share = share
        self.length = length
        self.number = length  # the epoch's micro-batches: a stream's when all have been read

    def __getattr__(self, name):  # accelerate and Trainer set the epoch of its sampler
        return getattr(self.micro_batches, name)

    @property
    def per_epoch(self) -> int:
        """Steps of an epoch."""
        return -(-self.length // self.share.micro_batches)

    def count(self, step: int) -> int:
        """Micro-batches of a step, on all ranks, without repeats. step: of the epoch, from 0."""
        before = step * self.share.micro_batches
        return min(self.share.micro_batches, self.number - before)

    def weights(self, step: int) -> list[float]:
        """Returns the weights of this rank's losses in a step, of which DeepSpeed takes the
        mean."""
        self.share.ledger.dealt = self.share.key
        count = self.count(step)
        places = self.share.accumulation * self.share.ranks
        numbers = range(self.share.rank, places, self.share.ranks)
        return [places / count if number < count else 0.0 for number in numbers]

    def all_weights(self) -> Iterator[float]:
        """Yields the weights of all micro-batches from the step `begin` on, without an end."""
        return itertools.chain.from_iterable(map(self.weights, itertools.count(self.begin)))

    def __len__(self):
        return self.per_epoch * self.share.accumulation

    def __iter__(self) -> Iterator[list]:
        sampler = getattr(self.micro_batches, "sampler", None)
        # accelerate before 1.15 sets that of epoch 0 where it skips.
        if self.epoch is not None and hasattr(sampler, "set_epoch"):
            sampler.set_epoch(self.epoch)
        yield from itertools.repeat([], self.skipped)
        size = self.share.micro_batches
        places = self.share.accumulation * self.share.ranks
        micro_batches = itertools.islice(self.micro_batches, self.begin * size, None)
        self.number = self.length
        begin = self.begin * size
        for before in itertools.count(begin, size):
            step = list(itertools.islice(micro_batches, size))
            self.first_step = self.first_step or step
            if before == begin:  # each epoch may be shuffled by a generator of the rank's own
                self.share.ledger.drawn = digest_of(step)
                self.share.ledger.is_compared = False
            if len(step) < size:
                self.number = min(self.number, before + len(step))
            if not step:
                return
            self.check_sizes(step, before + size)
            filled = itertools.cycle(step)
            yield from itertools.islice(filled, self.share.rank, places, self.share.ranks)

    def check_sizes(self, step, end):
        """Raises ValueError, on all ranks, unless a step's micro-batches have the named size; an
        epoch's last one may be smaller. end: the number of the micro-batch after the step."""
        batch, named = self.share.batch, self.share.micro_batch
        sizes = [*map(len, step)]
        if end >= self.length or self.length == math.inf:
            sizes[-1] = max(sizes[-1], named)
        if {*sizes} != {named}:
            fitting = largest_divisor(batch, sizes[0])
            raise ValueError(
                f"the DataLoader deals {sizes[0]} at once, and the config's micro-batch is "
                f"{named}: set `batch_size={named}`; or name `batches.config({batch}, {fitting})`, "
                f"in a Trainer with `per_device_train_batch_size={fitting}` (if it packs samples "
                f"into a row: a micro-batch of 1, and rows that are {named} times as long)"
            )


def digest_of(step: list) -> str:
    """What tells a step's samples from others. Floats, which a stream may draw anew on each rank,
    count only where there is nothing else; the digest then begins with FLOATS."""
    digests = {True: hashlib.sha256(), False: hashlib.sha256()}
    is_exact = False
    for leaf in tree_leaves(step):
        if isinstance(leaf, numpy.ndarray | numpy.generic) and leaf.dtype.kind in "biufc":
            leaf = torch.as_tensor(leaf)
        data = repr(leaf).encode()
        is_float = not isinstance(leaf, int | str | bytes)
        if torch.is_tensor(leaf):
            is_float = leaf.is_floating_point() or leaf.is_complex()
            data = leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        digests[is_float].update(data)
        is_exact |= not is_float
    return ("" if is_exact else batches.FLOATS) + digests[not is_exact].hexdigest()


def fill_steps(
    loader: data.DataLoader, share: batches.Share, stream: data.IterableDataset | None = None
) -> PaddedBatchSampler:
    """Let accelerate's DataLoader deal the same samples in each step, on any number of ranks.

    loader: from prepare(); for a stream, with IndexIsSample() as its data set. Raises ValueError if
    what it deals would depend on the number of ranks, or on when they start.
    """
    sampler = loader.batch_sampler  # of this rank, around that of all; on a single rank that alone
    global_sampler = getattr(sampler, "batch_sampler", sampler)
    order = getattr(global_sampler, "sampler", None)
    refusals = {
        "a stream goes on in AnyRanks only: use a data set with a length": isinstance(
            loader.dataset, data.IterableDataset
        ),
        "split_batches=True makes a rank's samples depend on the number of ranks: leave it out": (
            getattr(sampler, "split_batches", False)
        ),
        "not all ranks read the same DataLoader: leave out dispatch_batches, batch_rebalance and "
        "use_stateful_dataloader": (getattr(sampler, "num_processes", 1) != share.ranks),
        "a DistributedSampler gives each rank a part, which would be split again: leave it out": (
            getattr(order, "num_replicas", 1) > 1
        ),
        # LengthGroupedSampler also draws by the accumulation steps.
        "this DataLoader shuffles anew at every start, so a resumed run would see other samples: "
        "set use_seedable_sampler=True, leave out group_by_length, or give your sampler a "
        "set_epoch()": hasattr(order, "generator") and not hasattr(order, "set_epoch"),
    }
    for text, is_so in refusals.items():
        if is_so:
            raise ValueError(text)
    if stream is None:
        filled_steps = PaddedBatchSampler(global_sampler, share, len(global_sampler))
    else:
        streamed = data.BatchSampler(stream, share.micro_batch, global_sampler.drop_last)
        filled_steps = PaddedBatchSampler(streamed, share, math.inf)
    # torch allows no other one after __init__(), as a loader that has begun would not see it.
    object.__setattr__(loader.base_dataloader, "batch_sampler", filled_steps)
    return filled_steps


def without_samples(inputs: Any) -> Any:
    """What Trainer sees of a micro-batch that is computed again: tensors of no samples, to count
    none."""
    if not isinstance(inputs, Mapping):
        return []
    return {key: value[:0] if getattr(value, "ndim", 0) else value for key, value in inputs.items()}


def gather_rows(gather: Callable, tensors: Any) -> Any:
    """Gather tensors [rows, ...] of which ranks have unequal numbers of rows, by a gather() that
    wants equal ones: an epoch's last micro-batch may be smaller than the others' of its step."""

    def gather_one(tensor):
        if not tensor.ndim:
            return gather(tensor)
        rows = gather(torch.tensor([len(tensor)], device=tensor.device)).tolist()
        padded = tensor.new_zeros(max(rows), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        parts = gather(padded).split(max(rows) or 1)
        return torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)])

    return tree_map_only(torch.Tensor, gather_one, tensors)


class AnyRanks:
    """A base class that keeps Trainer's batch; it comes before Trainer.

    Its methods raise ValueError where the batch would not be kept, and say what to change.
    """

    def __new__(cls, *args: Any, **options: Any):  # Trainer's __init__() keeps its signature
        version = sys.modules["transformers"].__version__
        if tuple(map(int, version.split(".")[:2])) < (4, 55):
            raise ValueError(
                f"AnyRanks wants transformers 4.55 or newer: {version} divides a mean loss by the "
                "accumulation steps, whatever AnyRanks sets"
            )
        return super().__new__(cls)

    def named_config(self) -> dict[str, Any]:
        """DeepSpeed's config. Raises ValueError if there is none that names a batch."""
        plugin = self.accelerator.state.deepspeed_plugin
        if not plugin:
            kind = self.accelerator.distributed_type.value
            raise ValueError(
                f"accelerate trains without DeepSpeed here ({kind}), whose batch AnyRanks keeps: "
                "set `TrainingArguments(deepspeed=config)`, or start by `accelerate launch "
                "--use_deepspeed`; on a CPU with `TrainingArguments(use_cpu=True)`, but without "
                "ACCELERATE_USE_CPU and --cpu"
            )
        config = plugin.deepspeed_config
        ranks = self.args.world_size
        parallelism = getattr(self.accelerator, "parallelism_config", None)
        sharers = getattr(parallelism, "sp_size", 1)
        if sharers > 1:
            raise ValueError(
                f"AnyRanks deals no sequences that {sharers} ranks share (sp_size): leave it and "
                "UNIVERSAL_BATCH out, and choose gradient_accumulation_steps so that with "
                f"per_device_train_batch_size and {ranks // sharers} data-parallel ranks they make "
                "up the batch"
            )
        if batches.TRUE_BATCH not in config:
            micro_batch = self.args.per_device_train_batch_size
            batch = micro_batch * self.args.gradient_accumulation_steps * ranks
            raise ValueError(
                "AnyRanks keeps the batch that DeepSpeed's config names: put `UNIVERSAL_BATCH="
                "BATCH python -m universal` before the command, or `config |= batches.config("
                f"BATCH, {micro_batch})`, `TrainingArguments(deepspeed=config, "
                f"per_device_train_batch_size={micro_batch}, gradient_accumulation_steps="
                'config["gradient_accumulation_steps"], ...)`. BATCH is what the run had that goes '
                f"on (`python -m universal.inspect` prints it); a new one would have {batch} now"
            )
        return config

    def batch_share(self) -> batches.Share:
        """This rank's part of every step."""
        config = self.named_config()
        ranks, rank = self.args.world_size, self.args.process_index
        batch, micro_batch = config[batches.TRUE_BATCH], config["train_micro_batch_size_per_gpu"]
        share = batches.Share(batch, micro_batch, ranks, rank)
        wanted = {
            "gradient_accumulation_steps": share.accumulation,
            "ignore_data_skip": False,
        }
        if ranks > 1:  # on one, transformers before 4.57 sets it to False
            wanted["average_tokens_across_devices"] = True
        for name, value in wanted.items():
            if getattr(self.args, name) != value:
                raise ValueError(
                    f"TrainingArguments has {name}={getattr(self.args, name)}: a batch of {batch} "
                    f"in micro-batches of {micro_batch} on {ranks} ranks wants {name}={value}"
                )
        return share

    def get_train_dataloader(self) -> data.DataLoader:
        dataset = self.train_dataset
        stream = dataset if isinstance(dataset, data.IterableDataset) else None
        if stream is not None:
            self.train_dataset = IndexIsSample()
        loader = super().get_train_dataloader()
        self.train_dataset = dataset
        self.filled_steps = fill_steps(loader, self.batch_share(), stream)
        self.epoch_iterator = None
        self.step_weights = []
        self.loss_kind = None
        self.groups_before_load = []
        self.check_loss()
        return loader

    def check_loss(self):
        """Raises ValueError if a loss depends on what other ranks compute at the same moment."""
        if getattr(self, "calculate_KL", False) and not hasattr(self, "step_kl"):  # TRL's KTO
            raise ValueError(
                "the loss of KTOTrainer takes the KL of the micro-batches that all ranks have at "
                "the same moment, and other ranks have others: set "
                "loss_type='apo_zero_unpaired', or put universal.rollouts.AnyRanksKTO in front "
                "(TRL 1.16). With LLaMA-Factory, leave UNIVERSAL_BATCH out, and keep ranks x "
                "per_device_train_batch_size, and gradient_accumulation_steps, as they were"
            )
        if type(getattr(self, "running", None)).__name__ == "RunningMoments":  # TRL's, for BCO
            raise ValueError(
                "the loss of BCO subtracts a mean of the rewards that all ranks have had until "
                "then: leave loss_type='bco_pair' or, with LLaMA-Factory, pref_bco_weight out"
            )
        losses = tree_leaves(getattr(self, "loss", None))  # sentence-transformers', one or a dict
        parts = [part for loss in losses for part in getattr(loss, "modules", list)()]
        if any(getattr(part, "gather_across_devices", False) for part in parts):
            raise ValueError(
                "with gather_across_devices=True a loss takes its negatives from all ranks, and "
                "other ranks have others: set it to False, with larger micro-batches"
            )

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None, *args: Any) -> Any:
        schedule = super().create_scheduler(num_training_steps, optimizer, *args)
        groups = (optimizer or self.optimizer).param_groups
        getattr(self, "groups_before_load", []).append([*map(dict, groups)])
        return schedule

    def get_total_train_batch_size(self, args: Any) -> int:
        return self.batch_share().batch

    def begin_training(self):
        """Set the first epoch and step to deal, once the engine may have loaded a checkpoint."""
        filled_steps = self.filled_steps
        share = batches.share(self.model_wrapped)
        filled_steps.share = dataclasses.replace(filled_steps.share, ledger=share.ledger)
        trained = self.state.global_step
        saved = self.state.stateful_callbacks  # what trainer_state.json has room for
        if filled_steps.length < math.inf:
            filled_steps.epoch, self.epoch_step = divmod(trained, filled_steps.per_epoch)
            is_short = filled_steps.length % share.micro_batches
            # If the last step of Trainer's own epoch is short, the two are less than 1 apart.
            if trained and abs(self.state.epoch * filled_steps.per_epoch - trained) >= 1:
                say(
                    f"WARNING: an epoch had {trained / self.state.epoch:.6g} steps, and has "
                    f"{filled_steps.per_epoch} now: some samples come twice, others not at all. "
                    "Use the old data set and batch; with dataloader_drop_last, Trainer alone has "
                    "the old number only on the old number of ranks"
                )
            elif trained and is_short and AnyRanks.__name__ not in saved:
                say(
                    "NOTE: the checkpoint does not name AnyRanks: an epoch's last step is short "
                    "here, and Trainer may fill it up with other samples, which change its loss"
                )
        else:
            position = saved.get(AnyRanks.__name__, None if trained else (0, 0))
            if not position:
                raise ValueError(
                    "the checkpoint does not say how far its run has read the stream: write "
                    f'"{AnyRanks.__name__}": [epoch, steps of this epoch that were trained], both '
                    "from 0, among the stateful_callbacks of its trainer_state.json"
                )
            filled_steps.epoch, filled_steps.begin = position
            filled_steps.skipped = trained % self.state.max_steps * share.accumulation
            self.epoch_step = filled_steps.begin
        self.say_new_rate()
        if trained:
            self.say_kept()

    def say_kept(self):
        """Print a line if the checkpoint has replaced what the arguments say, or they what it has
        kept."""
        for group, before in enumerate(zip(*self.groups_before_load, strict=True)):
            now = self.model_wrapped.optimizer.param_groups[group]
            for name, said in (("learning_rate", "initial_lr"), ("weight_decay", "weight_decay")):
                wanted = before[0].get(said)
                if now.get(said, wanted) != wanted:
                    say(
                        f"NOTE: {name} of group {group} stays {now[said]:.6g}, as it was saved: "
                        f"{wanted:.6g} is not taken"
                    )
        if self.args.restore_callback_states_from_checkpoint:
            return
        saved = self.state.stateful_callbacks
        for callback in self.callback_handler.callbacks:
            name = type(callback).__name__
            if name in saved and hasattr(callback, "state") and callback.state() != saved[name]:
                say(
                    f"NOTE: {name} begins anew: restore_callback_states_from_checkpoint=True lets "
                    "it go on"
                )

    def say_new_rate(self):
        """Print a line if Trainer has made the schedule for another number of steps than before."""
        schedule = self.lr_scheduler
        step = self.state.global_step
        if not step or not hasattr(schedule, "lr_lambdas"):
            return
        count, (rate, *_) = schedule.last_epoch, schedule.get_last_lr()
        rates = [schedule.base_lrs[0] * schedule.lr_lambdas[0](n) for n in (count, count + 1)]
        if not math.isclose(rate, rates[0], rel_tol=1e-9):
            say(
                f"NOTE: the schedule of the learning rate is another one: step {step + 1} has "
                f"{rate:.1e}, as it was saved, and step {step + 2} has {rates[1]:.1e}"
            )

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: Any) -> tuple:
        """A step's micro-batches of this rank, and what Trainer counts as num_items_in_batch."""
        kind = type(self).__name__
        if not hasattr(self, "filled_steps"):
            raise ValueError(
                f"{kind}.get_train_dataloader() does not call Trainer's, whose samples AnyRanks "
                f"deals: {BY_HAND}"
            )
        if self.step_weights:
            raise ValueError(f"{kind}.training_step() does not call AnyRanks': {BY_HAND}")
        filled_steps = self.filled_steps
        is_first = self.epoch_iterator is None
        if is_first:
            self.begin_training()
        elif epoch_iterator is not self.epoch_iterator():
            filled_steps.epoch += 1
            filled_steps.begin = filled_steps.skipped = self.epoch_step = 0
        self.epoch_iterator = weakref.ref(epoch_iterator)  # or else its workers would not end
        samples, number = super().get_batch_samples(epoch_iterator, num_batches, device)
        if is_first:
            if not filled_steps.first_step:
                raise ValueError("the stream ends before the place where the checkpoint's run was")
            self.training_step = functools.partial(train_whole, self.training_step, self)
        if not samples:  # before 5.3, transformers asks for as many as it has skipped, too
            return samples, number
        self.step_weights = filled_steps.weights(self.epoch_step)
        self.step_count = filled_steps.count(self.epoch_step)
        self.epoch_step += 1
        self.is_last = filled_steps.number <= self.epoch_step * filled_steps.share.micro_batches
        next_epoch = (filled_steps.epoch + 1, 0)
        position = next_epoch if self.is_last else (filled_steps.epoch, self.epoch_step)
        self.state.stateful_callbacks[AnyRanks.__name__] = position
        if len(samples) != len(self.step_weights):
            raise ValueError(f"{kind}.get_batch_samples() changes the number of micro-batches")
        self.whole = {}
        samples = self.prepare_step(samples)
        if self.step_count < len(samples) * self.args.world_size:
            samples, number = self.without_repeats(samples, number, device)
        return samples, number

    def prepare_step(self, samples: list) -> list:
        """What a step's micro-batches of this rank become before the first of them is trained."""
        return samples

    def without_repeats(self, samples, number, device):
        """The same without samples where the weight is 0, and their num_items_in_batch."""
        name = "get_batch_samples"
        owners = [base for base in type(self).__mro__ if name in vars(base)]
        trainer = next(base for base in owners if base.__module__.startswith("transformers."))

        def count(counted):
            return trainer.get_batch_samples(self, iter(counted), len(counted), device)[1]

        if number is not None and len(owners) > 2 and count(samples) != number:
            raise ValueError(
                f"{owners[0].__name__}.{name}() counts {NUMBER} in a way of its own: AnyRanks can "
                "only leave out what Trainer counts"
            )
        pairs = zip(samples, self.step_weights, strict=True)
        seen = [sample if weight else without_samples(sample) for sample, weight in pairs]
        self.whole = {id(empty): sample for empty, sample in zip(seen, samples, strict=True)}
        return seen, count(seen)

    def training_step(self, model: Any, inputs: dict, *args: Any, **options: Any) -> torch.Tensor:
        if not self.step_weights:
            kind = type(self).__name__
            raise ValueError(f"{kind}.get_batch_samples() does not call Trainer's: {BY_HAND}")
        compute_loss = self.compute_loss
        self.is_weighted = False
        # All of it has the weight: what a class in front of AnyRanks adds to super()'s, too.
        self.compute_loss = functools.partial(self.weigh, compute_loss, self.step_weights.pop(0))
        try:
            loss = super().training_step(model, inputs, *args, **options)
        finally:
            self.compute_loss = compute_loss
        if not self.is_weighted:
            kind = type(self).__name__
            raise ValueError(f"{kind}.training_step() does not call compute_loss(): {BY_HAND}")
        return loss

    def weigh(self, compute_loss, weight, model, *args, **options):
        """Returns what compute_loss() does, multiplied by what a step's loss of all ranks wants.

        DeepSpeed takes the mean of all ranks, and adds the micro-batches of each. So a mean of a
        micro-batch is divided by their number, over the ranks; a sum over num_items_in_batch is
        multiplied by the ranks already.
        """
        self.is_weighted = True
        divisor = self.step_count / self.args.world_size
        # Trainers divide by this what is a mean of a micro-batch in a loss that else is none.
        self.current_gradient_accumulation_steps = divisor
        kind = self.loss_kind or kind_of_loss(self, compute_loss, model, args, options)
        self.loss_kind = kind
        takes_mean, routers = kind or LossKind(takes_mean=False)  # of a loss of 0
        if takes_mean and NUMBER in options:
            options[NUMBER] = None
        gather = self.accelerator.gather
        if self.is_last:
            gather = functools.partial(gather_rows, gather)
        with (
            overridden(self.accelerator, gather=gather),
            times_router_loss(routers, 1 / self.step_count),
        ):
            result = compute_loss(model, *args, **options)
        # By this Trainer divides what its version takes for mean losses.
        self.current_gradient_accumulation_steps = 1
        weight = bool(weight) / (divisor if takes_mean else 1)
        return (result[0] * weight, *result[1:]) if isinstance(result, tuple) else result * weight


def train_whole(training_step: Callable, trainer: AnyRanks, model: Any, inputs: Any, *args: Any):
    """A training_step() with the samples of a micro-batch that is computed again."""
    return training_step(model, trainer.whole.pop(id(inputs), inputs), *args)


def on_any_ranks(trainer: type) -> type:
    """Returns a class of the same name with AnyRanks before Trainer."""
    if issubclass(trainer, AnyRanks):
        return trainer
    return type(trainer.__name__, (AnyRanks, trainer), {"__module__": trainer.__module__})


def batch_config(batch: str, arguments: Any) -> dict[str, Any]:
    """DeepSpeed's config of a batch, for these TrainingArguments. Raises ValueError."""
    if not batch.isdecimal() or not int(batch):
        raise ValueError(f"UNIVERSAL_BATCH={batch} is no number of samples")
    return batches.config(int(batch), arguments.per_device_train_batch_size, arguments.world_size)
