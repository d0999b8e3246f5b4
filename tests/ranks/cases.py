"""What may stand between a save and a load: cases.py STAGE save CASE... on 2 ranks, then cases.py
STAGE load CASE... on as many or others, each case in a folder of its name. A case asserts what it
finds; its test is that it ends."""

import contextlib
import io
import json
import os
import shutil
import sys
import warnings
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import PipelineModule
from deepspeed.utils import groups
from torch import nn
from toy import Net, adam, begin, in_turn, make, same, save_truth, snapshot, split_groups, train

import universal
from universal import mirror, reshard
from universal.engine import Engine

CASES, HERE = {}, Path(".")
SAID = io.StringIO()  # what this rank has printed in a case


class Case(NamedTuple):
    """play(stage, saving) is called to save, and then to load. own: it is another case on the ranks
    that saved."""

    play: object
    stages: tuple
    own: bool


def case(stages=(1, 2, 3), own=False):
    def take(play):
        CASES[play.__name__] = Case(play, stages, own)
        return play

    return take


def after(stages=(1, 2, 3), own=False, **tags):
    """A case of function(stage), which loads. Saved is what trained() makes of the options of each
    tag; without any, "t" of none. What the last of them held is kept."""

    def take(function):
        def both(stage, saving):
            if not saving:
                return function(stage)
            for tag, options in (tags or {"t": {}}).items():
                engine = trained(**{"stage": stage, "tag": tag} | options)
            save_truth(snapshot(engine))

        CASES[function.__name__] = Case(both, stages, own)

    return take


def said(*lines):
    """Rank 0 has said these lines, and no other."""
    return dist.get_rank() or all(line in SAID.getvalue() for line in lines)


def trained(stage, steps=2, tag="t", **options):
    engine = make(stage, **options)
    for step in range(steps):
        train(engine, step)
    engine.save_checkpoint(".", tag=tag, client_state={"step": steps, "rank": dist.get_rank()})
    return engine


def wrong(engine, states=True):
    """The names of what is not as it was saved."""
    truth, now = torch.load("truth.pt", weights_only=False), snapshot(engine, states)
    return [key for key in truth if key in now and not same(truth[key], now[key])]


def weights_lost(engine):
    """What is wrong where the optimizer is a new one."""
    return set(wrong(engine, states=False)) - {"groups", "steps", "counters"}


def refused(engine, *parts, **options):
    """load_checkpoint() refuses, in one line that has these parts and is the same on all ranks."""
    try:
        universal.load_checkpoint(engine, ".", **({"tag": "t", "timeout": 60} | options))
    except universal.CheckpointError as error:
        lines = [None] * dist.get_world_size()
        dist.all_gather_object(lines, str(error))
        assert len(set(lines)) == 1 and "\n" not in lines[0], lines
        assert all(part in lines[0] for part in parts), (lines[0], parts)
        return
    raise AssertionError(f"loaded, where {parts} was expected")


def load(engine, tag="t", **options):
    path, client_state = universal.load_checkpoint(engine, ".", tag, **options)
    assert path is None or Path(path).is_dir()
    return client_state


def restored(stage, tag="t", **options):
    """An engine of another seed that has loaded, and holds what was saved."""
    engine = make(stage, **{"seed": 5} | options)
    load(engine, tag)
    assert not wrong(engine)
    return engine


# -----------------------------------------------------------------------------


@case()
def weights_alone(stage, saving):
    """Not those of `latest`, and in fp32; the optimizer is a new one."""
    if saving:
        engine = trained(stage)
        save_truth(snapshot(engine))
        train(engine, 2)
        engine.save_checkpoint(".", tag="latest one")
        return
    for to, options in (
        (stage, {"load_optimizer_states": False}),
        (4 - stage, {"load_module_only": True}),
    ):
        engine = make(to, seed=5, clip=0.125)
        load(engine, **options)
        assert not weights_lost(engine), options
        assert engine.optimizer.clip_grad == 0.125
        assert engine.global_steps == (2 if "load_optimizer_states" in options else 0)
        states = engine.optimizer.optimizer.state.values()
        assert not any(state.get("exp_avg", torch.zeros(1)).any() for state in states)


class Other(Net):
    """Another shape of b.weight."""

    def __init__(self, *shape):
        super().__init__()
        self.b.weight = nn.Parameter(torch.randn(shape))

    def forward(self, x):
        return self.norm(self.a(x)).pow(2).mean() + self.b.weight.sum()


