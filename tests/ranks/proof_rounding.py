"""Resumes of a small transformer in fp32, in which nothing is wrong: play("save", SEED...) on some
ranks, then play("load", SEED...) on others, print the lines about steps that are trained again."""

import functools

import torch
from torch import nn

import universal
from tests.support.toy import begin, in_turn, make, train

SAVED = (2, 3, 5, 10, 20, 35, 60)


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


def engine_of(seed):
    return make(2, Transformer, adamw, int(seed), batch=16, micro=4, clip=1.0)


def forward(seed, engine, number):
    generator = torch.Generator().manual_seed(100_000 * int(seed) + number)
    return engine(torch.randn(4, 6, 16, generator=generator))


def train_step(engine, seed, step):
    train(engine, step, forward=functools.partial(forward, seed))


def save(seed):
    engine = engine_of(seed)
    for step in range(1, SAVED[-1] + 11):
        train_step(engine, seed, step)
        if step in SAVED:
            engine.save_checkpoint(".", tag=str(step))


def load(seed):
    for saved in SAVED:
        engine = engine_of(f"{seed}1")
        engine.load_checkpoint(".", tag=str(saved))
        for step in range(saved + 1, saved + 11):
            train_step(engine, seed, step)


def play(phase, *seeds):
    """What every rank does."""
    begin()
    universal.install()
    in_turn(seeds, {"save": save, "load": load}[phase])
