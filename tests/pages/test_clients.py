"""The scripts of examples/ under Hugging Face's Trainer, accelerate and Lightning: trained on 4
ranks, gone on with after a checkpoint by nothing but another number of ranks. Every cure is taken
away once, which must be seen.

`make clients` runs all of it, and writes the table of docs/clients.md; `make test-all` what needs
none of its packages."""

import collections
import functools
import itertools
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch

from measure.logs import compare
from tests.support import ROOT
from tests.support.commands import slow
from tests.support.ranks import launch, run
from universal.checkpoint.describe import describe
from universal.checkpoint.tags import find_tag
from universal.files.sources import ByteReader

clients = pytest.mark.clients
CLIENTS = {
    "hf_trainer.py": "Trainer",
    "accelerate_loop.py": "accelerate",
    "lightning_module.py": "Lightning",
}
LATER = {
    "hf_trainer.py": "checkpoint-20",
    "accelerate_loop.py": "step_14",
    "lightning_module.py": "step=14.ckpt",
}
# The step after the checkpoint that stays.
FIRST = {"hf_trainer.py": 11, "accelerate_loop.py": 8, "lightning_module.py": 8}
LAST = 20
SAME = 0.0
FP32 = 1e-5
BF16 = 1e-3
SEEN = 1e-4
RANKS = (4, 2, 5)  # 5 do not divide the 12 micro-batches


@pytest.fixture(scope="module")
def table():
    """table[client, dtype, stage] are pairs of differences for each of RANKS; they become the table
    of docs/clients.md."""
    rows = collections.defaultdict(list)
    yield rows
    columns = [*(f"4 to {n}" for n in RANKS), *(f"said {n}" for n in RANKS)]
    lines = [f"{'client':<34} {'dtype':<5}  ZeRO" + "".join(f"{c:>10}" for c in columns)]
    for how, pairs in rows.items():
        numbers = itertools.chain(*zip(*pairs, strict=True))
        lines.append("{:<34} {:<5} {:>5}".format(*how) + "".join(f"{n:>10.1e}" for n in numbers))
    if "CLIENTS_TABLE" in os.environ:
        Path(os.environ["CLIENTS_TABLE"]).write_text("\n".join([*lines, ""]))


def other_weights():
    """The script builds a model of other values, so what is not restored is seen. 0 is the seed of
    the model alone."""
    import transformers

    def elsewhere(seed_it):
        return lambda seed: seed_it(seed or 12345)

    transformers.set_seed = elsewhere(transformers.set_seed)
    torch.manual_seed = elsewhere(torch.manual_seed)


@pytest.fixture(scope="module")
def trained(work):
    """trained(script, *flags): the name of the run and of its folder of checkpoints, where only the
    earlier one is."""
    import accelerate  # noqa: F401
    import peft  # noqa: F401
    from transformers import LlamaForCausalLM, Trainer  # noqa: F401

    @functools.cache
    def train(script, *flags, source=None):
        name = "_".join(map(str, (Path(source or script).stem, *flags)))
        names = ("--output_dir", name, "--run_name", name)
        run(work, 4, source or f"examples/{script}", *flags, *names)
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
    names = ("--output_dir", resumed, "--run_name", resumed)
    result = launch(work, ranks, path, *flags, *names, **options)
    if not result.code:
        differences = compare(work, name, resumed)
        result.steps = list(differences)
        result.difference = max(differences.values())
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


LORA = ("hf_trainer.py", "Trainer, LoRA", "fp32", 3, "--lora")  # the base is in no checkpoint
CASES = [
    LORA,
    ("hf_trainer.py", "Trainer, half frozen", "fp32", 3, "--freeze"),
    ("hf_trainer.py", "Trainer, gradient checkpointing", "fp32", 3, "--gradient_checkpointing"),
    ("hf_trainer.py", "Trainer, Mixtral", "fp32", 2, "--mixtral"),
    ("hf_trainer.py", "Trainer, Mixtral", "fp32", 3, "--mixtral"),
]
for script, client in CLIENTS.items():
    CASES += [(script, client, dtype, stage) for dtype in ("fp32", "bf16") for stage in (1, 2, 3)]
ALL = [(case, ranks) for case in CASES for ranks in RANKS]


