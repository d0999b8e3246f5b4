"""Kills trainings at every file that a save touches, and resumes them: `make chaos`.

    python -m measure.chaos --points 20

ckpt-chaos 0.1.8 (PyPI) knows neither DeepSpeed nor this repository. It runs a command, notes which
files it opens, renames and removes, and then kills a fresh run ahead of each, or cuts the file in
half and kills; the resume must go on from the newest whole checkpoint, and end with the very bytes
of a run that nothing happened to. One line for each way to train:

    points   runs that were killed
    same     went on from the newest whole checkpoint, and ended with the same bytes
    begun    of these, those that had no whole checkpoint yet, and began again
    told     had none, and train.py --resume ended with one line that says how to begin
"""

import argparse
import contextlib
import json
import os
import re
import runpy
import sys
import tempfile
from pathlib import Path

import universal
from tests.support import ROOT

SMALL = (
    "--n_layer 1 --n_embd 32 --seq_len 16 --train_batch_size 8 --train_micro_batch_size_per_gpu 4 "
    "--steps 6 --warmup_steps 2 --checkpoint_interval 2 --eval_interval 6 "
    "--run_name chaos --checkpoint_dir {out}"
).split()
LAST = "{out}/global_step6/zero_pp_rank_0_mp_rank_00_optim_states.pt"
TRAIN, ELASTIC = "train.py", "examples.train_elastic"
# The script, whether it saves in the background, what a resume adds, and the ranks.
WAYS = [
    (TRAIN, False, ["--resume"], 1),
    (TRAIN, True, ["--resume"], 1),
    (ELASTIC, False, [], 1),
    (ELASTIC, True, [], 2),
]
TOLD = r"^train\.py: error: .*; without --resume the run begins at step 1$"


def run(script, background, *words):
    """What a rank does."""
    if background:
        universal.install(background=True)
    sys.argv = [script, *words]
    sys.path.insert(0, str(ROOT))
    if script == TRAIN:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    else:
        runpy.run_module(script, run_name="__main__", alter_sys=True)


def killed(script, background, more, ranks, points, work):
    """Returns what became of each killed run, as ckpt-chaos writes it down."""
    from ckpt_chaos import byo

    signature = byo._signature
    # next_steps.csv grows with the steps after a save.
    byo._signature = lambda path: {k: v for k, v in signature(path).items() if k.endswith(".pt")}
    command = [sys.executable, "-m", "measure.chaos", "--run", script]
    command += ["--background"] if background else []
    command += ["--", *SMALL, *(["--elastic"] if script == ELASTIC else [])]
    with contextlib.redirect_stdout(sys.stderr):
        byo.run_byo(
            command,
            [*command, *more],
            work,
            max_points=points,
            result_file=LAST,
            step_regex=r"resumed from \S+ at step (\d+)",
            checkpoint_glob="{out}/global_step*",
            ranks=ranks,
            timeout=300,
        )
    return [json.loads(path.read_text()) for path in sorted(work.glob("pt_[0-9]*/result.json"))]


def verdict(result):
    """The column that a run counts in; "wrong" for none."""
    outcome = result["outcome"]
    if outcome["raised"]:
        has_none = outcome["newest_complete_step"] == 0
        told = re.findall(TOLD, result["resume_tail"], re.M)
        return "told" if has_none and len(told) == 1 else "wrong"
    step = outcome["resumed_from_step"] or 0
    same = outcome["weights_diff"] == 0 and step >= outcome["newest_complete_step"]
    return ("same" if step else "begun") if same else "wrong"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--points", type=int, default=1000, help="of each way, at most")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--background", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        run(args.run, args.background, *args.words)
        return
    places = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    os.environ["PYTHONPATH"] = os.pathsep.join(places)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29817"}
    wrong = []
    print(f"{'':42}ranks  points  same  begun  told")
    for script, background, more, ranks in WAYS:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            results = killed(script, background, more, ranks, args.points, Path(folder))
        verdicts = [verdict(result) for result in results]
        wrong += [result for result, kind in zip(results, verdicts, strict=True) if kind == "wrong"]
        begun, told = (verdicts.count(kind) for kind in ("begun", "told"))
        same = verdicts.count("same") + begun
        name = f"{script.removeprefix('examples.')}{', background saves' * background}"
        print(f"{name:42}{ranks:>5}{len(results):>8}{same:>6}{begun:>7}{told:>6}", flush=True)
    for result in wrong:
        print(f"WRONG: {result['label']}: {result['outcome']}\n{result['resume_tail']}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
