"""TRL's Trainers that generate, and KTO: a run of some ranks goes on on others, over an epoch's
end. `make clients` installs what it needs, and runs it."""

import functools
import json
import os
import random
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import universal
from measure.logs import compare
from measure.trl import CAUSAL, make_models, shape_of
from tests.support import ROOT, toy
from tests.support.ranks import run
from universal import batches
from universal.rollouts import AnyRanksKTO, AnyRanksRollouts, Groups, put_before

pytestmark = pytest.mark.clients
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
BATCH, MICRO, STEPS = 16, 2, 5
PROMPTS = 21  # 2 steps of 8 prompts, and a rest
ROUNDING = 1e-6
TRAINERS = {
    "GRPO": (trl.GRPOTrainer, trl.GRPOConfig),
    "RLOO": (trl.RLOOTrainer, trl.RLOOConfig),
    "Distillation": (trl.DistillationTrainer, trl.DistillationConfig),
    "KTO": (trl.KTOTrainer, trl.KTOConfig),
}


@pytest.fixture(scope="module")
def models(work):
    """A folder with models, of which one has dropout."""
    from transformers import LlamaConfig

    dropouts = {"dropout": 0.1, "plain": 0, "teacher": 0}
    shape = shape_of(initializer_range=0.1)
    configs = {
        name: (CAUSAL, LlamaConfig(**shape, attention_dropout=dropout))
        for name, dropout in dropouts.items()
    }
    make_models(work, configs)
    return work


def evens(completions, **others):
    """A reward that draws, too."""
    counts = [sum(int(word) % 2 == 0 for word in text.split()) for text in completions]
    return [count + 0.1 * random.random() for count in counts]


def rows():
    texts = [" ".join(str((n * k) % 61) for k in range(n % 5 + 3)) for n in range(1, PROMPTS + 1)]
    answers = [" ".join(str(n * 7 % 61) for _ in range(n % 4 + 1)) for n in range(PROMPTS)]
    rows = zip(texts, answers, strict=True)
    return [{"prompt": text, "completion": f" {answer}"} for text, answer in rows]


