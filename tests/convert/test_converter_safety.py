"""ds_to_universal.py when things go wrong: damaged sources, hostile pickles, kill -9, full disks, a second conversion.
The result is whole and right, or one line says which file is at fault and nothing has changed."""

import contextlib
import ctypes
import errno
import fcntl
import gc
import itertools
import os
import pickletools
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import threading
import warnings
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum
from helpers import command, content, frozen_and_buffer, load

from benchmarks.convert import gpt_groups, lay_out
from harness.ranks import run
from universal import CheckpointError, checkpoint, convert

SMALL = ("--n_embd", 16, "--n_head", 2, "--n_layer", 1, "--seq_len", 14, "--steps", 4, "--checkpoint_interval", 2)
SMALL = (*SMALL, "--train_batch_size", 12, "--train_micro_batch_size_per_gpu", 1)
MODEL = "mp_rank_00_model_states.pt"


@pytest.fixture(scope="module", params=[1, 3], ids=["zero1", "zero3"])
def saved(request, tmp_path_factory):
    """Steps 2 and 4 of a run with a frozen layer and a buffer on 3 ranks, and what they convert into."""
    work, stage = tmp_path_factory.mktemp("safety"), request.param
    run(work, 3, "train.py", *SMALL, "--zero_stage", stage, "--checkpoint_dir", "c", patch=frozen_and_buffer(1))
    early, late = work / "c" / "global_step2", work / "c" / "global_step4"
    for step in (early, late):
        convert(step, work / "u" / step.name)
    old, new = (content(work / "u" / step.name) for step in (early, late))
    assert len(old) == len(new) == 63 and old != new
    return SimpleNamespace(stage=stage, early=early, late=late, old=old, new=new)


stage1 = pytest.mark.parametrize("saved", [1], indirect=True, ids=["zero1"])


@pytest.fixture
def tmp_path(in_memory):
    return in_memory


def source_like(folder, checkpoint, changed):
    """The checkpoint with some files changed: {name: bytes, another file, or None to leave it out}."""
    folder.mkdir(parents=True)
    for name, new in ({path.name: path for path in checkpoint.iterdir()} | changed).items():
        if isinstance(new, bytes):
            (folder / name).write_bytes(new)
        elif new is not None:
            (folder / name).symlink_to(new)
    return folder


def edited(folder, checkpoint, pattern, change):
    """The checkpoint with change(content) made to the files that match the pattern."""
    source_like(folder, checkpoint, {path.name: None for path in checkpoint.glob(pattern)})
    for path in checkpoint.glob(pattern):
        whole = load(path)
        change(whole)
        torch.save(whole, folder / path.name)
    return folder


def settled(output, wanted):
    """The output is this, it is what latest_universal names, and nothing else lies beside it."""
    assert content(output) == wanted
    assert (output.parent / "latest_universal").read_text() == output.name
    assert sorted(path.name for path in output.parent.iterdir()) == sorted(["latest_universal", output.name])


# -----------------------------------------------------------------------------
# damaged sources


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


def records(path):
    """[(name, start of the local header, start of the data, size)] of an archive, and where its directory starts."""
    data, found = path.read_bytes(), []
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            lengths = struct.unpack("<HH", data[info.header_offset + 26 : info.header_offset + 30])
            start = info.header_offset + 30 + sum(lengths)
            found.append((info.filename.split("/", 1)[1], info.header_offset, start, info.file_size))
        return found, archive.start_dir


def flip(data, position, bit=0):
    return data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :]


def damaged_bytes(checkpoint):
    rng = random.Random(1)
    for path in sorted(checkpoint.iterdir()):
        data, (found, directory) = path.read_bytes(), records(path)
        end = data.index(b"PK\6\6", directory)
        yield f"{path.name} deleted", {path.name: None}, path.name
        lengths = [0, len(data) - 1, *(1 << n for n in range(len(data).bit_length()))]
        for length in lengths + rng.sample(range(len(data)), 6):
            yield f"{path.name} cut at {length}", {path.name: data[:length]}, path.name
        places = [(f"data of {name}", start, size) for name, _, start, size in found if size]
        places += [(f"header of {name}", header, 30) for name, header, _, _ in found]
        places += [("data.pkl", found[0][2], found[0][3])] * 5 + [("directory", directory, end - directory)] * 12
        places += [("end record", end, len(data) - end)] * 8 + [("anywhere", 0, len(data))] * 8
        for place, start, size in places:
            position, bit = start + rng.randrange(size), rng.randrange(8)
            label = f"{path.name} bit {bit} of byte {position} ({place}) flipped"
            yield label, {path.name: flip(data, position, bit)}, path.name


