"""DeepSpeed ZeRO checkpoint -> universal checkpoint.

    python ds_to_universal.py --input_folder checkpoints/global_step100 \
        --output_folder checkpoints/global_step100_universal --num_extract_workers 4 --num_merge_workers 4

Input, written by engine.save_checkpoint() on N ranks (ZeRO-1/2, then ZeRO-3):

    mp_rank_00_model_states.pt                         buffers, parameter shapes, schedule, client state
    [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt   rank R's slice of the flattened fp32 weights and moments

    zero_pp_rank_R_mp_rank_00_model_states.pt
    [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt   rank R's slice of every single parameter

Output, the same at every stage, so that it resumes on any number of ranks and at ZeRO 1, 2 and 3:

    zero/<parameter>/fp32.pt, exp_avg.pt, ...          {"param": the whole tensor in its shape, "cat_dim": 0}
    zero/<parameter>/step.pt                           the optimizer's step count
    zero/optimizer_state.pt                            loss scale and parameter groups, no tensors
    mp_rank_00_model_states.pt                         as in the input; `module` keeps buffers and frozen parameters
    zero_pp_rank_0_mp_rank_00_model_states.pt          the same file under the name that ZeRO-3 looks for
    ../latest_universal                                the name of the output folder

Shards are mapped, not read: each element goes once from its shard to the one file it belongs to. Needs torch alone.
"""

import argparse
import math
import os
import pickle
import re
import shutil
import sys
import time
import types
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from tqdm import tqdm


class CheckpointError(Exception):
    """What is wrong with the checkpoint or the folders, in one line."""


# -----------------------------------------------------------------------------
# reading

# The classes inside a ZeRO checkpoint. Stand-ins of the same name spare the import of DeepSpeed and, with
# weights_only=True, no other code in a checkpoint can run.
STAND_INS = {}
for path in (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.utils.tensor_fragment.fragment_address",
):
    module, name = path.rsplit(".", 1)
    STAND_INS[path] = type(name, (), {"__module__": module})
STAND_INS["deepspeed.runtime.zero.config.ZeroStageEnum"] = int


def load(path):
    """The content of a checkpoint file, its tensors mapped into memory."""
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except Exception as error:
        what = "truncated or not a checkpoint file" if not zipfile.is_zipfile(path) else str(error).split("\n")[0]
        raise CheckpointError(f"{path}: {what}") from error