def make(kind, name, models, bases=(), stage=2, model="dropout", **named):
    """A Trainer, in a rank. bases: what stands before TRL's class."""
    toy.begin()
    universal.install()
    ranks = torch.distributed.get_world_size()
    ours = batches.config(BATCH, MICRO, ranks)
    if not bases:
        ours = dict.fromkeys(ours.keys() - {batches.TRUE_BATCH}, "auto")
    options = {
        "output_dir": name,
        "deepspeed": {**ours, "zero_optimization": {"stage": stage}, "gradient_clipping": 1.0},
        "per_device_train_batch_size": MICRO,
        "gradient_accumulation_steps": -(-BATCH // MICRO // ranks),
        "max_steps": STEPS,
        "learning_rate": 3e-3,
        "bf16": False,
        "logging_steps": 1,
        "save_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        **({} if kind in ("Distillation", "KTO") else {"num_generations": 2}),
        **({} if kind == "KTO" else {"max_completion_length": 8}),
    }
    given = {"train_dataset": datasets.Dataset.from_list(rows())}
    if kind == "KTO":
        labels = [number % 3 > 0 for number in range(PROMPTS)]
        given["train_dataset"] = given["train_dataset"].add_column("label", labels)
    elif kind == "Distillation":
        given["teacher_model"] = str(models / "teacher")
    else:
        given["reward_funcs"] = evens
    trainer, config = TRAINERS[kind]
    for option in [*named]:
        if option in ("train_dataset", "rollout_func", "tools"):
            given[option] = named.pop(option)
    arguments = config(**options | named)
    return type(kind, (*bases, trainer), {})(str(models / model), args=arguments, **given)


def train(kind, name, models, resume=None, watch=lambda trainer: None, **named):
    bases = named.pop("bases", (AnyRanksKTO if kind == "KTO" else AnyRanksRollouts,))
    trainer = make(kind, name, models, bases, **named)
    watch(trainer)
    trainer.train(resume_from_checkpoint=resume)
    torch.distributed.barrier()


def log_of(folder, step=STEPS):
    """{step: (loss, gradient norm, rate)}."""
    path = folder / f"checkpoint-{step}" / "trainer_state.json"
    lines = [line for line in json.loads(path.read_text())["log_history"] if "loss" in line]
    return {
        line["step"]: [float(line[key]) for key in ("loss", "grad_norm", "learning_rate")]
        for line in lines
    }


def check_equal(before, after, steps):
    """A loss may be rounding alone, as RLOO's: it is compared with 1."""
    assert [*after] == [*before] == steps
    for step in steps:
        for old, new in zip(before[step], after[step], strict=True):
            # RLOO's loss is 0 but for rounding, of terms around 1, whose last bit is 1.2e-7.
            assert abs(new - old) <= ROUNDING * max(abs(old), 0.2), (step, before, after)


CASES = [
    ("GRPO", 2, 2, {}),
    ("GRPO", 4, 3, {"beta": 0.1}),
    ("RLOO", 2, 2, {"beta": 0.1, "model": "plain"}),
    ("Distillation", 2, 3, {"beta": 0.5}),
    ("KTO", 2, 2, {}),
    ("KTO", 4, 3, {}),
    *(("GRPO", 2, 2, {"loss_type": loss}) for loss in ("grpo", "bnpo", "dr_grpo")),
]


@pytest.mark.parametrize("kind, saved_on, stage, named", CASES)
def test_on_3_ranks(models, tmp_path, kind, saved_on, stage, named):
    """From within the first epoch, to within the third."""
    job = functools.partial(train, stage=stage, **named)
    run(tmp_path, saved_on, job, kind, "saved", models)
    shutil.copytree(tmp_path / "saved/checkpoint-1", tmp_path / "resumed/checkpoint-1")
    said = run(tmp_path, 3, job, kind, "resumed", models, "resumed/checkpoint-1")
    assert f"written by {saved_on} ranks, loaded on 3 without conversion" in said
    steps = [*range(1, STEPS + 1)]
    check_equal(log_of(tmp_path / "saved"), log_of(tmp_path / "resumed"), steps)


def same_completions(trainer):
    """They follow from the prompt and its place in the group alone."""

    def generate(prompt_ids, *others, **named):
        made = []
        for number, ids in enumerate(prompt_ids):
            first = sum(ids) * 7 + number % 2 * 13
            made.append([2 + (first + 3 * n) % 62 for n in range(2 + first % 6)])
        return made, None

    trainer._generate_single_turn = generate
    trainer.reward_funcs = [lambda completions, **_: [len(set(text)) for text in completions]]


@pytest.mark.parametrize("loss", ["dapo", "grpo"])
def test_equals_trl_on_the_same_completions(models, tmp_path, loss):
    """TRL leaves out an epoch's short last step, too. Without dropout, which follows its ranks."""
    options = {"watch": same_completions, "loss_type": loss, "model": "plain"}
    job = functools.partial(train, "GRPO", models=models, max_steps=4, **options)
    run(tmp_path, 2, functools.partial(job, name="trl", bases=()))
    for ranks in (2, 3):
        run(tmp_path, ranks, functools.partial(job, name=f"on_{ranks}"))
        check_equal(log_of(tmp_path / "trl", 4), log_of(tmp_path / f"on_{ranks}", 4), [1, 2, 3, 4])


def test_kto_equals_trl_without_accumulation(models, tmp_path):
    """Where all micro-batches of a step are computed at the same time."""
    named = {"max_steps": 2, "gradient_accumulation_steps": 1, "model": "plain"}
    config = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": MICRO}
    stages = {"zero_optimization": {"stage": 2}}
    run(
        tmp_path,
        2,
        functools.partial(
            train, "KTO", "trl", models, bases=(), deepspeed={**config, **stages}, **named
        ),
    )
    for ranks in (1, 2):
        named["gradient_accumulation_steps"] = 2 // ranks
        ours = {**batches.config(4, MICRO, ranks), **stages}
        job = functools.partial(train, "KTO", f"on_{ranks}", models, deepspeed=ours, **named)
        run(tmp_path, ranks, job)
        check_equal(log_of(tmp_path / "trl", 2), log_of(tmp_path / f"on_{ranks}", 2), [1, 2])


REFUSED = {
    "num_iterations=1, and it is 2": ("GRPO", {"num_iterations": 2}),
    "steps_per_generation=4, and it is 8": ("RLOO", {"steps_per_generation": 8}),
    "scale_rewards=group, and it is batch": ("GRPO", {"scale_rewards": "batch"}),
    "normalize_advantages=False": ("RLOO", {"normalize_advantages": True}),
    "top_entropy_quantile=1.0, and it is 0.2": ("GRPO", {"top_entropy_quantile": 0.2}),
    "use_adaptive_entropy=False": ("GRPO", {"use_adaptive_entropy": True}),
    "sync_ref_model=False": ("GRPO", {"sync_ref_model": True, "beta": 0.1}),
    "multi_objective_aggregation=sum_then_normalize": (
        "GRPO",
        {"multi_objective_aggregation": "normalize_then_sum"},
    ),
    "per_device_train_batch_size=2 is no multiple of num_generations=4": (
        "GRPO",
        {"num_generations": 4},
    ),
    "prompts in a list, not in a stream": (
        "GRPO",
        {"train_dataset": datasets.Dataset.from_list(rows()).to_iterable_dataset()},
    ),
    "a step takes 16 prompts, and there are 3": (
        "Distillation",
        {"train_dataset": datasets.Dataset.from_list(rows()[:3])},
    ),
    "wants precompute_ref_log_probs=False": ("KTO", {"precompute_ref_log_probs": True}),
    "one of .* behind AnyRanksRollouts": ("KTO", {"bases": (AnyRanksRollouts,)}),
}


@pytest.mark.parametrize("words", REFUSED)
def test_refused(models, tmp_path, words):
    """Before the first step."""
    kind, named = REFUSED[words]

    def job():
        with pytest.raises(ValueError, match=words):
            train(kind, "saved", models, **named)

    run(tmp_path, 1 if kind == "KTO" else 2, job)  # on 2, TRL cannot precompute these rows
    assert not list(tmp_path.glob("saved/checkpoint*"))


def test_an_older_trl(monkeypatch):
    """By the command, what AnyRanks alone says of its Trainers stays."""
    module = SimpleNamespace(KTOTrainer=trl.KTOTrainer)
    monkeypatch.setattr(trl, "__version__", "1.15.2")
    put_before(module)
    assert module.KTOTrainer is trl.KTOTrainer
    with pytest.raises(ValueError, match=r"wants TRL 1\.16 or newer"):
        AnyRanksKTO()


def test_the_order_is_trl_s():
    """In each epoch, and from any of them on."""
    from trl.trainer.utils import RepeatSampler

    theirs = RepeatSampler(range(PROMPTS), 2, batch_size=8, seed=42)
    epochs = [list(theirs) for _ in range(3)]
    for epoch in (2, 0, 1):
        ours = Groups(PROMPTS, 2, 8, seed=42)
        ours.set_epoch(epoch)
        assert list(ours) == epochs[epoch] and len(ours) == len(theirs) == 32


def test_by_the_command(work):
    """A script that knows nothing of AnyRanks goes on on 3 ranks, after the example on 2."""
    text = (ROOT / "examples" / "grpo.py").read_text()
    (work / "plain.py").write_text(text.replace("AnyRanksRollouts, GRPOTrainer", "GRPOTrainer"))
    run(work, 2, "examples/grpo.py", "--run_name", "class")
    shutil.rmtree(work / "ckpt_grpo" / "checkpoint-10")
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {"UNIVERSAL_BATCH": "32", "PYTHONPATH": os.pathsep.join(paths)}
    launcher = "-m universal python -m torch.distributed.run --standalone --nproc-per-node 3"
    command = [word.replace("python", sys.executable) for word in launcher.split()]
    command = [sys.executable, *command, "plain.py", "--run_name", "command"]
    subprocess.run(command, cwd=work, env=os.environ | environment, check=True, timeout=300)
    differences = compare(work, "class", "command")
    assert [*differences] == [*range(6, 11)] and max(differences.values()) <= ROUNDING
