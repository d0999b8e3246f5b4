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

Needs Python 3.10, torch, DeepSpeed, and ds_to_universal.py and torch_file.py beside it.
"""

import contextlib
import datetime
import io
import math
import os
import socket
import traceback
import types
import zipfile
from pathlib import Path
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import bwc

import ds_to_universal as converter
from ds_to_universal import CheckpointError

__version__ = "1.0"  # of the universal checkpoint tutorial, where this file is explained and tested
TIMEOUT = 1800  # seconds that a rank waits for another one, which may be reading
OPTIMIZERS = ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3", "BF16_Optimizer", "DeepSpeedZeRoOffload")
# What a parameter group says of how a step is computed, and not of what it computes.
FLAGS = {"params", "step", "initial_lr", "foreach", "fused", "capturable", "differentiable", "maximize"}
FLAGS |= {"decoupled_weight_decay"}
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
        with together(share):
            found = None
            if load_dir is None:
                raise CheckpointError("load_dir is None: it must be the folder that the checkpoints are in")
            if custom_load_fn:
                raise CheckpointError("custom_load_fn would get no weights: they are read from the optimizer's shards")
            if dist.get_rank() == 0:
                found = find(Path(load_dir), tag, missing_ok)
                found = found and (*found, choose(engine, found[1], options))
        found = from_rank_0(found, share)
        if found is None:
            return None, {}
        folder, checkpoint, how = found
        check_same_folder(folder, share)
        discard_gradients(engine)
        folder, client_state = load(engine, folder, checkpoint, how, options, share)
    if not load_module_only:  # DeepSpeed does not save it, and counts the micro-batches of a step by it
        engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()
    return str(folder), client_state


def mend(engine, folder):
    """Restore what DeepSpeed's universal loader leaves out of the universal checkpoint `folder`, after it has loaded
    it: hyper-parameters and step counts of the parameter groups, optimizer states other than Adam's, frozen
    parameters, buffers, the count of micro-batches. Raises CheckpointError."""
    with conversation(TIMEOUT) as share:
        checkpoint, reader, optimizer = describe_together(Path(folder), share), Reader(), engine.optimizer.optimizer
        with together(share):
            # ZeRO-3 gives every group the hyper-parameters of the first.
            for group, saved in zip(optimizer.param_groups, unpack(checkpoint.optimizer)["param_groups"], strict=True):
                group.update({key: value for key, value in saved.items() if key != "params"})
            held = layout(engine)
            for flat, _, names, parts in held:
                state, first = optimizer.state[flat], checkpoint.parameters[names[0]]
                # ZeRO-3 lets all groups share one step count, which each group advances; also where there was none.
                state.pop("step", None)
                state.update(scalars(first))
                for key in first.states.keys() - state.keys() - {"fp32"}:
                    if engine.mp_world_size > 1:
                        raise CheckpointError(f"DeepSpeed's universal loader does not restore {key} of {names[0]}")
                    state[key] = torch.zeros(flat.numel(), dtype=getattr(torch, first.states[key].dtype))
                    for name, start, at, numel in parts:
                        reader.fill(state[key][at : at + numel], checkpoint.parameters[name].states[key], start)
                    state[key] = state[key].to(flat.device)
        # Frozen parameters and buffers are in no optimizer, and the loader looks nowhere else.
        keep(engine, checkpoint, unpack(checkpoint.models)["module"], reader, held, False, share)
        reader.check_together(share)
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
    for path in (folder / "latest", folder / "latest_universal"):
        if path.is_file():
            return os.fsdecode(path.read_bytes()).strip().replace("\0", "?")
    return ""


def tags(folder):
    """{tag: file of model states} of the checkpoints in a folder, whole or not. A tag like epoch1/step5 is a folder in
    a folder: those beside the one that `latest` names are found."""
    found = {}
    for place in {folder, (folder / named_by_latest(folder)).parent}:
        for path in sorted(place.glob("*/*mp_rank_00_model_states.pt")):
            name = path.parent.name
            if not name.startswith(".") and not name.endswith((".unfinished", ".replaced")):
                found[os.path.relpath(path.parent, folder)] = path
    return found


def find(folder, tag, missing_ok):
    """(folder, description) of that tag, or of the newest that is whole. None where there is nothing and may be."""
    known, named = tags(folder), named_by_latest(folder)
    if tag is not None:
        if (folder / str(tag)).is_dir():
            return folder / str(tag), describe(folder / str(tag))
        raise CheckpointError(f"{folder / str(tag)} does not exist; in {folder} there is: {', '.join(sorted(known))}")
    if missing_ok and not known and not named:
        return say(f"nothing was loaded: {folder} holds no checkpoint")
    steps, written = {}, {}
    for name, path in known.items():
        try:
            steps[name] = int(converter.load(path)[0]["global_steps"])
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
            return folder / name, describe(folder / name)
        except Exception as error:
            say(f"{name} is not whole, and is passed over: {error}")
    raise CheckpointError(f"{folder} holds no checkpoint that is whole")


# -----------------------------------------------------------------------------
# 3. describe: rank 0 looks into every file, and tells the others what is where


def describe(folder):
    """The converter's Description of what is in a folder, without data; None where it was saved without ZeRO. What has
    to be an object again is packed: `models` is rank 0's model states, with what of the module is no tensor;
    `optimizer` is rank 0's optimizer state without slices."""
    first = next(iter(sorted(folder.glob("*mp_rank_00_model_states.pt"))), None)
    sharded = (folder / "zero").is_dir() or any(folder.glob("*_optim_states.pt"))
    if first and not sharded and converter.load(first)[0].get("optimizer"):
        return None
    found = converter.describe(folder)
    model = found.models[0]
    steps = model["global_steps"] - model["skipped_steps"]
    counted = {getattr(p.scalars.get("step"), "value", p.scalars.get("step")) for p in found.parameters.values()}
    if found.ranks and counted - {None, steps}:  # an optimizer may have been started anew in mid-run
        check_weights(found, converter.load(first)[0]["module"] or {})
        say(f"{folder} is of step {steps}, its optimizer has counted {sorted(counted)}")
    shards = ("base_optimizer_state", "single_partition_of_fp32_groups", "optimizer_state_dict", "fp32_flat_groups",
              "param_slice_mappings")  # fmt: skip
    optimizer = {key: value for key, value in found.optimizer.items() if key not in shards}
    packed = pack(optimizer | {"param_groups": found.param_groups})
    return found._replace(models=pack_model(found, model), optimizer=packed)


