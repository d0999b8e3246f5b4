"""Kills trainings at every file that a save touches, and resumes them: `make chaos`.

    python -m measure.chaos --points 20

ckpt-chaos 0.1.8 (PyPI) knows neither DeepSpeed nor this repository. It runs a command, notes which
files it opens, renames and removes, and then kills a fresh run ahead of each, or cuts the file in
half and kills; the resume must go on from the newest complete checkpoint, and end with every bit of
a run that nothing happened to. One line for each way to train:

    points   runs that were killed
    same     went on from the newest complete checkpoint, and ended with the same bits
    begun    of these, those that had no whole checkpoint yet, and began again
    told     had none, and train.py --resume ended with one line that says how to begin
"""

import contextlib
import hashlib
import json
import os
import re
import sys
import tempfile
from pathlib import Path

import torch

import universal
from measure import options
from tests.support.ranks import launch, run_script
from universal import background
from universal.proving.samples import tensors_in

SMALL = (
    "--n_layer 1 --n_embd 32 --seq_len 16 --train_batch_size 8 --train_micro_batch_size_per_gpu 4 "
    "--steps 6 --warmup_steps 2 --checkpoint_interval 2 --eval_interval 6 "
    "--run_name chaos --checkpoint_dir {out}"
).split()
TRAIN, ELASTIC = "train.py", "examples.train_elastic"
WAITING, BACKGROUND = "saves that wait", "background saves"
# The script, how it saves, what a resume adds, and the ranks.
WAYS = [
    (TRAIN, WAITING, ["--resume"], 1),
    (TRAIN, BACKGROUND, ["--resume"], 1),
    (TRAIN, WAITING, ["--resume"], 2),
    (ELASTIC, WAITING, [], 1),
    (ELASTIC, BACKGROUND, [], 1),
    (ELASTIC, BACKGROUND, [], 2),
]
TOLD = r"^train\.py: error: .*; without --resume the run begins at step 1$"


def train(environments, script, saves, *words):
    """Train on a rank, from its first import to the end of its threads."""
    environment = environments[int(os.environ["RANK"])]
    os.environ |= {key: environment[key] for key in environment if key.startswith("CKPT_CHAOS")}
    if "CKPT_CHAOS_WATCH" in environment:
        from ckpt_chaos.targets.common import arm_from_env

        arm_from_env(int(os.environ["RANK"]), lazy=True)
    if saves == BACKGROUND:
        universal.install(background=True)
    sys.argv = [script, *words]
    try:
        run_script(script)
    finally:
        background.wait()  # as the end of a process does


def launched(command, environments):
    """Forked ranks, which have imported torch, in place of the tester's subprocesses."""
    ranks = len(environments)
    result = launch(Path.cwd(), ranks, train, environments, *command, limit=300, grace=3)
    return result.code, result.out + result.errors


def bits_at_the_end(out, *_):
    """A hash of every tensor in the last checkpoint, by name; a load may change their order."""
    bits = []
    for path in sorted(out.glob("global_step6/*_states.pt")):
        for name, tensor in tensors_in(torch.load(path, weights_only=False)):
            data = tensor.reshape(-1).view(torch.uint8).numpy()
            bits.append(f"{path.name} {name} {hashlib.sha256(data).hexdigest()}")
    return "\n".join(sorted(bits))


def killed(script, saves, more, ranks, points, work):
    """Returns what became of each killed run, as ckpt-chaos writes it down."""
    from ckpt_chaos import byo

    signature = byo._signature
    # next_steps.csv grows with the steps after a save.
    byo._signature = lambda path: {k: v for k, v in signature(path).items() if k.endswith(".pt")}
    byo._result = bits_at_the_end
    byo._run = lambda command, environment, *_: launched(command, [environment])
    byo._run_group = lambda commands, environments, *_: launched(commands[0], environments)
    command = [script, saves, *SMALL, *(["--elastic"] if script == ELASTIC else [])]
    with contextlib.redirect_stdout(sys.stderr):
        byo.run_byo(
            command,
            [*command, *more],
            work,
            max_points=points,
            step_regex=r"resumed from \S+ at step (\d+)",
            checkpoint_glob="{out}/global_step*",
            ranks=ranks,
        )
    byo._signature = signature
    return [json.loads(path.read_text()) for path in sorted(work.glob("pt_[0-9]*/result.json"))]


def verdict(result):
    """The column in which a run counts; "wrong" if it fits none."""
    outcome = result["outcome"]
    if outcome["raised"]:
        has_none = outcome["newest_complete_step"] == 0
        told = re.findall(TOLD, result["resume_tail"], re.M)
        return "told" if has_none and len(told) == 1 else "wrong"
    step = outcome["resumed_from_step"] or 0
    same = outcome["weights_diff"] == 0 and step >= outcome["newest_complete_step"]
    return ("same" if step else "begun") if same else "wrong"


def main():
    parser = options.parser(__doc__)
    parser.add_argument("--points", type=int, default=1000, help="of each way, at most")
    args = parser.parse_args()
    wrong = []
    print(f"{'':42}ranks  points  same  begun  told")
    for script, saves, more, ranks in WAYS:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            results = killed(script, saves, more, ranks, args.points, Path(folder))
        verdicts = [verdict(result) for result in results]
        wrong += [result for result, kind in zip(results, verdicts, strict=True) if kind == "wrong"]
        begun, told = (verdicts.count(kind) for kind in ("begun", "told"))
        same = verdicts.count("same") + begun
        name = f"{script.removeprefix('examples.')}, {saves}"
        print(f"{name:42}{ranks:>5}{len(results):>8}{same:>6}{begun:>7}{told:>6}", flush=True)
    for result in wrong:
        print(f"WRONG: {result['label']}: {result['outcome']}\n{result['resume_tail']}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
