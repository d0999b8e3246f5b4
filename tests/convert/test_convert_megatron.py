"""Checkpoints that Megatron-DeepSpeed itself wrote, in tests/data: 2 layers of width 16 with 4 heads, bf16, ZeRO-1,
tensor-parallel degree 2. Converted as DeepSpeed does it; and examples/megatron_info.py, which completes what Megatron
says of how its weights are cut: what a rank computes with its shard, and one with the whole."""

import contextlib
import enum
import runpy
import sys
import tarfile
import types

import pytest
import torch
from helpers import ROOT, content, convert_with_deepspeed, edit, forked, load

import universal

# its archive in tests/data, the files with the weights of each rank, in which dicts, and the first layer's name there
CHECKPOINTS = [
    ("megatron-tp2-pp2-dp2", "layer_02-model_{:02}-model_states.pt", (), "2."),
    ("megatron-tp2-dp2-no-pipeline", "mp_rank_{:02}_model_states.pt", ("language_model", "encoder"), "layers.0."),
]
MODEL = "mp_rank_00_model_states.pt"
QKV = "self_attention.query_key_value."


@pytest.fixture(autouse=True)
def megatron(monkeypatch):
    """As much of Megatron as torch.load() imports for these files."""
    enums = types.ModuleType("megatron.core.enums")
    enums.ModelType = enum.Enum("ModelType", {"encoder_or_decoder": 1, "encoder_and_decoder": 2})
    enums.ModelType.__module__ = enums.__name__
    for module in (types.ModuleType("megatron"), types.ModuleType("megatron.core"), enums):
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.fixture(params=CHECKPOINTS, ids=lambda parts: parts[0])
def saved(request, tmp_path):
    """(folder, name of the first layer, [the layer's parameters on each rank])"""
    name, files, inside, layer = request.param
    with tarfile.open(ROOT / "tests" / "data" / f"{name}.tar.xz") as archive:
        archive.extractall(tmp_path)  # of this repository
    folder, ranks = tmp_path / "global_step2", []
    for rank in range(2):
        held = load(folder / files.format(rank))
        for key in ("module", *inside) if inside else ():
            held = held[key]
        ranks.append({key.removeprefix(layer): tensor for key, tensor in held.items() if torch.is_tensor(tensor)})
    return folder, ".".join((*inside, layer)), ranks


def test_equal_to_deepspeed(saved, tmp_path):
    """DeepSpeed's converter fails itself where `module` is nested: after the states are written, before the rest."""
    source, ours, theirs = saved[0], tmp_path / "ours", tmp_path / "theirs"
    universal.convert(source, ours, check=True)
    nested = load(source / MODEL)["module"] is not None
    with pytest.raises(AttributeError) if nested else contextlib.nullcontext():
        convert_with_deepspeed(source, theirs)
    compared = 0
    for path in (theirs / "zero").glob("*/*.pt"):
        wanted, got = load(path), load(ours / path.relative_to(theirs))
        if path.stem == "step":
            assert wanted == got
            continue
        assert torch.equal(wanted.pop("param"), got.pop("param")) and wanted == got, path
        compared += 1
    assert compared == 3 * len(list((ours / "zero").glob("*/fp32.pt"))) >= 84
    for path in source.glob("mp_rank_*_model_states.pt"):
        wanted, got = load(path), load(ours / path.name)
        assert wanted.keys() == got.keys() and wanted["args"].lr == got["args"].lr and repr(wanted) == repr(got)


def run_example(*arguments):
    def work():
        sys.argv = ["megatron_info.py", *map(str, arguments)]
        runpy.run_path(str(ROOT / "examples" / "megatron_info.py"), run_name="__main__")

    return forked(work)()


def complete(folder):
    done = run_example(folder)
    assert done.code == 0, done.err
    return done.out


def converted(folder, output):
    """A function: the file of a parameter's weights."""
    universal.convert(folder, folder.parent / output)
    return lambda name: load(folder.parent / output / "zero" / name / "fp32.pt")


def attention(x, layer, heads):
    """What Megatron's layer does between its two matrices: thirds for Q, K and V, then the heads."""
    weight, bias = (layer[QKV + kind].double() for kind in ("weight", "bias"))
    q, k, v = (t.view(*x.shape[:2], heads, -1).transpose(1, 2) for t in (x @ weight.T + bias).chunk(3, dim=-1))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(1, 2).flatten(2)


def test_query_key_value(saved):
    """One rank's attention with the whole is that of two ranks with their halves; without the entries it is another."""
    folder, name, ranks = saved
    x = torch.randn(2, 8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wanted = torch.cat([attention(x, rank, 2) for rank in ranks], dim=-1)

    def difference(output):
        read = converted(folder, output)
        whole = {QKV + kind: read(f"{name}{QKV}{kind}")["param"].bfloat16() for kind in ("weight", "bias")}
        return (attention(x, whole, 4) - wanted).abs().max().item() / wanted.abs().max().item()

    assert difference("as_it_is") > 0.1
    assert "query_key_value" in complete(folder)
    assert difference("completed") < 1e-12
    assert complete(folder) == "nothing is missing\n"


def test_rest_of_the_files_stays(saved):
    """The entries are all that changes."""
    before, files = load(saved[0] / MODEL), content(saved[0])
    complete(saved[0])
    after, others = load(saved[0] / MODEL), content(saved[0])
    assert files.pop(MODEL) != others.pop(MODEL) and files == others
    info, more = (state.pop("universal_checkpoint_info") for state in (before, after))
    assert repr(before) == repr(after)
    assert more.keys() - info.keys() == {"parameter_with_sub_params", "sub_param_shard_widths"}
    assert {key: more[key] for key in info} == info


def test_row_parallel(saved):
    """Saved at degree 1 Megatron leaves these patterns out. Here they are taken out of a checkpoint of degree 2."""
    folder, name, ranks = saved
    rows = {"parameter_with_row_parallelism_patterns": []}
    edit(folder, MODEL, lambda model: model["universal_checkpoint_info"].update(rows))
    dense = "self_attention.dense.weight"
    assert converted(folder, "as_it_is")(name + dense)["param"].shape == (32, 8)
    assert "dense_4h_to_h" in complete(folder)
    whole = converted(folder, "completed")(name + dense)
    assert whole["cat_dim"] == 1
    assert torch.equal(whole["param"].bfloat16(), torch.cat([rank[dense] for rank in ranks], dim=1))


def test_padding_of_the_vocabulary(saved):
    """Rows beyond the vocabulary are trained, too; with the vocabulary taken for 250 of the 256, they are kept."""
    folder = saved[0]
    edit(folder, MODEL, lambda model: model["universal_checkpoint_info"].update(original_vocab_size=250))
    name = next(iter(load(folder / MODEL)["param_shapes"][0]))
    lost = converted(folder, "as_it_is")(name)["param"]
    assert "original_vocab_size: 256, was 250" in complete(folder)
    kept = converted(folder, "completed")(name)["param"]
    assert (lost.shape, kept.shape) == ((250, 16), (256, 16)) and torch.equal(kept[:250], lost)
    assert kept[250:].any()


def test_refusals(saved, tmp_path):
    """No folder, no checkpoint, a damaged one: nothing is changed."""
    (saved[0] / MODEL).write_bytes((saved[0] / MODEL).read_bytes()[:1000])
    before = content(tmp_path)
    for arguments, words in (((), "megatron_info.py"), ((tmp_path,), "holds no"), ((saved[0],), f"{MODEL} is damaged")):
        done = run_example(*arguments)
        assert done.code == 1 and words in done.err, done.err
    assert content(tmp_path) == before