def pack_model(found, model):
    small = {key: value for key, value in model.items() if key not in ("optimizer", "frozen_param_fragments")}
    return pack(small | {"module": {name: model["module"][name] for name in found.extra}})


def pack(content):
    """The bytes of a .pt file. No pickle of a checkpoint is run but this one, and its tensors are those it needs."""
    reader, file = converter.Reader(), io.BytesIO()
    converter.write_archive(file, "objects", *converter.pickled(content), reader)
    converter.check_all(reader.spans, reader.spans, reader.opened)
    return file.getvalue()


def unpack(data):
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def check_weights(found, module):
    """The model states (at ZeRO-1 and 2 they hold the weights) and the shards are of one step."""
    for name, parameter in found.parameters.items():
        weight = converter.tensor_of(module.get(name))
        numel = min(1024, math.prod(weight.size)) if weight else 0
        masters, weights = (
            torch.empty(numel),
            torch.empty(numel, dtype=getattr(torch, weight.dtype if weight else "half")),
        )
        Reader().fill(masters, parameter.states["fp32"])
        Reader().fill(weights, converter.Slices.of(weight) if numel else parameter.states["fp32"])
        if not same(masters.to(weights.dtype), weights):
            raise CheckpointError(f"{found.folder}: model states and shards of the optimizer are of different steps")


def scalars(parameter):
    """What its optimizer state has beside tensors of its size, a step count say."""
    return {
        key: torch.frombuffer(bytearray(value.data), dtype=getattr(torch, value.dtype)).reshape(value.shape)
        if isinstance(value, converter.Scalar)
        else value
        for key, value in parameter.scalars.items()
    }


# -----------------------------------------------------------------------------
# 4. read: every rank its own bytes, once; all together compare them with the checksums of the files


