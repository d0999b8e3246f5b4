"""Runs the scripts as their readers do, rank by rank, but forks the ranks from this process: it has imported torch,
DeepSpeed and the modules of this repository already, and a launch costs one second instead of twenty."""

import csv
import gc
import importlib
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does; without it accelerate takes all cores for every rank
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import deepspeed  # noqa: E402
import torch  # noqa: E402

from harness.processes import free_port  # noqa: E402

# What DeepSpeed imports when it makes an engine, at each stage, and what the scripts import.
for name in (
    "setuptools", "distutils.ccompiler", "distutils.sysconfig", "torch._dynamo", "torch._inductor.compile_fx",
    "torch._subclasses.schema_check_mode", "deepspeed.comm.mori", "deepspeed.sequence.layer",
    "deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.module_inject.auto_ep_layer", "universal.exact", "model",
):  # fmt: skip
    importlib.import_module(name)
deepspeed.ops.__compatible_ops__  # noqa: B018  it looks for compilers when it is first asked
torch.set_num_threads(1)  # a pool of threads does not survive a fork

PORT = free_port()


def rank_main(rank, ranks, script, arguments, patch):
    gc.freeze()  # DeepSpeed collects garbage: not in what it has from the parent, which would copy all of it
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(PORT)}
    for fd, stream in ((1, "out"), (2, "err")):
        os.dup2(os.open(f".{stream}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), fd)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    sys.argv = [script, *map(str, arguments)]
    for name in ("train", "train_elastic"):  # where a test has imported it, it would not see what patch() changes
        sys.modules.pop(name, None)
    code = 0
    try:
        if patch:
            patch()
        runpy.run_path(str(ROOT / script), run_name="__main__")
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def launch(folder, ranks, script, *arguments, patch=None, limit=300, started=None, grace=0):
    """Run `script` on `ranks` ranks in `folder`; like the launchers, end all ranks when one fails.

    patch() runs in every rank before the script. Returns codes, of all ranks; code, out and err of the first rank that
    ended badly, or of rank 0; and err of all ranks as `errors`. started: how many to start, from rank 0 on; a rank that
    meets the others waits for them until the time limit. grace: seconds that the others have when one fails.
    """
    children = {}
    started = started or ranks
    for rank in range(started):
        for stream in ("out", "err"):  # a rank may be ended before it opens them
            Path(folder, f".{stream}.{rank}").write_text("")
        pid = os.fork()
        if pid == 0:
            os.chdir(folder)
            rank_main(rank, ranks, script, arguments, patch)
        children[pid] = rank
    codes, deadline, first_failure = {}, time.monotonic() + limit, 0
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG) if children else (0, 0)
        if pid in children:
            codes[children.pop(pid)] = os.waitstatus_to_exitcode(status)
        failed = any(codes.values())
        if failed:
            deadline = min(deadline, first_failure + grace)
        else:
            first_failure = time.monotonic()
        if time.monotonic() > deadline:
            for other in children:
                os.kill(other, signal.SIGKILL)
                os.waitpid(other, 0)
            if not failed:
                codes[next(iter(children.values()))] = "time limit"
            children = {}
        time.sleep(0.01)
    told = next((rank for rank, code in codes.items() if code), 0)
    text = {(s, r): Path(folder, f".{s}.{r}").read_text() for s in ("out", "err") for r in range(started)}
    for stream, rank in text:
        Path(folder, f".{stream}.{rank}").unlink()
    errors = "".join(text["err", r] for r in range(started))
    return SimpleNamespace(code=codes[told], codes=codes, out=text["out", told], err=text["err", told], errors=errors)


def run(folder, ranks, script, *arguments, **options):
    """launch(), and the run must succeed. Returns its output."""
    result = launch(folder, ranks, script, *arguments, **options)
    assert result.code == 0, f"{script} {arguments} {result.codes}\n{result.out}\n{result.errors}"
    return result.out


def ends_after(last):
    """A patch: the run ends, as if it was done, when it asks for the data of the next step."""

    def patch():
        import data

        batch = data.global_batch

        def draw(text, seed, step, *sizes):
            return batch(text, seed, step, *sizes) if step <= last else sys.exit(0)

        data.global_batch = draw

    return patch


def read_log(folder, run_name, *columns):
    """{column: {step: value}} of logs/<run_name>.csv."""
    with open(Path(folder, "logs", f"{run_name}.csv"), newline="") as file:
        rows = list(csv.DictReader(file))
    return {c: {int(r["step"]): float(r[c]) for r in rows if r[c]} for c in columns or ("loss", "val_loss")}


def compare(folder, baseline, resumed, column="loss"):
    """|difference| at every step that the resumed run has; the baseline must have them all."""
    a, b = read_log(folder, baseline, column)[column], read_log(folder, resumed, column)[column]
    assert b and b.keys() <= a.keys()
    return {step: abs(b[step] - a[step]) for step in b}