@case(stages=[1])
def weights_alone_without_zero(stage, saving):
    """In bf16 the masters follow the weights, or the first step would bring the initial ones
    back."""
    engine = make(0, seed=1 if saving else 5, bf16={"enabled": True})
    if saving:
        engine.save_checkpoint(".", tag="t")
        return
    load(engine, load_optimizer_states=False)
    for masters, weights in zip(
        engine.optimizer.fp32_groups, engine.optimizer.fp16_groups, strict=True
    ):
        assert all(torch.equal(m.to(w), w) for m, w in zip(masters, weights, strict=True))


@case(stages=[1])
def no_optimizer(stage, saving):
    """Nor ZeRO: an engine that evaluates, say."""
    engine = make(0, optimizer=None, seed=1 if saving else 5)
    if saving:
        save_truth(engine.module.state_dict())
        engine.save_checkpoint(".", tag="t")
        return
    load(engine)
    truth, now = torch.load("truth.pt"), engine.module.state_dict()
    assert truth.keys() == now.keys() and all(same(truth[name], now[name]) for name in truth)


@after(stages=[3])
def states_on_the_gpu(stage):
    """offload_optimizer.ratio below 1: a second optimizer, which DeepSpeed neither saves nor
    loads."""
    engine = make(stage, seed=5)
    engine.optimizer.backup_optimizer = (
        None  # in truth an AdamW; an engine on CPUs never steps with it
    )
    refused(engine, "offload_optimizer.ratio")
    load(engine, load_optimizer_states=False)


@after(t={}, flat={"net": lambda: Other(35)})
def another_model(stage):
    refused(make(stage), "b.weight is (5, 7) here, and (35,) in", tag="flat")
    for shape in ((7, 5), (34,)):  # ZeRO cuts 34 elements for 2 or 3 ranks as it cuts 35
        engine = make(stage, lambda shape=shape: Other(*shape))
        for strict in (True, False):
            refused(engine, f"b.weight is {shape} here, and (5, 7) in", load_module_strict=strict)
    two_groups = make(stage, optimizer=lambda ps: torch.optim.AdamW(split_groups(ps, 2)))
    refused(two_groups, "is in parameter group")


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@after(t={}, momentum={"optimizer": momentum})
def another_optimizer(stage):
    """Before anything is loaded."""
    optim = torch.optim
    for other in (optim.SGD, optim.Adagrad, optim.RAdam):  # fewer states, others, and other numbers
        engine = make(stage, optimizer=lambda ps, other=other: other(ps, lr=0.1))
        before = snapshot(engine, states=False)
        refused(engine, "of another optimizer: it has", "load_optimizer_states=False")
        after = snapshot(engine, states=False)
        changed = [name for name in before if not same(before[name], after[name])]
        assert not changed, (other, changed)
    refused(make(stage), "another optimizer", tag="momentum")


@case()
def restarted(stage, saving):
    """Weights alone, trained on and saved: the optimizer has counted other steps than the model."""
    if saving:
        trained(stage)
        engine = make(stage, seed=5)
        load(engine, load_optimizer_states=False)
        train(engine, 2)
        engine.save_checkpoint(".", tag="u", client_state={"step": 3})
        save_truth(snapshot(engine))
        return
    restored(stage, "u")


@case()
def written_on_a_gpu(stage, saving):
    if saving:
        engine = trained(stage)
        save_truth(snapshot(engine))
        if dist.get_rank() == 0:
            with mock.patch.object(torch.serialization, "location_tag", lambda storage: "cuda:0"):
                for path in HERE.glob("t/*.pt"):
                    torch.save(torch.load(path, weights_only=False), path)
        dist.barrier()
        return
    restored(stage)


@after(stages=[3])
def evaluation(stage):
    """An engine without an optimizer, which DeepSpeed has at ZeRO-3 alone."""
    for options in ({}, {"load_module_only": True}, {"load_optimizer_states": False}):
        engine = make(stage, optimizer=None, seed=5)
        load(engine, **options)
        truth = torch.load("truth.pt", weights_only=False)
        for name, p in engine.module.named_parameters():
            with deepspeed.zero.GatheredParameters([p]):
                assert torch.equal(p, truth[name]), name


