"""Another model than the one that was saved, or one with parts that few have."""

import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn

from tests.support.case import (
    PRINTED,
    case,
    check_restored,
    check_same_state,
    convert,
    load,
    on_own_ranks,
    printed,
    refused,
    restored,
    resumed,
    saved,
    train_and_save,
)
from tests.support.files import flip
from tests.support.toy import (
    Net,
    adam,
    differences,
    forward,
    is_rank_0,
    make,
    read_truth,
    save_truth,
    snapshot,
    train,
    two_groups,
)
from universal import batches


class Shaped(Net):
    """Another shape of b.weight."""

    def __init__(self, *shape):
        super().__init__()
        self.b.weight = nn.Parameter(torch.randn(shape))

    def forward(self, x):
        return self.norm(self.a(x)).pow(2).mean() + self.b.weight.sum()


def save_two_shapes(stage):
    train_and_save(stage)
    train_and_save(stage, "flat", net=lambda: Shaped(35))


@case(save_two_shapes)
def another_model(stage):
    refused(make(stage), "b.weight is (5, 7) here, and (35,) in", tag="flat")
    for shape in ((7, 5), (34,)):  # ZeRO cuts 34 elements for 2 or 3 ranks as it cuts 35
        engine = make(stage, lambda shape=shape: Shaped(*shape))
        for strict in (True, False):
            refused(engine, f"b.weight is {shape} here, and (5, 7) in", load_module_strict=strict)
    refused(make(stage, optimizer=two_groups), "is in parameter group")


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


@case(quick_stages=(1, 3))
def new_parameters(stage):
    engine = make(stage, Bigger, seed=5)
    names = "frozen.bias, frozen.weight, new.bias, new.weight"
    line = f"trained here, and not in the checkpoint (4): {names};"
    refused(engine, line, "load_module_strict=False")
    initial = snapshot(engine, states=False)
    truth = read_truth()
    torch.use_deterministic_algorithms(True, warn_only=True)  # new memory holds NaN
    load(engine, load_module_strict=False)
    torch.use_deterministic_algorithms(False)
    for state in engine.optimizer.optimizer.state.values():  # the padding, too
        assert all(not value.isnan().any() for value in state.values() if torch.is_tensor(value))
    names = ("norm.weight", "norm.bias")
    wanted = {name: truth[name] for name in truth if name in names or name.startswith(("a.", "b."))}
    for source, layer in ((initial, "new"), (truth, "frozen")):
        for name in (f"{layer}.weight", f"{layer}.bias"):
            wanted |= dict.fromkeys((name, f"{name} fp32"), source[name])
            zeros = torch.zeros_like(source[name])
            wanted |= dict.fromkeys((f"{name} exp_avg", f"{name} exp_avg_sq"), zeros)
    now = snapshot(engine)
    assert not differences(wanted, now) and "norm.weight fp32" not in now
    train(engine, 3)


class WithHead(Net):
    def __init__(self, tied=False):
        super().__init__()
        self.head = nn.Linear(8, 7, bias=False)
        if tied:
            self.head.weight = self.a.weight

    def forward(self, x):
        return super().forward(x) + self.head(x).pow(2).mean()


TOLD = ({"load_module_strict": False}, {"load_optimizer_states": False}, {"load_module_only": True})


@case(saved(net=lambda: WithHead(tied=True)))
def tied_at_the_save(stage):
    """And its own now: it begins with the weights that both had."""
    convert()
    engine = make(stage, WithHead, seed=5)
    names = "trained here, and not in the checkpoint (1): head.weight"
    refused(engine, f"{names}; load_module_strict=False continues without")
    for tag in ("t", "u"):
        for told in TOLD if tag == "t" else TOLD[:1]:
            engine = resumed(stage, tag, net=WithHead, told=told)
            now = snapshot(engine, states="load_module_strict" in told)
            truth = read_truth()
            assert torch.equal(now["head.weight"], truth["a.weight"])
            assert torch.equal(now["head.weight fp32"], truth["a.weight fp32"])
            if "load_module_strict" in told:
                assert printed(f"{names}: without their states")
                assert not now["head.weight exp_avg"].any()
                assert torch.equal(now["a.weight exp_avg"], truth["a.weight exp_avg"])
    engine = resumed(stage, net=WithHead, told={"load_module_only": True})
    train(engine, 3)


