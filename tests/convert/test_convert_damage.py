"""Damaged and hostile checkpoints, of train.py and laid out by hand: the converter's result is
right to the byte, or one line names the file at fault. Nothing in a file is run."""

import collections
import io
import itertools
import os
import random
import shutil
import struct
import zipfile
from types import SimpleNamespace

import pytest
import torch

from tests.support.commands import at_event, converter, failed, makes_a_file, slow
from tests.support.conversions import not_converted, settled
from tests.support.files import MODEL, content, flip, load, with_bit_flipped
from tests.support.helpers import frozen_and_buffer
from tests.support.ranks import run
from universal import CheckpointError, convert

SMALL = (
    "--n_embd 16 --n_head 2 --n_layer 1 --seq_len 14 --steps 4 --checkpoint_interval 2 "
    "--train_batch_size 12 --train_micro_batch_size_per_gpu 1 --checkpoint_dir c"
).split()


@pytest.fixture(scope="module", params=[1, 3], ids=["zero1", "zero3"])
def saved(request, tmp_path_factory):
    """Steps 2 and 4 of a run with a frozen layer and a buffer on 3 ranks; the files of the first,
    converted."""
    work = tmp_path_factory.mktemp("damage")
    run(work, 3, "train.py", *SMALL, "--zero_stage", request.param, patch=frozen_and_buffer)
    early = work / "c" / "global_step2"
    late = work / "c" / "global_step4"
    convert(early, work / "u")
    return SimpleNamespace(stage=request.param, early=early, late=late, wanted=content(work / "u"))


def with_files(folder, checkpoint, changed):
    """The checkpoint with some files changed: {name: bytes, or None to leave it out}."""
    shutil.copytree(checkpoint, folder, copy_function=os.symlink)
    for name, data in changed.items():
        (folder / name).unlink()
        if data is not None:
            (folder / name).write_bytes(data)
    return folder


def outcome(source, output, blamed, same):
    """Converted into the same, or refused in one line with this name; or else what has happened."""
    try:
        convert(source, output)
    except CheckpointError as error:
        how = "refused" if blamed in str(error) and "\n" not in str(error) else f"says {error}"
    except Exception as error:
        how = f"fails with {error!r}"
    else:
        how = "converted" if same(output) else "converted into something else"
        shutil.rmtree(output)
        (output.parent / "latest_universal").unlink()
    left = os.listdir(output.parent)
    return f"leaves {left}" if left else how


def fuzz(tmp_path, checkpoint, cases, same):
    """cases: (label, {file: change}, whom to blame). None may end badly. How many were refused and
    converted."""
    ended = collections.Counter()
    source = tmp_path / "changed"
    output = tmp_path / "out" / "u"
    output.parent.mkdir()
    for label, changed, blamed in cases:
        with_files(source, checkpoint, changed)
        how = outcome(source, output, blamed or str(source), same)
        assert how in ("converted", "refused"), f"{label}: {how}"
        ended[how] += 1
        shutil.rmtree(source)
    return ended


def damaged_bytes(checkpoint):
    rng = random.Random(1)
    for path in sorted(checkpoint.glob("*.pt")):
        data = path.read_bytes()
        directory = data.index(b"PK\1\2")
        lengths = [0, len(data) - 1, *(1 << n for n in range(len(data).bit_length()))]
        for length in lengths:
            yield f"{path.name} cut at {length}", {path.name: data[:length]}, path.name
        positions = rng.sample(range(directory), 60) + rng.sample(range(directory, len(data)), 20)
        for position in positions:
            bit = rng.randrange(8)
            label = f"{path.name} bit {bit} of byte {position} flipped"
            yield label, {path.name: with_bit_flipped(data, position, bit)}, path.name


# Of hundreds of cases every so many are tried by `make test`, and all of them by `make test-all`.
@pytest.mark.parametrize("every", [7, slow(1)])
def test_damaged_bytes(tmp_path, saved, every):
    """Files cut at any length and single flipped bits: refused by name, or without effect on any
    byte."""
    cases = itertools.islice(damaged_bytes(saved.early), 0, None, every)
    ended = fuzz(tmp_path, saved.early, cases, lambda output: content(output) == saved.wanted)
    assert ended.total() >= 300 // every and ended["converted"]