class OfItsSlice(torch.optim.Optimizer):
    """Keeps a number that depends on the slice that a rank holds, as LAMB's and Prodigy's kind
    do."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"]):
            state = self.state[p]
            state.setdefault("exp_avg", torch.zeros_like(p)).lerp_(p.grad, 0.1)
            state["norm"] = state["exp_avg"].norm()
            p.sub_(0.01 * state["exp_avg"] / (1e-3 + state["norm"]))


@case(own=True)
def numbers_of_a_slice(stage, saving):
    """Kept on the ranks that saved; refused on others, but for the weights."""
    if saving:
        engine = trained(stage, optimizer=OfItsSlice)
        (state,) = engine.optimizer.optimizer.state.values()
        (HERE / f"norm.{dist.get_rank()}").write_text(repr(state["norm"].item()))
        return
    engine = make(stage, optimizer=OfItsSlice, seed=5)
    if dist.get_world_size() == 2:
        load(engine)
        (state,) = engine.optimizer.optimizer.state.values()
        assert repr(state["norm"].item()) == (HERE / f"norm.{dist.get_rank()}").read_text()
        assert len({path.read_text() for path in HERE.glob("norm.*")}) == 2
    else:
        refused(
            engine, "norm of the optimizer differs between ranks 0 and 1", "on its own ranks only"
        )
        load(engine, load_optimizer_states=False)


class Peculiar(torch.optim.SGD):
    """Counts its steps beside the states, in two places, and has states that are no tensors of the
    masters' dtype."""

    looks = 0

    def step(self, closure=None):
        super().step()
        self.looks += 1
        self.state["k"] = torch.tensor([self.looks])
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["sum"] = (
                self.state[p].get("sum", torch.zeros_like(p, dtype=torch.float64)) + p.grad / 3
            )
            self.state[p]["decay"] = np.float64(0.9**self.looks)

    def state_dict(self):
        return super().state_dict() | {"looks": self.looks}

    def load_state_dict(self, state):
        self.looks = state.get("looks", 0)
        super().load_state_dict({key: value for key, value in state.items() if key != "looks"})


@case(own=True)
def peculiar_optimizer(stage, saving):
    def sums(engine):
        return [
            state["sum"].sum().item()
            for key, state in engine.optimizer.optimizer.state.items()
            if key != "k"
        ]

    make_it = {"optimizer": lambda ps: Peculiar(ps, lr=0.1, momentum=0.9)}
    if saving:
        engine = trained(stage, **make_it)
        (HERE / f"sums.{dist.get_rank()}").write_text(repr(sums(engine)))
        try:
            universal.convert("t", f"u{dist.get_rank()}")
        except universal.CheckpointError as error:
            assert "decay, k, looks of the optimizer" in str(error), error
            return
        raise AssertionError("converted")
    engine = make(stage, seed=5, **make_it)
    load(engine)
    optimizer = engine.optimizer.optimizer
    assert optimizer.looks == 2 and optimizer.state["k"].tolist() == [2]
    for key, state in optimizer.state.items():
        assert key == "k" or (
            state["sum"].dtype == torch.float64 and type(state["decay"]) is np.float64
        ), state
    if dist.get_world_size() == 2:
        assert repr(sums(engine)) == (HERE / f"sums.{dist.get_rank()}").read_text()


class OfItsRank(torch.optim.SGD):
    """Finds a hyper-parameter on the way, as D-Adaptation and Prodigy do."""

    def step(self, closure=None):
        super().step()
        self.param_groups[0]["d"] = 1.0 + dist.get_rank()


def of_its_rank(parameters):
    return OfItsRank([{"params": parameters, "d": 1.0}], lr=0.1, momentum=0.9)


@after(own=True, t={"optimizer": of_its_rank})
def hyper_parameters_of_a_rank(stage):
    engine = make(stage, seed=5, optimizer=of_its_rank)
    if dist.get_world_size() == 2:
        load(engine)
        assert engine.optimizer.param_groups[0]["d"] == 1.0 + dist.get_rank()
    else:
        refused(engine, "d of the optimizer differs between ranks 0 and 1", "on its own ranks only")


