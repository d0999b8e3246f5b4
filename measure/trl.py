"""TRL's trainers, of the releases that people have, on other ranks: a part of `make trainers`.

    python -m measure.trl --output assets/trl.txt

Installs each below .venv-trainers/, beside the torch of this Python, with the transformers of its
time. 4 ranks train 37 samples for 5 steps of 16, of which the third is an epoch's last and short,
and save after the second; 3 and 2 ranks go on from there. A number is the largest difference of a
loss or a gradient norm, relative to it. The last column is TRL alone, uninterrupted, on 2 ranks,
before the short step, which it fills with other samples; it is no check. A letter is an error.
"command" is a Trainer without AnyRanks in it, under UNIVERSAL_BATCH=16 python -m universal. Ends
with an error where a number is no rounding, or an error is not the one to be expected."""

import functools
import json
import os
import random
import shutil
import sys
import warnings
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

from measure import options, versions
from measure.logs import write_table
from measure.trainers import HUB, INSTALLED, OLD_HUB
from tests.support import ROOT, toy
from tests.support.ranks import last_error, launch

WORK = ROOT / "runs" / "trl"
BATCH = 16
MICRO = 2
STEPS = 5
SAVED = 2
SAMPLES = 37
ROUNDING = 1e-6
REFUSED = "the loss of KTOTrainer takes the KL"
DATASETS = (
    "datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19 pandas==3.0.0 pyarrow==26.0.1 "
    "python-dateutil==2.9.0.post0 pytz==2026.6 six==1.17.0 xxhash==4.1.0"
)
OLD_DATASETS = (
    "datasets==4.0.0 dill==0.3.8 multiprocess==0.70.16 pandas==2.3.3 pyarrow==26.0.1 "
    "python-dateutil==2.9.0.post0 pytz==2026.6 six==1.17.0 xxhash==4.1.0 fsspec==2025.3.0"
)
# {TRL: (transformers, accelerate, what else they want)}
RELEASES = {
    "0.24.0": ("4.57.6", "1.12.0", f"{OLD_HUB} tokenizers==0.22.2 {OLD_DATASETS}"),
    "1.0.0": ("5.6.0", "1.11.0", f"{HUB} tokenizers==0.22.2 {DATASETS}"),
    "1.10.0": ("5.17.0", "1.14.0", f"{HUB} {DATASETS}"),
    "1.14.0": ("5.19.0", "1.15.0", f"{HUB} {DATASETS}"),
    "1.16.0": ("5.24.0", "1.15.0", f"{HUB} {DATASETS}"),
}
COLUMNS = ("on 3    ", "on 2    ", "TRL alone")
PACKED = {"packing": True, "max_length": 16}
CAUSAL = "AutoModelForCausalLM"
MODELS = {
    "llama": CAUSAL,
    "mixtral": CAUSAL,
    "reward": "AutoModelForSequenceClassification",
}
TEXT = {"SFT": "text", "KTO": "unpaired"}  # the others' data are pairs


class Case(NamedTuple):
    """A trainer of TRL. options: of its config, besides everyone's. way: "class" or "command"."""

    trainer: str
    stage: int
    options: dict = {}
    model: str = "llama"
    way: str = "class"


CASES = {
    "SFT": Case("SFT", 2),
    "SFT, packed": Case("SFT", 3, PACKED),
    "SFT, Mixtral": Case("SFT", 3, model="mixtral"),
    "DPO": Case("DPO", 3),
    "Reward": Case("Reward", 2, model="reward"),
    "CPO": Case("CPO", 2),
    "ORPO": Case("ORPO", 3),
    "TPO": Case("TPO", 2),
    "KTO, apo_zero_unpaired": Case("KTO", 2, {"loss_type": "apo_zero_unpaired"}),
    "KTO": Case("KTO", 2),
    "SFT, Mixtral, command": Case("SFT", 3, model="mixtral", way="command"),
    "DPO, command": Case("DPO", 2, way="command"),
}


def shape_of(**more):
    """Returns the shape of a small Llama that has the tokenizer's words."""
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    return shape | more


