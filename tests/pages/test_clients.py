"""The scripts of examples/ under Hugging Face's Trainer, accelerate and Lightning: trained on 4 ranks, gone on with
after a checkpoint by nothing but another number of ranks. Every cure is taken away once, which must be seen.

`make clients` runs all of it, and writes the table of docs/clients.md; `make test-all` what needs none of its packages.
"""

import functools
import importlib
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from helpers import ROOT

from harness.ranks import compare, launch, run

clients = pytest.mark.clients
PACKAGES = {"hf_trainer.py": "transformers peft accelerate", "accelerate_loop.py": "accelerate"}
PACKAGES["lightning_module.py"] = "lightning.pytorch"
LATER = {"hf_trainer.py": "checkpoint-20", "accelerate_loop.py": "step_14", "lightning_module.py": "step=14.ckpt"}
FIRST = {"hf_trainer.py": 11, "accelerate_loop.py": 8, "lightning_module.py": 8}  # step after the checkpoint that stays
LAST = 20
SAME, FP32, BF16, SEEN = 0.0, 1e-5, 1e-3, 1e-4
STAGES = [(stage, dtype) for dtype in ("fp32", "bf16") for stage in (1, 2, 3)]
RANKS = (4, 2, 6)


@pytest.fixture(scope="module")
def table():
    """table(client, dtype, stage, ranks, difference) adds to the table of docs/clients.md."""
    rows = {}

    def add(client, dtype, stage, ranks, difference):
        rows.setdefault((client, dtype, stage), {})[ranks] = difference
        lines = [f"{'client':<34} {'dtype':<5}  ZeRO" + "".join(f"{f'4 to {n}':>10}" for n in RANKS)]
        for (name, *how), row in rows.items():
            cells = "".join(f"{row[n]:>10.1e}" if n in row else f"{'':>10}" for n in RANKS)
            lines.append("{:<34} {:<5} {:>5}".format(name, *how) + cells)
        if "CLIENTS_TABLE" in os.environ:
            Path(os.environ["CLIENTS_TABLE"]).write_text("\n".join(line.rstrip() for line in lines) + "\n")

    return add


def other_weights():
    """The script builds a model of other values, so what is not restored is seen. 0 is the seed of the model alone."""
    import transformers

    def elsewhere(seed_it):
        return lambda seed: seed_it(seed or 12345)

    transformers.set_seed, torch.manual_seed = elsewhere(transformers.set_seed), elsewhere(torch.manual_seed)


@pytest.fixture(scope="module")
def trained(work):
    """trained(script, *flags): the name of the run and of its folder of checkpoints, where only the earlier one is."""
    for package in " ".join(PACKAGES.values()).split():
        if package != "lightning.pytorch":  # only `make clients` has it
            importlib.import_module(package)
    from transformers import LlamaForCausalLM, Trainer  # noqa: F401

    @functools.cache
    def train(script, *flags, source=None):
        name = "_".join(map(str, (Path(source or script).stem, *flags)))
        run(work, 4, source or f"examples/{script}", *flags, "--output_dir", name, "--run_name", name)
        shutil.rmtree(work / name / LATER[script])
        return name

    return train


def go_on(work, name, ranks, script, *flags, **options):
    """Largest difference to the uninterrupted run `name`, over every step after the checkpoint."""
    resumed = f"{name}_on_{ranks}"
    shutil.rmtree(work / resumed, ignore_errors=True)
    shutil.copytree(work / name, work / resumed)
    path = script if "/" in script else f"examples/{script}"
    options.setdefault("patch", None if "--lora" in flags else other_weights)
    result = launch(work, ranks, path, *flags, "--output_dir", resumed, "--run_name", resumed, **options)
    if result.code:
        return result
    differences = compare(work, name, resumed)
    result.steps, result.difference = list(differences), max(differences.values())
    return result


def without(work, script, *changes):
    """A copy of the script in which some text is replaced."""
    text = (ROOT / "examples" / script).read_text()
    for old, new in changes:
        assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in {script}"
        text = text.replace(old, new)
    name = work / "without" / f"{script[:-3]}_{abs(hash(changes))}.py"
    name.parent.mkdir(exist_ok=True)
    name.write_text(text)
    return str(name)


