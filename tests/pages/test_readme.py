"""README.md, CONTRIBUTING.md, CHANGELOG.md and docs/*.md: their commands parse, their links lead somewhere, what they
name exists, their tables and numbers are those of assets/, and the loop of the README does what it says."""

import argparse
import ast
import csv
import fnmatch
import math
import re
import runpy
import shlex
import shutil
import subprocess
import sys

import pytest
import torch
from deepspeed.launcher import runner
from helpers import ROOT
from torch.distributed.run import get_args_parser

import plot
import universal.elastic
import universal.exact
import universal.mirror
import universal.safetensors
from harness.ranks import compare, launch, run

PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))}
THEIRS = ("your_script.py",)  # what the reader has
COMMAND = re.compile(r"(python|deepspeed|torchrun) .*\.py|python -m universal(\.\w+)? \w|make [\w -]+$|pip install -r")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$|((?:^    [^\n]*\n)+)", re.M | re.S)


# -----------------------------------------------------------------------------
# what stands on a page


def blocks(text):
    """The lines of every fenced block, but for those in Python, and of every indented one. A blank line ends the
    latter: it divides a command from what it prints."""
    for language, fenced, indented in BLOCK.findall(text):
        if language != "python":
            yield (fenced or re.sub("^    ", "", indented, flags=re.M)).splitlines()


def commands(text):
    """Every command of a block, its continued lines joined, without its comment, and of a code span in the prose."""
    lines = [line for block in blocks(text) for line in re.sub(r"\\\n\s*", "", "\n".join(block)).split("\n")]
    lines += [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", BLOCK.sub("", text))]
    parts = [part for line in lines for part in re.sub(r" +# .*", "", line).split(" && ")]
    lines = [re.sub(r"^(\w+=\S+ )+", "", part).strip() for part in parts]
    return {line for line in lines if COMMAND.match(line)}


COMMANDS = sorted({(page, command) for page, text in PAGES.items() for command in commands(text)})


class Parsed(BaseException):
    pass


def parse_by(run, words, monkeypatch):
    """run() gets as far as its argument parser, which takes these words."""
    parse = argparse.ArgumentParser.parse_args

    def parsed(self, *arguments):
        parse(self, *arguments)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.chdir(ROOT)
    with pytest.raises(Parsed):
        run()


@pytest.mark.parametrize("page, command", COMMANDS)
def test_command(page, command, monkeypatch):
    """The script exists and takes these flags, the launcher takes its own; a make target exists."""
    words = shlex.split(command)
    if words[0] == "make":
        assert all(re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M) for target in words[1:])
        return
    if words[0] == "pip":
        assert (ROOT / words[-1]).is_file()
        return
    if words[1:3] == ["-m", "universal.safetensors"]:
        parse_by(universal.safetensors.main, words[2:], monkeypatch)
        return
    if words[1:3] == ["-m", "universal.elastic"]:  # torchrun with warm workers
        words = ["torchrun", *words[3:]]
    if words[1:3] == ["-m", "universal"]:  # any command may follow
        words = words[3:]
        if not COMMAND.match(" ".join(words)):
            return
    number, script = next((i, word) for i, word in enumerate(words) if word.endswith(".py"))
    assert script in THEIRS or (ROOT / script).is_file()
    if words[0] == "torchrun":
        get_args_parser().parse_args(words[1:])
    if words[0] == "deepspeed":
        runner.parse_args(words[1:])
    if script in THEIRS:
        return
    if script.startswith("examples/"):  # they may import what is not installed
        source = (ROOT / script).read_text()
        assert all(f'"{word}"' in source for word in words[number + 1 :] if word.startswith("--"))
        return
    parse_by(lambda: runpy.run_path(str(ROOT / script), run_name="__main__"), words[number:], monkeypatch)


def test_make_help():
    """It is the list at the top of the Makefile, and that has every target."""
    out = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, timeout=60).stdout
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", "")
    targets = re.search(r"^\.PHONY: (.*)$", makefile, re.M)[1].split()
    assert set(re.findall(r"\bmake ([\w-]+)", out)) == set(targets)


