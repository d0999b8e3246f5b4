"""The DeepSpeeds that people have: `make versions`.

    python demos/versions.py --output assets/versions.txt

Installs each below .venv-versions/, without its requirements and without a compiler, beside the torch of this Python.
There it trains a model with two parameter groups, tied weights, a frozen layer and a buffer for 9 steps, saving after
the third on 4 ranks. A number is the largest difference of the 6 losses after that from those of the run that saved and
went on. Beside what is ours stands what DeepSpeed does there by itself, and what differs without any checkpoint. A
letter is an error, told below the table. Ends with an error where universal.py fails or is further away than rounding,
and the control beside it is not.
"""

import argparse
import importlib
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
import warnings
from contextlib import suppress
from importlib.metadata import version as version_of
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import universal  # noqa: E402

HERE, NEW = ROOT / ".venv-versions", version_of("deepspeed")
OLD = ("0.16.4", "0.16.9", "0.17.6", "0.18.4", "0.18.9", "0.19.0", "0.19.3")
STAGES, ROUNDING = (1, 2, 3), 1e-5
ANOTHER = {1: 2, 2: 3, 3: 1}
# row: the row of its control; those that have one are universal.py's and are checked
ROWS = {
    "3 ranks, no checkpoint": None,
    "2 ranks, no checkpoint": None,
    "4 ranks at another stage, no checkpoint": None,
    "universal.py, 4 to 3": "3 ranks, no checkpoint",
    "universal.py, 4 to 2": "2 ranks, no checkpoint",
    "universal.py, 4 to 3, at another stage": "4 ranks at another stage, no checkpoint",
    "DeepSpeed's loader, 4 to 3": None,
    f"{NEW} loads it: DeepSpeed's, on the same 4": None,
    f"{NEW} loads it: universal.py, 4 to 3": f"{NEW} loads it: DeepSpeed's, on the same 4",
    f"it loads {NEW}'s: DeepSpeed's, on the same 4": None,
    f"it loads {NEW}'s: universal.py, 4 to 3": f"it loads {NEW}'s: DeepSpeed's, on the same 4",
    "our converter, DeepSpeed's universal loader (*)": None,
    "the same without --zero3_before_0_19_3": None,
    "DeepSpeed's converter and universal loader (*)": None,
}
NOTHING = "nothing loaded"
SAVED, STEPS, BATCH, ACCUMULATION = 3, 9, 24, 2
# What DeepSpeed imports when it makes an engine: once here instead of once in every rank.
LATER = ("setuptools", "distutils.ccompiler", "torch._dynamo", "torch._inductor.compile_fx", "deepspeed.comm.torch")
LATER += ("torch._subclasses.schema_check_mode", "deepspeed.sequence.layer", "deepspeed.checkpoint.ds_to_universal")


# -----------------------------------------------------------------------------
# 1. under one version: what its ranks do, forked from a process that has imported it, and whatever it imports later
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.out.weight = self.embed.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.hidden, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens, targets):
        self.calls += 1
        hidden = self.norm(self.hidden(self.frozen(self.embed(tokens)).tanh()).relu())
        return nn.functional.cross_entropy(self.out(hidden) * (1 + 0.01 * self.calls), targets)


def make_engine(ranks, stage, seed, converted, one_group):
    import deepspeed

    torch.manual_seed(1)
    frozen = Net().frozen
    torch.manual_seed(seed)
    model = Net()
    if converted:  # DeepSpeed's universal loader leaves both out: here they come from elsewhere
        model.frozen = frozen
        model.calls += SAVED * ACCUMULATION
    decayed = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    config = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // ACCUMULATION // ranks,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 0.5,  # the default was none, and is 1 since 0.19.3
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "checkpoint": {"load_universal": converted},
    }
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 2e-2}]
    optimizer = torch.optim.AdamW([{"params": decayed + others}] if one_group else groups, lr=1e-2)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config,
        lr_scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: min(1, (step + 1) / STEPS)),
    )  # fmt: skip
    return engine


