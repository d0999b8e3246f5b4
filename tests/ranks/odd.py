"""Optimizers that keep what few keep, and modules whose weights a script has set: on the ranks that
saved, they go on as with DeepSpeed alone; on others they are right, or refused by name."""

import functools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn

import universal
from tests.support.case import (
    case,
    check_losses,
    installed,
    load,
    on_own_ranks,
    printed,
    refused,
    resumed,
)
from tests.support.toy import (
    Net,
    differences,
    is_rank_0,
    make,
    read_truth,
    save_truth,
    torch_optimizer,
    train,
)
from universal.checkpoint.describe import describe
from universal.diff import diff, tensors_of
from universal.load.overrides import deepspeed_load


def losses_of(engine):
    return [train(engine, step) for step in (2, 3)]


def save(stage, change=None, back=None, **options):
    """change(engine): ahead of the save. back(engine): after it."""
    engine = make(stage, **options)
    for step in (0, 1):
        train(engine, step)
    if change:
        change(engine)
    engine.save_checkpoint(".", "t")
    if back:
        back(engine)
    save_truth(losses_of(engine), "losses.pt")


def saved_by(**options):
    return functools.partial(save, **options)


def check_as_deepspeed_alone(stage, change=None, **options):
    """On the ranks that saved, to the bit. change(engine): after each load."""
    losses = []
    for load_it in (deepspeed_load, None):
        engine = make(stage, seed=5, **options)
        if load_it:
            load_it(engine, ".", "t")
        else:
            load(engine)
        if change:
            change(engine)
        losses.append(losses_of(engine))
    assert losses[0] == losses[1], losses
    # torch restores its state of float64 in the dtype of the parameters.
    rounding = 1e-7 if options.get("optimizer") is InDicts else 0
    assert stage == 3 or losses[0] == pytest.approx(read_truth("losses.pt"), rel=rounding), losses


class Even(Net):
    """On 1, 2 and 3 ranks, ZeRO-3 pads none of the parameters."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 6)
        self.b = nn.Linear(6, 6, bias=False)
        self.norm = nn.LayerNorm(6)


class Plain(torch.optim.Optimizer):
    """Momentum; the kinds below keep more. More is 0 where that must not matter."""

    settings = {}

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1} | self.settings)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * self.update(p, self.state[p], group))

    def momentum(self, p, state):
        return state.setdefault("momentum_buffer", torch.zeros_like(p)).mul_(0.9).add_(p.grad)

    def update(self, p, state, group):
        return self.momentum(p, state)


class GroupsGrow(Plain):
    """As heavyball's, which put what they have learned into their groups."""

    def update(self, p, state, group):
        group["seen"] = group.get("seen", 0) + 1
        group.setdefault("history", []).append(group["seen"])
        return self.momentum(p, state) / len(group["history"])


class InDicts(Plain):
    """As AggMo's and bitsandbytes': tensors in a dict, a list and a tuple beside None."""

    def update(self, p, state, group):
        new = functools.partial(torch.zeros_like, p)
        state.setdefault("momentum_buffer", {0.9: new(), 0.5: new()})
        state.setdefault(0, {"sums": [new(), None], "pair": (new(dtype=torch.float64), 3)})
        state[0]["sums"][0].add_(p.grad)
        state[0]["pair"][0].add_(p.grad.double() / 3)
        for beta, buffer in state["momentum_buffer"].items():
            buffer.mul_(beta).add_(p.grad)
        total = sum(state["momentum_buffer"].values()) + state[0]["sums"][0]
        return total + state[0]["pair"][0].float()


class OtherMuon(Plain):
    """Another package's, with DeepSpeed's setting, and an element of momentum for each weight."""

    settings = {"use_muon": True, "momentum": 0.9}


class Stateless(Plain):
    """Keeps nothing, though its groups have betas."""

    settings = {"betas": (0.9, 0.99)}

    def update(self, p, state, group):
        return p.grad.sign() * 0.1


class Late(Plain):
    """Makes its states when it has gone on for a while."""

    def update(self, p, state, group):
        group["seen"] = group.get("seen", 0) + 1
        return self.momentum(p, state) if group["seen"] > 3 else p.grad


class OnSomeRanks(Plain):
    """As DistributedMuon's: ranks own different parameters."""

    def update(self, p, state, group):
        return p.grad if dist.get_rank() % 2 else self.momentum(p, state)


