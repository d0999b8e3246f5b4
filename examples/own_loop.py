"""A training loop that meets the README's four conditions for any data-parallel training: copy
these functions.

    for step, loss in train(engine, dataset, steps=1000, folder="checkpoints", resume=True):
        ...

`dataset[i]` is a tuple of tensors; the model takes a batch of each and returns its loss. train()
yields the mean loss of this rank's micro-batches: average it over the ranks before you print it.
"""

import torch

import universal


def micro_batch(dataset, size, m, count, step, seed):
    """Micro-batch m of a step, which has `count` micro-batches of `size` samples. Each epoch goes
    through the data set once, in its own order, and drops the samples at its end that do not fill a
    whole step."""
    epoch, step = divmod(step - 1, len(dataset) // (size * count))
    generator = torch.Generator().manual_seed(hash((seed, epoch)))
    order = torch.randperm(len(dataset), generator=generator)
    begin = (step * count + m) * size
    samples = [dataset[i] for i in order[begin : begin + size].tolist()]
    return torch.utils.data.default_collate(samples)


def train_step(engine, dataset, step, seed=0):
    """One optimizer step, counted from 1. Returns the mean loss of this rank's micro-batches."""
    accumulation = engine.gradient_accumulation_steps()
    size = engine.train_micro_batch_size_per_gpu()
    count = accumulation * engine.world_size
    total = 0.0
    for m in range(engine.global_rank * accumulation, (engine.global_rank + 1) * accumulation):
        torch.manual_seed(hash((seed, step, m)))  # for dropout, and whatever else the model draws
        inputs = micro_batch(dataset, size, m, count, step, seed)
        loss = engine(*(tensor.to(engine.device) for tensor in inputs))
        engine.backward(loss)  # divides by the accumulation steps
        engine.step()  # does nothing until the last of them
        total += loss.detach() / accumulation
    return total


def train(engine, dataset, steps, folder, resume, every=100, tag=None):
    done = universal.load_checkpoint(engine, folder, tag)[1]["step"] if resume else 0
    for step in range(done + 1, steps + 1):
        loss = train_step(engine, dataset, step)
        if step % every == 0:
            engine.save_checkpoint(folder, tag=f"global_step{step}", client_state={"step": step})
        yield step, loss
