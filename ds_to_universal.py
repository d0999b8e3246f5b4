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
    zero/optimizer_state.pt                            loss scale and parameter groups, no shard
    mp_rank_00_model_states.pt                         as in the input; `module` keeps buffers and frozen parameters
    zero_pp_rank_0_mp_rank_00_model_states.pt          the same file under the name that ZeRO-3 looks for
    ../latest_universal                                the name of the output folder

A .pt file is a zip archive of one pickle and one stored record per tensor. Conversion only regroups byte ranges of
those records. So it is done without torch, needs nothing but Python, and runs no code of a checkpoint: the pickle's
classes stay names. Each range is read once, checked against the archive's CRC-32 on the way, and written once.
"""

import argparse
import collections
import contextlib
import copyreg
import ctypes
import fcntl
import functools
import io
import math
import os
import pickle
import re
import resource
import shutil
import struct
import sys
import threading
import time
import uuid
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


class CheckpointError(Exception):
    """What is wrong with the checkpoint or the folders, in one line."""


# -----------------------------------------------------------------------------
# what is inside a pickle, without its code

ELEMENT_SIZE = {
    "Double": 8,
    "Float": 4,
    "Half": 2,
    "BFloat16": 2,
    "Long": 8,
    "Int": 4,
    "Short": 2,
    "Char": 1,
    "Byte": 1,
}
ELEMENT_SIZE = {f"{name}Storage": size for name, size in ELEMENT_SIZE.items()} | {"BoolStorage": 1, "UntypedStorage": 1}
DTYPES = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool".split()
KNOWN = {f"torch.{name}" for name in (*ELEMENT_SIZE, *DTYPES, "device")} | {
    "torch.Tensor",
    "torch.nn.parameter.Parameter",
    "torch.storage.UntypedStorage",
    "torch._utils._rebuild_tensor_v2",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
}


class Opaque:
    """An instance of a class of which we know the name only. Pickles back as it came."""

    def __new__(cls, *args):
        self = super().__new__(cls)
        self.args, self.called, self.state = args, False, None
        return self

    def __init__(self, *args):
        self.called = True  # the pickle called the class; it did not only make an instance of it

    def __setstate__(self, state):
        self.state = state

    def __reduce_ex__(self, protocol):
        make = (type(self), self.args) if self.called else (copyreg.__newobj__, (type(self), *self.args))
        return make if self.state is None else (*make, self.state)


@functools.cache
def opaque(path):
    module, name = path.rsplit(".", 1)
    return type(name, (Opaque,), {"__module__": module})


class Size(tuple):
    """torch.Size"""


class Record:
    """The bytes of one tensor storage in one archive; `seen` collects (start, length, CRC-32) of what was read."""

    def __init__(self, path, offset, nbytes, crc):
        self.path, self.offset, self.nbytes, self.crc, self.seen = path, offset, nbytes, crc, []


# A storage is a list of byte ranges: pieces of (record, start, length), the record also plain bytes.
Storage = collections.namedtuple("Storage", "kind pieces")
Tensor = collections.namedtuple("Tensor", "storage offset size stride requires_grad")


def rebuild_tensor(storage, offset, size, stride, requires_grad, hooks, metadata=None):
    return Tensor(storage, offset, size, stride, requires_grad)


def cut(tensor, start=0, numel=None):
    """The pieces of elements start .. start + numel of a contiguous tensor that came from one record."""
    numel = math.prod(tensor.size) if numel is None else numel
    width = ELEMENT_SIZE[tensor.storage.kind]
    ((record, base, available),) = tensor.storage.pieces
    begin, nbytes = (tensor.offset + start) * width, numel * width
    if start < 0 or numel < 0 or start + numel > math.prod(tensor.size) or begin + nbytes > available:
        raise CheckpointError(f"{record.path} holds fewer elements than its description says")
    return [(record, base + begin, nbytes)]


def whole(kind, pieces, shape):
    """A contiguous tensor made of pieces."""
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return Tensor(Storage(kind, pieces), 0, tuple(shape), stride, False)


def compact(tensor):
    """The tensor with its own elements alone: what stands behind a view does not follow into the new file."""
    if tensor.stride != whole("", [], tensor.size).stride:
        return tensor
    return whole(tensor.storage.kind, cut(tensor), tensor.size)


def in_memory(tensor):
    """A one-element tensor, a step count, with its bytes read."""
    ((record, start, nbytes),) = cut(tensor, 0, 1)
    data = bytes(read_range(record, start, nbytes))
    if not record.seen:
        record.seen.append((start, nbytes, zlib.crc32(data)))
    return whole(tensor.storage.kind, [(data, 0, nbytes)], tensor.size)


class Unpickler(pickle.Unpickler):
    def __init__(self, data, records, trust):
        super().__init__(io.BytesIO(data))
        self.records, self.trust = records, trust

    def find_class(self, module, name):
        path = f"{module}.{name}"
        if path == "collections.OrderedDict":
            return collections.OrderedDict
        if path == "torch.Size":
            return Size
        if path == "torch._utils._rebuild_tensor_v2":
            return rebuild_tensor
        if path in ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"):
            return lambda data, *rest: data
        if path == "torch._tensor._rebuild_from_type_v2":  # a tensor with attributes of its own, which nobody needs
            return lambda rebuild, kind, arguments, state: rebuild(*arguments)
        if path in KNOWN or self.trust:
            return opaque(path)
        raise CheckpointError(f"it refers to {path}, which no ZeRO checkpoint needs; --trust takes it over, unexecuted")

    def persistent_load(self, pid):
        _, storage_class, key, _, numel = pid
        record = self.records[key]
        if record.nbytes != numel * ELEMENT_SIZE[storage_class.__name__]:
            raise CheckpointError(f"record {key} has {record.nbytes} bytes, which is not {numel} elements")
        return Storage(storage_class.__name__, [(record, 0, record.nbytes)])


def load(path, trust=False):
    """The content of a .pt file, its tensors as byte ranges. Raises CheckpointError, naming the file."""
    try:
        with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
            names = {info.filename.split("/", 1)[1]: info for info in archive.infolist()}
            prefix = archive.infolist()[0].filename.split("/")[0]
            if prefix not in (Path(path).stem, "archive"):  # torch.save writes the file's name into the archive
                raise CheckpointError(f"it was written as {prefix}.pt, and renamed")
            records = {}
            for name, info in names.items():
                file.seek(info.header_offset)
                header = struct.unpack("<4s22xHH", file.read(30))
                if header[0] != b"PK\3\4" or info.compress_type or not name:
                    raise CheckpointError(f"record {name} is damaged")
                offset = info.header_offset + 30 + header[1] + header[2]
                records[name.removeprefix("data/")] = Record(path, offset, info.file_size, info.CRC)
            if "byteorder" in names and archive.read(names["byteorder"]) != b"little":
                raise CheckpointError("it was written on a big-endian machine")
            return Unpickler(archive.read(names["data.pkl"]), records, trust).load()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"{path} is truncated or damaged: {error}") from None
    except Exception as error:  # a damaged archive or pickle can fail in any way
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}".split("\n")[0]) from error


# -----------------------------------------------------------------------------
# reading a checkpoint


def find_shards(folder):
    """The optimizer shards as {rank: path}."""
    shards = {}
    for path in sorted(folder.glob("*_optim_states.pt")):
        match = re.fullmatch(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt", path.name)
        if match is None or path.name.startswith("expp_"):
            raise CheckpointError(f"{path} is not the optimizer shard of a ZeRO checkpoint of dense layers")
        rank, mp_rank = map(int, match.groups())
        if mp_rank:
            raise CheckpointError(f"{path}: tensor- and pipeline-parallel checkpoints are not converted yet")
        if rank in shards:
            raise CheckpointError(f"{path} and {shards[rank].name} are both the shard of rank {rank}")
        shards[rank] = path
    if not shards:
        raise CheckpointError(f"{folder} holds no *_optim_states.pt: it is not a ZeRO checkpoint")
    if list(folder.glob("layer_*_expert_*")) or (folder / "offloaded_tensors").exists():
        raise CheckpointError(f"{folder} has experts or NVMe-offloaded states, which are not converted")
    return shards


def fragments(rank, ranks, optimizer, shapes):
    """Yields (group, name, start, numel) for every piece of a parameter in a shard.

    ZeRO-1/2: a group's parameters are laid end to end and cut into one slice per rank; the shard says what it holds.
    ZeRO-3: every parameter is cut by itself, ceil(numel / ranks) elements per rank, in the order of param_shapes.
    """
    if "fp32_flat_groups" not in optimizer:
        for group, mapping in enumerate(optimizer["param_slice_mappings"]):
            for name, address in mapping.items():
                yield group, name, address.state["start"], address.state["numel"]
        return
    for group, names in enumerate(shapes):
        offset = 0
        for name, shape in names.items():
            share = math.ceil(math.prod(shape) / ranks)
            yield group, name, offset, max(0, min(share, math.prod(shape) - rank * share))
            offset += share


def flat_states(optimizer, group):
    """({state: flat tensor}, step or None) of a parameter group, or ZeRO-3 sub-group, of one shard.

    A state of the optimizer belongs to every element if it is at least as long as the fp32 slice; torch keeps padding.
    """
    stage3 = "fp32_flat_groups" in optimizer
    fp32 = optimizer["fp32_flat_groups" if stage3 else "single_partition_of_fp32_groups"][group]
    base = optimizer["optimizer_state_dict" if stage3 else "base_optimizer_state"]["state"].get(group, {})
    states = {"fp32": fp32}
    states |= {key: t for key, t in base.items() if isinstance(t, Tensor) and t.size and t.size >= fp32.size}
    step = base.get("step")
    return states, in_memory(step) if isinstance(step, Tensor) else step


def number(step):
    """The value of a step count, a tensor in memory or a number."""
    if not isinstance(step, Tensor):
        return step
    code = {"FloatStorage": "<f", "DoubleStorage": "<d", "IntStorage": "<i", "LongStorage": "<q"}[step.storage.kind]
    return struct.unpack(code, step.storage.pieces[0][0])[0]


@contextlib.contextmanager
def blame(path):
    """Whatever a file lacks that it should hold is said in one line with its name."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{path} does not hold what a ZeRO checkpoint does: {type(error).__name__}: {error}"
        ) from error


