"""The README: its commands parse, its files exist, and its lines for other people's scripts do what they say."""

import argparse
import re
import runpy
import shlex
import shutil
import sys

import pytest
import torch
from conftest import ROOT, compare, run

README = (ROOT / "README.md").read_text()
PROGRAMS = ("python ", "deepspeed ", "torchrun ", "make ", "srun ")


def commands():
    """Every command of an indented block, its continued lines joined."""
    joined = re.sub(r"\\\n\s*", "", README)
    lines = [line.strip() for line in joined.splitlines() if line.startswith("    ")]
    return [line for line in lines if line.startswith(PROGRAMS)]


def test_there_are_commands():
    assert len(commands()) >= 20


class Parsed(BaseException):
    pass


@pytest.mark.parametrize("command", commands())
def test_command(command, monkeypatch):
    """The script exists and takes these flags; a make target exists."""
    words = shlex.split(command)
    if words[0] == "make":
        assert all(re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M) for target in words[1:])
        return
    number, script = next((i, word) for i, word in enumerate(words) if word.endswith(".py"))
    assert (ROOT / script).is_file()
    parse = argparse.ArgumentParser.parse_args

    def parsed(self, *arguments):
        parse(self, *arguments)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    monkeypatch.setattr(sys, "argv", [script, *words[number + 1 :]])
    monkeypatch.setenv("RANK", "0")
    monkeypatch.chdir(ROOT)
    with pytest.raises(Parsed):
        runpy.run_path(str(ROOT / script), run_name="__main__")


def test_a_wrong_flag_is_seen(monkeypatch):
    with pytest.raises(SystemExit):
        test_command("deepspeed --num_gpus 2 train.py --no_such_flag", monkeypatch)


def test_links():
    targets = [target for target in re.findall(r"\]\(([^)#]+)\)", README) if not target.startswith("http")]
    assert targets and all((ROOT / target).exists() for target in targets)


def own_script():
    """The Python block of the section for other people's scripts."""
    section = README.split("## In your own script")[1].split("\n## ")[0]
    return re.search(r"```python\n(.*?)```", section, re.S)[1]


SCRIPT = """
import deepspeed, sys, os, csv, logging
import torch, torch.nn as nn, torch.nn.functional as F
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
torch.set_num_threads(1)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed()
stage, folder, resumed, name = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "resume", sys.argv[4]
exec(open("own.py").read())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.norm = nn.Embedding(32, 24), nn.Linear(24, 24), nn.BatchNorm1d(24)
        self.frozen, self.out = nn.Linear(24, 24), nn.Linear(24, 32, bias=False)
        self.a, self.b = nn.Linear(24, 4, bias=False), nn.Linear(4, 24, bias=False)
        self.out.weight = self.embed.weight
        self.frozen.requires_grad_(False)

    def forward(self, x, y):
        x = F.dropout(self.norm(self.mix(self.embed(x))), 0.1, self.training)
        return F.cross_entropy(self.out(self.frozen(x) + self.b(self.a(x))), y)


torch.manual_seed(2 if resumed else 1)  # what is not restored is seen
net = Net()
trained = [p for p in net.parameters() if p.requires_grad]
matrices, rest = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() < 2]
groups = [{"params": matrices, "weight_decay": 0.5}, {"params": rest}]
config = {
    "train_batch_size": 32, "train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": stage},
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 1e-2, "weight_decay": 0.0}},
    "gradient_clipping": 1.0,
}
engine, *_ = deepspeed.initialize(model=net, model_parameters=groups, config=config)
data = torch.randint(32, (200,), generator=torch.Generator().manual_seed(0))  # an epoch ends after 6 steps, with 8 over
rows = []
for step, loss in train(engine, torch.utils.data.TensorDataset(data, (7 * data + 3) % 32), 20, folder, resumed, 10):
    loss = loss.double()
    torch.distributed.all_reduce(loss)
    rows.append((step, loss.item() / engine.world_size))
os.makedirs("logs", exist_ok=True)
if engine.global_rank == 0:
    with open(f"logs/{name}.csv", "w") as file:
        csv.writer(file).writerows([("step", "loss"), *rows])
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


def trained(folder, stage, own):
    """Train 20 steps on 4 ranks, as the run "base", and leave the checkpoint of step 10."""
    (folder / "own.py").write_text(own)
    (folder / "script.py").write_text(SCRIPT)
    run(folder, 4, folder / "script.py", stage, "c", "start", "base")
    shutil.rmtree(folder / "c" / "global_step20")


def resumed(folder, ranks, stage):
    """|difference| to "base" over steps 11 to 20."""
    (folder / "c" / "latest").write_text("global_step10")
    run(folder, ranks, folder / "script.py", stage, "c", "resume", f"on_{ranks}")
    shutil.rmtree(folder / "c" / "global_step20")
    gaps = compare(folder, "base", f"on_{ranks}")
    assert len(gaps) == 10
    return max(gaps.values())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_own_script(tmp_path, stage):
    """With these lines alone: BatchNorm, a frozen layer, tied weights and two groups, from 4 ranks to 4, 2 and 1."""
    trained(tmp_path, stage, own_script())
    for ranks in (4, 2, 1):
        assert resumed(tmp_path, ranks, stage) <= (0.0 if ranks == 4 else 1e-5)


@pytest.mark.parametrize(
    "line, without",
    [
        ("torch.manual_seed(hash((seed, step, m)))", "pass"),
        (
            "first = (step * count + m) * size",
            "first = (step * count + m % engine.gradient_accumulation_steps()) * size",
        ),
        ("epoch, step = divmod(step - 1,", "epoch, step = divmod(step - done - 1,"),
    ],
)
def test_every_line_is_needed(tmp_path, line, without):
    """Dropout that the rank draws, data that depend on the number of ranks, or on the step that a run starts from."""
    script = own_script()
    assert script.count(line) == 1
    if "done" in without:
        script = script.replace(
            "    for step in range(done", "    globals()['done'] = done\n    for step in range(done"
        )
    trained(tmp_path, 1, script.replace(line, without))
    assert resumed(tmp_path, 2, 1) > 1e-4


def test_an_epoch_has_every_sample_once():
    names = {}
    exec(own_script(), names)
    rows = torch.utils.data.TensorDataset(torch.arange(50))
    for epoch in (0, 1):
        steps = range(6 * epoch + 1, 6 * epoch + 7)
        seen = [names["micro_batch"](rows, 4, m, 2, step, 0)[0] for step in steps for m in (0, 1)]
        assert len(set(torch.cat(seen).tolist())) == 48
    assert not torch.equal(*(names["micro_batch"](rows, 4, 0, 2, step, 0)[0] for step in (1, 7)))
