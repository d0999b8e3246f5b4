# SPDX-License-Identifier: MIT
"""Resume a DeepSpeed training on any number of ranks and at any ZeRO stage, from its checkpoint as it is.

    import universal
    path, client_state = universal.load_checkpoint(engine, "checkpoints")   # instead of engine.load_checkpoint(...)

or, where a framework calls engine.load_checkpoint() itself, one line at the top of the script:

    universal.install()

DeepSpeed's loader wants the very shard that this rank has saved. So every rank makes up, in memory, the shard that it
would have saved itself, from the byte ranges of the shards that are there, and DeepSpeed takes it for the content of a
file: nothing is converted or written, any optimizer is restored. On the ranks that saved it is the same: there is one
way to load, and it looks at what it loads. The steps stand below: find, describe, read, make up the shard, load.

Tensor and pipeline parallelism change what a parameter is: such a checkpoint is converted first, and DeepSpeed's
universal loader reads it; mend() then restores what that loader leaves out.

Needs Python 3.10, torch, DeepSpeed, and ds_to_universal.py and torch_file.py beside it.
"""

import contextlib
import datetime
import functools
import io
import math
import os
import socket
import types
from pathlib import Path
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import bwc

import ds_to_universal as converter
from ds_to_universal import CheckpointError, together
from torch_file import packed

__version__ = "1.0"  # of the universal checkpoint tutorial, where this file is explained and tested
TIMEOUT = 1800  # seconds that a rank waits for another one, which may be reading
OPTIMIZERS = ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3", "BF16_Optimizer", "DeepSpeedZeRoOffload")
# What a parameter group says of how a step is computed, and not of what it computes.
FLAGS = {"params", "step", "initial_lr", "foreach", "fused", "capturable", "differentiable", "maximize",
         "decoupled_weight_decay"}  # fmt: skip
SHARDS = {"base_optimizer_state", "single_partition_of_fp32_groups", "optimizer_state_dict", "fp32_flat_groups"}
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
    options = dict(
        load_module_strict=load_module_strict, load_optimizer_states=load_optimizer_states and not load_module_only,
        load_lr_scheduler_states=load_lr_scheduler_states, load_module_only=load_module_only,
    )  # fmt: skip
    if custom_load_fn:
        raise CheckpointError("custom_load_fn would get no weights: they are read from the shards of the optimizer")
    with conversation(timeout) as share:
        found = on_rank_0(share, lambda: find(Path(load_dir), tag, missing_ok))
        if found is None:
            return None, {}
        check_same_folder(found[0], share)
        discard_gradients(engine)
        folder, client_state = load(engine, *found, options, share)
    if not load_module_only:  # DeepSpeed does not save it, and counts the micro-batches of a step by it
        engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()
    return str(folder), client_state


def mend(engine, folder):
    """Restore what DeepSpeed's universal loader leaves out of the universal checkpoint `folder`, after it has loaded
    it: hyper-parameters and step counts of the parameter groups, optimizer states other than Adam's, frozen
    parameters, buffers, the count of micro-batches. Raises CheckpointError."""
    with conversation(TIMEOUT) as share:
        checkpoint, reader, optimizer = on_rank_0(share, lambda: describe(Path(folder))), Reader(), engine.optimizer
        with together(share):
            # ZeRO-3 gives every group the hyper-parameters of the first.
            for group, saved in zip(optimizer.param_groups, unpack(checkpoint.optimizer)["param_groups"], strict=True):
                group.update(saved | {"params": group["params"]})
            held = layout(engine)
            for flat, _, names, parts in held:
                state, first = optimizer.optimizer.state[flat], checkpoint.parameters[names[0]]
                # ZeRO-3 lets all groups share one step count, which each group advances; also where there was none.
                state.pop("step", None)
                state.update(scalars(first))
                for key in first.states.keys() - state.keys() - {"fp32"}:
                    if engine.mp_world_size > 1:
                        raise CheckpointError(f"DeepSpeed's universal loader does not restore {key} of {names[0]}")
                    state[key] = reader.fill_flat(flat, key, first.states, parts, checkpoint.parameters).to(flat.device)
        # Frozen parameters and buffers are in no optimizer, and the loader looks nowhere else.
        keep(engine, checkpoint, unpack(checkpoint.models)["module"], reader, held, False, share)
        reader.check_together(share)
    engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()


