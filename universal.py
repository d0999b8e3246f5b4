# SPDX-License-Identifier: MIT
"""Resume a DeepSpeed training on any number of ranks and at any ZeRO stage, from its checkpoint as it is.

    import universal
    path, client_state = universal.load_checkpoint(engine, "checkpoints")   # instead of engine.load_checkpoint(...)

or, where a framework calls engine.load_checkpoint() itself, one line at the top of the script:

    universal.install()

DeepSpeed's loader restores everything, but wants the very shard that this rank has saved. So every rank makes up, in
memory, the shard that it would have saved itself: from the byte ranges of the shards that are there, or of a universal
checkpoint. DeepSpeed takes it for the content of a file. Nothing is converted or written, no config flag is needed, and
any optimizer is restored. On the ranks that saved it is the same: there is one way to load, and it looks at what it
loads. The steps stand below: find, describe, read, make up the shard, load.

That is for data parallelism. Tensor and pipeline parallelism change what a parameter is: such a checkpoint is converted
first, and DeepSpeed's universal loader reads it; mend() then restores what that loader leaves out.

Needs Python 3.10, torch, DeepSpeed, and ds_to_universal.py beside it.
"""

import contextlib
import copy
import datetime
import io
import itertools
import math
import os
import socket
import traceback
import types
import warnings
import zipfile
import zlib
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import bwc

import old_converter as ds
from old_converter import CheckpointError

__version__ = "1.0"  # of the universal checkpoint tutorial, where this file is explained and tested
TIMEOUT = 1800  # seconds that a rank waits for another one, which may be reading
OPTIMIZERS = ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3", "BF16_Optimizer", "DeepSpeedZeRoOffload")
KINDS = "Float:float32 Double:float64 Half:float16 BFloat16:bfloat16 Long:int64 Int:int32 Short:int16 Char:int8 "
KINDS += "Byte:uint8 Bool:bool ComplexFloat:complex64 ComplexDouble:complex128"
DTYPES = {f"{kind}Storage": getattr(torch, name) for kind, name in (pair.split(":") for pair in KINDS.split())}
SLICES = ("base_optimizer_state", "single_partition_of_fp32_groups")  # of rank 0 alone
SLICES += ("optimizer_state_dict", "fp32_flat_groups", "param_slice_mappings")
# What a group of parameters says of how a step is computed, and not of what it computes.
FLAGS = ["params", "step", "initial_lr", "foreach", "fused", "capturable", "differentiable", "maximize"]
FLAGS += ["decoupled_weight_decay"]
ALONE = "; load_optimizer_states=False goes on with a fresh optimizer"
deepspeed_load = deepspeed.DeepSpeedEngine.load_checkpoint

# -----------------------------------------------------------------------------
# 1. what others call


def load_checkpoint(
    engine, load_dir, tag=None, load_module_strict=True, load_optimizer_states=True, load_lr_scheduler_states=True,
    load_module_only=False, custom_load_fn=None, missing_ok=False, timeout=TIMEOUT,
):  # fmt: skip
    """engine.load_checkpoint() for any number of ranks, any ZeRO stage, ordinary and universal checkpoints.

    Takes what DeepSpeed's takes and returns (folder of the checkpoint, client state). On another number of ranks than
    the checkpoint's, the client state is that of rank 0. tag None: the tag that `latest` names, or a later one, if it
    is whole. load_module_strict=False: what is new here keeps its weights and begins with a fresh optimizer state, what
    is gone is left out, and a line names both. missing_ok: return (None, {}) where load_dir holds no checkpoint at all,
    not even a damaged one. timeout: seconds that a rank waits for another one.
    Raises CheckpointError, on all ranks, when there is no such checkpoint, or it is damaged, not whole, or of another
    model or optimizer: it never goes on with what was initialized. The engine may then be half loaded; do not train it.
    """
    options = dict(load_module_strict=load_module_strict, load_optimizer_states=load_optimizer_states)
    options |= dict(load_lr_scheduler_states=load_lr_scheduler_states, load_module_only=load_module_only)
    with conversation(timeout) as share:
        found = None
        with together(share):
            if load_dir is None or custom_load_fn:
                problem = "load_dir is None" if load_dir is None else "custom_load_fn: weights come from the shards"
                raise CheckpointError(f"load_checkpoint() cannot load with {problem}")
            if dist.get_rank() == 0:
                found = find(Path(load_dir), tag, missing_ok)
            if found:
                compare_batch(engine, found[1])
                found += (choose(engine, found[1], options),)
        found = from_rank_0(found, share)
        if found is None:
            return None, {}
        folder, checkpoint, how = found
        check_same_folder(folder, share)
        discard_gradients(engine)
        folder, client_state = load_as(engine, folder, checkpoint, how, options, share)
    if not load_module_only:  # DeepSpeed does not save it, and counts the micro-batches of a step by it
        engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()
    return str(folder), client_state


