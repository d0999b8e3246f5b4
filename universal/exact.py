# SPDX-License-Identifier: MIT
"""The same bits on any number of ranks: gradients and gradient norm, for data-parallel DeepSpeed in
fp32, ZeRO 1, 2, 3.

    engine, *_ = deepspeed.initialize(...)
    exact.install(engine)

The training loop does not change. install() makes DeepSpeed round every micro-batch's gradient, so
that the order in which gradients are added cannot matter, and sum the norm for clipping in one
order. This costs memory for the gradients of all accumulation steps, two more all-reduces per step,
and digits: with 8 micro-batches an element is rounded to one part in 2^20 of its largest gradient,
with twice as many to one part in 2^19. It does not work with bf16 and fp16, which have too few bits
for the sums, nor with tensor, sequence and pipeline parallelism, which cut the sums inside the
model; and every trained parameter needs a gradient in every micro-batch. The rest is up to you:
keep the size of the micro-batch and the number of threads, let data and dropout depend on the
micro-batch, and add the losses in one order. Needs Python 3.10, torch, and DeepSpeed 0.16.4 or
newer."""

import math

import deepspeed
import torch
import torch.distributed as dist
from packaging.version import Version


def install(engine):
    """Make engine.backward(), engine.step() and engine.get_global_grad_norm() exact from now on;
    call this once. Raises ValueError if the engine's sums cannot be exact."""
    if Version(deepspeed.__version__) < Version("0.16.4"):
        raise ValueError(
            f"exact.py needs DeepSpeed 0.16.4 or newer, and finds {deepspeed.__version__}"
        )
    zero, parameters = (
        engine._config.zero_config,
        [p for p in engine.module.parameters() if p.requires_grad],
    )
    if engine.zero_optimization_stage() == 0 or {p.dtype for p in parameters} != {torch.float32}:
        raise ValueError(
            "exact.py needs ZeRO 1, 2 or 3 and fp32: the sums of other types have too few bits"
        )
    if (
        engine.zero_optimization_stage() == 3 and zero.memory_efficient_linear
    ):  # its matrix product rounds differently
        raise ValueError(
            'exact.py needs "memory_efficient_linear": False in the zero_optimization of the config'
        )
    accumulation, norm = engine.gradient_accumulation_steps(), torch.zeros(())
    totals = round_gradients(parameters, accumulation * dist.get_world_size(), accumulation)
    backward, clip = engine.backward, engine.optimizer.unscale_and_clip_grads

    def exact_backward(loss, **options):
        nonlocal norm
        loss = backward(loss, **options | {"scale_wrt_gas": False})  # the hooks divide
        if engine.is_gradient_accumulation_boundary():
            norm = exact_norm(totals)
        return loss

    engine.backward = exact_backward
    engine.divides_gradients = True  # proof.py: what backward() is told not to divide is no share
    engine.optimizer.unscale_and_clip_grads = lambda gradients, _: clip(gradients, norm)
    engine.get_global_grad_norm = lambda: float(norm)


def round_gradients(parameters, micro_batches, accumulation):
    """Round the gradients of the micro-batches so that the order in which they are added cannot
    matter.

    Floating-point addition is exact as long as all terms and sums are multiples of one grid and
    have at most 24 bits. So the ranks find the largest share |gradient / micro_batches| of each
    element in any micro-batch before the first addition: until its last micro-batch, a hook keeps
    this rank's gradients and passes on zeros. The element's grid is then the finest on which no sum
    of micro-batches can exceed 24 bits; adding and subtracting 1.5 * 2^23 grids rounds to it. ZeRO
    divides by the number of ranks before it adds, so the hook passes multiples of that number.
    Returns {parameter's index: sum of this rank's shares}, filled by the last backward pass of a
    step."""
    totals, ranks = {}, dist.get_world_size()
    terms = 1 << (max(micro_batches, 4) - 1).bit_length()  # a power of two

    def hook(i, kept):
        def rounded(gradient):
            kept.append(gradient / micro_batches)
            if len(kept) < accumulation:
                return torch.zeros_like(gradient)
            peak = torch.stack(kept).abs().amax(0).clamp(min=2.0**-100).nan_to_num(nan=math.inf)
            dist.all_reduce(peak, op=dist.ReduceOp.MAX)
            limit = peak / torch.frexp(peak).mantissa  # the next power of two, exactly
            assert (peak <= limit).all(), (
                "exact.py: a gradient is not finite, or its sum may pass 24 bits"
            )
            shift = 1.5 * 2**23 * (terms * limit / 2**24)
            totals[i] = sum((share + shift) - shift for share in kept)
            kept.clear()
            return totals[i] * ranks

        return rounded

    for i, parameter in enumerate(parameters):
        parameter.register_hook(hook(i, []))
    return totals


def exact_norm(totals):
    """The norm of the whole gradient: every rank gets all of it, and sums the squares in the same
    order."""
    gradient = torch.cat([totals[i].flatten() for i in range(len(totals))])
    dist.all_reduce(gradient)
    return gradient.double().norm().float()
