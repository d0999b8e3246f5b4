"""The package as others get it: by pip, or copied beside their script; `python -m universal`."""

import shutil
import sys
from importlib import metadata

from packaging.requirements import Requirement

from tests.support import ROOT
from tests.support.commands import run_python

WHERE = """
import deepspeed, universal
from universal import resume
wrappers = deepspeed.DeepSpeedEngine.load_checkpoint.wrappers
print(universal.__file__, wrappers["resume"] is resume.load_in_place, "proof" in wrappers)
"""


def python(*words, folder, path="", **variables):
    return run_python(*words, folder=folder, PYTHONPATH=str(path), **variables)


def test_pip_installs_it_and_touches_nothing_else(tmp_path):
    """From a copy of what git tracks, in which it leaves nothing. torch and DeepSpeed are there
    already, and will do. All modules and the commands are there."""
    source = tmp_path / "source"
    place = tmp_path / "site"
    source.mkdir()
    for name in ("universal", "ds_to_universal.py", "pyproject.toml", "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    before = {*source.rglob("*")}
    flags = ["-q", "--no-build-isolation", "--no-index", "--no-deps", "--target", place]
    assert python("-m", "pip", "install", *flags, source, folder=tmp_path).returncode == 0
    assert {*source.rglob("*")} == before
    (distribution,) = metadata.distributions(path=[str(place)])
    for requirement in map(Requirement, distribution.requires):
        version = metadata.version(requirement.name)
        assert requirement.specifier.contains(version, prereleases=True), requirement
    for file in [*source.rglob("*.py"), source / "universal" / "py.typed"]:
        assert (place / file.relative_to(source)).exists(), file
    for command in ("ds_to_universal", "ds_inspect", "ds_diff"):
        done = python(place / "bin" / command, "--help", folder=tmp_path, path=place)
        assert done.returncode == 0 and "global_step100" in done.stdout


def test_a_copy_beside_a_script(tmp_path):
    """`python -m universal`: what a script calls is our load_checkpoint(), with the contract of a
    first start, in every process that the command starts."""
    shutil.copytree(ROOT / "universal", tmp_path / "universal")
    (tmp_path / "script.py").write_text(WHERE)
    outer = "import subprocess, sys; subprocess.run([sys.executable, 'script.py'], check=True)"
    done = python("-m", "universal", sys.executable, "-c", outer, folder=tmp_path)
    words = [str(tmp_path / "universal" / "__init__.py"), "True", "True"]
    assert done.stdout.split()[-3:] == words, done.stderr
    # The command's own exit code.
    assert python("-m", "universal", "false", folder=tmp_path).returncode == 1


def test_errors_of_the_command(tmp_path):
    """One line, and 2: no command, one that is not found, an interpreter without DeepSpeed; no
    batch; a launcher that passes nothing on; a path with a colon, which PYTHONPATH has between
    paths: nothing would be installed."""
    folder = tmp_path / "9:30"
    shutil.copytree(ROOT / "universal", folder / "universal")
    colon = f"{folder}/universal/start cannot be on PYTHONPATH, which has : between"
    for place, flags, command, reason in (
        (ROOT, (), [], "no command was given"),
        (ROOT, (), ["nowhere.py"], "nowhere.py: No such file or directory"),
        (ROOT, ["-S"], ["true"], f"{sys.executable} has no deepspeed"),
        (folder, (), ["true"], colon),
        (ROOT, (), ["srun", "--export=NONE", "true"], "srun would start ranks without PYTHONPATH"),
    ):
        done = python(*flags, "-m", "universal", *command, folder=place)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        assert reason in done.stderr
    done = python("-m", "universal", "true", folder=ROOT, UNIVERSAL_BATCH="1k")
    assert done.returncode == 2 and "UNIVERSAL_BATCH=1k is no number of samples" in done.stderr