def make_models(folder, configs):
    """Write a tokenizer of numbers, and a model of each config. configs: {name: (its class in
    transformers, config)}."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<eos>", "<unk>", *map(str, range(61))]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)
    for seed, (name, (kind, config)) in enumerate(configs.items()):
        transformers.set_seed(seed)
        getattr(transformers, kind).from_config(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def configs():
    """Returns {name: config} of MODELS."""
    import transformers

    shape = shape_of(num_key_value_heads=4, max_position_embeddings=256)
    experts = {"num_local_experts": 4, "router_aux_loss_coef": 0.5, "output_router_logits": True}
    return {
        "llama": transformers.LlamaConfig(**shape),
        "mixtral": transformers.MixtralConfig(**shape, **experts),
        "reward": transformers.LlamaConfig(**shape, num_labels=1),
    }


def rows(kind):
    """Samples of a kind, of unequal lengths."""
    draw = random.Random(0)

    def words(least, most):
        start, stride = draw.randrange(61), draw.randrange(1, 6)
        count = draw.randrange(least, most)
        return " ".join(str((start + stride * n) % 61) for n in range(count))

    for number in range(5 * SAMPLES if kind == "packed" else SAMPLES):
        if kind in ("text", "packed"):
            yield {"text": words(4, 12)}
        elif kind == "unpaired":
            label = number % 3 != 0
            yield {"prompt": words(3, 8) + " ", "completion": words(2, 12), "label": label}
        else:
            answers = {"chosen": words(2, 12), "rejected": words(2, 12)}
            if kind == "three":
                answers["reference"] = words(2, 12)
            yield {"prompt": words(3, 8) + " ", **answers}


def find(trl, name):
    """A class of TRL, wherever this release has it; None if it has not."""
    if hasattr(trl, name):
        return getattr(trl, name)
    folder = name.removesuffix("Trainer").removesuffix("Config").lower()
    if find_spec("trl.experimental") and find_spec(f"trl.experimental.{folder}"):
        return getattr(import_module(f"trl.experimental.{folder}"), name)
    return None


def train(case, way, log, folder, resume):
    """Train a case on a rank. way: "class", "command" or "alone". log: where rank 0 writes it."""
    warnings.simplefilter("ignore")
    import datasets
    import transformers
    import trl

    datasets.disable_progress_bars()
    transformers.trainer.round = lambda loss, digits: loss  # before 5.0, for its logs
    toy.begin()
    kind = find(trl, f"{case.trainer}Trainer")
    config = {"gradient_clipping": "auto", "zero_optimization": {"stage": case.stage}}
    config |= {"bf16": {"enabled": "auto"}}
    config |= dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), "auto")
    config["gradient_accumulation_steps"] = "auto"
    accumulation = BATCH // MICRO // int(os.environ["WORLD_SIZE"])
    if way == "class":
        import universal
        from universal import batches
        from universal.trainer import AnyRanks

        universal.install()
        kind = type(f"My{case.trainer}", (AnyRanks, kind), {})
        config |= batches.config(BATCH, MICRO)
        accumulation = config["gradient_accumulation_steps"]
    arguments = find(trl, f"{case.trainer}Config")(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=MICRO,
        gradient_accumulation_steps=accumulation or 1,
        learning_rate=3e-3,
        weight_decay=0.1,
        lr_scheduler_type="cosine",
        logging_steps=1,
        save_steps=SAVED,
        save_strategy="no" if resume or way == "alone" else "steps",
        report_to=[],
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        disable_tqdm=True,
        deepspeed=config,
        dataloader_pin_memory=False,
        **case.options,
    )
    path = str(WORK / "models" / transformers.__version__ / case.model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    auto = getattr(transformers, MODELS[case.model])
    model = auto.from_pretrained(path, torch_dtype=torch.float32)
    data = "packed" if case.options == PACKED else TEXT.get(case.trainer, "pairs")
    data = datasets.Dataset.from_list([*rows("three" if case.trainer == "TPO" else data)])
    named = {}
    if case.trainer == "DPO":
        named["ref_model"] = auto.from_pretrained(path, torch_dtype=torch.float32)
    trainer = kind(
        model=model, args=arguments, train_dataset=data, processing_class=tokenizer, **named
    )
    trainer.train(resume_from_checkpoint=resume)
    if trainer.is_world_process_zero():
        kept = [row for row in trainer.state.log_history if "grad_norm" in row]
        Path(log).write_text(json.dumps(kept))


def play(trl, names):
    """Returns {case: [on 3 ranks, on 2 ranks, TRL alone]}, each a number or an error."""
    import transformers

    models = WORK / "models" / transformers.__version__
    if not models.exists():
        make_models(models, {name: (MODELS[name], config) for name, config in configs().items()})
    known = [name for name in names if find(import_module("trl"), f"{CASES[name].trainer}Trainer")]
    return {name: play_case(WORK / trl / name, CASES[name]) for name in known}


def play_case(folder, case):
    """Resumes a case on other ranks. Returns three numbers or errors."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)

    def go(name, ranks, way, resume=None):
        job = functools.partial(train, case, way, folder / f"{name}.json", folder / name, resume)
        done = launch(folder, ranks, job, limit=200, grace=8)
        (folder / f"{name}.txt").write_text(done.out + done.errors)
        return last_error(done.err) if done.code else None

    if failed := go("saved", 4, case.way):
        return [failed]
    results = []
    for ranks in (3, 2):
        name = f"on {ranks}"
        checkpoint = f"checkpoint-{SAVED}"
        shutil.copytree(folder / "saved" / checkpoint, folder / name / checkpoint)
        resume = str(folder / name / checkpoint)
        results.append(go(name, ranks, case.way, resume) or difference(folder, name))
    if case.way == "class":
        results.append(go("alone", 2, "alone") or difference(folder, "alone", SAVED))
    for name in ("saved", "on 3", "on 2", "alone"):
        shutil.rmtree(folder / name, ignore_errors=True)
    return results


