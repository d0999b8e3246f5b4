"""Checkpoints that DeepSpeed's own loader reads for us, where states belong to a rank; and those
that a converter wrote."""

import functools
import shutil
from pathlib import Path

from optimizers import OfItsRank, SliceNorm

import universal
from tests.support.case import (
    case,
    check_losses,
    check_restored,
    load,
    on_own_ranks,
    printed,
    refused,
    resumed,
    save_and_go_on,
    saved,
    train_and_save,
)
from tests.support.conversions import convert_with_deepspeed
from tests.support.files import flip, records
from tests.support.toy import is_rank_0, make, train

of_slices = functools.partial(make, optimizer=SliceNorm)


def save_beside_left_over(stage):
    """Beside the shards is one of a rank that there is no more, and it is damaged."""
    save_and_go_on(stage, optimizer=SliceNorm)
    (path,) = Path("t").glob("*zero_pp_rank_1_mp*optim_states.pt")
    if is_rank_0():
        left_over = path.with_name(path.name.replace("rank_1", "rank_2"))
        shutil.copy(path, left_over)
        flip(left_over)


@case(save_beside_left_over, quick_ranks=(2,), quick_stages=(1, 3))
def half_a_step_of_slices(stage):
    """Its gradients are not added to those of the next step."""
    engine = of_slices(stage, seed=5)
    if not on_own_ranks():
        refused(engine, "on its own ranks only")
        return
    train(engine, 7)
    train(engine, 8, micro_batches=1)
    load(engine)
    assert printed("the gradients of half a step are discarded", "left over from before")
    check_losses(engine)


def save_and_flip(stage):
    train_and_save(stage, optimizer=SliceNorm)
    if is_rank_0():
        for path in Path("t").glob("*zero_pp_rank_1_mp*optim_states.pt"):
            flip(path, records(path)[-2])  # its moments


@case(save_and_flip, quick_ranks=(2,))
def a_bit_of_slices(stage):
    """DeepSpeed looks at no checksum."""
    if on_own_ranks():
        refused(of_slices(stage), "optim_states.pt is damaged")


def in_reverse(parameters):
    return OfItsRank(parameters[::-1])


@case(saved(optimizer=OfItsRank), quick_ranks=(2,), quick_stages=(1, 3))
def parameters_in_another_order(stage):
    """Their shards have the same sizes."""
    refused(make(stage, optimizer=in_reverse), "differs between ranks 0 and 1", "own ranks only")


def save_and_convert(stage, convert=universal.convert):
    engine = train_and_save(stage)
    if is_rank_0():
        convert("t", "u")
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
    engine = resumed(4 - stage, "u", {"load_module_strict": False})
    check_restored(engine, but=["frozen.weight", "frozen.bias", "calls", "groups"])
