"""The DeepSpeeds that people have: `make versions`.

    python demos/versions.py --output assets/versions.txt

Installs each below .venv-versions/, without its requirements and without a compiler, beside the torch of this Python.
There 4 ranks train for 9 steps and save after the third. A number is the largest difference of the 6 losses after that
from those of the run that saved and went on. Beside what is ours stands what DeepSpeed does there by itself, and what
differs without any checkpoint. A letter is an error, told below the table. Ends with an error where universal.py fails
or is further away than rounding, and the control beside it is not.
"""

import argparse
import itertools
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import warnings
from importlib.metadata import version as version_of
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import universal  # noqa: E402

HERE, NEW = ROOT / ".venv-versions", version_of("deepspeed")
OLD = ("0.16.4", "0.16.9", "0.17.6", "0.18.4", "0.18.9", "0.19.0", "0.19.3")
STAGES, ROUNDING = (1, 2, 3), 1e-5
ANOTHER = {1: 2, 2: 3, 3: 1}
NOTHING = "nothing loaded"
SAVING = {
    NOTHING: dict(ranks=3, seed=2),
    "saved": dict(ranks=4, save="zero"),
    "one group": dict(ranks=4, save="one", one_group=True),
    "theirs": dict(ranks=1, load="one", save="theirs", how="convert"),
}
OURS, STOCK = dict(ranks=3, load="zero", how="ours"), dict(ranks=4, load="zero", how="stock")
CONVERTED = dict(ranks=3, how="universal", one_group=True)
# who: the version that loads; of: the version that has saved; else it is the same one
ROWS = {
    "3 ranks, no checkpoint": dict(ranks=3),
    "2 ranks, no checkpoint": dict(ranks=2),
    "4 ranks at another stage, no checkpoint": dict(ranks=4, another=True),
    "universal.py, 4 to 3": OURS,
    "universal.py, 4 to 2": OURS | dict(ranks=2),
    "universal.py, 4 to 3, at another stage": OURS | dict(another=True),
    "DeepSpeed's loader, 4 to 3": STOCK | dict(ranks=3),
    f"{NEW} loads it: DeepSpeed's, on the same 4": STOCK | dict(who=NEW),
    f"{NEW} loads it: universal.py, 4 to 3": OURS | dict(who=NEW),
    f"it loads {NEW}'s: DeepSpeed's, on the same 4": STOCK | dict(of=NEW),
    f"it loads {NEW}'s: universal.py, 4 to 3": OURS | dict(of=NEW),
    "our converter, DeepSpeed's universal loader (*)": CONVERTED | dict(load="ours"),
    "the same without --zero3_before_0_19_3": CONVERTED | dict(load="dict"),
    "DeepSpeed's converter and universal loader (*)": CONVERTED | dict(load="theirs"),
}
NAMES = list(ROWS)
# what is ours, and so checked, by what it is compared with
CONTROLS = {NAMES[i]: NAMES[control] for i, control in ((3, 0), (4, 1), (5, 2), (8, 7), (10, 9))}
SAVED, STEPS, BATCH, ACCUMULATION = 3, 9, 24, 2


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = torch.nn.Embedding(11, 8), torch.nn.Linear(8, 11, bias=False)
        self.out.weight = self.embed.weight
        self.frozen = torch.nn.Linear(8, 8).requires_grad_(False)
        self.hidden, self.norm = torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens, targets):
        self.calls += 1
        hidden = self.norm(self.hidden(self.frozen(self.embed(tokens)).tanh()).relu())
        return torch.nn.functional.cross_entropy(self.out(hidden) * (1 + 0.01 * self.calls), targets)


def make_engine(ranks, stage, seed, converted, one_group):
    import deepspeed

    torch.manual_seed(1)
    frozen = Net().frozen
    torch.manual_seed(seed)
    model = Net()
    if converted:  # DeepSpeed's universal loader leaves both out: here they come from elsewhere
        model.frozen = frozen
        model.calls += SAVED * ACCUMULATION
    config = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // ACCUMULATION // ranks,
        "gradient_clipping": 0.5,  # the default was none, and is 1 since 0.19.3
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "checkpoint": {"load_universal": converted},
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, others = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 2e-2}]
    optimizer = torch.optim.AdamW(matrices + others if one_group else groups, lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / STEPS))
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, lr_scheduler=schedule)[0]