def mend(engine, folder):
    """Restore what DeepSpeed's universal loader leaves out of the universal checkpoint `folder`, after it has loaded
    it: hyper-parameters and step counts of the parameter groups, optimizer states other than Adam's, frozen
    parameters, buffers, the count of micro-batches. Raises CheckpointError."""
    with conversation(TIMEOUT) as share:
        checkpoint, reader, optimizer = describe(Path(folder), share), Reader(), engine.optimizer.optimizer
        with together(share):
            # ZeRO-3 gives every group the hyper-parameters of the first.
            for group, saved in zip(optimizer.param_groups, checkpoint.groups, strict=True):
                group.update({key: value for key, value in saved.items() if key != "params"})
            held = layout(engine)
            for flat, _, names, parts in held:
                state, saved = optimizer.state[flat], checkpoint.states[names[0]]
                # ZeRO-3 lets all groups share one step count, which each group advances; also where there was none.
                state.pop("step", None)
                state.update(copy.deepcopy(checkpoint.other[names[0]]))
                for key in saved.keys() - state.keys() - {"fp32"}:
                    if engine.mp_world_size > 1:
                        raise CheckpointError(f"DeepSpeed's universal loader does not restore {key} of {names[0]}")
                    state[key] = torch.zeros(flat.numel(), dtype=DTYPES[saved[key][0]])
                    for name, start, at, numel in parts:
                        reader.fill(state[key][at : at + numel], checkpoint.states[name][key][1], start)
                    state[key] = state[key].to(flat.device)
        # Frozen parameters and buffers are in no optimizer, and the loader looks nowhere else.
        keep(engine, checkpoint, reader, held, False, share)
        reader.check(share)
    engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()


def install():
    """Let whatever calls engine.load_checkpoint(), Hugging Face's Trainer say, call load_checkpoint() of this file.
    As with DeepSpeed's, a first start finds nothing and goes on: an absent or empty folder, and no tag."""

    def load_or_start(engine, load_dir, tag=None, *args, **options):
        return load_checkpoint(engine, load_dir, tag, *args, **({"missing_ok": True} | options))

    deepspeed.DeepSpeedEngine.load_checkpoint = load_or_start


# -----------------------------------------------------------------------------
# 2. find: which checkpoint


def named_by_latest(folder):
    """The tag that `latest` names, or else `latest_universal`; "" without."""
    files = [folder / "latest", folder / "latest_universal"]
    named = [os.fsdecode(path.read_bytes()).strip().replace("\0", "?") for path in files if path.is_file()]
    return named[0] if named else ""


def tags(folder):
    """{tag: file of model states} of the checkpoints in a folder, whole or not. A tag like epoch1/step5 is a folder in
    a folder: those beside the one that `latest` names are found."""
    found = {}
    for place in dict.fromkeys([folder, (folder / named_by_latest(folder)).parent]):
        for path in sorted(place.glob("*/*mp_rank_00_model_states.pt")):
            name = path.parent.name
            if not name.startswith(".") and not name.endswith((".unfinished", ".replaced")):
                found[os.path.relpath(path.parent, folder)] = path
    return found


def find(folder, tag, missing_ok):
    """(folder, Checkpoint) of that tag, or of the newest that is whole. None where there is nothing and may be."""
    known, named = tags(folder), named_by_latest(folder)
    if tag is not None:
        if (folder / str(tag)).is_dir():
            return folder / str(tag), Checkpoint(folder / str(tag))
        raise CheckpointError(f"{folder / str(tag)} does not exist; in {folder} there is: {', '.join(sorted(known))}")
    if missing_ok and not known and not named:
        return say(f"nothing was loaded: {folder} holds no checkpoint")
    steps, written = {}, {}
    for name, path in known.items():
        try:
            steps[name] = int(ds.load(path, True)["global_steps"])
            written[name] = path.stat().st_mtime
        except Exception as error:
            say(f"{name} is passed over: {type(error).__name__}: {error}")
    order = sorted(steps, key=lambda name: (steps[name], not (folder / name / "zero").is_dir()), reverse=True)
    if named in written:
        # A job killed before it wrote `latest` leaves a later one. What an earlier run left is older on the disk.
        first = [t for t in order if steps[t] > steps[named] and written[t] > written[named]] + [named]
        order = first + [name for name in order if name not in first]
    elif named:
        say(f"`latest` names {named}, which is not there")
    for name in order:
        try:
            return folder / name, Checkpoint(folder / name)
        except Exception as error:
            say(f"{name} is not whole, and is passed over: {error}")
    raise CheckpointError(f"{folder} holds no checkpoint that is whole")


# -----------------------------------------------------------------------------
# 3. describe: rank 0 opens every file, and tells the others what is where


