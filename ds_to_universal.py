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
import bisect
import collections
import contextlib
import copyreg
import ctypes
import fcntl
import functools
import gc
import io
import itertools
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
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


class CheckpointError(Exception):
    """What is wrong with the checkpoint or the folders, in one line."""

    def __init__(self, message):
        super().__init__(" ".join(str(message).splitlines()))


# -----------------------------------------------------------------------------
# what is inside a pickle, without its code

SIZES = {8: "Double Long", 4: "Float Int", 2: "Half BFloat16 Short", 1: "Char Byte Bool Untyped"}
ELEMENT_SIZE = {f"{kind}Storage": size for size, kinds in SIZES.items() for kind in kinds.split()}
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
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
}


class Opaque:
    """An instance of a class of which we know the name only. Pickles back as it came."""

    def __new__(cls, *args):
        self = super().__new__(cls)
        self.args, self.called, self.state, self.list, self.dict = args, False, None, [], {}
        return self

    def __init__(self, *args):
        self.called = True  # the pickle called the class; it did not only make an instance of it

    def __setstate__(self, state):
        self.state = state

    def __setitem__(self, key, value):
        self.dict[key] = value

    def append(self, value):
        self.list.append(value)

    def __reduce_ex__(self, protocol):
        make = (type(self), self.args) if self.called else (copyreg.__newobj__, (type(self), *self.args))
        return *make, self.state, iter(self.list) if self.list else None, iter(self.dict.items()) if self.dict else None


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
        check_record(record)
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
# the bytes of records

CHUNK = 1 << 20


@functools.lru_cache(256)
def opened(path):
    return open(path, "rb", buffering=0)


def read_into(buffer, record, start):
    """Fill the buffer, or some of it, from a record. Returns the number of bytes."""
    if isinstance(record, bytes):
        buffer[:] = record[start : start + len(buffer)]
        return len(buffer)
    file = opened(record.path)  # held while it is read: the cache may let go of it in another thread
    got = os.preadv(file.fileno(), [buffer], record.offset + start)
    if not got:
        raise CheckpointError(f"{record.path} became shorter while it was read")
    return got


def read_range(record, start, nbytes):
    data = memoryview(bytearray(nbytes))
    done = 0
    while done < nbytes:
        done += read_into(data[done:], record, start + done)
    return data


def joined(pieces):
    return b"".join(read_range(*piece) for piece in pieces)


def same(a, b):
    """Whether two lists of pieces hold the same bytes."""
    size, other = (sum(nbytes for _, _, nbytes in pieces) for pieces in (a, b))
    a, b = Ranges(a), Ranges(b)
    spans = ((at, min(CHUNK, size - at)) for at in range(0, size, CHUNK))
    return size == other and all(joined(a.cut(*span)) == joined(b.cut(*span)) for span in spans)


class Ranges:
    """Sub-ranges of a long list of pieces, found by bisection."""

    def __init__(self, pieces):
        self.pieces = pieces
        self.ends = list(itertools.accumulate(nbytes for _, _, nbytes in pieces))

    def cut(self, start, nbytes):
        taken, i = [], bisect.bisect_right(self.ends, start)
        while nbytes:
            record, first, size = self.pieces[i]
            skip = start - (self.ends[i] - size)
            part = min(size - skip, nbytes)
            taken.append((record, first + skip, part))
            start, nbytes, i = start + part, nbytes - part, i + 1
        return taken


def crc_multiply(a, b):
    """Two polynomials modulo that of CRC-32, bits reversed."""
    product = 0
    while a:
        if a & 0x80000000:
            product ^= b
        a, b = (a << 1) & 0xFFFFFFFF, (b >> 1) ^ (0xEDB88320 if b & 1 else 0)
    return product


