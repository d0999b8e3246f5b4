"""What becomes of next_steps.csv, and what a proof costs where something goes wrong: each function
of STORIES runs on every rank, in a folder of its own, and prints."""

import contextlib
import errno
import io
import os
import shutil
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from proof_engines import SAVED, Kind, engine_of, micro_batches, train

import universal
from tests.support.toy import begin, in_turn, is_rank_0
from universal import elastic, proof
from universal.load.overrides import deepspeed_load, overridden
from universal.mirror import Mirror

STORIES = {}
KIND = Kind()


def story(function):
    STORIES[function.__name__] = function
    return function


def new_engine(seed=1):
    return engine_of(KIND, KIND.micro[0], seed)


def saved_engine(steps=0):
    """Trained for some steps after its save."""
    engine = new_engine()
    train(engine, KIND, range(1, SAVED + 1))
    engine.save_checkpoint(".", tag="t")
    train_more(engine, steps)
    return engine


def resume(steps=0, tag="t", **options):
    engine = new_engine(seed=2)
    engine.load_checkpoint(".", tag=tag, **options)
    train_more(engine, steps)
    return engine


def train_more(engine, steps):
    train(engine, KIND, range(engine.global_steps + 1, engine.global_steps + 1 + steps))


def steps_in(path="t/next_steps.csv"):
    dist.barrier()
    return [int(line.split(",")[0]) for line in Path(path).read_text().splitlines()[1:]]


def on_rank_0(work, *arguments):
    dist.barrier()
    if is_rank_0():
        work(*arguments)
    dist.barrier()


@story
def resumed_twice():
    """The rows are of the run that saved: what branches from its checkpoint writes none there."""
    saved_engine(3)
    for _ in range(2):
        resume(12)
        assert steps_in() == [3, 4, 5]


@story
def half_a_row():
    saved_engine(3)
    path = Path("t/next_steps.csv")
    on_rank_0(lambda: path.write_text(path.read_text()[:-7]))
    resume(12)


@story
def not_through_links():
    """A copy by `cp -al`, and one whose files are symbolic links, keep what they had: of the
    original's later steps nothing, nor of a save over them."""
    engine = saved_engine(1)
    path = Path("t/next_steps.csv")
    on_rank_0(shutil.copytree, "t", "hard", False, None, os.link)
    train_more(engine, 1)
    assert steps_in() == [3]
    for link in (os.link, os.symlink):
        on_rank_0(path.replace, "blob")
        on_rank_0(link, Path("blob").absolute(), path)
        before = steps_in("blob")
        engine.save_checkpoint(".", tag="t")
        train_more(engine, 1)
        assert steps_in("blob") == before and steps_in() == [engine.global_steps]
        assert not path.is_symlink()


@story
def another_rate_on_purpose():
    """One warning; the file stays as it is, and the next save begins its own."""
    saved_engine(3)
    engine = resume()
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.02
    train_more(engine, 3)
    engine.save_checkpoint(".", tag="u")
    train_more(engine, 2)
    assert steps_in() == [3, 4, 5] and steps_in("u/next_steps.csv") == [6, 7]


@story
def saved_again_under_its_name():
    engine = saved_engine(3)
    engine.save_checkpoint(".", tag="t")
    train_more(engine, 1)
    assert steps_in() == [6]
    resume(2)


@story
def saves_at_each_step():
    engine = saved_engine()
    for step in range(3, 6):
        engine.save_checkpoint(".", tag=f"step{step}")
        train_more(engine, 1)
    assert steps_in("step3/next_steps.csv") == [3, 4, 5] and steps_in() == [3, 4, 5]


@story
def saved_within_a_step():
    """Of that step the file has what belongs to all of it: a resume trains the whole step."""
    engine = new_engine()
    train(engine, KIND, range(1, SAVED + 1))
    for place, (samples, weight) in enumerate(micro_batches(engine, SAVED + 1)):
        if place == 1:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                engine.save_checkpoint(".", tag="t")
            words = "WARNING: this save is within a step, whose gradients so far are in no file"
            assert (words in printed.getvalue()) == is_rank_0()
        KIND.train(engine, samples, weight)
        engine.step()
    train_more(engine, 1)
    dist.barrier()
    _, first, second = Path("t/next_steps.csv").read_text().splitlines()
    assert first.count("null") == 4 and second.count("null") == 1, (first, second)
    resume(2)


@story
def saved_in_a_validation():
    """In inference_mode(): what the proof then makes is added to in training."""
    engine = new_engine()
    train(engine, KIND, range(1, SAVED + 1))
    with torch.inference_mode():
        engine.save_checkpoint(".", tag="t")
    train_more(engine, 2)
    assert steps_in() == [3, 4]


@story
def of_another_save():
    """A file whose rows do not begin at the next step is not this checkpoint's."""
    engine = saved_engine(2)
    engine.save_checkpoint(".", tag="u")
    train_more(engine, 1)
    on_rank_0(shutil.copyfile, "t/next_steps.csv", "u/next_steps.csv")
    resume(2, tag="u")
    assert steps_in("u/next_steps.csv") == [3, 4, 5]


@story
def removed():
    engine = saved_engine(1)
    on_rank_0(shutil.rmtree, "t")
    train_more(engine, 2)
    assert not Path("t").exists()


@story
def renamed():
    engine = saved_engine(1)
    on_rank_0(os.rename, "t", "u")
    train_more(engine, 2)
    assert steps_in("u/next_steps.csv") == [3, 4, 5]


