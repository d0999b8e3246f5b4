"""What real programs write goes through the converter as it is: in checkpoints of a few numbers,
laid out by hand."""

import argparse
import enum
import os
import pathlib
import pickle
import resource
import socket
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, deque

import numpy
import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum

from tests.support import ROOT
from tests.support.commands import converter
from tests.support.conversions import assert_equal_to_deepspeed
from tests.support.files import MODEL, content, edit, load, states
from tests.support.lay_out import lay_out
from tests.support.toy import same
from universal import convert
from universal.checkpoint.describe import describe


def converted(source):
    """What the model states hold after the conversion."""
    convert(source, source.parent / "u", check=True)
    return load(source.parent / "u" / MODEL)


def test_momentum_that_ranks_hold_whole(tmp_path):
    """Muon's before ZeRO-3: of every matrix of which a rank has a part."""
    # On 3 ranks: a ends where rank 1 begins, and c is on ranks 1 and 2.
    shapes = [OrderedDict(a=torch.Size((4, 3)), b=torch.Size((5,)), c=torch.Size((19,)))]
    wanted = {name: torch.rand(shape) for name, shape in shapes[0].items()}

    def add(shard):
        mappings = shard["optimizer_state_dict"]["param_slice_mappings"]
        for state, names in zip(states(shard), mappings, strict=True):
            matrices = [wanted[name].flatten() for name in names]
            state["momentum_buffer"] = torch.cat([torch.empty(0), *matrices])

    lay_out(tmp_path / "c", shapes, 3, 1)
    edit(tmp_path / "c", "*_optim_*", add)
    converted(tmp_path / "c")
    for name, tensor in wanted.items():
        momentum = load(tmp_path / "u" / "zero" / name / "momentum_buffer.pt")
        assert torch.equal(momentum["param"], tensor)


@pytest.mark.parametrize("stage", [1, 3])
def test_small_pieces_of_many_ranks(tmp_path, stage):
    """Of 48 ranks, as DeepSpeed puts them together; and the same bytes when no more than 96 files
    may be open, of which 60 are sockets."""
    shapes = [OrderedDict((f"layer{i}.weight", torch.Size((7, 11 + i))) for i in range(10))]
    lay_out(tmp_path / "c", shapes, 48, stage)
    assert_equal_to_deepspeed(tmp_path / "c", tmp_path)

    def few():
        os.closerange(3, 1024)
        resource.setrlimit(resource.RLIMIT_NOFILE, (96, 96))
        kept.extend(socket.socket() for _ in range(60))

    kept = []

    assert converter(tmp_path / "c", tmp_path / "v", before=few).code == 0
    assert content(tmp_path / "v") == content(tmp_path / "ours")


def test_torch_reads_the_result_in_each_of_its_ways(laid_out, tmp_path):
    """Mapped into memory, and with weights alone."""
    convert(laid_out(1), tmp_path / "u")
    for path in (tmp_path / "u").glob("zero/*/*.pt"):
        assert repr(torch.load(path, weights_only=True, mmap=True)) == repr(load(path))


class Colour(enum.Enum):
    RED = 1


class Outer:
    class Inner:
        def __init__(self):
            self.x = 5


class Attribute:
    """Pickles by getattr, as Python 3.11.0 to 3.11.3 does with members of enums, ZeroStageEnum's,
    too."""

    def __init__(self, *arguments):
        self.arguments = arguments

    def __reduce__(self):
        return getattr, self.arguments


def client_state():
    holds_itself = ([], [])
    holds_itself[0].append(holds_itself)
    return {
        "numpy": [numpy.float64(0.5), numpy.arange(6).reshape(2, 3), numpy.random.get_state()],
        "generators": [numpy.random.RandomState(4), numpy.random.default_rng(3)],
        "arguments": argparse.Namespace(lr=1e-3, path=pathlib.PosixPath("/x")),
        "containers": [{1, 2}, frozenset({3}), b"\xff\0", bytearray(b"x"), range(3), 1j],
        "more": [defaultdict(list, a=[1]), Counter("aab"), deque([1, 2], 5), OrderedDict(b=2)],
        "dtypes": [torch.bfloat16, torch.float8_e4m3fn, torch.strided, torch.device("cpu")],
        "uint32": torch.ones(3).to(torch.uint32),
        "unknown": [Colour.RED, os.getcwd, Outer(), Outer.Inner(), Attribute(pathlib.Path, "home")],
        "itself": holds_itself,
    }