class Reader(converter.Reader):
    problem = None

    def fill(self, tensor, slices, start=0):
        """Read elements from `start` on, as many as the tensor on the CPU has, into its memory."""
        buffer, done = memoryview(tensor.view(torch.uint8).numpy()) if tensor.numel() else b"", 0
        for record, first, nbytes in slices.cut(start, tensor.numel()):
            self.read_into(buffer[done : done + nbytes], record, first)
            done += nbytes

    def whole(self, tensor, share):
        """A tensor in its shape and strides, that rank 0 reads and sends to all. share None: every rank reads it."""
        data = torch.empty(tensor.storage.numel, dtype=getattr(torch, tensor.dtype))
        try:
            if not share or dist.get_rank() == 0:
                self.fill(data, tensor.storage)
        except Exception as error:  # the others wait for this tensor
            self.problem = error
        if share and data.numel():
            with answers():
                dist.broadcast(data.view(torch.uint8), 0, group=share.group)
        return data.as_strided(tensor.size, tensor.stride, tensor.offset)

    def check_together(self, share):
        """Raise CheckpointError, on all ranks, where the ranks together have read what no checksum confirms."""
        spans = converter.merged(share(self.spans))
        with together(share):
            converter.check_all(sorted(spans)[dist.get_rank() :: dist.get_world_size()], spans, self.opened)


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
    parameters = parameters_of(engine)
    if held:
        here, there = (dict.fromkeys(names) for names in (group_of, checkpoint.parameters))
        agree([n for n in here if n not in there], [n for n in there if n not in here], "trained", strict)
    for name in checkpoint.parameters.keys() & parameters.keys():
        saved = checkpoint.parameters[name]
        check_shape(name, parameters[name], saved.shape)
        if group_of.get(name, saved.group) != saved.group:
            raise CheckpointError(
                f"{name} is in parameter group {group_of[name]} here, {saved.group} in the checkpoint"
            )
    for flat, _, _, parts in held:
        for name, start, at, numel in parts:
            here = weights(parameters[name], start, numel)
            there = flat[at : at + numel].to(here)
            if there.numel() != numel or not same(here, there):
                raise CheckpointError(
                    f"DeepSpeed {deepspeed.__version__} does not hold {name} where this file expects it: elements "
                    f"{start} to {start + numel} are {here[:3].tolist()}... in the model, {there[:3].tolist()}... there"
                )


def compare_optimizer(engine, checkpoint, model, saved):
    """Raise CheckpointError where the checkpoint is of another kind of optimizer, or lacks its states."""
    groups = engine.optimizer.optimizer.param_groups
    here, there = ({key for group in side for key in group} - FLAGS for side in (groups, saved["param_groups"]))
    for names in (here, there):  # two makes of Adam
        names |= {"amsgrad"} if "bias_correction" in names else set()
        names -= {"bias_correction"}
    if there and here != there:
        ours, theirs = (", ".join(sorted(names)) or "nothing" for names in (here - there, there - here))
        raise CheckpointError(f"of another optimizer: {ours} here alone, {theirs} in the checkpoint alone{ALONE}")
    if left_out := saved.get("left_out"):
        raise CheckpointError(f"{checkpoint.folder} was converted without {', '.join(left_out)}{ALONE}")
    stateful = any("betas" in group or group.get("momentum") for group in groups)
    stateful = stateful and model["global_steps"] > model["skipped_steps"]
    for name, parameter in checkpoint.parameters.items():
        if stateful and parameter.states.keys() == {"fp32"} and math.prod(parameter.shape):
            raise CheckpointError(f"{checkpoint.folder} holds no optimizer state of {name}{ALONE}")