def check(work, trained, table, script, client, stage, dtype, ranks, *options):
    flags = ("--zero_stage", stage, "--dtype", dtype, *options)
    name = trained(script, *flags)
    result = go_on(work, name, ranks, script, *flags)
    assert result.code == 0, result.errors
    if ranks != 4:  # it was DeepSpeed that trained, and universal.py that loaded
        assert f"written by 4 ranks, loaded on {ranks} without conversion" in result.out
    assert result.steps == list(range(FIRST[script], LAST + 1))
    table(client, dtype, stage, ranks, result.difference)
    bar = SAME if ranks == 4 else FP32 if dtype == "fp32" else BF16
    assert result.difference <= bar


def ranges():
    """The rows of the page's table: the largest differences on other ranks, of what `make clients` has written."""
    worst = {}
    for client, dtype, same, *others in re.findall(
        r"^(\w+).*? (fp32|bf16) +\d +(\S+) +(\S+) +(\S+)$", (ROOT / "assets" / "clients.txt").read_text(), re.M
    ):
        assert float(same) == 0
        row = worst.setdefault(client, dict.fromkeys(("fp32", "bf16"), 0.0))
        row[dtype] = max(row[dtype], *map(float, others))
    return [f"| {client} | {row['fp32']:.1e} | {row['bf16']:.1e} |" for client, row in worst.items()]


def test_the_page_says_what_was_measured():
    page, rows = (ROOT / "docs" / "clients.md").read_text(), ranges()
    assert len(rows) == 3 and all(row in page for row in rows), rows
    measured = (ROOT / "assets" / "clients_cli.txt").read_text()
    for client in ("LLaMA-Factory", "ms-swift"):
        numbers = re.findall(r"\d\.\de-\d\d", "".join(re.findall(rf"^{client}  .*$", measured, re.M)))
        assert f"{client} {max(map(float, numbers)):.1e}" in page
    for difference in re.findall(r"left at 3: (\S+),", measured):
        assert difference in page


# -----------------------------------------------------------------------------
# Trainer


def test_trainer_with_lora(work, trained, table):
    """ZeRO-3; the base is in no checkpoint."""
    check(work, trained, table, "hf_trainer.py", "Trainer, LoRA", 3, "fp32", 2, "--lora")


@clients
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("stage, dtype", STAGES)
def test_trainer(work, trained, table, stage, dtype, ranks):
    check(work, trained, table, "hf_trainer.py", "Trainer", stage, dtype, ranks)


@clients
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("flag, name", [("lora", "LoRA"), ("freeze", "half frozen"), ("gradient_checkpointing",) * 2])
def test_trainer_variants(work, trained, table, flag, name, ranks):
    name = f"Trainer, {name.replace('_', ' ')}"
    check(work, trained, table, "hf_trainer.py", name, 3, "fp32", ranks, f"--{flag}")


@clients
@pytest.mark.parametrize("stage", [2, 3])
def test_trainer_loads_the_best_at_the_end(work, trained, stage):
    """The best checkpoint is the one that 4 ranks have written; 2 ranks load it after their last step."""
    flags, best = ("--zero_stage", stage), 'greater_is_better=True, metric_for_best_model="eval_loss"'
    script = without(
        work,
        "hf_trainer.py",
        ("load_best_model_at_end=True", f"load_best_model_at_end=True, {best}"),  # the largest loss is the first
        ("trainer.evaluate()", 'print("AT THE END", repr(trainer.evaluate()["eval_loss"]))'),
    )
    name = trained("hf_trainer.py", *flags)
    result = go_on(work, name, 2, script, *flags)
    assert result.code == 0, result.errors
    state = json.loads((work / f"{name}_on_2" / "checkpoint-20" / "trainer_state.json").read_text())
    first, last = (entry["eval_loss"] for entry in state["log_history"] if "eval_loss" in entry)
    at_the_end = float(re.search("AT THE END (.*)", result.out)[1])
    assert abs(at_the_end - first) <= FP32 and abs(at_the_end - last) > SEEN


@clients
def test_trainer_without_install(work, trained):
    """DeepSpeed refuses, and without the check of the number of ranks there would be nothing to load."""
    flags = ("--zero_stage", 3)
    script = without(work, "hf_trainer.py", ("universal.install()", "pass"))
    result = go_on(work, trained("hf_trainer.py", *flags), 2, script, *flags)
    assert result.code == 1 and "DP world size of 4 but the current world size is 2" in result.errors


