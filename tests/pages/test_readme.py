"""README.md, CONTRIBUTING.md, CHANGELOG.md and docs/*.md: their commands parse, their links lead
somewhere, what they name exists, their tables and numbers are those of assets/, and the loop of the
README does what it says."""

import argparse
import csv
import fnmatch
import functools
import re
import runpy
import shlex
import subprocess
import sys

import pytest
from deepspeed.launcher import runner
from torch.distributed.run import get_args_parser

import universal
from measure.logs import compare
from tests.support import ROOT
from tests.support.ranks import run


def texts(*patterns):
    """{path: text} of every such file."""
    return {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for pattern in patterns
        for path in ROOT.glob(pattern)
        if path.is_file()
    }


PAGES = texts("*.md", "docs/*.md")
THEIRS = ("your_script.py", "universal.count")  # what the reader has, or writes
COMMAND = re.compile(
    r"(python|deepspeed|torchrun) .*(\.py|-m(odule)? (examples|measure)\.)"
    r"|python -m universal(\.\w+)? \w|make [\w -]+$|pip install -r"
)
PROGRAM = re.compile(r"\.py$|^(examples|measure|universal)\.\w+$")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$|((?:^    [^\n]*\n)+)", re.M | re.S)


# -----------------------------------------------------------------------------
# what stands on a page


def blocks(text):
    """The lines of every fenced block, but for those in Python, and of every indented one. A blank
    line ends the latter: it divides a command from what it prints."""
    for language, fenced, indented in BLOCK.findall(text):
        if language != "python":
            yield (fenced or re.sub("^    ", "", indented, flags=re.M)).splitlines()


LOOP = re.compile(r"^for (\w+) in (.*?); do\n(.*?)^done$", re.M | re.S)


def unrolled(lines):
    """The lines, with those of a loop of the shell repeated for each value of its variable."""

    def repeated(loop):
        variable = re.compile(rf"\${{?{loop[1]}\b}}?")
        return "".join(variable.sub(value, loop[3]) for value in loop[2].split())

    return LOOP.sub(repeated, lines)


def commands(text):
    """Every command of a block, its continued lines joined, without its comment, and of a code span
    in the prose."""
    joined = [re.sub(r"\\\n\s*", "", unrolled("\n".join(block))) for block in blocks(text)]
    lines = "\n".join(joined).split("\n")
    lines += [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", BLOCK.sub("", text))]
    parts = [part for line in lines for part in re.sub(r" +# .*", "", line).split(" && ")]
    lines = [re.sub(r"^(\w+=\S+ )+", "", part.strip()) for part in parts]
    return {line for line in lines if COMMAND.match(line)}


COMMANDS = sorted({(page, command) for page, text in PAGES.items() for command in commands(text)})


class Parsed(BaseException):
    pass


def parse_script(words, monkeypatch):
    """What a launcher starts, or Python: the script, or module, exists and takes these flags: it
    gets as far as its argument parser."""
    script, *flags = words
    if script in THEIRS:
        return
    module = "." in script and not script.endswith(".py")
    path = ROOT / (script.replace(".", "/") + ".py" if module else script)
    assert path.is_file()
    source = path.read_text()
    if script.startswith("examples/"):  # they may import what is not installed
        assert all(f'"{word}"' in source for word in flags if word.startswith("--"))
    elif flags or "parse_args" in source:
        parse = argparse.ArgumentParser.parse_args

        def parsed(self, *arguments):
            parse(self, *arguments)
            raise Parsed

        monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
        monkeypatch.setattr(sys, "argv", words)
        monkeypatch.setenv("RANK", "0")
        monkeypatch.chdir(ROOT)
        start = runpy.run_module if module else runpy.run_path
        with pytest.raises(Parsed):
            start(script, run_name="__main__")


@pytest.mark.parametrize("page, command", COMMANDS)
def test_command(page, command, monkeypatch):
    """The launcher takes its flags, and the script its own; a make target exists."""
    words = shlex.split(command)
    if words[1:3] == ["-m", "measure.warm"]:  # torchrun with warm workers
        words = ["torchrun", *words[3:]]
    if words[1:3] == ["-m", "universal"]:
        words = words[3:]
    if words[0] == "make":
        makefile = (ROOT / "Makefile").read_text()
        assert all(re.search(rf"^{target}:", makefile, re.M) for target in words[1:])
    elif words[0] == "pip":
        assert (ROOT / words[-1]).is_file()
    elif COMMAND.match(" ".join(words)):  # any command may follow `python -m universal`
        if words[0] == "torchrun":
            get_args_parser().parse_args(words[1:])
        if words[0] == "deepspeed":
            runner.parse_args(words[1:])
        number = next(i for i, word in enumerate(words) if PROGRAM.search(word))
        parse_script(words[number:], monkeypatch)


def test_make_help_and_make_clean():
    """help is the first target, the list at the top of the Makefile, and has them all. clean
    removes every folder that a command on a page names for its output; git ignores them all."""
    out = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, timeout=60).stdout
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", "")
    targets = re.search(r"^\.PHONY: (.*)$", makefile, re.M)[1].split()
    assert set(re.findall(r"\bmake ([\w-]+)", out)) == set(targets)
    removed = re.search(r"^clean:\n\trm -rf (.*)", makefile, re.M)[1]
    removed = removed.replace("$(CKPT)", "ds_transformer_checkpoint")
    output = r"(?:_dir|--output) (?!/)([\w-]+)"
    folders = {folder for _, command in COMMANDS for folder in re.findall(output, command)}
    assert {"out", "logs", "ds_transformer_checkpoint"} & folders
    for folder in folders:
        assert any(fnmatch.fnmatch(folder, pattern) for pattern in removed.split()), folder
    files = [f"{folder}/x" for folder in folders]
    ignored = subprocess.run(["git", "check-ignore", *files], cwd=ROOT, timeout=60)
    assert ignored.returncode == 0 and ".venv " not in removed


