# SPDX-License-Identifier: MIT
"""Run a command with universal.install() in every Python process that it starts and that imports
DeepSpeed:

    python -m universal llamafactory-cli train full.yaml
    python -m universal deepspeed --num_gpus 2 their_script.py --resume

It puts the folder start/ first in PYTHONPATH, which child processes inherit, and then becomes the
command. DeepSpeed's launcher passes it on to other machines, where the folder must be, too;
srun and mpirun must be told to. `python -I` and `python -S` ignore it."""

import itertools
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

BATCH = "UNIVERSAL_BATCH"
MPI = f"`-x PYTHONPATH -x {BATCH}` with Open MPI, `-genvall` with MPICH and Intel MPI"
ADVICE = {"srun": "`--export=ALL`", "mpirun": MPI, "mpiexec": MPI}
SCRIPT = re.compile(r"(^|/)python[\d.]*$|\.(py|sh)$")  # what a launcher starts


def fail(problem: str) -> NoReturn:
    print(f"universal: error: {problem}", file=sys.stderr)
    sys.exit(2)


def check_exports(launcher: str, *words: str):
    """End before ranks start without what is set here."""
    options = " ".join(itertools.takewhile(lambda word: not SCRIPT.search(word), words))
    if launcher == "srun":
        export = re.search(r"--export[= ](\S+)", options)
        options = export[1] if export else os.environ.get("SLURM_EXPORT_ENV", "ALL")
    named = {*re.findall(r"\w+", options)}
    wanted = {"PYTHONPATH", BATCH} & {"PYTHONPATH", *os.environ}
    if launcher in ADVICE and not wanted <= named and not {"ALL", "genvall"} & named:
        missing = " and ".join(sorted(wanted))
        fail(f"{launcher} would start ranks without {missing}: add {ADVICE[launcher]}")


def main():
    if sys.argv[1:2] in (["-h"], ["--help"]):
        print(__doc__)
        return
    if not sys.argv[1:]:
        fail("no command was given: python -m universal deepspeed --num_gpus 2 script.py, say")
    if find_spec("deepspeed") is None:
        fail(f"{sys.executable} has no deepspeed")
    batch = os.environ.get(BATCH, "1")
    if not batch.isdecimal() or not int(batch):
        fail(f"{BATCH}={batch} is no number of samples")
    check_exports(os.path.basename(sys.argv[1]), *sys.argv[2:])
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