def difference(folder, name, last=STEPS):
    """The largest relative difference of a loss or norm; infinite if a rate differs."""
    logs = [json.loads((folder / f"{which}.json").read_text()) for which in ("saved", name)]
    before, now = ({row["step"]: row for row in log if row["step"] <= last} for log in logs)
    gaps = [0.0]
    for step, row in now.items():
        if row["learning_rate"] != before[step]["learning_rate"]:
            return float("inf")
        for key in ("loss", "grad_norm"):
            wanted = float(before[step][key])
            gaps.append(abs(float(row[key]) - wanted) / abs(wanted))
    assert max(now) == last
    return float(f"{torch.tensor(gaps).max():.1e}")


def run(release, names):
    """Calls play() under that TRL."""
    transformers, accelerate, others = RELEASES[release]
    packages = f"trl=={release} transformers=={transformers} accelerate=={accelerate}"
    wanted = (*packages.split(), *others.split())
    path = versions.install(INSTALLED / f"trl-{release}", *wanted)
    results = {}
    for way in ("class", "command"):
        cases = [name for name in names if CASES[name].way == way]
        environment = {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
        paths = [path]
        if way == "command":
            environment["UNIVERSAL_BATCH"] = str(BATCH)
            paths.insert(0, ROOT / "universal" / "start")
        arguments = (release, cases)
        results |= versions.elsewhere(
            "measure.trl.play", arguments, *paths, limit=800 * len(cases) + 60, **environment
        )
    return results


def main():
    parser = options.parser(__doc__, "out/trl.txt")
    parser.add_argument("--cases", nargs="*", default=CASES)
    parser.add_argument("releases", nargs="*", default=RELEASES)
    args = parser.parse_args()
    table = {}
    for release in args.releases:
        for name, values in run(release, args.cases).items():
            print(release, name, values, flush=True)
            row = dict.fromkeys(COLUMNS, ())
            row |= {column: [value] for column, value in zip(COLUMNS, values, strict=False)}
            table[f"{release:<8}  {name:<24}"] = row
            write_table(args.output, f"{'TRL':<8}  {'trainer':<24}", table)
    checked = [row[column] for row in table.values() for column in COLUMNS[:2]]
    values = [value for of_row in checked for value in of_row]
    bad = [v for v in values if REFUSED not in str(v) and (isinstance(v, str) or v > ROUNDING)]
    if bad:
        sys.exit(f"measure/trl.py: not all is as it should be: {bad}")


if __name__ == "__main__":
    main()
