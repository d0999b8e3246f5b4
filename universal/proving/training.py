# SPDX-License-Identifier: MIT
"""The parts of a DeepSpeed engine that proof.py reads in each step."""

from typing import Any

import torch
import torch.distributed as dist

from universal.load.engine import Engine


class TrainingEngine(Engine):
    """An Engine with what proof.py asks about a step, from DeepSpeed's private attributes."""

    @property
    def device(self) -> torch.device:
        return self.engine.device

    def settings_of_step(self) -> dict[str, Any]:
        """Returns {"rates": the learning rate of each parameter group, None if the optimizer
        chooses it; "loss_scale": 1 without loss scaling}.
        """
        scale = getattr(self.optimizer, "loss_scale", None)
        scale = scale or getattr(self.optimizer, "cur_scale", None) or 1
        rates = [None if rate is None else float(rate) for rate in self.engine.get_lr()]
        return {"rates": rates, "loss_scale": float(scale)}

    def grad_norm(self) -> torch.Tensor | float | None:
        """Returns the gradient norm of the last step; None where DeepSpeed does not compute it."""
        return self.engine.get_global_grad_norm()

    def dtypes(self) -> set[str]:
        """The dtypes of matrix products and of the communication of gradients, by the config."""
        communication = self.engine.communication_data_type
        products = torch.float32
        if getattr(self.engine, "torch_autocast_enabled", bool)():
            products = self.engine.torch_autocast_dtype()
        elif self.engine.bfloat16_enabled():
            products = torch.bfloat16
        elif self.engine.fp16_enabled():
            products = torch.float16
        return {str(dtype).removeprefix("torch.") for dtype in (products, communication)}

    def micro_batch(self) -> int:
        """Samples of a forward pass."""
        return self.engine.train_micro_batch_size_per_gpu()

    def stepping_group(self) -> dist.ProcessGroup | None:
        """The ranks that share out the batch; None for all ranks, in a pipeline."""
        return None if self.is_pipeline() else self.engine.seq_data_parallel_group

    def sees_samples(self) -> bool:
        """Whether the model's inputs are whole samples, and not an earlier stage's outputs."""
        is_first = not self.is_pipeline() or self.engine.is_first_stage()
        return is_first and self.engine.sequence_parallel_size == 1