def make_shard(engine, checkpoint, saved, held, reader, states):
    """What this rank would have saved, had these ranks at this stage written the checkpoint. states: with those of the
    optimizer, not only fp32."""
    optimizer, fp32, state, parameters = engine.optimizer, [], {}, parameters_of(engine)
    groups = [group | {"params": []} for group in optimizer.optimizer.param_groups]
    for group, there in zip(groups, saved["param_groups"], strict=False):
        group |= there | {"params": []}
    for i, (flat, group, names, parts) in enumerate(held):
        found, tensors = next((checkpoint.parameters[n] for n in names if n in checkpoint.parameters), None), {}
        dtypes = {key: getattr(torch, s.dtype) for key, s in found.states.items()} if found else {"fp32": flat.dtype}
        for key in dtypes if states else ["fp32"]:
            in_place = key == "fp32" and flat.device.type == "cpu" and flat.dtype == dtypes[key]
            tensors[key] = flat.detach() if in_place else torch.zeros(flat.numel(), dtype=dtypes[key])
        for name, start, at, numel in parts:
            if name not in checkpoint.parameters:  # new here, or frozen there: a fresh state
                kept = name in checkpoint.kept
                value = weights(parameters[name], start, numel) if kept else flat[at : at + numel]
                tensors["fp32"][at : at + numel] = value.detach()
                continue
            if checkpoint.parameters[name].states.keys() != dtypes.keys():
                raise CheckpointError(f"{name} has other optimizer states than the others of its group")
            for key, tensor in tensors.items():
                reader.fill(tensor[at : at + numel], checkpoint.parameters[name].states[key], start)
        fp32.append(tensors.pop("fp32"))
        groups[group]["params"].append(i)
        state[i] = tensors | (scalars(found) if found else {})
    base = {"state": {i: own for i, own in state.items() if own}, "param_groups": groups}
    shard = {"optimizer_state_dict": base, "fp32_flat_groups": fp32}  # ZeRO-3's names, then those of the others
    shard |= {"base_optimizer_state": base, "single_partition_of_fp32_groups": fp32}
    shard |= {"param_alignment_paddings": getattr(optimizer, "round_robin_bit16_padding", None)}
    for key in ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad"):
        own = getattr(optimizer, key, None)
        there = saved.get(key, own)  # the scaler of another precision is of no use
        shard[key] = there if type(there) is type(own) else own
    return shard | {"ds_version": deepspeed.__version__}


def keep(engine, checkpoint, objects, reader, held, strict, share, own=False):
    """Whatever of the module's state the optimizer does not restore: frozen parameters, buffers, and what a module adds
    to its state. objects: of that, what is no tensor. own: buffers are in a file of this rank's own; else rank 0 reads
    one after the other for all."""
    module = engine.module
    buffers = dict(module.named_buffers(remove_duplicate=False))
    tensors = dict(module.named_parameters(remove_duplicate=False)) | buffers
    trained = {name for _, _, names, _ in held for name in names}
    saved = dict(checkpoint.kept)
    for name in checkpoint.parameters.keys() - trained:
        masters = checkpoint.parameters[name].states["fp32"]
        saved[name] = converter.whole(masters.dtype, masters, checkpoint.parameters[name].shape)
    with together(share):
        restored = {id(tensors[name]) for name in (*trained, *saved, *objects) if name in tensors}
        names = [name for name in module.state_dict() if name not in saved and name not in objects]
        lost = [
            n for n in names if n not in tensors or id(tensors[n]) not in restored and math.prod(shape_of(tensors[n]))
        ]
        gone = [name for name in checkpoint.frozen if name not in tensors]
        agree(lost, gone, "frozen, or a buffer,", strict)
        for name in saved.keys() & tensors.keys():
            check_shape(name, tensors[name], saved[name].size)
    for name in sorted({id(tensors[n]): n for n in saved if n in tensors}.values()):  # some have two names
        target, data = tensors[name], reader.whole(saved[name], None if own and name in buffers else share)
        cut = [target] if hasattr(target, "ds_id") else []
        first = dist.get_global_rank(target.ds_process_group, 0) if cut else None
        with torch.no_grad(), deepspeed.zero.GatheredParameters(cut, modifier_rank=first, enabled=bool(cut)):
            try:
                target.data.copy_(data.view(target.shape))
            except RuntimeError as error:  # a buffer that was expanded
                reader.problem = CheckpointError(f"{name}: {error}")
    added = sorted(name for name in checkpoint.kept if name not in tensors and name not in checkpoint.frozen)
    objects |= {name: reader.whole(checkpoint.kept[name], None if own else share) for name in added}
    with together(share):
        if reader.problem:
            raise reader.problem
        unknown = module.load_state_dict(objects, strict=False).unexpected_keys if objects else []
        agree([], unknown, "in the module's state", strict)


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
    stage = engine.zero_optimization_stage()
    if (checkpoint is None) != (stage == 0):
        saved, stages = ("with", "1, 2 or 3") if checkpoint else ("without", "0")
        raise CheckpointError(f"the checkpoint was saved {saved} ZeRO: an engine at stage {stages} can load it")
    if not checkpoint:
        return "own"
    states = options["load_optimizer_states"] and not options["load_module_only"]
    simple = plain(engine) and checkpoint.tensor * checkpoint.pipeline == 1
    if simple and not (states and checkpoint.uneven):
        return "reshard"
    stage = 0 if type(engine.optimizer).__name__ == "BF16_Optimizer" else stage
    degrees = [bwc.bwc_tensor_model_parallel_world_size(engine.mpu), bwc.bwc_pipeline_parallel_world_size(engine.mpu)]
    here = [stage, engine.seq_dp_world_size, engine.bfloat16_enabled(), *degrees]
    there = [checkpoint.stage, checkpoint.ranks, checkpoint.bf16, checkpoint.tensor, checkpoint.pipeline]
    if simple:
        held = layout(engine)
        compare(engine, checkpoint, held, True)
        here += [[names for _, _, names, _ in held], getattr(engine.optimizer, "round_robin_bit16_padding", None)]
        there += [checkpoint.flats, unpack(checkpoint.optimizer).get("param_alignment_paddings")]
    if here != there and simple:
        (_, key), why = next(iter(checkpoint.uneven.items()))
        raise CheckpointError(f"{key} of the optimizer {why}: it loads on its own ranks only{ALONE}")
    if here != there:
        return "universal" if checkpoint.universal else "convert"
    if stage == 3 and not states:
        raise CheckpointError("DeepSpeed loads no weights alone of such an engine at ZeRO-3")
    return "own"


