"""ds_to_universal.py on what real programs write and what damage leaves, in checkpoints of a few hundred numbers that
are laid out by hand: carried over right, or refused in one line that names what is wrong."""

import argparse
import collections
import contextlib
import datetime
import enum
import errno
import io
import itertools
import math
import os
import pathlib
import random
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
import types
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy
import pytest
import torch
from helpers import ROOT, command, convert_with_deepspeed, edit, load, states

import ds_to_universal
from universal import CheckpointError, convert, torch_file
from universal.checkpoint import describe

MODEL = "mp_rank_00_model_states.pt"


def refused(source, *words, **options):
    """The conversion ends in one line with these words, and nothing appears."""
    with pytest.raises(CheckpointError) as error:
        convert(source, source.parent / "u", **options)
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words), error.value
    assert not [path for path in source.parent.iterdir() if path not in (source, source.parent / "expected")]
    return str(error.value)


def converted(source, **options):
    """What the model states hold after the conversion."""
    convert(source, source.parent / "u", check=True, **options)
    return load(source.parent / "u" / MODEL)


@pytest.fixture
def tmp_path(in_memory):
    return in_memory


# -----------------------------------------------------------------------------
# which folder


def test_folder_above(checkpoint, monkeypatch):
    """What Trainer, Lightning and accelerate write: `latest`, or the only tag in a folder, says what is meant. The
    output stands beside it, also where the input is the folder that one is in."""
    source = checkpoint(1)
    above = source.parent / "checkpoint-500"
    tag, universal = above / "global_step500", above / "global_step500_universal"
    above.mkdir()
    source.rename(tag)

    def converts(*arguments):
        convert(*arguments)
        assert (universal / "zero" / "a" / "fp32.pt").is_file()
        assert (above / "latest_universal").read_text() == universal.name
        shutil.rmtree(universal)
        (above / "latest_universal").unlink()

    for folder in (above, f"{above}/", tag, f"{tag}/"):
        converts(folder)
    (tag / "latest").write_text("another")  # it is the checkpoint itself
    converts(tag)
    monkeypatch.chdir(tag)
    for folder in (".", ".."):
        converts(folder)
    shutil.copytree(tag, above / "a later one")
    with pytest.raises(CheckpointError) as error:
        convert(above)
    assert "several" in str(error.value) and "a later one, global_step500" in str(error.value)
    (above / "latest").write_text("global_step500\n")
    converts(above)
    (above / "latest").write_text("gone")
    with pytest.raises(CheckpointError, match="checkpoint-500/gone does not exist"):
        convert(above)
    with pytest.raises(CheckpointError, match="holds no .*: it is no ZeRO checkpoint, nor a folder above"):
        convert(above.parent)
    assert sorted(os.listdir(above)) == ["a later one", "global_step500", "latest"]