class Checkpoint:
    """A checkpoint without its data, small enough to send to all ranks.

    states: {parameter: {state: (kind, pieces)}}, fp32 among them. shape: {parameter: shape}. group: {parameter:
    parameter group}. other: {parameter: what its optimizer state has beside tensors of its size, a step count say}.
    flats: [[parameter]] of ZeRO's flat tensors. groups: their hyper-parameters. bound: why its optimizer state is for
    the ranks that saved it alone, or None. kept: {name: description} of the module's other tensors; extra: of what
    else its state has, the value. model: the model states without the module. saved: rank 0's optimizer state without
    slices. ranks: None where any number of them may load; 0 without ZeRO.
    """

    def __init__(self, folder):
        files = sorted(folder.glob("*mp_rank_00_model_states.pt"))
        if not files:
            raise CheckpointError(f"{folder} holds no *_model_states.pt: it is not a checkpoint of DeepSpeed")
        self.universal, self.stage, self.saved, self.bound = (folder / "zero").is_dir(), 0, {}, None
        self.states, self.shape, self.other, self.ranks, self.model_parallel = {}, {}, {}, None, 1
        described = ds.load(files[0], True)
        with ds.blame(files[0]):
            self.model = torch_load(files[0])
            module = self.model["module"]
            if not self.universal and self.model["optimizer"] and not list(folder.glob("*_optim_states.pt")):
                self.ranks, self.flats, self.groups, self.group = 0, [], [], {}
            else:
                self.flats = [list(names) for names in self.model["param_shapes"]]
        if self.ranks != 0:
            with ds.blame(folder):
                described = self.read_universal(folder) if self.universal else self.read_shards(folder, module)
                group_of = {flat: i for i, group in enumerate(self.groups) for flat in group["params"]}
                self.group = {name: group_of.get(flat) for flat, names in enumerate(self.flats) for name in names}
        self.saved = {key: value for key, value in self.saved.items() if key not in SLICES}
        self.take(described, self.model)

    def take(self, described, model):
        """What the model states hold beside the weights that the optimizer has."""
        module, frozen = described["module"] or {}, described.get("frozen_param_shapes") or {}
        trained = {*self.states, *(described.get("shared_params") or {})}
        self.kept = {name: tensor for name, tensor in module.items() if name not in trained}
        known = {name for name, t in self.kept.items() if isinstance(t, ds.Tensor) and t.storage.kind in DTYPES}
        self.extra = {name: model["module"][name] for name in self.kept if name not in known}
        self.kept = {name: self.kept[name] for name in known}
        for name in self.kept.keys() & frozen.keys():  # of a frozen one DeepSpeed's converter has rank 0's part
            if tuple(self.kept[name].size) != tuple(frozen[name]):
                del self.kept[name]
        self.parameters, self.buffers = {*frozen}, {*(described.get("buffer_names") or ())}
        data = ("module", "optimizer", "frozen_param_fragments")
        self.model = {key: value for key, value in model.items() if key not in data}

    def read_shards(self, folder, module):
        shards = ds.find_shards(folder)
        self.model_parallel, self.ranks = len(shards), len(shards[0])
        with ThreadPoolExecutor(8) as pool, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # at what conversion would leave out, which is in `other` here
            for mp in sorted(shards, reverse=True):  # all of them have to be whole; the first one is what is described
                described, _, parameters = ds.read_data_parallel(folder, mp, shards[mp], pool, True, set())
        self.saved, self.bf16 = torch_load(shards[0][0])["optimizer_state_dict"], shards[0][0].name.startswith("bf16_")
        self.stage, base = int(self.saved.get("zero_stage", 0)), ds.base_optimizer(self.saved)
        self.groups = base["param_groups"]
        for flat, names in enumerate(self.flats):
            for name in names:
                self.states[name], self.shape[name] = parameters[name]["states"], parameters[name]["shape"]
                own = {k: v for k, v in base["state"].get(flat, {}).items() if k not in self.states[name]}
                self.other[name] = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in own.items()}
                whole = [k for k, v in own.items() if isinstance(v, torch.Tensor) and v.numel() > 1]
                if whole:  # Muon's momentum at ZeRO-1 and 2
                    self.bound = f"{whole[0]} of {name} is not cut like the weights"
                self.bound = parameters[name].get("apart") or self.bound
        counted = {ds.number(p["step"]) for p in parameters.values()} - {None}
        steps = self.model["global_steps"] - self.model["skipped_steps"]
        if counted - {steps}:  # an optimizer may have been started anew in mid-run
            self.check_weights(folder, module or {})
            say(f"{folder} is of step {steps}, its optimizer has counted {sorted(counted)}")
        return described

    def check_weights(self, folder, module):
        """The model states (at ZeRO-1/2 they hold the weights) and the shards are of one step."""
        for name in self.states.keys() & module.keys():
            weight = module[name].detach().flatten()[:1024]
            kind, pieces = self.states[name]["fp32"]
            Reader().fill(fp32 := torch.zeros(weight.numel(), dtype=DTYPES[kind]), pieces)
            if not same(fp32.to(weight.dtype), weight):
                raise CheckpointError(f"{folder}: the model states and the optimizer's shards are of different steps")

    def read_universal(self, folder):
        files = sorted(folder.glob("mp_rank_*_model_states.pt")) or sorted(folder.glob("*_model_states.pt"))
        models = [ds.load(path, True) for path in files]  # also of other pipeline stages
        self.saved, common = torch_load(folder / "zero" / "optimizer_state.pt"), {}
        if "fp32_flat_groups" in self.saved:  # by DeepSpeed's converter at ZeRO-3: rank 0's shard, one step count
            state = self.saved["optimizer_state_dict"]["state"][0]
            common = {"step": copy.copy(state["step"])} if "step" in state else {}
        self.groups = self.saved.get("param_groups") or self.saved["optimizer_state_dict"]["param_groups"]
        for name in {name for model in models for names in model["param_shapes"] for name in names}:
            tensors = {path.stem: path for path in (folder / "zero" / name).glob("*.pt")}
            step = tensors.pop("step", None)
            self.other[name] = {"step": torch_load(step)} if step else common
            for state, path in tensors.items():
                content = ds.load(path, True)  # DeepSpeed's converter writes a bare tensor at ZeRO-3
                tensors[state] = content["param"] if isinstance(content, dict) else content
            if "fp32" not in tensors:
                raise CheckpointError(f"{folder / 'zero' / name / 'fp32.pt'} is missing")
            self.shape[name] = tensors["fp32"].size
            self.states[name] = {key: (t.storage.kind, ds.Ranges(ds.cut(t))) for key, t in tensors.items()}
        return models[0]