@pytest.mark.parametrize(
    "case, ranks",
    [slow(*one) if one == (LORA, 2) else pytest.param(*one, marks=clients) for one in ALL],
)
def test_any_ranks(work, trained, table, case, ranks):
    script, client, dtype, stage, *options = case
    flags = ("--zero_stage", stage, "--dtype", dtype, *options)
    result = go_on(work, trained(script, *flags), ranks, script, *flags)
    assert result.code == 0, result.errors
    if ranks != 4:  # it was DeepSpeed that trained, and universal.py that loaded
        assert f"written by 4 ranks, loaded on {ranks} without conversion" in result.out
    assert result.steps == list(range(FIRST[script], LAST + 1))
    steps = f"steps {FIRST[script]} to .*, trained before on 4 ranks, now on {ranks}"
    (said,) = re.findall(rf"universal: {steps}: the loss differs by at most (.*)", result.out)
    table[client, dtype, stage].append((result.difference, float(said)))
    allowed = SAME if ranks == 4 else FP32 if dtype == "fp32" else BF16
    assert max(result.difference, float(said)) <= allowed


def worst(client, dtype):
    """The largest difference on other ranks, of what `make clients` has written."""
    row = rf"^{client}.*? {dtype} +\d +(\S+) +(\S+) +(\S+)"
    table = (ROOT / "assets" / "clients.txt").read_text()
    same, *others = zip(*re.findall(row, table, re.M), strict=True)
    assert {*map(float, same)} == {0}
    return max(map(float, sum(others, ())))


def test_the_page_says_what_was_measured():
    page = (ROOT / "docs" / "clients.md").read_text()
    measured = (ROOT / "assets" / "clients_cli.txt").read_text()
    for client in CLIENTS.values():
        assert f"| {client} | {worst(client, 'fp32'):.1e} | {worst(client, 'bf16'):.1e} |" in page
    for client in ("LLaMA-Factory", "ms-swift"):
        rows = re.findall(rf"^{client}  .*$", measured, re.M)
        numbers = re.findall(r"\d\.\de-\d\d", "".join(rows))
        assert f"{client} {max(map(float, numbers)):.1e}" in page


def test_the_pages_say_which_transformers():
    rows = re.findall(
        r"^(\S+) .* (\d\.\de-\d\d)", (ROOT / "assets" / "trainers.txt").read_text(), re.M
    )
    releases, largest = zip(*rows, strict=True)
    versions = (ROOT / "docs" / "tested.md").read_text()
    assert f" | {releases[0]} to {releases[-1]} | " in versions
    page = (ROOT / "docs" / "clients.md").read_text()
    assert f"every release tried: at most {max(largest, key=float)}" in page


# -----------------------------------------------------------------------------
# every cure is needed

DROPOUT_BY_RANK = [("callbacks=[SeedDropout(), Log()]", "callbacks=[Log()]")]
POSITION = "steps.epoch, steps.begin = divmod(step, steps.per_epoch)"
# Script, ranks, what is left out. 2 ranks take other accumulation steps than 4, 5 take as many.
RESUME_ONLY = [
    ("hf_trainer.py", 2, DROPOUT_BY_RANK),
    ("accelerate_loop.py", 2, [("scheduler.scheduler.last_epoch = done * RANKS", "pass")]),
    ("accelerate_loop.py", 2, [("accelerator.step = 0", "pass")]),
    ("accelerate_loop.py", 5, [(POSITION, "steps.begin = step % steps.per_epoch")]),
    ("accelerate_loop.py", 5, [(POSITION, "steps.epoch = step // steps.per_epoch")]),
    ("accelerate_loop.py", 5, [("backward(weight * loss)", "backward(loss)")]),
    (
        "lightning_module.py",
        2,
        [("counts[key] += missing", "pass")],
    ),
    ("lightning_module.py", 2, [("set_step(self.trainer.global_step + 1)", "set_step(1)")]),
    ("lightning_module.py", 5, [("return weight * loss", "return loss")]),
]
BOTH_RUNS = [
    # The loss is divided twice, by another number on other ranks: Adam hides it, clipping does not.
    ("lightning_module.py", 2, [("weight * loss * accumulation", "weight * loss")]),
]
FLAGS = ("--zero_stage", 2)


