"""The recipes of docs/troubleshooting.md, run as they stand there."""

import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.lr_schedules import WarmupLR
from torch import nn

import universal
from tests.support import ROOT
from tests.support.case import case, refused, train_and_save
from tests.support.toy import Net, falling, make, read_truth, snapshot, train

SECTION = (ROOT / "docs/troubleshooting.md").read_text().split("## Recipes")[1].split("\n## ")[0]
RATE, WEIGHTS, STATES = re.findall(r"^```python\n(.*?)^```", SECTION, re.M | re.S)
BASE_RATES, FROM_MODULE, *_ = re.findall(r"`((?:scheduler|torch|model)\.[^`]*)`", SECTION)
FOLDER = "checkpoints"
TAG = "global_step100"


def save(stage, **options):
    engine = make(stage, **options)
    for step in range(2):
        train(engine, step)
    engine.save_checkpoint(FOLDER, TAG)
    return engine


def rates_after(stage, scheduler, *changes):
    """The rates of the next two steps of a resume with these changes, and how far the first one
    has brought a weight."""
    engine = make(stage, scheduler=scheduler, seed=5)
    universal.load_checkpoint(engine, FOLDER, TAG)
    for change in changes:
        exec(change, {"engine": engine, "scheduler": engine.lr_scheduler})
    before = snapshot(engine, states=False)["a.weight fp32"]
    rates = []
    for step in (2, 3):
        rates.append(engine.get_lr()[0])
        train(engine, step)
        if step == 2:
            moved = (snapshot(engine, states=False)["a.weight fp32"] - before).abs().max()
    assert engine.optimizer.param_groups[0]["weight_decay"] == 0.01
    return [*rates, moved.item()]


@case(lambda stage: save(stage, scheduler=falling))
def another_rate(stage):
    """AdamW brings no weight much further than its rate."""
    saved, *_ = rates_after(stage, falling)
    assert saved == 0.01 * (1 / 3)
    first, second, moved = rates_after(stage, falling, RATE)
    assert first == 1e-4 and second == 0.01 * (1 / 4) and 0 < moved < 2e-4
    first, second, _ = rates_after(stage, falling, RATE, BASE_RATES)
    assert first == 1e-4 and second == 1e-4 * (1 / 4)


def warming(rate):
    return lambda optimizer: WarmupLR(optimizer, 0, rate, warmup_num_steps=2)


@case(lambda stage: save(stage, scheduler=warming(0.01)), quick_stages=(1,))
def a_rate_of_the_config(stage):
    assert rates_after(stage, warming(1e-3))[1] == 1e-3


class Words(Net):
    def __init__(self, rows=6):
        super().__init__()
        self.words = nn.Linear(8, rows, bias=False)

    def resize_token_embeddings(self, rows):
        old = self.words.weight.data
        self.words = nn.Linear(8, rows, bias=False)
        self.words.weight.data[: len(old)] = old

    def forward(self, x):
        return super().forward(x) + self.words(x).pow(2).mean()


@case(lambda stage: train_and_save(stage, net=Words), quick_stages=(1, 3))
def resized(stage):
    line = "words.weight is (50304, 8) here, and (6, 8) in the checkpoint: to resize it, begin with"
    refused(make(stage, lambda: Words(50304)), line)
    truth = read_truth()
    weights = WEIGHTS.replace(FOLDER, ".").replace(TAG, "t")
    names = {"torch": torch, "model": Words()}
    if stage < 3:
        path = FROM_MODULE.replace(f"{FOLDER}/{TAG}", "t")
        names["model"].load_state_dict(eval(path, names))
        assert torch.equal(names["model"].words.weight, truth["words.weight"])
    if stage == 1:
        with pytest.raises(RuntimeError, match='Missing key.* "frozen.weight", "frozen.bias"'):
            exec(weights, names)
        return
    names["model"] = Words()
    exec(weights, names)
    for name, weight in names["model"].named_parameters():
        assert torch.equal(weight[:6] if name == "words.weight" else weight, truth[name]), name
    engine = make(stage, lambda: names["model"])
    assert train(engine, 0) > 0


def save_states(stage):
    rank = dist.get_rank()
    loader = SimpleNamespace(state_dict=lambda: {"position": rank})
    exec(STATES, {"dist": dist, "loader": loader, "engine": make(stage)})


@case(save_states, stages=(1, 3), quick_ranks=(2, 3))
def of_each_loader(stage):
    engine = make(stage)
    states = universal.load_checkpoint(engine, FOLDER)[1]["loaders"]
    assert states == [{"position": 0}, {"position": 1}]
