"""Damaged and hostile checkpoints, of train.py and laid out by hand: the converter's result is right to the byte, or
one line names the file at fault. Nothing in a file is run."""

import itertools
import os
import pickletools
import random
import re
import shutil
import struct
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import (
    archived,
    content,
    forked,
    frozen_and_buffer,
    load,
    pickle_file,
    source_like,
    with_bit_flipped,
)

from harness.ranks import run
from universal import CheckpointError, convert

MODEL = "mp_rank_00_model_states.pt"
SMALL = ("--n_embd", 16, "--n_head", 2, "--n_layer", 1, "--seq_len", 14, "--steps", 4, "--checkpoint_interval", 2)
SMALL = (*SMALL, "--train_batch_size", 12, "--train_micro_batch_size_per_gpu", 1)


def train_small(folder, stage):
    """The checkpoints of steps 2 and 4 of train.py with a frozen layer and a buffer on 3 ranks."""
    layout = ("--zero_stage", stage, "--checkpoint_dir", "c")
    run(folder, 3, "train.py", *SMALL, *layout, patch=frozen_and_buffer(1))
    return folder / "c" / "global_step2", folder / "c" / "global_step4"


@pytest.fixture(scope="module", params=[1, 3], ids=["zero1", "zero3"])
def saved(request, tmp_path_factory):
    """Steps 2 and 4 of a run with a frozen layer and a buffer on 3 ranks; the files of the first, converted."""
    work = tmp_path_factory.mktemp("damage")
    early, late = train_small(work, request.param)
    convert(early, work / "u")
    return SimpleNamespace(stage=request.param, early=early, late=late, wanted=content(work / "u"))


stage1 = pytest.mark.parametrize("saved", [1], indirect=True, ids=["zero1"])


def attempt(source, output, blamed, same):
    """None if the conversion is refused, with the name and without a trace, or gives the same; else what it did."""
    try:
        convert(source, output)
    except CheckpointError as error:
        if blamed not in str(error) or "\n" in str(error):
            return f"says {error}"
    except Exception as error:
        return f"fails with {error!r}"
    else:
        if not same(output):
            return "converts into something else"
        shutil.rmtree(output)
        (output.parent / "latest_universal").unlink()
    return f"leaves {os.listdir(output.parent)}" if any(output.parent.iterdir()) else None


def fuzz(tmp_path, saved, cases, same):
    """cases: (label, {file: change}, whom to blame). Returns their number; none may end badly."""
    bad, tried = [], 0
    for label, changed, blamed in cases:
        source, output = source_like(tmp_path / f"source{tried}", saved.early, changed), tmp_path / "out" / "u"
        output.parent.mkdir(exist_ok=True)
        if outcome := attempt(source, output, blamed or str(source), same):
            bad.append(f"{label}: {outcome}")
            shutil.rmtree(output.parent)
        shutil.rmtree(source)
        tried += 1
    assert not bad, f"{len(bad)} of {tried}:\n" + "\n".join(bad)
    return tried


# -----------------------------------------------------------------------------
# bytes


def damaged_bytes(checkpoint):
    rng = random.Random(1)
    for path in sorted(checkpoint.iterdir()):
        data, (found, directory) = path.read_bytes(), archived(path)
        end = data.index(b"PK\6\6", directory)
        lengths = [len(data) - 1, *(1 << n for n in range(len(data).bit_length()))]
        for length in lengths + rng.sample(range(len(data)), 6):
            yield f"{path.name} cut at {length}", {path.name: data[:length]}, path.name
        places = [(f"data of {name}", start, size) for name, _, start, size in found if size]
        places += [(f"header of {name}", header, 30) for name, header, _, _ in found]
        places += [("data.pkl", found[0][2], found[0][3])] * 5 + [("directory", directory, end - directory)] * 12
        places += [("end record", end, len(data) - end)] * 8 + [("anywhere", 0, len(data))] * 8
        for place, start, size in places:
            position, bit = start + rng.randrange(size), rng.randrange(8)
            label = f"{path.name} bit {bit} of byte {position} ({place}) flipped"
            yield label, {path.name: with_bit_flipped(data, position, bit)}, path.name