def install():
    """Let whatever calls engine.load_checkpoint(), Hugging Face's Trainer say, call load_checkpoint() of this file.
    As with DeepSpeed's, a first start finds nothing and goes on: an absent or empty folder, and no tag."""
    deepspeed.DeepSpeedEngine.load_checkpoint = functools.partialmethod(load_checkpoint, missing_ok=True)


# -----------------------------------------------------------------------------
# 2. find: which checkpoint


def find(folder, tag, missing_ok):
    """(folder, description) of that tag, or of the newest that is whole. None where there is nothing and may be."""
    known = converter.tags(folder)
    if tag is not None:
        path = folder / str(tag)
        if path.is_dir():
            return path, describe(path)
        raise CheckpointError(f"{path} does not exist; in {folder} there is: {', '.join(sorted(known))}")
    if missing_ok and not known and not converter.named_by_latest(folder):
        return say(f"nothing was loaded: {folder} holds no checkpoint")
    for name in converter.newest_first(folder, say):
        try:
            return folder / name, describe(folder / name)
        except Exception as error:
            say(f"{name} is not whole, and is passed over: {error}")
    raise CheckpointError(f"{folder} holds no checkpoint that is whole")


# -----------------------------------------------------------------------------
# 3. describe: rank 0 looks into every file, and tells the others what is where


def describe(folder):
    """The converter's Description of a folder; None where it was saved without ZeRO. What has to be an object again is
    packed: `models` is rank 0's model states, with what of the module is no tensor; `optimizer` its optimizer state."""
    first = min(folder.glob("*mp_rank_00_model_states.pt"), default=None)
    sharded = (folder / "zero").is_dir() or any(folder.glob("*_optim_states.pt"))
    if first and not sharded and converter.load(first)[0].get("optimizer"):
        return None
    found = converter.describe(folder)
    model, optimizer = found.models[0], {key: value for key, value in found.optimizer.items() if key not in SHARDS}
    steps = model["global_steps"] - model["skipped_steps"]
    counted = {converter.number(parameter.scalars.get("step")) for parameter in found.parameters.values()}
    if found.ranks and counted - {None, steps}:  # an optimizer may have been started anew in mid-run
        check_weights(found, converter.load(first)[0]["module"] or {})
        say(f"{folder} is of step {steps}, its optimizer has counted {sorted(counted)}")
    optimizer |= {"param_slice_mappings": None, "param_groups": found.param_groups}
    return found._replace(models=pack_model(found, model), optimizer=packed(optimizer))


def check_weights(found, module):
    """The model states (at ZeRO-1 and 2 they hold the weights) and the shards are of one step."""
    for name, parameter in found.parameters.items():
        weight = converter.tensor_of(module.get(name))
        if weight and weight.stride == converter.whole("", b"", weight.size).stride:
            slices = converter.Slices.of(weight)
            masters, weights = (Reader().fill(torch.empty(min(1024, slices.numel), dtype=getattr(torch, s.dtype)), s)
                                for s in (parameter.states["fp32"], slices))  # fmt: skip
            if not same(masters.to(weights.dtype), weights):
                raise CheckpointError(f"{found.folder}: model states and shards are of different steps")


def pack_model(found, model):
    data = {"optimizer": None, "frozen_param_fragments": None}
    return packed(model | data | {"module": {name: model["module"][name] for name in found.extra}})


def unpack(data):
    """No pickle of a checkpoint is run but this one; its tensors were checked, and are those it needs."""
    return torch.load(io.BytesIO(data), weights_only=False)


