"""All that holds for data-parallel ranks holds for tensor-parallel ones: each state of each
optimizer, what is frozen, what modules add, damage, left-over files, refusals."""

import functools
import itertools
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.utils import groups
from models import Vocabulary, count_rank
from optimizers import momentum
from torch import nn

from tests.support.case import (
    Case,
    case,
    degrees,
    load,
    on_own_ranks,
    printed,
    refused,
)
from tests.support.files import flip, records
from tests.support.toy import (
    differences,
    falling,
    gathered,
    is_rank_0,
    make,
    read_truth,
    same,
    save_of_rank,
    save_truth,
    snapshot,
    torch_optimizer,
    train,
    truths_of_ranks,
    two_groups,
)


class Halves(nn.Module):
    """Two tensor-parallel ranks cut `up` by its rows, and `down` by its columns."""

    frozen = ()

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)
        self.register_buffer("calls", torch.zeros(3))
        self.vocabulary = Vocabulary()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name not in self.frozen)
            parameter.use_muon = parameter.dim() == 2

    def forward(self, x):
        self.calls += self.training
        return (self.norm(self.down(self.up(x).relu())) - x.flip(-1)).float().pow(2).mean()


class PartlyFrozen(Halves):
    frozen = ("up.weight", "down.weight", "norm.bias")


CUT = {"up.weight": 0, "up.bias": 0, "down.weight": 1}  # along which dimension
SPECS = [
    {"patterns": [r".*up\.weight$"], "partition_type": "column"},
    {"patterns": [r".*down\.weight$"], "partition_type": "row"},
]

CUTS = {
    "tensor_parallel": {
        "autotp_size": 2,
        "partition_config": {"use_default_specs": False, "layer_specs": SPECS},
    }
}


def reset_mesh(degree):
    """DeepSpeed's groups for so many tensor-parallel ranks, as an mpu; None of one."""
    for name in ("TENSOR_MODEL_PARALLEL", "MODEL_PARALLEL", "ZERO_PARAM_INTRA_PARALLEL"):
        setattr(groups, f"_{name}_GROUP", None)  # of an earlier engine
    groups.mpu = None
    if degree == 1:
        return None
    groups._init_tp_mesh_device(degree)
    return groups


def halves(stage, degree, seed=1, **options):
    """An engine of so many tensor-parallel ranks."""
    mpu = reset_mesh(degree)
    options |= CUTS if mpu else {}
    return make(stage, seed=seed, mpu=mpu, **{"net": Halves} | options)


def save_halves(stage, **options):
    """At TP 2 and at DP 2. What the ranks of each held, and the next losses, are the truth."""
    for tag, degree in (("whole", 1), ("cut", 2)):
        engine = halves(stage, degree, **options)
        for step in (0, 1):
            train(engine, step)
        engine.save_checkpoint(".", tag, {"word": tag})
        whole = held_by_all(engine, degree)
        save_truth([whole, [train(engine, step) for step in (2, 3)]], f"{tag}.pt")


def held_by(engine):
    """The snapshot, without what DeepSpeed cannot gather: Muon's states."""
    return snapshot(engine, "muon" not in type(torch_optimizer(engine)).__name__.lower())


def held_by_all(engine, degree):
    """What one rank would hold, from what so many tensor-parallel ranks do."""
    whole, *others = gathered(held_by(engine))[:degree]
    for key, value in whole.items():
        dimension = CUT.get(key.split()[0])
        if dimension is not None and torch.is_tensor(value):
            whole[key] = torch.cat([value, *(other[key] for other in others)], dimension)
        else:
            assert all(same(value, other[key]) for other in others), key
    return whole