def test_ordinary_client_states_and_unknown_classes(laid_out, tmp_path):
    """They go on as they came, to the last byte of their pickles, whatever getattr is to be called
    with; so do sparse buffers, and what get_extra_state() returned."""
    mine = client_state()

    def add(model):
        module = {"sparse": torch.eye(3).to_sparse(), "extra": {1: 2}}
        model.update(mine=mine, buffer_names=["sparse"], module=module)

    def by_getattr(shard):
        stage = Attribute(ZeroStageEnum, "gradients")
        shard["optimizer_state_dict"].update(mine=mine, zero_stage=stage)

    source = laid_out(2, add, by_getattr)
    model = converted(source)
    assert torch.equal(model["module"].pop("sparse").to_dense(), torch.eye(3))
    assert model["module"] == {"extra": {1: 2}}
    optimizer = load(tmp_path / "u" / "zero" / "optimizer_state.pt")
    assert optimizer["zero_stage"] is ZeroStageEnum.gradients
    saved = load(source / MODEL)
    for side in (saved, model, optimizer):
        assert same(side["mine"].pop("uint32"), mine["uint32"])
    wanted = pickle.dumps(saved["mine"])
    assert pickle.dumps(model["mine"]) == wanted == pickle.dumps(optimizer["mine"])


@pytest.mark.parametrize("stage", [1, 3])
def test_version_of_deepspeed(laid_out, tmp_path, stage):
    """The result says which version wrote the checkpoint, as the checkpoint does; and lacks what
    that one lacked."""
    others = {"random_ltd", "data_sampler", "lr_scheduler", "global_samples", "mp_world_size"}

    def older(content):
        for holder in (content, content.get("optimizer_state_dict", {})):
            if "ds_version" in holder:
                holder["ds_version"] = "0.18.4"
        for key in others & content.keys():
            del content[key]

    model = converted(laid_out(stage, older, older))
    assert model["ds_version"] == "0.18.4" and not others & model.keys()
    assert load(tmp_path / "u" / "zero" / "optimizer_state.pt")["ds_version"] == "0.18.4"


def test_for_the_loader_of_zero3_before_0_19_3(laid_out, tmp_path):
    """It takes torch.load(path).view(-1), and since 0.19.3 the "param" of a dict, too."""
    source = laid_out(3)
    convert(source, tmp_path / "u")
    assert converter(source, tmp_path / "bare", "--zero3_before_0_19_3", "--verify").code == 0
    for path in (tmp_path / "u").glob("zero/[abc]/[ef]*.pt"):
        bare = load(tmp_path / "bare" / path.relative_to(tmp_path / "u"))
        assert same(bare, load(path)["param"])


@pytest.mark.filterwarnings("error::UserWarning")
def test_no_row_parallel_pattern(laid_out):
    """At TP 1 nothing tells which weights are to be cut by rows later: resumed at TP 2 they would
    be cut wrong."""
    info = {"tp_replicated_parameter_patterns": ["b"], "universal_checkpoint_version": 0.2}
    with pytest.warns(UserWarning, match="row-parallel"):
        converted(laid_out(1, model=lambda model: model.update(universal_checkpoint_info=info)))
    info["parameter_with_row_parallelism_patterns"] = ["a"]
    converted(laid_out(1, model=lambda model: model.update(universal_checkpoint_info=info)))


WITHOUT_TORCH = """import runpy, sys
sys.modules["torch"] = sys.modules["deepspeed"] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")"""


def test_needs_nothing_but_python(laid_out, tmp_path):
    """In a process of its own without torch; names beyond ASCII and a path that is no UTF-8, under
    a locale that knows neither."""
    source = laid_out(shapes=[{"ünï": torch.Size((5, 3))}])
    output = tmp_path / os.fsdecode(b"u\xff")
    program = [sys.executable, "-c", WITHOUT_TORCH, ROOT / "ds_to_universal.py"]
    folders = ["--input_folder", source, "--output_folder", output]
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([*program, *folders], check=True, env=environment, timeout=60)
    assert (tmp_path / "latest_universal").read_bytes() == b"u\xff"
    convert(source, tmp_path / "u")
    assert (tmp_path / "u" / "zero" / "ünï" / "fp32.pt").is_file()
    assert content(output) == content(tmp_path / "u")


def test_a_layer_of_random_ltd(laid_out):
    """DeepSpeed saves its weights in the module without its wrapper's name: they are the
    optimizer's, and no buffers."""

    def unwrapped(model):
        module = model["module"]
        model["module"] = {name.replace(".random_ltd_layer", ""): module[name] for name in module}

    shapes = [{"layer.random_ltd_layer.weight": torch.Size((5, 3)), "b": torch.Size((3,))}]
    folder = laid_out(1, unwrapped, shapes=shapes)
    checkpoint = describe(folder)
    assert {*checkpoint.parameters} == {"layer.random_ltd_layer.weight", "b"}
    assert "layer.weight" not in checkpoint.module
