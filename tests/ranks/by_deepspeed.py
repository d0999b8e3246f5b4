"""Checkpoints that DeepSpeed's own loader reads for us, where states belong to a rank; and those
that a converter wrote."""

import functools
import shutil
from pathlib import Path

import torch.distributed as dist
from optimizers import OfItsRank, SliceNorm

import universal
from tests.support.case import case, load, printed, refused, saved, train_and_save
from tests.support.conversions import convert_with_deepspeed
from tests.support.files import flip, records
from tests.support.toy import differences, make, read_truth, save_truth, snapshot, train

of_slices = functools.partial(make, optimizer=SliceNorm)


def save_and_go_on(stage):
    """Beside the shards is one of a rank that there is no more, and it is damaged."""
    engine = train_and_save(stage, optimizer=SliceNorm)
    (path,) = Path("t").glob("*zero_pp_rank_1_mp*optim_states.pt")
    if dist.get_rank() == 0:
        left_over = path.with_name(path.name.replace("rank_1", "rank_2"))
        shutil.copy(path, left_over)
        flip(left_over)
    save_truth([train(engine, step) for step in (2, 3)], "losses.pt")


@case(save_and_go_on, quick_ranks=(2,), quick_stages=(1, 3))
def half_a_step_of_slices(stage):
    """Its gradients are not added to those of the next step."""
    engine = of_slices(stage, seed=5)
    if dist.get_world_size() == 3:
        refused(engine, "on its own ranks only")
        return
    train(engine, 7)
    train(engine, 8, micro_batches=1)
    load(engine)
    assert printed("the gradients of half a step are discarded", "left over from before")
    assert [train(engine, step) for step in (2, 3)] == read_truth("losses.pt")


def save_and_flip(stage):
    train_and_save(stage, optimizer=SliceNorm)
    if dist.get_rank() == 0:
        for path in Path("t").glob("*zero_pp_rank_1_mp*optim_states.pt"):
            flip(path, records(path)[-2])  # its moments


@case(save_and_flip, quick_ranks=(2,))
def a_bit_of_slices(stage):
    """DeepSpeed looks at no checksum."""
    if dist.get_world_size() == 2:
        refused(of_slices(stage), "optim_states.pt is damaged")


def in_reverse(parameters):
    return OfItsRank(parameters[::-1])


@case(saved(optimizer=OfItsRank), quick_ranks=(2,), quick_stages=(1, 3))
def parameters_in_another_order(stage):
    """Their shards have the same sizes."""
    refused(make(stage, optimizer=in_reverse), "differs between ranks 0 and 1", "own ranks only")


def save_and_convert(stage, convert=universal.convert):
    engine = train_and_save(stage)
    if dist.get_rank() == 0:
        convert("t", "u")
    dist.barrier()
    train(engine, 2)
    engine.save_checkpoint(".", tag="later")


@case(save_and_convert)
def converted_ones_alone(stage):
    """The config says load_universal, and no tag is given."""
    engine = make(stage, seed=5, checkpoint={"load_universal": True})
    assert universal.load_checkpoint(engine, ".")[0] == "u"


@case(functools.partial(save_and_convert, convert=convert_with_deepspeed))
def of_deepspeeds_converter(stage):
    """At ZeRO-3 it writes numbers of elements in place of shapes, and no frozen weights."""
    engine = make(4 - stage, seed=5)
    load(engine, "u", load_module_strict=False)
    lost = {*differences(read_truth(), snapshot(engine))}
    assert lost <= {"frozen.weight", "frozen.bias", "calls", "groups"}, lost
