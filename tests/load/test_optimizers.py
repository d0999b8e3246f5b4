"""Which of torch's optimizers takes the state of which."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

import universal
from universal.checkpoint.types import OptimizerState
from universal.load import compare, loader
from universal.load.ask import Answer, ask
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
    content = OptimizerState(optimizer.param_groups, {}, {})
    model = {"global_steps": 1, "skipped_steps": 0}
    checkpoint = SimpleNamespace(
        parameters={"weight": known}, problems=[], optimizer=content, model=model
    )
    takers = set()
    for kind in TORCHS:
        engine = object.__new__(Engine)
        engine.optimizer = engine.torch_optimizer = optimizer_of(kind)[0]
        engine.group_numbers = dict
        with contextlib.suppress(universal.CheckpointError):
            answer = ask(engine.torch_optimizer, optimizer.param_groups)
            compare.compare_optimizer(engine, checkpoint, answer, True)
            takers.add(kind.__name__)
    alike = ({"Adam", "AdamW", "RAdam"},)
    assert takers == next((names for names in alike if saved.__name__ in names), {saved.__name__})


class Kept(torch.optim.SGD):
    """Keeps norms that nobody reads, a count, and a norm that its next step reads, if it is told
    to."""

    reads = 0

    def step(self, closure=None):
        (group,) = self.param_groups
        (p,) = group["params"]
        group["seen"] = group.get("seen", 0) + 1
        group["of_all"] = p.norm().item()
        self.state[p]["unread"] = p.grad.norm()
        p.data -= 0.1 * p.grad / (1 + self.reads * self.state[p].get("norm", 1.0))
        self.state[p]["norm"] = p.grad.norm()


class Rates(torch.optim.SGD):
    """Writes down the rates of its groups in a step."""

    seen = []

    def step(self, closure=None):
        self.seen.append([group["lr"] for group in self.param_groups])
        super().step()


def test_many_groups():
    """Of those with the same settings, one is asked; each gets the answer."""
    groups = [
        {"params": [torch.nn.Parameter(torch.ones(3))], "lr": i, "momentum": 0.9 * (i % 2)}
        for i in range(1, 7)
    ]
    optimizer = Rates(groups)
    assert ask(optimizer, []).states == [{"momentum_buffer"}, set()] * 3
    assert all(rates == [6, 5] for rates in Rates.seen)


def test_what_an_optimizer_is_asked(monkeypatch):
    """What depends on the slice, and what of it a step reads. It and the random numbers are left as
    they are, also those of devices."""
    monkeypatch.setattr(torch.cuda, "manual_seed_all", None)  # an error is no answer
    parameter = torch.nn.Parameter(torch.ones(7))
    optimizer = Kept([parameter], lr=0.1)
    torch.optim.lr_scheduler.ConstantLR(optimizer)  # it replaces step()
    before = torch.get_rng_state()
    seeds = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    answer = ask(optimizer, optimizer.param_groups)
    assert not seeds
    assert torch.equal(before, torch.get_rng_state())
    assert parameter.tolist() == [1.0] * 7 and not optimizer.state
    assert "seen" not in optimizer.param_groups[0]
    assert answer.unread == {"norm", "unread", "of_all"} and not answer.of_rank
    assert answer.states == [{"norm", "unread"}] and not answer.depends_on_cut
    assert "seen" in answer.settings
    optimizer.reads = 1
    answer = ask(optimizer, optimizer.param_groups)
    assert answer.of_rank == {"norm", "unread", "of_all"} and not answer.unread
    assert answer.depends_on_cut


def shards(number, scalars, answer):
    """problems_of_one_rank() of a checkpoint that so many ranks have saved."""
    known = SimpleNamespace(scalars=scalars)
    checkpoint = SimpleNamespace(
        parameters={"weight": known},
        optimizer=OptimizerState([{"lr": 0.1}], {}, {}),
        is_universal=False,
        layout=SimpleNamespace(shards=number),
    )
    problems = loader.problems_of_one_rank(checkpoint, answer)
    return [problem.state for problem in problems]


def test_saved_by_one_rank():
    """What two ranks would show to differ is refused of one, too; not what nobody reads."""
    answer = Answer([{"norm"}], {"lr"}, 0.1, {"norm"}, {"unread"})
    assert shards(1, {"norm": 1.0, "unread": 2.0}, answer) == ["norm"]
    assert not shards(2, {"norm": 1.0}, answer)
    assert not shards(1, {"norm": 1.0}, None)


def test_parameters_without_a_count(monkeypatch):
    """What has taken no step yet is not compared with what has."""
    lines = []
    monkeypatch.setattr(compare, "say", lines.append)
    parameters = {
        name: SimpleNamespace(scalars=scalars)
        for name, scalars in {"a": {"step": 5.0}, "b": {}, "c": {"step": 2.0}}.items()
    }
    for names, said in ((["a", "b"], 0), (["a", "b", "c"], 1)):
        engine = SimpleNamespace(flats=[SimpleNamespace(names=names)])
        compare.say_uneven_steps(engine, SimpleNamespace(parameters=parameters))
        assert len(lines) == said
    assert "have taken [2.0, 5.0] steps" in lines[0]
