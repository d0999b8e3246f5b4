"""What real programs write goes through the converter as it is, in checkpoints of a few numbers, laid out by hand."""

import argparse
import collections
import datetime
import enum
import itertools
import os
import pathlib
import resource
import subprocess
import sys
import types
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy
import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum
from helpers import (
    ROOT,
    SHAPES,
    content,
    convert_with_deepspeed,
    converter,
    double,
    edit,
    load,
    rename_parameter,
    same_bits,
    states,
)

from harness.lay_out import lay_out
from universal import convert

MODEL = "mp_rank_00_model_states.pt"


def converted(source, **options):
    """What the model states hold after the conversion."""
    convert(source, source.parent / "u", check=True, **options)
    return load(source.parent / "u" / MODEL)


def warned(work):
    """The warnings of work(), and what it returns."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UserWarning)
        result = work()
    return [str(one.message) for one in told if one.category is UserWarning], result


# -----------------------------------------------------------------------------
# weights and states


@pytest.mark.parametrize("stage", [1, 2])
def test_frozen_parameter_that_is_a_view(laid_out, stage):
    """A frozen parameter whose elements do not follow each other keeps its numbers, and its table stays behind."""
    table = torch.arange(40.0).view(5, 8)
    frozen = {"columns": table[:, :4], "transposed": table.t(), "rows": table[1:3], "last": table[:, 7]}

    def add(model):
        model["module"] |= frozen
        model["frozen_param_shapes"] = OrderedDict((name, tensor.shape) for name, tensor in frozen.items())
        model["frozen_param_fragments"] = dict(frozen)

    module = converted(laid_out(stage, model=add))["module"]
    assert module.keys() == frozen.keys()
    assert all(torch.equal(module[name], tensor) for name, tensor in frozen.items())
    assert module["rows"].untyped_storage().nbytes() == 16 * 4


def test_momentum_that_ranks_hold_whole(laid_out, tmp_path):
    """Muon's before ZeRO-3: of every matrix of which a rank has a part."""
    wanted, shapes = {}, {name: shape for group in SHAPES for name, shape in group.items()}

    def add(shard):
        mappings = shard["optimizer_state_dict"]["param_slice_mappings"]
        for state, held in zip(states(shard), mappings, strict=True):
            for name in held:
                wanted.setdefault(name, torch.rand(shapes[name]))
            state["momentum_buffer"] = torch.cat([torch.empty(0), *(wanted[name].flatten() for name in held)])

    converted(laid_out(1, shard=add))
    assert wanted.keys() == shapes.keys()
    for name, tensor in wanted.items():
        assert torch.equal(load(tmp_path / "u" / "zero" / name / "momentum_buffer.pt")["param"], tensor)


@pytest.mark.parametrize("stage", [1, 3])
def test_small_pieces_of_many_ranks(tmp_path, stage):
    """48 ranks, and more parameters than fit: every element against the shards, which torch reads; and the same bytes
    when no more than 64 files may be open."""
    ranks = 48
    shapes = [OrderedDict((f"layer{i}.weight", torch.Size((7, 11 + i))) for i in range(40))]
    lay_out(tmp_path / "c", shapes, ranks, stage)
    convert(tmp_path / "c", tmp_path / "u")
    paths = [tmp_path / "c" / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(ranks)]
    shards = [load(path)["optimizer_state_dict"] for path in paths]
    for state in ("fp32", "exp_avg"):
        if state == "fp32":
            flats = [(s.get("fp32_flat_groups") or s["single_partition_of_fp32_groups"])[0] for s in shards]
        else:
            flats = [next(iter(states({"optimizer_state_dict": s})))[state] for s in shards]
        at = 0
        for name, shape in shapes[0].items():
            share = -(-shape.numel() // ranks)
            parts = [flat[at : at + share] for flat in flats] if stage == 3 else [torch.cat(flats)[at:]]
            got = load(tmp_path / "u" / "zero" / name / f"{state}.pt")["param"]
            assert torch.equal(got, torch.cat(parts)[: shape.numel()].view(shape))
            at += share if stage == 3 else shape.numel()
    few = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))  # noqa: E731
    assert converter(tmp_path / "c", tmp_path / "v", before=few).code == 0
    assert content(tmp_path / "v") == content(tmp_path / "u")


