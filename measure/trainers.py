"""examples/hf_trainer.py under the transformers that people have: `make trainers`.

    python -m measure.trainers --output assets/trainers.txt

Installs each below .venv-trainers/, beside the torch of this Python: with the accelerate of its
time, and with this Python's. 4 ranks train for 20 steps, of which an epoch
has 15, and save in the first epoch, at its end and in the second; other weights load each of them
on 4, 3 or 5 ranks, by turns, and go on. A number is the largest difference of their losses, a
letter is an error. The last column is a Trainer without AnyRanks in it, under UNIVERSAL_BATCH=24
python -m universal, with what LLaMA-Factory 0.9.5 and ms-swift 4.6.0 want. Ends with an error where
a number is no rounding, or a rate differs."""

import functools
import shutil
import sys
from pathlib import Path

import accelerate
import torch
import transformers

from measure import options, versions
from measure.logs import compare, steps, write_table
from tests.support import ROOT
from tests.support.ranks import last_error, launch

INSTALLED = ROOT / ".venv-trainers"
WORK = ROOT / "runs" / "trainers"
OLD_HUB = "huggingface-hub==0.36.2 requests urllib3 certifi charset-normalizer idna"
HUB = "huggingface-hub==1.33.0 httpx httpcore h11 anyio idna certifi typer-slim"
# {transformers: the accelerate of its time, and what else this Python has not, or newer}
RELEASES = {
    "4.54.1": ("1.10.1", f"{OLD_HUB} tokenizers==0.21.4"),  # refused
    "4.55.4": ("1.10.1", f"{OLD_HUB} tokenizers==0.21.4"),
    "4.56.2": ("1.10.1", f"{OLD_HUB} tokenizers==0.22.2"),
    "4.57.6": ("1.12.0", f"{OLD_HUB} tokenizers==0.22.2"),
    "5.0.0": ("1.12.0", f"{HUB} tokenizers==0.22.2"),
    "5.6.0": ("1.11.0", f"{HUB} tokenizers==0.22.2"),
    "5.17.0": ("1.14.0", HUB),
    "5.19.0": ("1.15.0", HUB),
    "5.23.0": ("1.15.0", ""),
    "5.24.0": ("1.15.0", ""),
}
CLIENTS = ("5.6.0", "5.19.0")  # of LLaMA-Factory and ms-swift
NEW = (transformers.__version__, accelerate.__version__)
SAVED = {"first epoch": 6, "its end": 15, "second epoch": 18}
RANKS = (4, 3, 5)
# {column: what is trained, ZeRO's stage}
COLUMNS = {
    "tokens, ZeRO-2": ("Tokens", 2),
    "means, ZeRO-2": ("Means", 2),
    "tokens, ZeRO-3": ("Tokens", 3),
    "means, ZeRO-3": ("Means", 3),
    "a stream": ("Streams", 3),
    "python -m universal": ("Tokens", 3),
}
*OURS, COMMAND = COLUMNS
ROUNDING = 1e-5
REFUSED = "AnyRanks wants transformers"


class Tokens(transformers.Trainer):
    """A sum of losses, divided by the number of tokens."""


class Means(transformers.Trainer):
    """A mean for each micro-batch, whatever the number of its tokens."""

    def __init__(self, model, *others, **named):
        model.accepts_loss_kwargs = False
        super().__init__(model, *others, **named)


class Stream(torch.utils.data.IterableDataset):
    """Samples in an order of each epoch."""

    epoch = 0

    def __init__(self, samples):
        self.samples = samples

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(len(self.samples), generator=generator)
        return (self.samples[number] for number in order)


class Streams(transformers.Trainer):
    """The same samples, without numbers."""

    def __init__(self, *others, train_dataset, **named):
        super().__init__(*others, train_dataset=Stream(train_dataset), **named)


def change(kind, seed):
    """Changes, on a rank, what the example trains."""
    import transformers  # what a script gets, and before 5.0 not what the first import returns

    set_seed, arguments = transformers.set_seed, transformers.TrainingArguments
    named = {"save_steps": 3, "eval_strategy": "no", "load_best_model_at_end": False}
    if seed != 1:
        named["save_strategy"] = "no"
    transformers.set_seed = lambda wanted: set_seed(wanted or seed)  # 0: that of the model alone
    transformers.TrainingArguments = lambda **given: arguments(**given | named)
    transformers.Trainer = globals()[kind]
    transformers.trainer.round = lambda loss, digits: loss  # before 5.0, for its logs


