"""AnyRanks in a Trainer of a tiny model: what it deals of a stream, what it refuses, what it says
of another schedule; and three of the releases of transformers that `make trainers` measures."""

import functools
import json
import os
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, DistributedSampler, IterableDataset
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

import universal
from measure import trainers
from tests.support import toy
from tests.support.commands import slow
from tests.support.ranks import launch, run
from universal import batches
from universal.batches import FLOATS
from universal.trainer import AnyRanks, PaddedBatchSampler, batch_config, digest_of

SAMPLES = 45  # five steps of 8, and one of 5
STEPS = 14
ROUNDING = 1e-6


class Numbers(Dataset):
    """Sample n is the sentence n, n + 1, ..., of which n % 5 + 3 words count."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, n):
        words = torch.arange(n, n + 8) % 16
        return {"words": words, "labels": words.where(torch.arange(8) < n % 5 + 3, -100)}


class Stream(IterableDataset):
    """The same in an order of each epoch. part: the samples that are in it."""

    epoch = 0

    def __init__(self, part=slice(None)):
        self.part = part

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch))
        return map(Numbers().__getitem__, order[self.part].tolist())


def split():
    return Stream(slice(torch.distributed.get_rank(), None, 2))


class Model(nn.Module):
    main_input_name = "words"

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))

    def forward(self, words, labels, num_items_in_batch=None):
        logits = self.body(words)[:, :-1].mT
        how = "mean" if num_items_in_batch is None else "sum"
        loss = nn.functional.cross_entropy(logits, labels[:, 1:], reduction=how)
        return {"loss": loss / (num_items_in_batch or 1)}


class SplitOrder(Trainer):
    def _get_train_sampler(self, *_):
        return DistributedSampler(self.train_dataset)


def train(data=Stream, resume=None, bases=(AnyRanks, Trainer), callbacks=(), **named):
    """In a rank, for 14 steps; each is saved, but in a resumed run the last alone."""
    toy.begin()
    universal.install()
    torch.manual_seed(2 if resume else 1)
    config = {**batches.config(8, 2), "zero_optimization": {"stage": 2}}
    options = {
        "deepspeed": config,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": config["gradient_accumulation_steps"],
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "max_steps": STEPS,
        "logging_steps": 1,
        "save_steps": STEPS if resume else 1,
        "include_num_input_tokens_seen": True,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    arguments = TrainingArguments("saved", **options | named)
    kind = type("OnAnyRanks", bases, {})
    trainer = kind(Model(), arguments, train_dataset=data(), callbacks=[*callbacks])
    trainer.train(resume_from_checkpoint=resume)


def state_of(folder, step=STEPS):
    return folder / "saved" / f"checkpoint-{step}" / "trainer_state.json"


def losses(folder):
    """{step: (loss, rate)}, and the number of tokens, of the run in the folder."""
    state = json.loads(state_of(folder).read_text())
    rows = [row for row in state["log_history"] if "loss" in row]
    return {r["step"]: (r["loss"], r["learning_rate"]) for r in rows}, state[
        "num_input_tokens_seen"
    ]


@pytest.fixture(scope="module")
def streamed(tmp_path_factory):
    """A folder in which 2 ranks have saved."""
    folder = tmp_path_factory.mktemp("streamed")
    run(folder, 2, train)
    return folder


def go_on(source, folder, ranks, step, **named):
    """A run from the checkpoint of that step."""
    checkpoint = state_of(folder, step).parent
    if not checkpoint.exists():
        shutil.copytree(state_of(source, step).parent, checkpoint)
    resume = str(checkpoint.relative_to(folder))
    return launch(folder, ranks, functools.partial(train, resume=resume, **named))


def check_equal(source, folder):
    (before, tokens), (after, tokens_after) = losses(source), losses(folder)
    assert tokens == tokens_after == 8 * (2 * SAMPLES + 2 * 8)  # of two epochs and two steps
    assert [*before] == [*after] == [*range(1, STEPS + 1)]
    for step, (loss, rate) in after.items():
        assert abs(loss - before[step][0]) <= ROUNDING and rate == before[step][1]


class InFront(Trainer):
    def compute_loss(self, *args, **options):
        return Trainer.compute_loss(self, *args, **options)


@pytest.mark.parametrize(
    "step, ranks, workers, bases",
    [(3, 3, 2, (InFront, AnyRanks, Trainer)), (6, 1, 0, (AnyRanks, Trainer))],
)
def test_a_stream(streamed, tmp_path, step, ranks, workers, bases):
    """From the first epoch and its end, the samples are the same."""
    named = {"dataloader_num_workers": workers, "bases": bases}
    result = go_on(streamed, tmp_path, ranks, step, **named)
    assert result.code == 0, result.errors
    check_equal(streamed, tmp_path)
    assert "NOTE: the schedule" not in result.out


def test_a_stream_without_a_place(streamed, tmp_path):
    """As of a checkpoint of Trainer alone, or in a shorter stream. It goes on, in the second epoch,
    when the user has written the place."""
    for step in (3, 8):
        shutil.copytree(state_of(streamed, step).parent, state_of(tmp_path, step).parent)
    path = state_of(tmp_path, 8)
    whole = path.read_text()
    state = json.loads(whole)
    assert state["stateful_callbacks"].pop("AnyRanks") == [1, 2]
    path.write_text(json.dumps(state))
    short = functools.partial(Stream, slice(20))

    def job():
        for step, words in ((3, "the stream ends before"), (8, "does not say how far its run has")):
            with pytest.raises(ValueError, match=words):
                train(short, f"saved/checkpoint-{step}")

    run(tmp_path, 3, job)
    path.write_text(whole)
    assert go_on(streamed, tmp_path, 3, 8).code == 0
    check_equal(streamed, tmp_path)


class OwnStep(Trainer):
    def training_step(self, model, inputs, *args):
        loss = model(**inputs)["loss"]
        self.accelerator.backward(loss)
        return loss.detach()


REFUSED = {
    "leave out dispatch_batches, ": {"accelerator_config": {"dispatch_batches": True}},
    "set use_seedable_sampler=True": {
        "data": Numbers,
        "accelerator_config": {"use_seedable_sampler": False},
    },
    "wants ignore_data_skip=False": {"ignore_data_skip": True},
    "wants average_tokens_across_devices=True": {"average_tokens_across_devices": False},
    "the ranks draw from different samples": {"data": split},
    "a DistributedSampler gives": {
        "data": Numbers,
        "bases": (AnyRanks, SplitOrder),
    },
    "training_step.. does not call compute_loss": {"bases": (AnyRanks, OwnStep)},
}


def test_refused(tmp_path):
    """Before the first step is done."""

    def job():
        for words, named in REFUSED.items():
            with pytest.raises(ValueError, match=words):
                train(**named)

    run(tmp_path, 2, job)
    assert not list(tmp_path.glob("saved/*"))


@pytest.mark.parametrize("how", ["ACCELERATE_USE_CPU", "no config"])
def test_without_deepspeed(tmp_path, how):
    """accelerate may turn it off in silence. A batch has been named, so that is not advised."""
    named = {} if how.isupper() else {"deepspeed": None}

    def job():
        os.environ[how] = "true"
        with pytest.raises(ValueError, match=r"without DeepSpeed here .MULTI_CPU., .* and --cpu$"):
            train(**named)

    run(tmp_path, 2, job)
    assert not list(tmp_path.glob("saved/*"))


def test_another_schedule(streamed, tmp_path):
    """Trainer's scheduler takes a step's rate from the one before."""
    result = go_on(streamed, tmp_path, 2, 14, max_steps=28)
    assert result.code == 0, result.errors
    line = (
        "universal: NOTE: the schedule of the learning rate is another one: step 15 has 0.0e+00, "
        "as it was saved, and step 16 has 4.4e-03"
    )
    assert line in result.out.splitlines()
    rates = json.loads(state_of(tmp_path, 28).read_text())["log_history"]
    assert [f"{r['learning_rate']:.1e}" for r in rates[14:16]] == ["0.0e+00", "4.4e-03"]


def test_an_epoch_whose_last_step_is_short(monkeypatch):
    """Trainer fills it up; a run that it began is told so, where AnyRanks goes on."""
    share = batches.Share(batch=8, micro_batch=2, ranks=1, rank=0)
    said = []
    monkeypatch.setattr(batches, "share", lambda engine: share)
    monkeypatch.setattr("universal.trainer.say", said.append)
    trainer = AnyRanks()
    trainer.model_wrapped = trainer.lr_scheduler = None
    trainer.say_kept = dict  # of a Trainer that is one
    for length, trained, epoch, saved in (
        (22, 3, 0.5, {}),
        (22, 3, 3 / 5.5, {}),  # of Trainer, whose last step has fewer micro-batches
        (24, 3, 0.5, {}),
        (22, 0, None, {}),
        (22, 3, 0.5, {"AnyRanks": ()}),
        (22, 8, 1.6, {}),  # of Trainer with dataloader_drop_last: 5 steps an epoch
    ):
        trainer.filled_steps = PaddedBatchSampler([], share, length)
        trainer.state = SimpleNamespace(global_step=trained, epoch=epoch, stateful_callbacks=saved)
        trainer.begin_training()
    short, *more, other = said
    assert more == [short] and "the checkpoint does not name AnyRanks" in short
    assert other.startswith("WARNING: an epoch had 5 steps, and has 6 now")


def test_a_batch_of_nothing():
    with pytest.raises(ValueError, match="UNIVERSAL_BATCH=0 is no number of samples"):
        batch_config("0", None)


def test_each_epoch_is_compared():
    """A rank may shuffle it by a generator of its own."""
    share = batches.Share(4, 2, 1)
    steps = PaddedBatchSampler([[0, 1], [2, 3]], share, 2)
    drawn = set()
    for micro_batches in ([[0, 1], [2, 3]], [[2, 3], [0, 1]]):
        steps.micro_batches = micro_batches
        share.ledger.is_compared = True
        assert len([*steps]) == 2 and not share.ledger.is_compared
        drawn.add(share.ledger.drawn)
    assert len(drawn) == 2


def test_what_tells_samples():
    """What is exact; floats where there is nothing else."""
    numbers = torch.arange(4)
    exact = [[{"ids": numbers, "x": torch.rand(2)}], [{"ids": numbers, "x": torch.rand(2)}]]
    other = [{"ids": numbers + 1, "x": exact[0][0]["x"]}]
    assert digest_of(exact[0]) == digest_of(exact[1]) != digest_of(other)
    halves = torch.rand(2).bfloat16()
    floats = [[halves], [halves.clone()], [halves + 1], [np.ones(2)], [1.5]]
    same, again, *others = map(digest_of, floats)
    assert same == again and len({same, *others}) == 4
    assert all(digest.startswith(FLOATS) for digest in (same, *others))
    assert len({*map(digest_of, [[3], [b"3"], ["3"], [np.arange(3)], [np.arange(3) + 1]])}) == 5


def test_an_older_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(__version__="4.54.1"))
    with pytest.raises(ValueError, match=r"AnyRanks wants transformers 4\.55 or newer: 4\.54\.1"):
        AnyRanks()


@pytest.mark.parametrize("release", [slow("4.55.4"), slow("4.57.6"), slow("5.24.0")])
def test_releases(tmp_path, release):
    beside, _ = trainers.RELEASES[release]
    columns = ["means, ZeRO-2", "tokens, ZeRO-3"]
    for values in trainers.run(release, beside, columns, tmp_path).values():
        assert max(values) <= trainers.ROUNDING, values


def count_one_step_less(folder, step):
    path = state_of(folder, step)
    path.write_text(
        path.read_text().replace(f'"global_step": {step},', f'"global_step": {step - 1},')
    )


def test_saved_within_a_step(streamed, tmp_path):
    """As Trainer does when a signal comes there: the engine has made the step, Trainer has not."""
    shutil.copytree(state_of(streamed, 3).parent, state_of(tmp_path, 3).parent)
    count_one_step_less(tmp_path, 3)
    result = go_on(streamed, tmp_path, 3, 3)
    assert result.code and "the weights have taken 3 steps" in result.errors
    assert 'write "global_step": 3 and "epoch"' in result.errors


class Patience(TrainerCallback, ExportableState):
    """Counts its steps, and has that saved."""

    steps = 0

    def on_step_end(self, *_, **named):
        self.steps += 1

    def state(self):
        return {"args": {}, "attributes": {"steps": self.steps}}


def test_what_a_resume_does_not_take(tmp_path):
    """Another rate and decay; and a callback's counter."""

    def job():
        train(callbacks=[Patience()], max_steps=2, weight_decay=0.1)
        changed = {"learning_rate": 3e-2, "weight_decay": 0.2, "max_steps": 3}
        train(resume="saved/checkpoint-2", callbacks=[Patience()], **changed)

    said = run(tmp_path, 2, job)
    assert "NOTE: learning_rate of group 0 stays 0.01, as it was saved: 0.03 is not taken" in said
    assert "NOTE: weight_decay of group 0 stays 0.1, as it was saved: 0.2 is not taken" in said
    assert "NOTE: Patience begins anew: restore_callback_states_from_checkpoint=True" in said