def train(name, ranks, stage, folder=None, save=None, load=None, how=None, seed=1, one_group=False):
    """Train to the last step. load: a tag, by `how`, in a model of another seed; save: a tag, at step 3 or a load."""
    if how == "convert":
        from deepspeed.checkpoint import ds_to_universal

        options = dict(num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=True)
        options |= dict(input_folder=f"{folder}/{load}", output_folder=f"{folder}/{save}", inject_missing_state=True)
        ds_to_universal.main(SimpleNamespace(**options))
        return []
    engine = make_engine(ranks, stage, seed=seed + bool(load), converted=how == "universal", one_group=one_group)
    if load and how == "ours":
        universal.load_checkpoint(engine, folder, load)
    elif load:
        assert engine.load_checkpoint(folder, load)[0], "nothing was loaded"
    if load and save:
        engine.save_checkpoint(folder, tag=save)
    rank, losses = dist.get_rank(), []
    for step in range(engine.global_steps, STEPS):
        data = torch.randint(11, (BATCH, 2), generator=torch.Generator().manual_seed(step))
        mean = torch.zeros((), dtype=torch.float64)
        for rows in data.chunk(ACCUMULATION):
            mine = rows[rank::ranks]
            loss = engine(mine[:, 0], mine[:, 1])
            engine.backward(loss)
            engine.step()
            mean += loss.detach().double() / ACCUMULATION / ranks
        dist.all_reduce(mean)
        losses.append(mean.item())
        if save and step + 1 == SAVED:
            engine.save_checkpoint(folder, tag=save)
    return losses[-(STEPS - SAVED) :]


def rank_main(rank, job, result):
    import deepspeed

    code = 0
    try:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job["ranks"])}
        dist.init_process_group("gloo", init_method=f"file://{result}.store", rank=rank, world_size=job["ranks"])
        deepspeed.init_distributed("gloo")
        found = {"losses": train(**job)}
    except BaseException as error:
        text = next((line for line in str(error).splitlines() if line.strip()), "")
        found, code = {"error": f"{type(error).__name__}: {text}"}, 1
        logging.exception(job["name"])
    if rank == 0 or code:
        Path(f"{result}.{rank}").write_text(json.dumps(found))
    os._exit(code)  # nothing of the parent's is to be finished here


def play(job, limit=90):
    """The result of the rank that failed first, or of rank 0; the others of a rank that fails may wait for ever."""
    with tempfile.TemporaryDirectory() as folder:
        result, children, first = f"{folder}/result", set(), None
        sys.stdout.flush()
        for rank in range(job["ranks"]):
            if not (child := os.fork()):
                os.dup2(2, 1)
                rank_main(rank, job, result)
            children.add(child)
        deadline = time.monotonic() + limit
        while children and time.monotonic() < deadline:
            for child in list(children):
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid:
                    children.remove(pid)
                    if status and first is None:
                        first, deadline = pid, min(deadline, time.monotonic() + 5)
            time.sleep(0.01)
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        written = sorted(Path(folder).glob("result.[0-9]*"), key=lambda path: path.stat().st_mtime_ns)
        found = [json.loads(path.read_text()) for path in written]
        if first is None and not children and found:
            return found[0]
        errors = [one for one in found if "error" in one]
        return errors[0] if errors else {"error": f"no answer within {limit} seconds, or a rank that died"}


def play_all(jobs):
    """Of each job one line of JSON on stdout: its losses, or the error that one of its ranks raised."""
    # Older DeepSpeeds gather into views that autograd forbids gloo to write to, and not NCCL.
    dist.all_gather_into_tensor = torch.no_grad()(dist.all_gather_into_tensor)
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    for name in LATER:
        with suppress(ImportError):
            importlib.import_module(name)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it needs a compiler
    for job in jobs:
        print(json.dumps({"name": job["name"], "version": deepspeed.__version__} | play(job)), flush=True)


# -----------------------------------------------------------------------------
# 2. the versions, each in a process of its own
def install(version):
    """The folder to put on PYTHONPATH: deepspeed alone. All else, torch too, is that of this Python."""
    folder, builder = HERE / version, HERE / "build"
    if folder.exists():
        return folder
    python = builder / "bin" / "python"
    pip = [python, "-m", "pip", "install", "-q"]
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
    if not (builder / "ready").exists():
        venv.create(builder, with_pip=True, clear=True)
        subprocess.run([*pip, "wheel", "setuptools<80", "ninja", "packaging"], check=True, timeout=300)
        (packages,) = builder.glob("lib/python*/site-packages")
        (packages / "beside.pth").write_text(sysconfig.get_path("purelib"))  # its setup.py imports torch
        (builder / "ready").touch()
    unfinished = HERE / f"{version}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    pip += ["--no-deps", "--no-build-isolation", "--target", unfinished, f"deepspeed=={version}"]
    subprocess.run(pip, check=True, timeout=300, env=environment)
    unfinished.rename(folder)
    return folder