def play(release, beside, folder, columns):
    """Returns differences or errors by column."""
    assert (transformers.__version__, accelerate.__version__) == (release, beside)
    shutil.rmtree(folder, ignore_errors=True)
    return {column: play_column(Path(folder, column), column) for column in columns}


def play_column(folder, column):
    """Resumes from each checkpoint in turn."""
    folder.mkdir(parents=True)
    kind, stage = COLUMNS[column]
    script = ROOT / "examples" / "hf_trainer.py"
    if column == COMMAND:
        text = script.read_text().replace("(AnyRanks, Trainer)", "(Trainer)")
        script = folder / "plain.py"
        script.write_text(text)

    def train(name, ranks, seed):
        flags = ("--zero_stage", stage, "--output_dir", name, "--run_name", name)
        patch = functools.partial(change, kind, seed)
        done = launch(folder, ranks, script, *flags, patch=patch, grace=5)
        (folder / f"{name}.txt").write_text(done.out + done.errors)
        return last_error(done.err) if done.code else None

    failed = train("saved", 4, 1)
    if failed:
        assert not steps(folder, "saved")  # it was before the first step
        return [failed]
    results = []
    for turn, (name, step) in enumerate(SAVED.items(), [*COLUMNS].index(column)):
        checkpoint = f"checkpoint-{step}"
        shutil.copytree(folder / "saved" / checkpoint, folder / name / checkpoint)
        results.append(train(name, RANKS[turn % 3], 2) or difference(folder, name))
    shutil.rmtree(folder / "saved")
    return results


def difference(folder, name):
    """The largest difference of a loss; NaN if one is. Infinite if a rate or a step differs."""
    losses, rates = (compare(folder, "saved", name, column) for column in ("loss", "lr"))
    if max(rates.values()) > 1e-12 or max(losses) != 20:
        return float("inf")
    return float(f"{torch.tensor(list(losses.values())).max():.1e}")


def run(release, beside, columns, folder=WORK):
    """Calls play() under that transformers, beside that accelerate."""
    paths = []
    environment = {}
    if columns == [COMMAND]:
        paths.append(ROOT / "universal" / "start")
        environment["UNIVERSAL_BATCH"] = "24"
    if release != NEW[0]:
        packages = (f"transformers=={release}", *RELEASES[release][1].split())
        paths.append(versions.install(INSTALLED / release, *packages))
    if beside != NEW[1]:
        name = f"accelerate-{beside}"
        paths.append(versions.install(INSTALLED / name, name.replace("-", "==")))
    arguments = (release, beside, str(folder / f"{release} {beside}"), columns)
    # Where there is one, Trainer imports it, and that of `make clients` wants a newer hub.
    without = ("datasets",) if release < "5" else ()
    limit = 600 * len(columns)
    play_there = functools.partial(versions.elsewhere, "measure.trainers.play", arguments, *paths)
    return play_there(limit=limit, without=without, **environment)


def main():
    parser = options.parser(__doc__, "out/trainers.txt")
    parser.add_argument("releases", nargs="*", default=RELEASES)
    args = parser.parse_args()
    rows = {}
    for release in args.releases:
        of_its_time = RELEASES[release][0]
        wanted = dict.fromkeys((NEW[1], of_its_time), OURS)
        if release in CLIENTS:
            wanted = {of_its_time: [COMMAND]}
        for beside, columns in sorted(wanted.items()):
            measured = run(release, beside, columns)
            print(release, beside, measured, flush=True)
            label = f"{release:<12}  {beside}"
            rows[label] = {column: measured.get(column, ()) for column in COLUMNS}
            write_table(args.output, "transformers  accelerate", rows)
    values = [value for row in rows.values() for column in row.values() for value in column]
    right = [value for value in values if isinstance(value, float) and value <= ROUNDING]
    refused = [value for value in values if REFUSED in str(value)]
    if len(right) + len(refused) < len(values):
        sys.exit("measure/trainers.py: not all is as it should be")


if __name__ == "__main__":
    main()