def read(folder, workers, trust=False, strict=True):
    """The whole checkpoint: its descriptions in memory, its tensors as byte ranges.

    Returns (model, optimizer, parameters): rank 0's model states, `module` cut down to buffers and whole frozen
    parameters; rank 0's optimizer state; {name: {"shape", "step", "states": {state: (kind, pieces)}}}.
    """
    shards = find_shards(folder)
    low = min(shards)
    with blame(shards[low]):
        first = load(shards[low], trust)["optimizer_state_dict"]
        stage3, count = "fp32_flat_groups" in first, first["partition_count"]
        ranks = count if isinstance(count, int) else max(count)
    for rank in range(ranks):
        if rank not in shards:
            name = shards[low].name.replace(f"_rank_{low}_", f"_rank_{rank}_", 1)
            raise CheckpointError(f"{folder / name} is missing")
    if max(shards) >= ranks:
        raise CheckpointError(f"{shards[max(shards)]} is one too many: {shards[low].name} says {ranks} ranks")
    paths = [folder / "mp_rank_00_model_states.pt"]
    if stage3:
        paths = [folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(ranks)]
    with ThreadPoolExecutor(workers) as pool:
        optimizers = list(pool.map(lambda rank: load(shards[rank], trust), range(ranks)))
        models = list(pool.map(lambda path: load(path, trust), paths))

    model, parameters, ends = models[0], {}, {}
    with blame(paths[0]):
        shapes, said = model["param_shapes"], model["dp_world_size"]
        for names in shapes:
            parameters |= {name: {"shape": tuple(shape), "step": None, "states": {}} for name, shape in names.items()}
    if said != ranks:
        raise CheckpointError(f"{paths[0]} is of {said} ranks, {shards[low].name} of {ranks}")
    steps = []
    for rank, optimizer in enumerate(optimizers):
        with blame(shards[rank]):
            optimizers[rank] = optimizer = optimizer["optimizer_state_dict"]
            groups = [flat_states(optimizer, group) for group in range(len(shapes))]
            taken = [0] * len(shapes)
            for group, name, start, numel in fragments(rank, ranks, optimizer, shapes):
                (states, step), parameter = groups[group], parameters[name]
                # In its slice a parameter begins where the one before ends; over the ranks it goes on at the next
                # slice's first element from the last of this one. So each element is there, and once.
                if start < taken[group] or name in ends and not stage3 and not (ends[name] and start == 0):
                    raise CheckpointError(f"{shards[rank]}: the part of {name} does not follow on what comes before it")
                taken[group] = start + numel
                slice_size = states["fp32"].size[0] + (0 if stage3 else optimizer["group_paddings"][group])
                ends[name] = start + numel == slice_size
                for key, flat in states.items():
                    kind, pieces = parameter["states"].setdefault(key, (flat.storage.kind, []))
                    if kind != flat.storage.kind:
                        raise CheckpointError(f"{shards[rank]}: {key} of {name} is not what it is in the other shards")
                    pieces += cut(flat, start, numel)
                parameter["step"] = step
            steps.append([number(step) for _, step in groups])
    for name, parameter in parameters.items():
        for key in parameter["states"] or ["everything"]:
            kind, pieces = parameter["states"].get(key, ("ByteStorage", []))
            got, wanted = sum(n for _, _, n in pieces), math.prod(parameter["shape"]) * ELEMENT_SIZE[kind]
            if got != wanted or not parameter["states"]:
                raise CheckpointError(f"{folder}: the shards hold {got} of the {wanted} bytes of {name}, {key}")
    check_steps(shards, steps, paths, models, strict)

    with blame(paths[0]):
        frozen = {}
        for name, shape in (model.get("frozen_param_shapes") or {}).items():
            parts = [m["frozen_param_fragments"][name] for m in models]
            left, pieces = math.prod(shape), []
            for part in parts:
                numel = min(left, math.prod(part.size))
                pieces, left = pieces + cut(part, 0, numel), left - numel
            if left:
                raise CheckpointError(f"{folder}: {left} elements of the frozen {name} are missing")
            frozen[name] = whole(parts[0].storage.kind, pieces, shape)
        if model["module"] is not None:
            kept = set(model["buffer_names"])
            if not stage3:  # what neither an optimizer nor the other name of a tied weight accounts for
                kept |= set(model["module"]) - set(parameters) - set(model.get("shared_params") or {})
            module = {name: compact(tensor) for name, tensor in model["module"].items() if name in kept}
            model["module"], model["frozen_param_fragments"] = module | frozen, None
    return model, first, parameters