def test_make_help_is_first_and_make_clean_removes_what_the_pages_make():
    """Every folder that a command on a page names for its output; git ignores them all."""
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^([a-z][\w-]*):", makefile, re.M)[1] == "help"
    removed = re.search(r"^clean:\n\trm -rf (.*)", makefile, re.M)[1].replace("$(CKPT)", "ds_transformer_checkpoint")
    folders = {folder for _, c in COMMANDS for folder in re.findall(r"(?:_dir|--output) (?!/)([\w-]+)", c)}
    assert {"out", "logs", "ds_transformer_checkpoint"} & folders
    for folder in folders:
        assert any(fnmatch.fnmatch(folder, pattern) for pattern in removed.split()), folder
    ignored = subprocess.run(["git", "check-ignore", *(f"{folder}/x" for folder in folders)], cwd=ROOT, timeout=60)
    assert ignored.returncode == 0 and ".venv " not in removed


WRONG = ["deepspeed --num_gpus 2 train.py --no_such_flag", "deepspeed --no_such_flag train.py"]
WRONG += ["torchrun --no_such_flag train.py", "make no_such_target", "python no_such_script.py"]
WRONG += ["torchrun examples/hf_trainer.py --no_such_flag", "pip install -r no_such_file.txt"]
WRONG += ["python -m universal deepspeed train.py --no_such_flag", "python -m universal.safetensors no_output"]
WRONG += ["python -m universal.elastic --no_such_flag train.py", "deepspeed --no_such_flag your_script.py"]


@pytest.mark.parametrize("command", WRONG)
def test_a_wrong_command_is_seen(command, monkeypatch):
    """In a block, behind a variable, and in the prose."""
    for text in (f"    {command}\n", f"```bash\n{command}\n```\n", f"then `VARIABLE=1 {command}` does it"):
        assert commands(text) == {command}
    with pytest.raises((SystemExit, AssertionError)):
        test_command("README.md", command, monkeypatch)


def broken_links(page, text):
    """Those that lead to no file, or to no heading of it."""
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", text):
        path = (ROOT / page).parent / target if target else ROOT / page
        headings = re.findall(r"^#+ (.*)$", path.read_text(), re.M) if anchor and path.is_file() else []
        if (
            not path.exists()
            or anchor
            and anchor not in [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings]
        ):
            yield f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES)
def test_links(page):
    assert not list(broken_links(page, PAGES[page]))


def test_a_broken_link_is_seen():
    text = "[a](no_such_page.md) [b](#no-such-heading) [c](clients.md#nowhere) [d](clients.md#measured)"
    assert list(broken_links("docs/layouts.md", text)) == ["no_such_page.md#", "#no-such-heading", "clients.md#nowhere"]


def test_front_door():
    """The README leads to every page, and names what CI runs."""
    assert all(f"({page})" in PAGES["README.md"] for page in PAGES if page != "README.md")
    assert "make test" in commands(PAGES["README.md"]) and "make test" in (ROOT / ".ci" / "run").read_text()


PROSE = [*ROOT.glob("examples/*"), *ROOT.glob("universal/**/*.py"), ROOT / "ds_to_universal.py"]
PROSE = PAGES | {path.relative_to(ROOT).as_posix(): path.read_text() for path in PROSE if path.is_file()}
OTHERS = {*THEIRS, "their_script.py", "script.py"}


def unknown_files(text):
    """Files of Python that a text names, and that are nowhere here."""
    names = {path.name for folder in ("", "*/", "*/*/") for path in ROOT.glob(f"{folder}*.py")}
    return {name for name in re.findall(r"[\w-]+\.py\b(?!\()", BLOCK.sub("", text)) if name not in names | OTHERS}


@pytest.mark.parametrize("name", PROSE)
def test_files_that_are_named_exist(name):
    assert not unknown_files(PROSE[name])


def test_a_file_that_is_gone_is_seen():
    assert unknown_files("`collective.py`, examples/no_such.py, train.py") == {"collective.py", "no_such.py"}


MODULES = {"universal": universal, "elastic": universal.elastic, "exact": universal.exact}
MODULES["mirror"] = universal.mirror.Mirror


def unknown_names(text):
    """What the blocks in Python take from the package, and it does not have."""
    for language, fenced, _ in BLOCK.findall(text):
        for node in ast.walk(ast.parse(fenced)) if language == "python" else ():
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in MODULES:
                if not hasattr(MODULES[node.value.id], node.attr):
                    yield f"{node.value.id}.{node.attr}"