def run(version, jobs, log):
    """{name: result} of the jobs under that version."""
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = "" if version == NEW else str(install(version))
    command = [sys.executable, __file__, "--jobs", json.dumps(jobs)]
    with open(log, "a") as errors:
        options = dict(stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, start_new_session=True)
        with subprocess.Popen(command, **options) as process:
            try:
                out = process.communicate(timeout=600)[0]
            finally:  # its ranks, too
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
    results = [json.loads(line) for line in out.splitlines() if line.startswith('{"name"')]
    assert len(results) == len(jobs), f"{version}: {len(results)} of {len(jobs)} jobs have ended: {log}"
    assert {result["version"] for result in results} == {version}
    return {result["name"]: result for result in results}


def job(row, stage, ranks, folder=None, **more):
    return dict(name=f"{row}/{stage}", stage=stage, ranks=ranks, folder=folder and str(folder), **more)


def convert(source, output, old):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the flag, which is left out on purpose
        universal.convert(source, output, zero3_before_0_19_3=old)


def measure(version, work):
    """({name: result}, {name: (version, job)}) of all that is done with this version."""
    rows, folder, log = list(ROWS), work / version, work / f"{version}.log"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    jobs = []
    for stage in STAGES:
        tag, whole = f"zero{stage}", ANOTHER[stage]
        jobs.append(job("saved", stage, 4, folder, save=tag))
        jobs.append(job("one group", stage, 4, folder, save=f"one{stage}", one_group=True))
        jobs.append(job(rows[0], stage, 3))
        jobs.append(job(rows[1], stage, 2))
        jobs.append(job(rows[3], stage, 3, folder, load=tag, how="ours"))
        jobs.append(job(rows[4], stage, 2, folder, load=tag, how="ours"))
        jobs.append(job(rows[5], stage, 3, folder, load=tag, how="ours") | {"stage": whole})
        jobs.append(job(rows[6], stage, 3, folder, load=tag, how="stock"))
        jobs.append(job("theirs", stage, 1, folder, load=f"one{stage}", save=f"theirs{stage}", how="convert"))
    jobs.append(job(NOTHING, 1, 3, seed=2))
    # A job is independent of the order but for what it loads: that has to be there.
    jobs.sort(key=lambda one: (one.get("how") is not None, not one.get("load")))
    done = [(version, one) for one in jobs]
    results = run(version, jobs, log)
    known = tuple(map(int, version.split(".")))
    jobs = []
    for stage in STAGES:
        old = stage == 3 and known < (0, 19, 3)
        convert(folder / f"one{stage}", folder / f"ours{stage}", old)
        jobs.append(job(rows[11], stage, 3, folder, load=f"ours{stage}", how="universal", one_group=True))
        if old:
            convert(folder / f"one{stage}", folder / f"dict{stage}", False)
            jobs.append(job(rows[12], stage, 3, folder, load=f"dict{stage}", how="universal", one_group=True))
        if "losses" in results[f"theirs/{stage}"]:
            jobs.append(job(rows[13], stage, 3, folder, load=f"theirs{stage}", how="universal", one_group=True))
        if version != NEW:
            jobs.append(job(rows[9], stage, 4, work / NEW, load=f"zero{stage}", how="stock"))
            jobs.append(job(rows[10], stage, 3, work / NEW, load=f"zero{stage}", how="ours"))
    done += [(version, one) for one in jobs]
    results |= run(version, jobs, log)
    if version != NEW:
        jobs = [job(rows[7], stage, 4, folder, load=f"zero{stage}", how="stock") for stage in STAGES]
        jobs += [job(rows[8], stage, 3, folder, load=f"zero{stage}", how="ours") for stage in STAGES]
        done += [(NEW, one) for one in jobs]
        results |= run(NEW, jobs, log)
    results |= {f"{rows[2]}/{stage}": results[f"saved/{ANOTHER[stage]}"] for stage in STAGES}
    return results, {one["name"]: (who, one) for who, one in done}


# -----------------------------------------------------------------------------
# 3. the numbers, and what of them is wrong
def differences(results, new, only=None):
    """{(row, stage): difference or error}. new: the results of NEW, which saved some of what was loaded."""
    found = {}
    for name, result in results.items():
        row, stage = name.rsplit("/", 1)
        reference = "one group" if row in list(ROWS)[11:] else "saved"
        saved = (new if f"loads {NEW}" in row else results)[f"{reference}/{stage}"]
        if row not in (*ROWS, NOTHING) or only not in (None, name):
            continue
        for one in (saved, result):
            if "error" in one:
                found[row, int(stage)] = one["error"]
                break
        else:
            pairs = zip(saved["losses"], result["losses"], strict=True)
            found[row, int(stage)] = largest(abs(a - b) for a, b in pairs)
    return found


def largest(numbers):
    """NaN is more than any number."""
    return max(numbers, key=lambda number: (number != number, number))


