"""A job that starts for the first time, begins again in the middle of a step, or has a rank that
fails; files of two saves, of each machine's own disk."""

import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from optimizers import momentum
from torch import nn

import universal
from tests.support.case import (
    PRINTED,
    case,
    check_losses,
    check_restored,
    installed,
    load,
    printed,
    refused,
    restored,
    resumed,
    saved,
    saved_with_losses,
    train_and_save,
)
from tests.support.files import flip, records
from tests.support.toy import (
    BF16_OPTIMIZER,
    differences,
    forward,
    is_rank_0,
    make,
    save_of_rank,
    save_truth,
    snapshot,
    train,
    truths_of_ranks,
)
from universal import batches, mirror
from universal.load import engine as engines
from universal.load import loader
from universal.load.overrides import overridden
from universal.load.reader import TensorReader
from universal.save import plain
from universal.write import publish


def save_beside_damage(stage):
    train_and_save(stage, "epoch1/step2")
    damaged = Path("damaged", "t")
    damaged.mkdir(parents=True, exist_ok=True)
    (damaged / "mp_rank_00_model_states.pt").write_text("x")
    Path("empty").mkdir(exist_ok=True)


@case(save_beside_damage)
def the_first_start(stage):
    """install() keeps DeepSpeed's contract for it, and load_checkpoint() stays strict."""
    engine = make(stage)
    with installed():
        for folder in ("nowhere", "empty"):
            assert engine.load_checkpoint(folder) == (None, None)
        assert printed("nothing was loaded: nowhere holds no checkpoint")
        for options in ({"load_dir": "nowhere", "tag": "t"}, {"load_dir": "damaged"}):
            with pytest.raises(universal.CheckpointError):
                engine.load_checkpoint(**options)
        assert engine.load_checkpoint(".")[1]["step"] == 2
        engine.save_checkpoint("more", "regular")
        train(engine, 3)
        engine.save_checkpoint("more", "best", save_latest=False)
        assert engine.load_checkpoint("more")[0] == "more/regular"
        assert printed("take that one, `echo best > more/latest`")


def save_as_trainer(stage):
    engine = make(stage)
    for step in (2, 4):
        train(engine, step)
        train(engine, step)
        engine.save_checkpoint(f"out/checkpoint-{step}", f"global_step{step}")


def not_listed(*_):
    raise OSError("a folder that nobody may list")


@case(save_as_trainer)
def a_run_that_loads_nothing(stage):
    """Its first save says which later checkpoint of another run is there: in its folder, or, where
    that is named by the step, beside it."""
    for path in Path("out").rglob("*_model_states.pt"):
        os.utime(path, (0, 0))  # the system tells to a second only when this run began
    with installed():
        begun, gone_on, apart = make(stage), make(stage), make(stage)
        found = "now saves its step {} there: to continue the older run, stop this one, and start"
        train(begun, 0)
        begun.save_checkpoint("out/checkpoint-1", "global_step1")
        assert printed("WARNING: ", "/checkpoint-4/global_step4 is of step 4, and", found.format(1))
        train(begun, 1)
        begun.save_checkpoint("out/checkpoint-2", "global_step2")
        assert not is_rank_0() or not printed(found.format(2))
        PRINTED.truncate(0)
        universal.load_checkpoint(gone_on, "out/checkpoint-4", "global_step4")
        gone_on.save_checkpoint("out/checkpoint-4", "global_step4")
        with overridden(plain, checkpoints_near=not_listed):
            apart.save_checkpoint("elsewhere", "t")
        assert not is_rank_0() or not printed("WARNING: ")


@case(save_as_trainer, stages=(1,))
def weights_of_a_trainers_checkpoint(stage):
    """The engine counts its own steps then, one more than the checkpoint's."""
    if is_rank_0():
        Path("out/checkpoint-2/trainer_state.json").write_text('{"global_step": 2, "epoch": 1.0}')
    dist.barrier()
    engine = make(stage)
    for step in range(3):
        train(engine, step)
    folder = "out/checkpoint-2"
    universal.load_checkpoint(engine, folder, "global_step2", load_module_only=True)
    assert engine.global_steps == 3


def go_back(stage, tolerance=1e-6, exact=True, **options):
    """To a checkpoint, when all weights are NaN, and from the middle of an accumulation."""
    engine = make(stage, seed=5, **options)
    for group in engine.optimizer.param_groups:
        group["lr"] = float("nan")
    train(engine, 7)
    train(engine, 8, micro_batches=1)
    forward(engine, 9)  # at ZeRO-3 it may leave weights whole
    load(engine)
    assert printed(HALF_A_STEP)
    check_losses(engine, tolerance, exact=exact)
    return engine


HALF_A_STEP = "the gradients of half a step are discarded"


