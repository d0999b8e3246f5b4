# SPDX-License-Identifier: MIT
"""Resume a DeepSpeed training on any number of ranks and at any ZeRO stage, from its checkpoint as it is.

    import universal
    path, client_state = universal.load_checkpoint(engine, "checkpoints")   # instead of engine.load_checkpoint(...)

or, where a framework calls engine.load_checkpoint() itself, one line at the top of the script:

    universal.install()

DeepSpeed's loader restores everything, but wants the very shard that this rank has saved. So every rank makes up, in
memory, the shard that it would have saved itself: from the byte ranges of the shards that are there, or of a universal
checkpoint. DeepSpeed takes it for the content of a file. Nothing is converted or written, no config flag is needed, and
any optimizer is restored. The four steps stand below: describe, read, make up the shard, load.

That is for data parallelism. Tensor and pipeline parallelism change what a parameter is: such a checkpoint is converted
first, and DeepSpeed's universal loader reads it; mend() then restores what that loader leaves out.

Needs Python 3.10, torch, DeepSpeed, and ds_to_universal.py beside it.
"""

import contextlib
import copy
import datetime
import itertools
import math
import os
import socket
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
from torch.utils.serialization import config as torch_files

import old_converter as ds
from old_converter import CheckpointError

__version__ = "1.0"  # of the universal checkpoint tutorial, where this file is explained and tested
TRIED = ("0.19.8", "0.19.7", "0.19.6", "0.19.5", "0.19.4")  # of DeepSpeed: they cut shards as it is written here
OPTIMIZERS = ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3", "BF16_Optimizer")
KINDS = "Float:float32 Double:float64 Half:float16 BFloat16:bfloat16 Long:int64 Int:int32 Short:int16 Char:int8 "
KINDS += "Byte:uint8 Bool:bool"
DTYPES = {f"{kind}Storage": getattr(torch, name) for kind, name in (pair.split(":") for pair in KINDS.split())}
SLICES = ("base_optimizer_state", "single_partition_of_fp32_groups")  # of rank 0 alone
SLICES += ("optimizer_state_dict", "fp32_flat_groups", "param_slice_mappings")
deepspeed_load = deepspeed.DeepSpeedEngine.load_checkpoint

# -----------------------------------------------------------------------------
# 1. describe: rank 0 opens every file, and tells the others what is where