@case(saved(net=WithHead), quick_stages=(1, 3))
def tied_now(stage):
    """And its own at the save: one of the two is gone."""
    engine = make(stage, lambda: WithHead(tied=True), seed=5)
    for told in ({}, {"load_module_only": True}):
        refused(engine, "trained in the checkpoint, and not here (1): head.weight", **told)
    load(engine, load_module_strict=False)
    now, truth = snapshot(engine), read_truth()
    for key in ("a.weight", "a.weight fp32", "a.weight exp_avg"):
        assert torch.equal(now[key], truth[key])


class Frozen(Net):
    def __init__(self):
        super().__init__()
        self.a.requires_grad_(False)
        self.frozen.requires_grad_(True)


@case(quick_stages=(1, 3))
def weights_of_other_trained_ones(stage):
    """What is frozen, there or here, does not matter for weights alone."""
    for told in ({"load_optimizer_states": False}, {"load_module_only": True}):
        now, truth = snapshot(resumed(stage, net=Frozen, told=told), False), read_truth()
        for name in ("frozen.weight", "frozen.bias"):
            assert torch.equal(now[f"{name} fp32"], truth[name])
        for name in ("a.weight", "b.weight"):
            assert torch.equal(now[name], truth[f"{name} fp32"])
    engine = make(stage, WithHead, seed=5)
    line = "trained here, and not in the checkpoint (1): head.weight;"
    refused(engine, line, load_module_only=True)


class OtherFrozen(Net):
    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(8, 5).requires_grad_(False)


@case(quick_stages=(1, 3))
def another_frozen_weight(stage):
    """It is no damage, after which an older checkpoint may be tried."""
    line = "frozen.bias is (5,) of torch.float32 here, and (4,) of torch.float32 in the checkpoint"
    refused(make(stage, OtherFrozen), line, tag=None)
    assert "passed over" not in PRINTED.getvalue()


@case(saved(frozen=False), quick_stages=(1, 3))
def frozen_ones_left_out(stage):
    engine = make(stage, seed=5)
    line = "in the module's state here, and not in the checkpoint (2): frozen.bias, frozen.weight;"
    refused(engine, line, "load_module_strict=False")
    load(engine, load_module_strict=False)
    check_restored(engine, but=["frozen.weight", "frozen.bias"])


class Normed(Net):
    def __init__(self, norm):
        super().__init__()
        self.a = norm(self.a)


@case(saved(net=lambda: Normed(nn.utils.weight_norm)), quick_stages=(1,))
def another_weight_norm(stage):
    """torch has two, of other names."""
    engine = make(stage, lambda: Normed(nn.utils.parametrizations.weight_norm))
    refused(
        engine, "(2): a.weight_g, a.weight_v; torch has two weight_norm(): take the one of before"
    )


class Empty(Net):
    def __init__(self):
        super().__init__()
        self.none = nn.Parameter(torch.randn(0))
        self.nothing = nn.Parameter(torch.randn(3, 0))


@case(saved(net=Empty), stages=(1, 2))
def empty_parameters(stage):
    """Which ZeRO-3 cannot hold. They go through the converter, too."""
    restored(stage, net=Empty)
    convert()
    restored(stage, "u", net=Empty)


class Vocabulary(nn.Module):
    """Its extra state is no tensor."""

    def __init__(self):
        super().__init__()
        self.word = str(torch.initial_seed())

    def get_extra_state(self):
        return {"word": self.word}

    def set_extra_state(self, state):
        self.word = state["word"]


def count_rank(engine):
    engine.module.calls += dist.get_rank()