def check_steps(shards, steps, paths, models, strict):
    """All files are of one step. steps: of every rank, of every group."""
    for path, model in zip(paths, models, strict=True):
        with blame(path):
            step, wanted = model["global_steps"], model["global_steps"] - model["skipped_steps"]
        if step != models[0]["global_steps"]:
            raise CheckpointError(f"{path} is of step {step}, {paths[0].name} of step {models[0]['global_steps']}")
    for rank, counted in enumerate(steps):
        if counted != steps[0]:
            raise CheckpointError(f"{shards[rank]} is at optimizer step {counted}, {shards[0].name} at {steps[0]}")
    counted = {step for step in steps[0] if step is not None}
    if strict and counted - {wanted}:
        raise CheckpointError(
            f"{paths[0]} is of step {wanted}, the optimizer of step {sorted(counted)}: they were not saved together "
            "(--no_strict, if the optimizer was started anew in mid-run)"
        )


# -----------------------------------------------------------------------------
# writing

CHUNK = 1 << 20
WORKSPACE = threading.local()


@functools.lru_cache(4096)
def crc_shift(nbytes):
    """x^(8 nbytes) modulo the polynomial of CRC-32, bits reversed."""
    result, power = 0x80000000, 0x00800000
    while nbytes:
        if nbytes & 1:
            result = crc_multiply(power, result)
        power, nbytes = crc_multiply(power, power), nbytes >> 1
    return result


