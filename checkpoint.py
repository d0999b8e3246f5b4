"""Saving a checkpoint so that it is never half there, refusing to resume from one that would not go on as if nothing
had happened, and checking what DeepSpeed has restored."""

import contextlib
import itertools
import os
import shutil
import zipfile
from pathlib import Path

import torch
import torch.distributed as dist

import universal
from data import fail


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
    for pattern in ("global_step*.unfinished", "global_step*.replaced"):
        for path in folder.glob(pattern):
            shutil.rmtree(path)


def saved_at(folder):
    return max(file.stat().st_mtime for file in folder.glob("*model_states.pt"))


def whole(file):
    """The file, or a refusal where it is missing or truncated: a container's directory is its end."""
    if not zipfile.is_zipfile(file):
        fail(f"{file} is {'truncated' if file.exists() else 'missing'}: the checkpoint is not whole")
    return file


def open_checkpoint(args, client_state):
    """The model states of the checkpoint to resume from, a dict. Refuses, before any work, one that is not there, not
    whole, of the other kind, cut for another layout, or of another run than client_state describes."""
    folder = Path(args.checkpoint_dir)
    if args.checkpoint_tag is None:
        latest = folder / ("latest_universal" if args.universal_checkpoint else "latest")
        if not latest.is_file():
            fail(f"{latest} does not exist: give --checkpoint_tag")
        args.checkpoint_tag = latest.read_text().strip()
    folder = folder / args.checkpoint_tag
    if not folder.is_dir():  # killed between the two renames of save()? Some rank brings it back.
        with contextlib.suppress(OSError):
            folder.with_name(f"{folder.name}.replaced").rename(folder)
    if not folder.is_dir():
        tags = {file.parent.name for file in folder.parent.glob("*/*model_states.pt")}
        tags = sorted(tag for tag in tags if not tag.endswith((".unfinished", ".replaced")))
        fail(f"{folder} does not exist; in {folder.parent} there is: {', '.join(tags) or 'no checkpoint'}")
    if (folder / "zero").is_dir() != args.universal_checkpoint:
        if args.universal_checkpoint:
            fail(f"{folder} is an ordinary ZeRO checkpoint: leave out --universal_checkpoint, or convert it")
        fail(f"{folder} is a universal checkpoint: add --universal_checkpoint")

    prefix = "zero_pp_rank_{0}_" if (folder / "zero_pp_rank_0_mp_rank_00_model_states.pt").exists() else ""
    states = str(folder / (prefix + "mp_rank_{1:02d}_model_states.pt"))
    checkpoint = torch.load(whole(Path(states.format(0, 0))), mmap=True, weights_only=True)
    saved = checkpoint.get("run") or {}
    check_run(folder, saved, client_state)
    if saved["layout"] != client_state["layout"] and not args.universal_checkpoint:
        fail(
            f"{folder} is cut for {saved['layout']}, and these are {client_state['layout']}. Convert it: python "
            f"ds_to_universal.py --input_folder {folder} --output_folder {folder}_universal; then resume with "
            f"--universal_checkpoint --checkpoint_tag {args.checkpoint_tag}_universal"
        )
    if os.environ["RANK"] == "0":
        dimensions = checkpoint["checkpoint_parallel_dimensions"]
        for mp in range(dimensions["tp_degree"] * dimensions["pp_degree"]):
            shapes = torch.load(whole(Path(states.format(0, mp))), mmap=True, weights_only=True)["param_shapes"]
            if args.universal_checkpoint:
                needed = ("fp32", "exp_avg", "exp_avg_sq", "step")[: 3 if getattr(args, "zero_stage", 1) == 3 else 4]
                for name, state in itertools.product((n for group in shapes for n in group), needed):
                    whole(folder / "zero" / name / f"{state}.pt")
            else:
                for rank in range(checkpoint["dp_world_size"]):
                    whole(Path(states.format(rank, mp)))
                    kind = "bf16_" * (client_state["dtype"] == "bf16")
                    whole(folder / f"{kind}zero_pp_rank_{rank}_mp_rank_{mp:02d}_optim_states.pt")
        if args.universal_checkpoint:
            whole(folder / "zero" / "optimizer_state.pt")
    return checkpoint


def check_run(folder, saved, client_state):
    """Refuse a checkpoint that another run has saved, `saved`, than the one that client_state describes."""
    if saved.get("script") != client_state["script"]:
        writer = saved.get("script", "another script")
        fail(f"{folder} was written by {writer}, whose parameters have other names: {client_state['script']} cannot")
    for name, here in client_state.items():
        # Only dropout is drawn by the micro-batch.
        drawn = client_state["dropout"] or client_state.get("exact")
        if name == "layout" or (name == "train_micro_batch_size_per_gpu" and not drawn):
            continue
        if saved[name] != here:
            fail(f"{name} is {saved[name]} in {folder} and {here} here: the loss would not go on alike")


def go_on(engine, args, client_state):
    """Load the newest whole checkpoint, of whatever layout, if there is one. Returns its step, or 0."""
    path, saved = universal.load_checkpoint(engine, args.checkpoint_dir, missing_ok=True)
    if path is None:
        return 0
    run = saved.get("run") or {}
    check_run(path, run, client_state)
    report(engine, path, run, client_state)
    return run["step"]


def report(engine, folder, run, client_state):
    """Check the engine's step against the checkpoint's, and print what was restored."""
    optimizer = engine.optimizer.optimizer
    counts = {int(state["step"]) for state in optimizer.state.values()}
    assert counts == {run["step"] - engine.skipped_steps}, f"optimizer at {counts}, checkpoint at {run['step']}"
    if dist.get_rank() == 0:
        decay = ", ".join(f"{group['weight_decay']:g}" for group in optimizer.param_groups)
        frozen = sum(not p.requires_grad for p in engine.module.parameters())
        print(f"resumed from {folder}: {run['layout']} then, {client_state['layout']} now")
        print(
            f"  optimizer at step {counts.pop()}, weight decay {decay}, loss scale {engine.optimizer.loss_scale:g}, "
            f"learning rate {engine.get_lr()[0]:.3e}, {frozen} frozen parameters, "
            f"{len(list(engine.module.buffers()))} buffers",
            flush=True,
        )