class Checkpoint:
    """A checkpoint without its data, small enough to send to all ranks.

    states: {parameter: {state: (kind, pieces)}}, fp32 among them. shape: {parameter: shape}. group: {parameter:
    parameter group}. other: {parameter: what its optimizer state has beside tensors of its size, a step count say}.
    flats: [[parameter]] of ZeRO's flat tensors. kept: {name: description} of buffers and frozen parameters; extra: what
    else the module has. model: the model states without the module. saved: rank 0's optimizer state without slices.
    """

    def __init__(self, folder):
        files = sorted(folder.glob("*mp_rank_00_model_states.pt"))
        if not files:
            raise CheckpointError(f"{folder} holds no *_model_states.pt: it is not a checkpoint of DeepSpeed")
        self.universal = (folder / "zero").is_dir()
        self.states, self.shape, self.other, self.ranks, self.model_parallel = {}, {}, {}, None, 1
        with ds.blame(folder):
            model = torch.load(files[0], mmap=True, weights_only=False)
            self.flats = [list(names) for names in model["param_shapes"]]
            described, saved = self.read_universal(folder) if self.universal else self.read_shards(folder)
            groups = saved.get("param_groups") or saved["optimizer_state_dict"]["param_groups"]
            group_of = {flat: i for i, group in enumerate(groups) for flat in group["params"]}
            self.group = {name: group_of.get(flat) for flat, names in enumerate(self.flats) for name in names}
            self.saved = {key: value for key, value in saved.items() if key not in SLICES} | {"param_groups": groups}
            data = ("module", "optimizer", "frozen_param_fragments")
            self.model = {key: value for key, value in model.items() if key not in data}
            module, frozen = described["module"] or {}, described.get("frozen_param_shapes") or {}
            self.extra = {name: model["module"][name] for name in module if not isinstance(module[name], ds.Tensor)}
            trained = {*self.states, *(described.get("shared_params") or {}), *self.extra}
            self.kept = {name: tensor for name, tensor in module.items() if name not in trained}
            for name in self.kept.keys() & frozen.keys():  # of a frozen one DeepSpeed's converter has rank 0's part
                if tuple(self.kept[name].size) != tuple(frozen[name]):
                    del self.kept[name]

    def read_shards(self, folder):
        shards = ds.find_shards(folder)
        self.model_parallel, self.ranks = len(shards), len(shards[0])
        with ThreadPoolExecutor(8) as pool, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # at what conversion would leave out, which is in `other` here
            for mp in sorted(shards, reverse=True):  # all of them have to be whole; the first one is what is described
                described, _, parameters = ds.read_data_parallel(folder, mp, shards[mp], pool, True, {"steps"})
        saved = torch.load(shards[0][0], mmap=True, weights_only=False)["optimizer_state_dict"]
        self.stage, self.bf16 = int(saved.get("zero_stage", 0)), shards[0][0].name.startswith("bf16_")
        base = saved["optimizer_state_dict" if "fp32_flat_groups" in saved else "base_optimizer_state"]
        for flat, names in enumerate(self.flats):
            for name in names:
                self.states[name], self.shape[name] = parameters[name]["states"], parameters[name]["shape"]
                own = {k: v for k, v in base["state"].get(flat, {}).items() if k not in self.states[name]}
                self.other[name] = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in own.items()}
        return described, saved | {"param_groups": base["param_groups"]}

    def read_universal(self, folder):
        files = sorted(folder.glob("mp_rank_*_model_states.pt")) or sorted(folder.glob("*_model_states.pt"))
        models = [ds.load(path, True) for path in files]  # also of other pipeline stages
        saved, common = torch.load(folder / "zero" / "optimizer_state.pt", mmap=True, weights_only=False), {}
        if "fp32_flat_groups" in saved:  # by DeepSpeed's converter at ZeRO-3: rank 0's shard, and no other step count
            common = {k: v.clone() for k, v in saved["optimizer_state_dict"]["state"][0].items() if k == "step"}
        for name in {name for model in models for names in model["param_shapes"] for name in names}:
            tensors = {path.stem: path for path in (folder / "zero" / name).glob("*.pt")}
            step = tensors.pop("step", None)
            self.other[name] = {"step": torch.load(step, weights_only=False)} if step else common
            for state, path in tensors.items():
                content = ds.load(path, True)  # DeepSpeed's converter writes a bare tensor at ZeRO-3
                tensors[state] = content["param"] if isinstance(content, dict) else content
            if "fp32" not in tensors:
                raise CheckpointError(f"{folder / 'zero' / name / 'fp32.pt'} is missing")
            self.shape[name] = tensors["fp32"].size
            self.states[name] = {key: (t.storage.kind, ds.Ranges(ds.cut(t))) for key, t in tensors.items()}
        return models[0], saved


# -----------------------------------------------------------------------------
# 2. read: every rank its own bytes, once; all together compare them with the checksums of the files