def crc_multiply(a, b):
    product = 0
    while a:
        if a & 0x80000000:
            product ^= b
        a, b = (a << 1) & 0xFFFFFFFF, (b >> 1) ^ (0xEDB88320 if b & 1 else 0)
    return product


def crc_join(first, second, nbytes):
    """CRC-32 of A + B from those of A and of B, B being nbytes long: every byte is summed once for two files."""
    return crc_multiply(crc_shift(nbytes), first) ^ second


@functools.lru_cache(256)
def opened(path):
    return open(path, "rb", buffering=0)


def read_into(buffer, record, start):
    """Fill the buffer, or some of it, from a record. Returns the number of bytes."""
    if isinstance(record, bytes):
        buffer[:] = record[start : start + len(buffer)]
        return len(buffer)
    got = os.preadv(opened(record.path).fileno(), [buffer], record.offset + start)
    if not got:
        raise CheckpointError(f"{record.path} became shorter while it was read")
    return got


def workspace():
    """One buffer per thread: what a conversion needs of memory, whatever the size of the tensors."""
    if not hasattr(WORKSPACE, "buffer"):
        WORKSPACE.buffer = memoryview(bytearray(CHUNK))
    return WORKSPACE.buffer


def read_range(record, start, nbytes):
    data = memoryview(bytearray(nbytes))
    done = 0
    while done < nbytes:
        done += read_into(data[done:], record, start + done)
    return data


