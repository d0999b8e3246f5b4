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
micro-batch, and add the losses in one order.
"""

import math

import deepspeed
import torch
import torch.distributed as dist
from packaging.version import Version

from universal import batches
from universal.load.hooks import clip_by, has_efficient_linear


def install(engine: deepspeed.DeepSpeedEngine) -> None:
    """Make engine.backward(), engine.step() and engine.get_global_grad_norm() exact from now on;
    call this once. Raises ValueError if the engine's sums cannot be exact."""
    if Version(deepspeed.__version__) < Version("0.16.4"):
        raise ValueError(
            f"exact.py needs DeepSpeed 0.16.4 or newer, and finds {deepspeed.__version__}"
        )
    parameters = [p for p in engine.module.parameters() if p.requires_grad]
    stage = engine.zero_optimization_stage()
    if stage == 0 or {p.dtype for p in parameters} != {torch.float32}:
        raise ValueError(
            "exact.py needs ZeRO 1, 2 or 3 and fp32: the sums of other types have too few bits"
        )
    if stage == 3 and has_efficient_linear(engine):  # its matrix product rounds differently
        raise ValueError(
            'exact.py needs "memory_efficient_linear": False in the zero_optimization of the config'
        )
    share = batches.share(engine)
    if share.ranks > 2 * share.micro_batches:
        raise ValueError(
            f"exact.py takes 2 ranks for a micro-batch at most, not {share.ranks} for "
            f"{share.micro_batches}"
        )
    if not divides_exactly(share.ranks, engine.device):
        raise ValueError(f"exact.py: {engine.device.type} does not divide by {share.ranks} exactly")
    sums = round_gradients(parameters, share.micro_batches, share.accumulation)
    norm = torch.zeros((), device=engine.device)
    backward = engine.backward

    def exact_backward(loss, **options):
        loss = backward(loss, **options | {"scale_wrt_gas": False})  # the hooks divide
        if engine.is_gradient_accumulation_boundary():
            norm.copy_(exact_norm(sums))
        return loss

    engine.backward = exact_backward
    # For batches.py and proof.py: the weight of a loss is 1 or 0, and the hooks take the mean.
    engine.divides_gradients = True
    clip_by(engine, norm)


def divides_exactly(ranks: int, device: torch.device) -> bool:
    """Whether dividing undoes a multiplication by the number of ranks: CUDA multiplies by the
    reciprocal in float32, which fails for 7, 13, 14, 15 and others."""
    numbers = torch.arange(2**16, 2**17, dtype=torch.float32, device=device)
    return torch.equal((numbers * ranks).div_(ranks), numbers)


def round_gradients(
    parameters: list[torch.nn.Parameter], micro_batches: int, accumulation: int
) -> list["RoundedSum"]:
    """Round the gradients of the micro-batches so that the order in which they are added cannot
    matter.

    Floating-point addition is exact as long as all terms and sums are multiples of one grid and
    have at most 24 bits. So the ranks find the largest share |gradient / micro_batches| of each
    element in any micro-batch before the first addition: until its last micro-batch, a hook keeps
    this rank's gradients and passes on zeros. ZeRO divides by the number of ranks before it adds,
    so the hook passes multiples of that number. The element's grid is then the finest on which
    these can have no more than 24 bits; adding and subtracting 1.5 * 2^23 grids rounds to it.
    Returns a RoundedSum for each parameter.
    """
    sums = [RoundedSum(micro_batches, accumulation) for _ in parameters]
    for parameter, rounded_sum in zip(parameters, sums, strict=True):
        parameter.register_hook(rounded_sum)
    return sums


class RoundedSum:
    """The hook of a parameter: takes the gradient of a micro-batch, and returns what DeepSpeed gets
    in its place.

    total: the sum of this rank's shares, after the last backward pass of a step.
    """

    def __init__(self, micro_batches: int, accumulation: int):
        self.micro_batches = micro_batches
        self.accumulation = accumulation
        self.shares = []
        self.total = None

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        self.shares.append(gradient / self.micro_batches)
        if len(self.shares) < self.accumulation:
            return torch.zeros_like(gradient)
        shift = self.shift()
        self.total = sum((share + shift) - shift for share in self.shares)
        self.shares.clear()
        return self.total * dist.get_world_size()

    def shift(self) -> torch.Tensor:
        """1.5 * 2^23 grids of each element."""
        peak = torch.stack(self.shares).abs().amax(0)
        peak = peak.clamp(min=2.0**-100).nan_to_num(nan=math.inf)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        limit = peak / torch.frexp(peak).mantissa  # the next power of two, exactly
        assert (peak <= limit).all(), (
            "exact.py: a gradient is not finite, or its sum may pass 24 bits"
        )
        # A power of two, twice the number of micro-batches: a rank's sum times the number of ranks
        # may be almost that, as of 2 of 8 micro-batches on each of 7 ranks.
        terms = 2 << (max(self.micro_batches, 2) - 1).bit_length()
        return 1.5 * 2**23 * (terms * limit / 2**24)


def exact_norm(sums: list[RoundedSum]) -> torch.Tensor:
    """The norm of the whole gradient: every rank gets all of it, and sums the squares in the same
    order."""
    gradient = torch.cat([rounded_sum.total.flatten() for rounded_sum in sums])
    dist.all_reduce(gradient)
    return gradient.double().norm().float()
