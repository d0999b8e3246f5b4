"""What is printed about another batch keeps the batch: each text's words are taken as they are,
pasted into the script that has printed them, and run on 3 ranks, whose samples, rates and losses
are those of the run on 4 ranks that was not interrupted."""

import functools
import importlib.util
import json
import os
import re
import runpy
import shutil
import sys

import pytest

from tests.support import ROOT
from tests.support.ranks import last_error, launch, run
from universal.advice import BATCH_ADVICE
from universal.inspect import lines_of, look

START = """
import json, os, sys
import deepspeed, torch
import torch.distributed as dist
from tests.support.toy import begin
import universal
universal.install()
begin()
RANKS, RANK = dist.get_world_size(), dist.get_rank()
SEEN = []
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 3)
    def forward(self, x):
        if self.training: SEEN.extend(x.flatten().tolist())
        return {"loss": (self.layer(x / 100) - 1).pow(2).sum(1).mean()}
rows = []
def log(step, loss, rate):
    seen = [None] * RANKS
    dist.all_gather_object(seen, SEEN)
    rows.append((step, loss, rate, sorted({*sum(seen, [])})))
    SEEN.clear()
    if RANK == 0:
        with open("rows.json", "w") as file:
            json.dump(rows, file)
torch.manual_seed(0)
net = model = Net()
DATA = [{"x": torch.tensor([float(i)])} for i in range(96)]
PER_RANK = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
"""
ENGINE = """
config = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 0.01}}}
config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}
config["zero_optimization"] = {"stage": 1}
config |= PER_RANK
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
done = 3 if engine.load_checkpoint("ck", "step_3" if os.path.exists("ck") else None)[0] else 0
"""
OWN = (
    ENGINE
    + """
for step in range(done + 1, 7):
    total = 0
    rate = engine.get_lr()[0]
    for m, weight in ((i * RANKS + RANK, 1) for i in range(engine.gradient_accumulation_steps())):
        begin = 16 * (step - 1) + 2 * m
        loss = engine(torch.stack([sample["x"] for sample in DATA[begin : begin + 2]]))["loss"]
        engine.backward(loss)
        engine.step()
        total += weight * loss.detach() / engine.gradient_accumulation_steps()
    dist.all_reduce(total)
    log(step, total.item() / RANKS, rate)
    if step == 3 and not done:
        engine.save_checkpoint("ck", "step_3")
"""
)
PIPELINE = (
    """
from deepspeed.pipe import PipelineModule
class Seen(torch.nn.Linear):
    def forward(self, x):
        SEEN.extend(x.flatten().tolist())
        return super().forward(x / 100)
def weighed(output, labels):
    target, weight = labels
    return weight * (output - target).pow(2).sum(1).mean()
def inputs(m):
    begin = 16 * (step - 1) + 2 * m
    return torch.stack([sample["x"] for sample in DATA[begin : begin + 2]])
def targets(m):
    return torch.ones(2, 3)
ranks = RANKS
net = PipelineModule([Seen(1, 3)], num_stages=1, loss_fn=weighed)
"""
    + ENGINE
    + """
for step in range(done + 1, 7):
    rate = engine.get_lr()[0]
    engine.train_batch((inputs(m), (targets(m), torch.tensor(1.0))) for m in range(RANK, 9, RANKS))
    log(step, engine.agg_train_loss.item(), rate)
    assert engine.batch_timer.batch_size == engine.train_batch_size()
    if step == 3 and not done:
        engine.save_checkpoint("ck", "step_3")
"""
)
ACCELERATE = """
from accelerate import Accelerator, DeepSpeedPlugin, DistributedType, PartialState
from accelerate.utils import DataLoaderConfiguration
PartialState(cpu=True).distributed_type = DistributedType.DEEPSPEED
config = {"zero_optimization": {"stage": 2}}
config |= PER_RANK
in_order = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=7)
plugin = DeepSpeedPlugin(hf_ds_config=config)
accelerator = Accelerator(deepspeed_plugin=plugin, dataloader_config=in_order)
loader = torch.utils.data.DataLoader(DATA, batch_size=2, shuffle=True)
optimizer = torch.optim.AdamW(net.parameters(), 0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
steps = None
step = 3 if os.path.exists("ck") else 0
saves = not step
if step:
    accelerator.load_state("ck")
    accelerator.step = 0
accumulation = accelerator.gradient_accumulation_steps
loader = accelerator.skip_first_batches(loader, step * accumulation)
total = 0
for inputs, weight in ((inputs, 1) for inputs in loader):
    with accelerator.accumulate(model):
        loss = model(**inputs)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    total += weight * loss.detach() / accumulation
    if accelerator.sync_gradients:
        step += 1
        log(step, accelerator.reduce(total, "mean").item(), optimizer.param_groups[0]["lr"])
        total = 0
        if step == 3 and saves:
            accelerator.save_state("ck")
"""
TRAINER = """
from transformers import Trainer, TrainerCallback, TrainingArguments
class Log(TrainerCallback):
    def on_log(self, args, state, control, logs, **_):
        if "loss" in logs:
            log(state.global_step, logs["loss"], logs["learning_rate"])
config = {"zero_optimization": {"stage": 2}}
config |= PER_RANK
args = TrainingArguments(
    output_dir="ck", deepspeed=config, per_device_train_batch_size=2,
    gradient_accumulation_steps=config["gradient_accumulation_steps"], max_steps=6, save_steps=3,
    learning_rate=0.01, logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, seed=1,
)
trainer = Trainer(model=net, args=args, train_dataset=DATA, callbacks=[Log()])
# here
resumed = "ck/checkpoint-3" if os.path.exists("ck/checkpoint-3") else None
trainer.train(resume_from_checkpoint=resumed)
"""
# Each with the folder of its checkpoint.
SCRIPTS = {
    "own": (OWN, "ck"),
    "pipeline": (PIPELINE, "ck"),
    "accelerate": (ACCELERATE, "ck/pytorch_model"),
    "Trainer": (TRAINER, "ck/checkpoint-3/global_step3"),
}
README, CLIENTS = ((ROOT / name).read_text() for name in ("README.md", "docs/clients.md"))
HALF = ["from universal import batches", "config |= batches.config(16, 2)"]