def copy(pieces, file):
    """Append the pieces to a file through the buffer of this thread. Returns their CRC-32."""
    buffer, filled, crc = workspace(), 0, 0
    for record, start, nbytes in pieces:
        done, piece = 0, 0
        while done < nbytes:
            if filled == CHUNK:
                write_all(file, buffer)
                filled = 0
            got = read_into(buffer[filled : min(CHUNK, filled + nbytes - done)], record, start + done)
            piece = zlib.crc32(buffer[filled : filled + got], piece)
            filled, done = filled + got, done + got
        if isinstance(record, Record):
            record.seen.append((start, nbytes, piece))
        crc = crc_join(crc, piece, nbytes)
    write_all(file, buffer[:filled])
    return crc


def write_all(file, data):
    while len(data):
        data = data[file.write(data) :]


class Pickler(pickle._Pickler):
    """Writes Opaque, Size, Storage and Tensor back as what they stand for; collects the storages."""

    def __init__(self, file):
        super().__init__(file, 2)
        self.storages = []

    def save_global(self, obj, name=None):
        if isinstance(obj, type) and issubclass(obj, Opaque):
            self.write(pickle.GLOBAL + f"{obj.__module__}\n{obj.__name__}\n".encode())
            self.memoize(obj)
        else:
            super().save_global(obj, name)

    def persistent_id(self, obj):
        if isinstance(obj, Storage):
            self.storages.append(obj)
            module = "torch.storage" if obj.kind == "UntypedStorage" else "torch"
            numel = sum(nbytes for _, _, nbytes in obj.pieces) // ELEMENT_SIZE[obj.kind]
            return "storage", opaque(f"{module}.{obj.kind}"), str(len(self.storages) - 1), "cpu", numel

    def reducer_override(self, obj):
        if isinstance(obj, Size):
            return opaque("torch.Size"), (tuple(obj),)
        if isinstance(obj, Tensor):
            return opaque("torch._utils._rebuild_tensor_v2"), (*obj, collections.OrderedDict())
        return NotImplemented

    # namedtuples are tuples, which pickle would save before it asks reducer_override
    def save(self, obj, save_persistent_id=True):
        if isinstance(obj, (Size, Tensor)):
            return self.save_reduce(*self.reducer_override(obj), obj=obj)
        super().save(obj, save_persistent_id)