def train(ranks, stage, folder=None, save=None, load=None, how=None, seed=1, one_group=False, another=False, **_):
    """Train to the last step; the losses of the last ones. load: a tag, by `how`, in a model of another seed; save: a
    tag, at step 3 or a load."""
    if how == "convert":
        from deepspeed.checkpoint import ds_to_universal

        options = dict(num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=True)
        options |= dict(input_folder=f"{folder}/{load}", output_folder=f"{folder}/{save}", inject_missing_state=True)
        ds_to_universal.main(SimpleNamespace(**options))
        return []
    stage = ANOTHER[stage] if another else stage
    engine = make_engine(ranks, stage, seed + bool(load), how == "universal", one_group)
    if how == "ours":
        universal.load_checkpoint(engine, folder, load)
    elif load:
        assert engine.load_checkpoint(folder, load)[0], "nothing was loaded"
    if load and save:
        engine.save_checkpoint(folder, tag=save)
    losses = []
    for step in range(engine.global_steps, STEPS):
        data = torch.randint(11, (BATCH, 2), generator=torch.Generator().manual_seed(step))
        mean = torch.zeros((), dtype=torch.float64)
        for rows in data.chunk(ACCUMULATION):
            mine = rows[dist.get_rank() :: ranks]
            loss = engine(mine[:, 0], mine[:, 1])
            engine.backward(loss)
            engine.step()
            mean += loss.detach().double() / ACCUMULATION / ranks
        dist.all_reduce(mean)
        losses.append(mean.item())
        if save and step + 1 == SAVED:
            engine.save_checkpoint(folder, tag=save)
    return losses[-(STEPS - SAVED) :]


def play_all(jobs):
    """Of each job one line of JSON on stdout: its losses, or the error that one of its ranks raised."""
    # Older DeepSpeeds gather into views that autograd forbids gloo to write to, and not NCCL.
    dist.all_gather_into_tensor = torch.no_grad()(dist.all_gather_into_tensor)
    from harness.ranks import deepspeed, last_error, launch

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it needs a compiler

    def rank_main(job):
        deepspeed.init_distributed("gloo")
        print("\n" + json.dumps({"losses": train(**job)}))

    for job in jobs:
        done = launch(ROOT, job["ranks"], rank_main, job, limit=90, grace=5)
        sys.stderr.write(done.errors)
        error = re.sub(r"^(\[rank\d+\]: )?([a-z_]\w*\.)*", "", last_error(done.err))
        result = {"error": error} if done.code else json.loads(done.out.splitlines()[-1])
        print(json.dumps({"name": job["name"], "version": deepspeed.__version__} | result), flush=True)


def install(version):
    """The folder to put on PYTHONPATH: deepspeed alone. All else, torch too, is that of this Python."""
    folder, builder, unfinished = HERE / version, HERE / "build", HERE / f"{version}.unfinished"
    if folder.exists():
        return folder
    pip = [builder / "bin" / "python", "-m", "pip", "install", "-q"]
    if not (builder / "ready").exists():
        venv.create(builder, with_pip=True, clear=True)
        subprocess.run([*pip, "wheel", "setuptools<80", "ninja", "packaging"], check=True, timeout=300)
        (packages,) = builder.glob("lib/python*/site-packages")
        (packages / "beside.pth").write_text(sysconfig.get_path("purelib"))  # its setup.py imports torch
        (builder / "ready").touch()
    shutil.rmtree(unfinished, ignore_errors=True)
    pip += ["--no-deps", "--no-build-isolation", "--target", unfinished, f"deepspeed=={version}"]
    subprocess.run(pip, check=True, timeout=300, env=os.environ | {"DS_ACCELERATOR": "cpu"})
    return unfinished.rename(folder)


def run(version, jobs, log):
    """{name: result} of the jobs under that version."""
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = "" if version == NEW else str(install(version))
    command = [sys.executable, __file__, "--jobs", json.dumps(jobs)]
    with open(log, "a") as errors:  # each job has a time limit
        out = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment).stdout
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