# Of hundreds of cases every so many are tried by `make test`, and all of them by `make test-all`.
some_or_all = pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])


@some_or_all
def test_damaged_bytes(tmp_path, saved, every):
    """Files cut at any length and single flipped bits: refused by name, or without effect on any byte."""
    cases = itertools.islice(damaged_bytes(saved.early), 0, None, every)
    assert fuzz(tmp_path, saved, cases, lambda output: content(output) == saved.wanted) >= 300 // every


def test_missing_and_empty_files(tmp_path, saved):
    cases = [(f"{name} {new}", {name: new}, name) for name in os.listdir(saved.early) for new in (None, b"")]
    assert fuzz(tmp_path, saved, cases, lambda output: False) == {1: 8, 3: 12}[saved.stage]


@stage1
def test_a_wrong_step_count(tmp_path, saved):
    """Not strict, and the same in every shard: only its checksum tells it."""
    shards, two = {path.name: path.read_bytes() for path in saved.early.glob("*_optim_*")}, struct.pack("<f", 2.0)
    for name, data in shards.items():
        places = [start for _, _, start, size in archived(saved.early / name)[0] if data[start : start + size] == two]
        assert len(places) == 2
        for place in places:
            data = with_bit_flipped(data, place + 3)
        shards[name] = data
    with pytest.raises(CheckpointError, match="_optim_states.pt is damaged"):
        convert(source_like(tmp_path / "s", saved.early, shards), tmp_path / "u", strict=False)


def test_buffers_that_share_bytes(laid_out, tmp_path, monkeypatch):
    """Views of one storage are no damage, whichever bytes they share; a bit read wrong for one of them is."""
    buffers, preadv, wrong = {"table": torch.arange(5000.0)}, os.preadv, []
    buffers |= {"middle": buffers["table"][900:2500], "end": buffers["table"][2400:]}

    def read_wrong(descriptor, parts, position):
        size = preadv(descriptor, parts, position)
        if not wrong and bytes(parts[0]) == buffers["middle"].numpy().tobytes():
            parts[0][0] ^= 1
            wrong.append(position)
        return size

    more = lambda model: model.update(module=model["module"] | buffers, buffer_names=[*buffers])  # noqa: E731
    source = laid_out(1, model=more)
    convert(source, tmp_path / "u", check=True)
    module = load(tmp_path / "u" / MODEL)["module"]
    assert all(torch.equal(module[name], tensor) for name, tensor in buffers.items())
    monkeypatch.setattr(os, "preadv", read_wrong)
    with pytest.raises(CheckpointError, match=MODEL):
        convert(source, tmp_path / "u")
    assert wrong


