"""Refusing to resume from a checkpoint that would not go on as if nothing had happened, and checking what DeepSpeed
has restored."""

import contextlib
import itertools
import os
import zipfile
from pathlib import Path

import torch
import torch.distributed as dist

import universal
from data import fail
from universal import mirror

# What a resumed run must have in common with the checkpoint's, or its loss could not go on as if nothing had happened.
TRACKED = ("n_layer", "n_head", "n_embd", "seq_len", "dropout", "seed", "train_batch_size")
TRACKED += ("train_micro_batch_size_per_gpu", "dtype", "lr", "warmup_steps", "steps", "exact")


def find_checkpoint(args):
    """The folder of the tag, or of the one that `latest` names; sets args.checkpoint_tag."""
    folder = Path(args.checkpoint_dir)
    if args.checkpoint_tag is None:
        latest = folder / ("latest_universal" if args.universal_checkpoint else "latest")
        if not latest.is_file():
            fail(f"{latest} does not exist: convert a checkpoint first, or give --checkpoint_tag")
        args.checkpoint_tag = latest.read_text().strip()
    folder = folder / args.checkpoint_tag
    if not folder.is_dir():  # killed between the two renames of save()? Some rank brings it back.
        with contextlib.suppress(OSError):
            folder.with_name(f"{folder.name}.replaced").rename(folder)
    if not folder.is_dir():
        tags = {file.parent.name for file in folder.parent.glob("*/*model_states.pt")}
        tags = sorted(tag for tag in tags if not tag.endswith((".unfinished", ".replaced")))
        fail(f"{folder} does not exist; in {folder.parent} there is: {', '.join(tags) or 'no checkpoint'}")
    return folder


def check_kind(folder, wanted):
    universal_checkpoint = (folder / "zero").is_dir()
    if universal_checkpoint and not wanted:
        fail(f"{folder} is a universal checkpoint: add --universal_checkpoint")
    if wanted and not universal_checkpoint:
        fail(f"{folder} is an ordinary ZeRO checkpoint: leave out --universal_checkpoint, or convert it")


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


def model_states(folder, rank, mp):
    """The file of a rank's model states. ZeRO-3 writes one for each rank, the other stages one for all of them."""
    name = f"mp_rank_{mp:02d}_model_states.pt"
    of_each_rank = (folder / "zero_pp_rank_0_mp_rank_00_model_states.pt").exists()
    return folder / (f"zero_pp_rank_{rank}_{name}" if of_each_rank else name)


def whole(file):
    """The file, or a refusal where it is missing or truncated: a container's directory is its end."""
    if not zipfile.is_zipfile(file):
        fail(f"{file} is {'truncated' if file.exists() else 'missing'}: the checkpoint is not whole")
    return file


def opened(file):
    return torch.load(whole(file), map_location="cpu", mmap=True, weights_only=True)  # a GPU may have saved it


def check_files(folder, checkpoint, args):
    """Every file that a resume reads is whole. checkpoint: the first model states."""
    dimensions = checkpoint["checkpoint_parallel_dimensions"]
    for mp in range(dimensions["tp_degree"] * dimensions["pp_degree"]):
        shapes = opened(model_states(folder, 0, mp))["param_shapes"]
        if args.universal_checkpoint:
            needed = ("fp32", "exp_avg", "exp_avg_sq", "step")[: 3 if getattr(args, "zero_stage", 1) == 3 else 4]
            for name, state in itertools.product((n for group in shapes for n in group), needed):
                whole(folder / "zero" / name / f"{state}.pt")
        else:
            for rank in range(checkpoint["dp_world_size"]):
                whole(model_states(folder, rank, mp))
                kind = "bf16_" if args.dtype == "bf16" else ""
                whole(folder / f"{kind}zero_pp_rank_{rank}_mp_rank_{mp:02d}_optim_states.pt")
    if args.universal_checkpoint:
        whole(folder / "zero" / "optimizer_state.pt")


def open_checkpoint(args, client_state):
    """The model states of the checkpoint to resume from, a dict. Refuses, before any work, one that is not there, not
    whole, of the other kind, cut for another layout, or of another run than client_state describes."""
    folder = find_checkpoint(args)
    check_kind(folder, args.universal_checkpoint)
    checkpoint = opened(model_states(folder, 0, 0))
    saved = checkpoint.get("run") or {}
    check_run(folder, saved, client_state)
    if saved["layout"] != client_state["layout"] and not args.universal_checkpoint:
        fail(
            f"{folder} is cut for {saved['layout']}, and these are {client_state['layout']}. Convert it: python "
            f"ds_to_universal.py --input_folder {folder} --output_folder {folder}_universal; then resume with "
            f"--universal_checkpoint --checkpoint_tag {args.checkpoint_tag}_universal"
        )
    if os.environ["RANK"] == "0":
        check_files(folder, checkpoint, args)
    return checkpoint


def go_on(engine, args, client_state, memory=None):
    """Load the newest whole checkpoint, of whatever layout, if there is one, in the memory of the machines or on the
    disk. Returns what it says of the run, or {"step": 0}."""
    folder = (memory or mirror).gather(args.checkpoint_dir)
    path, saved = universal.load_checkpoint(engine, folder, missing_ok=True)
    if path is None:
        return {"step": 0}
    run = saved.get("run") or {}
    check_run(path, run, client_state)
    report(engine, path, run, client_state)
    return run


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