def write(path, content):
    """Write a .pt file. Returns the bytes of its tensors."""
    pickled = io.BytesIO()
    pickler = Pickler(pickled)
    pickler.dump(content)
    small = [("data.pkl", pickled.getvalue()), ("byteorder", b"little"), ("version", b"3\n")]
    records = [*small, *((f"data/{key}", storage.pieces) for key, storage in enumerate(pickler.storages))]
    position, directory = 0, b""
    with open(path, "xb", buffering=0) as file:
        for name, data in records:
            name = f"{Path(path).stem}/{name}".encode()
            size = len(data) if isinstance(data, bytes) else sum(nbytes for _, _, nbytes in data)
            big = size >= 0xFFFFFFFF
            extra = struct.pack("<HHQQ", 1, 16, size, size) if big else b""
            padding = -(position + 30 + len(name) + len(extra) + 4) % 64  # torch aligns records, to map them
            extra += struct.pack("<HH", 0x4246, padding) + bytes(padding)
            start = position + 30 + len(name) + len(extra)
            file.seek(start)
            crc = copy([(data, 0, size)] if isinstance(data, bytes) else data, file)
            sizes = (0xFFFFFFFF, 0xFFFFFFFF) if big else (size, size)
            fields = struct.pack("<HHHHHIII", 45 if big else 20, 0x800, 0, 0, 0x21, crc, *sizes)
            os.pwrite(
                file.fileno(), b"PK\3\4" + fields + struct.pack("<HH", len(name), len(extra)) + name + extra, position
            )
            far = ([size, size] if big else []) + ([position] if position >= 0xFFFFFFFF else [])
            extra = struct.pack(f"<HH{len(far)}Q", 1, 8 * len(far), *far) if far else b""
            directory += (
                b"PK\1\2" + struct.pack("<H", 45) + fields + struct.pack("<HHHHHI", len(name), len(extra), 0, 0, 0, 0)
            )
            directory += struct.pack("<I", min(position, 0xFFFFFFFF)) + name + extra
            position = start + size
        end = b"PK\6\6" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, *2 * [len(records)], len(directory), position)
        end += b"PK\6\7" + struct.pack("<IQI", 0, position + len(directory), 1)
        end += b"PK\5\6" + struct.pack(
            "<HHHHIIH", 0, 0, *2 * [len(records)], len(directory), min(position, 0xFFFFFFFF), 0
        )
        file.seek(position)
        file.write(directory + end)
    return sum(nbytes for storage in pickler.storages for _, _, nbytes in storage.pieces)


def check_record(record):
    """The record is what its archive's CRC-32 says. What no file took of it, padding, is read here."""
    at, crc = 0, 0
    for start, nbytes, piece in [*sorted(set(record.seen)), (record.nbytes, 0, 0)]:
        if start > at:
            crc = zlib.crc32(read_range(record, at, start - at), crc)
        crc, at = crc_join(crc, piece, nbytes), start + nbytes
    if crc != record.crc:
        raise CheckpointError(f"{record.path} is damaged: a tensor does not match the checksum saved with it")


def global_state(optimizer, parameters):
    """zero/optimizer_state.pt: what the loaders of ZeRO-1/2 and of ZeRO-3 each ask for, without a shard."""
    stage3 = "fp32_flat_groups" in optimizer
    groups = optimizer["optimizer_state_dict" if stage3 else "base_optimizer_state"]["param_groups"]
    shards = ("base_optimizer_state", "param_slice_mappings", "single_partition_of_fp32_groups", "fp32_flat_groups")
    state = {key: value for key, value in optimizer.items() if key not in shards}
    step = next((p["step"] for p in parameters.values() if p["step"] is not None), groups[0].get("step"))
    state["param_groups"] = groups
    # The loader of ZeRO-3 gives every group what the first one says. Where the groups differ it had better say nothing.
    shared = {key: value for key, value in groups[0].items() if all(group.get(key) == value for group in groups)}
    state["optimizer_state_dict"] = {"state": {0: {"step": step}}, "param_groups": [shared]}
    state.setdefault("ds_version", "0.19.8")  # ZeRO-1/2 asks for it, ZeRO-3 does not save it
    return state


