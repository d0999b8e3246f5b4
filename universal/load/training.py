# SPDX-License-Identifier: MIT
"""A DeepSpeed engine as the proof of its next steps sees it."""

import functools
from typing import Any

import torch
import torch.distributed as dist

from universal.load.engine import Engine


class TrainingEngine(Engine):
    """What there is to know of a step, with DeepSpeed's private attributes."""

    @property
    def device(self) -> torch.device:
        return self.engine.device

    def settings_of_step(self) -> dict[str, Any]:
        """rates: the learning rate of each parameter group, None if the optimizer chooses it.

        loss_scale: 1 without loss scaling.
        """
        scale = getattr(self.optimizer, "loss_scale", None)
        scale = scale or getattr(self.optimizer, "cur_scale", None) or 1
        rates = [None if rate is None else float(rate) for rate in self.engine.get_lr()]
        return {"rates": rates, "loss_scale": float(scale)}

    def grad_norm(self) -> torch.Tensor | float | None:
        """Of the last step; None where DeepSpeed does not compute it."""
        return self.engine.get_global_grad_norm()

    @functools.cached_property
    def weights_dtype(self) -> torch.dtype:
        """The coarsest one of the model's weights."""
        dtypes = {weight.dtype for weight in self.module.parameters() if weight.is_floating_point()}
        return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)

    def matrix_dtype(self) -> str:
        """In which the model now computes matrix products: of its weights, or of an autocast."""
        dtype = self.weights_dtype
        device = self.device.type
        if getattr(self.engine, "torch_autocast_enabled", bool)():
            dtype = self.engine.torch_autocast_dtype()
        elif torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        if dtype == torch.float32:
            return precision_of_float32(device, self.products)
        return str(dtype).removeprefix("torch.")

    @functools.cached_property
    def products(self) -> list[str]:
        """The kinds of matrix products in the model, as torch.backends names them."""
        kinds = {"conv": torch.nn.modules.conv._ConvNd, "rnn": torch.nn.RNNBase}
        modules = [*self.module.modules()]
        present = [
            name for name, kind in kinds.items() if any(isinstance(m, kind) for m in modules)
        ]
        return ["matmul", *present]

    def micro_batch(self) -> int:
        """Samples of a forward pass."""
        return self.engine.train_micro_batch_size_per_gpu()

    def stepping_group(self) -> dist.ProcessGroup | None:
        """The ranks among which samples and losses are shared out; None: all, in a pipeline."""
        return None if self.is_pipeline() else self.engine.seq_data_parallel_group

    def sees_samples(self) -> bool:
        """Whether the model's inputs are whole samples, and not an earlier stage's outputs."""
        is_first = not self.is_pipeline() or self.engine.is_first_stage()
        return is_first and self.engine.sequence_parallel_size == 1


def precision_of_float32(device: str, products: list[str]) -> str:
    """In which a type of device computes these kinds of products of float32, as its user allows.

    A script may say it in two ways, of which torch lets one be read only if it is the one in use.
    """
    backends = torch.backends
    if device == "cuda":
        kinds = {"matmul": backends.cuda.matmul, "conv": backends.cudnn, "rnn": backends.cudnn}
    elif device == "cpu":
        kinds = dict.fromkeys(("matmul", "conv", "rnn"), backends.mkldnn)
    else:
        return "float32"
    precisions = set()
    for product in products:
        backend = kinds[product]
        backend = getattr(backend, product, backend)
        if hasattr(backend, "fp32_precision"):  # since torch 2.9
            precisions.add(backend.fp32_precision)
        elif getattr(backend, "allow_tf32", False):
            precisions.add("tf32")
    names = {"bf16": "bfloat16", "tf32": "tfloat32"}
    return next((name for short, name in names.items() if short in precisions), "float32")