@pytest.mark.parametrize("stage", [1, 3])
def test_torch_reads_the_result_in_each_of_its_ways(laid_out, tmp_path, stage):
    """Mapped into memory, and with weights alone; zipfile, too."""
    wanted = converted(laid_out(stage, model=lambda model: model.update(mine=torch.arange(5000.0))))
    assert torch.equal(wanted["mine"], torch.arange(5000.0))
    for path in (tmp_path / "u").rglob("*.pt"):
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
        if path.parent.parent.name == "zero":
            for mapped in (False, True):
                assert repr(torch.load(path, weights_only=True, mmap=mapped)) == repr(load(path))


# -----------------------------------------------------------------------------
# client states and modules


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
def test_ordinary_client_states(laid_out, older):
    """They load equal."""
    wanted = client_state()
    source = laid_out(1, model=lambda model: model.update(mine=wanted))
    if older:
        with zipfile.ZipFile(source / MODEL) as archive:
            archived = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(source / MODEL, "w") as archive:
            for name, data in archived.items():
                archive.writestr(name, data.replace(b"numpy._core", b"numpy.core") if "data.pkl" in name else data)
    model = converted(source)
    assert model["mine"].keys() == wanted.keys()
    assert [key for key in wanted if not equal(model["mine"][key], wanted[key])] == []


def test_unknown_classes(laid_out):
    """They go on as they came."""
    things = [Colour.RED, Outer(), Outer.Inner(), os.getcwd]
    source = laid_out(1, lambda model: model.update(mine=things), lambda shard: shard.update(mine=things))
    got = converted(source)["mine"]
    assert got[0] is Colour.RED and type(got[1]) is Outer and got[3] is os.getcwd
    assert got[2].x == 5 and type(got[2]) is Outer.Inner


@pytest.mark.parametrize("stage", [1, 3])
def test_unusual_entries_of_module(laid_out, stage):
    """Complex, float8, uint16 and sparse buffers, and what get_extra_state() returned, are carried as they are."""
    buffers = {
        "complex": torch.tensor([1 + 2j, 3j]),
        "float8": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
        "uint16": torch.tensor([1, 65535], dtype=torch.uint16),
    }
    others = {"sparse": torch.eye(3).to_sparse(), "x._extra_state": {"scale": [1, 2.5], "history": torch.arange(3)}}

    def add(model):
        model["module"] |= buffers | others
        model["buffer_names"] += [*buffers, "sparse"]

    got = converted(laid_out(stage, model=add))["module"]
    assert got.keys() == buffers.keys() | others.keys()
    assert all(same_bits(got[name], tensor) for name, tensor in buffers.items())
    assert torch.equal(got["sparse"].to_dense(), torch.eye(3))
    assert got["x._extra_state"]["scale"] == [1, 2.5] and got["x._extra_state"]["history"].tolist() == [0, 1, 2]


def test_deeply_nested(laid_out):
    """As deep as torch.save can go, and deeper."""

    def nested(levels):
        value = []
        for _ in range(levels):
            value = [value]
        return value

    def depth(value):
        for levels in itertools.count():
            if not value:
                return levels
            (value,) = value

    for levels in (400, 20_000):
        limit, source = sys.getrecursionlimit(), laid_out(1)
        try:
            sys.setrecursionlimit(max(limit, 3 * levels))
            edit(source, MODEL, lambda model: model.update(mine=nested(levels)))  # noqa: B023
        finally:
            sys.setrecursionlimit(limit)
        assert depth(converted(source)["mine"]) == levels


def test_lists_that_hold_themselves(laid_out):
    endless, pair = [], ([], [])
    endless.append(endless)
    pair[0].append(pair)
    pair[1].append(pair)
    mine = converted(laid_out(1, model=lambda model: model.update(mine=[endless, pair])))["mine"]
    assert mine[0][0] is mine[0]
    assert type(mine[1]) is tuple and mine[1][1][0] is mine[1] and mine[1][0][0] is mine[1]


def test_members_of_enums(laid_out, tmp_path):
    """Python 3.11.0 to 3.11.3 pickles them by getattr, the ZeroStageEnum of every checkpoint, too. It is not looked
    up, whatever it is of, and goes back as it came."""

    class Attribute:
        def __init__(self, *arguments):
            self.arguments = arguments

        def __reduce__(self):
            return getattr, self.arguments

    stage = ZeroStageEnum
    plain = converted(laid_out(2))
    wanted = content(tmp_path / "u" / "zero")

    def by_getattr(shard):
        shard["optimizer_state_dict"]["zero_stage"] = Attribute(stage, "gradients")

    notes = [Attribute(stage, "gradients"), Attribute(Path, "home")]
    model = converted(laid_out(2, lambda model: model.update(note=notes), by_getattr))
    assert model["note"] == [stage.gradients, Path.home] and model.keys() == plain.keys() | {"note"}
    again = content(tmp_path / "u" / "zero")
    assert load(tmp_path / "u" / "zero" / "optimizer_state.pt")["zero_stage"] is stage.gradients
    del wanted["optimizer_state.pt"], again["optimizer_state.pt"]
    assert again == wanted