# Of hundreds of cases every so many are tried by `make test`, and all of them by `make test-all`.
some_or_all = pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])


@some_or_all
def test_damaged_bytes(tmp_path, saved, every):
    """Files cut at any length and single flipped bits: refused by name, or without effect on any byte."""
    cases = itertools.islice(damaged_bytes(saved.early), 0, None, every)
    assert fuzz(tmp_path, saved, cases, lambda output: content(output) == saved.old) >= 300 // every


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


@stage1
def test_step_of_the_module(tmp_path, saved):
    """After a start with the weights alone the optimizer counts from 0: nothing but a warning tells it from a file of
    another step."""
    with pytest.warns(UserWarning, match=rf"{MODEL} is of step 4, the optimizer of step \[2.0\]"):
        convert(source_like(tmp_path / "s", saved.early, {MODEL: saved.late / MODEL}), tmp_path / "u")


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


@stage1
def test_step_count_is_checked(tmp_path, saved):
    """Not strict, and the same in every shard: only its checksum tells a wrong step count."""
    shards, two = {path.name: path.read_bytes() for path in saved.early.glob("*_optim_*")}, struct.pack("<f", 2.0)
    for name, data in shards.items():
        places = [start for _, _, start, size in records(saved.early / name)[0] if data[start : start + size] == two]
        assert len(places) == 2
        for place in places:
            data = flip(data, place + 3)
        shards[name] = data
    with pytest.raises(CheckpointError, match="_optim_states.pt is damaged"):
        convert(source_like(tmp_path / "s", saved.early, shards), tmp_path / "u", strict=False)


def test_buffers_that_overlap(tmp_path, monkeypatch, saved):
    """Views of one storage are no damage, whichever bytes they share; a bit read wrong for one of them is."""
    buffers, preadv, wrong = {"table": torch.arange(5000.0)}, os.preadv, []
    buffers |= {"middle": buffers["table"][900:2500], "end": buffers["table"][2400:]}

    def change(model):
        model["module"] |= buffers
        model["buffer_names"] += list(buffers)

    def read_wrong(descriptor, parts, position):
        size = preadv(descriptor, parts, position)
        if not wrong and bytes(parts[0]) == buffers["middle"].numpy().tobytes():
            parts[0][0] ^= 1
            wrong.append(position)
        return size

    source = edited(tmp_path / "s", saved.early, "*_model_*", change)
    convert(source, tmp_path / "u", check=True)
    module = load(tmp_path / "u" / MODEL)["module"]
    assert all(torch.equal(module[name], tensor) for name, tensor in buffers.items())
    monkeypatch.setattr(os, "preadv", read_wrong)
    with pytest.raises(CheckpointError, match=min(path.name for path in source.glob("*_model_*"))):
        convert(source, tmp_path / "u")
    assert wrong


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


@stage1
@pytest.mark.parametrize("place", ["shard", "optimizer state", "model states"])
def test_hostile_pickle(tmp_path, saved, place):
    """A planted call is taken over by its name, and is not made; who loads the result makes it."""
    marker, pattern = tmp_path / "marker", "*_model_*" if place == "model states" else "*_optim_*"
    for (path, plant), protocol in zip(HOSTILE.items(), (2, 2, 4, 2), strict=True):
        victim = tmp_path / min(saved.early.glob(pattern)).name
        whole = load(saved.early / victim.name)
        (whole["optimizer_state_dict"] if place == "optimizer state" else whole)["note"] = plant(marker)
        torch.save(whole, victim, pickle_protocol=protocol)
        source, output = source_like(tmp_path / "s", saved.early, {victim.name: victim}), tmp_path / "out" / "u"
        output.parent.mkdir()
        convert(source, output, check=True)
        assert not marker.exists()
        written = output / {"model states": MODEL, "optimizer state": "zero/optimizer_state.pt"}.get(place, MODEL)
        if place != "shard":  # of which only the optimizer's state goes on
            with zipfile.ZipFile(written) as archive:
                data = archive.read(f"{written.stem}/data.pkl")
            names = {" ".join(n.split(" ")) for op, n, _ in pickletools.genops(data) if op.name == "GLOBAL"}
            assert any(re.fullmatch(path, name.replace(" ", ".")) for name in names), names
            load(written)
            assert marker.exists()
            marker.unlink()
        for folder in (source, output.parent):
            shutil.rmtree(folder)


