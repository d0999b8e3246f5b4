"""What may be done to a folder that holds the checkpoints "t" and "later" of 2 ranks: each function
here is, or returns, a change(folder), or a harm(path) for each()."""

import json
import os
import shutil
import sys
import types
from typing import NamedTuple

import torch

import universal
from tests.support.files import (
    each_state,
    edit,
    flip,
    load,
    records,
    torch_state,
    with_bit_flipped,
)


class Files(NamedTuple):
    """Some files of a checkpoint. suffix: of their names; it is how a refusal calls them."""

    suffix: str
    some: slice = slice(None)
    tag: str = "t"

    def paths(self, folder):
        return sorted((folder / self.tag).glob(f"*{self.suffix}"))[self.some]


SHARD_0 = Files("zero_pp_rank_0_mp_rank_00_optim_states.pt")
SHARD_1 = Files("zero_pp_rank_1_mp_rank_00_optim_states.pt")
SHARDS = Files("optim_states.pt")
MODELS = Files("model_states.pt")
FIRST_MODEL = Files("model_states.pt", slice(1))
LAST_MODEL = Files("model_states.pt", slice(-1, None))
LATER_SHARD_1 = SHARD_1._replace(tag="later")
LATER_MODELS = MODELS._replace(tag="later")


def each(files, harm):
    def change(folder):
        for path in files.paths(folder):
            harm(path)

    return change


def in_order(*changes):
    def change(folder):
        for step in changes:
            step(folder)

    return change


def unharmed(folder):
    pass


def load_with(change=unharmed, **options):
    """These are arguments of load_checkpoint()."""

    def changed(folder):
        change(folder)
        (folder / "options.json").write_text(json.dumps(options))

    return changed


def options_in(folder):
    """The arguments of a load there."""
    path = folder / "options.json"
    options = json.loads(path.read_text()) if path.exists() else {}
    return {"load_dir": ".", "tag": "t"} | options


def untagged(change=unharmed, latest="later", hours=()):
    """No tag is given. latest: what that file says, if there is one. hours: when "t", "later" and
    `latest` were written."""

    def changed(folder):
        (folder / "latest").unlink()
        if latest is not None:
            (folder / "latest").write_bytes(latest.encode("latin-1"))
        change(folder)
        for pattern, hour in zip(("t/*.pt", "later/*.pt", "latest"), hours, strict=bool(hours)):
            for path in folder.glob(pattern):
                os.utime(path, (3600 * hour, 3600 * hour))

    return load_with(changed, tag=None)


def move(tag, to):
    return lambda folder: (folder / tag).rename(folder / to)


# What is missing, cut off, or has a bit that is another.


def cut(path, end):
    path.write_bytes(path.read_bytes()[:end])


def truncate(path):
    cut(path, -50)


def flip_bit(part="/data/", number=-1, at=0.5):
    """Of a record of an archive, counted by their sizes."""
    return lambda path: flip(path, records(path, part)[number], at)


def flip_all(path):
    """A bit of each tensor."""
    for record in records(path):
        flip(path, record, 0)


def flip_in_directory(path):
    path.write_bytes(with_bit_flipped(path.read_bytes(), path.stat().st_size - 60, 3))


def of_conversion(state, harm=flip):
    def change(folder):
        universal.convert(folder / "t", folder / "u")
        harm(folder / "u" / "zero" / "a.weight" / f"{state}.pt")

    return load_with(change, tag="u")


def save_half(path):
    """A file that is right by itself."""
    states = torch.load(path)
    save(states | {"param": states["param"].flatten()[:8].clone()})(path)


# Files of other ranks, of another step, of another time.


def swap(folder):
    shard_0, shard_1 = SHARDS.paths(folder)
    shard_0.rename(folder / "shard_0")
    shard_1.rename(shard_0)
    (folder / "shard_0").rename(shard_1)


def save_in_old_format(path):
    torch.save(load(path), path, _use_new_zipfile_serialization=False)


def from_later(path):
    shutil.copy(path.parent.with_name("later") / path.name, path)


def written_at(second):
    return lambda path: os.utime(path, (second, second))


all_at_once = each(Files(""), written_at(1))


def shard_of_rank_2(folder):
    """As when it was saved by more ranks before, under the same name."""
    (path,) = SHARD_1.paths(folder)
    shutil.copy(path.parent.with_name("later") / path.name, str(path).replace("rank_1", "rank_2"))


# What lies beside them.


def write(*names):
    def change(folder):
        for name in names:
            (folder / name).write_text("x")

    return change


def folder_called(name):
    return lambda folder: (folder / name).mkdir()


def link(folder):
    (folder / "t").rename(folder / "elsewhere")
    (folder / "t").symlink_to("elsewhere")


def neighbour(put):
    """A folder x beside them, with model states that put(path) makes."""

    def change(folder):
        (folder / "x").mkdir()
        put(folder / "x" / "mp_rank_00_model_states.pt")

    return untagged(change)


def save(content, **options):
    return lambda path: torch.save(content, path, **options)


def half_converted(path):
    save({"global_steps": 9, "module": {}, "param_shapes": []})(path)
    (path.parent / "zero").mkdir()


# What the files hold.


def edited(files, change):
    return each(files, lambda path: edit(path.parent, path.name, change))


def no_optimizer(shard):
    shard["optimizer_state_dict"] = None


def no_states(shard):
    torch_state(shard)["state"].clear()


no_second_moment = each_state(lambda state: state.pop("exp_avg_sq"))


def class_of_nobody(folder):
    module = types.ModuleType("gone_module")
    module.Gone = type("Gone", (), {"__module__": "gone_module"})
    sys.modules["gone_module"] = module
    client_state(module.Gone())(folder)
    del sys.modules["gone_module"]


def remove(files, key):
    """From model states, or from what the optimizer has saved."""

    def change(content):
        optimizer = content.get("optimizer_state_dict")
        for holder in [optimizer, torch_state(content)] if optimizer else [content]:
            holder.pop(key, None)

    return edited(files, change)


def client_state(value):
    return edited(MODELS, lambda model: model.update(mine=value))