def torch_load(path):
    return torch.load(path, mmap=True, map_location="cpu", weights_only=False)


# -----------------------------------------------------------------------------
# 4. read: every rank its own bytes, once; all together compare them with the checksums of the files


class Reader:
    def __init__(self):
        self.records, self.problem = {}, None

    def fill(self, tensor, pieces, start=0):
        """Read elements from `start` on, as many as the tensor on the CPU has, into its memory."""
        buffer = memoryview(tensor.view(torch.uint8).numpy()) if tensor.numel() else b""
        for record, first, nbytes in pieces.cut(start * tensor.element_size(), len(buffer)):
            part, buffer, done = buffer[:nbytes], buffer[nbytes:], 0
            while done < nbytes:
                done += ds.read_into(part[done:], record, first + done)
            if isinstance(record, ds.Record):
                self.records[str(record.path), record.offset] = record
                record.seen.extend((first, nbytes, zlib.crc32(part)))

    def whole(self, described, share):
        """A tensor in its shape and strides, that rank 0 reads and sends to all. share None: every rank reads it."""
        kind, pieces = described.storage.kind, ds.Ranges(described.storage.pieces)
        data = torch.zeros(pieces.nbytes // ds.ELEMENT_SIZE[kind], dtype=DTYPES[kind])
        try:
            if not share or dist.get_rank() == 0:
                self.fill(data, pieces)
        except Exception as error:  # the others wait for this tensor
            self.problem = error
        if share and data.numel():
            with answers():
                dist.broadcast(data.view(torch.uint8), 0, group=share.group)
        return data.as_strided(described.size, described.stride, described.offset)

    def check(self, share):
        """Raise CheckpointError, on all ranks, where the ranks together have read what no checksum confirms."""
        everyone = share({key: record.seen for key, record in self.records.items()})
        with together(share):
            for key, record in self.records.items():
                readers = [rank for rank, seen in enumerate(everyone) if key in seen]
                if readers[0] == dist.get_rank():
                    record.seen = array("Q", itertools.chain(*(everyone[rank][key] for rank in readers)))
                    ds.check_record(record)


# -----------------------------------------------------------------------------
# 5. make up the shard that this rank would have saved


def layout(engine):
    """What this rank holds: [(flat fp32 tensor, its parameter group, names, parts)]. A part is (name, start in the
    parameter, start in the tensor, numel)."""
    optimizer, name_of, found = engine.optimizer, engine.param_names, []
    rank = dist.get_rank(optimizer.dp_process_group)
    if type(optimizer).__name__ == "DeepSpeedZeRoOffload":  # ZeRO-3 without an optimizer
        return []
    if engine.zero_optimization_stage() == 3:  # every parameter is cut by itself
        flats, groups = optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups
        for i, (flat, params) in enumerate(zip(flats, groups, strict=True)):
            parts, at = [], 0
            for p in params:
                share = p.partition_numel()
                parts.append((name_of[p], rank * share, at, max(0, min(share, p.ds_numel - rank * share))))
                at += share
            found.append((flat, optimizer.sub_group_to_group_id[i], [name_of[p] for p in params], parts))
    else:  # a group's parameters lie end to end, and the whole is cut
        groups = getattr(optimizer, "round_robin_bit16_groups", None) or optimizer.bf16_groups
        paddings = getattr(optimizer, "round_robin_bit16_padding", None) or [[0] * len(params) for params in groups]
        for i, params in enumerate(groups):
            (flat,), parts, at = optimizer.optimizer.param_groups[i]["params"], [], 0
            begin = rank * flat.numel()
            for p, padding in zip(params, paddings[i], strict=True):
                first, last = max(at, begin), min(at + p.numel(), begin + flat.numel())
                if first < last:
                    parts.append((name_of[p], first - at, first - begin, last - first))
                at += p.numel() + padding
            found.append((flat, i, [name_of[p] for p in params], parts))
    return found


def compare(engine, checkpoint, held, strict):
    """Raise CheckpointError where the engine's parameters are not the checkpoint's, or not where layout() says."""
    group_of = {name: group for _, group, names, _ in held for name in names}
    parameters = {engine.param_names[p]: p for p in engine.module.parameters() if p in engine.param_names}
    where = f"the checkpoint of step {checkpoint.model['global_steps']}"
    if held:
        agree([n for n in group_of if n not in checkpoint.states], [n for n in checkpoint.states if n not in group_of],
              "trained", where, strict)  # fmt: skip
    for name in checkpoint.states.keys() & parameters.keys():
        shape, saved = (tuple(s) for s in (shape_of(parameters[name]), checkpoint.shape[name]))
        if shape != saved and (len(saved) != 1 or saved[0] != math.prod(shape)):  # DeepSpeed's converter may flatten it
            raise CheckpointError(f"{name} is {shape} here, and {saved} in {where}")
        group, saved = group_of.get(name), checkpoint.group[name]
        if group is not None and group != saved:
            raise CheckpointError(f"{name} is in parameter group {group} here, {saved} in {where}")
    for flat, _, _, parts in held:
        for name, start, at, numel in parts:
            here = weights(parameters[name], start, numel)
            there = flat[at : at + numel].to(here)
            if there.numel() != numel or not same(here, there):
                raise CheckpointError(
                    f"DeepSpeed {deepspeed.__version__} does not hold {name} where this file expects it: elements "
                    f"{start} to {start + numel} are {here[:3].tolist()}... in the model, {there[:3].tolist()}... there"
                )


def compare_optimizer(engine, checkpoint):
    """Raise CheckpointError where the checkpoint is of another kind of optimizer, or lacks its states."""
    here, there = engine.optimizer.optimizer.param_groups, checkpoint.groups
    keys = [{key for group in groups for key in group if key not in FLAGS} for groups in (here, there)]
    for names in keys:  # two makes of Adam
        names |= {"amsgrad"} if "bias_correction" in names else set()
        names -= {"bias_correction"}
    if keys[1] and keys[0] != keys[1]:
        ours, theirs = (some(sorted(a - b)) if a - b else "nothing" for a, b in (keys, keys[::-1]))
        raise CheckpointError(f"another optimizer: {ours} here alone, {theirs} in the checkpoint alone" + ALONE)
    if checkpoint.saved.get("left_out"):
        raise CheckpointError(f"it was converted without {', '.join(checkpoint.saved['left_out'])}" + ALONE)
    steps = checkpoint.model["global_steps"] - checkpoint.model["skipped_steps"]
    stateful = any("betas" in group or group.get("momentum") for group in [*here, *there])
    for name, states in checkpoint.states.items():
        if stateful and states.keys() == {"fp32"} and math.prod(checkpoint.shape[name]) and steps > 0:
            raise CheckpointError(f"the checkpoint holds no optimizer state of {name}" + ALONE)


def make_shard(engine, checkpoint, held, reader, states):
    """What this rank would have saved, had these ranks at this stage written the checkpoint. states: with those of the
    optimizer, not only fp32."""
    optimizer, fp32, state = engine.optimizer, [], {}
    parameters = {engine.param_names[p]: p for p in engine.module.parameters() if p in engine.param_names}
    groups = [group | {"params": []} for group in optimizer.optimizer.param_groups]
    for group, saved in zip(groups, checkpoint.groups, strict=False):
        group |= saved | {"params": []}
    for i, (flat, group, names, parts) in enumerate(held):
        known = [name for name in names if name in checkpoint.states]
        found, tensors = checkpoint.states[known[0]] if known else {"fp32": ("FloatStorage",)}, {}
        for key in found if states else found.keys() & {"fp32"}:
            kind = DTYPES[found[key][0]]
            in_place = key == "fp32" and flat.device.type == "cpu" and flat.dtype == kind
            tensors[key] = flat.detach() if in_place else torch.zeros(flat.numel(), dtype=kind)
        for name, start, at, numel in parts:
            if name not in checkpoint.states:  # new here, or frozen there: a fresh state
                value = weights(parameters[name], start, numel) if name in checkpoint.kept else flat[at : at + numel]
                tensors["fp32"][at : at + numel] = value.detach()
                continue
            if checkpoint.states[name].keys() != found.keys():
                raise CheckpointError(f"{name} has other optimizer states than {known[0]} of the same group")
            for key, tensor in tensors.items():
                reader.fill(tensor[at : at + numel], checkpoint.states[name][key][1], start)
        fp32.append(tensors.pop("fp32"))
        groups[group]["params"].append(i)
        state[i] = tensors | (copy.deepcopy(checkpoint.other[known[0]]) if known else {})
    base = {"state": {i: own for i, own in state.items() if own}, "param_groups": groups}
    shard = {"optimizer_state_dict": base, "fp32_flat_groups": fp32}  # ZeRO-3's names, then those of the others
    shard |= {"base_optimizer_state": base, "single_partition_of_fp32_groups": fp32}
    shard |= {"param_alignment_paddings": getattr(optimizer, "round_robin_bit16_padding", None)}
    for key in ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad"):
        own = getattr(optimizer, key, None)
        saved = checkpoint.saved.get(key, own)  # the scaler of another precision is of no use
        shard[key] = saved if type(saved) is type(own) else own
    return shard | {"ds_version": deepspeed.__version__}


def keep(engine, checkpoint, reader, held, strict, share, own=False):
    """Whatever of the module's state the optimizer does not restore: frozen parameters, buffers, and what a module adds
    to its state. own: buffers are in a file of this rank's own; else rank 0 reads one after the other for all."""
    module, where = engine.module, "the checkpoint"
    tensors = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))
    tensors |= buffers
    trained = {name for _, _, names, _ in held for name in names} & checkpoint.states.keys()
    saved = checkpoint.kept | {
        name: ds.whole(kind, pieces, checkpoint.shape[name])
        for name, (kind, pieces) in ((n, s["fp32"]) for n, s in checkpoint.states.items() if n not in trained)
    }
    listed = checkpoint.parameters | checkpoint.buffers | checkpoint.states.keys()
    added = [name for name in saved if name not in tensors and name not in listed]
    with together(share):
        restored = {id(tensors[name]) for name in (*trained, *saved, *checkpoint.extra) if name in tensors}
        lost = [name for name in module.state_dict() if name not in checkpoint.extra and name not in added]
        lost = [
            n for n in lost if n not in tensors or id(tensors[n]) not in restored and math.prod(shape_of(tensors[n]))
        ]
        gone = [name for name in checkpoint.kept if name not in tensors and name in listed]
        agree([n for n in lost if n not in {m for _, _, names, _ in held for m in names}], gone, "frozen or a buffer",
              where, strict)  # fmt: skip
        for name in saved.keys() & tensors.keys():
            here, there = tuple(shape_of(tensors[name])), tuple(saved[name].size)
            if here != there and (len(there) != 1 or there[0] != math.prod(here)):
                raise CheckpointError(f"{name} is {here} here, and {there} in the checkpoint")
    extra = checkpoint.extra | {name: reader.whole(saved[name], None if own else share) for name in added}
    for name in {id(tensors[name]): name for name in saved if name in tensors}.values():  # some have two names
        target = tensors[name]
        data = reader.whole(saved[name], None if own and name in buffers else share)
        cut = [target] if hasattr(target, "ds_id") else []
        first = dist.get_global_rank(target.ds_process_group, 0) if cut else None
        with torch.no_grad(), deepspeed.zero.GatheredParameters(cut, modifier_rank=first, enabled=bool(cut)):
            try:
                target.data.copy_(data.view(target.shape))
            except RuntimeError as error:  # a buffer that was expanded
                reader.problem = CheckpointError(f"{name}: {error}")
    with together(share):
        if reader.problem:
            raise reader.problem
        unknown = module.load_state_dict(extra, strict=False).unexpected_keys if extra else []
        agree([], unknown, "in the module's state", where, strict)


