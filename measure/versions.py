"""train.py under older DeepSpeeds, and what of theirs universal loads: `make versions`.

    python -m measure.versions --output assets/versions.txt

Installs each below .venv-versions/, without its requirements, beside the torch of this Python. 4
ranks train for 9 steps and save after the third; others, with wrong weights, load that and go on. A
number is the largest difference of their losses at any ZeRO stage, a letter is an error. Before
0.19.7 DeepSpeed now and then loses gradients on CPUs: what is off is measured up to three times;
the table has the last number, and below it the others. Ends with an error where universal is still
off, and DeepSpeed alone is not, or where a model that loads nothing is close."""

import functools
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from measure import options
from measure.logs import brief, compare, write_table
from tests.support import ROOT
from tests.support.ranks import deepspeed, last_error, launch

INSTALLED = ROOT / ".venv-versions"
WORK = ROOT / "runs" / "versions"
OLD = ("0.16.4", "0.16.9", "0.17.6", "0.18.4", "0.18.9", "0.19.0", "0.19.3")
NEW = deepspeed.__version__
STAGES = (1, 2, 3)
ROUNDING = 1e-5
FAR = 0.1
ATTEMPTS = 3
TO = f"to {NEW}"
FROM = f"from {NEW}"
# {name: ranks, model, seed of its weights, script and flags}; the last two run under NEW.
# DeepSpeed's universal loader leaves out frozen layers, buffers and all parameter groups but the
# first: where it loads, the model is GPT, not Odd.
JOBS = {
    "saved": "4 Odd 1 train.py --checkpoint_interval 3 --checkpoint_dir zero",
    "no checkpoint": "3 Odd 1 train.py",
    "not loaded": "3 Odd 2 train.py",
    "universal": "3 Odd 2 train.py --resume --checkpoint_dir zero",
    "its loader": "3 Odd 2 train.py --resume --checkpoint_dir zero --stock",
    FROM: "3 Odd 2 train.py --resume --checkpoint_dir {new}",
    f"{FROM}, same ranks": "4 Odd 2 train.py --resume --checkpoint_dir {new} --stock",
    "one group": "4 GPT 1 train.py --checkpoint_interval 3 --checkpoint_dir one",
    "we convert": "1 GPT 1 ds_to_universal.py {flag} {folders} ours/global_step3",
    "converter": "3 GPT 2 train.py {universal} --checkpoint_dir ours",
    "we convert without flag": "1 GPT 1 ds_to_universal.py {folders} plain/global_step3",
    "without flag": "3 GPT 2 train.py {universal} --checkpoint_dir plain",
    "it converts": "1 GPT 1 {theirs} --inject_missing_state {folders} its/global_step3",
    "its converter": "3 GPT 2 train.py {universal} --checkpoint_dir its",
    TO: "3 Odd 2 train.py --resume --checkpoint_dir zero",
    f"{TO}, same ranks": "4 Odd 2 train.py --resume --checkpoint_dir zero --stock",
}
WORDS = {
    "universal": "--resume --universal_checkpoint --stock",
    "theirs": "deepspeed/checkpoint/ds_to_universal.py",
    "folders": "--num_extract_workers 1 --num_merge_workers 1 "
    "--input_folder one/global_step3 --output_folder",
}
TRAIN = (
    "--train_batch_size 24 --train_micro_batch_size_per_gpu 2 --seq_len 8 --n_layer 1 --n_head 2 "
    "--n_embd 16 --steps 9 --warmup_steps 2 --checkpoint_tag global_step3 "
    f"--data {ROOT / 'LICENSE'}"
).split()
# The columns of the table: a job, and the one whose losses it is compared with.
COLUMNS = {
    "no checkpoint": "saved",
    "universal": "saved",
    TO: f"{TO}, same ranks",
    FROM: f"{FROM}, same ranks",
    "its loader": "saved",
    "converter": "one group",
    "without flag": "one group",
    "its converter": "one group",
    "not loaded": "saved",
}
OURS = ("universal", TO, FROM, "converter")
ALONE = ("no checkpoint", "its converter")


def change(kind, seed):
    """Changes, on a rank, what train.py trains."""
    import train  # this rank's own

    class Odd(train.GPT):
        """A model with a frozen layer, and a buffer that scales the loss."""

        def __init__(self, *sizes):
            super().__init__(*sizes)
            self.wpe.requires_grad_(False)
            self.register_buffer("scale", 1 + torch.rand(()))

        def forward(self, *inputs, **options):
            return super().forward(*inputs, **options) * self.scale

    # Older DeepSpeeds gather into views that autograd forbids gloo to write to, and not NCCL.
    dist.all_gather_into_tensor = torch.no_grad()(dist.all_gather_into_tensor)
    make = {"Odd": Odd, "GPT": train.GPT}[kind]

    def seeded(*sizes):
        torch.manual_seed(seed)
        return make(*sizes)

    train.GPT = seeded
    if kind == "GPT":
        train.parameter_groups = lambda net: [{"params": list(net.parameters())}]