def pasted(script, pieces):
    """The script with these pieces of code, each in place of the line that begins alike."""
    for piece in pieces:
        beginning = re.match(r"for \w+|[\w.]+( \|=)?", piece)[0]
        if beginning == "from":
            script = f"{piece}\n{script}"
            continue
        beginning = beginning.replace("steps.epoch", "loader = accelerator.skip")
        line = re.search(rf"^ *({re.escape(beginning)}[ .(_,].*)", script, re.M)
        script = script[: line.start(1)] + piece + script[line.end(1) :]
    return script


def of_page(reader):
    """What README.md or docs/clients.md says, in pieces, with this run's numbers."""
    if reader == "own":
        (sizes, imported), *lines = re.findall(r"^\+ *(.*?)(?:,  # (.*))?$", README, re.M)
        sizes = sizes.replace("128", "16").replace("micro_batch=4", "micro_batch=2")
        return [imported, f"config |= {{{sizes}}}", *(line for line, _ in lines)]
    if reader == "pipeline":
        return []
    section = re.search(rf"^## {reader}\b(.*?)```python\n(.*?)```(.*?)^## ", CLIENTS, re.M | re.S)
    before, block, after = (text.replace("24", "16") for text in section.groups())
    if reader == "Trainer":
        return [
            f"config |= {{}}\n{block}",
            "trainer = MyTrainer(model=net, args=args, train_dataset=DATA, callbacks=[Log()])",
        ]
    (sizes, weights) = re.findall("`(.*?\\))`[ ,]", before + after)[:2]
    return [
        *filter(None, block.splitlines()),
        f"config |= {{{sizes}}}",
        f"for inputs, weight in {weights}:",
        "accelerator.backward(weight * loss)",
    ]