# -----------------------------------------------------------------------------
# 6. load


def plain(engine):
    """Whether layout() describes this engine: data parallelism alone, and an optimizer of DeepSpeed that it knows."""
    odd = isinstance(engine.module, deepspeed.pipe.PipelineModule) or engine.mp_world_size > 1
    odd = odd or engine.has_moe_layers or engine.zero_nvme_offload_optimizer()
    return not odd and type(engine.optimizer).__name__ in OPTIMIZERS


def choose(engine, checkpoint, options):
    """How to load: "reshard"; "convert" another layout before; "universal", by DeepSpeed's universal loader; "own", by
    DeepSpeed's ordinary one, what layout() does not describe and was saved by just these ranks."""
    zero, stage = checkpoint.ranks != 0, engine.zero_optimization_stage()
    states = options["load_optimizer_states"] and not options["load_module_only"]
    if zero != bool(stage):
        saved, stages = ("with", "1, 2 or 3") if zero else ("without", "0")
        raise CheckpointError(f"the checkpoint was saved {saved} ZeRO: an engine at stage {stages} can load it")
    if not zero:
        return "own"
    simple = plain(engine) and (checkpoint.universal or checkpoint.model_parallel == 1)
    if simple and not (states and checkpoint.bound):
        return "reshard"
    if not checkpoint.universal:
        stage = 0 if type(engine.optimizer).__name__ == "BF16_Optimizer" else stage
        there = [checkpoint.stage, checkpoint.ranks, checkpoint.bf16]
        here = [stage, engine.seq_dp_world_size, engine.bfloat16_enabled()]
        if degrees := checkpoint.model.get("checkpoint_parallel_dimensions"):
            there += [degrees["tp_degree"], degrees["pp_degree"]]
            here += [
                bwc.bwc_tensor_model_parallel_world_size(engine.mpu),
                bwc.bwc_pipeline_parallel_world_size(engine.mpu),
            ]
        if simple:
            held = layout(engine)
            compare(engine, checkpoint, held, True)
            there += [checkpoint.flats, checkpoint.saved.get("param_alignment_paddings")]
            here += [[names for _, _, names, _ in held], getattr(engine.optimizer, "round_robin_bit16_padding", None)]
        if there == here:
            if stage == 3 and not states:
                raise CheckpointError("DeepSpeed loads no weights alone of such an engine at ZeRO-3")
            return "own"
    if simple:
        raise CheckpointError(f"{checkpoint.bound}: it loads on its own ranks only" + ALONE)
    return "universal" if checkpoint.universal else "convert"