@pytest.mark.parametrize("page", PAGES)
def test_code_uses_what_there_is(page):
    assert not list(unknown_names(PAGES[page]))


def test_a_name_that_is_gone_is_seen():
    assert list(unknown_names("```python\nelastic.enrol(4)\nuniversal.install()\n```\n")) == ["elastic.enrol"]


def test_will_it_divide():
    """The README's example."""
    page = PAGES["README.md"]
    kept = re.search(r"(\d+) = (\d+) per GPU x (\d+) accumulation steps x (\d+) GPUs = (\d+) x (\d+) x (\d+):", page)
    batch, micro, steps, gpus, *fewer = map(int, kept.groups())
    assert batch == micro * steps * gpus == math.prod(fewer) and fewer[0] == micro
    batch, micro, gpus = map(int, re.search(r"batch of (\d+) does not divide into (\d+) x (\d+)", page).groups())
    most = max(n for n in range(1, gpus + 1) if batch % (micro * n) == 0)
    assert most < gpus and f"train on {most} of the {gpus} GPUs" in page


def test_versions():
    """The README's range is what was measured."""
    measured = re.findall(r"^(0\.\S+) ", (ROOT / "assets" / "versions.txt").read_text(), re.M)
    for page in ("README.md", "CHANGELOG.md"):
        assert f"{measured[0]} to {measured[-1]}" in " ".join(PAGES[page].split()), page


# -----------------------------------------------------------------------------
# the tables and numbers


def differences(shown, tables, linked=()):
    """{table: lines that are wrong, or are missing} for {name: text} of tables and the blocks of all pages. A block
    shows the table with which it has a line in common that no other table has; where it has "..." it may be a part.
    linked: names of tables that need not be shown."""
    tables = {
        name: [line.rstrip() for line in text.splitlines() if line.strip() and not line.startswith("wrote ")]
        for name, text in tables.items()
    }
    found = {}
    for name, table in tables.items():
        others = {line for other in tables if other != name for line in tables[other]}
        blocks = [block for block in shown if {line.rstrip() for line in block} & (set(table) - others)]
        lines = [line.rstrip() for block in blocks for line in block if line.strip()]
        found[name] = [line for line in lines if line not in table and line.strip() != "..."]
        if "..." not in map(str.strip, lines) and (lines or name not in linked):
            found[name] += [line for line in table if line not in lines]
    return found


