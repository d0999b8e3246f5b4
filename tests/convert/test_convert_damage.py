"""Damaged and hostile checkpoints, of train.py and laid out by hand: the converter's result is
right to the byte, or one line names the file at fault. Nothing in a file is run."""

import collections
import contextlib
import io
import itertools
import os
import random
import re
import resource
import shutil
import struct
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import (
    at_event,
    content,
    converter,
    data_of,
    failed,
    flip,
    frozen_and_buffer,
    load,
    makes_a_file,
    not_converted,
    with_bit_flipped,
)

from measure.ranks import run
from universal import CheckpointError, convert, torch_file

MODEL = "mp_rank_00_model_states.pt"
SMALL = (
    "--n_embd",
    16,
    "--n_head",
    2,
    "--n_layer",
    1,
    "--seq_len",
    14,
    "--steps",
    4,
    "--checkpoint_interval",
    2,
)
SMALL = (
    *SMALL,
    "--train_batch_size",
    12,
    "--train_micro_batch_size_per_gpu",
    1,
    "--checkpoint_dir",
    "c",
)


@pytest.fixture(scope="module", params=[1, 3], ids=["zero1", "zero3"])
def saved(request, tmp_path_factory):
    """Steps 2 and 4 of a run with a frozen layer and a buffer on 3 ranks; the files of the first,
    converted."""
    work = tmp_path_factory.mktemp("damage")
    run(work, 3, "train.py", *SMALL, "--zero_stage", request.param, patch=frozen_and_buffer)
    early, late = work / "c" / "global_step2", work / "c" / "global_step4"
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
    return f"leaves {os.listdir(output.parent)}" if os.listdir(output.parent) else how


def fuzz(tmp_path, checkpoint, cases, same):
    """cases: (label, {file: change}, whom to blame). None may end badly. How many were refused and
    converted."""
    ended, bad, source, output = (
        collections.Counter(),
        [],
        tmp_path / "changed",
        tmp_path / "out" / "u",
    )
    for label, changed, blamed in cases:
        output.parent.mkdir(exist_ok=True)
        how = outcome(with_files(source, checkpoint, changed), output, blamed or str(source), same)
        ended[how] += 1
        if how not in ("converted", "refused"):
            bad.append(f"{label}: {how}")
            shutil.rmtree(output.parent)
        shutil.rmtree(source)
    assert not bad, f"{len(bad)} of {ended.total()}:\n" + "\n".join(bad)
    return ended


def damaged_bytes(checkpoint):
    rng = random.Random(1)
    for path in sorted(checkpoint.glob("*.pt")):
        data = path.read_bytes()
        with zipfile.ZipFile(path) as archive:
            records, directory = archive.infolist(), archive.start_dir
        end = data.index(b"PK\6\6", directory)
        lengths = [0, len(data) - 1, *(1 << n for n in range(len(data).bit_length()))]
        for length in lengths + rng.sample(range(len(data)), 6):
            yield f"{path.name} cut at {length}", {path.name: data[:length]}, path.name
        places = [
            (f"data of {r.filename}", data_of(data, r), r.file_size) for r in records if r.file_size
        ]
        places += [(f"header of {record.filename}", record.header_offset, 30) for record in records]
        places += [places[0]] * 5 + [("directory", directory, end - directory)] * 12
        places += [("end record", end, len(data) - end)] * 8 + [("anywhere", 0, len(data))] * 8
        for place, start, size in places:
            position, bit = start + rng.randrange(size), rng.randrange(8)
            label = f"{path.name} bit {bit} of byte {position} ({place}) flipped"
            yield label, {path.name: with_bit_flipped(data, position, bit)}, path.name


# Of hundreds of cases every so many are tried by `make test`, and all of them by `make test-all`.
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_damaged_bytes(tmp_path, saved, every):
    """Files cut at any length and single flipped bits: refused by name, or without effect on any
    byte."""
    cases = itertools.islice(damaged_bytes(saved.early), 0, None, every)
    ended = fuzz(tmp_path, saved.early, cases, lambda output: content(output) == saved.wanted)
    assert ended.total() >= 300 // every and ended["converted"]


def test_files_without_a_zip(tmp_path):
    """Of before torch 1.6: cut at any length one is refused, with any bit flipped it is read, for
    it has no checksums, or refused."""
    path = tmp_path / "x.pt"
    saved = {"a": torch.arange(5.0), "b": [torch.ones(2)]}
    torch.save(saved, path, _use_new_zipfile_serialization=False)
    data = path.read_bytes()
    assert torch_file.load(path)["a"].storage.nbytes == 20
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=re.escape(str(path))):
            torch_file.load(path)
    for position in range(0, len(data), 3):
        path.write_bytes(with_bit_flipped(data, position, position % 8))
        with contextlib.suppress(CheckpointError):
            torch_file.load(path)


def test_a_wrong_step_count(laid_out):
    """Not strict, and the same in every shard: only its checksum tells it."""
    source, right, wrong = laid_out(1), struct.pack("<f", 100.0), struct.pack("<f", 101.0)
    for shard in source.glob("*_optim_*"):
        assert shard.read_bytes().count(right) == 1
        shard.write_bytes(shard.read_bytes().replace(right, wrong))
    not_converted(source, "_optim_states.pt is damaged", strict=False)