def load_as(engine, folder, checkpoint, how, options, share):
    """(folder, client state): the checkpoint is in the engine."""
    match how:
        case "reshard":
            return folder, reshard(engine, checkpoint, folder, options, share)
        case "convert":
            folder = convert(folder, share)
            checkpoint = describe(folder, share)
            return load_as(engine, folder, checkpoint, "reshard" if plain(engine) else "universal", options, share)
    with together(share):
        check_files(folder)
    if hasattr(engine.optimizer, "_clear_fp32_optimizer_param_groups"):  # filled for loading; Adagrad's never emptied
        engine.optimizer._clear_fp32_optimizer_param_groups()
    with mock.patch.multiple(engine, load_universal_checkpoint=lambda: how == "universal"):
        path, client_state = deepspeed_load(engine, str(folder.parent), folder.name, **options)
    if path is None:
        raise CheckpointError(f"DeepSpeed loaded nothing of {folder}")
    if how == "universal":
        mend(engine, folder)
    return folder, client_state


def reshard(engine, checkpoint, folder, options, share):
    """DeepSpeed's ordinary loader, with the shard made up in the place of the file. Returns the client state."""
    optimizer, reader, strict = engine.optimizer, Reader(), options["load_module_strict"]
    rank, ranks = dist.get_rank(optimizer.dp_process_group), dist.get_world_size(optimizer.dp_process_group)
    own = checkpoint.stage == 3 and checkpoint.ranks == ranks  # a file of model states for every rank
    with together(share):
        if engine.zero_optimization_stage() == 3:
            getattr(optimizer, "checkpoint_event_prologue", getattr(optimizer, "partition_all_parameters", None))()
        held = layout(engine)
        states = options["load_optimizer_states"] and not options["load_module_only"] and bool(held)
        compare(engine, checkpoint, held, strict)
        if states:
            compare_optimizer(engine, checkpoint)
        if own:
            path = folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
            whole = checkpoint.kept
            checkpoint.take(ds.load(path, True), torch_load(path))
            mine = checkpoint.kept.keys() - checkpoint.parameters  # of a frozen one every file has a part
            checkpoint.kept = {name: checkpoint.kept[name] if name in mine else whole[name] for name in whole}
    try:
        keep(engine, checkpoint, reader, held, strict, share, own)
        model = checkpoint.model | {"module": {}, "dp_world_size": ranks, "mp_world_size": engine.mp_world_size}
        patch = dict(checkpoint_engine=types.SimpleNamespace(load=lambda *_, **__: model))
        patch |= dict(_get_all_ckpt_names=lambda *_: [str(folder)], load_module_state_dict=lambda *_, **__: None)
        with together(share), mock.patch.multiple(engine, **patch, load_universal_checkpoint=lambda: False):
            more = options | {"load_optimizer_states": True}  # without, it would look for other files
            _, client_state = engine._load_checkpoint(str(folder.parent), folder.name, **more)
            if held and "lr" not in checkpoint.groups[0]:
                say("elastic_checkpoint saves no hyper-parameters: the engine's own are used, and the scheduler's rate")
                steered = getattr(engine.lr_scheduler, "optimizer", None) is optimizer.optimizer
                rates = getattr(engine.lr_scheduler, "_last_lr", []) if steered else []
                for group, rate in zip(optimizer.param_groups, rates, strict=False):
                    group["lr"] = rate
            shard = make_shard(engine, checkpoint, held, reader, states) if held else None
        reader.check(share)
        with together(share):
            if (
                held and engine.zero_optimization_stage() == 3
            ):  # filled for loading; those of Adagrad were never emptied
                optimizer._clear_fp32_optimizer_param_groups()
            if held:
                optimizer.load_state_dict([shard] * ranks, load_optimizer_states=states, load_from_fp32_weights=True)
    except CheckpointError:
        if held:  # the masters may be half read: as the weights again, so that another checkpoint can be loaded
            optimizer._restore_from_bit16_weights()
        raise
    if engine.zero_optimization_stage() < 3:
        optimizer.update_lp_params()
    elif hasattr(optimizer, "checkpoint_event_epilogue"):
        optimizer.checkpoint_event_epilogue()
    say(f"{folder}, written by {checkpoint.ranks or 'any number of'} ranks, loaded on {ranks} without conversion")
    return client_state


