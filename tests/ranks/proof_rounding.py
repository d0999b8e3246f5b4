"""Resumes of a small transformer in fp32, in which nothing is wrong: play("save", SEED...) on some
ranks, then play("load", SEED...) on others, print the lines about steps that are trained again."""

import torch
import torch.distributed as dist
from torch import nn

import universal
from tests.support.toy import begin, in_turn, make

SAVED = (2, 3, 5, 10, 20, 35, 60)
BATCH = 16


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 64)
        layers = [nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True) for _ in range(3)]
        self.layers = nn.Sequential(*layers)
        self.last = nn.Linear(64, 16)

    def forward(self, x):
        logits = self.last(self.layers(self.first(x)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), x.argmax(-1).flatten())


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


def train(engine, seed, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * int(seed) + step)
        samples = torch.randn(BATCH, 6, 16, generator=generator)
        own = samples.chunk(dist.get_world_size())[dist.get_rank()]
        for micro_batch in own.split(4):
            engine.backward(engine(micro_batch))
            engine.step()


def save(seed):
    engine = make(2, Transformer, adamw, int(seed), batch=BATCH, micro=4, clip=1.0)
    for step in range(1, SAVED[-1] + 11):
        train(engine, seed, [step])
        if step in SAVED:
            engine.save_checkpoint(".", tag=str(step))


def load(seed):
    for saved in SAVED:
        engine = make(2, Transformer, adamw, int(seed) + 1, batch=BATCH, micro=4, clip=1.0)
        engine.load_checkpoint(".", tag=str(saved))
        train(engine, seed, range(saved + 1, saved + 11))


def play(phase, *seeds):
    """What every rank does."""
    begin()
    universal.install()
    in_turn(seeds, {"save": save, "load": load}[phase])
