"""What AnyRanks makes of losses: of models that take the number of a step's tokens and ignore it,
of mixtures, of classes that override Trainer's methods."""

import functools
import json
import random
import re

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

import universal
from tests.support import toy
from tests.support.commands import slow
from tests.support.ranks import launch, run
from universal import batches
from universal.trainer import AnyRanks, gather_rows

BATCH = 12
ROUNDING = 1e-6
SHAPE = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
BERT = {"intermediate_size": 32, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
T5 = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
BART = {"encoder_layers": 1, "decoder_layers": 1, "d_model": 16, "vocab_size": 64, "dropout": 0}


class Rows(Dataset):
    """Sample n has 8 words, and labels of each kind. samples: how many."""

    def __init__(self, labels, samples=4 * BATCH):
        self.labels = labels
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, n):
        words = (torch.arange(8) * (n % 7 + 1) + n) % 59 + 5
        labels = {"class": n % 4, "number": [n / 9], "words": words}
        return {"input_ids": words, "labels": labels[self.labels]}


def bert(**options):
    config = transformers.BertConfig(**SHAPE, **BERT, **options)
    return transformers.BertForSequenceClassification(config)


def t5():
    config = transformers.T5Config(**T5, dropout_rate=0, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def bart():
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes = {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 32}
    config = transformers.BartConfig(**BART, **heads, **sizes, attention_dropout=0)
    return transformers.BartForConditionalGeneration(config)


def mixtral():
    shape = {"intermediate_size": 32, "num_key_value_heads": 2, "num_local_experts": 4}
    routed = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SHAPE, **shape, **routed))


# {name: the model, its labels}
MODELS = {
    "a classifier": (functools.partial(bert, num_labels=4), "class"),
    "a regression": (functools.partial(bert, num_labels=1, problem_type="regression"), "number"),
    "T5": (t5, "words"),
    "BART": (bart, "words"),
    "Mixtral": (mixtral, "words"),
}
MEAN = "NOTE: the loss is a mean that takes no num_items_in_batch: it counts once in a step, and"
ROUTER = "NOTE: the router's loss counts once in a step, and with Trainer alone 6 times"