def test_a_wrong_step_count(laid_out):
    """Not strict, and the same in every shard: only its checksum tells it."""
    source = laid_out(1)
    right = struct.pack("<f", 100.0)
    wrong = struct.pack("<f", 101.0)
    for shard in source.glob("*_optim_*"):
        assert shard.read_bytes().count(right) == 1
        shard.write_bytes(shard.read_bytes().replace(right, wrong))
    not_converted(source, "_optim_states.pt is damaged", strict=False)


def test_tensors_of_the_model_states(laid_out, tmp_path):
    """Views of one storage are no damage, whichever bytes they share, and their table stays behind;
    a flipped bit in them is, and in a tensor inside an object that is taken over as it is."""
    table = torch.arange(5000.0).view(50, 100)
    buffers = {"table": table, "rows": table[9:25], "last": table[24:]}
    frozen = {"columns": table[:, :4], "transposed": table.t(), "column": table[:, 7]}
    shapes = {name: tensor.shape for name, tensor in frozen.items()}
    note = SimpleNamespace(tensor=torch.arange(1000, 1010))

    def add(model):
        model.update(module=buffers | frozen, buffer_names=[*buffers], note=note)
        model.update(frozen_param_shapes=shapes, frozen_param_fragments=frozen)

    source = laid_out(1, model=add)
    convert(source, tmp_path / "u", check=True)
    model = load(tmp_path / "u" / MODEL)
    module = model["module"]
    wanted = buffers | frozen
    assert module.keys() == wanted.keys() and torch.equal(model["note"].tensor, note.tensor)
    assert all(torch.equal(module[name], tensor) for name, tensor in wanted.items())
    assert module["rows"].untyped_storage().nbytes() == 16 * 100 * 4
    data = (source / MODEL).read_bytes()
    for tensor in (table, buffers["last"], note.tensor):
        position = data.index(tensor.numpy().tobytes())
        (source / MODEL).write_bytes(with_bit_flipped(data, position))
        not_converted(source, MODEL)