def scalars(parameter):
    """What its optimizer state has beside tensors of its size, a step count say."""
    found = dict(parameter.scalars)
    for key, value in found.items():
        if isinstance(value, converter.Scalar):
            found[key] = torch.frombuffer(bytearray(value.data), dtype=getattr(torch, value.dtype)).view(value.shape)
    return found


# -----------------------------------------------------------------------------
# 4. read: every rank its own bytes, once; all together compare them with the checksums of the files


class Reader(converter.Reader):
    problem = None

    def fill(self, tensor, slices, start=0):
        """Read elements from `start` on, as many as the tensor on the CPU has, into its memory. Returns it."""
        buffer, done = memoryview(tensor.view(torch.uint8).numpy()) if tensor.numel() else b"", 0
        for record, first, nbytes in slices.cut(start, tensor.numel()):
            self.read_into(buffer[done : done + nbytes], record, first)
            done += nbytes
        return tensor

    def fill_flat(self, flat, key, states, parts, parameters):
        """A state, as flat as the masters are; of the masters themselves, where they are if that is on the CPU."""
        dtype = getattr(torch, states[key].dtype)
        state = flat.detach().to("cpu", dtype) if key == "fp32" else torch.zeros(flat.numel(), dtype=dtype)
        for name, start, at, numel in parts:
            if name in parameters:
                self.fill(state[at : at + numel], parameters[name].states[key], start)
        return state

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
    parameter, start in the tensor, numel). The formula is that of the converter's Slices: at ZeRO-3 every parameter is
    cut by itself, before that a group's parameters lie end to end, and the whole is cut."""
    optimizer, found = engine.optimizer, []
    if not hasattr(optimizer, "param_groups"):  # ZeRO-3 without an optimizer
        return []
    rank, alone = dist.get_rank(optimizer.dp_process_group), engine.zero_optimization_stage() == 3
    if alone:
        flats, groups = optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups
    else:
        flats = [group["params"][0] for group in optimizer.optimizer.param_groups]
        groups = getattr(optimizer, "round_robin_bit16_groups", None) or optimizer.bf16_groups
    paddings = getattr(optimizer, "round_robin_bit16_padding", None) or [[0] * len(params) for params in groups]
    for i, (flat, params) in enumerate(zip(flats, groups, strict=True)):
        parts, at = [], 0
        for p, padding in zip(params, paddings[i], strict=True):
            numel, share, origin = (p.ds_numel, p.partition_numel(), 0) if alone else (p.numel(), flat.numel(), at)
            first, last = max(0, rank * share - origin), min(numel, (rank + 1) * share - origin)
            if first < last:
                parts.append((engine.param_names[p], first, first + at - rank * share, last - first))
            at += share if alone else numel + padding
        group = optimizer.sub_group_to_group_id[i] if alone else i
        found.append((flat, group, [engine.param_names[p] for p in params], parts))
    return found


def compare(engine, checkpoint, held, strict):
    """Raise CheckpointError where the engine's parameters are not the checkpoint's, or not where layout() says."""
    group_of = {name: group for _, group, names, _ in held for name in names}
    parameters = parameters_of(engine)
    if held:
        agree(group_of.keys(), checkpoint.parameters.keys(), "trained", strict)
    for name in checkpoint.parameters.keys() & parameters.keys():
        saved, here = checkpoint.parameters[name], tuple(getattr(parameters[name], "ds_shape", parameters[name].shape))
        if here != saved.shape and saved.shape != (math.prod(here),):  # DeepSpeed's converter may flatten it
            raise CheckpointError(f"{name} is {here} here, and {saved.shape} in the checkpoint")
        if group_of.get(name, saved.group) != saved.group:
            raise CheckpointError(f"{name} is in parameter group {group_of[name]}, and was in {saved.group}")
    for flat, _, _, parts in held:
        for name, start, at, numel in parts:
            here = weights(parameters[name], start, numel)
            there = flat[at : at + numel].to(here)
            if there.numel() != numel or not same(here, there):
                both = f"{here[:3].tolist()} in the model, {there[:3].tolist()} there"
                raise CheckpointError(f"DeepSpeed {deepspeed.__version__} does not hold {name} as expected: {both}")