class MarksByNone(Plain):
    """As torch-optimi's: a state is made if there is the key, whose value is None."""

    def update(self, p, state, group):
        if "mark" not in state:
            state |= {"mark": None, "momentum_buffer": torch.zeros_like(p)}
        return self.momentum(p, state)


class KeepsNorm(Plain):
    """As CAME and LAMB: a norm that nobody reads, and an Adafactor's RMS."""

    def update(self, p, state, group):
        state["norm"] = p.grad.norm()
        state["ratio"] = p.norm().item()
        return self.momentum(p, state)


class ReadsNorm(Plain):
    """As Prodigy: a number of all weights that a rank has."""

    def update(self, p, state, group):
        group["d"] = 0.9 * group.get("d", 0.5) + 0.1 * p.norm().item()
        return group["d"] * self.momentum(p, state)


class AddsUp(Plain):
    """As Prodigy(fsdp_in_use=True): a number of all weights, added up over the ranks."""

    def update(self, p, state, group):
        total = p.square().sum()
        dist.all_reduce(total)
        group["d"] = 0.9 * group.get("d", 0.5) + 0.1 * total.sqrt().item()
        return group["d"] * self.momentum(p, state)


class Codes(Plain):
    """As 8-bit ones: a byte for each weight, and a number for each block of weights."""

    def update(self, p, state, group):
        blocks = p.grad.new_ones(-(-p.numel() // 16))
        state.setdefault("scale", blocks)[0] = p.grad.abs().max()
        state.setdefault("code", torch.zeros_like(p, dtype=torch.uint8)).add_(1)
        return p.grad * state["code"] * state["scale"][0]


class Clipped(Plain):
    """As StableAdamW: a state for each weight, and an update that is cut to a norm."""

    def update(self, p, state, group):
        update = self.momentum(p, state)
        return update / max(1.0, update.norm().item())


def save_clipped(stage):
    with installed():
        save(stage, optimizer=Clipped)


@case(save_clipped, quick_ranks=(2, 3))
def clipped(stage):
    """ZeRO cuts what it takes norms of: a load on other ranks says so."""
    if on_own_ranks():
        check_as_deepspeed_alone(stage, optimizer=Clipped)
        assert stage < 3 or printed("NOTE: Clipped takes norms or means of padding, too")
        return
    with installed():
        losses_of(resumed(stage, optimizer=Clipped))
    words = "ZeRO cuts the tensors of which Clipped takes norms or means"
    assert printed(f"NOTE: {words}: on other ranks", "WARNING: step ")


class OwnKeys(Plain):
    """As wrappers of an optimizer: its state dict has other keys than PyTorch's."""

    def state_dict(self):
        return {"wrapped": super().state_dict(), "looks": 3}

    def load_state_dict(self, state):
        super().load_state_dict(state["wrapped"])


class Averages(Plain):
    """As schedule-free ones: eval() puts an average in place of the masters, train() takes it
    out."""

    settings = {"train_mode": True, "k": 0}

    def update(self, p, state, group):
        assert group["train_mode"]
        group["k"] += 1
        z = state.setdefault("z", p.clone())
        z.sub_(0.1 * p.grad)
        return 0.3 * (p - z) + 0.1 * p.grad

    @torch.no_grad()
    def turn(self, mode):
        for group in self.param_groups:
            if group["train_mode"] != mode:
                for p in filter(self.state.get, group["params"]):
                    p.lerp_(self.state[p]["z"], 0.5 if mode else -1.0)
            group["train_mode"] = mode

    def train(self):
        self.turn(True)

    def eval(self):
        self.turn(False)


def right(kind, not_converted=None, stages=(1, 2, 3), **options):
    """A case of an optimizer that resumes everywhere. not_converted: names of states for which a
    conversion has no place."""
    options["optimizer"] = kind
    quick_stages = (1, 3) if kind is InDicts else stages[-1:]

    @case(saved_by(**options), stages=stages, quick_stages=quick_stages, quick_ranks=(2, 3))
    def play(stage):
        if not_converted:
            with pytest.raises(universal.CheckpointError, match=f": {not_converted} of the optim"):
                universal.convert("t", f"u{dist.get_rank()}")
        if on_own_ranks():
            check_as_deepspeed_alone(stage, **options)
            return
        check_losses(resumed(stage, **options))

    return play


def of_its_ranks(kind, reason):
    """A case of an optimizer that resumes on the ranks that saved."""

    @case(saved_by(optimizer=kind), quick_ranks=(2, 3))
    def play(stage):
        if on_own_ranks():
            check_as_deepspeed_alone(stage, optimizer=kind)
            return
        engine = make(stage, optimizer=kind, seed=5)
        refused(engine, reason, "on its own ranks only", "load_optimizer_states=False")
        load(engine, load_optimizer_states=False)

    return play


groups_grow = right(GroupsGrow)
in_dicts = right(InDicts, not_converted="0, momentum_buffer")
other_muon = right(OtherMuon)
stateless = right(Stateless)
late = right(Late)
marks_by_none = right(MarksByNone, not_converted="mark")
keeps_norm = right(KeepsNorm, not_converted="norm, ratio")
adds_up = right(AddsUp, stages=(1, 2))
# Of padded parameters it adds up the padding, too, which follows gradients that nobody has written.
adds_up_unpadded = right(AddsUp, stages=(3,), net=Even)
on_some_ranks = of_its_ranks(OnSomeRanks, "momentum_buffer of the optimizer is not on all ranks")
reads_norm = of_its_ranks(ReadsNorm, "d of the optimizer differs between ranks 0 and 1")
own_keys = of_its_ranks(OwnKeys, "the state dict of the optimizer is not cut like the weights")
codes = of_its_ranks(Codes, "scale of the optimizer is not cut like the weights")


def turn(engine, mode):
    torch_optimizer(engine).turn(mode)


def names_of_set_weights(engine):
    """Of the weights that are not their masters."""
    parameters = engine.module.named_parameters()
    trained = [(name, p) for name, p in parameters if p.requires_grad]
    return [name for name, p in trained if not torch.equal(p, safe_get_full_fp32_param(p))]


def save_in_eval(stage):
    save(
        stage, optimizer=Averages, change=lambda of: turn(of, False), back=lambda of: turn(of, True)
    )


@case(save_in_eval, quick_stages=(1,), quick_ranks=(2, 3))
def averages(stage):
    """Saved with the average in the masters, and the training weights in the module."""
    if on_own_ranks():
        check_as_deepspeed_alone(stage, lambda of: turn(of, True), optimizer=Averages)
    engine = resumed(stage, optimizer=Averages)
    if stage < 3:
        assert set(names_of_set_weights(engine)) >= {"a.weight", "b.weight"}
        engine.optimizer.update_lp_params()  # as the page says, to evaluate the average
        assert not names_of_set_weights(engine)
    assert not any(group["train_mode"] for group in engine.optimizer.param_groups)
    turn(engine, True)
    if stage < 3:
        engine.optimizer.update_lp_params()
    check_losses(engine, exact=False)


# --------------------------------------------------------------------------------------------------
# modules


@torch.no_grad()
def halve(engine):
    for parameter in engine.module.parameters():
        parameter.mul_(0.5)


def weights_of(engine):
    is_cut = engine.zero_optimization_stage() == 3
    with GatheredParameters([*engine.module.parameters()], enabled=is_cut):
        return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def save_weights(engine):
    save_truth(weights_of(engine), "weights.pt")


save_halved = saved_by(change=lambda of: (halve(of), save_weights(of)))


def check_weights(engine):
    lost = differences(read_truth("weights.pt"), weights_of(engine))
    assert not lost, lost


@case(save_halved, stages=(1, 2), quick_stages=(1,), quick_ranks=(2, 3))
def weights_that_a_script_set(stage):
    """An average swapped in, say: module and masters go on as they were saved; without the
    optimizer's states, the masters are made of the module's weights, as by DeepSpeed alone."""
    if on_own_ranks():
        check_as_deepspeed_alone(stage)
    engine = resumed(stage)
    check_weights(engine)
    assert printed("of the module's weights were not the optimizer's masters (a.bias)")
    check_losses(engine)
    if is_rank_0():
        with pytest.warns(match="weights are not the optimizer's masters .a.bias.: both are kept"):
            universal.convert("t", "u")
        assert diff("t", "u")["same"] and "a.bias set by a script" in tensors_of(describe("t"))
    dist.barrier()
    engine = resumed(stage, "u")
    check_weights(engine)
    check_losses(engine, exact=False)
    for tag in ("t", "u"):
        for told in ({"load_module_only": True}, {"load_optimizer_states": False}):
            engine = resumed(stage, tag, told=told)
            check_weights(engine)
            engine.optimizer.update_lp_params()
            check_weights(engine)


def without_momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


save_clamped = saved_by(optimizer=without_momentum, change=lambda of: (halve(of), save_weights(of)))


@case(save_clamped, stages=(1, 2), quick_stages=(1,), quick_ranks=(2, 3))
def weights_set_beside_an_optimizer_that_counts_no_steps(stage):
    """In files of one save they are no damage, nor in what it converts into."""
    check_weights(resumed(stage, optimizer=without_momentum))
    if is_rank_0():
        with pytest.warns(match="both are kept"):
            universal.convert("t", "u")
    dist.barrier()
    check_weights(resumed(stage, "u", optimizer=without_momentum))


class Thawed(Net):
    """Its norm is frozen at first."""

    def __init__(self):
        super().__init__()
        self.norm.requires_grad_(False)


def save_thawed(stage):
    engine = make(stage, Thawed)
    for step in range(3):
        train(engine, step)
    engine.save_checkpoint(".", "frozen")
    engine = make(stage, seed=5, zero={"sub_group_size": 1})
    universal.load_checkpoint(engine, ".", "frozen", load_module_strict=False)
    for step in range(3, 5):
        train(engine, step)
    engine.save_checkpoint(".", "t")


@case(save_thawed, stages=(3,))
def uneven_steps(stage):
    """ZeRO-3 counts those of each sub-group; one that has all counts them together, and says so."""
    load(make(stage, seed=6, zero={"sub_group_size": 1}))
    assert not is_rank_0() or not printed("have taken")
    load(make(stage, seed=6))
    assert printed("WARNING: parameters beside a.weight have taken [2.0, 5.0] steps, and this")


class Encoder(Net):
    """Its first layer is frozen."""

    def __init__(self):
        super().__init__()
        self.a.requires_grad_(False)


@case(save_halved, stages=(1, 2), quick_stages=(1,), quick_ranks=(2, 3))
def weights_that_a_script_set_and_nobody_trains(stage):
    """Frozen here, or in an evaluation at ZeRO-3, they are those of the module, too."""
    told = {"load_module_strict": False, "load_optimizer_states": False}
    for now, options in (
        (stage, {"net": Encoder}),
        (3, {"net": Encoder}),
        (3, {"optimizer": None}),
    ):
        engine = make(now, seed=5, **options)
        load(engine, **told if "net" in options else {})
        check_weights(engine)


@case(save_halved, stages=(1,), quick_ranks=(2,))
def damaged_weights_that_nobody_needs(stage):
    """Those whose checksum is wrong are no script's: their masters will do, and a line says so."""
    path = Path("t/mp_rank_00_model_states.pt")
    weight = read_truth("weights.pt")["a.weight"].numpy().tobytes()
    if is_rank_0():
        data = path.read_bytes()
        assert data.count(weight) == 1
        path.write_bytes(data.replace(weight, bytes(len(weight))))
    dist.barrier()
    engine = resumed(stage)
    assert printed("WARNING: ", "is damaged where", "weights are not the optimizer's masters")
    assert set(differences(read_truth("weights.pt"), weights_of(engine))) >= {"a.weight"}


class LeavesOut(Net):
    """Its state has neither a buffer nor the frozen weights that it could have."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.ones(3))

    def state_dict(self, *args, **options):
        state = super().state_dict(*args, **options)
        left_out = ("cache", "frozen.weight")
        return {name: state[name] for name in state if not name.endswith(left_out)}


@case(saved_by(net=LeavesOut), stages=(1, 2), quick_stages=(1,), quick_ranks=(2, 3))
def left_out_of_the_state(stage):
    """A buffer is not missed. A weight that was in no file is named."""
    resumed(stage, net=LeavesOut)
    assert printed("not in the module's state_dict(), so in no checkpoint (1): frozen.weight")


class Twins(Net):
    def __init__(self):
        super().__init__()
        self.c = nn.Linear(7, 5, bias=False)

    def forward(self, x):
        return super().forward(x) + self.c(self.norm(self.a(x))).mean()


def tie(engine):
    engine.module.c.weight = engine.module.b.weight


@case(saved_by(net=Twins, change=tie), quick_stages=(1, 3))
def tied_after_initialize(stage):
    engine = make(stage, Twins, seed=5)
    tie(engine)
    load(engine)
    check_losses(engine)