@clients
@pytest.mark.parametrize("script, ranks, changes", [*RESUME_ONLY, *BOTH_RUNS])
def test_a_cure_is_needed(work, trained, script, ranks, changes):
    changed = without(work, script, *changes)
    both = (script, ranks, changes) in BOTH_RUNS
    name = trained(script, *FLAGS, source=changed if both else None)
    result = go_on(work, name, ranks, changed, *FLAGS)
    if result.code:  # an engine with a named batch has counted
        assert re.search("of a step are computed again|the config names a batch", result.errors)
        return
    assert result.difference > SEEN
    assert re.search(r"universal: (WARNING|NOTE): step .*, trained before on 4 ranks", result.out)


PLAIN_LIGHTNING = [
    (
        "batches.config(BATCH, MICRO)",
        '{"gradient_accumulation_steps": 3, "train_micro_batch_size_per_gpu": MICRO}',
    ),
    (
        "share = batches.share(self.trainer.strategy.deepspeed_engine)",
        "self.weights = [1.0] * accumulation; return DataLoader(data, MICRO, sampler="
        "torch.utils.data.DistributedSampler(data, shuffle=False))",
    ),
    ("on_load_checkpoint", "not_called"),
]
ONE_EPOCH = ("SAMPLES = 5 * BATCH + 11", "SAMPLES = 20 * BATCH")
IN_ORDER = ("Sampler(len(data), share)", "Sampler(len(data), share, shuffle=False)")


@clients
def test_what_a_load_says_under_lightning(work, trained):
    """A plain script's checkpoint on 3 ranks: with what the line names, its batch goes on."""
    plain = without(work, "lightning_module.py", *PLAIN_LIGHTNING, ONE_EPOCH)
    name = trained("lightning_module.py", *FLAGS, source=plain)
    warned = go_on(work, name, 3, plain, *FLAGS)
    line = (
        "batch was 24, and is 18 now: to keep 24, with Lightning, `config |= batches.config(24, 2)`"
    )
    assert line in warned.out and warned.difference > SEEN
    cured = go_on(work, name, 3, without(work, "lightning_module.py", ONE_EPOCH, IN_ORDER), *FLAGS)
    assert not cured.code and "the global batch was" not in cured.out
    assert cured.difference <= 1e-6


@pytest.mark.slow
def test_the_adapter_of_a_lora_run(work, trained, monkeypatch):
    """The page's block in Python: of ZeRO-3, where Trainer itself writes an empty file."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128}
    config = LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    folder = work / trained(LORA[0], "--zero_stage", LORA[3], "--dtype", LORA[2], *LORA[4:])
    page = (ROOT / "docs" / "clients.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    (code,) = (block for block in blocks if "zero_to_fp32" in block)
    monkeypatch.chdir(folder)
    code = code.replace("ckpt_trainer/checkpoint-20", "checkpoint-10")
    exec(code, {"base": LlamaForCausalLM(config), "lora": lora, "get_peft_model": get_peft_model})
    model = PeftModel.from_pretrained(LlamaForCausalLM(config), "adapter")
    parameters = describe(find_tag("checkpoint-10")).parameters
    weights = model.state_dict()
    assert len(parameters) == 8
    for name, parameter in parameters.items():
        source = parameter.states["fp32"]
        masters = torch.frombuffer(ByteReader().read(source, 0, source.numel), dtype=torch.float32)
        assert torch.equal(weights[name].flatten(), masters) and masters.any()


@clients
@pytest.mark.parametrize("stage", [2, 3])
def test_trainer_loads_the_best_at_the_end(work, trained, stage):
    """The best checkpoint is the one that 4 ranks have written; 2 ranks load it after their last
    step."""
    flags = ("--zero_stage", stage)
    load_best = "load_best_model_at_end=True"
    # The largest loss is the first.
    largest = f'{load_best}, greater_is_better=True, metric_for_best_model="eval_loss"'
    evaluated = 'print("AT THE END", repr(trainer.evaluate()["eval_loss"]))'
    changes = [(load_best, largest), ("trainer.evaluate()", evaluated)]
    script = without(work, "hf_trainer.py", *changes)
    name = trained("hf_trainer.py", *flags)
    result = go_on(work, name, 2, script, *flags)
    assert result.code == 0, result.errors
    state = json.loads((work / f"{name}_on_2" / "checkpoint-20" / "trainer_state.json").read_text())
    first, last = (entry["eval_loss"] for entry in state["log_history"] if "eval_loss" in entry)
    at_the_end = float(re.search("AT THE END (.*)", result.out)[1])
    assert abs(at_the_end - first) <= FP32 and abs(at_the_end - last) > SEEN