class Forgetful(nn.Module):
    """Resets what a state that it loads does not name, as detectron2's frozen BatchNorm does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.randn(8))
        self.register_buffer("deviation", torch.rand(8))

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        for name, buffer in self.named_buffers():
            state_dict.setdefault(prefix + name, torch.zeros_like(buffer))
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Forgetting(Net):
    def __init__(self):
        super().__init__()
        self.one, self.two = Forgetful(), Forgetful()


@after(t={"net": Forgetting})
def modules_that_reset(stage):
    restored(stage, net=Forgetting)


@case(stages=[1, 2])
def two_saves_in_one(stage, saving):
    """One rank's shard is that of the save before, and the optimizer counts no steps. At ZeRO-3
    nobody could tell."""
    if saving:
        trained(stage, tag="before", optimizer=momentum)
        trained(stage, 4, optimizer=momentum)
        if dist.get_rank() == 0:
            (old,) = HERE.glob("before/*zero_pp_rank_1_mp*optim_states.pt")
            shutil.copy(old, HERE / "t" / old.name)
        return
    refused(
        make(stage, seed=5, optimizer=momentum), "model states and shards are of different steps"
    )


@case()
def saved_again_on_its_own_disk(stage, saving):
    """What mirror.gather() brought at the first time is not taken for what was saved since."""
    if not saving:
        return
    disk, engine = f"disk{dist.get_rank()}", make(stage)
    for step in (0, 1):
        train(engine, step)
        engine.save_checkpoint(disk, tag="last")
        mirror.gather(disk)
        written = [
            {path.name: path.stat().st_mtime for path in HERE.glob(f"disk{i}/last/*.pt")}
            for i in (0, 1)
        ]
        assert written[0] == written[1] and len(written[0]) == (
            4 if stage == 3 else 3
        )  # clocks may differ
    save_truth(snapshot(engine))
    engine = make(stage, seed=5)
    universal.load_checkpoint(engine, disk, "last")
    assert not wrong(engine) and engine.global_steps == 2


@case(stages=[1])
def another_pipeline(stage, saving):
    """2 stages, then 1: another model, another optimizer, and weights alone are refused."""

    def make_it(layers, optimizer=adam):
        def net():
            modules = [nn.Linear(8, 8, bias=False) for _ in range(layers)]
            made = PipelineModule(
                modules, num_stages=2 if saving else 1, loss_fn=lambda out, _: out.pow(2).mean()
            )
            made.universal_checkpoint_info = {"universal_checkpoint_version": 0.2}
            return made

        return make(1, net, optimizer)

    if saving:
        engine = make_it(3)
        engine.train_batch((torch.ones(1, 8), torch.ones(1, 8)) for _ in range(99))
        engine.save_checkpoint(".", tag="t")
        return
    refused(make_it(2), "trained in the checkpoint, and not here (1): 2.weight")
    refused(make_it(3, momentum), "of another optimizer")
    refused(make_it(3), "no weights alone of another layout", load_optimizer_states=False)
    load(make_it(3))


@case(own=True)
def half_a_step(stage, saving):
    """Back to a checkpoint, when all weights are NaN, and from the middle of an accumulation: those
    gradients are not added to the next step's."""
    if saving:
        engine = trained(stage)
        losses = [train(engine, step) for step in (2, 3)]
        (HERE / "losses").write_text(json.dumps(losses))
        return
    engine = make(stage, seed=5)
    for group in engine.optimizer.param_groups:
        group["lr"] = float("nan")
    train(engine, 7)
    train(engine, 8, micro_batches=1)
    load(engine)
    assert said("the gradients of half a step are discarded")
    losses = [train(engine, step) for step in (2, 3)]
    differences = [
        abs(a - b) for a, b in zip(losses, json.loads((HERE / "losses").read_text()), strict=True)
    ]
    assert max(differences) <= (0 if dist.get_world_size() == 2 else 1e-6), differences
    train(engine, 8, micro_batches=1)
    load(engine, load_module_only=True)
    assert engine.micro_steps % engine.gradient_accumulation_steps() == 0


@after(own=True)
def one_rank_fails(stage):
    """Whatever it raises, the others raise the same, at once; and the engine can load after
    that."""
    engine, own = make(stage, seed=5), stage == 3 and dist.get_world_size() == 2
    for place, name in (
        (Engine, "names_of"),
        (Engine, "check_pieces"),
        (reshard, "read_states"),
        (reshard, "assemble"),
        *([(reshard, "with_own_model_states")] if own else []),
    ):
        good = getattr(place, name)

        def bad(*args, name=name, good=good, **options):
            if dist.get_rank() == 1:
                raise ValueError(f"something odd in {name}")
            return good(*args, **options)

        with mock.patch.object(place, name, bad):
            refused(engine, f"ValueError: something odd in {name}")
    load(engine)
    assert not wrong(engine)