def discard_gradients(engine):
    """Those of a step that was not done would be added to the next one's."""
    optimizer = engine.optimizer
    if engine.micro_steps % engine.gradient_accumulation_steps():
        say("the gradients of half a step are discarded")
    engine.zero_grad()
    if hasattr(optimizer, "zero_grad"):
        optimizer.zero_grad()
    if hasattr(optimizer, "all_grad_tensors"):  # ZeRO-1 and 2 have sums of their own, and count from -1
        optimizer.all_grad_tensors.clear()
        optimizer.averaged_gradients.clear()
        optimizer.micro_step_id = -1


def compare_batch(engine, checkpoint):
    """Say so where the global batch is not the checkpoint's, as when the accumulation was left as it was."""
    config = checkpoint.model.get("ds_config")
    config = config if isinstance(config, dict) else {}  # older versions: a file's path
    was, now = config.get("train_batch_size"), engine.train_batch_size()
    if isinstance(was, int) and was != now:
        steps, rest = divmod(was, now // engine.gradient_accumulation_steps())
        cure = (
            f"no gradient_accumulation_steps gives {was} here"
            if rest
            else f"gradient_accumulation_steps {steps} keeps it"
        )
        say(f"WARNING: the global batch was {was}, and is {now} now: {cure}")


def convert(folder, share):
    """The universal checkpoint beside the folder, made by all ranks together unless it is there and newer."""
    output, current = folder.with_name(f"{folder.name}_universal"), False
    with together(share):
        if dist.get_rank() == 0 and (output / "zero" / "optimizer_state.pt").is_file():
            made = (output / "zero" / "optimizer_state.pt").stat().st_mtime
            current = made >= max(path.stat().st_mtime for path in folder.glob("*.pt"))
    if not from_rank_0(current, share):
        say(f"{folder} is of another tensor or pipeline layout: converting it into {output}")
        ds.convert(folder, output, trust=True, rank=dist.get_rank(), ranks=dist.get_world_size(), share=share)
    return output


def check_files(folder):
    """Compare the files that DeepSpeed is going to read with their checksums, which it does not look at: each rank
    some of them."""
    for path in sorted(folder.rglob("*.pt"))[dist.get_rank() :: dist.get_world_size()]:
        try:
            torch._C.PyTorchFileReader(str(path))  # it wants more of a directory than zipfile does
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
        except Exception as error:
            raise CheckpointError(f"{path} is damaged: {error}") from None
        if damaged:
            raise CheckpointError(f"{path} is damaged: {damaged} does not match the checksum saved with it")


# -----------------------------------------------------------------------------
# between the ranks


@contextlib.contextmanager
def conversation(timeout):
    """share(value) gives the values of all ranks, or raises CheckpointError when one does not answer in time."""
    wait = datetime.timedelta(seconds=timeout)
    group = dist.new_group(backend="gloo", timeout=wait)

    def share(value):
        values = [None] * dist.get_world_size()
        with answers():
            dist.monitored_barrier(group, wait)  # it knows which rank does not come
            dist.all_gather_object(values, value, group=group)
        return values

    share.group = group
    try:
        yield share
    finally:
        ds.opened.cache_clear()  # the next checkpoint can have the same path
        dist.destroy_process_group(group)


@contextlib.contextmanager
def answers():
    """What gloo says of a rank that does not answer, in one line."""
    try:
        yield
    except RuntimeError as error:
        raise CheckpointError(f"rank {dist.get_rank()}: a rank does not answer: {error}") from None


@contextlib.contextmanager
def together(share):
    """Of the ranks none goes on unless all do: each raises what the first of them did."""
    problem = None
    try:
        yield
    except CheckpointError as error:
        problem = str(error)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{os.path.basename(place.filename)}:{place.lineno}"
        problem = f"rank {dist.get_rank()}: {type(error).__name__}: {error} ({place})"
    problem = next((told for told in share(problem) if told is not None), None)
    if problem is not None:
        raise CheckpointError(problem) from None


def from_rank_0(value, share):
    """Rank 0's value, on all ranks. By torch.save: there are types of tensors that Python's pickle cannot take."""
    torch.save(value, file := io.BytesIO(), pickle_protocol=5)
    values = [file.getvalue() if dist.get_rank() == 0 else None]
    with answers():
        dist.broadcast_object_list(values, 0, group=share.group, device=torch.device("cpu"))
    return torch.load(io.BytesIO(values[0]), weights_only=False)


def describe(folder, share):
    """The Checkpoint, on all ranks."""
    checkpoint = None
    with together(share):
        if dist.get_rank() == 0:
            checkpoint = Checkpoint(folder)
    return from_rank_0(checkpoint, share)


def agree(here, there, what, where, strict):
    """Raise CheckpointError, or say, what is on one side only."""
    for names, side in ((here, f"{what} here, and not in {where}"), (there, f"{what} in {where}, and not here")):
        if names and strict:
            raise CheckpointError(f"{some(names)} {side}; load_module_strict=False goes on without")
        if names:
            say(f"{some(names)} {side}: left as it is")


def some(names):
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{', '.join(names[:5])}{more} {'are' if names[1:] else 'is'}"


def shape_of(parameter):
    return getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3 leaves nothing in the parameter itself


def weights(parameter, start, numel):
    """Elements of the model's weight that this rank holds a master of."""
    if hasattr(parameter, "ds_id"):
        return parameter.ds_tensor[:numel]
    return parameter.flatten()[start : start + numel]


def same(a, b):
    """Equal, NaN and all: one goes back to a checkpoint after a run has diverged, too."""
    return bool(((a == b) | ((a != a) & (b != b))).all())


def say(message):
    if dist.get_rank() == 0:
        print(f"universal.py: {message}", flush=True)


def check_same_folder(folder, share):
    """Every machine must see the same checkpoint: where no folder is shared, each has the shards of its own ranks."""
    with together(share):
        here = sorted((entry.name, entry.stat().st_size) for entry in os.scandir(folder)) if folder.is_dir() else []
    seen = share((socket.gethostname(), here))
    other = sorted({host for host, entries in seen if entries != seen[0][1]})
    if other:
        raise CheckpointError(f"{folder} is not the same on {seen[0][0]} and on {', '.join(other)}: it must be shared")