@stage1
def test_members_of_enums(tmp_path, saved):
    """Python 3.11.0 to 3.11.3 pickles them by getattr, the ZeroStageEnum of every checkpoint, too. It is not looked
    up, whatever it is of, and goes back as it came."""

    def planted(owner, name):
        return edited(tmp_path / name, saved.early, MODEL, lambda model: model.update(note=Call(getattr, owner, name)))

    convert(planted(ZeroStageEnum, "gradients"), tmp_path / "u")
    assert load(tmp_path / "u" / MODEL)["note"] is ZeroStageEnum.gradients
    convert(planted(Path, "home"), tmp_path / "v")
    assert load(tmp_path / "v" / MODEL)["note"] == Path.home

    def by_getattr(shard):
        shard["optimizer_state_dict"]["zero_stage"] = Call(getattr, ZeroStageEnum, "gradients")

    described = checkpoint.describe(edited(tmp_path / "w", saved.early, "*_optim_*", by_getattr))
    assert described.stage == 2 and checkpoint.describe(saved.early).stage == 1


@stage1
def test_trusted_tensors_are_checked(tmp_path, saved):
    """Also the bytes of a tensor inside an object that is taken over as it is must match their checksum."""
    planted = SimpleNamespace(tensor=torch.arange(1000, 1010))
    source = edited(tmp_path / "s", saved.early, MODEL, lambda model: model.update(note=planted))
    convert(source, tmp_path / "u")
    assert torch.equal(load(tmp_path / "u" / MODEL)["note"].tensor, planted.tensor)
    data = (source / MODEL).read_bytes()
    (source / MODEL).write_bytes(flip(data, data.index(struct.pack("<2q", 1000, 1001))))
    with pytest.raises(CheckpointError, match=MODEL):
        convert(source, tmp_path / "u")