def load_halves(stage, **options):
    """Every state is that which was saved, and the loss goes on: by TP 2 and DP 2 into TP 2, DP 2
    and DP 3."""
    for tag, degree in itertools.product(("cut", "whole"), degrees()):
        engine = halves(stage, degree, seed=5, **options)
        assert load(engine, tag)["word"] == tag
        truth, losses = read_truth(f"{tag}.pt")
        lost = differences(truth, held_by_all(engine, degree))
        assert not lost, (tag, degree, lost)
        gap = max(abs(train(engine, step) - loss) for step, loss in enumerate(losses, 2))
        # Of Muon's matrices, each tensor-parallel rank makes its part orthogonal.
        rounding = 1e-2 if options == MUON else 1e-6
        assert gap <= (0 if (tag, degree) == ("cut", 2) else rounding), (tag, degree, gap)
    ranks = dist.get_world_size()
    assert printed(f"written by 2 ranks (tensor 2), loaded on {ranks} without conversion")
    if on_own_ranks():
        assert printed("whole, written by 2 ranks, loaded on 2 (tensor 2) without conversion")


def kind(stages, quick_stages, quick_ranks, **options):
    save, play = (functools.partial(act, **options) for act in (save_halves, load_halves))
    return Case(save, play, stages, quick_stages, quick_ranks)


MUON = {"optimizer": {"type": "Muon", "params": {"lr": 1e-2, "torch_adam": True}}}
MORE = {"optimizer": two_groups, "scheduler": falling, "clip": 0.5}
partly_frozen = kind((1, 2, 3), (1, 3), (2,), net=PartlyFrozen, **MORE)
muon = kind((1, 2), (1,), (2,), **MUON)  # at ZeRO-3 DeepSpeed's wants DP alone


def tensor_parallel(stages=(1, 2, 3), quick_stages=(1,), save=save_halves, ranks=(2,)):
    return case(save, stages, quick_stages, ranks)


def save_of_each_rank(stage):
    engine = halves(stage, 2)
    train(engine, 0)
    count_rank(engine)
    engine.save_checkpoint(".", "t", {"rank": dist.get_rank()})


@tensor_parallel((1, 2, 3), (1, 3), save=save_of_each_rank)
def of_each_rank(stage):
    """On as many tensor-parallel ranks each gets its own buffers and client state."""
    reason = "calls is in no optimizer, and not the same on all tensor-parallel ranks"
    refused(halves(stage, 1), reason, "load_module_strict=False")
    load(halves(stage, 1), load_module_strict=False)
    if on_own_ranks():
        engine = halves(stage, 2)
        rank = dist.get_rank()
        assert load(engine)["rank"] == rank
        assert engine.module.calls.tolist() == [12.0 + rank] * 3


# --------------------------------------------------------------------------------------------------
# damage, left-over files, and what does not belong together


def save_and_harm_without_zero(stage):
    """Of the ranks' files, one is flipped, missing, or of an earlier save."""
    engine = halves(stage, 2)
    for step in (0, 1):
        train(engine, step)
        engine.save_checkpoint(".", tag=str(step))
    save_of_rank(held_by(engine))
    dist.barrier()
    if is_rank_0():
        for tag in HARMS:
            shutil.copytree("1", tag)
        for i in (0, 1):
            flip(Path(f"flip {i}", f"mp_rank_0{i}_model_states.pt"))
        Path("missing", SECOND).unlink()
        shutil.copy(Path("0", SECOND), Path("mixed", SECOND))


SECOND = "mp_rank_01_model_states.pt"
HARMS = {
    "flip 0": "mp_rank_00_model_states.pt is damaged",
    "flip 1": "mp_rank_01_model_states.pt is damaged",
    "missing": "lacks the model states of mp_rank_01",
    "mixed": "its model-parallel ranks are of different saves",
}


@tensor_parallel((0,), (0,), save_and_harm_without_zero, (2, 3))
def without_zero(stage):
    """By DeepSpeed's own loader, on as many tensor-parallel ranks, once nothing is damaged."""
    refused(halves(0, 1), "1 was saved by 2 model-parallel ranks", tag="1")
    refused(halves(1, 1), "1 was saved without ZeRO: ", tag="1")
    if on_own_ranks():
        engine = halves(0, 2, seed=5)
        for tag, line in HARMS.items():
            refused(engine, line, tag=tag)
        load(engine, "1")
        truth = truths_of_ranks()[dist.get_rank()]
        assert not differences(truth, held_by(engine))


