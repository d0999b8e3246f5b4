"""Saving a checkpoint so that it is never half there, and removing old ones."""

import os
import shutil
from pathlib import Path

import torch.distributed as dist


def save(engine, folder, client_state):
    """Write every rank's shard, then give the folder its name: a folder that has its name is complete."""
    folder, tag = Path(folder), f"global_step{client_state['step']}"
    unfinished, replaced = folder / f"{tag}.unfinished", folder / f"{tag}.replaced"
    if dist.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was killed while it saved, on other ranks perhaps
    dist.barrier()
    engine.save_checkpoint(folder, tag=unfinished.name, client_state={"run": client_state}, save_latest=False)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        os.sync()  # a machine that goes down must not leave a whole folder with empty files
    dist.barrier()
    if dist.get_rank() == 0:
        if (folder / tag).exists():
            shutil.rmtree(replaced, ignore_errors=True)
            (folder / tag).rename(replaced)
        unfinished.rename(folder / tag)
        (folder / "latest.unfinished").write_text(tag)
        (folder / "latest.unfinished").rename(folder / "latest")
        shutil.rmtree(replaced, ignore_errors=True)
        print(f"saved {folder / tag}", flush=True)
    dist.barrier()


def remove_old(folder, keep):
    """All but the `keep` newest checkpoints, with what was converted from them, and what killed jobs left half written
    or half replaced. Called when a newer one is complete."""
    if keep is None or dist.get_rank() != 0:
        return
    folder = Path(folder)
    sweep(folder)  # or a left-over of the same step would be in the way of the name below
    named = {path.read_text().strip() for path in (folder / "latest", folder / "latest_universal") if path.is_file()}
    tags = sorted({file.parent for file in folder.glob("global_step*/*model_states.pt")}, key=saved_at, reverse=True)
    ordinary = [tag for tag in tags if not (tag / "zero").is_dir() and not tag.suffix]
    kept = {tag.name for tag in ordinary[:keep]} | named
    for tag in tags:
        if not tag.suffix and tag.name not in kept and tag.name.removesuffix("_universal") not in kept:
            tag.rename(f"{tag}.unfinished")  # which nobody takes for whole, however far the rest gets
    sweep(folder)


def sweep(folder):
    for path in folder.glob("global_step*"):
        if path.suffix in (".unfinished", ".replaced"):
            shutil.rmtree(path)


def saved_at(folder):
    return max(file.stat().st_mtime for file in folder.glob("*model_states.pt"))