# -----------------------------------------------------------------------------
# versions of DeepSpeed, tensor parallelism


@pytest.mark.parametrize("stage", [1, 3])
def test_version_of_deepspeed(laid_out, tmp_path, stage):
    """The result says which version wrote the checkpoint, as the checkpoint does."""

    def older(content):
        content["ds_version"] = "0.18.4"
        if stage == 1 and "optimizer_state_dict" in content:
            content["optimizer_state_dict"]["ds_version"] = "0.18.4"

    assert converted(laid_out(stage, older, older))["ds_version"] == "0.18.4"
    assert load(tmp_path / "u" / "zero" / "optimizer_state.pt")["ds_version"] == "0.18.4"


@pytest.mark.parametrize("stage", [1, 3])
def test_for_the_loader_of_zero3_before_0_19_3(laid_out, tmp_path, stage):
    """It takes torch.load(path).view(-1), and since 0.19.3 the "param" of a dict, too."""
    source = laid_out(stage)
    convert(source, tmp_path / "u")
    assert converter(source, tmp_path / "bare", "--zero3_before_0_19_3", "--verify").code == 0
    found = []
    for path in (tmp_path / "u" / "zero").rglob("*.pt"):
        usual, bare = load(path), load(tmp_path / "bare" / path.relative_to(tmp_path / "u"))
        if isinstance(usual, dict) and "param" in usual:
            found.append(path)
            assert same_bits(bare, usual["param"])
    assert len(found) == 3 * 3
    assert content(tmp_path / "u").keys() == content(tmp_path / "bare").keys()


def test_no_row_parallel_pattern(laid_out):
    """At TP 1 nothing tells which weights are to be cut by rows later: resumed at TP 2 they would be cut wrong."""
    info = {"tp_replicated_parameter_patterns": ["b"], "universal_checkpoint_version": 0.2}
    source = laid_out(1, model=lambda model: model.update(universal_checkpoint_info=dict(info)))
    (text,), _ = warned(lambda: converted(source))
    assert "row-parallel" in text
    info["parameter_with_row_parallelism_patterns"] = ["a"]
    source = laid_out(1, model=lambda model: model.update(universal_checkpoint_info=dict(info)))
    assert not warned(lambda: converted(source))[0]


WITHOUT_TORCH = """import runpy, sys
sys.modules["torch"] = sys.modules["deepspeed"] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")"""


def test_needs_nothing_but_python(laid_out, tmp_path):
    """In a process of its own without torch: the mean of parameters that tensor-parallel ranks do not keep alike, in
    float32 as DeepSpeed has it; names beyond ASCII and a path that is no UTF-8, under a locale that knows neither."""
    info = {"parameter_to_average_patterns": [".*"], "universal_checkpoint_version": 0.2}
    named = lambda model: model.update(universal_checkpoint_info=info) or rename_parameter("ünï")(model)  # noqa: E731
    source = laid_out(1, named, rename_parameter("ünï"))
    double(source)
    edit(source, "*_mp_rank_01_optim*", lambda shard: [state["exp_avg"].mul_(3.7) for state in states(shard)])
    convert_with_deepspeed(source, tmp_path / "expected")
    output = os.path.join(os.fsencode(tmp_path), b"u\xff")
    words = [sys.executable, "-c", WITHOUT_TORCH, ROOT / "ds_to_universal.py", "--input_folder", source]
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([*words, "--output_folder", output], check=True, env=environment, timeout=60)
    assert (tmp_path / "latest_universal").read_bytes() == b"u\xff"
    for name, state in itertools.product(("a", "ünï", "c"), ("fp32", "exp_avg", "exp_avg_sq")):
        folders = os.fsencode(tmp_path / "expected"), output
        files = (os.path.join(folder, f"zero/{name}/{state}.pt".encode()) for folder in folders)
        wanted, got = (load(os.fsdecode(file))["param"] for file in files)
        assert torch.equal(wanted.flatten(), got.flatten()), (name, state)
