"""universal/start/sitecustomize.py: what it promises to whoever has it on PYTHONPATH."""

import itertools
import json
import os
import shlex
import shutil

import pytest

from tests.support import ROOT
from tests.support.commands import run_python
from universal.__main__ import check_exports

START = ROOT / "universal" / "start"
SITE = "sitecustomize.py"
TRAINER = """
class HfTrainerDeepSpeedConfig:
    def trainer_config_process(self, args, auto=False):
        print(args.gradient_accumulation_steps, auto)
"""


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def copy(tmp_path):
    """copy(name, (old, new), ...): a folder as `start`, in a package universal that says when it is
    installed."""

    def make(name="one", *edits):
        folder = tmp_path / name
        write(folder / "universal" / "__init__.py", "def install():\n    print('installed')\n")
        write(folder / "data.py", "print('not theirs')\n")
        text = (START / SITE).read_text()
        for old, new in edits:
            assert text.count(old) == 1
            text = text.replace(old, new)
        write(folder / "universal" / "start" / SITE, text)
        return folder / "universal" / "start"

    return make


@pytest.fixture
def theirs(tmp_path):
    """A folder with packages named deepspeed and transformers."""
    folder = tmp_path / "theirs"
    write(folder / "deepspeed" / "__init__.py", "print('deepspeed')\n")
    write(folder / "transformers" / "__init__.py", "__version__ = '5.23.0'\n")
    write(folder / "transformers" / "integrations" / "__init__.py", "")
    write(folder / "transformers" / "integrations" / "deepspeed.py", TRAINER)
    return folder


def python(code, *path, **variables):
    variables["PYTHONPATH"] = os.pathsep.join(map(str, path))
    # -c looks first in the working directory.
    result = run_python("-c", code, folder="/", **variables)
    assert "Traceback" not in result.stderr and not result.returncode, result.stderr
    return result.stdout.split()


def test_a_script_that_imports_universal_first(copy, theirs):
    folder = copy()
    text = "import deepspeed\ndef install():\n    print('installed')\n"
    write(folder.parent / "universal.py", text)
    code = "import universal; universal.install(); print('end')"
    assert python(code, folder, folder.parent, theirs) == ["deepspeed", "installed", "end"]


@pytest.mark.parametrize("rank, says", [("0", True), ("1", False), ("", False)])
def test_a_start_says_that_it_may_begin_at_step_1(copy, theirs, rank, says):
    """Once, on rank 0, and not in the processes that it spawns, nor in the launcher."""
    child = "from multiprocessing import get_context; import deepspeed"
    child += "; get_context('spawn').Process(target=__import__, args=('deepspeed',)).start()"
    words = python(child, copy(), theirs, RANK=rank)
    assert words.count("installed") >= 1 and words.count("universal:") == says
    assert ("resume_from_checkpoint=True)" in words) == says


LOOKS = "from importlib.util import find_spec; find_spec('deepspeed'); "


@pytest.mark.parametrize("first", ["", LOOKS])
def test_installs_after_the_import_of_deepspeed(copy, theirs, first):
    """Who looks for DeepSpeed alone does not use it up; universal is the one beside it."""
    write(theirs / "universal.py", "print('another')\n")
    words = python(f"{first}import deepspeed; print('end')", copy(), theirs)
    assert words == ["deepspeed", "installed", "end"]


def test_costs_nothing_where_deepspeed_is_not_imported():
    heavy = {"torch", "deepspeed", "universal", "transformers"}
    code = f"import sys, json; print(*{heavy} & {{*sys.modules}})"
    assert python(code, START) == []


@pytest.mark.parametrize("how", ["ours first", "theirs first", "link", "twice"])
def test_runs_another_sitecustomize(copy, theirs, tmp_path, how):
    """Python runs the first of that name. The one behind it is not lost, however our folder is
    named; the one before it is left alone."""
    ours = copy()
    other = tmp_path / "other"
    write(other / SITE, "print('other')\n")
    (tmp_path / "link").symlink_to(ours)
    path = {
        "ours first": [ours, other],
        "theirs first": [other, ours],
        "link": [tmp_path / "link", other],
        "twice": [ours, f"{ours}/", other],
    }
    words = python("import deepspeed", *path[how], theirs)
    assert words == ["other", "deepspeed", "installed"][: 2 if how == "theirs first" else 3]


