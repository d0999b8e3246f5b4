"""Loads damaged checkpoints, one after the other, into one engine: damage.py STAGE FOLDER...

`damage.py STAGE save` writes two checkpoints of step 2 and 4, tags "t" and "later", and
truth_<step>.pt beside them. Of every folder each rank writes told.<rank>.json: the error, or what
it has loaded and how that differs from the truth."""

import contextlib
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from toy import begin, make, same, save_truth, snapshot, train

import universal


def save(stage):
    engine = make(stage)
    for step in (1, 2, 3, 4):
        train(engine, step)
        if step % 2 == 0:
            engine.save_checkpoint(".", tag={2: "t", 4: "later"}[step], client_state={"step": step})
            save_truth(snapshot(engine), f"truth_{step}.pt")


def load(engine, folder):
    """{"error"} or {"tag", "step", "wrong": what is not as it was saved, by name}, and the
    seconds."""
    options = {"load_dir": folder, "tag": "t", "timeout": 30}
    if (folder / "options.json").exists():
        options |= json.loads((folder / "options.json").read_text())
    began = time.monotonic()
    try:
        path, client_state = universal.load_checkpoint(engine, **options)
        told = {"tag": str(Path(path).relative_to(folder)), "step": client_state["step"]}
    except universal.CheckpointError as error:
        told = {"error": str(error)}
    told["seconds"] = time.monotonic() - began
    if "step" in told:
        truth, now = torch.load(f"truth_{told['step']}.pt", weights_only=False), snapshot(engine)
        told["wrong"] = [name for name in truth if not same(truth[name], now[name])]
    return told


if __name__ == "__main__":
    begin()
    stage, *folders = sys.argv[1:]
    if folders == ["save"]:
        save(int(stage))
    else:
        engine = make(int(stage))
        train(engine, 1)  # its states are not zeros
        for folder in map(Path, folders):
            rank = dist.get_rank()
            with (
                open(folder / f"said.{rank}", "w", buffering=1) as said,
                contextlib.redirect_stdout(said),
            ):
                told = load(engine, folder)
            (folder / f"told.{rank}.json").write_text(json.dumps(told))
            dist.barrier()
        engine.destroy()
    dist.barrier()