def test_folder_above_at_the_command_line(checkpoint):
    """One flag is enough; several tags are one line and exit code 2."""
    source = checkpoint(1)
    done = subprocess.run(command(source.parent), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith(f"{source} -> {source}_universal: 3 parameters")
    shutil.copytree(source, source.with_name("d"))
    done = subprocess.run(command(source.parent), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and done.stderr.endswith(": c, d\n")


# -----------------------------------------------------------------------------
# no silent loss


@pytest.mark.parametrize("stage", [1, 2])
def test_frozen_parameter_that_is_a_view(checkpoint, stage):
    """A frozen parameter whose elements do not follow each other keeps its numbers, and its table stays behind."""
    table = torch.arange(40.0).view(5, 8)
    frozen = {"columns": table[:, :4], "transposed": table.t(), "rows": table[1:3], "last": table[:, 7]}

    def add(model):
        model["module"] |= frozen
        model["frozen_param_shapes"] = OrderedDict((name, tensor.shape) for name, tensor in frozen.items())
        model["frozen_param_fragments"] = dict(frozen)

    module = converted(checkpoint(stage, model=add))["module"]
    assert module.keys() == frozen.keys()
    assert all(torch.equal(module[name], tensor) for name, tensor in frozen.items())
    assert module["rows"].untyped_storage().nbytes() == 16 * 4


def rewritten(path, change):
    """The file with change(content) made, where torch.save could not write the result."""
    content, _ = torch_file.load(path)
    change(content)
    with tempfile.TemporaryDirectory() as folder:
        torch_file.write_pt(Path(folder, path.name), *torch_file.pickled(content), torch_file.Reader())
        shutil.move(Path(folder, path.name), path)


@pytest.mark.parametrize("place", ["fp32", "exp_avg"])
@pytest.mark.parametrize(
    "changes",
    [{"offset": -1}, {"offset": 1}, {"size": (13,)}, {"size": (-12,)}, {"size": (6, 2), "stride": (4, 1)},
     {"stride": (2,)}, {"stride": (-1,)}, {"offset": -1, "size": (-12,)}],
    ids=str,
)  # fmt: skip
def test_elements_that_do_not_exist(checkpoint, place, changes):
    """A slice of a rank is contiguous, and its archive holds every element of it."""

    def change(shard):
        optimizer = shard["optimizer_state_dict"]
        flat = {
            "fp32": optimizer["single_partition_of_fp32_groups"],
            "exp_avg": optimizer["base_optimizer_state"]["state"][0],
        }
        key = 0 if place == "fp32" else place
        flat[place][key] = flat[place][key]._replace(**changes)

    source = checkpoint(1)
    path = min(source.glob("*_optim_*"))
    rewritten(path, lambda shard: None)
    converted(source)
    shutil.rmtree(source.parent / "u")
    (source.parent / "latest_universal").unlink()
    rewritten(path, change)
    refused(source, path.name)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    "name, value",
    [
        ("momentum_scale", 0.5),
        ("kind", "adaptive"),
        ("fp32", torch.zeros(13)),
        ("step", torch.zeros(13)),
        ("exp_avg_sq", torch.zeros(26)),
        ("exp_avg_sq", torch.zeros(13, 2)),
        ("mu_product", torch.zeros(())),
    ],
)
def test_states_without_a_place(checkpoint, stage, name, value):
    """What a universal checkpoint cannot hold is refused by its name, or left out by its name."""

    def add(shard):
        for state in states(shard):
            state[name] = value

    source = checkpoint(stage, shard=add)
    refused(source, name, "--no_strict")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        convert(source, source.parent / "u", check=True, strict=False)
    assert [warning for warning in told if name in str(warning.message)]
    kept = {"exp_avg", "exp_avg_sq", "fp32", "step"} - ({name} if name != "fp32" else set())
    assert {path.stem for path in (source.parent / "u" / "zero" / "a").iterdir()} == kept


def test_momentum_that_ranks_hold_whole(checkpoint):
    """Muon's before ZeRO-3: of every matrix of which a rank has a part. Of another length, it is refused."""
    source, wanted = checkpoint(1), {}
    shapes = {name: shape for group in load(source / MODEL)["param_shapes"] for name, shape in group.items()}

    def add(shard, missing=0):
        mappings = shard["optimizer_state_dict"]["param_slice_mappings"]
        for state, held in zip(states(shard), mappings, strict=True):
            for name in held:
                wanted.setdefault(name, torch.rand(shapes[name]))
            whole = [torch.empty(0), *(wanted[name].flatten() for name in held)]
            state["momentum_buffer"] = torch.cat(whole)[missing:].clone()

    convert(checkpoint(1, shard=add), source.parent / "u", check=True)
    assert wanted.keys() == shapes.keys()
    for name, tensor in wanted.items():
        assert torch.equal(load(source.parent / "u" / "zero" / name / "momentum_buffer.pt")["param"], tensor)
    shutil.rmtree(source.parent / "u")
    (source.parent / "latest_universal").unlink()
    refused(checkpoint(1, shard=lambda shard: add(shard, missing=1)), "momentum_buffer")


def test_trainable_parameter_that_no_group_holds(checkpoint):
    """At ZeRO-3 DeepSpeed does not save it at all: only its name is left."""
    source = checkpoint(3, model=lambda model: model["module"].update(forgotten=torch.empty(0)))
    refused(source, "forgotten", "--no_strict")
    with pytest.warns(UserWarning, match="forgotten"):
        converted(source, strict=False)


def test_what_would_be_lost(checkpoint):
    """States and patterns without a place are refused by name; --no_strict names them and goes on. That the module is
    of another step, after a start with the weights alone, is only said."""
    more = {"universal_checkpoint_info": {"tp_replicated_parameter_patterns": ["no such"]}}
    wrong = {
        "of step 99": (lambda model: model.update(global_steps=99), None),
        "extra of the optimizer": (None, lambda shard: [state.update(extra=1.5) for state in states(shard)]),
        "patterns that match no parameter: no such": (lambda model: model.update(more), None),
    }
    for words, (model, shard) in wrong.items():
        source = checkpoint(1, model, shard)
        if "patterns" in words:  # they count where there is something to put together
            double(source)
        if "step" not in words:
            refused(source, words, "--no_strict")
        with pytest.warns(UserWarning, match=words):
            convert(source, source.parent / "u", strict="step" in words)
        shutil.rmtree(source.parent / "u")
        (source.parent / "latest_universal").unlink()


@pytest.mark.parametrize("flags", [["--no_strict"], ["--drop_states", "--any_step", "--unused_patterns", "--trust"]])
def test_flags_that_permit_it(checkpoint, flags):
    """The new one, and those of before."""
    source = checkpoint(1, shard=lambda shard: [state.update(extra=1.5) for state in states(shard)])
    done = subprocess.run(command(source, source.parent / "u", *flags), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "warning: " in done.stderr and "extra" in done.stderr


def test_another_layout(checkpoint):
    """The shards say where they hold what. If that is not where it should be, and nothing explains it, nobody knows."""

    def move(shard):
        mapping = shard["optimizer_state_dict"]["param_slice_mappings"][0]
        for name in list(mapping)[:1]:
            mapping[name].start += 1

    refused(checkpoint(1, shard=move), "is not where param_slice_mappings says")
    round_robin = {"ds_config": {"zero_optimization": {"round_robin_gradients": True}}}  # then DeepSpeed writes others
    converted(checkpoint(1, lambda model: model.update(round_robin), move))


@pytest.mark.parametrize("stage", [1, 3])
def test_scalars_that_differ_by_rank(checkpoint, stage):
    """A norm of the slice, as LAMB keeps it, is named while the checkpoint is described; the step must not differ."""

    def add(shard):
        for state in states(shard):
            state |= {"scale": torch.rand(()), "same": torch.ones(()), "best": random.random()}
            state |= {"date": datetime.date(2026, 1, 2), "seconds": datetime.timedelta(random.random())}

    source = checkpoint(stage, shard=add)
    uneven = describe(source).uneven
    assert uneven.keys() == {(group, key) for group in (0, 1) for key in ("scale", "best", "seconds")}
    assert set(uneven.values()) == {"differs between ranks 0 and 1"}
    refused(source, "best, date, same, scale, seconds", "--no_strict")
    last = max(source.glob("*_optim_*"))
    edit(source, last.name, lambda shard: [state["step"].add_(1) for state in states(shard)])
    refused(source, last.name, "is at optimizer step", strict=False)


def double(source):
    """Two tensor-parallel ranks that hold the same."""
    edit(source, "*_model_*", lambda model: model["checkpoint_parallel_dimensions"].update(tp_degree=2))
    for path in list(source.iterdir()):
        shutil.copyfile(path, path.with_name(path.name.replace("mp_rank_00", "mp_rank_01")))
    for path in source.glob("*mp_rank_01*"):
        torch.save(load(path), path)


# -----------------------------------------------------------------------------
# no code


def pickle_file(path, data, records=()):
    """A .pt file around this pickle."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{path.stem}/data.pkl", data)
        archive.writestr(f"{path.stem}/byteorder", b"little")
        for key, content in records:
            archive.writestr(f"{path.stem}/data/{key}", content)


@pytest.mark.parametrize(
    "name", ["torch Size", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter", "torch.nn Linear",
             "collections OrderedDict", "__builtin__ getattr"]
)  # fmt: skip
@pytest.mark.parametrize("state", [b"}%ss\x86", b"N}%ss\x86", b"}%ss"])
def test_no_file_reaches_another(checkpoint, monkeypatch, name, state):
    """A pickle's BUILD gives an object attributes. Given to a class, they are refused, or gone with the file; nor is a
    module imported."""
    source = checkpoint(3)
    wanted = converted(source)
    (source.parent / "planted.py").write_text(f"open({str(source.parent / 'ran')!r}, 'w')")
    monkeypatch.syspath_prepend(source.parent)
    path, attribute = source.parent / "x.pt", b"X\x0a\0\0\0__module__X\x07\0\0\0planted"
    pickle_file(path, b"\x80\x02c" + name.replace(" ", "\n").encode() + b"\n" + state % attribute + b"b.")
    with contextlib.suppress(CheckpointError):
        torch_file.pickled(torch_file.load(path)[0])
    assert "planted" not in sys.modules and not (source.parent / "ran").exists()
    assert repr(converted(source)) == repr(wanted)


def test_only_names_are_written():
    """What is neither a name nor a plain value is not looked up: it is refused."""
    for thing in (os.system, math.floor, Path, torch_file.load):
        with pytest.raises(CheckpointError):
            torch_file.pickled({"x": thing})


# -----------------------------------------------------------------------------
# what real programs write


class Colour(enum.Enum):
    RED = 1


class Outer:
    class Inner:
        def __init__(self):
            self.x = 5


def client_state():
    generator, seeded = numpy.random.default_rng(3), numpy.random.RandomState(4)
    return {
        "numpy": [numpy.float64(0.5), numpy.arange(6).reshape(2, 3), numpy.random.get_state(), seeded, generator],
        "arguments": argparse.Namespace(lr=1e-3, path=pathlib.PosixPath("/x")),
        "containers": [{1, 2}, frozenset({3}), b"\xff\0", bytearray(b"x"), range(3), 1j],
        "more": [collections.defaultdict(list, a=[1]), collections.Counter("aab"), collections.deque([1, 2], 5)],
        "types": [collections.defaultdict(int, a=1), collections.OrderedDict(b=2), Outer.Inner, int, len],
        "times": [datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC), datetime.timedelta(3), datetime.date.max],
        "space": types.SimpleNamespace(a=1),
        "dtypes": [torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.strided, torch.device("cpu")],
        "random": torch.get_rng_state(),
    }  # fmt: skip


def equal(a, b):
    if isinstance(a, numpy.ndarray):
        return a.dtype == b.dtype and a.tolist() == b.tolist()
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, numpy.random.RandomState):
        return equal(a.get_state(), b.get_state())
    if isinstance(a, numpy.random.Generator):
        return a.bit_generator.state == b.bit_generator.state
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("older", [False, True], ids=["numpy 2", "numpy 1"])
def test_ordinary_client_states(checkpoint, older):
    """They load equal, and but for the class of this test nothing is said."""
    wanted = client_state()
    source = checkpoint(1, model=lambda model: model.update(mine=wanted))
    if older:
        with zipfile.ZipFile(source / MODEL) as archive:
            kept = [(n.split("data/", 1)[1], archive.read(n)) for n in archive.namelist() if "/data/" in n]
            data = archive.read(f"{Path(MODEL).stem}/data.pkl").replace(b"numpy._core", b"numpy.core")
        pickle_file(source / MODEL, data, kept)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with pytest.warns(
            UserWarning, match=r"it names test_converter_input\.Outer(, test_converter_input\.Outer\.Inner)?, "
        ):
            got = converted(source)["mine"]
    assert got.keys() == wanted.keys()
    for key in wanted:
        assert all(map(equal, got[key], wanted[key])) if isinstance(got[key], list) else equal(got[key], wanted[key])


def test_unknown_classes_are_all_named(checkpoint):
    """In one warning, of whichever file; they go on as they came, and are not run."""
    things = [Colour.RED, Outer(), Outer.Inner(), os.getcwd]
    source = checkpoint(1, lambda model: model.update(mine=things), lambda shard: shard.update(mine=things))
    with pytest.warns(UserWarning) as told:
        got = converted(source)["mine"]
    (text,) = {str(w.message) for w in told if w.category is UserWarning}
    assert f"{__name__}.Colour, {__name__}.Outer" in text and "posix" not in text and "not run" in text
    assert got[0] is Colour.RED and type(got[1]) is Outer and got[3] is os.getcwd
    assert got[2].x == 5 and type(got[2]) is Outer.Inner


@pytest.mark.parametrize("stage", [1, 3])
def test_unusual_entries_of_module(checkpoint, stage):
    """Complex, float8, uint16 and sparse buffers, and what get_extra_state() returned, are carried as they are."""
    wanted = {
        "complex": torch.tensor([1 + 2j, 3j]),
        "float8": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
        "uint16": torch.tensor([1, 65535], dtype=torch.uint16),
        "sparse": torch.eye(3).to_sparse(),
        "x._extra_state": {"scale": [1, 2.5], "history": torch.arange(3)},
    }

    def add(model):
        model["module"] |= wanted
        model["buffer_names"] += [name for name in wanted if "extra" not in name]

    got = converted(checkpoint(stage, model=add))["module"]
    assert got.keys() == wanted.keys()
    for name in ("complex", "float8", "uint16"):
        assert got[name].dtype == wanted[name].dtype
        assert torch.equal(got[name].view(torch.uint8), wanted[name].view(torch.uint8))
    assert torch.equal(got["sparse"].to_dense(), torch.eye(3))
    assert got["x._extra_state"]["scale"] == [1, 2.5] and got["x._extra_state"]["history"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", ["megatron-tp2-pp2-dp2", "megatron-tp2-dp2-no-pipeline"])
def test_megatron(tmp_path, monkeypatch, name):
    """Checkpoints that Megatron-DeepSpeed wrote, without --trust, against DeepSpeed's converter. That needs a stub of
    Megatron, and fails itself where `module` is nested: after the states are written, before the rest."""
    with tarfile.open(ROOT / "tests" / "data" / f"{name}.tar.xz") as archive:
        archive.extractall(tmp_path)  # of this repository
    (source,) = (path for path in tmp_path.rglob("global_step2") if path.is_dir())
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    convert(source, ours, check=True)
    enums = types.ModuleType("megatron.core.enums")
    enums.ModelType = enum.Enum("ModelType", {"encoder_or_decoder": 1, "encoder_and_decoder": 2})
    for module in (types.ModuleType("megatron"), types.ModuleType("megatron.core"), enums):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(AttributeError) if "no-pipeline" in name else contextlib.nullcontext():
        convert_with_deepspeed(source, theirs)
    compared = 0
    for path in (theirs / "zero").glob("*/*.pt"):
        wanted, got = load(path), load(ours / path.relative_to(theirs))
        if path.stem == "step":
            assert wanted == got
            continue
        assert torch.equal(wanted["param"], got["param"])
        assert {k: v for k, v in wanted.items() if k != "param"} == {k: v for k, v in got.items() if k != "param"}
        compared += 1
    assert compared == 3 * len(list((ours / "zero").glob("*/fp32.pt"))) >= 84
    for path in source.glob("mp_rank_*_model_states.pt"):
        wanted, got = load(path), load(ours / path.name)
        assert wanted.keys() == got.keys() and wanted["args"].lr == got["args"].lr and repr(wanted) == repr(got)


def test_no_row_parallel_pattern(checkpoint):
    """At TP 1 nothing tells which weights are to be cut by rows later: resumed at TP 2 they would be cut wrong."""
    info = {"tp_replicated_parameter_patterns": ["b"], "universal_checkpoint_version": 0.2}
    source = checkpoint(1, model=lambda model: model.update(universal_checkpoint_info=dict(info)))
    with pytest.warns(UserWarning, match="row-parallel"):
        converted(source)
    info["parameter_with_row_parallelism_patterns"] = ["a"]
    source = checkpoint(1, model=lambda model: model.update(universal_checkpoint_info=dict(info)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        converted(source)


@pytest.mark.parametrize("stage", [1, 3])
def test_version_of_deepspeed(checkpoint, stage):
    """The result says which version wrote the checkpoint, as the checkpoint does."""

    def older(content):
        content["ds_version"] = "0.18.4"
        if "loss_scaler" in content.get("optimizer_state_dict", {}) and stage == 1:
            content["optimizer_state_dict"]["ds_version"] = "0.18.4"

    source = checkpoint(stage, older, older)
    assert converted(source)["ds_version"] == "0.18.4"
    assert load(source.parent / "u" / "zero" / "optimizer_state.pt")["ds_version"] == "0.18.4"


# -----------------------------------------------------------------------------
# one line, always


def with_info(**info):
    return lambda model: model.update(universal_checkpoint_info=info)


SUB = {"patterns": ["a"], "shape": (0, -1), "partition_dim": 0}


@pytest.mark.parametrize(
    "change, word",
    [
        (with_info(tp_replicated_parameter_patterns=["("]), "error"),
        (with_info(parameter_with_sub_params=[SUB]), "ZeroDivisionError"),
        (with_info(parameter_to_average_patterns=5), "TypeError"),
        (lambda model: model.update(param_shapes=[list(group) for group in model["param_shapes"]]), "items"),
        (lambda model: model.update(universal_checkpoint_info=["x"]), "list"),
        (lambda model: model.update(module=["x"]), "module"),
        (lambda model: model.update(checkpoint_parallel_dimensions=["x"]), "list"),
        (lambda model: model.update(shared_params=5, module={"extra": torch.ones(1)}), "int"),
        (lambda model: model.update(skipped_steps="x"), "TypeError"),
    ],
)
def test_wrong_kind_of_value(checkpoint, change, word):
    refused(checkpoint(1, model=change), word)


def rename_parameter(new):
    def change(content):
        for names in content.get("param_shapes") or content["optimizer_state_dict"]["param_slice_mappings"]:
            for name in list(names):
                names[new if name == "b" else name] = names.pop(name)

    return change


def test_names_that_no_file_can_have(checkpoint):
    for name in ("b\0", "\udc80", ".."):
        refused(
            checkpoint(1, model=rename_parameter(name), shard=rename_parameter(name)), "b" if name[0] == "b" else ""
        )


def test_average_takes_no_torch(checkpoint):
    """Averaged as DeepSpeed does it, in float32, by Python alone."""
    source = checkpoint(1, model=with_info(parameter_to_average_patterns=[".*"], universal_checkpoint_version=0.2))
    double(source)
    second = lambda shard: [state["exp_avg"].mul_(3.7) for state in states(shard)]  # noqa: E731
    edit(source, "*_mp_rank_01_optim*", second)
    convert_with_deepspeed(source, source.parent / "expected")
    (source.parent / "latest_universal").unlink(missing_ok=True)
    blocked = "import sys; sys.modules['torch'] = None; import runpy; sys.argv = sys.argv[1:]; " \
        "runpy.run_path(sys.argv[0], run_name='__main__')"  # fmt: skip
    words = command(source, source.parent / "u")
    subprocess.run([words[0], "-c", blocked, *words[1:]], check=True, timeout=60)
    for name in "abc":
        for state in ("fp32", "exp_avg", "exp_avg_sq"):
            wanted, got = (load(source.parent / u / "zero" / name / f"{state}.pt") for u in ("expected", "u"))
            assert torch.equal(wanted["param"].flatten(), got["param"].flatten()), (name, state)


def test_deeply_nested(checkpoint):
    """As deep as torch.save can go, and deeper."""

    def depth(value):
        for levels in itertools.count():
            if not value:
                return levels
            (value,) = value

    for levels in (400, 20_000):
        value = []
        for _ in range(levels):
            value = [value]
        limit, source = sys.getrecursionlimit(), checkpoint(1)
        try:
            sys.setrecursionlimit(max(limit, 3 * levels))
            edit(source, MODEL, lambda model: model.update(mine=value))  # noqa: B023
        finally:
            sys.setrecursionlimit(limit)
        assert depth(converted(source)["mine"]) == levels


def test_ascii_locale_and_odd_paths(checkpoint):
    """Names beyond ASCII and a path that is no UTF-8, under a locale that knows neither."""
    source = checkpoint(1, model=rename_parameter("ünï"), shard=rename_parameter("ünï"))
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    output = os.path.join(os.fsencode(source.parent), b"u\xff")
    done = subprocess.run(
        [*map(os.fsencode, command(source, "")[:-1]), output], capture_output=True, env=environment, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert os.path.isfile(os.path.join(output, "zero/ünï/fp32.pt".encode()))
    assert (source.parent / "latest_universal").read_bytes() == b"u\xff"


@pytest.mark.parametrize("error", [OSError(errno.EIO, "EIO"), PermissionError(errno.EACCES, "EACCES"), MemoryError()])
@pytest.mark.parametrize("call", ["pread", "preadv"])
def test_errors_of_the_system_are_not_damage(checkpoint, monkeypatch, capsys, error, call):
    """Whoever is told that a checkpoint is damaged deletes it."""
    source = checkpoint(1)

    def fails(*arguments, **options):
        raise error

    monkeypatch.setattr("sys.argv", command(source, source.parent / "u")[1:])
    monkeypatch.setattr(os, call, fails)
    with pytest.raises(SystemExit) as stop:
        ds_to_universal.main()
    told = capsys.readouterr().err
    assert stop.value.code == 1 and told.count("\n") == 1 and "damaged" not in told
    assert "memory" in told if isinstance(error, MemoryError) else "_states.pt" in told and error.strerror in told


def test_relative_path(checkpoint, monkeypatch):
    """Also a path without a folder is named."""
    source = checkpoint(1)
    monkeypatch.chdir(source)
    Path(MODEL).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=f"^{MODEL} is damaged"):
        torch_file.load(MODEL)
    os.rename(min(source.glob("*_optim_*")), "other.pt")
    with pytest.raises(CheckpointError, match=r"^other\.pt: it was written as bf16_.*, and renamed"):
        torch_file.load("other.pt")


def test_what_is_no_file(checkpoint):
    """A FIFO in the place of a shard does not hang, a folder is no shard."""
    source = checkpoint(1)
    (shard, _) = sorted(source.glob("*_optim_*"))
    for make in (os.mkfifo, os.mkdir):
        shard.unlink()
        make(shard)
        done = subprocess.run(command(source, source.parent / "u"), capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and f"{shard} is not a file" in done.stderr
        shutil.rmtree(shard) if make is os.mkdir else None


def test_small_pickle_small_memory(checkpoint):
    """300 bytes that ask for a memo of a hundred million entries."""
    source = checkpoint(1)
    pickle_file(source / MODEL, b"\x80\x02}r" + struct.pack("<I", 100_000_000) + b"." + bytes(280))
    limited = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_AS, (1 << 30,) * 2); " \
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"  # fmt: skip
    words = command(source, source.parent / "u")
    done = subprocess.run([words[0], "-c", limited, *words[1:]], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and f"{MODEL} is damaged" in done.stderr and done.stderr.count("\n") == 1


def values(content, path=()):
    """The path of everything in nested dicts, lists and tuples."""
    if isinstance(content, (dict, list)):
        for key, inner in content.items() if isinstance(content, dict) else enumerate(content):
            yield (*path, key)
            yield from values(inner, (*path, key))


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", [1, 3])
def test_any_value_of_any_kind(checkpoint, tmp_path, stage, every):
    """Every entry of every file, at any depth, replaced by something else: converted or refused in one line. `make
    test` takes one of so many."""
    info = {"tp_replicated_parameter_patterns": ["b"], "parameter_with_row_parallelism_patterns": ["a"]}
    info |= {"parameter_with_sub_params": [{"patterns": ["c"], "shape": (2, -1), "partition_dim": 0}]}
    base = checkpoint(
        stage,
        lambda model: model.update(
            universal_checkpoint_info=info,
            mine={"x": [1, {"y": 2}]},
            ds_config={"zero_optimization": {"stage": stage, "round_robin_gradients": False}},
            buffer_names=["buffer"],
            module=model["module"] | {"buffer": torch.ones(3)},
        ),
    )
    rng, tried, converted_ones = random.Random(5), 0, 0
    odd = [None, -1, 10**30, 2.5, "x", b"x", [], ["x"], {}, {"x": 1}, (), torch.zeros(2, 2), torch.Size((3,)), True]
    for path in sorted(base.iterdir()):
        kept = path.read_bytes()
        for taken in list(values(load(path)))[::every]:
            whole = value = load(io.BytesIO(kept))
            for key in taken[:-1]:
                value = value[key]
            value[taken[-1]] = rng.choice(odd)
            torch.save(whole, path)
            tried += 1
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    convert(base, tmp_path / "u")
                converted_ones += 1
            except CheckpointError as error:
                assert "\n" not in str(error)
            except Exception as error:
                raise AssertionError(f"{path.name} {taken} = {value[taken[-1]]!r}: {error!r}") from error
        path.write_bytes(kept)
    assert tried > 140 // every and converted_ones > 10 // every


def test_interrupted(checkpoint):
    """Ctrl-C while it writes: exit code 130, nothing left, no word."""
    source = checkpoint(1)
    script = f"""import os, signal, sys; sys.path.insert(0, {str(ROOT)!r}); import ds_to_universal as d; told = []
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
def hook(event, arguments):
    if event == "open" and ".u.unfinished/zero" in str(arguments[0]) and not told:
        told.append(os.kill(os.getpid(), signal.SIGINT))
sys.addaudithook(hook)
d.main()"""
    words = command(source, source.parent / "u")
    done = subprocess.run([words[0], "-c", script, *words[2:]], capture_output=True, text=True, timeout=60)
    assert done.returncode == 130 and "Traceback" not in done.stderr and done.stderr.count("\n") <= 1
    assert os.listdir(source.parent) == ["c"]


def test_output_called_latest_universal(checkpoint):
    source = checkpoint(1)
    with pytest.raises(CheckpointError, match="latest_universal"):
        convert(source, source.parent / "latest_universal")
    assert os.listdir(source.parent) == ["c"]


# -----------------------------------------------------------------------------
# the container


@pytest.mark.parametrize("stage", [1, 3])
def test_files_are_what_torch_writes(checkpoint, stage):
    """Sizes and positions stand in 64 bits: torch reads the files in each of its ways, and zipfile, and they are
    aligned for mapping."""
    source = checkpoint(stage, model=lambda model: model.update(mine=torch.arange(5000.0)))
    wanted = converted(source)
    assert torch.equal(wanted["mine"], torch.arange(5000.0))
    for path in (source.parent / "u").rglob("*.pt"):
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
            assert {info.compress_type for info in archive.infolist()} == {zipfile.ZIP_STORED}
            assert all(info.extract_version == 45 and not info.flag_bits & 8 for info in archive.infolist())
        if path.name.startswith("zero_pp"):  # a second name of one that is looked at
            continue
        assert all(record.offset % 64 == 0 for record in torch_file.PtFile(path).records.values())
        if path.parent.parent.name == "zero":
            plain = load(path)
            for options in ({"weights_only": True}, {"weights_only": True, "mmap": True}):
                assert repr(torch.load(path, **options)) == repr(plain)


def test_beyond_4_gigabytes(tmp_path):
    """Positions and sizes that 32 bits cannot hold, in what torch has written and in what the converter writes. The
    files are sparse, or hardly any of them is on the disk."""
    path, size = tmp_path / "big.pt", (1 << 32) + 4096
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("big/data.pkl", b"N.")
        with archive.open("big/data/0", "w", force_zip64=True) as file:
            for _ in range(size >> 24):
                file.write(bytes(1 << 24))
            file.write(bytes(size & 0xFFFFFF))
        archive.writestr("big/data/1", b"behind")
    try:
        records = torch_file.PtFile(path).records
        assert records["data/0"].nbytes == size and records["data/1"].offset > size
        assert torch_file.Reader().read(records["data/1"], 0, 6) == b"behind"
    finally:
        path.unlink()


def test_a_folder_that_took_the_place_of_a_converted_one(tmp_path):
    """mv keeps the times of the files."""
    for tag in ("t", "other"):
        (tmp_path / tag).mkdir()
        (tmp_path / tag / "x.pt").touch()
    made = tmp_path / "t_universal" / "zero" / "optimizer_state.pt"
    made.parent.mkdir(parents=True)
    time.sleep(0.05)
    made.touch()
    assert checkpoint.is_newer(tmp_path / "t_universal", tmp_path / "t")
    time.sleep(0.05)
    (tmp_path / "t").rename(tmp_path / "gone")
    (tmp_path / "other").rename(tmp_path / "t")
    assert not checkpoint.is_newer(tmp_path / "t_universal", tmp_path / "t")