@case(saved_with_losses(), quick_stages=(1, 3))
def half_a_step(stage):
    """Those gradients are not added to the next step's."""
    engine = go_back(stage)
    train(engine, 8, micro_batches=1)
    load(engine, load_module_only=True)
    assert engine.micro_steps % engine.gradient_accumulation_steps() == 0


@case(saved_with_losses(), quick_stages=(2, 3), quick_ranks=(2,))
def half_a_step_elsewhere(stage):
    """With gradients on the CPU; with weights that a forward pass has left whole."""
    go_back(stage, exact=False, zero={"offload_optimizer": {"device": "cpu"}})
    go_back(stage, exact=False, zero={"stage3_param_persistence_threshold": 0})


@case(saved_with_losses(**BF16_OPTIMIZER), quick_stages=(1, 2), quick_ranks=(2,))
def half_a_step_of_sums(stage):
    """With gradients added up in another precision, and so in another place."""
    go_back(stage, 1e-3, **BF16_OPTIMIZER)


def micro_batch(engine, number=8):
    engine.backward(forward(engine, number))


def step_at_the_boundary(engine, step):
    """As accelerate trains: it says which micro-batch is the last, and steps at that alone."""
    count = engine.gradient_accumulation_steps()
    for i in range(count):
        engine.set_gradient_accumulation_boundary(i == count - 1)
        micro_batch(engine, 100 * step + i)
    engine.step()


@case(stages=(0, 1, 2, 3), quick_ranks=(2,), quick_stages=(0, 2))
def a_boundary_that_is_told(stage):
    """DeepSpeed then counts steps, not micro-batches: only half a step is said to be one."""
    engine = make(stage, seed=5)
    for step in (7, 8, 9, 10):
        step_at_the_boundary(engine, step)
    load(engine)
    assert not is_rank_0() or not printed("half a step")
    step_at_the_boundary(engine, 2)
    engine.set_gradient_accumulation_boundary(False)
    micro_batch(engine)
    load(engine)
    assert printed(HALF_A_STEP)


UNMANAGED = {"managed_gradient_accumulation": False}


@case(saved(**UNMANAGED), quick_ranks=(2,), quick_stages=(1, 3))
def half_a_step_unmanaged(stage):
    """Its samples are not counted with those of the next step."""
    engine = make(stage, seed=5, **UNMANAGED)
    micro_batch(engine)
    engine.step()
    load(engine)
    assert not is_rank_0() or not printed("half a step")
    samples = engine.global_samples
    micro_batch(engine)
    load(engine)
    assert printed(HALF_A_STEP)
    micro_batch(engine)
    engine.step()
    assert engine.global_samples == samples + dist.get_world_size()
    engine = make(stage, seed=5, zero={"offload_optimizer": {"device": "cpu"}}, **UNMANAGED)
    micro_batch(engine)
    load(engine)
    left = (
        vars(engine.optimizer).get(f"_offload_{name}_param_ids")
        for name in ("accumulated", "boundary")
    )
    assert not any(left)  # what the next step does not use, it would add


def grow(engine):
    batches.install()  # the save's config then tells it
    engine.set_train_batch_size(24)
    train(engine, 4)


@case(saved_with_losses(steps=4, change=grow), quick_stages=(1,))
def a_batch_that_grows_after_the_load(stage):
    """5 steps of the smaller batch would be two and a half of the larger."""
    engine = resumed(stage)
    engine.set_train_batch_size(24)
    check_losses(engine, begin=4)
    for named in ({}, {batches.TRUE_BATCH: 24}):  # who names one has chosen
        load(make(stage, batch=24, seed=5, **named))
        line = "was 24 by its config; 72 samples in 5 steps are 14.4 each, and is 24 now: another"
        assert PRINTED.getvalue().count(line) == is_rank_0()


@case(quick_stages=(1, 3))
def masters_in_another_order(stage):
    """As of a DeepSpeed that cuts shards otherwise: every load compares the masters with the
    weights."""
    engine = make(stage, seed=5)
    optimizer = engine.optimizer
    flats = "fp32_partitioned_groups_flat" if stage == 3 else "single_partition_of_fp32_groups"
    for flat in getattr(optimizer, flats):
        flat.data.copy_(flat.data.roll(1))
    with overridden(optimizer, refresh_fp32_params=lambda: None):
        refused(engine, "does not hold", " as expected")


def fill_a_part(reader, **_):
    for buffer, *_ in reader.requests:
        buffer[0] ^= 1
    raise universal.CheckpointError("planted")


@case(saved(), quick_stages=(1, 3))
def a_read_that_fails(stage):
    """Masters on the CPU are filled in part by then, and are made from the weights again."""
    engine = make(stage, seed=5)
    before = snapshot(engine)
    with overridden(TensorReader, fetch=fill_a_part), overridden(engines, COMPARED=1):
        refused(engine, "planted")
    assert not differences(before, snapshot(engine))