@case(saved(change=count_rank), quick_ranks=(2, 3), quick_stages=(1, 3))
def of_each_rank(stage):
    """ZeRO-3 saves the client state and the buffers of every rank; on as many ranks each gets its
    own."""
    engine = make(stage)
    rank = dist.get_rank() if stage == 3 and on_own_ranks() else 0
    assert load(engine)["rank"] == rank
    loses = stage == 3 and not on_own_ranks()
    line = "the client states or buffers of 2 ranks differ: all 3 now have rank 0's"
    assert printed(line) if loses else "client states" not in PRINTED.getvalue()
    how = "2\n" if on_own_ranks() else "3 without conversion\n"
    assert printed(f"t, written by 2 ranks, loaded on {how}")
    assert engine.module.calls.tolist() == [12.0 + rank] * 3


def uneven(stage, batch=12):
    """Its ranks do not divide the micro-batches of 12."""
    return make(stage, batch=None, **batches.config(batch, {2: 4, 3: 3}[dist.get_world_size()]))


def save_in_two_ways(stage):
    train_and_save(stage)
    engine = uneven(stage)
    share = batches.share(engine)
    assert share.repeats == 1
    for m, weight in share:
        engine.backward(weight * forward(engine, m))
        engine.step()
    engine.save_checkpoint(".", tag="uneven")


@case(save_in_two_ways)
def another_batch(stage):
    """There is a line only if it is another, whether the batch is DeepSpeed's train_batch_size or
    of batches.config(), and before share() or after it."""
    engines = [make(stage), uneven(stage), uneven(stage)]
    assert batches.share(engines[-1]).repeats
    for tag in ("t", "uneven"):
        for engine in engines:
            load(engine, tag)
    assert "WARNING" not in PRINTED.getvalue()
    padded = {2: 16, 3: 18}[dist.get_world_size()]
    load(make(stage, batch=padded, micro=padded // 2 // dist.get_world_size()), "uneven")
    assert printed(f"WARNING: the global batch was 12, and is {padded} now: to keep 12, in a loop")
    load(uneven(stage, 24))
    assert printed("WARNING: the global batch was 12, and is 24 now")
    if on_own_ranks():
        return
    load(make(stage, batch=15, micro=5))
    assert printed(
        "and is 15 now: to keep 12, in a loop of your own, `config |= batches.config(12, 4)"
    )


class Experts(Net):
    def __init__(self):
        super().__init__()
        self.moe = MoE(7, nn.Linear(7, 7), num_experts=2, min_capacity=0)

    def forward(self, x):
        return self.moe(self.a(x))[0].pow(2).mean() + super().forward(x)


def groups_of_experts(parameters):
    groups = {"params": parameters, "name": "all"}
    return adam(split_params_into_different_moe_groups_for_optimizer(groups))


def save_experts(stage):
    engine = make(stage, Experts, groups_of_experts)
    train(engine, 0)
    engine.save_checkpoint(".", tag="t")
    save_truth(engine.module.state_dict())
    dist.barrier()
    if is_rank_0():
        shutil.copytree("t", "damaged")
        flip(Path("damaged", EXPERT_FILE))


EXPERT_FILE = "layer_0_expert_1_mp_rank_00_model_states.pt"


@case(save_experts, stages=(0,), quick_ranks=(2, 3))
def experts(stage):
    """Without ZeRO DeepSpeed loads them, once nothing is damaged and the batch is compared."""
    engine = make(stage, Experts, groups_of_experts, seed=5, batch=24, clip=2.0)
    refused(engine, f"{EXPERT_FILE} is damaged", tag="damaged")
    train(engine, 7, micro_batches=1)
    load(engine)
    assert printed("the gradients of half a step are discarded", "WARNING: the global batch was 12")
    assert all(p.grad is None or not p.grad.any() for p in engine.module.parameters())
    assert engine.gradient_clipping() == 2 and printed("gradient_clipping is 2.0 from now on")
    check_same_state(engine.module)
