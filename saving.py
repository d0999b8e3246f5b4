"""Saving a checkpoint so that it is never half there, and removing old ones; copies in memory."""

import contextlib
import os
import shutil
from pathlib import Path

import torch.distributed as dist

from data import fail
from universal.mirror import Mirror


def save(engine, folder, client_state):
    """Write every rank's shard, then give the folder its name: a folder that has its name is complete."""
    folder, tag = Path(folder), f"global_step{client_state['step']}"
    unfinished, rank = folder / f"{tag}.unfinished", dist.get_rank()
    leads = os.environ.get("LOCAL_RANK", "0") == "0"  # its machine's first rank
    if leads:
        shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was killed while it saved, on other ranks perhaps
    dist.barrier()
    engine.save_checkpoint(folder, tag=unfinished.name, client_state={"run": client_state}, save_latest=False)
    if leads:
        os.sync()  # a machine that goes down must not leave a whole folder with empty files
    dist.barrier()
    if rank == 0:
        publish(unfinished, folder / tag)
        print(f"saved {folder / tag}", flush=True)
    dist.barrier()
    if leads and rank > 0:
        with contextlib.suppress(FileNotFoundError):  # unless this machine has a disk of its own, it is done
            publish(unfinished.rename(folder / f"{tag}.{rank}.unfinished"), folder / tag)
    dist.barrier()


def publish(unfinished, folder):
    replaced, latest = folder.with_name(f"{folder.name}.replaced"), folder.with_name("latest.unfinished")
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        folder.rename(replaced)
    unfinished.rename(folder)
    latest.write_text(folder.name)
    latest.rename(folder.with_name("latest"))
    shutil.rmtree(replaced, ignore_errors=True)


def remove_old(folder, keep):
    """All but the `keep` newest checkpoints, with what was converted from them, and what killed jobs left half written
    or half replaced. Called when a newer one is complete."""
    if keep is None:
        return
    if dist.get_rank() == 0:
        remove(Path(folder), keep)
    dist.barrier()
    if dist.get_rank() > 0 and os.environ.get("LOCAL_RANK") == "0":
        with contextlib.suppress(FileNotFoundError):  # of a folder that is shared a machine may see what is gone
            remove(Path(folder), keep)


def remove(folder, keep):
    sweep(folder)  # or a left-over of the same step would be in the way of the name below
    named = {path.read_text().strip() for path in (folder / "latest", folder / "latest_universal") if path.is_file()}
    tags = sorted({file.parent for file in folder.glob("global_step*/*_states.pt")}, key=saved_at, reverse=True)
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
    return max(file.stat().st_mtime for file in folder.glob("*_states.pt"))


def in_memory(engine, args):
    """The mirror that train.py --mirror asks for, or None. Its folder is named after that of the checkpoints;
    MIRROR_ROOT is for several "machines" on one."""
    if not args.mirror:
        return None
    if not args.elastic:
        fail("--mirror is for --elastic: without it nothing looks into the memory at the next start")
    job = str(Path(args.checkpoint_dir).resolve()).strip("/").replace("/", "_")
    try:
        return Mirror(engine, Path(os.environ.get("MIRROR_ROOT", "/dev/shm"), job), args.mirror)
    except ValueError as error:
        fail(f"--mirror: {error}")
