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
the ranks do not divide a step's micro-batches, the first ones follow once more, with a loss of
weight 0, so that every rank has as many; so, too, in an epoch's last step, which has those that are
left.

fill_steps() does it for a loop over accelerate's DataLoader, as in examples/accelerate_loop.py.
"""

import itertools
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from universal import batches
from universal.load.collective import say

NUMBER = "num_items_in_batch"


class FilledSteps:
    """A batch sampler: this rank's micro-batches of an epoch, as many in each step.

    micro_batches: those of all ranks, without repeats.
    """

    def __init__(self, micro_batches: Iterable[list[int]], share: batches.Share):
        self.micro_batches = micro_batches
        self.share = share
        self.epoch = None  # to set: accelerate before 1.15 has epoch 0 where it skips

    def __getattr__(self, name):  # accelerate and Trainer set the epoch of its sampler
        return getattr(self.micro_batches, name)

    @property
    def per_epoch(self) -> int:
        """Steps of an epoch."""
        return -(-len(self.micro_batches) // self.share.micro_batches)

    def count(self, step: int) -> int:
        """Micro-batches of a step, on all ranks. step: of the epoch, from 0."""
        before = step * self.share.micro_batches
        return min(self.share.micro_batches, len(self.micro_batches) - before)

    def weights(self, step: int) -> list[float]:
        """Of the losses of this rank's micro-batches of a step, if DeepSpeed takes their mean."""
        count = self.count(step)
        places = self.share.accumulation * self.share.ranks
        numbers = range(self.share.rank, places, self.share.ranks)
        return [places / count if number < count else 0.0 for number in numbers]

    def __len__(self):
        return self.per_epoch * self.share.accumulation

    def __iter__(self) -> Iterator[list[int]]:
        sampler = getattr(self.micro_batches, "sampler", None)
        if self.epoch is not None and hasattr(sampler, "set_epoch"):
            sampler.set_epoch(self.epoch)
        micro_batches = iter(self.micro_batches)
        places = self.share.accumulation * self.share.ranks
        while step := list(itertools.islice(micro_batches, self.share.micro_batches)):
            filled = itertools.cycle(step)
            yield from itertools.islice(filled, self.share.rank, places, self.share.ranks)


def fill_steps(loader: torch.utils.data.DataLoader, share: batches.Share) -> FilledSteps:
    """Let accelerate's DataLoader deal the same samples in each step, on any number of ranks.

    loader: prepared. Raises ValueError if what it deals depends on the number of ranks.
    """
    sampler = loader.batch_sampler  # of this rank, around that of all; on a single rank that alone
    whole = getattr(sampler, "batch_sampler", sampler)
    deals = getattr(sampler, "num_processes", 1) == share.ranks
    is_iterable = isinstance(loader.dataset, torch.utils.data.IterableDataset)
    if is_iterable or not deals or getattr(sampler, "split_batches", False):
        raise ValueError(
            "only micro-batches that accelerate deals, each as a whole, are the same on any number "
            "of ranks: no IterableDataset, dispatch_batches, split_batches or batch_rebalance"
        )
    if type(getattr(whole, "sampler", None)).__name__ == "LengthGroupedSampler":
        raise ValueError(
            "group_by_length orders the samples by the number of accumulation steps, which another "
            "number of ranks changes: leave it out, or group them beforehand"
        )
    filled_steps = FilledSteps(whole, share)
    # torch allows no other one after __init__(), as a loader that has begun would not see it.
    object.__setattr__(loader.base_dataloader, "batch_sampler", filled_steps)
    return filled_steps


def emptied(inputs):
    """A micro-batch of no samples."""
    return {
        name: value[:0] if getattr(value, "ndim", 0) else value for name, value in inputs.items()
    }


