# SPDX-License-Identifier: MIT
"""Resume a DeepSpeed training run on any number of ranks and at any ZeRO stage, without converting its checkpoint.

    import universal
    path, client_state = universal.load_checkpoint(engine, "checkpoints")   # instead of engine.load_checkpoint(...)

or, where a framework calls engine.load_checkpoint() itself, one line at the top of the script:

    universal.install()

DeepSpeed's loader wants the very shard that this rank saved. So every rank assembles in memory the shard that it would
have saved itself, from byte ranges of the saved shards, and DeepSpeed takes it for the content of a file: nothing is
converted or written, and any optimizer is restored. The numbered parts below are the steps. The same steps load on the
ranks that saved the checkpoint, too. But tensor and pipeline parallelism change what a parameter is: such a checkpoint
is first converted, DeepSpeed's universal loader reads it, and mend() restores what that loader leaves out.

Needs Python 3.10, torch and DeepSpeed.
"""

import functools
import io
import math
import types
from pathlib import Path
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import bwc
from packaging.version import Version

from universal import checkpoint as files
from universal import converter
from universal.converter import together
from universal.ranks import (
    Damaged, Reader, check_same_folder, check_weights, conversation, damage, masters_of, say,
)  # fmt: skip
from universal.torch_file import CheckpointError, Tensor, compact, packed, tensor_of, verify
from universal.torch_file import load as read

TIMEOUT = 1800  # seconds that a rank waits for another one, which may still be reading
OPTIMIZERS = ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3", "BF16_Optimizer", "DeepSpeedZeRoOffload")
# Settings of a parameter group that change how a step is computed, but not its result.
FLAGS = {"params", "step", "initial_lr", "foreach", "fused", "capturable", "differentiable", "maximize",
         "decoupled_weight_decay"}  # fmt: skip
KEPT = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad", "left_out")  # of the optimizer's file
ALONE = "; load_optimizer_states=False continues with a fresh optimizer"
deepspeed_load = deepspeed.DeepSpeedEngine.load_checkpoint