@after()
def masters_in_another_order(stage):
    """As of a DeepSpeed that cuts shards otherwise: every load compares the masters with the
    weights."""
    engine = make(stage, seed=5)
    optimizer = engine.optimizer
    for flat in (
        optimizer.fp32_partitioned_groups_flat
        if stage == 3
        else optimizer.single_partition_of_fp32_groups
    ):
        flat.data.copy_(flat.data.roll(1))
    with mock.patch.object(optimizer, "refresh_fp32_params", lambda: None):
        refused(engine, "does not hold", " as expected: ", " in the model, ")


class Bigger(Net):
    """A layer that is new, one that was frozen and is trained, one that was trained and is
    frozen."""

    def __init__(self):
        super().__init__()
        self.new = nn.Linear(8, 3)
        self.frozen.requires_grad_(True)
        self.norm.requires_grad_(False)

    def forward(self, x):
        return super().forward(x) + self.new(x).mean()


@after()
def new_parameters(stage):
    engine = make(stage, Bigger, seed=5)
    refused(
        engine,
        "trained here, and not in the checkpoint (4): frozen.bias, frozen.weight, new.bias, new.weight;",
        "load_module_strict=False",
    )
    initial, truth = make(stage, Bigger, seed=5), torch.load("truth.pt", weights_only=False)
    load(engine, load_module_strict=False)
    now, first = snapshot(engine), snapshot(initial, states=False)
    for name in ("new.weight", "new.bias"):
        assert torch.equal(now[name], first[name]) and torch.equal(now[f"{name} fp32"], first[name])
        assert not now[f"{name} exp_avg"].any() and not now[f"{name} exp_avg_sq"].any()
    for name in ("frozen.weight", "frozen.bias"):
        assert torch.equal(now[name], truth[name]) and torch.equal(now[f"{name} fp32"], truth[name])
        assert not now[f"{name} exp_avg"].any()
    for name in ("norm.weight", "norm.bias"):
        assert torch.equal(now[name], truth[f"{name} fp32"]) and f"{name} fp32" not in now
    for name in ("a.weight", "a.bias", "b.weight"):
        assert all(
            torch.equal(now[f"{name} {key}"], truth[f"{name} {key}"]) for key in ("fp32", "exp_avg")
        )
    train(engine, 3)


def falling(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))


@after(stages=[1, 2], t={"scheduler": falling, "zero": {"elastic_checkpoint": True}})
def elastic_checkpoint(stage):
    """Shards without padding and without hyper-parameters, which DeepSpeed writes at ZeRO-1 and 2
    when told to: the scheduler knows the rate of the next step."""
    for elastic in (True, False):
        engine = restored(stage, scheduler=falling, zero={"elastic_checkpoint": elastic})
        assert {group["lr"] for group in engine.optimizer.param_groups} == {0.01 * (1 / 3)}


class Empty(Net):
    def __init__(self):
        super().__init__()
        self.none, self.nothing = nn.Parameter(torch.randn(0)), nn.Parameter(torch.randn(3, 0))


@after(stages=[1, 2], t={"net": Empty})
def empty_parameters(stage):
    """Which ZeRO-3 cannot hold. They go through the converter, too."""
    restored(stage, net=Empty)
    if dist.get_rank() == 0:
        universal.convert("t", "u")
    dist.barrier()
    restored(stage, "u", net=Empty)


@after(t={"stage": 0}, zero={})
def without_zero(stage):
    refused(make(stage), "saved without ZeRO", f"stage {stage}")
    engine = make(0)
    refused(engine, "saved with ZeRO", "stage 0", tag="zero")
    refused(engine, "does not exist", tag="nope")
    load(engine)
    assert engine.global_steps == 2


@case()
def frozen_ones_left_out(stage, saving):
    if saving:
        engine = trained(stage)
        engine.save_checkpoint(".", tag="t", exclude_frozen_parameters=True)
        save_truth(snapshot(engine))
        return
    engine = make(stage, seed=5)
    refused(
        engine,
        "in the module's state here, and not in the checkpoint (2): frozen.bias, frozen.weight;",
        "load_module_strict=False",
    )
    load(engine, load_module_strict=False)
    assert set(wrong(engine)) == {"frozen.weight", "frozen.bias"}