class Reader:
    def __init__(self):
        self.records = {}

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

    def whole(self, described):
        """A tensor in its shape and strides."""
        kind, pieces = described.storage.kind, ds.Ranges(described.storage.pieces)
        data = torch.empty(pieces.nbytes // ds.ELEMENT_SIZE[kind], dtype=DTYPES[kind])
        self.fill(data, pieces)
        return data.as_strided(described.size, described.stride, described.offset)

    def check(self, share):
        """Raise CheckpointError, on all ranks, where the ranks together have read what no checksum confirms."""
        everyone = share({key: record.seen for key, record in self.records.items()})
        with ds.together(share):
            for key, record in self.records.items():
                readers = [rank for rank, seen in enumerate(everyone) if key in seen]
                if readers[0] == dist.get_rank():
                    record.seen = array("Q", itertools.chain(*(everyone[rank][key] for rank in readers)))
                    ds.check_record(record)


# -----------------------------------------------------------------------------
# 3. make up the shard that this rank would have saved


def layout(engine):
    """What this rank holds: [(flat fp32 tensor, its parameter group, names, parts)]. A part is (name, start in the
    parameter, start in the tensor, numel)."""
    optimizer, name_of, found = engine.optimizer, engine.param_names, []
    rank = dist.get_rank(optimizer.dp_process_group)
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


def compare(engine, checkpoint, held):
    """Raise CheckpointError where the engine's parameters are not the checkpoint's, or not where layout() says."""
    group_of = {name: group for _, group, names, _ in held for name in names}
    where = f"the checkpoint of step {checkpoint.model['global_steps']}"
    for ours, theirs, problem in (
        (group_of, checkpoint.states, f"here, and not in {where}"),
        (checkpoint.states, group_of, f"in {where}, and not here"),
    ):
        if lost := [name for name in ours if name not in theirs]:
            raise CheckpointError(f"{some(lost)} trained {problem}")
    parameters = {engine.param_names[p]: p for p in engine.module.parameters() if p in engine.param_names}
    for name, group in group_of.items():
        shape, saved = (tuple(s) for s in (shape_of(parameters[name]), checkpoint.shape[name]))
        if shape != saved and (len(saved) != 1 or saved[0] != math.prod(shape)):  # DeepSpeed's converter may flatten it
            raise CheckpointError(f"{name} is {shape} here, and {saved} in {where}")
        if group != checkpoint.group[name]:
            raise CheckpointError(f"{name} is in parameter group {group} here, {checkpoint.group[name]} in {where}")
    for flat, _, _, parts in held:
        for name, start, at, numel in parts:
            p = parameters[name]
            here = p.ds_tensor[:numel] if hasattr(p, "ds_id") else p.flatten()[start : start + numel]
            there = flat[at : at + numel].to(here)
            if there.numel() != numel or (untried() and not torch.equal(here, there)):
                raise CheckpointError(
                    f"DeepSpeed {deepspeed.__version__} does not hold {name} where this file expects it"
                )


def make_shard(engine, checkpoint, held, reader, states):
    """What this rank would have saved, had these ranks at this stage written the checkpoint. states: with those of the
    optimizer, not only fp32."""
    optimizer, fp32, state = engine.optimizer, [], {}
    groups = [group | {"params": []} for group in checkpoint.saved["param_groups"]]
    for i, (flat, group, names, parts) in enumerate(held):
        found, tensors = checkpoint.states[names[0]] if names else {}, {}
        for key in found if states else found.keys() & {"fp32"}:
            kind = DTYPES[found[key][0]]
            in_place = key == "fp32" and flat.device.type == "cpu" and flat.dtype == kind
            tensors[key] = flat.detach() if in_place else torch.zeros(flat.numel(), dtype=kind)
        other = copy.deepcopy(checkpoint.other[names[0]]) if names else {}
        for key, value in other.items():
            if states and isinstance(value, torch.Tensor) and value.numel() > 1:  # Muon's momentum at ZeRO-1 and 2
                raise CheckpointError(
                    f"{key} of {names[0]} is not cut like the weights: it loads on its own ranks only"
                )
        for name, start, at, numel in parts:
            if checkpoint.states[name].keys() != found.keys():
                raise CheckpointError(f"{name} has other optimizer states than {names[0]} of the same group")
            for key, tensor in tensors.items():
                reader.fill(tensor[at : at + numel], checkpoint.states[name][key][1], start)
        fp32.append(tensors.pop("fp32", flat))
        groups[group]["params"].append(i)
        state[i] = other | tensors
    base = {"state": {i: own for i, own in state.items() if own}, "param_groups": groups}
    shard = {"optimizer_state_dict": base, "fp32_flat_groups": fp32}  # ZeRO-3's names, then those of the others
    shard |= {"base_optimizer_state": base, "single_partition_of_fp32_groups": fp32}
    shard |= {"param_alignment_paddings": getattr(optimizer, "round_robin_bit16_padding", None)}
    for key in ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad"):
        own = getattr(optimizer, key, None)
        saved = checkpoint.saved.get(key, own)  # the scaler of another precision is of no use
        shard[key] = saved if type(saved) is type(own) else own
    return shard | {"ds_version": deepspeed.__version__}


def keep(engine, checkpoint, reader, strict, share):
    """Frozen parameters and buffers: rank 0 reads one after the other, and sends it to all."""
    tensors = dict(engine.module.named_parameters(remove_duplicate=False)) | dict(engine.module.named_buffers())
    known = {id(tensors[name]) for name in (*checkpoint.states, *checkpoint.kept) if name in tensors}
    lost = [name for name in engine.module.state_dict() if name in tensors and id(tensors[name]) not in known]
    lost += [f"{name} (in the checkpoint)" for name in checkpoint.kept if name not in tensors]
    if lost and strict:
        raise CheckpointError(f"{some(lost)} frozen, or buffers, on one side only; load_module_strict=False goes on")
    if lost:
        say(f"{some(lost)} frozen, or buffers, on one side only: left as they are")
    todo, problem = {name: tensor for name, tensor in checkpoint.kept.items() if name in tensors}, None
    with ds.together(share):
        for name, described in todo.items():
            here, there = tuple(shape_of(tensors[name])), tuple(described.size)
            if here != there:
                raise CheckpointError(f"{name} is {here} here, and {there} in the checkpoint")
    for name, described in todo.items():
        target, cut = tensors[name], hasattr(tensors[name], "ds_id")
        first = dist.get_global_rank(target.ds_process_group, 0) if cut else None
        with torch.no_grad(), deepspeed.zero.GatheredParameters([target], modifier_rank=first, enabled=cut):
            data = target.data.contiguous()
            if dist.get_rank() == 0:
                try:
                    data.copy_(reader.whole(described))
                except (CheckpointError, OSError) as error:  # the others wait for this tensor
                    problem = error
            group = share.group if data.device.type == "cpu" else None
            dist.broadcast(data.flatten().view(torch.uint8), 0, group=group)
            target.data.copy_(data)
    with ds.together(share):
        if problem:
            raise problem


# -----------------------------------------------------------------------------
# 4. load


def load_checkpoint(
    engine, load_dir, tag=None, load_module_strict=True, load_optimizer_states=True, load_lr_scheduler_states=True,
    load_module_only=False, custom_load_fn=None, missing_ok=False,
):  # fmt: skip
    """engine.load_checkpoint() for any number of ranks, any ZeRO stage, ordinary and universal checkpoints.

    Takes what DeepSpeed's takes and returns (folder of the checkpoint, client state). On another layout than the
    checkpoint's the client state is that of rank 0. tag None: the tag that `latest` names, or a later one, if it is
    whole. missing_ok: return (None, {}) where load_dir holds no checkpoint at all, not even a damaged one.
    Raises CheckpointError, on all ranks, when there is no such checkpoint, or it is damaged, not whole, or of another
    model: it never goes on with what was initialized. The engine may then be half loaded; do not train it.
    """
    own = dict(load_module_strict=load_module_strict, load_optimizer_states=load_optimizer_states)
    own |= dict(load_lr_scheduler_states=load_lr_scheduler_states, load_module_only=load_module_only)
    with conversation() as share:
        if not engine.zero_optimization():  # without ZeRO every rank has everything, and so has the checkpoint
            result = deepspeed_load(engine, load_dir, tag, **own, custom_load_fn=custom_load_fn)
            if result[0] is None and not (missing_ok and not tag and not tags(Path(load_dir))):
                raise CheckpointError(f"{load_dir} holds no checkpoint {tag or ''}")
            return result[0] and str(Path(result[0]).parent), result[1] or {}
        decision, checkpoint = None, None
        with ds.together(share):
            if dist.get_rank() == 0 and (tag or not missing_ok or tags(Path(load_dir))):
                tag, checkpoint = find(Path(load_dir), tag)
                decision = tag, choose(engine, checkpoint)
        decision = from_rank_0(decision, share)
        if decision is None:
            return None, {}
        tag, how = decision
        folder = Path(load_dir, tag)
        check_same_folder(folder, share)
        if engine.zero_optimization_stage() == 3:  # they are filled for loading; those of Adagrad were never emptied
            engine.optimizer._clear_fp32_optimizer_param_groups()
        if how == "convert":
            folder = convert(folder, share)
            how, checkpoint = "reshard" if plain(engine) else "universal", None
        if how == "reshard":
            result = reshard(engine, checkpoint, folder, own, share)
        else:
            with ds.together(share):
                check_files(engine, folder, how)
            with mock.patch.multiple(engine, load_universal_checkpoint=lambda: how == "universal"):
                result = deepspeed_load(engine, load_dir, folder.name, **own, custom_load_fn=custom_load_fn)
        if how == "universal":
            mend(engine, folder)
    result = str(folder), result[1]
    for p in engine.module.parameters():
        if getattr(p, "ds_secondary_tensor", None) is not None:  # ZeRO++'s second copy, still the initial one
            p.ds_secondary_tensor = None
    if not load_module_only:  # DeepSpeed does not save it, and counts the micro-batches of a step by it
        engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()
    return result


def tags(folder):
    """{tag: file of model states} of the checkpoints in a folder, whole or not."""
    files = {path.parent.name: path for path in sorted(folder.glob("*/*mp_rank_00_model_states.pt"))}
    odd = (".unfinished", ".replaced")
    return {tag: path for tag, path in files.items() if not tag.startswith(".") and not tag.endswith(odd)}


def find(folder, tag):
    """(tag, Checkpoint) of that tag, or of the newest that is whole."""
    steps, written = {}, {}
    for name, path in tags(folder).items():
        with contextlib.suppress(CheckpointError):
            steps[name] = ds.load(path, True).get("global_steps", 0) if tag is None else 0
            written[name] = path.stat().st_mtime
    if tag is not None:
        if (folder / str(tag)).is_dir():
            return str(tag), Checkpoint(folder / str(tag))
        raise CheckpointError(f"{folder / str(tag)} does not exist; in {folder} there is: {', '.join(sorted(steps))}")
    order = sorted(steps, key=lambda name: (steps[name], not (folder / name / "zero").is_dir()), reverse=True)
    pointers = [path.read_text().strip() for path in (folder / "latest", folder / "latest_universal") if path.is_file()]
    if pointers and (named := pointers[0]) in steps:
        # A job killed before it wrote `latest` leaves a later one. What an earlier run left is older on the disk.
        first = [t for t in order if steps[t] > steps[named] and written[t] > written[named]] + [named]
        order = first + [name for name in order if name not in first]
    for name in order:
        try:
            return name, Checkpoint(folder / name)
        except CheckpointError as error:
            say(f"{name} is not whole, and is passed over: {error}")
    raise CheckpointError(f"{folder} holds no checkpoint that is whole")


def plain(engine):
    """Whether layout() describes this engine: data parallelism alone, and an optimizer of DeepSpeed that it knows."""
    odd = isinstance(engine.module, deepspeed.pipe.PipelineModule) or engine.mp_world_size > 1
    odd = odd or engine.has_moe_layers or engine.zero_nvme_offload_optimizer()
    return not odd and type(engine.optimizer).__name__ in OPTIMIZERS


def choose(engine, checkpoint):
    """How to load: "own", by DeepSpeed's loader as it is, what was cut for exactly this layout; "reshard";
    "universal", by DeepSpeed's universal loader; "convert" before one of these."""
    if not checkpoint.universal:
        stage = 0 if type(engine.optimizer).__name__ == "BF16_Optimizer" else engine.zero_optimization_stage()
        there = [checkpoint.stage, checkpoint.ranks, checkpoint.bf16]
        here = [stage, engine.seq_dp_world_size, engine.bfloat16_enabled()]
        if degrees := checkpoint.model.get("checkpoint_parallel_dimensions"):
            there += [degrees["tp_degree"], degrees["pp_degree"]]
            here += [
                bwc.bwc_tensor_model_parallel_world_size(engine.mpu),
                bwc.bwc_pipeline_parallel_world_size(engine.mpu),
            ]
        if plain(engine):
            there += [checkpoint.flats, checkpoint.saved.get("param_alignment_paddings")]
            here += [[names for _, _, names, _ in layout(engine)]]
            here += [getattr(engine.optimizer, "round_robin_bit16_padding", None)]
        if there == here:
            return "own"
    if plain(engine) and (checkpoint.universal or checkpoint.model_parallel == 1):
        return "reshard"
    return "universal" if checkpoint.universal else "convert"


def reshard(engine, checkpoint, folder, own, share):
    """DeepSpeed's ordinary loader, with the shard made up in the place of the file."""
    reader, states = Reader(), own["load_optimizer_states"] and not own["load_module_only"]
    checkpoint = describe(folder, checkpoint, share)
    with ds.together(share):
        held = layout(engine)
        compare(engine, checkpoint, held)
        shard = make_shard(engine, checkpoint, held, reader, states)
    keep(engine, checkpoint, reader, own["load_module_strict"], share)
    reader.check(share)
    model = checkpoint.model | {"module": checkpoint.extra, "frozen_param_fragments": None}
    model |= {"dp_world_size": engine.seq_dp_world_size, "mp_world_size": engine.mp_world_size}
    ranks = dist.get_world_size(engine.optimizer.dp_process_group)

    def restore(*_, **__):
        engine.optimizer.load_state_dict(
            state_dict_list=[shard] * ranks, load_optimizer_states=states, load_from_fp32_weights=True
        )
        return True

    with mock.patch.multiple(
        engine,
        checkpoint_engine=types.SimpleNamespace(load=lambda *_, **__: model),
        _get_all_ckpt_names=lambda *_: [str(folder)],
        _load_zero_checkpoint=restore,
        load_universal_checkpoint=lambda: False,
    ), mock.patch.multiple(engine.optimizer, _restore_from_bit16_weights=restore):  # fmt: skip
        options = own | {"load_module_strict": False, "load_optimizer_states": True}
        _, client_state = deepspeed_load(engine, str(folder.parent), folder.name, **options)
    if engine.zero_optimization_stage() < 3:
        engine.optimizer.update_lp_params()
    say(f"{folder}, written by {checkpoint.ranks or 'any number of'} ranks, loaded on {ranks} without conversion")
    return str(folder), client_state


def mend(engine, folder):
    """Restore what DeepSpeed's universal loader leaves out of the universal checkpoint `folder`, after it has loaded
    it: hyper-parameters and step counts of the parameter groups, optimizer states other than Adam's, frozen
    parameters, buffers, the count of micro-batches. Raises CheckpointError."""
    with conversation() as share:
        checkpoint, reader, optimizer = describe(Path(folder), None, share), Reader(), engine.optimizer.optimizer
        # ZeRO-3 gives every group the hyper-parameters of the first.
        for group, saved in zip(optimizer.param_groups, checkpoint.saved["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        with ds.together(share):
            for flat, _, names, parts in layout(engine):
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
        keep(engine, checkpoint, reader, False, share)
        reader.check(share)
    engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()


def install():
    """Let whatever calls engine.load_checkpoint(), Hugging Face's Trainer say, call load_checkpoint() of this file."""
    deepspeed.DeepSpeedEngine.load_checkpoint = load_checkpoint


# -----------------------------------------------------------------------------
# between the ranks


@contextlib.contextmanager
def conversation():
    """share(value) gives the values of all ranks. It waits for a day: reading can take longer than a gradient."""
    group = dist.new_group(backend="gloo", timeout=datetime.timedelta(days=1))

    def share(value):
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=group)
        return values

    share.group = group
    try:
        with torch_files.patch("load.mmap", False):  # what is shared cannot be mapped
            yield share
    finally:
        ds.opened.cache_clear()  # the next checkpoint can have the same path
        dist.destroy_process_group(group)


def from_rank_0(value, share):
    values = [value]
    dist.broadcast_object_list(values, 0, group=share.group, device=torch.device("cpu"))
    return values[0]


def untried():
    return deepspeed.__version__.split("+")[0] not in TRIED


def describe(folder, checkpoint, share):
    """The Checkpoint, on all ranks. checkpoint: what rank 0 knows already, or None."""
    if untried() and not os.environ.get("UNIVERSAL_UNTRIED"):
        raise CheckpointError(
            f"universal.py was tried with DeepSpeed {', '.join(TRIED)}, not with {deepspeed.__version__}: with "
            "UNIVERSAL_UNTRIED=1 in the environment it compares the layout with the weights, and goes on if it is right"
        )
    with ds.together(share):
        if dist.get_rank() == 0:
            checkpoint = checkpoint or Checkpoint(folder)
    return from_rank_0(checkpoint, share)


def some(names):
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{', '.join(names[:5])}{more} {'are' if names[1:] else 'is'}"


def shape_of(parameter):
    return getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3 leaves nothing in the parameter itself


def say(message):
    if dist.get_rank() == 0:
        print(f"universal.py: {message}", flush=True)


def check_same_folder(folder, share):
    """Every machine must see the same checkpoint: where no folder is shared, each has the shards of its own ranks."""
    here = sorted((entry.name, entry.stat().st_size) for entry in os.scandir(folder)) if folder.is_dir() else []
    seen = share((socket.gethostname(), here))
    other = sorted({host for host, entries in seen if entries != seen[0][1]})
    if other:
        raise CheckpointError(f"{folder} is not the same on {seen[0][0]} and on {', '.join(other)}: it must be shared")


def convert(folder, share):
    """The universal checkpoint beside the folder, made by all ranks together unless it is there and newer."""
    output, current = folder.with_name(f"{folder.name}_universal"), False
    if dist.get_rank() == 0 and (output / "zero" / "optimizer_state.pt").is_file():
        made = (output / "zero" / "optimizer_state.pt").stat().st_mtime
        current = made >= max(path.stat().st_mtime for path in folder.glob("*.pt"))
    if not from_rank_0(current, share):
        say(f"{folder} is of another tensor or pipeline layout: converting it into {output}")
        ds.convert(folder, output, trust=True, rank=dist.get_rank(), ranks=dist.get_world_size(), share=share)
    return output


def check_files(engine, folder, how):
    """Compare the files that DeepSpeed is going to read with their checksums, which it does not look at."""
    paths = [engine._get_ckpt_name(folder.parent, folder.name), engine._get_zero_ckpt_name(folder.parent, folder.name)]
    if how == "universal":  # every rank reads them all, and checks some
        paths = sorted(folder.rglob("*.pt"))[dist.get_rank() :: dist.get_world_size()]
    for path in paths:
        try:
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
        except (OSError, zipfile.BadZipFile) as error:
            raise CheckpointError(f"{path} is missing or damaged: {error}") from None
        if damaged:
            raise CheckpointError(f"{path} is damaged: {damaged} does not match the checksum saved with it")