@clients
def test_trainer_with_dropout_by_rank(work, trained):
    flags = ("--zero_stage", 2)
    script = without(work, "hf_trainer.py", ("callbacks=[SeedAndLog()]", "callbacks=[Log()]"), (
        "arguments = TrainingArguments(",
        "class Log(TrainerCallback):\n    on_log = SeedAndLog.on_log\n\n\narguments = TrainingArguments(",
    ))  # fmt: skip
    assert go_on(work, trained("hf_trainer.py", *flags), 2, script, *flags).difference > SEEN


@clients
def test_trainer_with_another_batch(work, trained):
    """train_batch_size as a number makes an accumulation that does not fit an error; "auto" makes it silent."""
    flags, kept = ("--zero_stage", 2), ("gradient_accumulation_steps=accumulation", "gradient_accumulation_steps=3")
    name = trained("hf_trainer.py", *flags)
    result = go_on(work, name, 2, without(work, "hf_trainer.py", kept), *flags)
    assert result.code == 1 and "train_batch_size" in result.errors
    silent = without(work, "hf_trainer.py", kept, ('"train_batch_size": BATCH', '"train_batch_size": "auto"'))
    assert go_on(work, name, 2, silent, *flags).difference > SEEN


@clients
def test_trainer_with_a_rest_of_data(work, trained):
    """Sequences that make no whole global batch at the end of an epoch: each number of ranks deals them out its way."""
    more = ("generator=generator), torch.arange(16 * BATCH)", "generator=generator), torch.arange(16 * BATCH + 11)")
    script = without(work, "hf_trainer.py", more, ("(0, 64, (16 * BATCH, 1)", "(0, 64, (16 * BATCH + 11, 1)"))
    flags = ("--zero_stage", 2)
    name = trained("hf_trainer.py", *flags, source=script)
    assert go_on(work, name, 2, script, *flags).difference > SEEN


@clients
def test_trainer_without_frozen_parameters(work, trained):
    """The loader of universal.py restores them; DeepSpeed's, with its universal checkpoints, does not."""
    flags = ("--zero_stage", 3, "--dtype", "fp32", "--freeze")

    def forgotten():
        import universal

        other_weights()
        universal.loader.keep = lambda *_: None

    assert go_on(work, trained("hf_trainer.py", *flags), 2, "hf_trainer.py", *flags, patch=forgotten).difference > SEEN


# -----------------------------------------------------------------------------
# accelerate


@clients
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("stage, dtype", STAGES)
def test_accelerate(work, trained, table, stage, dtype, ranks):
    check(work, trained, table, "accelerate_loop.py", "accelerate", stage, dtype, ranks)


@clients
@pytest.mark.parametrize("cure", ["scheduler.scheduler.last_epoch = done * RANKS", "accelerator.step = 0"])
def test_accelerate_without(work, trained, cure):
    flags = ("--zero_stage", 2)
    script = without(work, "accelerate_loop.py", (cure, "pass"))
    assert go_on(work, trained("accelerate_loop.py", *flags), 2, script, *flags).difference > SEEN


# -----------------------------------------------------------------------------
# Lightning


@clients
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("stage, dtype", STAGES)
def test_lightning(work, trained, table, stage, dtype, ranks):
    check(work, trained, table, "lightning_module.py", "Lightning", stage, dtype, ranks)


@clients
@pytest.mark.parametrize(
    "cure, instead",
    [
        ("counts[key] += steps * (accumulation - checkpoint", "0 * (checkpoint"),
        ("range(self.trainer.global_step, STEPS)", "range(STEPS)"),
    ],
)
def test_lightning_without(work, trained, cure, instead):
    flags = ("--zero_stage", 2)
    script = without(work, "lightning_module.py", (cure, instead))
    assert go_on(work, trained("lightning_module.py", *flags), 2, script, *flags).difference > SEEN


@clients
def test_lightning_divides_the_loss_twice(work, trained):
    """By another number on other ranks: Adam hides it, clipping does not."""
    flags = ("--zero_stage", 2)
    script = without(work, "lightning_module.py", ("return loss * accumulation", "return loss"))
    name = trained("lightning_module.py", *flags, source=script)
    assert go_on(work, name, 2, script, *flags).difference > SEEN