def measure(version, work, new):
    """({(row, stage): difference or error}, notes, results) of all that is done with this version. new: the results of
    NEW, which has saved some of what is loaded."""
    shutil.rmtree(work / version, ignore_errors=True)
    (work / version).mkdir(parents=True)
    results, done, found, notes, log = {}, {}, {}, [], work / f"{version}.log"
    old = tuple(map(int, version.split("."))) < (0, 19, 3)

    def play(rows):
        jobs = {version: [], NEW: []}
        for (row, spec), stage in itertools.product(rows.items(), STAGES):
            folder = work / spec.get("of", version)
            tags = {key: f"{spec[key]}{stage}" for key in ("load", "save") if key in spec}
            converted = spec.get("how") != "universal" or (folder / tags["load"]).exists()
            if converted and not (version == NEW and NEW in row):
                who, one = spec.get("who", version), job(row, stage, folder=folder, **spec | tags)
                jobs[who].append(one)
                done[row, stage] = who, one
        for who in jobs:
            results.update(run(who, jobs[who], log) if jobs[who] else {})

    def difference(row, stage):
        reference = "one group" if "one_group" in ROWS.get(row, ()) else "saved"
        saved = (new if f"loads {NEW}" in row else results)[f"{reference}/{stage}"]
        result = results[f"{row}/{stage}"]
        if error := saved.get("error") or result.get("error"):
            return error
        gaps = [abs(a - b) for a, b in zip(saved["losses"], result["losses"], strict=True)]
        return largest(gaps)

    play(SAVING)
    for stage in STAGES:
        convert(work / version / f"one{stage}", work / version / f"ours{stage}", old and stage == 3)
    if old:
        convert(work / version / "one3", work / version / "dict3", False)
    play(ROWS)
    for (row, stage), (who, one) in done.items():
        if row in (*ROWS, NOTHING):
            found[row, stage] = first = difference(row, stage)
            if row in ROWS and is_off(first):  # on CPUs DeepSpeed now and then loses gradients
                results |= run(who, [one], log)
                found[row, stage] = again = difference(row, stage)
                then = again if isinstance(again, str) else f"{again:.1e}"
                notes.append(f"DeepSpeed {version}, {row}, ZeRO-{stage}: {first:.1e} the first time, then {then}")
    return found, notes, results


def largest(numbers):
    """NaN is more than any number."""
    return max(numbers, key=lambda number: (number != number, number))


def is_off(value):
    return isinstance(value, float) and not value <= ROUNDING


def wrong(found):
    """What universal.py has to answer for: its row is not rounding though its control is."""
    for (row, stage), value in found.items():
        bad = is_off(value) or isinstance(value, str)
        if row in CONTROLS and bad and not is_off(found.get((CONTROLS[row], stage))):
            yield f"{row}, ZeRO-{stage}: {value}"


def table(version, found, legend):
    """The lines of a version's table. legend: {error: letter}, filled."""
    lines = [f"{'DeepSpeed ' + version:<52}" + "".join(f"{f'ZeRO-{stage}':>10}" for stage in STAGES)]
    for row in ROWS:
        cells = [cell(found.get((row, stage), ""), legend) for stage in STAGES]
        if any(cells):
            lines.append(f"  {row:<50}" + "".join(f"{text:>10}" for text in cells))
    return [*lines, ""]


def cell(value, legend):
    if not isinstance(value, float):
        error = re.sub(r"/\S*/", "", value)[:150]
        return error and legend.setdefault(error, chr(ord("a") + len(legend)))
    return f"{value:.1e}"


def short(everything, legend):
    """The lines of a table with one line a version: the largest number of some rows, and the errors among them."""
    rows = NAMES
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
            errors = sorted({cell(value, legend) for value in values if isinstance(value, str)})
            most = [cell(largest(numbers), legend)] if numbers else []
            line += f"{' '.join(most + errors):>15}"
        lines.append(line)
    return [*lines, ""]


def write(output, everything, notes):
    legend = {}
    lines = short(everything, legend)
    for version, found in everything.items():
        lines += table(version, found, legend)
    lines.append(f"{'A model of another seed that loads nothing:':<52}{everything[NEW][NOTHING, 1]:>10.1e}")
    lines.append(
        "(*) one parameter group; the frozen layer and the buffer come from elsewhere: that loader leaves them out"
    )
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
        everything[version], again, results = measure(version, args.work.resolve(), new)
        new, notes = new or results, notes + again
        problems += [f"DeepSpeed {version}: {problem}" for problem in wrong(everything[version])]
        print("\n".join(table(version, everything[version], legend)), *again, sep="\n", flush=True)
        write(args.output, dict(sorted(everything.items())), notes)  # what is measured is kept
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