def without_names(piece):
    """As the advice spells it, which has less room."""
    piece = piece.removesuffix("  # new").replace("batch=16, micro_batch=2", "16, 2")
    return re.sub(r"{\*\*(.*)}", r"\1", piece)


def behind(command):
    """A patch: the script was started behind `UNIVERSAL_BATCH=16 python -m universal`."""

    def start():
        name, value = command.split()[0].split("=")
        os.environ[name] = value
        site = runpy.run_path(str(ROOT / "universal/start/sitecustomize.py"))
        for module, function in site["AfterImport"].functions.items():
            if module in sys.modules:  # too early for sitecustomize
                function(sys.modules[module])
            elif importlib.util.find_spec(module.partition(".")[0]):  # not all have TRL
                importlib.import_module(module)
        transformers = sys.modules["transformers"]
        transformers.Trainer = transformers.trainer.Trainer

    return start


def rows_in(folder, begin=0):
    """{step: row} of a run, without its first steps."""
    rows = json.loads((folder / "rows.json").read_text())
    return {row[0]: row for row in rows if row[0] > begin}


def check_equal(rows, whole):
    for (step, loss, rate, samples), (_, loss_before, *before) in zip(
        rows.values(), whole.values(), strict=True
    ):
        assert [rate, samples] == before and len(samples) == 16, step
        assert loss == pytest.approx(loss_before, rel=1e-6), step


@pytest.fixture(scope="module")
def saved(work):
    """saved(reader): the folder in which its script has run on 4 ranks."""
    from transformers import Trainer  # noqa: F401

    @functools.cache
    def train(reader):
        folder = work / reader
        folder.mkdir()
        (folder / "script.py").write_text(START + SCRIPTS[reader][0])
        run(folder, 4, folder / "script.py")
        return folder

    return train


@pytest.mark.parametrize("reader", SCRIPTS)
def test_pasted(tmp_path, saved, reader):
    script, folder = SCRIPTS[reader]

    def play(ranks, *pieces, patch=None):
        (tmp_path / "script.py").write_text(pasted(START + script, pieces))
        return launch(tmp_path, ranks, tmp_path / "script.py", patch=patch, grace=20)

    shutil.copytree(saved(reader) / "ck", tmp_path / "ck")
    whole = rows_in(saved(reader), 3)
    # By the load's line, the error of who follows half of it, and inspect.
    warned = play(3)
    (cure,) = re.findall("the global batch was 16, and is 12 now: to keep 16, (.*)", warned.out)
    assert [row[-1] for row in rows_in(tmp_path).values()] != [row[-1] for row in whole.values()]
    if reader == "Trainer":  # test_batches.py stops loops of one's own
        stopped = play(3, *HALF)
        trained = "this step trains 18 samples, 2 x 3 accumulation steps x 3 ranks. To keep 16:"
        assert trained in stopped.err and f"\n  {cure}\n" in stopped.err
        assert stopped.codes == {0: 1, 1: 1, 2: 1}
    lines = [*lines_of(look(tmp_path / folder), 3)]
    assert lines.index(f"  {cure}") == len(lines) - len(BATCH_ADVICE)
    code = re.findall("`(.*?)`", cure)
    page = of_page(reader)
    if {*code} <= {without_names(piece) for piece in page}:
        code = []  # it is the page's
    for pieces in filter(None, (code, page)):
        is_command = pieces[0].startswith("UNIVERSAL_BATCH=")
        kept = play(3, patch=behind(*pieces)) if is_command else play(3, *pieces)
        assert not kept.code, kept.errors
        check_equal(rows_in(tmp_path), whole)


# --------------------------------------------------------------------------------------------------
# what Trainer itself does to a batch