def play(version, folder, stage, jobs):
    """Returns the errors of the jobs that end with one, by name. Logs and checkpoints are in the
    folder."""
    assert deepspeed.__version__ == version
    failed = {}
    for name, job in jobs.items():
        ranks, kind, seed, script, *flags = job.split()
        if script == "train.py":
            flags += [*TRAIN, "--zero_stage", stage, "--run_name", name]
        if script.startswith("deepspeed/"):
            script = Path(deepspeed.__file__).parents[1] / script
        patch = functools.partial(change, kind, int(seed))
        done = launch(folder, int(ranks), script, *flags, patch=patch, limit=90, grace=5)
        Path(folder, f"{name}.txt").write_text(done.out + done.errors)
        if done.code:
            failed[name] = brief(last_error(done.err))
    return failed


def install(folder, *packages):
    """Install these alone into a folder to put on PYTHONPATH; all else, torch too, is that of this
    Python. Returns the folder."""
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    if not folder.exists():
        shutil.rmtree(unfinished, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", unfinished]
        subprocess.run([*pip, *packages], check=True, timeout=600)
        unfinished.rename(folder)
    return folder


def elsewhere(function, arguments, *paths, limit, without=(), **environment):
    """Returns what "measure.module.function" returns in a Python with these folders first on its
    path. without: names of modules that it shall not find."""
    module = function.rpartition(".")[0]
    hide = f"import json, sys; sys.modules.update(dict.fromkeys({without}))"
    code = f"{hide}; import {module}; print(json.dumps({function}(*{arguments})))"
    process = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [*paths, ROOT]))} | environment,
        check=True,
        timeout=limit,
    )
    return json.loads(process.stdout.splitlines()[-1])


def run(version, folder, stage, jobs):
    """Calls play() under that version."""
    folder.mkdir(parents=True, exist_ok=True)
    if version == NEW:
        return play(version, folder, stage, jobs)
    path = install(INSTALLED / version, f"deepspeed=={version}")
    limit = 300 + 100 * len(jobs)
    return elsewhere(
        "measure.versions.play", (version, str(folder), stage, jobs), path, limit=limit
    )


def commands(version, stage):
    """Returns the commands of JOBS for that version."""
    old = tuple(map(int, version.split("."))) < (0, 19, 3)
    flag = "--zero3_before_0_19_3" if old and stage == 3 else ""
    new = f"../../{NEW}/ZeRO-{stage}/zero"
    return {name: job.format(flag=flag, new=new, **WORDS) for name, job in JOBS.items()}


def difference(folder, name, other):
    """The largest difference of a loss; NaN if one is."""
    gaps = torch.tensor(list(compare(folder, other, name).values()))
    return float(f"{gaps.max():.1e}")


def measure(version, stage):
    """Returns the difference, or the error, of each column."""
    folder = WORK / version / f"ZeRO-{stage}"
    shutil.rmtree(folder, ignore_errors=True)
    jobs = commands(version, stage)
    later = {name: jobs.pop(name) for name in (TO, COLUMNS[TO])}
    failed = run(version, folder, stage, jobs) | run(NEW, folder, stage, later)
    return {
        name: failed.get(name) or failed.get(other) or difference(folder, name, other)
        for name, other in COLUMNS.items()
    }


def off(row, columns=OURS + ALONE, bound=ROUNDING):
    """Returns those of the columns that are further away than that, or errors."""
    return {
        name: row[name] for name in columns if isinstance(row[name], str) or not row[name] <= bound
    }


def is_wrong(row):
    """Whether a result is an error; or universal is off, and DeepSpeed alone is not; or what was
    not loaded is near."""
    if any(isinstance(value, str) for value in off(row).values()):
        return True
    return bool(off(row, OURS) and not off(row, ALONE)) or not off(row, ["not loaded"], FAR)


def write(output, everything, notes):
    """Write one line for each version."""
    rows = {
        version: {column: [row[column] for row in stages.values()] for column in COLUMNS}
        for version, stages in everything.items()
    }
    write_table(output, "DeepSpeed", rows, *(["", "Measured again:", *notes] if notes else []))


def main():
    parser = options.parser(__doc__, "out/versions.txt")
    parser.add_argument("versions", nargs="*", default=OLD)
    args = parser.parse_args()
    everything = {version: {} for version in (*args.versions, NEW)}
    notes = []
    problems = []
    for version, stage in itertools.product((NEW, *args.versions), STAGES):
        where = f"DeepSpeed {version}, ZeRO-{stage}"
        row = measure(version, stage)
        everything[version][stage] = row
        for _ in range(ATTEMPTS - 1):
            bad = off(row)
            if bad:
                notes += [f"{where}: {name} was {value}" for name, value in bad.items()]
                again = measure(version, stage)
                row |= {name: again[name] for name in bad}
        if is_wrong(row):
            problems.append(f"{where}: {row}")
        print(where, row, flush=True)
        write(args.output, everything, notes)
    sys.exit("\n".join(problems) or 0)


if __name__ == "__main__":
    main()
