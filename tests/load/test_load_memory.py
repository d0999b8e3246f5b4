"""A load into an engine that has stepped fills the states that there are, so that a card need not
hold both, when every byte is known to be right."""

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_optimizer_state

import universal
from tests.support.files import flip
from tests.support.ranks import run
from tests.support.toy import begin
from universal.load.engine import Engine

MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = [(stage, half) for stage in (1, 2, 3) for half in (False, True)]


def make(stage, half):
    """(engine, its step, what it holds: the masters, and the states if it has stepped)"""
    torch.manual_seed(0)
    net = torch.nn.Linear(8, 7, bias=False)
    adam = {"type": "AdamW", "params": {"torch_adam": True, "lr": 0.1}}
    config = {"train_batch_size": 2, "bf16": {"enabled": half}, "optimizer": adam}
    config["zero_optimization"] = {"stage": stage}
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
    wrapped = Engine(engine)
    (flat,) = wrapped.flats

    def step():
        engine.backward(engine(torch.ones(1, 8, dtype=net.weight.dtype)).square().sum())
        engine.step()

    def tensors():
        states = wrapped.state_of(flat)
        return [flat.tensor, *[states[key] for key in MOMENTS if key in states]]

    return engine, step, tensors


def values(tensors):
    return [tensor.detach().clone() for tensor in tensors()]


def load_into_a_stepped_engine():
    begin()
    universal.install(proof=False)
    for stage, half in KINDS:
        engine, step, tensors = make(stage, half)
        step()
        engine.save_checkpoint("saved", f"{stage}{half}")
        saved, places = values(tensors), [tensor.data_ptr() for tensor in tensors()]
        step()
        engine.load_checkpoint("saved", f"{stage}{half}")
        assert all(map(torch.equal, tensors(), saved)), (stage, half)
        assert [tensor.data_ptr() for tensor in tensors()] == places, (stage, half)
        moment = safe_get_full_optimizer_state(engine.module.weight, "exp_avg")
        assert torch.equal(gathered(tensors()[1])[:56], moment.flatten())


def gathered(tensor):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return torch.cat(parts)


def load_what_is_damaged(steps):
    begin()
    universal.install(proof=False)
    for stage, half in KINDS:
        engine, step, tensors = make(stage, half)
        for _ in range(steps):
            step()
        before = values(tensors)
        with pytest.raises(universal.CheckpointError, match="is damaged"):
            engine.load_checkpoint("saved", f"{stage}{half}")
        assert all(map(torch.equal, tensors(), before)), (stage, half)
        assert len(before) == (3 if steps else 1)


def test_states_stay_where_they_are(tmp_path):
    """Also those by which parameters find their own. And damage leaves all as it was, in an engine
    that has stepped and in one that has not."""
    run(tmp_path, 2, load_into_a_stepped_engine)
    for path in tmp_path.glob("saved/*/*rank_1_*optim_states.pt"):
        flip(path)
    run(tmp_path, 2, load_what_is_damaged, 1)
    run(tmp_path, 2, load_what_is_damaged, 0)