OOM = """
forward = net.forward
def forward_of_few(x):
    if len(x) > 1: raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
    return forward(x)
net.forward = forward_of_few
"""
RESTORED = """
from transformers import TrainerState
load_from_json = TrainerState.load_from_json
def of_half(path):
    state = load_from_json(path)
    state.train_batch_size = 1
    return state
TrainerState.load_from_json = staticmethod(of_half)
"""
FINDS = ("logging_steps=1", "logging_steps=1, auto_find_batch_size=True")
ANY_RANKS = [
    ("config |= PER_RANK", "config |= batches.config(16, 2)"),
    (
        "import universal",
        "import universal\nfrom universal import batches\nfrom universal.trainer import AnyRanks",
    ),
    ("trainer = Trainer(", "trainer = type('Mine', (AnyRanks, Trainer), {})("),
]
SIZES = "the DataLoader deals {} at once, and the config's micro-batch is {}: "
# {kind: (changes of the script, whether UNIVERSAL_BATCH is set, what stops it)}
KINDS = {
    "found_less": ([FINDS, *ANY_RANKS, ("# here", OOM)], False, SIZES.format(1, 2)),
    "found_less_by_name": ([FINDS, ("# here", OOM)], True, None),
    "restored_size": ([FINDS, *ANY_RANKS, ("# here", RESTORED)], False, SIZES.format(1, 2)),
    "last_step, named twice": ([FINDS, *ANY_RANKS, ("range(96)", "range(41)")], True, None),
}


@pytest.mark.parametrize("kind", KINDS)
def test_trainer(tmp_path, saved, kind):
    """16 samples are trained, or none. An epoch's last step has those that are left, 9 of 41."""
    changes, is_named, words = KINDS[kind]
    script = START + TRAINER
    for old, new in changes:
        assert script.count(old) == 1
        script = script.replace(old, new)
    (tmp_path / "script.py").write_text(script)
    if kind == "restored_size":
        shutil.copytree(saved("Trainer") / "ck", tmp_path / "ck")
    patch = behind("UNIVERSAL_BATCH=16 python -m universal") if is_named else None
    done = launch(tmp_path, 3, tmp_path / "script.py", patch=patch, grace=20)
    if words:
        assert done.codes == {0: 1, 1: 1, 2: 1} and words in done.err, done.errors
        assert not (tmp_path / "rows.json").exists()
        return
    assert not done.code, done.errors
    counts = [len(row[-1]) for row in rows_in(tmp_path).values()]
    assert counts == ([16, 16, 9] * 2 if kind.startswith("last") else [16] * 6)


# {what is refused: (a change of the script, what gives way to what the error says)}; each change is
# of a script that the one before has left right.
STEPS = 'gradient_accumulation_steps=config["gradient_accumulation_steps"]'
REFUSED = {
    "batches.config(BATCH, ": (ANY_RANKS[1:], [("config |= PER_RANK", "`(config.*?)`")]),
    "the DataLoader deals 4 at once": (
        [("trainer = type", "args.per_device_train_batch_size = 4\ntrainer = type")],
        [
            ("batches.config(16, 2)", "`(batches.*?)`"),
            ("per_device_train_batch_size=2", "`(per_device.*?)`"),
        ],
    ),
    "TrainingArguments has ": (
        [(STEPS, "gradient_accumulation_steps=3")],
        [("gradient_accumulation_steps=3", r"wants (\w+=\d+)")],
    ),
}


def test_refused(tmp_path, saved):
    """Who changes what each error says goes on as if on 4 ranks."""
    shutil.copytree(saved("Trainer") / "ck", tmp_path / "ck")
    script = START + TRAINER
    for words, (changes, cures) in REFUSED.items():
        for old, new in changes:
            script = script.replace(old, new)
        (tmp_path / "script.py").write_text(script)
        error = last_error(launch(tmp_path, 2, tmp_path / "script.py", grace=20).err)
        assert words in error and not (tmp_path / "rows.json").exists()
        for old, pattern in cures:
            script = script.replace(old, re.search(pattern, error)[1].replace("BATCH", "16"))
    (tmp_path / "script.py").write_text(script)
    run(tmp_path, 2, tmp_path / "script.py")
    check_equal(rows_in(tmp_path), rows_in(saved("Trainer"), 3))