def load(engine, folder, checkpoint, how, options, share):
    """(folder, client state): the checkpoint is in the engine."""
    match how:
        case "reshard":
            return folder, reshard(engine, checkpoint, folder, options, share)
        case "convert":
            folder = convert(folder, share)
            checkpoint = describe_together(folder, share)
            return load(engine, folder, checkpoint, "reshard" if plain(engine) else "universal", options, share)
    with together(share):
        check_files(folder)
    if hasattr(engine.optimizer, "_clear_fp32_optimizer_param_groups"):  # filled for loading; Adagrad's never emptied
        engine.optimizer._clear_fp32_optimizer_param_groups()
    with mock.patch.multiple(engine, load_universal_checkpoint=lambda: how == "universal"):
        _, client_state = deepspeed_load(engine, str(folder.parent), folder.name, **options)
    if how == "universal":
        mend(engine, folder)
    return folder, client_state


def reshard(engine, checkpoint, folder, options, share):
    """DeepSpeed's ordinary loader, with the shard made up in the place of the file. Returns the client state."""
    optimizer, reader, stage = engine.optimizer, Reader(), engine.zero_optimization_stage()
    rank, ranks = dist.get_rank(optimizer.dp_process_group), dist.get_world_size(optimizer.dp_process_group)
    own = checkpoint.stage == 3 and checkpoint.ranks == ranks  # each rank had a file of model states for itself
    with together(share):
        if stage == 3:
            getattr(optimizer, "checkpoint_event_prologue", getattr(optimizer, "partition_all_parameters", None))()
        if own:
            checkpoint = of_rank(checkpoint, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        model, saved, held = unpack(checkpoint.models), unpack(checkpoint.optimizer), layout(engine)
        states = options["load_optimizer_states"] and not options["load_module_only"] and bool(held)
        compare_batch(engine, model)
        compare(engine, checkpoint, held, options["load_module_strict"])
        if states:
            compare_optimizer(engine, checkpoint, model, saved)
    objects = model.pop("module")
    model |= {"module": {}, "dp_world_size": ranks, "mp_world_size": engine.mp_world_size}
    patch = dict(checkpoint_engine=types.SimpleNamespace(load=lambda *_, **__: model))
    patch |= dict(_get_all_ckpt_names=lambda *_: [str(folder)], load_module_state_dict=lambda *_, **__: None)
    try:
        keep(engine, checkpoint, objects, reader, held, options["load_module_strict"], share, own)
        with together(share), mock.patch.multiple(engine, **patch, load_universal_checkpoint=lambda: False):
            more = options | {"load_optimizer_states": True}  # without, it would look for other files
            _, client_state = engine._load_checkpoint(str(folder.parent), folder.name, **more)
            if held and "lr" not in saved["param_groups"][0]:
                take_rates(engine)
            shard = make_shard(engine, checkpoint, saved, held, reader, states) if held else None
        reader.check_together(share)
        with together(share):
            if held and stage == 3:  # filled for loading; those of Adagrad were never emptied
                optimizer._clear_fp32_optimizer_param_groups()
            if held:
                optimizer.load_state_dict([shard] * ranks, load_optimizer_states=states, load_from_fp32_weights=True)
    except CheckpointError:
        if held:  # the masters may be half read: as the weights again, so that another checkpoint can be loaded
            optimizer._restore_from_bit16_weights()
        raise
    if stage < 3:
        optimizer.update_lp_params()
    elif held:
        optimizer.checkpoint_event_epilogue()
    say(f"{folder}, written by {checkpoint.ranks or 'any number of'} ranks, loaded on {ranks} without conversion")
    return client_state


def of_rank(checkpoint, path):
    """The description with the client state and the buffers of this rank's own file of model states."""
    model = converter.load(path)[0]
    own = {name: tensor for name in checkpoint.kept if (tensor := converter.tensor_of(model["module"].get(name)))}
    kept = {name: converter.compact(tensor) for name, tensor in own.items() if name not in checkpoint.frozen}
    return checkpoint._replace(kept=checkpoint.kept | kept, models=pack_model(checkpoint, model))


def take_rates(engine):
    """elastic_checkpoint saves no hyper-parameters: the scheduler, if it has any, knows what the rates are."""
    say("elastic_checkpoint saves no hyper-parameters: the engine's own are used, and the scheduler's rates")
    optimizer, scheduler = engine.optimizer.optimizer, engine.lr_scheduler
    if getattr(scheduler, "optimizer", None) is optimizer:
        for group, rate in zip(optimizer.param_groups, getattr(scheduler, "_last_lr", []), strict=False):
            group["lr"] = rate


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


def compare_batch(engine, model):
    """Say so where the global batch is not the checkpoint's, as when the accumulation was left as it was."""
    config = model.get("ds_config")
    was = config.get("train_batch_size") if isinstance(config, dict) else None  # older versions: a file's path
    now = engine.train_batch_size()
    if isinstance(was, int) and was != now:
        steps, rest = divmod(was, now // engine.gradient_accumulation_steps())
        cure = f"gradient_accumulation_steps {steps} keeps it" if not rest else f"no accumulation gives {was} here"
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
        converter.convert(folder, output, rank=dist.get_rank(), ranks=dist.get_world_size(), gather=share)
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
    values = [value]
    with answers():
        dist.broadcast_object_list(values, 0, group=share.group, device=torch.device("cpu"))
    return values[0]


def describe_together(folder, share):
    """The description, on all ranks."""
    checkpoint = None
    with together(share):
        if dist.get_rank() == 0:
            checkpoint = describe(folder)
    return from_rank_0(checkpoint, share)


def agree(here, there, what, strict):
    """Raise CheckpointError, or say, what is on one side only."""
    for names, side in ((here, "here, and not in the checkpoint"), (there, "in the checkpoint, and not here")):
        if names and strict:
            raise CheckpointError(f"{some(names)} {what} {side}; load_module_strict=False goes on without")
        if names:
            say(f"{some(names)} {what} {side}: left as it is")


def check_shape(name, tensor, saved):
    here, there = tuple(shape_of(tensor)), tuple(saved)
    if here != there and (len(there) != 1 or there[0] != math.prod(here)):  # DeepSpeed's converter may flatten it
        raise CheckpointError(f"{name} is {here} here, and {there} in the checkpoint")


def some(names):
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{', '.join(names[:5])}{more} {'are' if names[1:] else 'is'}"


def parameters_of(engine):
    return {engine.param_names[p]: p for p in engine.module.parameters() if p in engine.param_names}


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
        hosts = f"{seen[0][0]} and on {', '.join(other)}"
        raise CheckpointError(f"{folder} is not the same on {hosts}: it must be shared, or mirror.gather() before")