def files_of(model, optimizer, parameters):
    """{path below the output folder: content}."""
    files = {}
    for name, parameter in parameters.items():
        folder = os.path.normpath(os.path.join("zero", name))
        if not folder.startswith("zero/"):
            raise CheckpointError(f"{name!r} is a parameter's name that leaves the folder")
        for key, (kind, pieces) in parameter["states"].items():
            files[f"{folder}/{key}.pt"] = {"param": whole(kind, pieces, parameter["shape"]), "cat_dim": 0}
        if parameter["step"] is not None:
            files[f"{folder}/step.pt"] = parameter["step"]
    files["zero/optimizer_state.pt"] = global_state(optimizer, parameters)
    files["mp_rank_00_model_states.pt"] = model
    return files


# -----------------------------------------------------------------------------
# publishing


def exchange(a, b):
    """Swap two folders in one step, where the system can. Returns whether it did."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        return libc.renameat2(-100, os.fsencode(a), -100, os.fsencode(b), 2) == 0  # AT_FDCWD, RENAME_EXCHANGE
    except (OSError, AttributeError):
        return False


def publish(folder, output):
    """Write everything to the disk, give the finished folder its final name, and let `latest_universal` point to it.
    Whenever this is interrupted, the output is the old one or the new one, and whole."""
    sync(folder)
    old = output.with_name(f".{output.name}.replaced")
    if not output.exists():
        folder.rename(output)
    elif not exchange(folder, output):
        output.rename(old)  # start() brings it back if the next line never runs
        folder.rename(output)
        shutil.rmtree(old)
    pointer = output.with_name(f".latest_universal.{uuid.uuid4().hex}")
    pointer.write_text(output.name)
    pointer.rename(output.with_name("latest_universal"))
    sync(output.parent)


def sync(folder):
    """All that was written to the file system of this folder is on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if ctypes.CDLL(None).syncfs(descriptor):
            os.sync()
    except AttributeError:
        os.sync()
    finally:
        os.close(descriptor)


def start(output):
    """The empty folder to write into, beside the output and locked. Sweeps away what a killed conversion has left."""
    folder, old = output.with_name(f".{output.name}.unfinished"), output.with_name(f".{output.name}.replaced")
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CheckpointError(f"another conversion to {output} is running") from None
    for entry in folder.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    if old.exists():
        shutil.rmtree(old) if output.exists() else old.rename(output)
    return folder, lock


def verify(folder, files):
    """Read the finished folder back, cut every tensor as its pieces were, and compare each byte with the source."""
    for name, content in files.items():
        written = load(folder / name)
        if name.endswith("_states.pt"):
            pairs = [(written["module"][k], t) for k, t in (content["module"] or {}).items()]
        elif isinstance(content, dict) and "param" in content:
            pairs = [(written["param"], content["param"])]
        else:
            continue
        for got, wanted in pairs:
            assert (got.size, got.stride, got.storage.kind) == (wanted.size, wanted.stride, wanted.storage.kind)
            ((record, at, _),) = got.storage.pieces
            for source, first, nbytes in wanted.storage.pieces:
                for offset in range(0, nbytes, CHUNK):
                    size = min(CHUNK, nbytes - offset)
                    if read_range(record, at, size) != read_range(source, first + offset, size):
                        raise CheckpointError(f"{folder / name} is not what {source.path} holds: nothing is published")
                    at += size