def test_tables():
    """What commands have written into assets/*.txt is what the pages show, or link to."""
    tracked = subprocess.run(["git", "ls-files", "assets"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    tables = {path.name: path.read_text() for path in ROOT.glob("assets/*.txt") if path.name in tracked.stdout}
    linked = [name for name in tables if any(f"assets/{name})" in text for text in PAGES.values())]
    found = differences([block for text in PAGES.values() for block in blocks(text)], tables, linked)
    assert len(found) >= 4 and not any(found.values()), found


def test_a_wrong_table_is_seen():
    tables = {"x": "run loss\n\na 1\nb 2\nc 3\nwrote out/x.png\n", "y": "run loss\nd 4\n"}
    y = ["run loss", "d 4"]
    for right in (
        [["run loss", "a 1", "b 2", "c 3"], y],
        [["run loss", "a 1"], ["b 2", "c 3"], y],
        [["a 1", "..."], y],
    ):
        assert differences(right, tables) == {"x": [], "y": []}
    assert differences([["run loss", "a 1", "b 3", "c 3"], y], tables) == {"x": ["b 3", "b 2"], "y": []}
    assert differences([["a 1", "b 2", "..."], ["run loss", "d 5"]], tables) == {"x": [], "y": ["run loss", "d 4"]}
    assert differences([y], tables, ["x"]) == {"x": [], "y": []} != differences([y], tables)


def plotted():
    """{run: what plot.py says of it} of the CSVs beside the pictures."""
    found = {}
    for path in sorted(ROOT.glob("assets/*.csv")):
        rows = list(csv.DictReader(path.open(newline="")))
        columns = [c for c in rows[0] if c.endswith(" loss")]
        for name in (c.removesuffix(" loss") for c in columns):
            run, baseline = (
                {c: {int(r["step"]): float(r[f"{n} {c}"]) for r in rows if r[f"{n} {c}"]} for c in ("loss", "val_loss")}
                for n in (name, columns[0].removesuffix(" loss"))
            )
            gaps, val = (list(plot.differences(baseline, run, c).values()) for c in ("loss", "val_loss"))
            same = f"{gaps.count(0)} of {len(gaps)}"
            found[name] = f"{gaps[0]:.1e}", f"{max(gaps):.1e}", same, f"{max(val):.1e}" if val else ""
    return found


def test_what_the_readme_says_of_its_pictures():
    """PASS behind a command of plot.py, and the number below the first picture, are of the CSV beside the picture."""
    found, passed = plotted(), {}
    for command in commands(PAGES["README.md"]):
        output = re.search(r"--output out/(\w+)\.png --tolerance (\S+)", command)
        if output and f"(assets/{output[1]}.png)" in PAGES["README.md"]:
            _, *runs = re.findall(r"logs/(\w+)", command)
            worst = max(float(found[run][column] or 0) for run in runs for column in (1, 3))
            passed[output[1]] = f"PASS: {worst:.1e} <= {float(output[2]):g}"
    assert passed.keys() == {"resume", "grad_accu", "resume_uc"}
    said = re.findall("`(PASS: .*?)`", PAGES["README.md"])
    assert sorted(said) == sorted([*passed.values(), "PASS: 0.0e+00 <= 0"])  # Test 1 has no picture
    for text in (re.search(r"!\[(.*?)\]\(assets/resume.png\)", PAGES["README.md"])[1], PAGES["docs/exact.md"]):
        assert passed["resume"].split()[1] in text


# -----------------------------------------------------------------------------
# the README's script


def own_script():
    """What the README shows the end of."""
    script = (ROOT / "examples" / "own_loop.py").read_text()
    assert script.endswith(re.search(r"```python\n(.*?)```", PAGES["README.md"], re.S)[1])
    return script


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


# -----------------------------------------------------------------------------
# the lines of docs/elastic.md

ELASTIC = """
import deepspeed, logging, os, sys
import torch
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
exec(open("own.py").read())
batch, micro, folder, steps, every, last = 8, 2, "c", 9, 3, int(sys.argv[1])
dataset, one_step = torch.utils.data.TensorDataset(torch.arange(64.0)[:, None]), train_step


def train_step(*arguments):
    loss, step = one_step(*arguments), arguments[-1]
    print(f"STEP {step}.", flush=True)
    if step == last:
        os.kill(os.getpid(), 9)
    return loss


class Net(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).square().mean()


def make_engine():
    deepspeed.init_distributed()
    optimizer = {"type": "AdamW", "params": {"torch_adam": True, "lr": 1e-3}}
    config = {"train_batch_size": batch, "train_micro_batch_size_per_gpu": micro, "optimizer": optimizer}
    net = Net(1, 1)
    config |= {"zero_optimization": {"stage": 1}}
    return deepspeed.initialize(model=net, model_parameters=list(net.parameters()), config=config)[0]


"""


@pytest.mark.slow
def test_the_lines_of_the_elastic_page(tmp_path):
    """Killed after step 7, before it was committed, with a checkpoint of step 6: they go on from step 6 in memory, on
    more ranks, and leave nothing there."""
    (lines,) = re.findall(r"^```python\n(.*?)^```$", PAGES["docs/elastic.md"], re.M | re.S)
    for there, here in ("...  # deepspeed.initialize()", "engine = make_engine()"), ("/dev/shm/job", "memory"):
        assert lines.count(there) == 1
        lines = lines.replace(there, here)
    (tmp_path / "own.py").write_text(own_script())
    (tmp_path / "script.py").write_text(ELASTIC + lines)
    killed = launch(tmp_path, 2, tmp_path / "script.py", 7, grace=5)
    assert killed.code and "STEP 7." in killed.out and (tmp_path / "memory").is_dir()
    shutil.rmtree(tmp_path / "c" / "global_step6")
    out = run(tmp_path, 4, tmp_path / "script.py", 99)
    assert "written by 2 ranks, loaded on 4 without conversion" in out
    assert re.findall(r"STEP (\d)\.", out) == ["7", "8", "9"] and not (tmp_path / "memory").exists()