# -----------------------------------------------------------------------------
# 1. what others call
def load_checkpoint(
    engine: deepspeed.DeepSpeedEngine, load_dir: str, tag: str | None = None, load_module_strict: bool = True,
    load_optimizer_states: bool = True, load_lr_scheduler_states: bool = True, load_module_only: bool = False,
    custom_load_fn: None = None, missing_ok: bool = False, timeout: float = TIMEOUT,
) -> tuple[str | None, dict]:  # fmt: skip
    """engine.load_checkpoint() for any number of ranks, any ZeRO stage, ordinary and universal checkpoints.

    Takes the same arguments as DeepSpeed's and returns (folder of the checkpoint, client state). On another number of
    ranks than the checkpoint's, the client state is that of rank 0. tag None: the tag that `latest` names, or a later
    one, if it is whole; otherwise the newest whole one. If the engine's config says load_universal, only converted ones
    count. load_module_strict=False: parameters that are new here keep their weights and start with a fresh optimizer
    state, those that are gone are left out, and a line names both. missing_ok: return (None, {}) if load_dir holds no
    checkpoint at all, not even a damaged one. timeout: seconds that a rank waits for another one. Raises
    CheckpointError, on all ranks, if there is no such checkpoint, or it is damaged, not whole, or of another model or
    optimizer; it never continues with initial values. The engine may then be half loaded: do not train it.
    """
    options = dict(
        load_module_strict=load_module_strict, load_optimizer_states=load_optimizer_states and not load_module_only,
        load_lr_scheduler_states=load_lr_scheduler_states, load_module_only=load_module_only,
    )  # fmt: skip
    if Version(version := deepspeed.__version__) < Version("0.16.4"):
        raise CheckpointError(f"universal needs DeepSpeed 0.16.4 or newer, and finds {version}")
    if custom_load_fn:
        raise CheckpointError("custom_load_fn would get no weights: they are read from the shards of the optimizer")
    if engine.has_moe_layers and missing_ok:  # install() takes nothing away: DeepSpeed loads experts on their own ranks
        return deepspeed_load(engine, load_dir, tag, **options)
    with conversation(timeout) as talk:
        names = talk.on_rank_0(lambda: find(Path(load_dir), tag, missing_ok, engine.load_universal_checkpoint()))
        if names is None:
            return None, {}
        why = "the lines above say why"
        for name in names:
            try:
                folder, client_state = load(engine, Path(load_dir, name), options, talk)
                break
            except Damaged as error:
                if tag is not None:
                    raise
                why = f"{name} is not: {error}"
                say(f"{name} is not whole, and is passed over: {error}")
        else:
            raise CheckpointError(f"{load_dir} holds no checkpoint that is whole; {why}")
    count = engine.gradient_accumulation_steps()  # DeepSpeed counts a step's micro-batches, but does not save that
    engine.micro_steps = (engine.micro_steps // count if load_module_only else engine.global_steps) * count
    return str(folder), client_state


def mend(engine: deepspeed.DeepSpeedEngine, folder: str) -> None:
    """Restore what DeepSpeed's universal loader leaves out of the universal checkpoint `folder`: hyperparameters, step
    counts, frozen parameters, buffers, the count of micro-batches. Raises CheckpointError if it cannot."""
    with conversation(TIMEOUT) as talk:
        checkpoint, optimizer = talk.on_rank_0(lambda: describe(Path(folder))), engine.optimizer
        with together(talk):
            # ZeRO-3 gives every group the hyperparameters of the first.
            for group, saved in zip(optimizer.param_groups, unpack(checkpoint.optimizer)["param_groups"], strict=True):
                group.update(saved | {"params": group["params"]})
            held = layout(engine)
            for flat, _, names, _ in held:
                state, saved = optimizer.optimizer.state[flat], checkpoint.parameters[names[0]]
                # At ZeRO-3 all groups share one step count, which each group advances, even if there was none.
                state.pop("step", None)
                state.update(scalars(saved))
                if left_out := saved.states.keys() - state.keys() - {"fp32"}:
                    raise CheckpointError(f"DeepSpeed's universal loader does not restore {left_out} of the optimizer")
        # Frozen parameters and buffers are in no optimizer, and DeepSpeed's loader looks nowhere else.
        keep(engine, kept_here(engine, checkpoint, held) | unpack(checkpoint.models)["module"], held, False, talk)
    engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()


def install() -> None:
    """Make every call of engine.load_checkpoint(), such as Hugging Face's Trainer's, call load_checkpoint() of this
    file. As with DeepSpeed's, a first start (no tag, and an absent or empty folder) finds nothing and continues. A
    command that has no script starts with the folder start/ on its PYTHONPATH."""
    if (other := getattr(deepspeed.DeepSpeedEngine, "universal", __file__)) != __file__:
        raise CheckpointError(f"two copies of universal: {other} is installed, {__file__} cannot be")
    deepspeed.DeepSpeedEngine.universal = __file__
    deepspeed.DeepSpeedEngine.load_checkpoint = functools.partialmethod(load_checkpoint, missing_ok=True)


# -----------------------------------------------------------------------------
# 2. find and describe: rank 0 looks into every file, and tells the other ranks what is where
def find(folder, tag, missing_ok, converted):
    """[tag], or without a tag all tags, in the order in which to try them. None if there are none, and missing_ok
    allows that. converted: only universal checkpoints."""
    known = files.tags(folder)
    if tag is not None:
        if (folder / str(tag)).is_dir():
            return [str(tag)]
        raise CheckpointError(f"{folder / str(tag)} does not exist; in {folder} there is: {', '.join(known)}")
    if missing_ok and not known and not files.named_by_latest(folder):
        return say(f"nothing was loaded: {folder} holds no checkpoint")
    return [name for name in files.newest_first(folder, say) if not converted or (folder / name / "zero").is_dir()]


def describe(folder):
    """The converter's Description of a folder; None if it was saved without ZeRO. What must become an object again is
    packed: `models` is rank 0's model states, with what is in the module and is not a tensor; `optimizer` is its
    optimizer state."""
    alone = folder / "mp_rank_00_model_states.pt"
    if alone.exists() and not any(folder.glob("*_optim_states.pt")) and read(alone).get("param_shapes") is None:
        return None
    found = files.describe(folder)
    optimizer = {key: found.optimizer.get(key) for key in KEPT} | {"param_groups": found.param_groups}
    optimizer["beside"] = ({}, {}) if found.universal else files.beside_states(found.optimizer)
    doubts = [problem.text for problem in found.problems if not problem.fatal]  # such as that it may be of two steps
    if found.tensor * found.pipeline == 1:
        check_weights(found, doubts)
    for text in doubts + files.left_over(found):
        say(text)
    return found._replace(models=pack_model(found, found.models[0]), optimizer=packed(optimizer))


def pack_model(found, model):
    module = {name: model["module"][name] for name in found.extra}
    return packed(model | {"optimizer": None, "frozen_param_fragments": None, "module": module})


def unpack(data):
    """The only place that runs a checkpoint's pickle. Its tensors were checked, and are only those that are needed."""
    return torch.load(io.BytesIO(data), weights_only=False)


def scalars(parameter):
    """What a parameter's optimizer state has besides tensors of its size, such as a step count."""
    return unpack(packed(parameter.scalars))


# -----------------------------------------------------------------------------
# 3. assemble the shard that this rank would have saved
def layout(engine):
    """What this rank holds: [(flat fp32 tensor, its parameter group, names, parts)]. A part is (name, start in the
    parameter, start in the tensor, numel). The formula is that of the converter's Slices: at ZeRO-3 every parameter is
    cut by itself; at ZeRO-1/2 a group's parameters lie end to end, and the whole is cut."""
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
        names, parts, at = [engine.param_names[p] for p in params], [], 0
        for name, p, padding in zip(names, params, paddings[i], strict=True):
            numel, share, origin = (p.ds_numel, p.partition_numel(), 0) if alone else (p.numel(), flat.numel(), at)
            first, last = max(0, rank * share - origin), min(numel, (rank + 1) * share - origin)
            if first < last:
                parts.append((name, first, first + at - rank * share, last - first))
            at += share if alone else numel + padding
        found.append((flat, optimizer.sub_group_to_group_id[i] if alone else i, names, parts))
    return found


def compare(engine, checkpoint, held, strict, trained=None):
    """Raise CheckpointError if the engine's parameters are not the checkpoint's. trained: the names on all ranks, if
    the model is cut."""
    group_of = {name: group for _, group, names, _ in held for name in names}
    parameters = {name: parameter for parameter, name in engine.param_names.items()}
    if held:
        agree(trained or group_of.keys(), checkpoint.parameters.keys(), "trained", strict)
    for name in sorted(checkpoint.parameters.keys() & parameters.keys()):  # all ranks tell the same one
        saved, here = checkpoint.parameters[name], tuple(getattr(parameters[name], "ds_shape", parameters[name].shape))
        flattened = checkpoint.universal and saved.shape == (math.prod(here),)  # DeepSpeed's converter may flatten it
        if here != saved.shape and not flattened and not trained:
            raise CheckpointError(f"{name} is {here} here, and {saved.shape} in the checkpoint")
        if group_of.get(name, saved.group) != saved.group:
            raise CheckpointError(f"{name} is in parameter group {group_of[name]}, and was in {saved.group}")


def agree(here, there, what, strict):
    """Raise CheckpointError, or print, which names are on one side only."""
    sides = {"here, and not in the checkpoint": here - there, "in the checkpoint, and not here": there - here}
    for side, names in sides.items():
        text = f"{what} {side} ({len(names)}): {', '.join(sorted(names)[:5])}"
        if names and strict:
            raise CheckpointError(f"{text}; load_module_strict=False continues without")
        if names:
            say(f"{text}: left as it is")


def compare_optimizer(engine, checkpoint, model, saved):
    """Raise CheckpointError if the checkpoint is of another kind of optimizer, or lacks its states."""
    sides, makes = (engine.optimizer.param_groups, saved["param_groups"]), {"bias_correction": "amsgrad"}  # of Adam
    here, there = ({makes.get(key, key) for group in side for key in group} - FLAGS for side in sides)
    if there and here != there:
        raise CheckpointError(f"of another optimizer: it has {sorted(there)}, that of the engine {sorted(here)}{ALONE}")
    if hasattr(engine.optimizer, "backup_optimizer"):
        raise CheckpointError(f"DeepSpeed restores no state that offload_optimizer.ratio leaves on the GPU{ALONE}")
    if left_out := saved.get("left_out"):
        raise CheckpointError(f"converted without {', '.join(left_out)} of the optimizer{ALONE}")
    stateful = any("betas" in group or group.get("momentum") for group in sides[0])
    lost = [name for name, saved in checkpoint.parameters.items() if len(saved.states) < 2]
    if stateful and lost and model["global_steps"] > model["skipped_steps"]:
        raise CheckpointError(f"there is no optimizer state of {lost[0]}{ALONE}")


def read_states(engine, checkpoint, held, reader, states):
    """[{"fp32": masters, "exp_avg": ..., "step": ...}]: what this rank would have saved for each flat tensor, if these
    ranks had written the checkpoint at this stage. Masters are the fp32 weights. states: read more than fp32."""
    parameters = {name: parameter for parameter, name in engine.param_names.items()}
    whole = engine.zero_optimization_stage() < 3 and not getattr(engine.optimizer, "cpu_offload", False)
    found = []
    for flat, group, names, parts in held:
        mine = {"fp32": flat}
        if known := next((checkpoint.parameters[name] for name in names if name in checkpoint.parameters), None):
            for key in known.states if states else ["fp32"]:
                like, places = flat, parts
                if whole and key == "momentum_buffer" and engine.optimizer.param_groups[group].get("use_muon"):
                    places = []
                    for name, *_ in parts:
                        places.append((name, 0, sum(numel for *_, numel in places), parameters[name].numel()))
                    like = torch.empty(sum(numel for *_, numel in places))
                mine[key] = reader.fill_flat(like, key, known.states[key].dtype, places, checkpoint.parameters)
            mine |= scalars(known)
        found.append(mine)
    return found


def make_shard(engine, saved, held, found, states):
    """The content of this rank's shard file. found: the result of read_states()."""
    optimizer, fp32, state = engine.optimizer, [], {}
    groups = [group | {"params": []} for group in optimizer.param_groups]
    for group, there in zip(groups, saved["param_groups"], strict=False):
        group |= there | {"params": []}
    if "lr" not in saved["param_groups"][0]:
        say("elastic_checkpoint saves no hyper-parameters: the engine's own are used, and the scheduler's rates")
        follows = getattr(engine.lr_scheduler, "optimizer", None) is optimizer.optimizer  # it replaces Adagrad
        for group, rate in zip(groups, follows and getattr(engine.lr_scheduler, "_last_lr", None) or [], strict=False):
            group["lr"] = rate
    for i, ((_, group, _, _), mine) in enumerate(zip(held, found, strict=True)):
        fp32.append(mine.pop("fp32"))
        state[i] = mine
        groups[group]["params"].append(i)
    more, keys = saved["beside"] if states else ({}, {})
    base = keys | {"state": {i: own for i, own in state.items() if own} | more, "param_groups": groups}
    shard = {
        "optimizer_state_dict": base, "fp32_flat_groups": fp32,  # ZeRO-3's names, then those of ZeRO-1/2
        "base_optimizer_state": base, "single_partition_of_fp32_groups": fp32,
        "param_alignment_paddings": getattr(optimizer, "round_robin_bit16_padding", None),
        "ds_version": deepspeed.__version__,
    }  # fmt: skip
    for key in KEPT:  # a loss scaler of another precision is of no use, nor a constant one
        here = getattr(optimizer, key, None)
        fits = states and type(saved[key]) is type(here) and getattr(here, "dynamic", key != "dynamic_loss_scale")
        shard[key] = saved[key] if fits else here
    return shard


def places_of(engine, held):
    """(name, where the weights of this part are, the number of the flat tensor, the slice there), for all parts."""
    parameters = {name: parameter for parameter, name in engine.param_names.items()}
    for i, (_, _, _, parts) in enumerate(held):
        for name, start, at, numel in parts:
            parameter = parameters[name]
            weights = parameter.ds_tensor if hasattr(parameter, "ds_id") else parameter.flatten()[start:]
            yield name, weights[:numel], i, slice(at, at + numel)


def check_places(engine, held):
    """Raise CheckpointError if masters, made from the weights now, are not where layout() says."""
    engine.optimizer.refresh_fp32_params()  # not those of an earlier load that failed
    for name, weights, i, place in places_of(engine, held):
        here, there = weights.nan_to_num(), held[i][0][place].to(weights).nan_to_num()
        if not torch.equal(here, there):
            text = f"DeepSpeed {deepspeed.__version__} does not hold {name} as expected: "
            raise CheckpointError(f"{text}{here[:3].tolist()} in the model, {there[:3].tolist()} there")


def kept_here(engine, checkpoint, held):
    """{name: Tensor}: the part of the module's state that the optimizer does not restore: frozen parameters,
    buffers."""
    trained = {name for _, _, names, _ in held for name in names}
    frozen = dict(engine.module.named_parameters(remove_duplicate=False)).keys() - trained
    names = checkpoint.parameters.keys() & frozen  # those that are trained in the checkpoint
    return checkpoint.kept | {name: masters_of(checkpoint.parameters[name]) for name in names}


def keep(engine, saved, held, strict, talk, own=False):
    """Restore these tensors, and what a module adds to its state, which need not be tensors. own: all but frozen
    parameters are in this rank's own file; otherwise rank 0 reads one after the other for all."""
    module, reader, gone, done = engine.module, Reader(), set(), set()
    trained = {name for _, _, names, _ in held for name in names}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    tensors = parameters | dict(module.named_buffers(remove_duplicate=False))
    for name in sorted(saved):
        value, target = saved[name], tensors.get(name, name)
        if id(target) in done:  # some have two names
            continue
        done.add(id(target))
        if isinstance(value, Tensor):
            value = reader.whole(value, talk, own and name not in parameters)
        with deepspeed.zero.GatheredParameters([target], modifier_rank=0), together(talk):
            if getattr(target, "shape", None) == getattr(value, "shape", ()):
                target.data.copy_(value)
            else:  # by its own module only: other modules may reset what they do not find
                owner, _, key = name.rpartition(".")
                left = module.get_submodule(owner).load_state_dict({key: value}, strict=False)
                gone |= {name for _ in left.unexpected_keys}
    done |= {id(tensors[name]) for name in trained}
    done |= {id(tensor) for tensor in tensors.values() if 0 in getattr(tensor, "ds_shape", tensor.shape)}
    lost = {name for name in module.state_dict().keys() - saved.keys() if id(tensors.get(name)) not in done}
    with together(talk):
        agree(lost, gone, "in the module's state", strict)
    reader.check_together(talk)


# -----------------------------------------------------------------------------
# 4. load
def choose(engine, checkpoint, options, trained):
    """How to load: "reshard"; "convert", for another layout; "universal", with DeepSpeed's universal loader; "own",
    with DeepSpeed's ordinary loader, for what layout() does not describe and exactly these ranks saved."""
    stage, states = engine.zero_optimization_stage(), options["load_optimizer_states"]
    kind = type(engine.optimizer).__name__
    if (checkpoint is None) != (stage == 0):
        without = "out" * (not checkpoint)
        raise CheckpointError(f"the checkpoint was saved with{without} ZeRO, and the engine is at stage {stage}")
    if checkpoint is None:
        return "own"
    odd = isinstance(engine.module, deepspeed.pipe.PipelineModule)
    odd = odd or engine.mp_world_size > 1 or checkpoint.tensor * checkpoint.pipeline > 1
    odd = odd or engine.zero_nvme_offload_optimizer() or kind not in OPTIMIZERS
    if not odd and not (states and checkpoint.uneven):
        return "reshard"
    if odd and kind in OPTIMIZERS:
        compare(engine, checkpoint, layout(engine), options["load_module_strict"], trained)
        if states:
            compare_optimizer(engine, checkpoint, unpack(checkpoint.models), unpack(checkpoint.optimizer))
    degrees = [bwc.bwc_tensor_model_parallel_world_size(engine.mpu), bwc.bwc_pipeline_parallel_world_size(engine.mpu)]
    written = 0 if kind == "BF16_Optimizer" else 3 if stage == 3 else 1
    here = [written, engine.seq_dp_world_size, engine.bfloat16_enabled(), *degrees]
    there = [checkpoint.stage, checkpoint.ranks, checkpoint.bf16, checkpoint.tensor, checkpoint.pipeline]
    if not odd:
        held = layout(engine)
        compare(engine, checkpoint, held, True)
        here.append([names for _, _, names, _ in held])
        there.append(checkpoint.flats)
        if here != there:
            (_, key), why = next(iter(checkpoint.uneven.items()))
            raise CheckpointError(f"{key} of the optimizer {why}: it loads on its own ranks only{ALONE}")
    elif here != there and states:
        return "universal" if checkpoint.universal else "convert"
    if here != there or stage == 3 and not states:
        raise CheckpointError("DeepSpeed loads no weights alone of another layout, nor of such an engine at ZeRO-3")
    return "own"


def load(engine, folder, options, talk):
    """Load the checkpoint into the engine. Returns (folder, client state). Raises Damaged before it touches the
    engine."""
    checkpoint = talk.on_rank_0(damage()(lambda: describe(folder)))
    check_same_folder(folder, talk)
    trained = set().union(*talk({name for parameter, name in engine.param_names.items() if parameter.requires_grad}))
    with together(talk):
        how = choose(engine, checkpoint, options, trained)
    if hasattr(engine.optimizer, "_clear_fp32_optimizer_param_groups"):  # filled for loading; Adagrad never empties it
        engine.optimizer._clear_fp32_optimizer_param_groups()
    match how:
        case "reshard":
            return folder, reshard(engine, checkpoint, folder, options, talk)
        case "convert":
            output = folder.with_name(f"{folder.name}_universal")
            if not talk.on_rank_0(lambda: files.is_newer(output, folder)):
                say(f"{folder} is of another tensor or pipeline layout: converting it into {output}")
                with damage():
                    converter.convert(folder, output, rank=dist.get_rank(), ranks=dist.get_world_size(), gather=talk)
            return load(engine, output, options, talk)
    with together(talk), damage():  # DeepSpeed ignores the checksums of the files that it reads
        for path in sorted(folder.rglob("*.pt"))[dist.get_rank() :: dist.get_world_size()]:
            if checkpoint is None or path.name not in checkpoint.left:
                verify(path)
    discard_gradients(engine)
    with mock.patch.multiple(engine, load_universal_checkpoint=lambda: how == "universal"):
        _, client_state = deepspeed_load(engine, str(folder.parent), folder.name, **options)
    if checkpoint is None and not options["load_optimizer_states"] and hasattr(engine.optimizer, "refresh_fp32_params"):
        engine.optimizer.refresh_fp32_params()
    if how == "universal":
        mend(engine, folder)
    return folder, client_state


def reshard(engine, checkpoint, folder, options, talk):
    """Run DeepSpeed's ordinary loader with the assembled shard in place of the file. Returns the client state."""
    optimizer, reader, stage = engine.optimizer, Reader(), engine.zero_optimization_stage()
    strict, states = options["load_module_strict"], options["load_optimizer_states"]
    rank, ranks = dist.get_rank(optimizer.dp_process_group), dist.get_world_size(optimizer.dp_process_group)
    own = checkpoint.stage == 3 and checkpoint.ranks == ranks  # each rank had a file of model states for itself
    with together(talk):
        if stage == 3:
            getattr(optimizer, "parameter_offload", optimizer).partition_all_parameters()
        if own:
            with damage():
                checkpoint = of_rank(checkpoint, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        model, saved, held = unpack(checkpoint.models), unpack(checkpoint.optimizer), layout(engine)
        compare_batch(engine, model)
        compare(engine, checkpoint, held, strict)
        if held and states:
            compare_optimizer(engine, checkpoint, model, saved)
        if held:
            check_places(engine, held)
    kept = kept_here(engine, checkpoint, held)
    with together(talk), damage():
        found = read_states(engine, checkpoint, held, reader, states)
        for i, (name, tensor) in enumerate(kept.items()):  # rank 0 reads them again, now that all are known to be right
            if i % ranks == rank or own and name not in checkpoint.frozen:
                for _ in tensor.storage.chunks(reader):
                    pass
    reader.check_together(talk)
    discard_gradients(engine)
    keep(engine, kept | model["module"], held, strict, talk, own)
    with together(talk):
        for name, weights, i, place in places_of(engine, held):
            if name not in checkpoint.parameters:  # frozen in the checkpoint, or new
                found[i]["fp32"][place].copy_(weights)
        client_state = load_rest(engine, folder, model, options)
        if held:
            shard = make_shard(engine, saved, held, found, states)
            optimizer.load_state_dict([shard] * ranks, load_optimizer_states=states, load_from_fp32_weights=True)
            keep_dtypes(optimizer, shard, held if states else [])
    if stage < 3:
        optimizer.update_lp_params()
    elif held:
        optimizer.checkpoint_event_epilogue()
    if checkpoint.universal:
        say(f"{folder}, a universal checkpoint, loaded on {ranks}")
    else:
        say(f"{folder}, written by {checkpoint.ranks} ranks, loaded on {ranks} without conversion")
    return client_state


def keep_dtypes(optimizer, shard, held):
    """Restore the states' dtypes: torch has given every state the dtype of its masters."""
    for i, (flat, *_) in enumerate(held):
        live, masters = optimizer.optimizer.state[flat], shard["fp32_flat_groups"][i]
        for key, value in shard["base_optimizer_state"]["state"].get(i, {}).items():
            now = live.get(key)
            tensors = torch.is_tensor(value) and torch.is_tensor(now) and masters.dtype == flat.dtype
            if tensors and value.dtype != now.dtype:
                live[key] = value.to(now.device)


def load_rest(engine, folder, model, options):
    """Run DeepSpeed's loader for all but the module and the optimizer: counters, scheduler. Returns the client
    state."""
    model |= {"mp_world_size": engine.mp_world_size, "dp_world_size": engine.dp_world_size}
    # With load_module_only it would make the masters, which are already read, from the engine's weights again.
    unread = mock.patch.object(engine.optimizer, "refresh_fp32_params", lambda: None, create=True)
    with unread, mock.patch.multiple(
        engine, _get_all_ckpt_names=lambda *_: [str(folder)], load_module_state_dict=lambda *_, **__: None,
        checkpoint_engine=types.SimpleNamespace(load=lambda *_, **__: model), load_universal_checkpoint=lambda: False,
    ):  # fmt: skip
        more = options | {"load_optimizer_states": True}  # without, it would look for other files
        return engine._load_checkpoint(str(folder.parent), folder.name, **more)[1]


def of_rank(checkpoint, path):
    """The description, with the client state, and what is neither trained nor frozen, from this rank's own file."""
    model, kept = read(path), dict(checkpoint.kept)
    for name in kept.keys() - checkpoint.frozen.keys():
        if tensor := tensor_of(model["module"].get(name)):
            kept[name] = compact(tensor)
    return checkpoint._replace(kept=kept, models=pack_model(checkpoint, model))


def discard_gradients(engine):
    """Discard the gradients of an unfinished step; the next step would add to them."""
    optimizer = engine.optimizer
    if engine.micro_steps % engine.gradient_accumulation_steps():
        say("the gradients of half a step are discarded")
    if hasattr(optimizer, "zero_grad"):
        optimizer.zero_grad()
    if hasattr(optimizer, "all_grad_tensors"):  # ZeRO-1 and 2 keep their own sums, and count from -1
        optimizer.all_grad_tensors.clear()
        optimizer.averaged_gradients.clear()
        optimizer.micro_step_id = -1


def compare_batch(engine, model):
    """Warn if the global batch is not the checkpoint's, for example because the accumulation steps were left as they
    were."""
    config = model.get("ds_config")
    was = config.get("train_batch_size") if isinstance(config, dict) else None  # older versions: a file's path
    now = engine.train_batch_size()
    if isinstance(was, int) and was != now:
        steps, rest = divmod(was, now // engine.gradient_accumulation_steps())
        cure = "other ranks or micro-batches keep it" if rest else f"gradient_accumulation_steps {steps} keeps it"
        say(f"WARNING: the global batch was {was}, and is {now} now: {cure}")