def convert(
    input_folder, output_folder, num_extract_workers=4, num_merge_workers=2, *,
    strict=True, trust=False, check=False, progress=False,
):  # fmt: skip
    """Convert the ZeRO checkpoint in input_folder into a universal checkpoint at output_folder.

    check compares the finished files with the source, byte by byte, before they are published. Raises CheckpointError
    when the input is not a whole ZeRO checkpoint, or the output is something else's folder; OSError when a disk fails.
    Nothing has then appeared at output_folder. Returns {"parameters", "bytes", "files", "seconds"}.
    """
    began = time.perf_counter()
    source, output = Path(input_folder), Path(os.path.abspath(output_folder))
    if not source.is_dir():
        raise CheckpointError(f"{source} does not exist")
    if (source / "zero").is_dir():
        raise CheckpointError(f"{source} is a universal checkpoint already")
    if output.exists() and not (output / "zero" / "optimizer_state.pt").is_file():
        raise CheckpointError(f"{output} exists and is not a universal checkpoint: it is left as it is")
    model, optimizer, parameters = read(source, num_extract_workers, trust, strict)
    files = files_of(model, optimizer, parameters)

    folder, lock = start(output)
    try:
        for parent in {(folder / name).parent for name in files}:
            parent.mkdir(parents=True, exist_ok=True)
        pieces = {name: pieces_of(content) for name, content in files.items()}
        sizes = {name: sum(nbytes for _, _, nbytes in ranges) for name, ranges in pieces.items()}
        records = {id(r): r for ranges in pieces.values() for r, _, _ in ranges if isinstance(r, Record)}.values()
        with ThreadPoolExecutor(num_merge_workers) as pool, bar(sum(sizes.values()), progress) as done:
            largest_first = sorted(files, key=sizes.get, reverse=True)
            for written in pool.map(lambda name: write(folder / name, files[name]), largest_first):
                done(written)
            list(pool.map(check_record, records))
        os.link(folder / "mp_rank_00_model_states.pt", folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")
        if check:
            verify(folder, files)
        publish(folder, output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
        opened.cache_clear()
    seconds = time.perf_counter() - began
    return {"parameters": len(parameters), "bytes": sum(sizes.values()), "files": len(files) + 1, "seconds": seconds}


def pieces_of(content):
    """The byte ranges that a file is made of."""
    if isinstance(content, Tensor):
        return content.storage.pieces
    if isinstance(content, dict):
        return [piece for value in content.values() for piece in pieces_of(value)]
    return [piece for value in content for piece in pieces_of(value)] if isinstance(content, (list, tuple)) else []


@contextlib.contextmanager
def bar(total, progress):
    """A progress bar in bytes, where tqdm is installed (it comes with DeepSpeed)."""
    try:
        from tqdm import tqdm
    except ImportError:
        progress = False
    if not progress:
        yield lambda written: None
        return
    with tqdm(total=total, unit="B", unit_scale=True) as shown:
        yield shown.update


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arg = parser.add_argument
    arg("--input_folder", required=True, help="ZeRO checkpoint, the folder with the *_states.pt files")
    arg("--output_folder", required=True, help="universal checkpoint to write")
    arg("--num_extract_workers", type=int, default=4, help="threads that open shards")
    arg("--num_merge_workers", type=int, default=2, help="threads that write parameters")
    arg("--no_strict", dest="strict", action="store_false", help="the optimizer may be of another step than the model")
    arg("--verify", dest="check", action="store_true", help="compare every byte with the shards before publishing")
    arg("--trust", action="store_true", help="take over objects of classes that DeepSpeed does not write; they are not "
        "executed here, but they will be when the result is loaded")  # fmt: skip
    arg("--inject_missing_state", action="store_true", help="accepted, as DeepSpeed's converter does; not needed here")
    arg("--keep_temp_folder", action="store_true", help="accepted; there is none")
    args = vars(parser.parse_args())
    del args["inject_missing_state"], args["keep_temp_folder"]
    try:
        done = convert(**args, progress=True)
    except (CheckpointError, OSError) as error:
        print(f"ds_to_universal.py: error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, CheckpointError) else 1)
    rate, memory = done["bytes"] / done["seconds"] / 1e9, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(
        f"{args['output_folder']}: {done['parameters']} parameters, {done['bytes']:,} bytes, {done['files']} files "
        f"in {done['seconds']:.2f} s, {rate:.2f} GB/s, {memory:.0f} MB of memory"
    )


if __name__ == "__main__":
    main()
