"""A training loop that meets the README's four conditions for any data-parallel training: copy
these functions, and give DeepSpeed's config batches.config(batch, micro_batch).

    for step, loss in train(engine, dataset, steps=1000, folder="checkpoints", resume=True):
        ...

`dataset[i]` is a tuple of tensors; the model takes a batch of each and returns its loss. train()
yields this rank's part of the mean loss: average it over the ranks before you print it. If you give
DataLoader workers, what `dataset[i]` draws at random must follow i, not the worker.
"""

import torch
from torch.utils.data import DataLoader

import universal
from universal import batches


def samples_from(step, dataset, engine):
    """The samples of this rank's micro-batches, from this step on."""
    sampler = batches.Sampler(len(dataset), batches.share(engine))
    sampler.set_step(step)
    return iter(DataLoader(dataset, batch_sampler=sampler))


def train_step(engine, samples, step, seed=0):
    """One optimizer step, counted from 1. Returns this rank's part of the mean loss."""
    share = batches.share(engine)
    total = 0.0
    for m, weight in share:  # the number of each micro-batch, and the weight of its loss
        # For dropout, and whatever else the model draws.
        torch.manual_seed(batches.derive_seed(seed, step, m))
        loss = engine(*(tensor.to(engine.device) for tensor in next(samples)))
        engine.backward(weight * loss)  # divides by the accumulation steps
        engine.step()  # does nothing until the last of them
        total += weight * loss.detach() / share.accumulation
    return total


def train(engine, dataset, steps, folder, resume, every=100, tag=None):
    done = universal.load_checkpoint(engine, folder, tag)[1]["step"] if resume else 0
    samples = samples_from(done + 1, dataset, engine)
    for step in range(done + 1, steps + 1):
        loss = train_step(engine, samples, step)
        if step % every == 0:
            engine.save_checkpoint(folder, tag=f"global_step{step}", client_state={"step": step})
        yield step, loss
