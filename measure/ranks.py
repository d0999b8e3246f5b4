"""Runs scripts as their readers do, rank by rank, but forks the ranks from this process: it has
imported torch, DeepSpeed and the modules of this repository already, and a launch costs one second
instead of twenty."""

import contextlib
import csv
import gc
import importlib
import os
import random
import re
import runpy
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # as torchrun does; without it accelerate takes all cores for every rank
ROOT = Path(__file__).resolve().parent.parent
import deepspeed
import torch

# What DeepSpeed imports when it makes an engine, at each stage, and what the scripts import.
for name in (
    "setuptools",
    "distutils.ccompiler",
    "distutils.sysconfig",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch._subclasses.schema_check_mode",
    "deepspeed.comm.mori",
    "deepspeed.sequence.layer",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.module_inject.auto_ep_layer",
    "universal.exact",
):
    with contextlib.suppress(ImportError):  # an older DeepSpeed has not all of them
        importlib.import_module(name)
deepspeed.ops.__compatible_ops__  # noqa: B018  it looks for compilers when it is first asked
torch.set_num_threads(1)  # a pool of threads does not survive a fork


def free_port():
    """Outside the range from which the system numbers connections: the ranks bind it only later."""
    while True:
        with contextlib.suppress(OSError), contextlib.closing(socket.socket()) as probe:
            probe.bind(("127.0.0.1", random.randrange(20000, 32000)))
            return probe.getsockname()[1]


PORT = free_port()


def forget_scripts():
    """They read their rank as they are imported, so each rank imports them itself."""
    for name in list(sys.modules):
        if name == "train" or name.startswith("examples."):
            del sys.modules[name]


def run_script(script):
    """What `python script` does, or `python -m script` for a module of examples/. Those that are
    imported here see what a patch has changed in train.py."""
    module = str(script).removesuffix(".py")
    if module == "train" or module.startswith("examples."):
        sys.path.insert(0, str(ROOT))
        sys.argv[0] = f"{module.split('.')[-1]}.py"
        importlib.import_module(module).main()
    else:
        runpy.run_path(str(ROOT / script), run_name="__main__")


def rank_main(place, script, arguments, patch):
    """In the child; it never returns."""
    code = 1
    try:
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
        gc.freeze()  # DeepSpeed collects garbage: not in what it has from the parent, which would copy all of it
        os.environ |= place
        forget_scripts()
        sys.argv = [str(script), *map(str, arguments)]
        if patch:
            patch()
        if callable(script):
            script(*arguments)
        else:
            run_script(script)
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def launch(folder, ranks, script, *arguments, patch=None, limit=300, grace=0):
    """Run `script`, or call it, on `ranks` ranks in `folder`; like the launchers, end all ranks
    when one fails.

    patch() runs in every rank before the script. Returns codes, of all ranks; code, out and err of
    the first rank that ended badly, or of rank 0; and err of all ranks as `errors`. grace: seconds
    that the others have when one fails."""
    children, files = {}, []
    place = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(PORT),
    }
    for rank in range(ranks):
        files.append([tempfile.TemporaryFile("w+", errors="replace") for _ in ("out", "err")])
        pid = os.fork()
        if pid == 0:
            os.chdir(folder)
            for fd, file in enumerate(files[rank], 1):
                os.dup2(file.fileno(), fd)
            rank_main(
                place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, script, arguments, patch
            )
        children[pid] = rank
    codes, deadline = {}, time.monotonic() + limit
    while children and time.monotonic() < deadline:
        time.sleep(0.01)
        for pid, rank in list(children.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del children[pid]
                codes[rank] = os.waitstatus_to_exitcode(status)
            if codes.get(rank):
                deadline = min(deadline, time.monotonic() + grace)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if children and not any(codes.values()):
        codes[min(children.values())] = "time limit"
    told = next((rank for rank, code in codes.items() if code), 0)
    texts = [[read(file) for file in pair] for pair in files]
    if codes[told] == "time limit":
        texts[told][1] += f"\nTimeoutError: not done after {limit} seconds\n"
    errors = "".join(err for _, err in texts)
    return SimpleNamespace(
        code=codes[told], codes=codes, out=texts[told][0], err=texts[told][1], errors=errors
    )


def read(file):
    with file:
        file.seek(0)
        return file.read()


def last_error(text):
    """The line that says why."""
    lines = [line for line in text.splitlines() if line.strip()] or ["not a word"]
    errors = [
        line for line in lines if re.match(r"(\[rank\d+\]: )?[\w.]*([Ee]rror|Exception): ", line)
    ]
    return (errors or lines)[-1][:300]


def run(folder, ranks, script, *arguments, **options):
    """launch(), and the run must succeed. Returns its output."""
    result = launch(folder, ranks, script, *arguments, **options)
    assert result.code == 0, f"{script} {arguments} {result.codes}\n{result.out}\n{result.errors}"
    return result.out


def ends_after(last):
    """A patch: the run ends, as if it was done, when it asks for the data of the next step."""

    def patch():
        import train

        micro_batch = train.micro_batch

        def draw(args, text, step, m):
            if step > last:
                sys.exit(0)
            return micro_batch(args, text, step, m)

        train.micro_batch = draw

    return patch


def rows_of(log):
    """[{column: text}]; nothing where there is no log yet."""
    return list(csv.DictReader(log.read_text().splitlines())) if log.exists() else []


def read_log(folder, run_name, *columns):
    """{column: {step: value}} of logs/<run_name>.csv."""
    rows = rows_of(Path(folder, "logs", f"{run_name}.csv"))
    return {
        c: {int(r["step"]): float(r[c]) for r in rows if r.get(c)}
        for c in columns or ("loss", "val_loss")
    }


def compare(folder, baseline, resumed, column="loss"):
    """|difference| at every step that the resumed run has; the baseline must have them all."""
    a, b = read_log(folder, baseline, column)[column], read_log(folder, resumed, column)[column]
    assert b and b.keys() <= a.keys()
    return {step: abs(b[step] - a[step]) for step in b}
