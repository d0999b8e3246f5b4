"""The package as others get it: by pip, or copied beside their script; `python -m universal`; what it imports."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

SCRIPT = """
import deepspeed, universal
universal.install()
print(universal.__file__, deepspeed.DeepSpeedEngine.__dict__["load_checkpoint"].func.__module__)
"""


def python(*words, folder, path="", interpreter=sys.executable):
    environment = os.environ | {"PYTHONPATH": str(path), "DS_ACCELERATOR": "cpu"}
    options = dict(capture_output=True, text=True, timeout=200, env=environment, cwd=folder)
    return subprocess.run([interpreter, *map(str, words)], **options)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Where pip has put it, from a copy of what git tracks, and what else pip would install."""
    source, place = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for name in ("universal", "ds_to_universal.py", "pyproject.toml", "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "-q", "--no-deps", "--target", place, source], check=True, timeout=200)
    would = subprocess.run([*pip, "--dry-run", source], capture_output=True, text=True, timeout=200)
    return place, re.findall("Would install (.*)", would.stdout)


def test_pip_installs_it_and_touches_nothing_else(installed, tmp_path):
    """torch and DeepSpeed are there already: pip would install one package. The commands are there."""
    place, would = installed
    assert [re.sub(r"-[\d.]+$", "", name) for name in would] == ["deepspeed-universal"]
    done = python("-c", SCRIPT, folder=tmp_path, path=place)
    assert done.stdout.split()[-2:] == [str(place / "universal" / "__init__.py"), "universal.loader"], done.stderr
    assert (place / "universal" / "py.typed").exists() and (place / "universal" / "start" / "sitecustomize.py").exists()
    for command in ("ds_to_universal", "ds_to_safetensors"):
        done = python(place / "bin" / command, "--help", folder=tmp_path, path=place)
        assert done.returncode == 0 and "checkpoints/global_step100" in done.stdout


def test_a_copy_beside_a_script(tmp_path):
    shutil.copytree(ROOT / "universal", tmp_path / "universal")
    (tmp_path / "script.py").write_text(SCRIPT)
    done = python("script.py", folder=tmp_path)
    assert done.stdout.split()[-2:] == [str(tmp_path / "universal" / "__init__.py"), "universal.loader"], done.stderr


def test_what_needs_neither_torch_nor_deepspeed(tmp_path):
    code = "import sys, universal, ds_to_universal, universal.safetensors, universal.__main__; universal.convert; "
    done = python("-c", code + "print({'torch', 'deepspeed'} & {*sys.modules})", folder=tmp_path, path=ROOT)
    assert done.stdout == "set()\n", done.stderr


def test_a_command_and_what_it_starts(tmp_path):
    """install() in every Python process that the command starts, and nowhere before DeepSpeed is imported."""
    inner = "import deepspeed; print(deepspeed.DeepSpeedEngine.__dict__['load_checkpoint'].func.__module__)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}], check=True)"
    done = python("-m", "universal", sys.executable, "-c", outer, folder=tmp_path, path=ROOT)
    assert done.stdout.split()[-1] == "universal.loader", done.stderr
    assert python("-m", "universal", "false", folder=tmp_path, path=ROOT).returncode == 1  # the command's own code


def test_errors_of_the_command(tmp_path):
    """One line, and 2: no command, one that is not found, an interpreter without DeepSpeed."""
    bare = Path(sys.base_prefix, "bin", "python3")
    for words, interpreter, told in (
        ((), sys.executable, "no command was given"),
        (("nowhere.py",), sys.executable, "nowhere.py: No such file or directory"),
        (("true",), bare, f"{bare} has no deepspeed"),
    ):
        flags = ("-I", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); import runpy; "
                 "sys.argv[0] = ''; runpy.run_module('universal', run_name='__main__', alter_sys=False)")  # fmt: skip
        before = flags if interpreter == bare else ("-m", "universal")
        done = python(*before, *words, folder=tmp_path, path=ROOT, interpreter=interpreter)
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and told in done.stderr, done.stderr