@pytest.mark.parametrize("loss", ["cut", "emptied", "overwritten"])
def test_source_vanishes(tmp_path, saved, loss):
    """Shards that shrink or change while they are read: one line with the name of one, and the older result stays."""
    shards = {path.name: path.read_bytes() for path in saved.late.glob("*_optim_*")}
    source, output = source_like(tmp_path / "s", saved.late, shards), tmp_path / "out" / "u"
    convert(saved.early, output)
    writes = itertools.count(1)

    def lose(event, arguments):
        if event == "open" and arguments[1] == "x" and next(writes) == 5:
            for name, data in shards.items():
                new = {"cut": data[: len(data) // 2], "emptied": b"", "overwritten": (saved.early / name).read_bytes()}
                (source / name).write_bytes(new[loss])

    def work():
        sys.addaudithook(lose)
        with pytest.raises(CheckpointError, match=r"_optim_states\.pt (became shorter|is damaged)"):
            convert(source, output)

    done = forked(work)()
    assert done.code == 0, done.err
    assert content(output) == saved.wanted and sorted(os.listdir(output.parent)) == ["latest_universal", "u"]


@stage1
@pytest.mark.parametrize("kind", [None, "exp_avg.pt", "fp32.pt", "step.pt", "optimizer_state.pt", MODEL])
def test_verify(tmp_path, saved, kind):
    """check finds one wrong bit of any tensor in any kind of file that the disk did not keep as it was written."""
    output, damaged = tmp_path / "out" / "u", []

    def damage(event, arguments):
        if event == "open" and arguments[1] in ("r", "rb") and not damaged:
            path = Path(str(arguments[0]))
            if path.name == kind and ".u.unfinished" in str(path):
                damaged.append(path)
                tensors = [(size, start) for name, _, start, size in archived(path)[0] if name.startswith("data/")]
                size, start = max(tensors)
                path.write_bytes(with_bit_flipped(path.read_bytes(), start + size // 2))

    def work():
        sys.addaudithook(damage)
        convert(saved.early, output, check=True)

    done = forked(work)()
    if kind is None:
        assert done.code == 0 and content(output) == saved.wanted
        return
    assert done.code == 1 and re.search(rf"CheckpointError: .*/{kind} is damaged", done.err)
    assert not any(output.parent.iterdir())


# -----------------------------------------------------------------------------
# files and entries


def wrong_files(saved):
    names = sorted(path.name for path in saved.early.iterdir())
    for name in names:
        if name != MODEL:
            yield f"{name} of another step", {name: saved.late / name}, None
    for kind in ("optim", "model"):
        for a, b in itertools.combinations([name for name in names if kind in name], 2):
            yield f"{a} and {b} swapped", {a: saved.early / b, b: saved.early / a}, None
            yield f"{a} copied over {b}", {b: saved.early / a}, None
            yield f"{b} copied over {a}", {a: saved.early / b}, None


def test_wrong_files(tmp_path, saved):
    """A file of another step or another rank in the place of the right one is always refused."""
    assert fuzz(tmp_path, saved, wrong_files(saved), lambda output: False) == {1: 3 + 9, 3: 6 + 18}[saved.stage]


def keys(value, path=()):
    """The path of everything in nested dicts and lists that can be taken out, but for the inside of descriptions."""
    if isinstance(value, (dict, list)) and path[-1:] not in [("ds_config",), ("run",), ("param_groups",)]:
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield (*path, key)
            yield from keys(inner, (*path, key))


def without_keys(checkpoint, folder, unknowable):
    folder.mkdir()
    for path in sorted(checkpoint.iterdir()):
        for taken in (taken for taken in keys(load(path)) if taken not in unknowable):
            value = whole = load(path)
            for key in taken[:-1]:
                value = value[key]
            del value[taken[-1]]
            torch.save(whole, folder / path.name)
            yield f"{path.name} without {taken}", {path.name: (folder / path.name).read_bytes()}, None


def weights(folder):
    """Every byte below zero/<parameter>/, and the buffers and frozen parameters."""
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.glob("zero/?*/*.pt")}
    return files | {name: (tensor.dtype, tensor.tolist()) for name, tensor in load(folder / MODEL)["module"].items()}


@some_or_all
def test_missing_keys(tmp_path, saved, every):
    """Without any one entry of any file, at any depth: refused, or every weight and moment is there all the same."""
    convert(saved.early, tmp_path / "whole" / "u")
    wanted = weights(tmp_path / "whole" / "u").items()
    unknowable = {("module", "wpe.weight")} if saved.stage == 1 else set()  # the only trace of a frozen parameter
    cases = itertools.islice(without_keys(saved.early, tmp_path / "edited", unknowable), 0, None, every)
    # A tied weight may be kept in addition where shared_params no longer says that it is one.
    assert fuzz(tmp_path, saved, cases, lambda output: wanted <= weights(output).items()) >= 200 // every


@pytest.mark.parametrize("key", ["random_ltd", "data_sampler", "lr_scheduler", "global_samples", "mp_world_size"])
def test_what_no_weight_depends_on(laid_out, tmp_path, key):
    """Without such an entry a checkpoint is whole."""
    convert(laid_out(3), tmp_path / "u")
    wanted = weights(tmp_path / "u")
    convert(laid_out(3, model=lambda model: model.pop(key)), tmp_path / "u")
    assert weights(tmp_path / "u") == wanted


# -----------------------------------------------------------------------------
# hostile pickles


class Call:
    """Pickles as a call: whoever loads it with all of pickle makes the call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


HOSTILE = {
    r"posix\.system": lambda marker: Call(os.system, f"touch {marker}"),
    r"io\.open": lambda marker: Call(open, str(marker), "w"),
    r"(__builtin__|builtins)\.eval": lambda marker: Call(eval, f"open({str(marker)!r}, 'w')"),
    r"__builtin__\.getattr": lambda marker: Call(getattr, Call(open, str(marker), "w"), "name"),
}


@pytest.mark.parametrize("place", ["shard", "optimizer state", "model states"])
def test_hostile_pickle(laid_out, tmp_path, place):
    """A planted call is taken over by its name, and is not made; who loads the result makes it."""
    marker, pattern = tmp_path / "marker", "*_model_*" if place == "model states" else "*_optim_*"
    for (path, plant), protocol in zip(HOSTILE.items(), (2, 2, 4, 2), strict=True):
        victim = min(laid_out(1).glob(pattern))
        whole = load(victim)
        (whole["optimizer_state_dict"] if place == "optimizer state" else whole)["note"] = plant(marker)
        torch.save(whole, victim, pickle_protocol=protocol)
        convert(victim.parent, tmp_path / "u", check=True)
        assert not marker.exists()
        written = tmp_path / "u" / {"optimizer state": "zero/optimizer_state.pt"}.get(place, MODEL)
        with zipfile.ZipFile(written) as archive:
            data = archive.read(f"{written.stem}/data.pkl")
        names = {name.replace(" ", ".") for op, name, _ in pickletools.genops(data) if op.name == "GLOBAL"}
        load(written)
        # Of a shard nothing but the optimizer's state goes on.
        assert any(re.fullmatch(path, name) for name in names) is marker.exists() is (place != "shard"), names
        marker.unlink(missing_ok=True)


@pytest.mark.parametrize(
    "name", ["torch Size", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter", "torch.nn Linear",
             "collections OrderedDict", "__builtin__ getattr"]
)  # fmt: skip
@pytest.mark.parametrize("state", [b"}%ss\x86", b"N}%ss\x86", b"}%ss"])
def test_no_file_changes_what_another_means(laid_out, tmp_path, monkeypatch, name, state):
    """A pickle's BUILD gives an object attributes. Given to a class, they are refused; and the next conversion is what
    it was. Nor is a module imported."""
    source = laid_out(3)
    convert(source, tmp_path / "u")
    wanted, kept = content(tmp_path / "u"), content(source)
    (tmp_path / "planted.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    attribute = b"X\x0a\0\0\0__module__X\x07\0\0\0planted"
    path = min(source.glob("*_model_*"))
    pickle_file(path, b"\x80\x02c" + name.replace(" ", "\n").encode() + b"\n" + state % attribute + b"b.")
    with pytest.raises(CheckpointError, match=path.name):
        convert(source, tmp_path / "u")
    assert "planted" not in sys.modules and not (tmp_path / "ran").exists()
    path.write_bytes(kept[path.name])
    convert(source, tmp_path / "u")
    assert content(tmp_path / "u") == wanted


def test_tensors_in_unknown_objects_are_checked(laid_out, tmp_path):
    """Also the bytes of a tensor inside an object that is taken over as it is must match their checksum."""
    planted = SimpleNamespace(tensor=torch.arange(1000, 1010))
    source = laid_out(1, model=lambda model: model.update(note=planted))
    convert(source, tmp_path / "u")
    assert torch.equal(load(tmp_path / "u" / MODEL)["note"].tensor, planted.tensor)
    data = (source / MODEL).read_bytes()
    (source / MODEL).write_bytes(with_bit_flipped(data, data.index(struct.pack("<2q", 1000, 1001))))
    with pytest.raises(CheckpointError, match=MODEL):
        convert(source, tmp_path / "u")


def test_a_class_with_a_line_break_in_its_name(laid_out, tmp_path):
    source = laid_out(1)
    pickle_file(source / MODEL, b"\x80\x04\x8c\x03a\nb\x8c\x01c\x93.")
    with pytest.raises(CheckpointError, match=MODEL) as error:
        convert(source, tmp_path / "u")
    assert "\n" not in str(error.value)
