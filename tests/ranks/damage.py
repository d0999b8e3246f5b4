"""`damage.py STAGE save` writes two checkpoints, "t" of step 2 and "later" of step 4, and
truth_<step>.pt beside them.

`damage.py STAGE load FOLDER...` loads what is in these folders, one after the other, into one
engine. In each every rank writes outcome.<rank>.json: the error, or what it has loaded and how that
differs from the truth; and said.<rank>: what it has printed."""

import contextlib
import json
import sys
import time
from pathlib import Path

import torch.distributed as dist

import universal
from tests.support.harms import options_in
from tests.support.toy import (
    begin,
    differences,
    in_turn,
    make,
    read_truth,
    save_truth,
    snapshot,
    train,
)


def save(engine):
    for step in (1, 2, 3, 4):
        train(engine, step)
        if step % 2 == 0:
            engine.save_checkpoint(".", tag={2: "t", 4: "later"}[step], client_state={"step": step})
            save_truth(snapshot(engine), f"truth_{step}.pt")


def load(engine, top):
    options = {"timeout": 30} | options_in(Path())
    outcome = {"error": None}
    begun = time.monotonic()
    try:
        path, client_state = universal.load_checkpoint(engine, **options)
    except universal.CheckpointError as error:
        outcome["error"] = str(error)
    outcome["seconds"] = time.monotonic() - begun
    if not outcome["error"]:
        truth = read_truth(top / f"truth_{client_state['step']}.pt")
        outcome |= {"tag": path, "differences": differences(truth, snapshot(engine))}
    return outcome


if __name__ == "__main__":
    begin()
    stage, phase, *folders = sys.argv[1:]
    engine = make(int(stage))
    top = Path.cwd()

    def play(folder):
        with open(f"said.{dist.get_rank()}", "w") as said, contextlib.redirect_stdout(said):
            outcome = load(engine, top)
        Path(f"outcome.{dist.get_rank()}.json").write_text(json.dumps(outcome))

    if phase == "save":
        save(engine)
    else:
        train(engine, 1)  # its states are not zeros
        in_turn(folders, play)
    dist.barrier()