@case()
def converted_without_a_state(stage, saving):
    """ASGD's eta belongs to no element: a universal checkpoint has no place for it."""
    if saving:
        engine = trained(stage, optimizer=torch.optim.ASGD)
        if dist.get_rank() == 0:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                universal.convert("t", "u", strict=False)
        save_truth(snapshot(engine))
        return
    engine = make(stage, optimizer=torch.optim.ASGD, seed=5)
    load(engine)
    train(engine, 2)
    engine = make(stage, optimizer=torch.optim.ASGD, seed=5)
    refused(engine, "converted without", "eta", "load_optimizer_states=False", tag="u")
    load(engine, "u", load_optimizer_states=False)
    assert not weights_lost(engine)


@case()
def the_first_start(stage, saving):
    """install() keeps DeepSpeed's contract for it, and load_checkpoint() stays strict."""
    if saving:
        trained(stage, tag="epoch1/step2")
        (HERE / "damaged" / "t").mkdir(parents=True, exist_ok=True)
        (HERE / "damaged" / "t" / "mp_rank_00_model_states.pt").write_text("x")
        return
    engine = make(stage)
    with mock.patch.multiple(
        deepspeed.DeepSpeedEngine, load_checkpoint=None
    ):  # as it was, after that
        universal.install()
        starts(engine)


def starts(engine):
    for folder in ("nowhere", "empty"):
        os.makedirs("empty", exist_ok=True)
        assert engine.load_checkpoint(folder) == (None, {})
    assert said("nothing was loaded: nowhere holds no checkpoint")
    for options in ({"load_dir": "nowhere", "tag": "t"}, {"load_dir": "damaged"}):
        try:
            engine.load_checkpoint(**options)
        except universal.CheckpointError:
            continue
        raise AssertionError(options)
    assert engine.load_checkpoint(".")[1]["step"] == 2


class Experts(Net):
    def __init__(self):
        super().__init__()
        self.moe = MoE(7, nn.Linear(7, 7), num_experts=2, min_capacity=0)

    def forward(self, x):
        return self.moe(self.a(x))[0].pow(2).mean() + super().forward(x)


@case(stages=[1, 2], own=True)
def experts(stage, saving):
    """install() leaves them to DeepSpeed, which loads them on the ranks that saved."""
    groups = lambda ps: adam(
        split_params_into_different_moe_groups_for_optimizer({"params": ps, "name": "all"})
    )  # noqa: E731
    engine, path = make(stage, Experts, groups, seed=1 if saving else 5), f"truth.{dist.get_rank()}"
    if saving:
        train(engine, 0)
        torch.save(engine.module.state_dict(), path)
        return engine.save_checkpoint(".", tag="t")
    refused(engine, "has experts")
    if dist.get_world_size() == 2:
        with mock.patch.multiple(deepspeed.DeepSpeedEngine, load_checkpoint=None):
            universal.install()
            assert engine.load_checkpoint(".", "t")[0]
        truth, now = torch.load(path), engine.module.state_dict()
        assert truth.keys() == now.keys() and all(same(truth[name], now[name]) for name in truth)


@after(own=True)
def another_batch(stage):
    load(make(stage, batch=6 * dist.get_world_size()))
    if dist.get_world_size() == 2:
        assert "WARNING" not in SAID.getvalue()
    else:
        assert said(
            "WARNING: the global batch was 12, and is 18 now: gradient_accumulation_steps 4 keeps it"
        )
        load(make(stage, batch=15, micro=5))
        assert said(
            "WARNING: the global batch was 12, and is 15 now: other ranks or micro-batches keep it"
        )


@case(own=True)
def of_each_rank(stage, saving):
    """ZeRO-3 saves the client state and the buffers of every rank; on as many ranks each gets its
    own."""
    if saving:
        engine = make(stage)
        train(engine, 0)
        engine.module.calls += dist.get_rank()
        engine.save_checkpoint(".", tag="t", client_state={"rank": dist.get_rank()})
        return
    engine = make(stage)
    own = stage == 3 and dist.get_world_size() == 2
    assert load(engine)["rank"] == (dist.get_rank() if own else 0)
    assert engine.module.calls.tolist() == [6.0 + (dist.get_rank() if own else 0)] * 3


if __name__ == "__main__":
    begin()
    stage, phase, *names = sys.argv[1:]

    def play(name):
        SAID.seek(0)
        SAID.truncate()
        # A pipeline leaves its mpu there, and the next engine would take it.
        with contextlib.redirect_stdout(SAID), mock.patch.object(groups, "mpu", None):
            CASES[name].play(int(stage), phase == "save")

    in_turn(names, play)