def compare_optimizer(engine, checkpoint, model, saved):
    """Raise CheckpointError where the checkpoint is of another kind of optimizer, or lacks its states."""
    groups = engine.optimizer.param_groups
    here, there = ({key for group in side for key in group} - FLAGS for side in (groups, saved["param_groups"]))
    for names in (here, there):
        if "bias_correction" in names:  # two makes of Adam
            names ^= {"bias_correction"} | ({"amsgrad"} - names)
    if there and here != there:
        raise CheckpointError(f"of another optimizer: it has {sorted(there)}, that of the engine {sorted(here)}{ALONE}")
    if left_out := saved.get("left_out"):
        raise CheckpointError(f"converted without {', '.join(left_out)} of the optimizer{ALONE}")
    stateful = any("betas" in group or group.get("momentum") for group in groups)
    lost = [name for name, saved in checkpoint.parameters.items() if len(saved.states) < 2 and 0 not in saved.shape]
    if stateful and lost and model["global_steps"] > model["skipped_steps"]:
        raise CheckpointError(f"there is no optimizer state of {lost[0]}{ALONE}")


def make_shard(engine, checkpoint, saved, held, reader, states):
    """What this rank would have saved, had these ranks at this stage written the checkpoint. states: with those of the
    optimizer, not only fp32."""
    optimizer, fp32, state, parameters = engine.optimizer, [], {}, parameters_of(engine)
    if "lr" not in saved["param_groups"][0]:
        take_rates(engine)
    groups = [group | {"params": []} for group in optimizer.param_groups]
    for group, there in zip(groups, saved["param_groups"], strict=False):
        group |= there | {"params": []}
    for i, (flat, group, names, parts) in enumerate(held):
        for name, start, at, numel in parts:
            if name in checkpoint.kept:  # it was frozen
                flat.detach()[at : at + numel] = weights(parameters[name], start, numel)
        state[i], known = {}, [checkpoint.parameters[name] for name in names if name in checkpoint.parameters]
        if known:
            for key in known[0].states if states else ["fp32"]:
                state[i][key] = reader.fill_flat(flat, key, known[0].states, parts, checkpoint.parameters)
            state[i] |= scalars(known[0])
        fp32.append(state[i].pop("fp32", flat))
        groups[group]["params"].append(i)
    base = {"state": {i: own for i, own in state.items() if own}, "param_groups": groups}
    shard = {
        "optimizer_state_dict": base, "fp32_flat_groups": fp32,  # ZeRO-3's names, then those of the others
        "base_optimizer_state": base, "single_partition_of_fp32_groups": fp32,
        "param_alignment_paddings": getattr(optimizer, "round_robin_bit16_padding", None),
        "ds_version": deepspeed.__version__,
    }  # fmt: skip
    for key in ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad"):
        here = getattr(optimizer, key, None)
        there = saved.get(key, here)  # the scaler of another precision is of no use
        shard[key] = there if type(there) is type(here) else here
    return shard