def save_and_harm(stage):
    """In "0" to "5" a bit of a tensor-parallel rank's shard is another: where only it has the
    element, and at the end, where both have it."""
    save_halves(stage)
    dist.barrier()
    if is_rank_0():
        for number in range(6):
            shutil.copytree("cut", str(number))
            (shard,) = Path(str(number)).glob(f"*zero_pp_rank_0_mp_rank_0{number % 2}_optim*")
            flip(shard, records(shard)[-1 - number // 2], at=0.1 if number < 3 else 0.99)
        shutil.copytree("cut", "left over")
        for shard in Path("cut").glob("*zero_pp_rank_0_mp*optim*"):
            name = shard.name.replace("pp_rank_0", "pp_rank_1")
            shutil.copy(shard, Path("left over", name))
            flip(Path("left over", name))


@tensor_parallel(quick_stages=(1, 3), save=save_and_harm)
def damage_is_noticed(stage):
    """And called damage, also where two ranks' copies differ by it."""
    engine = halves(stage, 1, seed=5)
    for number in range(6):
        refused(engine, f"{number}/", "optim_states.pt is damaged", tag=str(number))
    load(engine, "left over")
    assert printed("left over from before")
    assert not differences(read_truth("cut.pt")[0], held_by(engine))


def save_two_in_one(stage):
    """Of tensor-parallel rank 1 they have the shard of an earlier save."""
    for tag, options in (("steps", {}), ("no steps", {"optimizer": momentum})):
        engine = halves(stage, 2, **options)
        for step in range(2):
            train(engine, step)
            engine.save_checkpoint(".", tag=f"{tag} {step}")
        if is_rank_0():
            (shard,) = Path(f"{tag} 0").glob("*mp_rank_01_optim_states.pt")
            os.utime(shutil.copy(shard, Path(f"{tag} 1", shard.name)), (0, 0))


@tensor_parallel((1, 2), save=save_two_in_one)
def two_saves_in_one(stage):
    refused(halves(stage, 1), "mp_rank_01_optim_states.pt is at optimizer step", tag="steps 1")
    engine = halves(stage, 1, optimizer=momentum)
    refused(engine, "model states and shards are of different steps", tag="no steps 1")


# --------------------------------------------------------------------------------------------------
# who says how the ranks cut


def save_without_info(stage):
    halves(stage, 1).save_checkpoint(".", tag="whole")
    engine = halves(stage, 2)
    engine.save_checkpoint(".", tag="cut")
    for tag, info in {"silent": None, "told": INFO}.items():
        engine.module.universal_checkpoint_info = info
        engine.save_checkpoint(".", tag)


@tensor_parallel(save=save_without_info)
def a_model_that_says_nothing(stage):
    """What the checkpoint says is enough; if it says nothing either, the line names what to set."""
    cure = "tensor-parallel ranks and no universal_checkpoint_info"
    refused(halves(stage, 1), "silent has 2", cure, tag="silent")
    if on_own_ranks():
        engine = halves(stage, 2)
        engine.module.universal_checkpoint_info = None
        refused(engine, "this engine has 2", cure, tag="whole")
        load(engine, "cut")


INFO = {
    "universal_checkpoint_version": 0.2,
    "tp_replicated_parameter_patterns": [r"norm\..*", r"down\.bias"],
    "parameter_with_row_parallelism_patterns": [r"down\.weight"],
}
TWO_IN_ONE = {"patterns": [r"up\.weight"], "shape": [2, 8], "partition_dim": 0}
OTHER_INFO = INFO | {"parameter_with_sub_params": [TWO_IN_ONE]}


@tensor_parallel(save=save_without_info)
def a_model_that_says_something_else(stage):
    """Of another degree, its parts would be others. On the same one they are as they were."""
    engine = halves(stage, 1)
    engine.module.universal_checkpoint_info = OTHER_INFO
    says = "up.weight is of ['parameter_with_sub_params'] in the model's universal_checkpoint_info"
    refused(engine, says, tag="told")
    if on_own_ranks():
        engine = halves(stage, 2, seed=5)
        engine.module.universal_checkpoint_info = OTHER_INFO
        load(engine, "told")
        truth, held = (snapshot(each, states=False) for each in (halves(stage, 2), engine))
        assert not differences(truth, held)
