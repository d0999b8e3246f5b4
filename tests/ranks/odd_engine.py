"""Trains a model of odd parts and saves it at every stage, with and without elastic_checkpoint, each under a tag of
STAGES; beside it in truth <tag>.pt what rank 0 sees of the live engine. For test_convert_keeps.py.

    odd_engine.py
"""

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn

KINDS = {"complex": torch.complex64, "double_complex": torch.complex128, "float8": torch.float8_e4m3fn}
KINDS |= {"uint16": torch.uint16, "uint32": torch.uint32, "uint64": torch.uint64, "halves": torch.float16}
STAGES = {"1": {"stage": 1}, "2": {"stage": 2}, "3": {"stage": 3}}
STAGES |= {f"elastic {stage}": {"stage": stage, "elastic_checkpoint": True} for stage in (1, 2)}
SCB = torch.arange(7.0) + 1


class Extra(nn.Module):
    """get_extra_state() as TransformerEngine has it."""

    def __init__(self):
        super().__init__()
        self.scale = torch.zeros(3)

    def get_extra_state(self):
        return self.scale

    def set_extra_state(self, state):
        self.scale = state


class Odd(nn.Module):
    def __init__(self, stage):
        super().__init__()
        self.first, self.second, self.norm, self.extra = nn.Linear(8, 7), nn.Linear(7, 3), nn.BatchNorm1d(7), Extra()
        self.again = self.norm  # its buffers have two names
        self.frozen = nn.Parameter(torch.rand(5), requires_grad=False)
        self.empty = nn.ParameterList(nn.Parameter(torch.zeros(0, 4)) for _ in range(2 * (stage < 3)))  # 3 has none
        for name, dtype in KINDS.items():
            self.register_buffer(name, torch.arange(6.0).to(dtype))
        self._register_state_dict_hook(lambda module, state, *_: state.update({"first.SCB": SCB}))

    def forward(self, x):
        self.extra.scale = self.extra.scale + 1
        out = self.second(self.norm(self.first(x))).pow(2).mean()
        return out + self.frozen.sum() + sum(p.sum() for p in self.empty)


def truth(engine, model):
    """What the checkpoint has to hold: weights, and what else the module keeps."""
    names = dict(model.named_parameters())
    weights = {name: safe_get_full_fp32_param(p) for name, p in names.items() if p.requires_grad and p.numel()}
    with deepspeed.zero.GatheredParameters(list(names.values()), enabled=engine.zero_optimization_stage() == 3):
        kept = {"frozen": model.frozen.detach().clone(), "extra._extra_state": model.extra.scale, "first.SCB": SCB}
    return {"weights": weights, "kept": kept | dict(model.named_buffers(remove_duplicate=False))}


def train(tag):
    torch.manual_seed(1)
    model = Odd(STAGES[tag]["stage"])
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if (p.dim() > 1) is matrix]} for matrix in (True, False)]
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": STAGES[tag], "optimizer": optimizer}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    for step in range(2):
        engine.backward(engine(torch.randn(2, 8, generator=torch.Generator().manual_seed(step))))
        engine.step()
    client = {"masks": [torch.eye(3).to_sparse(), torch.tensor([1, 2], dtype=torch.uint32)]}
    engine.save_checkpoint(".", tag=tag, client_state=client)
    held = truth(engine, model)
    if engine.global_rank == 0:
        torch.save(held, f"truth {tag}.pt")


if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it compiles one for a minute
    deepspeed.init_distributed("gloo")
    for tag in STAGES:
        train(tag)