def keep(engine, checkpoint, objects, reader, held, strict, share, own=False):
    """Whatever of the module's state the optimizer does not restore: frozen parameters, buffers, and what a module adds
    to its state; of that, objects are no tensors. own: all but frozen parameters are in a file of this rank's own; else
    rank 0 reads one after the other for all."""
    module, trained = engine.module, {name for _, _, names, _ in held for name in names}
    tensors = dict(module.named_parameters(remove_duplicate=False))
    frozen, saved = {name for name in tensors if name not in trained}, checkpoint.kept | objects
    tensors |= dict(module.named_buffers(remove_duplicate=False))
    for name in checkpoint.parameters.keys() & frozen:  # it was trained
        masters = checkpoint.parameters[name].states["fp32"]
        saved[name] = converter.whole(masters.dtype, masters, checkpoint.parameters[name].shape)
    restored = {id(tensors[name]) for name in (*trained, *saved) if name in tensors}
    restored |= {id(tensor) for tensor in tensors.values() if 0 in getattr(tensor, "ds_shape", tensor.shape)}
    gone = set()
    with together(share):
        lost = {name for name in module.state_dict().keys() - saved.keys() if id(tensors.get(name)) not in restored}
        agree(lost, checkpoint.frozen.keys() - tensors.keys(), "frozen, or a buffer,", strict)
    for name in sorted({id(tensors.get(name, name)): name for name in saved}.values()):  # some have two names
        value, target = saved[name], tensors.get(name)
        if isinstance(value, converter.Tensor):
            value = reader.whole(value, None if own and name not in frozen else share)
        cut = [target] if hasattr(target, "ds_id") else []
        first = dist.get_global_rank(target.ds_process_group, 0) if cut else None
        with deepspeed.zero.GatheredParameters(cut, modifier_rank=first, enabled=bool(cut)):
            try:
                gone |= {*module.load_state_dict({name: value}, strict=False).unexpected_keys}
            except Exception as error:  # the others wait for the next tensor
                reader.problem = CheckpointError(f"{name}: {error}")
    with together(share):
        if reader.problem:
            raise reader.problem
        agree(set(), gone, "in the module's state", strict)


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
    stage, states = engine.zero_optimization_stage(), options["load_optimizer_states"]
    if (checkpoint is None) != (stage == 0):
        how = "with ZeRO: an engine at stage 1, 2 or 3" if checkpoint else "without ZeRO: an engine at stage 0"
        raise CheckpointError(f"the checkpoint was saved {how} can load it")
    if checkpoint is None:
        return "own"
    simple = plain(engine) and checkpoint.tensor * checkpoint.pipeline == 1
    if simple and not (states and checkpoint.uneven):
        return "reshard"
    degrees = [bwc.bwc_tensor_model_parallel_world_size(engine.mpu), bwc.bwc_pipeline_parallel_world_size(engine.mpu)]
    written = 0 if type(engine.optimizer).__name__ == "BF16_Optimizer" else stage
    here = [written, engine.seq_dp_world_size, engine.bfloat16_enabled(), *degrees]
    there = [checkpoint.stage, checkpoint.ranks, checkpoint.bf16, checkpoint.tensor, checkpoint.pipeline]
    if simple:
        held = layout(engine)
        compare(engine, checkpoint, held, True)
        if [*here, [names for _, _, names, _ in held]] != [*there, checkpoint.flats]:
            (_, key), why = next(iter(checkpoint.uneven.items()))
            raise CheckpointError(f"{key} of the optimizer {why}: it loads on its own ranks only{ALONE}")
    elif here != there:
        return "universal" if checkpoint.universal else "convert"
    if stage == 3 and not states:
        raise CheckpointError("DeepSpeed loads no weights alone of such an engine at ZeRO-3")
    return "own"


