"""What it is worth, and what it costs, to add the micro-batches' gradients of a bf16 run in fp32: a
GPT on 2 ranks.

    python -m measure.sums

The gradient of a step, off by a relative distance from that whose micro-batches are added in
float64, of 8, 32 and 128 micro-batches on each rank; and the bytes of all tensors of a rank before
the last micro-batch of the first step, for each parameter.
"""

import gc
import tempfile

import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad

from tests.support import toy
from tests.support.ranks import run
from train import GPT

COUNTS = (8, 32, 128)
MICRO, LAYERS, HEADS, WIDTH, TOKENS = 1, 2, 4, 64, 16
BUCKET = 1 << 12  # elements: less than the parameters, or the bucket would be most of the memory


def model_of():
    torch.manual_seed(1)
    return GPT(LAYERS, HEADS, WIDTH, TOKENS, 0.0).bfloat16()


def micro_batch(m):
    generator = torch.Generator().manual_seed(m)
    tokens = torch.randint(0, 256, (MICRO, TOKENS + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def right_gradient(count):
    """The mean over this many micro-batches, in float64, on one rank."""
    model = model_of()
    total = 0
    for m in range(count):
        gradients = torch.autograd.grad(model(*micro_batch(m)), [*model.parameters()])
        total += torch.cat([gradient.flatten().double() for gradient in gradients])
    return total / count


def bytes_of_tensors():
    gc.collect()
    tensors = [item for item in gc.get_objects() if isinstance(item, torch.Tensor)]
    tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def measure(stage, dtype):
    """Prints a line of the table."""
    toy.begin()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    cells = []
    for count in COUNTS:
        config = {"batch": None, "micro": MICRO, "gradient_accumulation_steps": count}
        config |= {"zero": {"reduce_bucket_size": BUCKET}, **toy.BF16}
        config["data_types"] = {"grad_accum_dtype": dtype}
        engine = toy.make(stage, model_of, toy.TORCH_ADAMW, **config)
        for m in range(rank * count, (rank + 1) * count):
            if count == COUNTS[0] and m == rank * count + count - 1:  # engines leave some behind
                nbytes = bytes_of_tensors()
            engine.backward(engine(*micro_batch(m)))
            if m < (rank + 1) * count - 1:
                engine.step()
        gradient = torch.cat([safe_get_full_grad(p).flatten() for p in engine.module.parameters()])
        if rank == 0:
            right = right_gradient(ranks * count)
            cells.append(f"{(gradient.double() - right).norm() / right.norm():>9.2%}")
    if rank == 0:
        print(f"ZeRO-{stage}, {dtype:<8}{''.join(cells)}{nbytes / len(gradient):>9.1f}")


def main():
    print(f"{'added in':<16}{''.join(f'{count:>9}' for count in COUNTS)}{'bytes':>9}")
    for stage in (1, 2, 3):
        for dtype in ("bf16", "fp32"):
            with tempfile.TemporaryDirectory() as folder:
                print(run(folder, 2, measure, stage, dtype, limit=1800).splitlines()[-1])


if __name__ == "__main__":
    main()