def test_hides_nobodys_module(copy, theirs):
    """The folder of universal.py has a data.py, too."""
    code = "import deepspeed, sys; from importlib.util import find_spec"
    code += "; print(find_spec('data'), *sys.path)"
    assert python(code, copy(), theirs)[2] == "None"


def test_survives_a_second_hook_of_its_kind(copy, theirs):
    """Both take part: neither asks the other for ever, and neither hides the other."""
    other = copy("two", ("        universal.install()\n", "        print('two')\n"))
    for path in ([copy(), other], [other, copy()]):
        words = python("import deepspeed", *path, theirs)
        assert sorted(words) == ["deepspeed", "installed", "two"]


PROCESS = """
from types import SimpleNamespace
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig as Config
args = SimpleNamespace(per_device_train_batch_size=2, world_size={ranks})
args.gradient_accumulation_steps = 3
config = Config()
config.config = {config}
config.trainer_config_process(args, True)
"""


@pytest.mark.parametrize(
    "ranks, batch, steps",
    [(4, 24, 3), (2, 24, 6), (6, 24, 2), (5, 24, 3), (2, "auto", 3), (2, None, 3)],
)
def test_the_batch_in_the_json_decides(copy, theirs, ranks, batch, steps):
    """Where there is one. What does not divide by the ranks is left to Trainer."""
    config = {"train_batch_size": batch} if batch else {}
    words = python(PROCESS.format(ranks=ranks, config=config), copy(), theirs)
    assert words == [str(steps), "True"]


CLASSES = """
class Trainer:
    pass
"""
BATCH = """
print(*config.config.values())
import os
os.environ["UNIVERSAL_BATCH"] = "x"
try:
    config.trainer_config_process(args)
except ValueError as error:
    print(error)
"""
USED = """
from transformers.trainer import Trainer
class Inherits(Trainer):
    pass
print(Inherits().__class__.__mro__[2].__name__)
class Brings(Trainer):
    def get_train_dataloader(self):
        return []
try:
    getattr(Brings(), "get_batch_samples", print)(None, 1, None)
except ValueError as error:
    print(error)
"""


def test_a_batch_in_the_environment(theirs):
    """Whoever derives a Trainer gets one of any ranks, but not with a loader of its own.
    The batch comes before that of the JSON, and may be one that the ranks do not divide."""
    write(theirs / "transformers" / "trainer.py", CLASSES)
    assert python(USED, START, theirs)[0] == "object"
    shutil.rmtree(theirs / "deepspeed")  # the installed one has engines to watch
    process = PROCESS.format(ranks=5, config={"train_batch_size": 16})
    base, *words = python(USED + process + BATCH, START, theirs, UNIVERSAL_BATCH="24")
    said = " ".join(words)
    assert base == "AnyRanks" and "3 True None 2 3 24 " in said and "=x" in said
    assert "Brings.get_train_dataloader() does not call Trainer's" in said


RUNNER = """
import json, os, subprocess, sys
from deepspeed.launcher import multinode_runner, runner

def start(command, env):
    print(json.dumps(command))
    return subprocess.Popen("true")

runner.subprocess = type("Fake", (), {"Popen": start})
runner.logger.setLevel("ERROR")
multinode_runner.MVAPICH_TMP_HOSTFILE = os.devnull
for file, batch, launchers in json.loads(sys.argv[1]):
    with open(".deepspeed_env", "w") as lines:
        lines.write(file)
    os.environ.pop("UNIVERSAL_BATCH", None)
    os.environ |= {"UNIVERSAL_BATCH": batch} if batch else {}
    for launcher in launchers:
        kind = runner.LAUNCHER_CLASSES[launcher]
        kind.backend_exists = lambda self: True
        words = f"--hostfile hosts --no_ssh_check --master_addr one --launcher {launcher} train.py"
        runner.main(words.split())
"""
LAUNCHERS = ("pdsh", "openmpi", "mpich", "impi", "slurm", "mvapich")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """A folder, what DeepSpeed's launcher says there, and the commands that it would run to start
    two hosts: with a .deepspeed_env and a batch, without both, and with a batch in the file."""
    folder = tmp_path_factory.mktemp("hosts") / "with blank"
    write(folder / "hosts", "one slots=2\ntwo slots=2\n")
    cases = [
        ("PYTHONPATH=/theirs\nUNIVERSAL_BATCH=12\n", "20", LAUNCHERS),
        ("", "", LAUNCHERS),
        ("UNIVERSAL_BATCH=12\n", "", ["pdsh"]),
    ]
    variables = {"HOME": str(folder), "PYTHONPATH": str(START)}
    done = run_python("-c", RUNNER, json.dumps(cases), folder=folder, **variables)
    lines = [line for line in done.stdout.splitlines() if line.startswith('["')]
    return folder, done, [json.loads(line) for line in lines]