def load(engine, folder, checkpoint, options, share):
    """(folder, client state): the checkpoint is in the engine."""
    with together(share):
        how = choose(engine, checkpoint, options)
    if hasattr(engine.optimizer, "_clear_fp32_optimizer_param_groups"):  # filled for loading; Adagrad's never emptied
        engine.optimizer._clear_fp32_optimizer_param_groups()
    match how:
        case "reshard":
            return folder, reshard(engine, checkpoint, folder, options, share)
        case "convert":
            output = folder.with_name(f"{folder.name}_universal")
            if not on_rank_0(share, lambda: converter.is_newer(output, folder)):
                say(f"{folder} is of another tensor or pipeline layout: converting it into {output}")
                converter.convert(folder, output, rank=dist.get_rank(), ranks=dist.get_world_size(), gather=share)
            return load(engine, output, on_rank_0(share, lambda: describe(output)), options, share)
    with together(share):  # DeepSpeed does not look at the checksums of the files that it is going to read
        for path in sorted(folder.rglob("*.pt"))[dist.get_rank() :: dist.get_world_size()]:
            converter.verify(path)
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
            getattr(optimizer, "parameter_offload", optimizer).partition_all_parameters()
        if own:
            checkpoint = of_rank(checkpoint, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        model, saved, held = unpack(checkpoint.models), unpack(checkpoint.optimizer), layout(engine)
        compare_batch(engine, model)
        compare(engine, checkpoint, held, options["load_module_strict"])
        if held and options["load_optimizer_states"]:
            compare_optimizer(engine, checkpoint, model, saved)
    try:
        keep(engine, checkpoint, model["module"], reader, held, options["load_module_strict"], share, own)
        with together(share):
            client_state = load_rest(engine, folder, model | {"dp_world_size": ranks}, options)
            shard = held and make_shard(engine, checkpoint, saved, held, reader, options["load_optimizer_states"])
        reader.check_together(share)
        with together(share):
            if held:
                states = options["load_optimizer_states"]
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


def load_rest(engine, folder, model, options):
    """DeepSpeed's loader for all but the module and the optimizer: counters, scheduler. Returns the client state."""
    model["mp_world_size"] = engine.mp_world_size
    with mock.patch.multiple(
        engine, _get_all_ckpt_names=lambda *_: [str(folder)], load_module_state_dict=lambda *_, **__: None,
        checkpoint_engine=types.SimpleNamespace(load=lambda *_, **__: model), load_universal_checkpoint=lambda: False,
    ):  # fmt: skip
        more = options | {"load_optimizer_states": True}  # without, it would look for other files
        return engine._load_checkpoint(str(folder.parent), folder.name, **more)[1]


def of_rank(checkpoint, path):
    """The description with the client state, and what is neither trained nor frozen, of this rank's own file."""
    model, kept = converter.load(path)[0], dict(checkpoint.kept)
    for name in kept.keys() - checkpoint.frozen.keys():
        if tensor := converter.tensor_of(model["module"].get(name)):
            kept[name] = converter.compact(tensor)
    return checkpoint._replace(kept=kept, models=pack_model(checkpoint, model))


def take_rates(engine):
    """elastic_checkpoint saves no hyper-parameters; the scheduler knows what the rates are."""
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


def on_rank_0(share, work):
    """What the work of rank 0 gives, on all ranks."""
    with together(share):
        values = [work() if dist.get_rank() == 0 else None]
    with answers():
        dist.broadcast_object_list(values, 0, group=share.group, device=torch.device("cpu"))
    return values[0]


def agree(here, there, what, strict):
    """Raise CheckpointError, or say, which names are on one side only."""
    sides = {"here, and not in the checkpoint": here - there, "in the checkpoint, and not here": there - here}
    for side, names in sides.items():
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        text = f"{', '.join(sorted(names)[:5])}{more} {'are' if len(names) > 1 else 'is'} {what} {side}"
        if names and strict:
            raise CheckpointError(f"{text}; load_module_strict=False goes on without")
        if names:
            say(f"{text}: left as it is")


def check_same_folder(folder, share):
    """Every machine must see the same checkpoint: where no folder is shared, each has the shards of its own ranks."""
    with together(share):
        here = {entry.name: entry.stat().st_size for entry in os.scandir(folder)} if folder.is_dir() else None
    seen = share((socket.gethostname(), here))
    if other := sorted({host for host, entries in seen if entries != seen[0][1]}):
        where = f"{seen[0][0]} and on {', '.join(other)}"
        raise CheckpointError(f"{folder} is not the same on {where}: it must be shared, or mirror.gather() before")


def parameters_of(engine):
    return {engine.param_names[p]: p for p in engine.module.parameters() if p in engine.param_names}


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