@stage1
def test_names_of_files(tmp_path, saved):
    """A state of the optimizer whose name is a path to elsewhere, and two parameters of one folder, are refused."""

    def states(shard):
        for state in shard["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            state["../../../../escaped"] = state.pop("exp_avg")

    def parameters(whole):
        for names in whole.get("param_shapes") or whole["optimizer_state_dict"]["param_slice_mappings"]:
            for name in list(names):
                names[name.replace("ln_f.weight", "x/../ln_f.bias")] = names.pop(name)

    for pattern, change, told in (("*", parameters, "x/../ln_f.bias"), ("*_optim_*", states, "../escaped")):
        source = edited(tmp_path / change.__name__, saved.early, pattern, change)
        with pytest.raises(CheckpointError, match=re.escape(told)):
            convert(source, tmp_path / "a" / "b" / "u")
    assert not list(tmp_path.rglob("escaped.pt"))


@stage1
def test_odd_pickles(tmp_path, saved):
    """A class with a line break in its name is refused in one line, and so is a number of ranks that is a word; a list
    that holds itself is carried over as one."""
    source = source_like(tmp_path / "s", saved.early, {MODEL: None})
    with zipfile.ZipFile(source / MODEL, "w") as archive:
        archive.writestr(f"{Path(MODEL).stem}/data.pkl", b"\x80\x04\x8c\x03a\nb\x8c\x01c\x93.")
    with pytest.raises(CheckpointError) as error:
        convert(source, tmp_path / "u")
    assert MODEL in str(error.value) and "\n" not in str(error.value)
    words = edited(
        tmp_path / "w", saved.early, "*_optim_*", lambda s: s["optimizer_state_dict"].update(partition_count="x")
    )
    with pytest.raises(CheckpointError, match="_optim_states.pt"):
        convert(words, tmp_path / "u")
    convert(edited(tmp_path / "t", saved.early, MODEL, lambda model: model.update(note=endless())), tmp_path / "u")
    note = load(tmp_path / "u" / MODEL)["note"]
    assert note[0] is note
    pair = (endless(), [])
    pair[1].append(pair)
    convert(edited(tmp_path / "p", saved.early, MODEL, lambda model: model.update(note=pair)), tmp_path / "u")
    note = load(tmp_path / "u" / MODEL)["note"]
    assert type(note) is tuple and note[1][0] is note and note[0][0] is note[0]


def endless():
    """A list that holds itself."""
    value = []
    value.append(value)
    return value


# -----------------------------------------------------------------------------
# kill -9


def test_no_workers(tmp_path):
    for flag in ("--num_extract_workers", "--num_merge_workers"):
        done = subprocess.run(
            [*command(tmp_path, tmp_path / "u"), flag, "0"], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 2 and done.stderr.endswith("--num_merge_workers are at least 1\n")


def in_child(work):
    """Exit code of work() in a forked process; a negative one is the signal that killed it."""
    child = os.fork()
    if not child:
        code = 1
        with contextlib.suppress(BaseException):
            signal.alarm(60)
            code = work() or 0
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("kills", [12, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_at_any_moment(tmp_path, kills):
    """So many times kill -9, spread over the calls that a conversion makes, not over its time: an older result is
    untouched or replaced whole, and the next conversion is right and sweeps up."""
    sources, output, told = (tmp_path / "a", tmp_path / "b"), tmp_path / "o" / "u", tmp_path / "calls"
    rng, wanted, seen = random.Random(2), [], []
    for source in sources:
        lay_out(source, gpt_groups(50, 8, 2), 4, 1)
        convert(source, output)
        wanted.append(content(output))
    untouched = content(sources[1])

    def killed_after(calls):
        left = itertools.count(1)

        def count(frame, event, argument):
            if event in ("call", "c_call") and next(left) == calls:
                os.kill(os.getpid(), signal.SIGKILL)

        threading.setprofile(count)
        sys.setprofile(count)
        convert(sources[1], output)
        sys.setprofile(None)
        told.write_text(str(next(left)))

    assert in_child(lambda: killed_after(0)) == 0
    total = int(told.read_text())
    settled(output, wanted[1])
    for moment in range(kills):
        convert(sources[0], output)
        settled(output, wanted[0])
        code = in_child(lambda moment=moment: killed_after(int(total * (moment + rng.random()) / (kills - 1))))
        assert code == -signal.SIGKILL or moment >= kills - 2
        seen.append((any(output.parent.glob(".u.unfinished*")), wanted.index(content(output))))
        assert output.with_name("latest_universal").read_text() == "u"
        assert content(sources[1]) == untouched
    convert(sources[1], output)
    settled(output, wanted[1])
    assert sum(unfinished for unfinished, _ in seen) > kills // 10 and {new for _, new in seen} == {0, 1}


def killed_at(count, source, output):
    """Convert in a child that is killed before its count-th change of a folder. Returns whether it came so far."""
    left, changes = (
        itertools.count(1),
        {"os.link", "os.mkdir", "os.rename", "os.rmdir", "ctypes.dlsym", "shutil.rmtree"},
    )

    def hook(event, arguments):
        if (event in changes or event == "open" and arguments[1] == "w") and next(left) == count:
            os.kill(os.getpid(), signal.SIGKILL)

    def work():
        sys.addaudithook(hook)
        convert(source, output)

    code = in_child(work)
    assert code in (0, -signal.SIGKILL)
    return code != 0


def settled_but_for(output, wanted, other):
    assert content(output) == wanted
    assert sorted(os.listdir(output.parent)) == sorted([other.name, "latest_universal", output.name])


@stage1
def test_killed_at_every_step(tmp_path, saved):
    """Killed right before every rename, link and removal. The old result may for a moment only stand beside its place,
    whole; the next conversion brings it back."""
    output, moments, beside = tmp_path / "u", 0, 0
    convert(saved.early, output)
    while killed_at(moments + 1, saved.late, output):
        moments += 1
        if not output.exists():
            beside += 1
            (old,) = tmp_path.glob(".u.replaced.*")
            assert content(old) == saved.old
            damaged = min(saved.early.glob("*optim*"))
            start = max(start for name, _, start, size in records(damaged)[0] if size > 100)
            source = source_like(tmp_path / "s", saved.early, {damaged.name: flip(damaged.read_bytes(), start + 50)})
            with pytest.raises(CheckpointError, match="is damaged"):  # this one fails, and brings the old one back
                convert(source, output)
            settled_but_for(output, saved.old, source)
            shutil.rmtree(source)
        else:
            assert content(output) in (saved.old, saved.new)
        assert (tmp_path / "latest_universal").read_text() == "u"
        convert(saved.early, output)
        settled(output, saved.old)
    settled(output, saved.new)
    assert moments >= 20 and beside == 1


# -----------------------------------------------------------------------------
# disks


def fails(source, output, code, text, **options):
    """The command ends with this exit code and, after the progress bar, this error in one line."""
    result = subprocess.run(command(source, output), capture_output=True, text=True, timeout=60, **options)
    assert result.returncode == code
    assert result.stderr.count("ds_to_universal.py: error: ") == 1 and "Traceback" not in result.stderr
    assert text in result.stderr.splitlines()[-1]
    return result.stderr


@stage1
def test_full_disk(tmp_path, saved):
    """A file system that fills up at any file, also the last: one line, exit code 1, and the older result stays."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=9m", "tmpfs", disk]
    if os.geteuid() or subprocess.run(mount, timeout=9, capture_output=True).returncode:
        pytest.skip("file systems are root's to mount")
    try:
        convert(saved.early, disk / "u")
        used = shutil.disk_usage(disk).used
        for size in [*range(used, 2 * used - 8192, used // 9 // 4096 * 4096), 2 * used - 8192, used - 4096]:
            if size < used:
                shutil.rmtree(disk / "u")
                (disk / "latest_universal").unlink()
            subprocess.run(["mount", "-o", f"remount,size={size}", disk], timeout=9, check=True)
            fails(saved.late, disk / "u", 1, "No space left on device")
            settled(disk / "u", saved.old) if size >= used else None
        assert not any(disk.iterdir())
    finally:
        subprocess.run(["umount", disk], timeout=9, check=True)


@stage1
def test_disk_fails_late(tmp_path, saved, monkeypatch):
    """What the disk says only when everything has to be on it: the older result stays."""

    class Library:
        @staticmethod
        def syncfs(descriptor):
            ctypes.set_errno(errno.EIO)
            return -1

    convert(saved.early, tmp_path / "u")
    monkeypatch.setattr(ctypes, "CDLL", lambda *arguments, **options: Library)
    with pytest.raises(OSError, match=r"Input/output error: .*unfinished"):
        convert(saved.late, tmp_path / "u")
    settled(tmp_path / "u", saved.old)


@stage1
def test_limited_file_size(tmp_path, saved):
    """No file may grow beyond a limit, at whichever byte of the largest one it is met."""
    output, largest = tmp_path / "u", max(map(len, saved.new.values()))
    convert(saved.early, output)
    for limit in (0, 1, 5000, largest // 2, *range(largest - 700, largest, 99), largest - 1):
        limited = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))  # noqa: B023, E731
        fails(saved.late, output, 1, "File too large", preexec_fn=limited)
        settled(output, saved.old)


@stage1
def test_nothing_but_the_error(tmp_path, saved):
    """A file in the place of a folder, a file system without new folders. Where stderr is no terminal it holds one
    line, also when the conversion fails in mid-course."""
    (tmp_path / "file").touch()
    fails(saved.early, tmp_path / "file" / "u", 1, "Not a directory")
    fails(saved.early, "/proc/safety/u", 1, "No such file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    victim = max(saved.early.glob("*_optim_*"))
    start = next(start for _, _, start, size in records(victim)[0] if size > 5000)
    source = source_like(tmp_path / "s", saved.early, {victim.name: flip(victim.read_bytes(), start + 3000)})
    assert fails(source, tmp_path / "u", 2, f"{victim.name} is damaged").count("\n") == 1


def intercept(monkeypatch, number, action):
    """Call action(path) before the number-th file is opened to be written."""
    opened, original = itertools.count(1), open

    def spied(path, mode="r", *arguments, **options):
        if mode == "xb" and next(opened) == number:
            action(path)
        return original(path, mode, *arguments, **options)

    monkeypatch.setattr("builtins.open", spied)


@pytest.mark.parametrize("loss", ["cut", "emptied", "overwritten"])
def test_source_vanishes(tmp_path, monkeypatch, saved, loss):
    """Shards that shrink or change while they are read: one line with the name of one, and the older result stays."""
    shards = {path.name: path.read_bytes() for path in saved.late.glob("*_optim_*")}
    source, output = source_like(tmp_path / "s", saved.late, shards), tmp_path / "out" / "u"
    convert(saved.early, output)

    def lose(path):
        for name, data in shards.items():
            new = {"cut": data[: len(data) // 2], "emptied": b"", "overwritten": (saved.early / name).read_bytes()}
            (source / name).write_bytes(new[loss])

    intercept(monkeypatch, 5, lose)
    with pytest.raises(CheckpointError, match=r"_optim_states\.pt (became shorter|is damaged)"):
        convert(source, output)
    settled(output, saved.old)


@stage1
@pytest.mark.parametrize("kind", [None, "exp_avg.pt", "fp32.pt", "step.pt", "optimizer_state.pt", MODEL])
def test_verify(tmp_path, saved, kind):
    """check finds one wrong bit of any tensor in any kind of file that the disk did not keep as it was written."""
    output, told = tmp_path / "out" / "u", tmp_path / "told"

    def damage(event, arguments):
        if event == "open" and arguments[1] in ("r", "rb") and not told.exists():
            path = Path(str(arguments[0]))
            if path.name == kind and ".u.unfinished" in str(path):
                told.touch()
                size, start = max(
                    (size, start) for name, _, start, size in records(path)[0] if name.startswith("data/")
                )
                data = flip(path.read_bytes(), start + size // 2)
                path.write_bytes(data)

    def work():
        sys.addaudithook(damage)
        try:
            convert(saved.early, output, check=True)
        except CheckpointError as error:
            told.write_text(str(error))
            return 2

    if kind is None:
        assert in_child(work) == 0
        settled(output, saved.old)
        return
    assert in_child(work) == 2 and f"/{kind} " in told.read_text()
    assert not any(output.parent.iterdir())


# -----------------------------------------------------------------------------
# what else is in the folder


@stage1
def test_left_over_from_a_killed_run(tmp_path, saved):
    """Files of an unfinished conversion, right or wrong, have no part in the next; what they link to stays."""
    output, precious = tmp_path / "out" / "u", tmp_path / "precious" / "folder"
    stale = output.with_name(".u.unfinished")
    convert(saved.late, output)
    output.rename(stale)
    (stale / "zero" / "no.such.parameter").mkdir()
    (stale / "zero" / "no.such.parameter" / "fp32.pt").write_bytes(b"wrong")
    output.with_name("latest_universal").unlink()
    convert(saved.early, output)
    settled(output, saved.old)
    precious.mkdir(parents=True)
    stale.mkdir()
    (stale / "link").symlink_to(precious.parent)
    convert(saved.late, output)
    settled(output, saved.new)
    assert precious.is_dir()


@stage1
def test_two_at_once(tmp_path, saved):
    """The second conversion to one folder is refused while the first one runs, and leaves its files alone."""
    output, folder = tmp_path / "u", tmp_path / ".u.unfinished"
    folder.mkdir()
    (folder / "of the first").touch()
    lock = os.open(folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(CheckpointError, match=f"another conversion to the same folder is running: .*{folder}"):
        convert(saved.early, output)
    assert (folder / "of the first").exists() and not output.exists()
    os.close(lock)
    convert(saved.early, output)
    settled(output, saved.old)


@stage1
@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP])
def test_no_locks(tmp_path, monkeypatch, saved, number):
    """A file system without flock, as Lustre is by default: the folder itself keeps others out, and what a killed
    conversion has left is named with the command that removes it."""

    def fails(*arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", fails)
    convert(saved.late, tmp_path / "u")
    convert(saved.early, tmp_path / "u")
    settled(tmp_path / "u", saved.old)
    left = tmp_path / ".u.unfinished"
    left.mkdir()
    (left / "of the first").touch()
    with pytest.raises(CheckpointError, match=f"runs, or was killed; if so: rm -r '{left}'"):
        convert(saved.late, tmp_path / "u")
    assert (left / "of the first").exists() and content(tmp_path / "u") == saved.old
    shutil.rmtree(left)
    convert(saved.late, tmp_path / "u")
    settled(tmp_path / "u", saved.new)


@stage1
def test_process_of_another_user(tmp_path, monkeypatch, saved):
    """Nobody asks whether the process that left something behind still runs: on another user's that is an error."""

    def fails(*arguments):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    convert(saved.early, tmp_path / "u")
    for name in (f".u.unfinished.{os.uname().nodename}.1.0", ".u.unfinished"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(os, "kill", fails)
    convert(saved.late, tmp_path / "u")
    assert content(tmp_path / "u") == saved.new


@stage1
def test_a_library_leaves_the_process_alone(tmp_path, monkeypatch, saved):
    """Called inside a training, convert() changes nothing that belongs to the whole process."""
    seen, original = set(), open

    def state():
        return resource.getrlimit(resource.RLIMIT_NOFILE), gc.isenabled(), sys.getrecursionlimit()

    def spied(*arguments, **options):
        seen.add(state())
        return original(*arguments, **options)

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, limits[0]), limits[1]))
    try:
        before = state()
        monkeypatch.setattr("builtins.open", spied)
        convert(saved.early, tmp_path / "u")
        assert seen == {before} == {state()}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@stage1
def test_old_result_that_cannot_be_removed(tmp_path, saved):
    """Someone else's old result is replaced where the folder permits it; where it lies is said, and it stops nobody."""
    tmp_path.chmod(0o777)
    source, output = tmp_path / "s", tmp_path / "o" / "u"
    shutil.copytree(saved.late, source)
    convert(saved.early, output)
    output.parent.chmod(0o777)
    (output.parent / "latest_universal").chmod(0o666)
    for path in (output, *output.rglob("*")):
        path.chmod(0o555)

    def work():
        if not os.geteuid():
            os.setgid(65534)
            os.setuid(65534)
        for attempt in range(2):
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always", UserWarning)
                convert(source, output)
            remains = [path for path in output.parent.iterdir() if path.name[0] == "."]
            assert len(remains) == 1 and bool(told) == (attempt == 0)
            assert not told or str(remains[0]) in str(told[0].message)
        return 7

    try:
        assert in_child(work) == 7
        assert content(output) == saved.new
    finally:
        for path in tmp_path.rglob("*"):
            path.chmod(0o755)


@stage1
def test_what_must_not_be_replaced(tmp_path, saved):
    """A folder that holds the input, at any depth and by any path, or anything but a universal checkpoint."""
    run1, precious = tmp_path / "run1", tmp_path / "other"
    for output in (run1, precious):
        convert(saved.early, output)
    later = run1 / "later" / "global_step200"
    shutil.copytree(saved.late, later)
    (tmp_path / "link").symlink_to(run1)
    (precious / "notes.txt").write_text("mine")
    before = content(tmp_path)
    for source, output in ((later, run1), (later, tmp_path / "link"), (later, later.parent), (later, precious)):
        with pytest.raises(CheckpointError, match="is not a universal checkpoint"):
            convert(source, output)
    assert content(tmp_path) == before


@stage1
@pytest.mark.parametrize("older", [False, True], ids=["first result", "replaces a result"])
def test_second_starts_while_first_ends(tmp_path, saved, older):
    """Before each step that publishes, a second conversion to the same folder: it is kept out, or the result is one of
    the two, whole, and nothing is left."""
    output, steps = tmp_path / "u", {"os.rename", "shutil.rmtree"}
    for count in itertools.count(1):
        left, ended = itertools.count(1), tmp_path / "ended"
        shutil.rmtree(output, ignore_errors=True)
        if older:
            convert(saved.late, output)

        def second_starts(event, arguments, left=left, ended=ended, count=count):
            if event in steps and next(left) == count:
                try:
                    convert(saved.late, output)
                except CheckpointError as error:
                    assert "another conversion" in str(error)
                ended.touch()

        def work(hook=second_starts):
            sys.addaudithook(hook)
            convert(saved.early, output)

        assert in_child(work) == 0
        if not ended.exists():
            break
        ended.unlink()
        settled(output, saved.old if content(output) == saved.old else saved.new)
    assert count > 2 + older


@stage1
def test_output_behind_a_link(tmp_path, saved):
    """An output that is a link to a folder elsewhere: that folder is replaced, the link stays, and nothing is left
    beside either."""
    elsewhere, output = tmp_path / "disk" / "u", tmp_path / "out" / "u"
    convert(saved.early, elsewhere)
    output.parent.mkdir()
    output.symlink_to(elsewhere)
    for source, wanted in ((saved.late, saved.new), (saved.early, saved.old)):
        convert(source, output)
        settled(elsewhere, wanted)
        assert output.is_symlink() and os.listdir(output.parent) == ["u"]