class AnyRanks:
    """Comes before Trainer in the list of base classes.

    Its methods raise ValueError where the batch would not be kept, and say what to change.
    """

    def __new__(cls, *args: Any, **options: Any):  # Trainer's __init__() keeps its signature
        version = sys.modules["transformers"].__version__
        if tuple(map(int, version.split(".")[:2])) < (4, 55):
            raise ValueError(
                f"AnyRanks wants transformers 4.55 or newer: {version} divides a mean loss by the "
                "accumulation steps, whatever AnyRanks sets"
            )
        for name in ("get_train_dataloader", "get_batch_samples"):
            for base in cls.__mro__:
                package = base.__module__.partition(".")[0]
                if name in vars(base) and package not in ("transformers", "universal"):
                    raise ValueError(
                        f"{base.__module__}.{base.__name__} has a {name}() of its own: AnyRanks "
                        "can keep the batch of Trainer's alone"
                    )
        return super().__new__(cls)

    def batch_share(self) -> batches.Share:
        """This rank's part of every step."""
        plugin = self.accelerator.state.deepspeed_plugin
        config = plugin.deepspeed_config if plugin else {}
        if batches.TRUE_BATCH not in config:
            raise ValueError(
                "AnyRanks keeps the batch that DeepSpeed's config names: "
                "TrainingArguments(deepspeed={**batches.config(batch, micro_batch), ...})"
            )
        batch, micro_batch = config[batches.TRUE_BATCH], config["train_micro_batch_size_per_gpu"]
        ranks, rank = self.args.world_size, self.args.process_index
        share = batches.Share(batch, micro_batch, ranks, rank)
        wanted = {
            "per_device_train_batch_size": micro_batch,
            "gradient_accumulation_steps": share.accumulation,
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

    def get_train_dataloader(self) -> torch.utils.data.DataLoader:
        loader = super().get_train_dataloader()
        self.filled_steps = fill_steps(loader, self.batch_share())
        self.epoch_iterator = None
        self.step_weights = []
        return loader

    def get_total_train_batch_size(self, args: Any) -> int:
        return self.filled_steps.share.batch

    def begin_training(self):
        """The engine has been made, and may have loaded a checkpoint."""
        share = batches.share(self.model_wrapped)
        samples = len(self.train_dataset)
        saved = self.state.stateful_callbacks  # what trainer_state.json has room for
        if self.state.global_step and AnyRanks.__name__ not in saved and samples % share.batch:
            say(
                f"WARNING: the checkpoint was saved without AnyRanks, and {samples} samples are no "
                f"multiple of the batch, {share.batch}: the last step of each epoch, which was "
                "filled up then, has other samples than it would have had"
            )
        saved[AnyRanks.__name__] = {}

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: Any) -> tuple:
        """A step's micro-batches of this rank, and the number of tokens on all ranks."""
        if self.step_weights:
            raise ValueError(f"{type(self).__name__}.training_step() does not call AnyRanks'")
        filled_steps = self.filled_steps
        if self.epoch_iterator is None:
            self.begin_training()
            trained = divmod(self.state.global_step, filled_steps.per_epoch)
            filled_steps.epoch, self.epoch_step = trained
            # Trainer skips those of the epoch that the checkpoint's run has trained.
            if self.args.ignore_data_skip:
                self.epoch_step = 0
        elif epoch_iterator is not self.epoch_iterator():
            filled_steps.epoch += 1
            self.epoch_step = 0
        self.epoch_iterator = weakref.ref(epoch_iterator)  # or else its workers would not end
        samples, number = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not samples:  # before 5.3, transformers asks for as many as it has skipped, too
            return samples, number
        self.step_weights = filled_steps.weights(self.epoch_step)
        self.step_count = filled_steps.count(self.epoch_step)
        self.epoch_step += 1
        if number is not None and self.step_count < len(samples) * self.args.world_size:
            pairs = zip(samples, self.step_weights, strict=True)
            counted = [sample if weight else emptied(sample) for sample, weight in pairs]
            _, number = super().get_batch_samples(iter(counted), num_batches, device)
        return samples, number

    def training_step(self, model: Any, inputs: dict, *args: Any, **options: Any) -> torch.Tensor:
        self.loss_weight = self.step_weights.pop(0)
        self.is_weighted = False
        # What to divide a loss by that no number of tokens has divided, before the mean over the
        # ranks.
        self.current_gradient_accumulation_steps = self.step_count / self.args.world_size
        loss = super().training_step(model, inputs, *args, **options)
        if not self.is_weighted:
            raise ValueError(
                f"{type(self).__name__}.compute_loss() does not call AnyRanks': give it to a class "
                "that comes behind AnyRanks among the base classes"
            )
        if not self.loss_weight:  # what Trainer counts next is not of the batch
            inputs.update(emptied(inputs))
        self.loss_weight = None
        return loss

    loss_weight = None  # of the micro-batch that training_step() has; None while it evaluates

    def compute_loss(self, model: Any, inputs: dict, *args: Any, **options: Any) -> Any:
        given = []  # to the model
        watch = model.register_forward_pre_hook(
            lambda _, inputs, named: given.extend(named), with_kwargs=True
        )
        result = super().compute_loss(model, inputs, *args, **options)
        watch.remove()
        if self.loss_weight is None:
            return result
        self.is_weighted = True
        is_scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if is_scaled is None:
            is_scaled = NUMBER in given or self.compute_loss_func is not None
            if not is_scaled and options.get(NUMBER) is not None:
                raise ValueError(
                    f"{type(self).__name__}.compute_loss() does not give {NUMBER} to the model: "
                    "set loss_is_scaled_for_ga in the class, to False if its loss is a mean, to "
                    "True if it is a sum divided by that number"
                )
        weight = bool(self.loss_weight) / (
            1 if is_scaled else self.current_gradient_accumulation_steps
        )
        # By this Trainer divides the losses that its version takes for means.
        self.current_gradient_accumulation_steps = 1
        return (result[0] * weight, *result[1:]) if isinstance(result, tuple) else result * weight


def on_any_ranks(trainer: type) -> type:
    """A Trainer of the same name."""
    if issubclass(trainer, AnyRanks):
        return trainer
    return type(trainer.__name__, (AnyRanks, trainer), {"__module__": trainer.__module__})


def batch_config(batch: str, arguments: Any) -> dict[str, Any]:
    """What DeepSpeed's config says of a batch, by TrainingArguments. Raises ValueError."""
    if not batch.isdecimal():
        raise ValueError(f"UNIVERSAL_BATCH={batch} is no number of samples")
    return batches.config(int(batch), arguments.per_device_train_batch_size, arguments.world_size)