@pytest.mark.parametrize("loss", ["cut", "overwritten"])
def test_source_vanishes(tmp_path, saved, loss):
    """Shards that shrink or change while they are read: one line with the name of one, and the
    older result stays."""
    shards = {path.name: path.read_bytes() for path in saved.late.glob("*_optim_*")}
    source = with_files(tmp_path / "s", saved.late, shards)
    output = tmp_path / "out" / "u"
    convert(saved.early, output)

    def lose():
        for name, data in shards.items():
            new = data[: len(data) // 2] if loss == "cut" else (saved.early / name).read_bytes()
            (source / name).write_bytes(new)

    done = converter(source, output, before=lambda: at_event(5, makes_a_file, lose))
    failed(done, 2, "_optim_states.pt ")
    assert "is damaged" in done.err or "became shorter" in done.err
    settled(output, saved.wanted)


@pytest.mark.parametrize("saved", [1], indirect=True, ids=["zero1"])
@pytest.mark.parametrize("kind", ["exp_avg.pt", "fp32.pt", "step.pt", "optimizer_state.pt", MODEL])
def test_verify(tmp_path, saved, kind):
    """check finds one wrong bit of any tensor in any kind of file that the disk did not keep as it
    was written."""
    output = tmp_path / "out" / "u"

    def read_back(event, arguments):
        if event != "open" or makes_a_file(event, arguments):
            return False
        path = str(arguments[0])
        return ".unfinished/" in path and path.endswith(f"/{kind}")

    def spoil():
        for path in output.parent.rglob(kind):
            flip(path)

    done = converter(saved.early, output, "--verify", before=lambda: at_event(1, read_back, spoil))
    failed(done, 2, f"/{kind} is damaged")
    assert not any(output.parent.iterdir())


def keys(value, path=()):
    """The path of everything in nested dicts and lists."""
    if isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield (*path, key)
            yield from keys(inner, (*path, key))


def changed_entries(checkpoint, every, change):
    """Of every so many entries of every file, at any depth: the file after change(what holds it,
    its key)."""
    for path in sorted(checkpoint.glob("*.pt")):
        for entry in list(keys(load(path)))[::every]:
            saved = load(path)
            holder = saved
            for key in entry[:-1]:
                holder = holder[key]
            change(holder, entry[-1])
            file = io.BytesIO()
            torch.save(saved, file)
            yield f"{path.name} {entry}", {path.name: file.getvalue()}, None


def weights(folder):
    """Every byte below zero/<parameter>/, and the buffers and frozen parameters."""
    paths = folder.glob("zero/?*/*.pt")
    module = load(folder / MODEL)["module"]
    files = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
    return files | {name: (tensor.dtype, tensor.tolist()) for name, tensor in module.items()}


@pytest.mark.parametrize("every", [17, slow(1)])
def test_missing_keys(tmp_path, saved, every):
    """Without any one entry of any file: refused, or every weight and moment is there all the
    same."""
    whole = tmp_path / "whole" / "u"
    convert(saved.early, whole)
    wanted = weights(whole).items()
    cases = changed_entries(saved.early, every, lambda holder, key: holder.pop(key))
    # A buffer may be there under another name, and what is frozen ZeRO-1 does not list: a load
    # misses them, as its module has them.
    unlisted = ("('module', 'calls')",) + ("('module', 'wpe.weight')",) * (saved.stage == 1)
    cases = (case for case in cases if not case[0].endswith(unlisted))
    # A tied weight may be kept in addition where shared_params no longer says that it is one.
    ended = fuzz(tmp_path, saved.early, cases, lambda output: wanted <= weights(output).items())
    assert min(ended["refused"], ended["converted"]) >= 100 // every


OTHER_VALUES = [
    None,
    -1,
    10**30,
    "(",
    [],
    {"x": 1},
    torch.zeros(2, 2),
    torch.Size((3,)),
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("every", [5, slow(1)])
@pytest.mark.parametrize("stage", [1, 3])
def test_any_value_of_any_kind(laid_out, tmp_path, stage, every):
    """With something else in the place of any entry: converted or refused."""
    rng = random.Random(5)
    source = laid_out(stage)

    def change(holder, key):
        holder[key] = rng.choice(OTHER_VALUES)

    cases = changed_entries(source, every, change)
    ended = fuzz(tmp_path, source, cases, lambda output: True)
    assert ended.total() > 100 // every and ended["converted"] > 10 // every


class Call:
    """Pickles as a call: whoever loads it with all of pickle makes the call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("place", ["shard", "optimizer_state", "model_states"])
def test_hostile_pickle(laid_out, tmp_path, place):
    """A planted call is taken over by its name, and is not made; who loads the result makes it."""
    marker = tmp_path / "marker"
    victim = min(laid_out(1).glob("*_model_*" if place == "model_states" else "*_optim_*"))
    saved = load(victim)
    holder = saved["optimizer_state_dict"] if place == "optimizer_state" else saved
    holder["note"] = Call(open, str(marker), "w")
    torch.save(saved, victim)
    convert(victim.parent, tmp_path / "u", check=True)
    assert not marker.exists()
    load(tmp_path / "u" / ("zero/optimizer_state.pt" if place == "optimizer_state" else MODEL))
    # Of a shard nothing but the optimizer's state goes on.
    assert marker.exists() is (place != "shard")


def test_small_pickle_small_memory(laid_out):
    """300 bytes that ask for a memo of a hundred million entries, 800 MB of them."""
    source = laid_out(1)
    with zipfile.ZipFile(source / MODEL, "w") as archive:
        data = b"\x80\x02}r" + struct.pack("<I", 100_000_000) + b"." + bytes(280)
        archive.writestr("mp_rank_00_model_states/data.pkl", data)
        archive.writestr("mp_rank_00_model_states/byteorder", b"little")
    not_converted(source, MODEL, "wants to remember 100000000 objects")
