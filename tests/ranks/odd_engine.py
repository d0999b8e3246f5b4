"""Trains a model of odd parts and saves it at every stage, with and without elastic_checkpoint, each under a tag of
STAGES; beside it in truth <tag>.pt what rank 0 sees of the live engine. For test_convert_keeps.py.

    odd_engine.py
"""

import torch
from torch import nn
from toy import KINDS, Odd, begin, cut, held, keep, make

STAGES = {"1": {"stage": 1}, "2": {"stage": 2}, "3": {"stage": 3}}
STAGES |= {f"elastic {stage}": {"stage": stage, "elastic_checkpoint": True} for stage in (1, 2)}


class Model(nn.Module):
    def __init__(self, stage):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(8, 7), nn.Linear(7, 3), nn.BatchNorm1d(7)
        self.odd = Odd(KINDS)
        self.again = self.norm  # its buffers have two names
        self.frozen = nn.Parameter(torch.rand(5), requires_grad=False)
        self.empty = nn.ParameterList(nn.Parameter(torch.zeros(0, 4)) for _ in range(2 * (stage < 3)))  # 3 has none

    def forward(self, x):
        out = self.second(self.norm(self.first(x))).pow(2).mean()
        return out + self.frozen.sum() + sum(p.sum() for p in self.empty)


def truth(engine):
    """What the checkpoint has to hold: weights, and what else the module keeps."""
    found, model = held(engine), engine.module
    weights = {name: found.get(f"{name} fp32") for name, p in model.named_parameters()}
    weights = {name: weight for name, weight in weights.items() if weight is not None}  # trained, and not empty
    kept = {name: found[name] for name in ("frozen", "odd._extra_state", "odd.SCB")}
    return {"weights": weights, "kept": kept | dict(model.named_buffers(remove_duplicate=False))}


def train(tag):
    stage = STAGES[tag]["stage"]

    def optimizer(parameters):
        return torch.optim.AdamW(cut(parameters, 2))

    engine = make(stage, lambda: Model(stage), optimizer, zero=STAGES[tag], batch=6, micro=2)
    for step in range(2):
        engine.backward(engine(torch.randn(2, 8, generator=torch.Generator().manual_seed(step))))
        engine.step()
    client = {"masks": [torch.eye(3).to_sparse(), torch.tensor([1, 2], dtype=torch.uint32)]}
    engine.save_checkpoint(".", tag=tag, client_state=client)
    keep(truth(engine), f"truth {tag}.pt")


if __name__ == "__main__":
    begin()
    for tag in STAGES:
        train(tag)