def exported(launcher, command):
    """What a launcher's command sets for the ranks, after the shell that only pdsh has."""
    if launcher == "pdsh":
        command = shlex.split(" ".join(command).replace(";", " "))
    elif launcher == "slurm":
        command = ",".join(command).split(",")
    elif launcher == "impi":
        command = map("=".join, itertools.pairwise(command))
    names = ("PYTHONPATH=", "UNIVERSAL_BATCH=")
    return dict(word.split("=", 1) for word in command if word.startswith(names))


def test_deepspeed_starts_other_machines(hosts):
    """Their ranks get this folder first, and the batch, whatever a .deepspeed_env says, and however
    the working directory is named."""
    folder, _, commands = hosts
    for launcher, command in zip(LAUNCHERS, commands[: len(LAUNCHERS)], strict=True):
        wanted = {"PYTHONPATH": f"{START}:/theirs", "UNIVERSAL_BATCH": "20"}
        assert exported(launcher, command) == wanted, launcher
    for launcher, command in zip(LAUNCHERS, commands[len(LAUNCHERS) :], strict=True):
        paths = exported(launcher, command)
        assert paths == {"PYTHONPATH": f"{START}:{folder}:{START}"}, launcher


def test_a_batch_that_only_a_file_names(hosts):
    """As accelerate has written it there for the run before: nothing is started."""
    _, done, commands = hosts
    assert done.returncode == 2 and len(commands) == 2 * len(LAUNCHERS)
    assert "says UNIVERSAL_BATCH=12, and the command nothing: type it before" in done.stderr


ADVICE = {
    "srun": "`--export=ALL`",
    "mpirun": "`-x PYTHONPATH -x UNIVERSAL_BATCH` with Open MPI, `-genvall` with",
}


@pytest.mark.parametrize(
    "command, slurm",
    [
        ("srun --export=NONE python train.py", "ALL"),
        ("srun --export PYTHONPATH python train.py", "ALL"),
        ("srun python train.py", "NONE"),  # in a batch script that was told so
        ("mpirun -np 2 python train.py", "ALL"),
        ("mpirun -np 2 -x PYTHONPATH python train.py", "ALL"),
    ],
)
def test_launchers_that_pass_on_less(monkeypatch, capsys, command, slurm):
    """They are refused before anything starts."""
    monkeypatch.setenv("UNIVERSAL_BATCH", "20")
    monkeypatch.setenv("SLURM_EXPORT_ENV", slurm)
    launcher, *words = command.split()
    with pytest.raises(SystemExit) as end:
        check_exports(launcher, *words)
    said = f"{launcher} would start ranks without PYTHONPATH and UNIVERSAL_BATCH: add "
    assert end.value.code == 2 and said + ADVICE[launcher] in capsys.readouterr().err


def test_launchers_that_pass_on_enough(monkeypatch):
    monkeypatch.setenv("UNIVERSAL_BATCH", "20")
    for command in (
        "srun -n 2 python train.py",
        "srun --export=ALL,A=1 python train.py",
        "srun --export=UNIVERSAL_BATCH,PYTHONPATH python train.py",
        "mpirun -x UNIVERSAL_BATCH=20 -x PYTHONPATH -np 2 python train.py",
        "mpiexec -genvall python train.py",
    ):
        check_exports(*command.split())