@story
def elastic_save():
    engine = saved_engine()
    with contextlib.redirect_stdout(io.StringIO()):
        elastic.save(engine, ".", {})
    train_more(engine, 2)
    assert steps_in("global_step2/next_steps.csv") == [3, 4]
    resume(2, tag="global_step2")


@story
def mirrored():
    """The copy in memory has the file, too."""
    engine = saved_engine()
    with contextlib.redirect_stdout(io.StringIO()):
        Path("memory").mkdir(exist_ok=True)
        Mirror(engine, "memory").save({})
    train_more(engine, 2)
    (slot,) = Path("memory").glob("step*")
    assert steps_in(slot / "next_steps.csv") == [3, 4]
    resume(2, tag=str(slot))


@story
def full_disk():
    """It costs the proof and one line, but no step."""
    engine = saved_engine(1)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "next_steps.csv")

    with overridden(proof.NextSteps, write=full):
        train_more(engine, 3)
    assert engine.global_steps == SAVED + 4 and steps_in() == [3]


@story
def no_folder():
    """As if an asynchronous writer had not yet made it."""
    engine = new_engine()
    train(engine, KIND, range(1, 2))
    proof.begin_after_save(engine, Path("nowhere"))
    train_more(engine, 2)
    assert engine.global_steps == 3


@story
def weights_alone():
    saved_engine(2)
    resume(2, load_optimizer_states=False)
    resume(2, load_module_only=True)


@story
def converted():
    """The universal checkpoint has the file, and may be converted again."""
    saved_engine(3)
    for _ in range(2):
        on_rank_0(universal.convert, "t", "t_universal")
    resume(3, tag="t_universal")
    assert steps_in("t_universal/next_steps.csv") == [3, 4, 5]


@story
def deepspeeds_own_loader():
    saved_engine(3)
    with overridden(deepspeed.DeepSpeedEngine, load_checkpoint=deepspeed_load):
        proof.install()
        resume(3)
        engine = resume()
        engine.module.second.weight.data.mul_(1.01)
        train_more(engine, 1)


@story
def tag_0():
    """As DeepSpeed names its folder; a checkpoint of the default name stays as it is."""
    engine = saved_engine()
    engine.save_checkpoint(".", client_state={})
    train_more(engine, 1)
    engine = resume()
    engine.save_checkpoint(".", tag=0)
    train_more(engine, 2)
    assert steps_in("0/next_steps.csv") == [3, 4] and steps_in("global_step2/next_steps.csv") == [3]


@story
def earlier_version():
    """Its rows lack columns, and have another digest of the samples."""
    saved_engine(3)
    path = Path("t/next_steps.csv")
    columns = path.read_text().replace("micro_batch", "x").replace("digests", "samples")
    on_rank_0(path.write_text, columns)
    resume(12)
    assert steps_in() == [3, 4, 5]  # no row of other columns behind them


@story
def no_rate():
    """The optimizer chooses it."""
    with overridden(deepspeed.DeepSpeedEngine, get_lr=lambda engine: [None, None]):
        saved_engine(3)
        resume(3)


@story
def not_a_number_before():
    """Nor afterwards: that is no agreement."""
    for engine in (saved_engine(), None):
        engine = engine or resume()
        engine.module.second.weight.data.fill_(torch.nan)
        train_more(engine, 3)


@story
def forward_tried_again():
    """After it has run out of memory, say."""
    saved_engine(2)
    engine = resume()
    with overridden(engine.module, forward=None), contextlib.suppress(TypeError):
        engine(torch.ones(1, 6))
    train_more(engine, 2)


@story
def standard_output_is_gone():
    """A closed file, and one that has no u-umlaut."""
    closed = io.StringIO()
    closed.close()
    ascii_alone = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    engine = new_engine()
    train(engine, KIND, range(1, SAVED + 1))
    engine.save_checkpoint("ü", tag="t")
    train_more(engine, 1)
    for output in (closed, ascii_alone):
        engine = new_engine(seed=2)
        with contextlib.redirect_stdout(output):
            engine.load_checkpoint("ü", tag="t")
            train_more(engine, 1)
            elastic.save(engine, "ü", {})
    said = ascii_alone.buffer.getvalue().decode("ascii").splitlines()
    assert len(said) == (3 if is_rank_0() else 0), said


@story
def saves_without_steps():
    """The folders of the last ten alone stay open."""
    engine = saved_engine()
    before = len(os.listdir("/proc/self/fd"))
    for number in range(30):
        engine.save_checkpoint(".", tag=f"save{number}")
    assert len(os.listdir("/proc/self/fd")) <= before + proof.STEPS
    train_more(engine, 1)
    assert steps_in("save29/next_steps.csv") == [3] and steps_in("save0/next_steps.csv") == []


@story
def two_engines():
    """The lines of each say whose they are."""
    names = ("actor", "critic")
    engines = [new_engine() for _ in names]
    for name, engine in zip(names, engines, strict=True):
        train(engine, KIND, range(1, SAVED + 1))
        engine.save_checkpoint(name, tag="t")
        train_more(engine, 2)
    for name, engine in zip(names, engines, strict=True):
        engine.load_checkpoint(name, tag="t")
    for engine in engines:
        train_more(engine, 2)


@story
def not_wanted():
    universal.install(proof=False)
    saved_engine(1)
    universal.install()
    assert not Path("t/next_steps.csv").exists()


def play_stories(*names):
    begin()
    universal.install()

    def play_story(name):
        on_rank_0(print, f"== {name}")
        STORIES[name]()

    in_turn(names, play_story)
