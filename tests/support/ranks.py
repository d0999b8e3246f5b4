"""Runs scripts as their readers do, rank by rank, but forks the ranks from this process: it has
imported torch, DeepSpeed and the modules of this repository already, and a launch costs one second
instead of twenty."""

import contextlib
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
from types import SimpleNamespace

import deepspeed
import torch

from tests.support import ROOT

# What DeepSpeed imports when it makes an engine, at each stage, and what the scripts import; and
# what universal imports when it is first asked for.
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
    "universal.resume",
):
    with contextlib.suppress(ImportError):  # an older DeepSpeed has not all of them
        importlib.import_module(name)
# It looks for compilers when it is first asked.
deepspeed.ops.__compatible_ops__  # noqa: B018
torch.set_num_threads(1)  # a pool of threads does not survive a fork


def free_port():
    """Outside the range from which the system numbers connections: the ranks bind it only later."""
    while True:
        with contextlib.suppress(OSError), contextlib.closing(socket.socket()) as probe:
            probe.bind(("127.0.0.1", random.randrange(20000, 32000)))
            return probe.getsockname()[1]


PORT = free_port()


# -----------------------------------------------------------------------------
# a rank


def run_script(script):
    """What `python script` does, or `python -m script` for a module of examples/. train.py and
    those modules are imported under their names, so they have what a patch has changed in them."""
    module = str(script).removesuffix(".py")
    if module == "train" or module.startswith("examples."):
        sys.path.insert(0, str(ROOT))
        sys.argv[0] = f"{module.removeprefix('examples.')}.py"
        importlib.import_module(module).main()
    else:
        runpy.run_path(str(ROOT / script), run_name="__main__")


def forget_scripts():
    """They read their rank as they are imported: each rank imports them itself."""
    for name in list(sys.modules):
        if name == "train" or name.startswith("examples."):
            del sys.modules[name]


def rank_main(environment, script, arguments, patch):
    """In the child; it never returns."""
    code = 1
    try:
        sys.stdout = os.fdopen(1, "w", buffering=1)
        sys.stderr = os.fdopen(2, "w", buffering=1)
        gc.freeze()  # DeepSpeed collects garbage: a look at all of the parent's would copy it
        os.environ |= environment
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


class Rank:
    """A child of this process. What it prints goes to files."""

    def __init__(self, rank, ranks, folder, *work):
        """work: the other arguments of rank_main()."""
        self.rank = rank
        self.files = [tempfile.TemporaryFile("w+", errors="replace") for _ in ("out", "err")]
        self.pid = os.fork()
        if self.pid:
            return
        os.chdir(folder)
        for fd, file in enumerate(self.files, 1):
            os.dup2(file.fileno(), fd)
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(PORT),
        }
        rank_main(environment, *work)

    def exit_code(self):
        """None while it runs."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def printed(self):
        texts = []
        for file in self.files:
            with file:
                file.seek(0)
                texts.append(file.read())
        return texts


# -----------------------------------------------------------------------------
# all ranks


def launch(folder, ranks, script, *arguments, patch=None, limit=300, grace=0):
    """Run `script`, or call it, on `ranks` ranks in `folder`; like the launchers, end all ranks
    when one fails.

    patch() runs in every rank before the script. Returns codes, of all ranks; code, out and err of
    the first rank that ended badly, or of rank 0; and err of all ranks as `errors`. If some are not
    done in time, err is what all have said. grace: seconds that the others have when one fails."""
    children = [Rank(rank, ranks, folder, script, arguments, patch) for rank in range(ranks)]
    codes = {}
    deadline = time.monotonic() + limit
    running = list(children)
    while running and time.monotonic() < deadline:
        time.sleep(0.01)
        for rank in list(running):
            code = rank.exit_code()
            if code is None:
                continue
            running.remove(rank)
            codes[rank.rank] = code
            if code:
                deadline = min(deadline, time.monotonic() + grace)
    for rank in running:
        rank.kill()
    if running and not any(codes.values()):
        codes[running[0].rank] = "time limit"
    texts = [rank.printed() for rank in children]
    culprit = next((rank for rank, code in codes.items() if code), 0)
    if codes[culprit] == "time limit":
        said = [f"rank {rank} said:\n{out}{err}" for rank, (out, err) in enumerate(texts)]
        texts[culprit][1] = "\n".join([*said, f"TimeoutError: not done after {limit} seconds\n"])
    out, err = texts[culprit]
    errors = "".join(err for _, err in texts)
    return SimpleNamespace(code=codes[culprit], codes=codes, out=out, err=err, errors=errors)


def run(folder, ranks, script, *arguments, **options):
    """launch(), and the run must succeed. Returns its output."""
    result = launch(folder, ranks, script, *arguments, **options)
    assert result.code == 0, f"{script} {arguments} {result.codes}\n{result.out}\n{result.errors}"
    return result.out


def last_error(text):
    """The line that says why."""
    lines = [line for line in text.splitlines() if line.strip()] or ["not a word"]
    pattern = r"(\[rank\d+\]: )?[\w.]*([Ee]rror|Exception): "
    errors = [line for line in lines if re.match(pattern, line)]
    return (errors or lines)[-1][:300]


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
