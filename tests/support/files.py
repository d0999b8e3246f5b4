"""The files of a checkpoint: changed, damaged, compared. Nothing here needs DeepSpeed."""

import struct
import zipfile
from collections import OrderedDict
from pathlib import Path

import torch

MODEL = "mp_rank_00_model_states.pt"
SHAPES = [OrderedDict(a=torch.Size((5, 3)), b=torch.Size((7,))), OrderedDict(c=torch.Size((4,)))]


def load(path):
    return torch.load(path, weights_only=False)


def edit(folder, pattern, change):
    """Load each file of a pattern, change(its content), and save it again."""
    for path in sorted(folder.glob(pattern)):
        saved = load(path)
        change(saved)
        torch.save(saved, path)


def torch_state(shard):
    """The state of PyTorch's optimizer in a shard of any stage."""
    optimizer = shard["optimizer_state_dict"]
    return optimizer.get("base_optimizer_state") or optimizer["optimizer_state_dict"]


def states(shard):
    """The optimizer's, by parameter group."""
    return torch_state(shard)["state"].values()


def each_state(change):
    """A change of a shard: change(the optimizer's states) of each parameter group."""

    def change_all(shard):
        for state in states(shard):
            change(state)

    return change_all


def content(folder):
    """Every byte below a folder, by file."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in Path(folder).rglob("*")
        if path.is_file()
    }


def folders_in(folder):
    """Their names."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def parameters_in(zero):
    """The names of those that have a folder in the zero/ of a universal checkpoint."""
    return {str(path.parent.relative_to(zero)) for path in zero.rglob("fp32.pt")}


def records(path, part="/data/"):
    """The records of a .pt file, the largest last."""
    with zipfile.ZipFile(path) as archive:
        chosen = [info for info in archive.infolist() if part in info.filename and info.file_size]
    return sorted(chosen, key=lambda info: info.file_size)


def data_of(data, record):
    """Where the bytes of a record begin in those of its file."""
    lengths = struct.unpack_from("<HH", data, record.header_offset + 26)
    return record.header_offset + 30 + sum(lengths)


def with_bit_flipped(data, position, bit=0):
    """The bytes with one bit the other way."""
    return data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :]


def flip(path, record=None, at=0.5):
    """Change one bit of a record of a .pt file; without one, in the middle of the largest
    tensor."""
    record = record or records(path)[-1]
    data = path.read_bytes()
    position = data_of(data, record) + int(record.file_size * at)
    path.write_bytes(with_bit_flipped(data, position, bit=4))
