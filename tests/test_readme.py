"""The README: its commands parse, its files exist, and its lines for other people's scripts do what they say."""

import argparse
import re
import runpy
import shlex
import sys

import pytest
import torch
from conftest import ROOT, compare, run

import ds_to_universal

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
stage, folder, tag, name = int(sys.argv[1]), *sys.argv[2:]
exec(open("own.py").read())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.norm = nn.Embedding(32, 24), nn.Linear(24, 24), nn.BatchNorm1d(24)
        self.frozen, self.out = nn.Linear(24, 24), nn.Linear(24, 32, bias=False)
        self.out.weight = self.embed.weight
        self.frozen.requires_grad_(False)

    def forward(self, x, y):
        x = self.frozen(F.dropout(self.norm(self.mix(self.embed(x))), 0.1, self.training))
        return F.cross_entropy(self.out(x), y)


torch.manual_seed(1 if tag == "none" else 2)  # what is not restored is seen
net = Net()
trained = [p for p in net.parameters() if p.requires_grad]
matrices, rest = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() < 2]
groups = [{"params": matrices, "weight_decay": 0.5}, {"params": rest}]
config = {
    "train_batch_size": 32, "train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": stage},
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 1e-2, "weight_decay": 0.0}},
    "gradient_clipping": 1.0, "checkpoint": {"load_universal": tag != "none"},
}
engine, *_ = deepspeed.initialize(model=net, model_parameters=groups, config=config)


def batch_of(step, m):
    x = torch.randint(32, (8,), generator=torch.Generator().manual_seed(100 * step + m))
    return x, (7 * x + 3) % 32


done = 0 if tag == "none" else resume(engine, folder, tag)["step"]
os.makedirs("logs", exist_ok=True)
rows = []
for step in range(done + 1, 21):
    loss = train_step(engine, batch_of, step).double()
    torch.distributed.all_reduce(loss)
    rows.append((step, loss.item() / engine.world_size))
    if step == 10 and tag == "none":
        engine.save_checkpoint(folder, tag="global_step10", client_state={"step": step})
if engine.global_rank == 0:
    with open(f"logs/{name}.csv", "w") as file:
        csv.writer(file).writerows([("step", "loss"), *rows])
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_own_script(tmp_path, stage):
    """With these lines alone: BatchNorm, a frozen layer, tied weights and two groups, from 4 ranks to 4, 2 and 1."""
    (tmp_path / "own.py").write_text(own_script())
    (tmp_path / "script.py").write_text(SCRIPT)
    script = tmp_path / "script.py"
    run(tmp_path, 4, script, stage, "c", "none", "base")
    ds_to_universal.convert(tmp_path / "c" / "global_step10", tmp_path / "c" / "universal")
    for ranks in (4, 2, 1):
        run(tmp_path, ranks, script, stage, "c", "universal", f"on_{ranks}")
        gaps = compare(tmp_path, "base", f"on_{ranks}")
        assert len(gaps) == 10 and max(gaps.values()) <= (0.0 if ranks == 4 else 1e-5)


@pytest.mark.parametrize("line", ["group.update", 'state["step"] =', "model.load_state_dict"])
def test_every_line_is_needed(tmp_path, line):
    """Without it the resumed run is another one. (Our converter's folder leaves the loader no hyper-parameters to get
    wrong; here they are put back, as DeepSpeed's converter writes them.)"""
    (tmp_path / "script.py").write_text(SCRIPT)
    script, tag = tmp_path / "script.py", tmp_path / "c" / "universal"
    lines = own_script().splitlines()
    assert sum(text.strip().startswith(line) for text in lines) == 1
    (tmp_path / "own.py").write_text("\n".join(lines))
    run(tmp_path, 4, script, 3, "c", "none", "base")
    ds_to_universal.convert(tmp_path / "c" / "global_step10", tag)
    state = torch.load(tag / "zero" / "optimizer_state.pt", weights_only=False)
    state["optimizer_state_dict"]["param_groups"] = state["param_groups"][:1]
    torch.save(state, tag / "zero" / "optimizer_state.pt")
    run(tmp_path, 4, script, 3, "c", "universal", "with")
    assert set(compare(tmp_path, "base", "with").values()) == {0.0}
    without = [re.sub(r"\S.*", "pass", text) if text.strip().startswith(line) else text for text in lines]
    (tmp_path / "own.py").write_text("\n".join(without))
    run(tmp_path, 4, script, 3, "c", "universal", "without")
    assert max(compare(tmp_path, "base", "without").values()) > 1e-4