def test_tensors_of_the_model_states(laid_out, tmp_path):
    """Views of one storage are no damage, whichever bytes they share; a flipped bit in them is, and
    in a tensor inside an object that is taken over as it is."""
    buffers, note = (
        {"table": torch.arange(5000.0)},
        SimpleNamespace(tensor=torch.arange(1000, 1010)),
    )
    buffers |= {"middle": buffers["table"][900:2500], "end": buffers["table"][2400:]}
    more = {"buffer_names": [*buffers], "note": note}
    source = laid_out(1, model=lambda model: model.update(more, module=model["module"] | buffers))
    convert(source, tmp_path / "u", check=True)
    model, kept = load(tmp_path / "u" / MODEL), (source / MODEL).read_bytes()
    assert all(torch.equal(model["module"][name], tensor) for name, tensor in buffers.items())
    assert torch.equal(model["note"].tensor, note.tensor)
    for tensor in (buffers["table"], buffers["end"], note.tensor):
        (source / MODEL).write_bytes(with_bit_flipped(kept, kept.index(tensor.numpy().tobytes())))
        not_converted(source, MODEL)


@pytest.mark.parametrize("loss", ["cut", "emptied", "overwritten"])
def test_source_vanishes(tmp_path, saved, loss):
    """Shards that shrink or change while they are read: one line with the name of one, and the
    older result stays."""
    shards = {path.name: path.read_bytes() for path in saved.late.glob("*_optim_*")}
    source, output = with_files(tmp_path / "s", saved.late, shards), tmp_path / "out" / "u"
    convert(saved.early, output)

    def lose():
        for name, data in shards.items():
            new = {
                "cut": data[: len(data) // 2],
                "emptied": b"",
                "overwritten": (saved.early / name).read_bytes(),
            }
            (source / name).write_bytes(new[loss])

    done = converter(source, output, before=lambda: at_event(5, makes_a_file, lose))
    failed(done, 2, "_optim_states.pt ")
    assert "is damaged" in done.err or "became shorter" in done.err
    assert content(output) == saved.wanted and sorted(os.listdir(output.parent)) == [
        "latest_universal",
        "u",
    ]


@pytest.mark.parametrize("saved", [1], indirect=True, ids=["zero1"])
@pytest.mark.parametrize("kind", ["exp_avg.pt", "fp32.pt", "step.pt", "optimizer_state.pt", MODEL])
def test_verify(tmp_path, saved, kind):
    """check finds one wrong bit of any tensor in any kind of file that the disk did not keep as it
    was written."""
    output, unfinished = tmp_path / "out" / "u", tmp_path / "out" / ".u.unfinished"

    def read_back(event, arguments):
        path = str(arguments[0]) if event == "open" else ""
        return (
            ".u.unfinished/" in path and path.endswith(f"/{kind}") and not arguments[2] & os.O_CREAT
        )

    spoil = lambda: [flip(path) for path in unfinished.rglob(kind)]  # noqa: E731
    done = converter(saved.early, output, "--verify", before=lambda: at_event(1, read_back, spoil))
    failed(done, 2, f"/{kind} is damaged")
    assert not any(output.parent.iterdir())


def wrong_files(early, late):
    files = {path.name: path.read_bytes() for path in sorted(early.glob("*.pt"))}
    for name in files:
        yield f"no {name}", {name: None}, name
        if name != MODEL:
            yield f"{name} of another step", {name: (late / name).read_bytes()}, None
    for kind in ("optim", "model"):
        for a, b in itertools.permutations([name for name in files if kind in name], 2):
            yield f"{a} copied over {b}", {b: files[a]}, None
            yield f"{a} and {b} swapped", {a: files[b], b: files[a]}, None


def test_wrong_files(tmp_path, saved):
    """A file that is not there, or one of another step or another rank in its place, is always
    refused."""
    ended = fuzz(tmp_path, saved.early, wrong_files(saved.early, saved.late), lambda output: False)
    assert ended == {"refused": {1: 4 + 3 + 12, 3: 6 + 6 + 24}[saved.stage]}


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
        for taken in list(keys(load(path)))[::every]:
            holder = whole = load(path)
            for key in taken[:-1]:
                holder = holder[key]
            change(holder, taken[-1])
            file = io.BytesIO()
            torch.save(whole, file)
            yield f"{path.name} {taken}", {path.name: file.getvalue()}, None


def weights(folder):
    """Every byte below zero/<parameter>/, and the buffers and frozen parameters."""
    files = {
        str(path.relative_to(folder)): path.read_bytes() for path in folder.glob("zero/?*/*.pt")
    }
    return files | {
        name: (tensor.dtype, tensor.tolist())
        for name, tensor in load(folder / MODEL)["module"].items()
    }


@pytest.mark.parametrize("every", [17, pytest.param(1, marks=pytest.mark.slow)])
def test_missing_keys(tmp_path, saved, every):
    """Without any one entry of any file: refused, or every weight and moment is there all the
    same."""
    convert(saved.early, tmp_path / "whole" / "u")
    wanted = weights(tmp_path / "whole" / "u").items()
    cases = changed_entries(saved.early, every, lambda holder, key: holder.pop(key))
    if saved.stage == 1:  # the only trace of a frozen parameter
        cases = (case for case in cases if not case[0].endswith("('module', 'wpe.weight')"))
    # A tied weight may be kept in addition where shared_params no longer says that it is one.
    ended = fuzz(tmp_path, saved.early, cases, lambda output: wanted <= weights(output).items())
    assert min(ended["refused"], ended["converted"]) >= 100 // every


ODD = [
    None,
    -1,
    0,
    10**30,
    2.5,
    "x",
    "(",
    b"x",
    [],
    ["x"],
    {},
    {"x": 1},
    (),
    torch.zeros(2, 2),
    torch.Size((3,)),
    True,
]


def one_of_everything(model):
    """A change of model states."""
    info = {
        "tp_replicated_parameter_patterns": ["b"],
        "parameter_with_row_parallelism_patterns": ["a"],
    }
    info |= {
        "parameter_with_sub_params": [{"patterns": ["c"], "shape": [2, -1], "partition_dim": 0}]
    }
    more = {
        "universal_checkpoint_info": info,
        "mine": {"x": [1, {"y": 2}]},
        "buffer_names": ["buffer"],
    }
    more |= {"ds_config": {"zero_optimization": {"stage": 1, "round_robin_gradients": False}}}
    model.update(more, module=model["module"] | {"buffer": torch.ones(3)})


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", [1, 3])
def test_any_value_of_any_kind(laid_out, tmp_path, stage, every):
    """With something else in the place of any entry: converted or refused."""
    rng, source = random.Random(5), laid_out(stage, one_of_everything)
    cases = changed_entries(
        source, every, lambda holder, key: holder.__setitem__(key, rng.choice(ODD))
    )
    ended = fuzz(tmp_path, source, cases, lambda output: True)
    assert ended.total() > 140 // every and ended["converted"] > 10 // every


def pickle_file(path, data):
    """A .pt file of this pickle."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{path.stem}/data.pkl", data)
        archive.writestr(f"{path.stem}/byteorder", b"little")


class Call:
    """Pickles as a call: whoever loads it with all of pickle makes the call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def hostile(marker):
    yield Call(os.system, f"touch {marker}"), 2
    yield Call(open, str(marker), "w"), 2
    yield Call(eval, f"open({str(marker)!r}, 'w')"), 4
    yield Call(getattr, Call(open, str(marker), "w"), "name"), 2


@pytest.mark.parametrize("place", ["shard", "optimizer state", "model states"])
def test_hostile_pickle(laid_out, tmp_path, place):
    """A planted call is taken over by its name, and is not made; who loads the result makes it."""
    marker, pattern = tmp_path / "marker", "*_model_*" if place == "model states" else "*_optim_*"
    for call, protocol in hostile(marker):
        victim = min(laid_out(1).glob(pattern))
        whole = load(victim)
        (whole["optimizer_state_dict"] if place == "optimizer state" else whole)["note"] = call
        torch.save(whole, victim, pickle_protocol=protocol)
        convert(victim.parent, tmp_path / "u", check=True)
        assert not marker.exists()
        load(tmp_path / "u" / {"optimizer state": "zero/optimizer_state.pt"}.get(place, MODEL))
        assert marker.exists() is (
            place != "shard"
        )  # of a shard nothing but the optimizer's state goes on
        marker.unlink(missing_ok=True)


def test_no_file_changes_what_another_means(laid_out, tmp_path):
    """A pickle's BUILD gives an object attributes. Given to a class, they are refused; and the next
    conversion is what it was."""
    convert(laid_out(3), tmp_path / "u")
    wanted, path = content(tmp_path / "u"), min(laid_out(3).glob("*_model_*"))
    attribute = b"X\x0a\0\0\0__module__X\x07\0\0\0planted"
    for name in (
        b"torch\nSize",
        b"torch._utils\n_rebuild_tensor_v2",
        b"torch.nn\nLinear",
        b"collections\nOrderedDict",
    ):
        for state in (b"}%ss\x86", b"N}%ss\x86", b"}%ss"):
            pickle_file(path, b"\x80\x02c" + name + b"\n" + state % attribute + b"b.")
            not_converted(path.parent, path.name)
    convert(laid_out(3), tmp_path / "u")
    assert content(tmp_path / "u") == wanted


def test_small_pickle_small_memory(laid_out, tmp_path):
    """300 bytes that ask for a memo of a hundred million entries, 800 MB of them."""
    source = laid_out(1)
    pickle_file(source / MODEL, b"\x80\x02}r" + struct.pack("<I", 100_000_000) + b"." + bytes(280))

    def limit():
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (400 << 20),) * 2)

    failed(converter(source, tmp_path / "u", before=limit), 2, f"{MODEL} is damaged")