def look_again(found, done, results, new, log):
    """Measure once more what is no rounding: on CPUs DeepSpeed now and then loses gradients. Returns what was seen the
    first time, for the table."""
    notes = []
    for row in ROWS:
        for stage in STAGES:
            first = found.get((row, stage))
            if f"{row}/{stage}" in done and isinstance(first, float) and not first <= ROUNDING:
                who, one = done[f"{row}/{stage}"]
                found |= differences(results | run(who, [one], log), new, only=one["name"])
                notes.append(f"{row}, ZeRO-{stage}: {first:.1e} the first time, then {found[row, stage]:.1e}")
    return notes


def wrong(found):
    """What universal.py has to answer for: its row is not rounding though its control is."""
    problems = []
    for row, control in ROWS.items():
        for stage in STAGES if control else ():
            value, beside = found.get((row, stage)), found.get((control, stage))
            if value is None or (isinstance(beside, float) and not beside <= ROUNDING):
                continue
            if not isinstance(value, float) or not value <= ROUNDING:
                problems.append(f"{row}, ZeRO-{stage}: {value}")
    return problems


def table(everything, legend):
    """The lines of the table. legend: {error: letter}, filled."""
    lines = []
    for version, found in everything.items():
        lines.append(f"{'DeepSpeed ' + version:<52}" + "".join(f"{f'ZeRO-{stage}':>10}" for stage in STAGES))
        for row in ROWS:
            cells = ""
            for stage in STAGES:
                value = found.get((row, stage), "")
                if isinstance(value, float):
                    value = f"{value:.1e}"
                elif value:
                    value = letter_of(value, legend)
                cells += f"{value:>10}"
            if cells.strip():
                lines.append(f"  {row:<50}{cells}")
        lines.append("")
    return lines


def short(everything, legend):
    """The lines of a table with one line a version: the largest number of some rows, and the errors among them."""
    rows = list(ROWS)
    columns = {
        "no checkpoint": rows[:2], "universal.py": rows[3:6], f"{NEW} loads": rows[8:9], f"loads {NEW}'s": rows[10:11],
        "DeepSpeed's": rows[6:7], "converter": rows[11:12], "DeepSpeed's ": rows[13:14],
    }  # fmt: skip
    lines = [f"{'DeepSpeed':<11}" + "".join(f"{name.strip():>15}" for name in columns)]
    for version, found in everything.items():
        line = f"{version:<11}"
        for names in columns.values():
            values = [found[row, stage] for row in names for stage in STAGES if (row, stage) in found]
            numbers = [value for value in values if isinstance(value, float)]
            most = [largest(numbers)] if numbers else []
            errors = sorted({letter_of(value, legend) for value in values if isinstance(value, str)})
            line += f"{' '.join([*(f'{one:.1e}' for one in most), *errors]):>15}"
        lines.append(line)
    return [*lines, ""]


def letter_of(error, legend):
    error = re.sub(r"/\S*/", "", error)[:150]
    return legend.setdefault(error, chr(ord("a") + len(legend)))


def write(output, everything, notes):
    legend = {}
    lines = short(everything, legend) + table(everything, legend)
    lines.append(f"{'A model of another seed that loads nothing:':<52}{everything[NEW][NOTHING, 1]:>10.1e}")
    lines += [
        "(*) one parameter group; the frozen layer and the buffer come from elsewhere: that loader leaves them out"
    ]
    lines += [f"{letter}: {error}" for error, letter in legend.items()]
    lines += ["", "What was no rounding was measured a second time, and the table has that:", *notes] if notes else []
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("\n".join(line.rstrip() for line in lines) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("out/versions.txt"))
    parser.add_argument("--work", type=Path, default=Path("runs/versions"), help="checkpoints and logs")
    parser.add_argument("versions", nargs="*", default=OLD)
    parser.add_argument("--jobs", type=json.loads, help="these alone, under whatever DeepSpeed PYTHONPATH names")
    args = parser.parse_args()
    if args.jobs:
        return play_all(args.jobs)
    everything, legend, problems, notes, new = {}, {}, [], [], None
    for version in (NEW, *args.versions):
        results, done = measure(version, args.work.resolve())
        new = new or results
        everything[version] = found = differences(results, new)
        again = look_again(found, done, results, new, args.work.resolve() / f"{version}.log")
        notes += [f"DeepSpeed {version}, {note}" for note in again]
        problems += [f"DeepSpeed {version}: {problem}" for problem in wrong(found)]
        print("\n".join(table({version: found}, legend)), *again, sep="\n", flush=True)
        write(args.output, dict(sorted(everything.items())), notes)  # what is measured is kept
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
