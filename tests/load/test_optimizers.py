"""Which of torch's optimizers takes the state of which."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

import universal
from universal.checkpoint.types import OptimizerState
from universal.load import compare
from universal.load.ask import ask
from universal.load.engine import Engine


def optimizer_of(kind):
    """One of torch's optimizers after a step, and its parameter."""
    parameter = torch.nn.Parameter(torch.zeros(3, 3))
    optimizer = kind([parameter], lr=0.1)
    parameter.grad = torch.ones(3, 3)
    optimizer.step()
    return optimizer, parameter


TORCHS = [
    kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and name not in ("Optimizer", "LBFGS", "SparseAdam")
]


@pytest.mark.parametrize("saved", TORCHS)
def test_optimizers_of_torch(saved):
    """Each one's state is taken by itself alone; but Adam, AdamW and RAdam have the same states,
    and Muon, which takes matrices alone, gives no answer."""
    optimizer, parameter = optimizer_of(saved)
    states = optimizer.state[parameter]
    known = SimpleNamespace(states={"fp32": 0, **states}, scalars={}, group_number=0)
    checkpoint = SimpleNamespace(parameters={"weight": known})
    model = {"global_steps": 1, "skipped_steps": 0}
    content = OptimizerState(optimizer.param_groups, {}, {}, {})
    takers = set()
    for kind in TORCHS:
        engine = object.__new__(Engine)
        engine.optimizer = engine.torch_optimizer = optimizer_of(kind)[0]
        engine.group_numbers = dict
        with contextlib.suppress(universal.CheckpointError):
            answer = ask(engine.torch_optimizer, optimizer.param_groups)
            compare.compare_optimizer(engine, checkpoint, model, content, answer, True)
            takers.add(kind.__name__)
    alike = ({"Adam", "AdamW", "RAdam"},)
    assert takers == next((names for names in alike if saved.__name__ in names), {saved.__name__})