WRONG = [
    "deepspeed --num_gpus 2 train.py --no_such_flag",
    "deepspeed --no_such_flag train.py",
    "torchrun --no_such_flag train.py",
    "make no_such_target",
    "python no_such_script.py",
    "torchrun examples/hf_trainer.py --no_such_flag",
    "pip install -r no_such_file.txt",
    "python -m universal deepspeed train.py --no_such_flag",
    "python -m universal.inspect folder --no_such_flag",
    "python -m measure.warm --no_such_flag train.py",
    "torchrun -m examples.train_3d --no_such_flag",
]


@pytest.mark.parametrize("command", WRONG)
def test_a_wrong_command_is_seen(command, monkeypatch):
    """In a block, behind a variable, and in the prose."""
    assert commands(f"    {command}\n") == {command}
    assert commands(f"```bash\n{command}\n```\n") == {command}
    assert commands(f"then `VARIABLE=1 {command}` does it") == {command}
    with pytest.raises((SystemExit, AssertionError)):
        test_command("README.md", command, monkeypatch)


def broken_links(page, text):
    """Those that lead to no file, or to no heading of it."""
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", text):
        path = (ROOT / page).parent / target if target else ROOT / page
        anchors = {""}
        if anchor and path.is_file():
            for heading in re.findall(r"^#+ (.*)$", path.read_text(), re.M):
                anchors.add(re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-"))
        if not path.exists() or anchor not in anchors:
            yield f"{target}#{anchor}"


PROSE = PAGES | texts("examples/*", "universal/**/*.py", "ds_to_universal.py")
OTHERS = {*THEIRS, "their_script.py", "script.py", "count.py"}


def unknown_files(page, text):
    """Files of Python that a text names, and that are nowhere here."""
    names = {path.name for folder in ("", "*/", "*/*/") for path in ROOT.glob(f"{folder}*.py")}
    return {*re.findall(r"[\w-]+\.py\b(?!\()", BLOCK.sub("", text))} - names - OTHERS


@pytest.mark.parametrize("name", PROSE)
def test_what_is_named_exists(name):
    assert not unknown_files(name, PROSE[name])
    if name in PAGES:
        assert not list(broken_links(name, PAGES[name]))


def test_what_is_gone_is_seen():
    page = "docs/layouts.md"
    links = (
        "[a](no_such_page.md) [b](#no-such-heading) [c](clients.md#nowhere) "
        "[d](clients.md#measured)"
    )
    broken = ["no_such_page.md#", "#no-such-heading", "clients.md#nowhere"]
    assert list(broken_links(page, links)) == broken
    files = "`gone.py`, examples/no_such.py, train.py"
    assert unknown_files(page, files) == {"gone.py", "no_such.py"}


def test_front_door():
    """The README leads to every page, and names what CI runs."""
    assert all(f"({page})" in PAGES["README.md"] for page in PAGES if page != "README.md")
    assert "make test" in commands(PAGES["README.md"])
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_the_one_file_to_read():
    lines = len((ROOT / "train.py").read_text().splitlines())
    assert f"[`train.py`](train.py) ({lines} lines:" in PAGES["README.md"]


def test_versions():
    """The README's range is what was measured, and its end is pinned."""
    measured = re.findall(r"^(0\.\S+) ", (ROOT / "assets" / "versions.txt").read_text(), re.M)
    assert f"\ndeepspeed=={measured[-1]}\n" in (ROOT / "requirements.txt").read_text()
    for page in ("README.md", "CHANGELOG.md"):
        assert f"{measured[0]} to {measured[-1]}" in " ".join(PAGES[page].split()), page


def unmentioned():
    """Commits that have changed the package since the changelog was written."""
    history = ["git", "log", "--format=%h"]
    run_git = functools.partial(subprocess.check_output, cwd=ROOT, text=True, timeout=60)
    (last,) = run_git([*history, "-1", "--", "CHANGELOG.md"]).split() or [None]
    return run_git([*history, f"{last}..", "--", "universal"]).split() if last else []


def test_changelog():
    """It begins with the package's version, and no change of the package came after it."""
    (version, *_) = re.findall(r"^## (\S+) \(\d{4}-\d\d-\d\d\)$", PAGES["CHANGELOG.md"], re.M)
    assert version == universal.__version__
    assert not unmentioned()


# -----------------------------------------------------------------------------
# the tables and numbers


def wrong_blocks(shown, tables):
    """Blocks that have a line of a table, and a line that it lacks. tables: {name: text}."""
    tables = [{*map(str.rstrip, text.splitlines()), "..."} - {""} for text in tables.values()]
    blocks = [{line.rstrip() for line in block} - {""} for block in shown]
    return [
        block
        for block in blocks
        if any(block & table - {"..."} for table in tables)
        and not any(block <= table for table in tables)
    ]


def test_tables():
    """What commands have written into assets/*.txt is what the pages show, and is linked to."""
    tables = texts("assets/*.txt")
    pages = "".join(PAGES.values())
    assert len(tables) >= 4 and all(f"{name})" in pages for name in tables)
    assert not wrong_blocks([block for text in PAGES.values() for block in blocks(text)], tables)


def test_a_wrong_table_is_seen():
    tables = {"x": "run loss\n\na 1\nb 2\nwrote out/x.png\n", "y": "run loss\nd 4\n"}
    right = [["run loss", "a 1", "b 2"], ["a 1", "..."], ["run loss", "d 4"], ["elsewhere"]]
    assert not wrong_blocks(right, tables)
    wrong = [["run loss", "a 1", "b 3"], ["run loss", "d 5"]]
    assert wrong_blocks(wrong, tables) == [{*block} for block in wrong]


def worst(picture, baseline, *runs):
    """The largest difference of a loss in the CSV beside a picture."""
    rows = list(csv.DictReader((ROOT / "assets" / f"{picture}.csv").open(newline="")))
    kinds = ("loss", "val_loss")
    columns = [(f"{run} {kind}", f"{baseline} {kind}") for run in runs for kind in kinds]
    return max(abs(float(row[a]) - float(row[b])) for row in rows for a, b in columns if row[a])


def test_what_the_readme_says_of_its_pictures():
    """PASS behind a command of plot.py, and the number below the first picture, are of the CSV
    beside the picture."""
    page = PAGES["README.md"]
    passed = {}
    for command in commands(page):
        output = re.search(r"--output out/(\w+)\.png --tolerance (\S+)", command)
        if output and f"(assets/{output[1]}.png)" in page:
            largest = worst(output[1], *re.findall(r"logs/(\w+)", command))
            passed[output[1]] = f"PASS: {largest:.1e} <= {float(output[2]):g}"
    assert passed.keys() == {"resume", "grad_accu", "resume_uc"}
    verdicts = re.findall("`(PASS: .*?)`", page)
    # Test 1 has no picture.
    assert sorted(verdicts) == sorted([*passed.values(), "PASS: 0.0e+00 <= 0"])
    caption = re.search(r"!\[(.*?)\]\(assets/resume.png\)", page)[1]
    largest = passed["resume"].split()[1]
    assert largest in caption and largest in PAGES["docs/exact.md"]


def test_what_is_said_of_gpus():
    """Every number is in the table of what was seen on one."""
    seen = {*re.findall(r"[\d.,]*\d", (ROOT / "assets" / "gpu.txt").read_text())}
    said = re.search(r"^## On GPUs\n(.*?)^## ", PAGES["docs/tested.md"], re.M | re.S)[1]
    numbers = {*re.findall(r"[\d.,]*\d", said)}
    assert len(numbers) >= 20 and numbers <= seen, numbers - seen


# -----------------------------------------------------------------------------
# the README's script


def own_script():
    return (ROOT / "examples" / "own_loop.py").read_text()


# Trains a model by each of the loops named, at ZeRO 1, 2, 3, 1, ... in turn.
SCRIPT = """
import csv
import os
import sys

import torch
from tests.support import toy
from torch import nn
from torch.nn import functional as F

from universal import batches

toy.begin()
resumed = sys.argv[1] == "resume"
run = sys.argv[2]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 24)
        self.mix = nn.Linear(24, 24)
        self.norm = nn.BatchNorm1d(24)
        self.frozen = nn.Linear(24, 24)
        self.out = nn.Linear(24, 32, bias=False)
        self.a = nn.Linear(24, 4, bias=False)
        self.b = nn.Linear(4, 24, bias=False)
        self.out.weight = self.embed.weight
        self.frozen.requires_grad_(False)

    def forward(self, x, y):
        x = F.dropout(self.norm(self.mix(self.embed(x))), 0.1, self.training)
        return F.cross_entropy(self.out(self.frozen(x) + self.b(self.a(x))), y)


def two_groups(parameters):
    matrices = [p for p in parameters if p.dim() > 1]
    rest = [p for p in parameters if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.5}, {"params": rest}]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0)


# An epoch: 6 steps, and 8 samples left over.
numbers = torch.randint(32, (200,), generator=torch.Generator().manual_seed(0))
dataset = torch.utils.data.TensorDataset(numbers, (7 * numbers + 3) % 32)
os.makedirs("logs", exist_ok=True)
for number, loop in enumerate(sys.argv[3:]):
    exec(open(f"{loop}.py").read())
    seed = 2 if resumed else 1  # what is not restored is seen
    size = batches.config(32, 8)
    engine = toy.make(1 + number % 3, Net, two_groups, seed, batch=None, clip=1.0, **size)
    rows = []
    tag = "global_step7" if resumed else None
    for step, loss in train(engine, dataset, 14, f"c_{loop}", resumed, 7, tag):
        loss = loss.double()
        torch.distributed.all_reduce(loss)
        rows.append((step, loss.item() / engine.world_size))
    if engine.global_rank == 0:
        with open(f"logs/{loop}_{run}.csv", "w") as file:
            csv.writer(file).writerows([("step", "loss"), *rows])
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


def differences_of(folder, loops, ranks, *others):
    """{(loop, other ranks): |difference|} of steps 8 to 14 of loops {name: source} that go on from
    step 7 on other numbers of ranks."""
    (folder / "script.py").write_text(SCRIPT)
    for name, source in loops.items():
        (folder / f"{name}.py").write_text(source)
    run(folder, ranks, folder / "script.py", "start", "base", *loops)
    largest = {}
    for other in others:
        run(folder, other, folder / "script.py", "resume", f"on_{other}", *loops)
        for name in loops:
            gaps = compare(folder, f"{name}_base", f"{name}_on_{other}")
            assert list(gaps) == list(range(8, 15))
            largest[name, other] = max(gaps.values())
    return largest


def test_own_script(tmp_path):
    """With these lines alone: BatchNorm, a frozen layer, tied weights and two groups, from 4 ranks
    to 4 and 3, at every stage."""
    loops = dict.fromkeys(("zero_1", "zero_2", "zero_3"), own_script())
    gaps = differences_of(tmp_path, loops, 4, 4, 3)
    assert len(gaps) == 6
    for (_, ranks), gap in gaps.items():
        assert gap <= (0.0 if ranks == 4 else 1e-5)


# Dropout that the rank draws; data that depend on the number of ranks, or on where a run starts;
# micro-batches that count twice.
MISTAKES = [
    ("torch.manual_seed(batches.derive_seed(seed, step, m))", "pass"),
    ("batches.share(engine))", "batches.share(engine), engine.world_size)"),
    ("sampler.set_step(step)", "pass"),
    ("backward(weight * loss)", "backward(loss)"),
]


@pytest.mark.slow
def test_every_line_is_needed(tmp_path):
    loops = {}
    for number, (line, without) in enumerate(MISTAKES):
        assert own_script().count(line) == 1
        loops[f"mistake_{number}"] = own_script().replace(line, without)
    counted_twice = {name: loops.pop(name) for name in ["mistake_3"]}
    with pytest.raises(AssertionError, match="with weight 0, and 6 of 6 losses are not 0"):
        differences_of(tmp_path, counted_twice, 2, 3)
    gaps = differences_of(tmp_path, loops, 2, 3)
    assert len(gaps) == 3 and all(gap > 1e-4 for gap in gaps.values()), gaps
