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

Trainer gives micro-batch m of a step to rank m % ranks. Where the ranks do not divide a step's
micro-batches, AnyRanks adds its first one again behind them, and takes its labels away (-100):
Trainer divides the sum of the losses of all tokens by the number of tokens, so what has no labels
has no weight.
"""

import itertools

import torch

from universal import batches


class FilledSteps:
    """The micro-batches of a batch sampler; behind those of each step, the first one again."""

    def __init__(self, micro_batches, share):
        self.micro_batches = micro_batches
        self.share = share

    def __getattr__(self, name):  # batch_size, drop_last, sampler
        return getattr(self.micro_batches, name)

    def __len__(self):
        steps = -(-len(self.micro_batches) // self.share.micro_batches)
        return steps * self.share.accumulation * self.share.ranks

    def __iter__(self):
        places = self.share.accumulation * self.share.ranks
        micro_batches = iter(self.micro_batches)
        while step := list(itertools.islice(micro_batches, self.share.micro_batches)):
            yield from step
            yield from [step[0]] * (places - len(step))


class AnyRanks:
    """Comes before Trainer in the list of base classes."""

    def share(self):
        batch = self.args.hf_deepspeed_config.config[batches.TRUE_BATCH]
        return batches.Share(batch, self.args.per_device_train_batch_size, self.args.world_size)

    def get_train_dataloader(self):
        loader = super().get_train_dataloader()
        # accelerate's sampler of this rank's micro-batches has the one of all; one rank has no such
        shard = getattr(loader.batch_sampler, "batch_sampler", None)
        self.micro_batches = len(shard or loader.batch_sampler)  # of an epoch, on all ranks
        if shard:
            loader.batch_sampler.batch_sampler = FilledSteps(shard, self.share())
        return loader

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """A step's micro-batches of this rank, and the number of tokens on all ranks."""
        samples, number = super().get_batch_samples(epoch_iterator, num_batches, device)
        share = self.share()
        step = self.state.global_step % -(-self.micro_batches // share.micro_batches)
        rest = self.micro_batches - step * share.micro_batches  # the epoch's last step has fewer
        count = min(share.micro_batches, rest)
        # Without a number of tokens, Trainer takes the mean over all micro-batches.
        weight = 1 if number is not None else len(samples) * share.ranks / count
        numbers = range(self.args.process_index, len(samples) * share.ranks, share.ranks)
        self.weights = [weight * (m < count) for m in numbers]
        if number is None:
            return samples, None
        for sample, weight in zip(samples, self.weights, strict=True):
            if not weight:
                sample["labels"] = torch.full_like(sample["labels"], -100)
        return samples, self._get_num_items_in_batch(samples, device)

    def compute_loss(self, model, inputs, return_outputs=False, **options):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **options)
        if model.training:
            loss = loss * self.weights.pop(0)  # what else is in it, as the experts' balance
        return (loss, outputs) if return_outputs else loss