@functools.lru_cache(4096)
def crc_table(nbytes):
    """What nbytes more make of a CRC-32: times x^(8 nbytes), for all 16 values of each of its 8 half-bytes."""
    table, column, power = [[0] for _ in range(8)], 0x80000000, 0x00800000
    while nbytes:
        if nbytes & 1:
            column = crc_multiply(power, column)
        power, nbytes = crc_multiply(power, power), nbytes >> 1
    for bit in range(31, -1, -1):
        part = table[bit // 4]
        part[:] = [value ^ column * b for value in part for b in (0, 1)]
        column = (column >> 1) ^ (0xEDB88320 if column & 1 else 0)
    return table


def crc_join(first, second, nbytes):
    """CRC-32 of A + B from those of A and of B, B being nbytes long: every byte is summed once for two files."""
    if not first:
        return second
    a, b, c, d, e, f, g, h = crc_table(nbytes)
    return (
        a[first & 15] ^ b[first >> 4 & 15] ^ c[first >> 8 & 15] ^ d[first >> 12 & 15]
        ^ e[first >> 16 & 15] ^ f[first >> 20 & 15] ^ g[first >> 24 & 15] ^ h[first >> 28] ^ second
    )  # fmt: skip


def checksum(record, start, nbytes, crc=0):
    for at in range(start, start + nbytes, CHUNK):
        crc = zlib.crc32(read_range(record, at, min(CHUNK, start + nbytes - at)), crc)
    return crc


def check_record(record):
    """The record is what its archive's CRC-32 says. What no file took of it, padding, is read here."""
    at, crc = 0, 0
    for start, nbytes, piece in [*sorted(set(record.seen)), (record.nbytes, 0, 0)]:
        if start < at:  # views that share elements: their sums do not add up to the record's
            if any(checksum(record, first, n) != again for first, n, again in record.seen):
                raise CheckpointError(f"{record.path} is damaged, or was read wrong: a tensor is not the same twice")
            crc = checksum(record, 0, record.nbytes)
            break
        crc = checksum(record, at, start - at, crc)
        crc, at = crc_join(crc, piece, nbytes), start + nbytes
    if crc != record.crc:
        raise CheckpointError(f"{record.path} is damaged: a tensor does not match the checksum saved with it")


# -----------------------------------------------------------------------------
# reading a checkpoint


def find_shards(folder):
    """The optimizer shards as {model-parallel rank: {data-parallel rank: path}}."""
    shards = {}
    for path in sorted(folder.glob("*_optim_states.pt")):
        match = re.fullmatch(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt", path.name)
        if match is None:
            raise CheckpointError(f"{path} is not the optimizer shard of a ZeRO checkpoint of dense layers")
        rank, mp_rank = map(int, match.groups())
        others = shards.setdefault(mp_rank, {})
        if rank in others:
            raise CheckpointError(f"{path} and {others[rank].name} are both the shard of rank {rank}")
        others[rank] = path
    if not shards:
        tags = ", ".join(sorted({path.parent.name for path in folder.glob("*/*_optim_states.pt")}))
        hint = f"name one of the checkpoints in it: {tags}" if tags else "it is not a ZeRO checkpoint"
        raise CheckpointError(f"{folder} holds no *_optim_states.pt: {hint}")
    if list(folder.glob("layer_*_expert_*")) or (folder / "offloaded_tensors").exists():
        raise CheckpointError(f"{folder} has experts or NVMe-offloaded states, which are not converted")
    return shards


def fragments(rank, ranks, optimizer, shapes, round_robin):
    """Yields (group, name, start in the parameter, start in the slice, numel) for all pieces of parameters in a shard.

    ZeRO-1/2: a group's parameters are laid end to end and cut into one slice per rank. The shard says so, too, but with
    round_robin_gradients it is wrong.
    ZeRO-3: every parameter is cut by itself, ceil(numel / ranks) elements per rank.
    """
    for group, names in enumerate(shapes):
        at = 0
        if "fp32_flat_groups" in optimizer:
            for name, shape in names.items():
                share = math.ceil(math.prod(shape) / ranks)
                yield group, name, rank * share, at, max(0, min(share, math.prod(shape) - rank * share))
                at += share
            if at != optimizer["fp32_flat_groups"][group].size[0]:
                raise ValueError(f"group {group} is not cut for {ranks} ranks")
            continue
        size = optimizer["single_partition_of_fp32_groups"][group].size[0]
        if "zero_stage" in optimizer:  # BF16_Optimizer saves the padding, too
            size += optimizer["group_paddings"][group]
        alignment = (optimizer.get("param_alignment_paddings") or {group: None})[group] or [0] * len(names)
        begin, said = rank * size, dict(optimizer["param_slice_mappings"][group])
        for (name, shape), padding in zip(names.items(), alignment, strict=True):
            end = at + math.prod(shape)
            first, last = max(at, begin), min(end, begin + size)
            if first < last:
                if not round_robin and said.pop(name).state != {"start": first - begin, "numel": last - first}:
                    raise ValueError(f"{name} is not where param_slice_mappings says")
                yield group, name, first - at, first - begin, last - first
            at = end + padding
        if said and not round_robin:
            raise ValueError(f"param_slice_mappings has more parameters: {', '.join(said)}")


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


def read_data_parallel(folder, mp_rank, shards, pool, trust, strict):
    """The checkpoint of one model-parallel rank, put together over its data-parallel ranks: descriptions in memory,
    tensors as byte ranges.

    Returns (model, optimizer, parameters): rank 0's model states, `module` cut down to buffers and whole frozen
    parameters; rank 0's optimizer state; {name: {"shape", "step", "states": {state: (kind, pieces)}}}.
    """
    low = min(shards)
    with blame(shards[low]):
        first = load(shards[low], trust)["optimizer_state_dict"]
        stage3, count = "fp32_flat_groups" in first, first["partition_count"]
        ranks = range(count if isinstance(count, int) else max(count)).stop  # a TypeError for what is no number
    for rank in range(ranks):
        if rank not in shards:
            name = shards[low].name.replace(f"_rank_{low}_", f"_rank_{rank}_", 1)
            raise CheckpointError(f"{folder / name} is missing")
    if max(shards) >= ranks:
        raise CheckpointError(f"{shards[max(shards)]} is one too many: {shards[low].name} says {ranks} ranks")
    paths = [folder / f"mp_rank_{mp_rank:02d}_model_states.pt"]
    if stage3:
        paths = [folder / f"zero_pp_rank_{rank}_mp_rank_{mp_rank:02d}_model_states.pt" for rank in range(ranks)]
    optimizers = list(pool.map(lambda rank: load(shards[rank], trust), range(ranks)))
    models = list(pool.map(lambda path: load(path, trust), paths))

    model, parameters = models[0], {}
    with blame(paths[0]):
        shapes, said = model["param_shapes"], model["dp_world_size"]
        config = model["ds_config"] if isinstance(model["ds_config"], dict) else {}  # older versions: a file's path
        round_robin = (config.get("zero_optimization") or {}).get("round_robin_gradients")
        for names in shapes:
            for name, shape in names.items():
                parameters[name] = {"shape": tuple(shape), "step": None, "states": {}, "numel": 0}
    for path, other in zip(paths, models, strict=True):
        for key in ("param_shapes", "buffer_names", "frozen_param_shapes"):
            if other.get(key) != model.get(key):
                raise CheckpointError(f"{path} has other {key} than {paths[0].name}")
    if said != ranks:
        raise CheckpointError(f"{paths[0]} is of {said} ranks, {shards[low].name} of {ranks}")
    steps, kinds = [], None
    for rank, optimizer in enumerate(optimizers):
        with blame(shards[rank]):
            optimizer = optimizer["optimizer_state_dict"]
            groups = [flat_states(optimizer, group) for group in range(len(shapes))]
            if len(shapes) != len(optimizer["fp32_flat_groups" if stage3 else "single_partition_of_fp32_groups"]):
                raise CheckpointError(f"{shards[rank]} has another number of parameter groups than {paths[0].name}")
            base = optimizer["optimizer_state_dict" if stage3 else "base_optimizer_state"]["state"]
            lost = {key for group in base for key, value in base[group].items() if isinstance(value, Tensor)} - {"step"}
            lost -= {key for states, _ in groups for key in states}
            if strict and lost:
                raise CheckpointError(
                    f"{shards[rank]}: {', '.join(sorted(lost))} of the optimizer belong to no single element, a "
                    "universal checkpoint has no place for them (--no_strict leaves them out)"
                )
            kinds = kinds or [states.keys() for states, _ in groups]
            if kinds != [states.keys() for states, _ in groups]:
                raise CheckpointError(f"{shards[rank]} has other optimizer states than {shards[0].name}")
            for group, name, offset, start, numel in fragments(rank, ranks, optimizer, shapes, round_robin):
                (states, step), parameter = groups[group], parameters[name]
                if numel and offset != parameter["numel"]:  # so each element is there, and once
                    raise CheckpointError(f"{shards[rank]}: its part of {name} does not follow on that of another rank")
                parameter["numel"] += numel
                for key, flat in states.items():
                    kind, pieces = parameter["states"].setdefault(key, (flat.storage.kind, []))
                    if kind != flat.storage.kind:
                        raise CheckpointError(f"{shards[rank]}: {key} of {name} is not what it is in the other shards")
                    pieces += cut(flat, start, numel)
                parameter["step"] = step
            steps.append([number(step) for _, step in groups])
    for name, parameter in parameters.items():
        got, wanted = parameter["numel"], math.prod(parameter["shape"])
        if got != wanted:
            raise CheckpointError(f"{folder}: the shards hold {got} of the {wanted} elements of {name}")
    check_steps(shards, steps, paths, models, strict)

    with blame(paths[0]):
        if model["module"] is not None:
            model["module"], model["frozen_param_fragments"] = module_of(folder, models, parameters, stage3), None
    return model, first, parameters


def module_of(folder, models, parameters, stage3):
    """What no optimizer holds: {name: tensor} of the buffers, and of the frozen parameters, whole."""
    model, frozen = models[0], {}
    for name, shape in (model.get("frozen_param_shapes") or {}).items():
        parts = [m["frozen_param_fragments"][name] for m in models]
        left, pieces = math.prod(shape), []
        for part in parts:
            numel = min(left, math.prod(part.size))
            pieces, left = pieces + cut(part, 0, numel), left - numel
        if left:
            raise CheckpointError(f"{folder}: {left} elements of the frozen {name} are missing")
        frozen[name] = whole(parts[0].storage.kind, pieces, shape)
    kept = set(model["buffer_names"])
    if not stage3:  # what neither an optimizer nor the other name of a tied weight accounts for
        kept |= set(model["module"]) - set(parameters) - set(model.get("shared_params") or {})
    return {name: compact(model["module"][name]) for name in sorted(kept)} | frozen


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
# tensor and pipeline parallelism


def blocks_along(dim, size, widths):
    """Where the shards of a tensor lie in it. It is one, or several side by side along dim, and each is cut by itself:
    widths[sub][rank]. Returns [(rank, shape, strides and offset in the shard, strides and offset in the whole)]."""
    blocks, strides = [], whole("", [], size).stride
    at, in_shard = 0, [0] * len(widths[0])
    for sub in widths:
        for rank, width in enumerate(sub):
            mine = [sum(w[rank] for w in widths) if d == dim else n for d, n in enumerate(size)]
            stride = whole("", [], mine).stride
            block = [width if d == dim else n for d, n in enumerate(size)]
            blocks.append((rank, block, stride, in_shard[rank] * stride[dim], strides, at * strides[dim]))
            in_shard[rank], at = in_shard[rank] + width, at + width
    return blocks


def runs(blocks):
    """Blocks as contiguous runs in the order of the whole: [(offset in the whole, numel, rank, offset in shard)]."""
    found = []
    for rank, shape, stride, offset, full_stride, full_offset in blocks:
        inner, dims = 1, len(shape)
        while dims and (stride[dims - 1] == full_stride[dims - 1] == inner or shape[dims - 1] == 1):
            dims -= 1
            inner *= shape[dims]
        for index in itertools.product(*map(range, shape[:dims])) if inner else ():
            there = full_offset + sum(i * s for i, s in zip(index, full_stride, strict=False))
            found.append((there, inner, rank, offset + sum(i * s for i, s in zip(index, stride, strict=False))))
    return sorted(found)


class TensorParallel:
    """Puts the shards of tensor-parallel ranks together, by the universal_checkpoint_info that the checkpoint carries.

    The names of its entries, and what each does, are DeepSpeed's (deepspeed/checkpoint/constants.py). Every layout is a
    permutation of byte ranges, except the average, which takes torch.
    """

    LISTS = ("tp_replicated_parameter_patterns", "parameter_to_average_patterns", "vocabulary_parameter_patterns")
    LISTS += ("parameter_with_row_parallelism_patterns", "parameter_with_2_sub_params_cat_dim_0")

    def __init__(self, info, degree, folder):
        self.info, self.degree, self.folder, self.unused = info or {}, degree, folder, set()
        if degree > 1 and not info:
            raise CheckpointError(
                f"{folder} has {degree} tensor-parallel ranks and no universal_checkpoint_info, which says how they "
                "are cut: it must be in the client state when the checkpoint is saved"
            )
        self.version = self.info.get("universal_checkpoint_version", 0.0)
        self.affine = self.info.get("affine_map") or {"params": {}, "version": 1}
        if self.affine.get("version", 1) > 1:
            raise CheckpointError(f"{folder}: affine map of version {self.affine['version']}, and only 1 is known")
        # One rank's parameters are whole, and still the file says how more ranks would cut them.
        self.described = any(self.info.get(key) for key in (*self.LISTS, "parameter_with_sub_params"))
        if degree > 1:
            self.unused = {pattern for key in self.LISTS for pattern in self.info.get(key, [])}
            self.unused |= {p for sub in self.info.get("parameter_with_sub_params", []) for p in sub["patterns"]}

    def match(self, patterns, name):
        matched = [pattern for pattern in patterns if re.match(pattern, name)]
        self.unused -= set(matched)
        if len(matched) > 1:
            raise CheckpointError(f"{self.folder}: {name} matches more than one pattern: {', '.join(matched)}")
        return matched[0] if matched else None

    def tied(self, name):
        return self.match(self.info.get("pipeline_replicated_parameter_patterns", []), name)

    def merge(self, name, shards):
        """One parameter from its shards, in the order of the tensor-parallel ranks."""
        if self.degree == 1 and not self.described:
            return shards[0] | {"how": {"cat_dim": 0}}
        found = {key: self.match(self.info.get(key, []), name) for key in self.LISTS}
        sub = next((s for s in self.info.get("parameter_with_sub_params", []) if self.match(s["patterns"], name)), None)
        if self.match(self.info.get("autotp_unsupported_parameter_patterns") or {}, name):
            raise CheckpointError(f"{self.folder}: DeepSpeed did not record how {name} is cut")
        two = found["parameter_with_2_sub_params_cat_dim_0"]
        shapes, how = [shard["shape"] for shard in shards], {}
        pattern = self.match(self.affine["params"], name)
        if pattern:
            shape, blocks = self.affine_blocks(name, self.affine["params"][pattern])
        elif found["tp_replicated_parameter_patterns"]:
            shape = shapes[0]
            stride = whole("", [], shape).stride
            blocks = [(rank, shape, stride, 0, stride, 0) for rank in range(self.degree)]
        elif found["parameter_to_average_patterns"]:
            return self.average(shards)
        elif sub and not two:
            shape, blocks, how = self.sub_parameters(name, shapes, sub)
        else:
            dim = 1 if found["parameter_with_row_parallelism_patterns"] and not two else 0
            shape = tuple(sum(s[d] for s in shapes) if d == dim else n for d, n in enumerate(shapes[0]))
            parts, how = (2, {"cat_dim": 0, "param_n_sub_params": 2}) if two else (1, {"cat_dim": dim})
            blocks = blocks_along(dim, shape, parts * [[s[dim] // parts for s in shapes]])
        states = self.put_together(name, shards, shape, blocks)
        if found["vocabulary_parameter_patterns"]:
            shape = (self.info["original_vocab_size"], *shape[1:])
            states = {
                k: (kind, Ranges(p).cut(0, math.prod(shape) * ELEMENT_SIZE[kind])) for k, (kind, p) in states.items()
            }
            how["vocab_tensor"] = True
        return {"shape": shape, "step": shards[0]["step"], "states": states, "how": how}

    def put_together(self, name, shards, shape, blocks):
        """The states of a parameter in the order of the whole; what several ranks hold is compared."""
        order, copies, at = [], [], 0
        for run in runs(blocks):
            if run[0] == at:
                order.append(run)
                at += run[1]
            elif order and run[:2] == order[-1][:2]:
                copies.append(run)  # of the last one, on another rank
            else:
                raise CheckpointError(f"{self.folder}: the shards of {name} do not cover it exactly once")
        if at != math.prod(shape):
            raise CheckpointError(f"{self.folder}: the shards of {name} hold {at} of its {math.prod(shape)} elements")
        states = {}
        for key, (kind, _) in shards[0]["states"].items():
            width, ranges = ELEMENT_SIZE[kind], [Ranges(shard["states"][key][1]) for shard in shards]
            pieces = [p for _, numel, rank, start in order for p in ranges[rank].cut(start * width, numel * width)]
            put_together = Ranges(pieces)
            for there, numel, rank, start in copies:
                original = put_together.cut(there * width, numel * width)
                if not same(original, ranges[rank].cut(start * width, numel * width)):
                    raise CheckpointError(f"{self.folder}: {key} of {name} differs on tensor-parallel rank {rank}")
            states[key] = (kind, pieces)
        return states

    def affine_blocks(self, name, entry):
        blocks = []
        for rank, shard in entry["ranks"].items():
            for piece in shard["pieces"]:
                if piece.get("scale", 1.0) != 1.0:
                    raise CheckpointError(
                        f"{self.folder}: {name} is stored scaled, its optimizer state cannot be converted"
                    )
                (there, full_stride), (here, stride) = piece["source"], piece["dest"]
                blocks.append((int(rank), piece["shape"], stride, here, full_stride, there))
        return tuple(entry["logical_shape"]), blocks

    def sub_parameters(self, name, shapes, sub):
        dim, spec = sub["partition_dim"], sub["shape"][sub["partition_dim"]]
        total = sum(math.prod(shape) for shape in shapes)
        if isinstance(spec, int):  # before version 0.4: the number of sub-parameters of one size
            spec = (sum(shape[dim] for shape in shapes) // spec,) * spec
        widths = [[size // self.degree] * self.degree for size in spec]
        if self.version >= 0.4:
            widths = self.info["sub_param_shard_widths"][self.match(sub["patterns"], name)]
        if [sum(width) for width in widths] != list(spec):
            raise CheckpointError(f"{self.folder}: the widths of {name}, {widths}, do not make up its sizes {spec}")
        size = [sum(n) if isinstance(n, (tuple, list)) else n for n in sub["shape"]]
        size[dim] = sum(spec)
        if -1 in size:
            size[size.index(-1)] = total // -math.prod(size)
        if math.prod(size) != total:
            raise CheckpointError(f"{self.folder}: {name} has {total} elements, which do not make up {size}")
        description = opaque("deepspeed.checkpoint.universal_checkpoint.SubparamShape")
        described = description.__new__(description)
        shape = [spec if d == dim else n for d, n in enumerate(sub["shape"])]
        described.state = {"patterns": sub["patterns"], "shape": tuple(shape), "partition_dim": dim}
        return tuple(size), blocks_along(dim, size, widths), {"sub_param_shape": described}

    def average(self, shards):
        import torch

        states = {}
        for key, (kind, _) in shards[0]["states"].items():
            assert kind == "FloatStorage", f"{key} is {kind}, averages are taken of float32"
            data = [bytearray(joined(shard["states"][key][1])) for shard in shards]
            mean = sum(torch.frombuffer(d, dtype=torch.float32) for d in data) / len(shards)
            content = mean.numpy().tobytes()
            states[key] = (kind, [(content, 0, len(content))])
        return shards[0] | {"states": states, "how": {}}


def read(folder, output, workers, trust=False, strict=True):
    """The whole checkpoint: (model states of every model-parallel rank, rank 0's optimizer state, parameters), where
    parameters is {name: {"shape", "step", "states": {state: (kind, pieces)}, "how": what the loader needs to cut it}}.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} does not exist")
    if (folder / "zero").is_dir():
        raise CheckpointError(f"{folder} is a universal checkpoint already")
    if output.exists() and not (output / "zero" / "optimizer_state.pt").is_file():
        raise CheckpointError(f"{output} exists and is not a universal checkpoint: it is left as it is")
    if (output.parent / "latest_universal").is_dir():
        raise CheckpointError(f"{output.parent / 'latest_universal'} is a folder, where a file has to go")
    shards = find_shards(folder)
    with ThreadPoolExecutor(workers) as pool:
        parts = [read_data_parallel(folder, mp, shards[mp], pool, trust, strict) for mp in sorted(shards)]
    models, optimizers, parameters = zip(*parts, strict=True)
    with blame(folder):
        degrees = models[0].get("checkpoint_parallel_dimensions") or {}
        pipeline = degrees.get("pp_degree") or (1 if models[0]["module"] is not None else len(shards))
        tensor = degrees.get("tp_degree") or len(shards) // pipeline
        if sorted(shards) != list(range(tensor * pipeline)):
            names = ", ".join(f"mp_rank_{mp:02d}" for mp in sorted(shards))
            raise CheckpointError(f"{folder} should have {tensor} tensor x {pipeline} pipeline ranks, and has {names}")
        for model in models:
            if model["global_steps"] != models[0]["global_steps"]:
                raise CheckpointError(f"{folder}: its model-parallel ranks are of different steps")
            if len(model["param_shapes"]) != len(models[0]["param_shapes"]):  # the loader takes groups by their number
                raise CheckpointError(f"{folder}: a pipeline stage lacks a parameter group that others have")
        merged, merger = {}, TensorParallel(models[0].get("universal_checkpoint_info"), tensor, folder)
        for stage in range(pipeline):
            ranks = parameters[stage * tensor : (stage + 1) * tensor]
            if any(rank.keys() != ranks[0].keys() for rank in ranks):
                raise CheckpointError(f"{folder}: tensor-parallel ranks of stage {stage} hold different parameters")
            for name in ranks[0]:
                if name in merged and not merger.tied(name):
                    raise CheckpointError(f"{folder}: {name} is in two pipeline stages and is not declared as tied")
                if name not in merged:
                    merged[name] = merger.merge(name, [rank[name] for rank in ranks])
        if strict and merger.unused:
            raise CheckpointError(
                f"{folder}: universal_checkpoint_info has patterns that match no parameter: "
                f"{', '.join(sorted(merger.unused))} (--no_strict goes on without)"
            )
    return models, optimizers[0], merged


# -----------------------------------------------------------------------------
# writing

WORKSPACE = threading.local()


def workspace():
    """One buffer per thread: what a conversion needs of memory, whatever the size of the tensors."""
    if not hasattr(WORKSPACE, "buffer"):
        WORKSPACE.buffer = memoryview(bytearray(CHUNK))
    return WORKSPACE.buffer


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
    with named(file):
        while len(data):
            data = data[file.write(data) :]


def free_cache(file):
    """Write the file to the disk and drop it from the page cache, whose memory the next file can then have."""
    with named(file):
        os.fdatasync(file)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def named(file):
    """An error of the disk says which file it hit."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file.name)) from error


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


def pickled(content):
    """(pickle, the storages that it refers to): what a file is made of."""
    file = io.BytesIO()
    pickler = Pickler(file)
    pickler.dump(content)
    return file.getvalue(), pickler.storages


@functools.lru_cache(4096)
def state_pickle(kind, shape, *how):
    """The pickle of a state file. Layers are alike, and so are the states of each: few have to be made."""
    blank = [(None, 0, math.prod(shape) * ELEMENT_SIZE[kind])]
    return pickled({"param": whole(kind, blank, shape)} | dict(how))[0]


def write(path, content):
    """Write a .pt file, content as pickled() gives it. Returns the bytes of its tensors."""
    data, storages = content
    small = [("data.pkl", data), ("byteorder", b"little"), ("version", b"3\n")]
    records = [*small, *((f"data/{key}", storage.pieces) for key, storage in enumerate(storages))]
    position, directory = 0, b""
    ahead, at = b"", 0  # not yet written, and where it begins: a header is known after its record only
    with open(path, "xb", buffering=0) as file:
        for name, data in records:
            name = f"{Path(path).stem}/{name}".encode()
            size = len(data) if isinstance(data, bytes) else sum(nbytes for _, _, nbytes in data)
            big = size >= 0xFFFFFFFF
            extra = struct.pack("<HHQQ", 1, 16, size, size) if big else b""
            padding = -(position + 30 + len(name) + len(extra) + 4) % 64  # torch aligns records, to map them
            extra += struct.pack("<HH", 0x4246, padding) + bytes(padding)
            start = position + 30 + len(name) + len(extra)
            if isinstance(data, bytes):
                crc = zlib.crc32(data)
            else:
                file.seek(start)
                crc = copy(data, file)
            sizes = (0xFFFFFFFF, 0xFFFFFFFF) if big else (size, size)
            fields = struct.pack("<HHHHHIII", 45 if big else 20, 0x800, 0, 0, 0x21, crc, *sizes)
            ahead += b"PK\3\4" + fields + struct.pack("<HH", len(name), len(extra)) + name + extra
            if isinstance(data, bytes):
                ahead += data
            else:
                file.seek(at)
                write_all(file, memoryview(ahead))
                ahead, at = b"", start + size
            far = ([size, size] if big else []) + ([position] if position >= 0xFFFFFFFF else [])
            extra = struct.pack(f"<HH{len(far)}Q", 1, 8 * len(far), *far) if far else b""
            directory += b"PK\1\2" + struct.pack("<H", 45) + fields
            directory += struct.pack("<HHHHHI", len(name), len(extra), 0, 0, 0, 0)
            directory += struct.pack("<I", min(position, 0xFFFFFFFF)) + name + extra
            position = start + size
        end = b"PK\6\6" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, *2 * [len(records)], len(directory), position)
        end += b"PK\6\7" + struct.pack("<IQI", 0, position + len(directory), 1)
        size, where = len(directory), min(position, 0xFFFFFFFF)
        end += b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, *2 * [min(len(records), 0xFFFF)], size, where, 0)
        file.seek(at)
        write_all(file, memoryview(ahead + directory + end))
        if position > 8 * CHUNK:  # to wait for the disk is worth it for large files only
            free_cache(file)
    return sum(nbytes for storage in storages for _, _, nbytes in storage.pieces)


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


def files_of(models, optimizer, parameters):
    """{path below the output folder: (pickle, storages)}."""
    files = {}
    for name, parameter in parameters.items():
        folder = os.path.join("zero", name)
        if folder != os.path.normpath(folder) or not folder.startswith("zero/"):
            raise CheckpointError(f"{name!r} is a parameter's name that leads to another folder")
        for key, (kind, pieces) in parameter["states"].items():
            if "/" in key:
                raise CheckpointError(f"{key!r} is a state's name that leads to another folder")
            data = state_pickle(kind, parameter["shape"], *parameter["how"].items())
            files[f"{folder}/{key}.pt"] = data, [Storage(kind, pieces)]
        if parameter["step"] is not None:
            files[f"{folder}/step.pt"] = pickled(parameter["step"])
    files["zero/optimizer_state.pt"] = pickled(global_state(optimizer, parameters))
    return files | {f"mp_rank_{mp_rank:02d}_model_states.pt": pickled(model) for mp_rank, model in enumerate(models)}


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
    old, pointer = (output.with_name(f".{output.name}.{what}") for what in ("replaced", "pointer"))
    pointer.write_text(output.name)
    sync(folder)
    replaces = output.exists()  # if so, in the place of the unfinished folder it still keeps others out
    with locked(output) if replaces else contextlib.nullcontext():
        if not replaces or not exchange(folder, output):
            if replaces:
                output.rename(old)  # unfinished() brings it back if the next line never runs
            folder.rename(output)
        pointer.rename(output.with_name("latest_universal"))
        sync(output.parent)
        if replaces:
            shutil.rmtree(old if old.exists() else folder, ignore_errors=True)


@contextlib.contextmanager
def locked(folder):
    """Holds the lock of a folder, or raises BlockingIOError."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(lock), os.stat(folder)):
            raise BlockingIOError(f"{folder} was replaced")
        yield
    finally:
        os.close(lock)


def sync(folder):
    """All that was written to the file system of this folder is on the disk."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "syncfs"):
        return os.sync()
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if libc.syncfs(descriptor):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(folder))
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def unfinished(folder, output):
    """The empty folder to write into, beside the output and locked; gone in the end unless it was published. Sweeps
    away what a killed conversion has left."""
    old, pointer = (output.with_name(f".{output.name}.{what}") for what in ("replaced", "pointer"))
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(folder))
        except (BlockingIOError, FileNotFoundError):
            raise CheckpointError(f"another conversion to {output} is running") from None
        for entry in folder.iterdir():
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        pointer.unlink(missing_ok=True)
        if old.exists():
            shutil.rmtree(old) if output.exists() else old.rename(output)
        mine = os.stat(folder)
        try:
            yield
        finally:
            if folder.exists() and os.path.samestat(mine, os.stat(folder)):
                shutil.rmtree(folder, ignore_errors=True)
                pointer.unlink(missing_ok=True)


def verify(folder, files):
    """Read the finished folder back, cut every tensor as its pieces were, and compare each byte with the source."""
    for name, (wanted, storages) in files.items():
        written, got = pickled(load(folder / name, trust=True))
        if written != wanted or not all(same(a.pieces, b.pieces) for a, b in zip(got, storages, strict=True)):
            raise CheckpointError(f"{folder / name} is not what the checkpoint holds: nothing is published")


@contextlib.contextmanager
def together(share):
    """Of several processes none goes on unless all do: each raises what one of them did."""
    problem = None
    try:
        yield
    except (CheckpointError, OSError) as error:
        problem = error
    problem = next((p for p in share(problem) if p is not None), None)
    if problem is not None:
        raise problem


def convert(
    input_folder, output_folder, num_extract_workers=4, num_merge_workers=2, *,
    strict=True, trust=False, check=False, progress=False, rank=0, ranks=1, share=lambda value: [value],
):  # fmt: skip
    """Convert the ZeRO checkpoint in input_folder into a universal checkpoint at output_folder.

    check compares the finished files with the source, byte by byte, before they are published. Several processes share
    the work as rank of ranks; share(value) returns the values of all of them.
    Raises CheckpointError when the input is not a whole ZeRO checkpoint, or the output is something else's folder;
    OSError when a disk fails. Nothing has then appeared at output_folder.
    Returns {"parameters", "bytes", "files", "seconds"}.
    """
    began = time.perf_counter()
    source, output = Path(input_folder), Path(os.path.realpath(output_folder))
    folder = output.parent / f".{output.name}.unfinished"
    with contextlib.ExitStack() as stack:
        stack.callback(opened.cache_clear)
        with together(share):
            models, optimizer, parameters = read(source, output, num_extract_workers, trust, strict)
            with blame(source / "*_optim_states.pt"):
                files = files_of(models, optimizer, parameters)
            if rank == 0:
                stack.enter_context(unfinished(folder, output))
                for parent in {(folder / name).parent for name in files}:
                    parent.mkdir(parents=True, exist_ok=True)
        pieces = {name: [p for storage in storages for p in storage.pieces] for name, (_, storages) in files.items()}
        sizes = {name: sum(nbytes for _, _, nbytes in ranges) for name, ranges in pieces.items()}
        records = {id(r): r for ranges in pieces.values() for r, _, _ in ranges if isinstance(r, Record)}.values()
        mine, loads = [], [0] * ranks
        for name in sorted(files, key=sizes.get, reverse=True):  # the largest first, each to who has least so far
            least = loads.index(min(loads))
            loads[least] += sizes[name] or 1
            mine += [name] if least == rank else []
        with ThreadPoolExecutor(num_merge_workers) as pool:
            with together(share), bar(sum(sizes[name] for name in mine), progress) as shown:
                for written in pool.map(lambda name: write(folder / name, files[name]), mine):
                    if shown is not None:
                        shown.update(written)
                if rank:
                    sync(folder)  # its node's part; publish() does rank 0's
            for record, seen in zip(records, zip(*share([r.seen for r in records]), strict=True), strict=True):
                record.seen = [interval for of_one in seen for interval in of_one]
            with together(share):
                if rank == 0:
                    list(pool.map(check_record, records))
                    for path in folder.glob("mp_rank_*_model_states.pt"):
                        try:
                            os.link(path, folder / f"zero_pp_rank_0_{path.name}")
                        except OSError:  # a file system without links
                            shutil.copyfile(path, folder / f"zero_pp_rank_0_{path.name}")
                    if check:
                        verify(folder, files)
                    publish(folder, output)
    seconds, count = time.perf_counter() - began, len(files) + len(models)
    return {"parameters": len(parameters), "bytes": sum(sizes.values()), "files": count, "seconds": seconds}


def bar(total, progress):
    """A progress bar in bytes where there are a terminal and tqdm, which comes with DeepSpeed; else None."""
    with contextlib.suppress(ImportError):
        if progress and sys.stderr.isatty():
            from tqdm import tqdm

            return tqdm(total=total, unit="B", unit_scale=True)
    return contextlib.nullcontext()


def peak_memory():
    """Megabytes."""
    with contextlib.suppress(OSError, StopIteration), open("/proc/self/status") as file:  # VmHWM is not everywhere
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1e3
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3  # also what the parent process had


def launched():
    """rank, ranks and share of the process under the deepspeed launcher, torchrun or srun; of one alone, nothing."""
    rank, ranks = (os.environ.get(name) for name in ("RANK", "WORLD_SIZE"))
    if rank is None:
        rank, ranks = (os.environ.get(name) for name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"))
        os.environ.setdefault("MASTER_ADDR", os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1"))
        os.environ.setdefault("MASTER_PORT", "29500")
    if rank is None or ranks is None or int(ranks) == 1:
        return {}
    import datetime

    import torch.distributed as dist

    def share(value):
        values = [None] * int(ranks)
        try:
            dist.all_gather_object(values, value)
        except RuntimeError as error:  # gloo's, when a process is gone
            raise CheckpointError("another process of this conversion is gone: nothing is published") from error
        return values

    patience = datetime.timedelta(days=7)  # gloo's own, 30 minutes, is shorter than the work of the others may be
    dist.init_process_group("gloo", rank=int(rank), world_size=int(ranks), timeout=patience)
    return {"rank": int(rank), "ranks": int(ranks), "share": share}


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
    arg("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher passes it
    args = vars(parser.parse_args())
    if min(args["num_extract_workers"], args["num_merge_workers"]) < 1:
        parser.error("--num_extract_workers and --num_merge_workers are at least 1")
    del args["inject_missing_state"], args["keep_temp_folder"], args["local_rank"]
    gc.disable()  # a hundred thousand small objects that live to the end
    team = launched()
    rank = team.get("rank", 0)
    try:
        done = convert(**args, **team, progress=rank == 0)
    except (CheckpointError, OSError) as error:
        if rank:  # rank 0 says it, and the launcher must not end it before it has
            time.sleep(5)
            os._exit(2)
        print(f"ds_to_universal.py: error: {error}", file=sys.stderr, flush=True)
        sys.exit(2 if isinstance(error, CheckpointError) else 1)
    if team:
        team["share"](None)
        sys.modules["torch.distributed"].destroy_process_group()
    if rank:
        return
    rate, memory = done["bytes"] / done["seconds"] / 1e9, peak_memory()
    print(
        f"{args['output_folder']}: {done['parameters']} parameters, {done['bytes']:,} bytes, {done['files']} files "
        f"in {done['seconds']:.2f} s, {rate:.2f} GB/s, {memory:.0f} MB of memory"
    )


if __name__ == "__main__":
    main()