def arguments(micro_batch, batch=BATCH, **named):
    config = {**batches.config(batch, micro_batch), "zero_optimization": {"stage": 2}}
    options = {
        "deepspeed": config,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": config["gradient_accumulation_steps"],
        "learning_rate": 1e-2,
        "max_steps": 2,
        "logging_steps": 1,
        "max_grad_norm": 1e9,  # its norm is logged, and it is not clipped
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return TrainingArguments("saved", **options | named)


def begin(seed=1):
    toy.begin()
    universal.install()
    transformers.set_seed(seed)


def train(make, labels, micro_batch, bases=(AnyRanks, Trainer), samples=4 * BATCH, **named):
    """On a rank. Returns the trainer."""
    begin()
    kind = type("OnAnyRanks", bases, {})
    data = Rows(labels, samples)
    trainer = kind(make(), arguments(micro_batch, **named), train_dataset=data)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    if trainer.is_world_process_zero():
        print(json.dumps([[row["loss"], row["grad_norm"]] for row in rows]))
    return trainer


def trained(folder, ranks, *what, **named):
    """[[loss, gradient norm] of each step], and what was said."""
    done = launch(folder, ranks, functools.partial(train, *what, **named))
    assert done.code == 0, done.errors
    return json.loads(re.search(r"^\[\[.*", done.out, re.M)[0]), done.out


@pytest.mark.parametrize("name", ["a classifier", *map(slow, ["a regression", "T5", "BART"])])
def test_any_ranks_and_micro_batches(tmp_path, name):
    """Equal to one micro-batch of the whole batch."""
    whole, _ = trained(tmp_path, 1, *MODELS[name], BATCH)
    for ranks, micro_batch in ((1, 3), (4, 2)):
        now, said = trained(tmp_path, ranks, *MODELS[name], micro_batch)
        assert MEAN in said
        check_equal(whole, now)


def check_equal(whole, now):
    for (loss, norm), (loss_now, norm_now) in zip(whole, now, strict=True):
        assert abs(loss_now - loss) <= ROUNDING * loss
        assert abs(norm_now - norm) <= 10 * ROUNDING * norm


def test_a_routers_loss_counts_once(tmp_path):
    """On any ranks. Of micro-batches its mean is nearly that of the batch; counted 6 times it is 5
    more."""
    whole, of_micro_batches = (trained(tmp_path, 1, *MODELS["Mixtral"], m)[0] for m in (12, 2))
    assert abs(of_micro_batches[0][0] - whole[0][0]) <= 0.05 * whole[0][0]
    now, said = trained(tmp_path, 3, *MODELS["Mixtral"], 2)
    assert ROUTER in said
    check_equal(of_micro_batches, now)


class Penalized(Trainer):
    """Adds a mean to a sum. by: what divides it."""

    def compute_loss(self, *args, **options):
        loss, outputs = super().compute_loss(*args, return_outputs=True, **options)
        return loss + outputs["logits"].square().mean() / self.by()

    def by(self):
        return self.current_gradient_accumulation_steps


class Undivided(Penalized):
    def by(self):
        return 1


class OfOneRank(Trainer):
    """A sum over the tokens of all ranks, of which DeepSpeed takes the mean, as TRL's GKD."""

    def compute_loss(self, model, inputs, *args, num_items_in_batch=None, **options):
        logits = model(input_ids=inputs["input_ids"])["logits"].flatten(0, 1)
        losses = nn.functional.cross_entropy(logits, inputs["labels"].flatten(), reduction="sum")
        return losses / num_items_in_batch


def llama():
    config = transformers.LlamaConfig(**SHAPE, intermediate_size=32)
    return transformers.LlamaForCausalLM(config)


def test_a_mean_beside_a_sum(tmp_path):
    before, _ = trained(tmp_path, 1, llama, "words", 2, bases=(AnyRanks, Penalized))
    now, _ = trained(tmp_path, 4, llama, "words", 2, bases=(AnyRanks, Penalized))
    assert all(abs(a - b) <= ROUNDING * a for a, b in zip(before[1], now[1], strict=True))


class Drawing(Trainer):
    """Draws by numpy and by Python in each forward pass, as SpecAugment does."""

    def compute_loss(self, *args, **options):
        loss = super().compute_loss(*args, **options)
        return loss * (1 + np.random.rand() + random.random())


def test_asking_draws_no_random_numbers(tmp_path):
    """The same bits as Trainer alone, which asks nothing."""
    alone, now = (
        trained(tmp_path, 1, llama, "words", BATCH, bases=bases)[0]
        for bases in ((Drawing,), (AnyRanks, Drawing))
    )
    assert alone == now


OTHER_SUMS = {
    Undivided: "neither a mean nor a sum that is divided by it",
    OfOneRank: "does not follow average_tokens_across_devices",
}


class Gathers(Trainer):
    """Gathers a row for each sample, generates in its own training_step(), and counts what it has
    seen in a metric."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.metrics = {"rows": []}
        self.widths = []

    def compute_loss(self, model, inputs, *args, **options):
        outputs = model(**inputs)
        rows = self.accelerator.gather(outputs["logits"][:, 0])
        self.metrics["rows"].append(len(rows))
        return outputs["loss"]

    def training_step(self, model, inputs, *args):
        self.widths.append(len(inputs["input_ids"]))
        return super().training_step(model, inputs, *args)


def gather_in_front():
    """3 ranks; in the second step, an epoch's last, rank 0 has a micro-batch of 1 sample."""
    for bases in ((AnyRanks, Gathers), (type("Below", (Gathers, AnyRanks, Trainer), {}),)):
        trainer = train(*MODELS["a classifier"], 2, bases, samples=15, batch=8)
        rank = trainer.args.process_index
        assert trainer.widths == [2, 2, 2, 2 if rank else 1], trainer.widths
        assert trainer.metrics["rows"] == [6, 6, 6, 5], trainer.metrics


class Lists(Trainer):
    """Its collator gives lists."""

    def compute_loss(self, model, inputs, *args, **options):
        words = torch.stack([row["input_ids"] for row in inputs])
        return model(input_ids=words, labels=words)["loss"]


def collate_lists():
    begin()
    kind = type("OnAnyRanks", (AnyRanks, Lists), {})
    trainer = kind(llama(), arguments(2), train_dataset=Rows("words"), data_collator=list)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    if trainer.is_world_process_zero():
        print(json.dumps([losses]))


def test_a_collator_of_lists(tmp_path):
    outputs = [launch(tmp_path, ranks, collate_lists) for ranks in (3, 4)]
    assert all(done.code == 0 for done in outputs), outputs[1].errors
    three, four = (json.loads(re.search(r"^\[\[.*", o.out, re.M)[0])[0] for o in outputs)
    assert all(abs(a - b) <= ROUNDING * a for a, b in zip(three, four, strict=True))


def test_gathered_rows(tmp_path):
    run(tmp_path, 3, gather_in_front)


class OwnCount(Trainer):
    def get_batch_samples(self, *args):
        samples, number = super().get_batch_samples(*args)
        return samples, number + 1


class OwnLoader(Trainer):
    def get_train_dataloader(self):
        return self.get_test_dataloader(self.train_dataset)


class SameSamples(Trainer):
    """LLaMA-Factory's: it calls Trainer's."""

    def get_batch_samples(self, *args):
        return Trainer.get_batch_samples(self, *args)


def test_methods_of_its_own(tmp_path):
    def job():
        train(llama, "words", 2, (AnyRanks, SameSamples))
        counted = {OwnCount: "counts num_items_in_batch in a way of its own"}
        for kind, words in (counted | OTHER_SUMS).items():
            with pytest.raises(ValueError, match=words):
                train(llama, "words", 2, (AnyRanks, kind))
        below = type("Below", (OwnLoader, AnyRanks, Trainer), {})
        with pytest.raises(ValueError, match="get_train_dataloader.. does not call Trainer's"):
            train(llama, "words", 2, (below,))

    run(tmp_path, 4, job)


def test_rows_of_unequal_numbers():
    """gather(): of ranks that have 2, 2 and 1 rows."""
    of_ranks = [torch.ones(2, 3), torch.full((2, 3), 2.0), torch.full((1, 3), 3.0)]

    def gather(tensor):
        if tensor.dtype == torch.long:
            return torch.tensor([2, 2, 1])
        others = [torch.cat([t, t.new_zeros(2 - len(t), 3)]) for t in of_ranks[:2]]
        return torch.cat([*others, tensor])

    gathered = gather_rows(gather, {"rows": of_ranks[2]})["rows"]
    assert torch.equal(gathered, torch.cat(of_ranks))


@pytest.mark.parametrize("loss", [nn.Identity(), {"a": nn.Sequential(nn.Identity())}])
def test_a_loss_of_other_ranks(loss):
    trainer = AnyRanks()
    trainer.loss = loss
    trainer.check_loss()
    last = [*(loss["a"] if isinstance(loss, dict) else loss).modules()][-1]
    last.gather_across_devices = True
    with pytest.raises(ValueError, match="gather_across_devices=True"):
        trainer.check_loss()
    trainer = AnyRanks()
    trainer.calculate_KL = True
    with pytest.raises(ValueError, match="loss_type='apo_zero_unpaired'"):
        trainer.check_loss()
    trainer = AnyRanks()
    trainer.running = type("RunningMoments", (), {})()
    with pytest.raises(ValueError, match="pref_bco_weight"):
        trainer.check_loss()
