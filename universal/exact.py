# SPDX-License-Identifier: MIT
"""The same bits on any number of ranks: gradients and gradient norm, for data-parallel DeepSpeed in
fp32, ZeRO 1, 2, 3.

    engine, *_ = deepspeed.initialize(...)
    exact.install(engine)

The training loop does not change. install() makes DeepSpeed round every micro-batch's gradient, so
that the order in which gradients are added cannot matter, step by their exact sum, and sum the norm
for clipping in one order. This costs memory for the gradients of all accumulation steps, two more
all-reduces per step, and digits: with 8 micro-batches an element is rounded to one part in 2^21 of
its largest gradient, with twice as many to one part in 2^20. It does not work with bf16 and fp16,
which have too few bits for the sums, nor with tensor, sequence and pipeline parallelism, which cut
the sums inside the model; and every trained parameter needs a gradient in every micro-batch. The
rest is up to you: keep the size of the micro-batch and the number of threads, let data and dropout
depend on the micro-batch, and add the losses in one order.
"""

import math
from collections.abc import Collection

import deepspeed
import torch
import torch.distributed as dist
from packaging.version import Version

from universal import batches
from universal.load.engine import Engine
from universal.load.overrides import clip_by, is_within_a_step


def install(engine: deepspeed.DeepSpeedEngine) -> None:
    """Make engine.backward(), engine.step() and engine.get_global_grad_norm() exact from now on.
    Call it once. Raises ValueError if the engine's sums cannot be exact."""
    if Version(deepspeed.__version__) < Version("0.16.4"):
        raise ValueError(
            f"exact.py needs DeepSpeed 0.16.4 or newer, and finds {deepspeed.__version__}"
        )
    zero = Engine(engine)
    trained = trained_parameters(zero)
    batches.install()
    share = batches.named_share(engine)
    batches.check_gradient(engine, share)
    sums = round_gradients(trained, share.micro_batches, share.accumulation)
    norm = torch.zeros((), device=engine.device)
    backward = engine.backward

    def exact_backward(loss, *args, **options):
        now = batches.named_share(engine)
        if now.key != share.key:
            raise ValueError(
                f"exact.install() was called for a batch of {share.batch} in {share.accumulation} "
                f"accumulation steps, and it is {now.batch} in {now.accumulation} now: keep it, or "
                "make a new engine"
            )
        # A load may have cut a step short.
        if not (is_within_a_step(engine) or batches.ledger_of(engine).backwards):
            for rounded_sum in sums.values():
                rounded_sum.shares.clear()
        # The hooks divide.
        loss = backward(loss, *args[:1], **options | {"scale_wrt_gas": False})
        if all(rounded_sum.is_complete for rounded_sum in sums.values()):
            norm.copy_(add_up(sums.values()))
        return loss

    def fill():
        """Replace ZeRO's sums, which it has divided by the number of ranks, with the exact ones."""
        if not all(rounded_sum.is_added_up for rounded_sum in sums.values()):
            raise ValueError(
                "exact.py wants a gradient of every trained parameter in each of a step's "
                f"{share.accumulation} micro-batches, by engine.backward(loss)"
            )
        for flat in zero.flats:
            if flat.tensor.grad is not None:
                for fragment in flat.fragments:
                    total = sums[fragment.name].total[fragment.start :]
                    fragment.within(flat.tensor.grad).copy_(total[: fragment.numel])

    engine.backward = exact_backward
    # For batches.py and proof.py: the weight of a loss is 1 or 0, and the hooks take the mean.
    engine.divides_gradients = True
    clip_by(engine, norm, fill)


def trained_parameters(zero):
    """Returns {name: parameter}. Raises ValueError if their sums cannot be exact."""
    trained = {name: p for name, p in zero.parameters.items() if p.requires_grad}
    if zero.stage == 0 or {p.dtype for p in trained.values()} != {torch.float32}:
        raise ValueError(
            "exact.py needs ZeRO 1, 2 or 3 and fp32: the sums of other types have too few bits"
        )
    if zero.stage == 3 and zero.has_efficient_linear():  # its matrix product rounds differently
        raise ValueError(
            'exact.py needs "memory_efficient_linear": False in the zero_optimization of the config'
        )
    return trained


def round_gradients(
    parameters: dict[str, torch.nn.Parameter], micro_batches: int, accumulation: int
) -> dict[str, "RoundedSum"]:
    """Round the gradients of the micro-batches so that the order in which they are added cannot
    matter.

    Floating-point addition is exact as long as all terms and sums are multiples of one grid and
    have at most 24 bits. So the ranks find the largest share |gradient / micro_batches| of each
    element in any micro-batch before the first addition: until its last micro-batch, a hook keeps
    this rank's gradients and passes on zeros. The element's grid is then the finest on which the
    sum can have no more than 24 bits; adding and subtracting 1.5 * 2^23 grids rounds to it.
    Returns the RoundedSum of each parameter.
    """
    sums = {name: RoundedSum(micro_batches, accumulation) for name in parameters}
    for name in parameters:
        parameters[name].register_hook(sums[name])
    return sums


class RoundedSum:
    """The hook of a parameter: it replaces a micro-batch's gradient with what DeepSpeed is to add.

    total: the sum of this rank's shares, once is_complete, after the last backward pass of a step;
    once is_added_up that of all ranks, flat. DeepSpeed's mean is as good as that only where it
    divides exactly: CUDA multiplies by the reciprocal, in float32, which is off for 7, 13, 14, 15
    and other ranks.
    """

    def __init__(self, micro_batches: int, accumulation: int):
        self.micro_batches = micro_batches
        self.accumulation = accumulation
        self.shares = []
        self.total = None
        self.is_complete = False
        self.is_added_up = False

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        self.is_complete = self.is_added_up = False
        self.shares.append(gradient / self.micro_batches)
        if len(self.shares) < self.accumulation:
            return torch.zeros_like(gradient)
        shift = self.shift()
        self.total = sum((share + shift) - shift for share in self.shares)
        self.shares.clear()
        self.is_complete = True
        return self.total * dist.get_world_size()

    def shift(self) -> torch.Tensor:
        """Returns, for each element, 1.5 * 2^23 times its grid."""
        peak = torch.stack(self.shares).abs().amax(0)
        peak = peak.clamp(min=2.0**-100).nan_to_num(nan=math.inf, posinf=math.inf)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        limit = peak / torch.frexp(peak).mantissa  # the next power of two, exactly
        assert (peak <= limit).all(), (
            "exact.py: a gradient is not finite, or its sum may pass 24 bits"
        )
        # A power of two; of 4 at least the shift rounds each to the grid.
        terms = 1 << (max(self.micro_batches, 4) - 1).bit_length()
        return 1.5 * 2**23 * (terms * limit / 2**24)


def add_up(sums: Collection[RoundedSum]) -> torch.Tensor:
    """Sum each total over all ranks. Returns the norm of the whole gradient; each rank adds its
    squares in the same order."""
    gradient = torch.cat([rounded_sum.total.flatten() for rounded_sum in sums])
    dist.all_reduce(gradient)
    parts = gradient.split([rounded_sum.total.numel() for rounded_sum in sums])
    for rounded_sum, part in zip(sums, parts, strict=True):
        rounded_sum.total = part
        rounded_sum.is_complete = False
        rounded_sum.is_added_up = True
    return gradient.double().norm().float()