def find_shards(folder):
    """The optimizer shards as {rank: path}."""
    shards = {}
    for path in sorted(folder.glob("*_optim_states.pt")):
        match = re.fullmatch(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt", path.name)
        if match is None:
            raise CheckpointError(f"{path} is not the optimizer shard of a ZeRO checkpoint")
        rank, mp_rank = map(int, match.groups())
        if mp_rank:
            raise CheckpointError(f"{path}: tensor or pipeline parallel checkpoints are not converted yet")
        shards[rank] = path
    if not shards:
        raise CheckpointError(f"{folder} holds no *_optim_states.pt: it is not a ZeRO checkpoint")
    return shards


def fragments(rank, ranks, optimizer, param_shapes):
    """Yields (name, state, flat tensor, start, numel) for every piece of every parameter that a shard holds,
    and (name, "step", value, None, None).

    ZeRO-1/2: a group's parameters are laid end to end and cut into one slice per rank; the shard says what it holds.
    ZeRO-3: every parameter is cut by itself, ceil(numel / ranks) elements per rank, in the order of param_shapes.
    """
    if "fp32_flat_groups" in optimizer:
        flat, states = optimizer["fp32_flat_groups"], optimizer["optimizer_state_dict"]["state"]
    else:
        flat, states = optimizer["single_partition_of_fp32_groups"], optimizer["base_optimizer_state"]["state"]
    for group, fp32 in enumerate(flat):
        tensors, scalars = {"fp32": fp32}, {}
        for key, value in states.get(group, {}).items():
            target = tensors if torch.is_tensor(value) and value.dim() else scalars
            target[key] = value
        if "fp32_flat_groups" in optimizer:
            pieces, offset = [], 0
            for name, shape in param_shapes[group].items():
                share = math.ceil(math.prod(shape) / ranks)
                pieces.append((name, offset, max(0, min(share, math.prod(shape) - rank * share))))
                offset += share
        else:
            mapping = optimizer["param_slice_mappings"][group]
            pieces = [(name, address.start, address.numel) for name, address in mapping.items()]
        for name, start, numel in pieces:
            for key, tensor in tensors.items():
                yield name, key, tensor, start, numel
            if "step" in scalars:
                yield name, "step", scalars["step"], None, None


def read(folder, workers):
    """The whole checkpoint, mapped.

    Returns (model, optimizer, parameters): rank 0's model states with `module` cut down to buffers and whole frozen
    parameters; rank 0's optimizer state; {name: {"shape", "step", state: [(flat tensor, start, numel) by rank]}}.
    """
    shards = find_shards(folder)
    first = load(shards[min(shards)])["optimizer_state_dict"]
    stage3, ranks = "fp32_flat_groups" in first, max(shards) + 1
    if isinstance(first["partition_count"], int):
        ranks = first["partition_count"]
    elif first["partition_count"]:
        ranks = max(first["partition_count"])
    suffix = shards[min(shards)].name.split("_pp_rank_")
    for rank in range(ranks):
        if rank not in shards:
            name = f"{suffix[0]}_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            raise CheckpointError(f"{folder / name} is missing")

    with ThreadPoolExecutor(workers) as pool:
        optimizers = list(pool.map(lambda rank: load(shards[rank])["optimizer_state_dict"], range(ranks)))
        if stage3:
            names = [folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(ranks)]
        else:
            names = [folder / "mp_rank_00_model_states.pt"]
        models = list(pool.map(load, names))
    model = models[0]

    parameters = {}
    for shapes in model["param_shapes"]:
        for name, shape in shapes.items():
            parameters[name] = {"shape": tuple(shape), "step": None, "states": {}}
    for rank, optimizer in enumerate(optimizers):
        for name, key, value, start, numel in fragments(rank, ranks, optimizer, model["param_shapes"]):
            if key == "step":
                parameters[name]["step"] = value
            else:
                parameters[name]["states"].setdefault(key, []).append((value, start, numel))
    for name, parameter in parameters.items():
        for key, pieces in parameter["states"].items():
            got, wanted = sum(numel for _, _, numel in pieces), math.prod(parameter["shape"])
            if got != wanted:
                raise CheckpointError(f"{folder}: the shards hold {got} of {wanted} elements of {name} ({key})")

    frozen = {}
    for name, shape in (model.get("frozen_param_shapes") or {}).items():
        pieces = [m["frozen_param_fragments"][name].flatten() for m in models]
        frozen[name] = torch.cat(pieces)[: math.prod(shape)].view(shape)
    if model["module"] is not None:
        kept = set(model["buffer_names"])
        if not stage3:  # the names that no optimizer and no alias of a tied weight accounts for
            kept |= set(model["module"]) - set(parameters) - set(model.get("shared_params") or {})
        model["module"] = {name: model["module"][name].clone() for name in kept} | frozen
        model["frozen_param_fragments"] = None
    return model, optimizers[0], parameters


# -----------------------------------------------------------------------------
# writing


class Pickler(pickle._Pickler):
    """Stores a stand-in under DeepSpeed's name; pickle's own would import DeepSpeed to make sure of it."""

    def save_global(self, obj, name=None):
        if obj not in STAND_INS.values() or obj is int:
            return super().save_global(obj, name)
        self.write(pickle.GLOBAL + f"{obj.__module__}\n{obj.__name__}\n".encode())
        self.memoize(obj)


def save(state, path):
    torch.save(state, path, pickle_module=types.SimpleNamespace(__name__="pickle", Pickler=Pickler))


def write_parameter(folder, name, parameter):
    """Write zero/<name>/; returns the bytes of tensors written."""
    folder = folder / "zero" / name
    folder.mkdir(parents=True)
    written = 0
    for key, pieces in parameter["states"].items():
        # cat copies; a view would take the whole shard behind it into the file
        tensor = torch.cat([flat.detach().narrow(0, start, numel) for flat, start, numel in pieces])
        tensor = tensor.view(parameter["shape"])
        torch.save({"param": tensor, "cat_dim": 0}, folder / f"{key}.pt")
        written += tensor.nbytes
    if parameter["step"] is not None:
        torch.save(parameter["step"], folder / "step.pt")
    return written


def global_state(optimizer, parameters):
    """zero/optimizer_state.pt: what the loaders of ZeRO-1/2 and of ZeRO-3 each ask for, without tensors."""
    stage3 = "fp32_flat_groups" in optimizer
    base = optimizer["optimizer_state_dict" if stage3 else "base_optimizer_state"]
    dropped = ("base_optimizer_state", "param_slice_mappings", "single_partition_of_fp32_groups", "fp32_flat_groups")
    state = {key: value for key, value in optimizer.items() if key not in dropped}
    step = next((p["step"] for p in parameters.values() if p["step"] is not None), base["param_groups"][0].get("step"))
    state["param_groups"] = base["param_groups"]
    # The loader of ZeRO-3 gives every group what the first one says. Where the groups differ it had better say nothing.
    shared = {k: v for k, v in base["param_groups"][0].items() if all(v == g.get(k) for g in base["param_groups"])}
    state["optimizer_state_dict"] = {"state": {0: {"step": step}}, "param_groups": [shared]}
    state.setdefault("ds_version", "0.19.8")
    return state


def publish(folder, output):
    """Give a finished folder its final name, then point `latest_universal` to it. Each is one rename."""
    if output.exists():
        old = output.with_name(f".{output.name}.old-{os.getpid()}")
        output.rename(old)
        folder.rename(output)
        shutil.rmtree(old)
    else:
        folder.rename(output)
    pointer = output.with_name(f".latest_universal-{os.getpid()}")
    pointer.write_text(output.name)
    pointer.rename(output.with_name("latest_universal"))


def convert(input_folder, output_folder, num_extract_workers=4, num_merge_workers=2, progress=False):
    """Convert the ZeRO checkpoint in input_folder into a universal checkpoint at output_folder.

    Raises CheckpointError when the input is not a complete ZeRO checkpoint or the output is something else's folder;
    then nothing has appeared at output_folder. Returns {"parameters", "bytes", "files", "seconds"}.
    """
    start = time.perf_counter()
    source, output = Path(input_folder), Path(os.path.abspath(output_folder))
    if not source.is_dir():
        raise CheckpointError(f"{source} does not exist")
    if (source / "zero").is_dir():
        raise CheckpointError(f"{source} is a universal checkpoint already")
    if output.exists() and not (output / "zero" / "optimizer_state.pt").is_file():
        raise CheckpointError(f"{output} exists and is not a universal checkpoint: it is left as it is")
    with torch.serialization.safe_globals([(stand_in, path) for path, stand_in in STAND_INS.items()]):
        model, optimizer, parameters = read(source, num_extract_workers)

    folder = output.with_name(f".{output.name}.tmp-{os.getpid()}")
    try:
        folder.mkdir(parents=True)
        pieces = (piece for p in parameters.values() for state in p["states"].values() for piece in state)
        total = sum(flat.element_size() * numel for flat, _, numel in pieces)
        with (
            ThreadPoolExecutor(num_merge_workers) as pool,
            tqdm(total=total, unit="B", unit_scale=True, disable=not progress) as bar,
        ):
            for written in pool.map(lambda item: write_parameter(folder, *item), parameters.items()):
                bar.update(written)
        save(global_state(optimizer, parameters), folder / "zero" / "optimizer_state.pt")
        save(model, folder / "mp_rank_00_model_states.pt")
        os.link(folder / "mp_rank_00_model_states.pt", folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")
        files = sum(path.is_file() for path in folder.rglob("*"))
        publish(folder, output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    seconds = time.perf_counter() - start
    return {"parameters": len(parameters), "bytes": total, "files": files, "seconds": seconds}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input_folder", required=True, help="ZeRO checkpoint, the folder with the *_states.pt files")
    parser.add_argument("--output_folder", required=True, help="universal checkpoint to write")
    parser.add_argument("--num_extract_workers", type=int, default=4, help="threads that open shards")
    parser.add_argument("--num_merge_workers", type=int, default=2, help="threads that write parameters")
    parser.add_argument("--inject_missing_state", action="store_true", help="accepted; never needed here")
    args = parser.parse_args()
    try:
        done = convert(args.input_folder, args.output_folder, args.num_extract_workers, args.num_merge_workers, True)
    except CheckpointError as error:
        print(f"ds_to_universal.py: error: {error}", file=sys.stderr)
        sys.exit(2)
    rate = done["bytes"] / done["seconds"] / 1e9
    print(
        f"{args.output_folder}: {done['parameters']} parameters, {done['bytes']:,} bytes, {done['files']} files "
        f"in {done['seconds']:.2f} s, {rate:.2f} GB/s"
    )


if __name__ == "__main__":
    main()