def save_two_in_one(stage):
    train_and_save(stage, "before", optimizer=momentum)
    train_and_save(stage, steps=4, optimizer=momentum)
    if is_rank_0():
        (shard,) = Path("before").glob("*zero_pp_rank_1_mp*optim_states.pt")
        os.utime(shutil.copy(shard, Path("t", shard.name)), (0, 0))


@case(save_two_in_one, stages=(1, 2))
def two_saves_in_one(stage):
    """One rank's shard is that of the save before, and the optimizer counts no steps. At ZeRO-3
    nobody could tell."""
    engine = make(stage, seed=5, optimizer=momentum)
    refused(engine, "model states and shards are of different steps")


@case(saved(steps=0))
def before_the_first_step(stage):
    """There are no moments yet."""
    restored(stage)


def save_and_flip_models(stage):
    train_and_save(stage)
    if is_rank_0():
        for path in Path("t").glob("*model_states.pt"):
            for record in records(path):
                flip(path, record)


@case(save_and_flip_models)
def damage_is_seen_before_the_engine_changes(stage):
    """That of a frozen weight, too, which is read last."""
    engine = make(stage, seed=5)
    train(engine, 7)
    before = snapshot(engine)
    refused(engine, "model_states.pt is damaged")
    assert not differences(before, snapshot(engine))


@case(quick_stages=(1,), quick_ranks=(2,))
def a_load_that_takes_long(stage):
    """It ends with its figures; others print none."""
    engine = make(stage, seed=5)
    load(engine)
    assert "GB/s a rank" not in PRINTED.getvalue()
    with overridden(loader, LONG_SECONDS=0):
        load(engine)
    assert printed(" bytes a rank in ", "GB/s a rank")


def newest_in_memory(stage):
    """The step in memory is newer than the one on the disk, whose model states are cut off. A later
    one lacks a shard."""
    os.makedirs("memory", exist_ok=True)
    engine = make(stage)
    mirrored = mirror.Mirror(engine, "memory")
    train(engine, 0)
    engine.save_checkpoint("disk", tag="t")
    train(engine, 1)
    mirrored.save({"step": 2})
    if mirrored.lock:
        publish.unlock(mirrored.lock)
    save_truth(snapshot(engine))
    train(engine, 2)
    engine.save_checkpoint("disk", tag="later", save_latest=False)
    if is_rank_0():
        for path in Path("disk/t").glob("*model_states.pt"):
            os.truncate(path, 100)
        next(Path("disk/later").glob("*rank_1_*optim_states.pt")).unlink()


@case(newest_in_memory)
def the_newest_in_memory_or_on_the_disk(stage):
    memory, disk = (Path(f"{name}{dist.get_world_size()}") for name in ("memory", "disk"))
    if is_rank_0():
        shutil.copytree("memory", memory)
        shutil.copytree("disk", disk)
    dist.barrier()
    engine = make(stage, seed=5)
    mirrored = mirror.Mirror(engine, memory)
    assert mirrored.gather(disk) == memory
    universal.load_checkpoint(engine, memory)
    check_restored(engine)
    train(engine, 2)
    engine.save_checkpoint(str(disk), tag="later")
    save_truth(snapshot(engine), f"{disk}.pt")
    engine = make(stage, seed=5)
    assert mirrored.gather(disk) == disk
    universal.load_checkpoint(engine, disk)
    check_restored(engine, f"{disk}.pt")


class Branches(nn.Module):
    """A step uses one of the two."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(8, 1, bias=False), nn.Linear(8, 1, bias=False)

    def forward(self, x, name, factor):
        return factor * getattr(self, name)(x).mean()


def step_of(engine, name, factor=1):
    engine.backward(engine(torch.ones(1, 8), name, factor))
    engine.step()


OFFLOADED = {"offload_optimizer": {"device": "cpu"}}


def branches(stage, seed=1):
    zero = OFFLOADED if stage < 3 else None
    return make(stage, Branches, momentum, seed, zero, batch=None, clip=1.0)


def train_on_and_load(stage):
    engine = branches(stage)
    step_of(engine, "left")
    engine.save_checkpoint(".", "t")
    step_of(engine, "left", 100)  # is thrown away
    for name, after in (("here", engine), ("anew", branches(stage, seed=5))):
        load(after)
        step_of(after, "right")
        step_of(after, "right")
        save_of_rank(snapshot(after), name)


@case(train_on_and_load, stages=(1, 2, 3), quick_stages=(1, 3))
def a_step_that_is_thrown_away(stage):
    """Its gradient is not applied to what the next step does not use: the engine that has trained
    on goes on as a new one, to the bit."""
    for here, anew in zip(truths_of_ranks("here"), truths_of_ranks("anew"), strict=True):
        assert here["left.weight"].abs().sum() > 0 and not differences(anew, here)
