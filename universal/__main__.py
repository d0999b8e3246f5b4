# SPDX-License-Identifier: MIT
"""Run a command with universal.install() in every Python process that it starts and that imports
DeepSpeed:

    python -m universal llamafactory-cli train full.yaml
    python -m universal deepspeed --num_gpus 2 their_script.py --resume

It puts the folder start/ first in PYTHONPATH, which child processes inherit, and then becomes the
command. A launcher that starts processes on other machines must pass PYTHONPATH on to them. `python
-I` and `python -S` ignore it."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn


def fail(problem: str) -> NoReturn:
    print(f"universal: error: {problem}", file=sys.stderr)
    sys.exit(2)


def main():
    if not sys.argv[1:] or sys.argv[1] in ("-h", "--help"):
        fail("no command was given: python -m universal deepspeed --num_gpus 2 script.py, say")
    if find_spec("deepspeed") is None:
        fail(f"{sys.executable} has no deepspeed")
    start = str(Path(__file__).resolve().with_name("start"))
    if os.pathsep in start:
        fail(f"{start} cannot be on PYTHONPATH, which has {os.pathsep} between paths: move it")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [start, os.environ.get("PYTHONPATH")]))
    try:
        os.execvp(sys.argv[1], sys.argv[1:])
    except OSError as error:
        fail(f"cannot run the command {sys.argv[1]}: {error.strerror}")


if __name__ == "__main__":
    main()
