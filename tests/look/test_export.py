"""The weights alone, `python -m universal.safetensors`: the file against the live engine, and in
transformers; or one line, with nothing written."""

import itertools
import os
import re
import shutil
import signal
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from tests.support import zoo
from tests.support.commands import at_event, command, failed, forked
from tests.support.conversions import convert_with_deepspeed
from tests.support.files import MODEL, load, with_bit_flipped
from tests.support.lay_out import lay_out
from tests.support.ranks import run
from tests.support.toy import same
from tests.support.zoo import TAG, Job
from universal import CheckpointError, convert, safetensors
from universal.safetensors import export


def exporter(*words):
    return command(safetensors.main, *words)


@pytest.fixture(scope="module")
def trained(work):
    """A folder with <stage>-<dtype>/global_step3 and <stage>-<dtype>/truth.pt."""
    runs = itertools.product((1, 2, 3), ("fp32", "bf16"))
    jobs = [Job(f"{stage}-{dtype}", stage, dtype=dtype, groups=3) for stage, dtype in runs]
    run(work, 3, zoo.play, *jobs)
    return work


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_weights_of_the_live_engine(trained, tmp_path, stage, dtype):
    """Odd names, views, two names of one weight, frozen parameters and persistent buffers, and
    nothing else; from the ZeRO checkpoint, and from what it converts into."""
    source = trained / f"{stage}-{dtype}" / TAG
    truth = load(source.with_name("truth.pt"))
    moments = (" exp_avg", " exp_avg_sq")
    wanted = {}
    # Sorted, so that the fp32 weights take the place of the model's.
    for name, tensor in sorted(truth.items()):
        if not torch.is_tensor(tensor) or name.endswith(moments):
            continue
        name = name.removesuffix(" fp32")
        wanted[name] = tensor
        if name.startswith("norm."):
            wanted[f"same_{name}"] = tensor
    del wanted["scratch"]  # a buffer that is not persistent
    assert "first.weight" in wanted and "tied.weight" not in wanted
    convert(source, tmp_path / "u")
    for folder in (source, tmp_path / "u"):
        done = export(folder, tmp_path / "model.safetensors")
        got = load_file(tmp_path / "model.safetensors")
        assert got.keys() == wanted.keys()
        assert all(same(got[name], wanted[name]) for name in wanted)
        assert done["parameters"] == len(wanted)
        assert done["bytes"] == sum(tensor.nbytes for tensor in wanted.values())


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_takes_the_file(tmp_path, tied):
    """In a folder as Trainer leaves it, beside its config.json: from_pretrained() gives the
    weights."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=tied,
    )
    parameters = AutoModelForCausalLM.from_config(config).named_parameters()
    shapes = OrderedDict((name, parameter.shape) for name, parameter in parameters)
    folder = tmp_path / "checkpoint-500"
    shared = {"lm_head.weight": "model.embed_tokens.weight"} if tied else None
    lay_out(folder / "global_step500", [shapes], 2, 3, shared)
    config.save_pretrained(folder)
    done = exporter(folder, folder / "model.safetensors")
    paths = rf"{folder}/global_step500 -> {folder}/model.safetensors"
    line = rf"{paths}: {len(shapes)} parameters, .* bytes in"
    assert done.code == 0 and re.match(line, done.out), done.err
    convert(folder, tmp_path / "u")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name in shapes:
        weight = load(tmp_path / "u" / "zero" / name / "fp32.pt")["param"]
        assert same(model.get_parameter(name).detach(), weight)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    assert ("lm_head.weight" not in shapes) is tied


VIEWS = {
    "half": torch.tensor([1.5, -0.0, 6e-8, 65504.0, -float("inf")]).half(),
    "transposed": torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),
    "columns": torch.arange(40, dtype=torch.bfloat16).view(5, 8)[:, 3:6],
    "expanded": torch.arange(3, dtype=torch.int16)[:, None].expand(3, 4),
    "double": torch.rand(3, dtype=torch.float64),
    "scalar": torch.tensor(7),
    "none": torch.zeros(0, 3),
    "bools": torch.tensor([True, False, True]),
}


def test_views_and_other_kinds(laid_out, tmp_path):
    """Element by element whatever the strides, in its dtype, aligned; nothing of no elements."""

    def add(model):
        model["module"] |= VIEWS
        model["buffer_names"] = [*VIEWS]

    source = laid_out(1, add)
    export(source, tmp_path / "x.safetensors")
    got = load_file(tmp_path / "x.safetensors")
    assert got.keys() == VIEWS.keys() | set("abc")
    assert [name for name, tensor in VIEWS.items() if not same(got[name], tensor)] == []
    assert not [name for name, tensor in got.items() if tensor.data_ptr() % tensor.itemsize]


def test_universal_checkpoint_of_deepspeed(laid_out, tmp_path):
    """Its `module` still holds what was trained, also under its second name."""

    def tie(model):
        model["shared_params"] = {"d": "a"}
        model["module"]["d"] = model["module"]["a"]

    source = laid_out(1, tie)
    export(source, tmp_path / "x.safetensors")
    convert_with_deepspeed(source, tmp_path / "u")
    export(tmp_path / "u", tmp_path / "y.safetensors")
    wanted = load_file(tmp_path / "x.safetensors")
    got = load_file(tmp_path / "y.safetensors")
    assert got.keys() == wanted.keys() == set("abc")
    assert all(same(got[name], wanted[name]) for name in got)


def test_what_is_no_tensor(laid_out, tmp_path):
    """In the module: named, and left out only if that is permitted. Elsewhere it does not
    matter."""

    def add(model):
        model["module"]["extra"] = {"x": 1}
        model["module"]["complex"] = torch.ones(2, dtype=torch.complex128)
        model["note"] = SimpleNamespace()

    source = laid_out(1, add)
    output = tmp_path / "x.safetensors"
    done = exporter(source, output)
    failed(done, 2, "ds_to_safetensors: error: ", "no place for complex", "--no_strict")
    assert os.listdir(tmp_path) == ["c"]
    done = exporter(source, output, "--no_strict")
    assert done.code == 0 and re.findall("no place for (.*)", done.err) == ["complex", "extra"]
    assert load_file(output).keys() == set("abc")


@pytest.mark.parametrize("universal", [False, True])
def test_damage(laid_out, tmp_path, universal):
    """One bit of any weight: refused with the file's name; an older result stays, and nothing lies
    beside it."""
    source = laid_out(3)
    output = tmp_path / "o" / "x.safetensors"
    export(source, output)
    before = output.read_bytes()
    if universal:
        convert(source, tmp_path / "u" / "u")
        source = tmp_path / "u" / "u"
    for path in source.rglob("fp32.pt" if universal else "*_optim_states.pt"):
        data = path.read_bytes()
        saved = load(path)
        if universal:
            weights = saved["param"]
        else:
            weights = saved["optimizer_state_dict"]["fp32_flat_groups"][0]
        last_byte = data.index(weights.numpy().tobytes()) + weights.nbytes - 1
        path.write_bytes(with_bit_flipped(data, last_byte))
        with pytest.raises(CheckpointError, match=f"{re.escape(str(path))} is damaged"):
            export(source, output)
        path.write_bytes(data)
        assert output.read_bytes() == before and os.listdir(output.parent) == [output.name]
    export(source, output)


def test_refusals(laid_out, tmp_path):
    """Before anything is written."""
    source = laid_out(1)
    output = tmp_path / "x.safetensors"
    parallel = tmp_path / "parallel"
    (tmp_path / "folder.safetensors").mkdir()
    convert(source, parallel)
    torch.save(load(parallel / MODEL), parallel / MODEL.replace("00", "01"))
    shutil.copytree(parallel / "zero", tmp_path / "empty" / "zero")
    before = sorted(os.listdir(tmp_path))
    for words, arguments in {
        "not the name of a .safetensors file": (source, source / MODEL),
        "folder.safetensors is not the name": (source, tmp_path / "folder.safetensors"),
        "does not exist": (tmp_path / "no", output),
        "has 2 model-parallel ranks or a pipeline": (parallel, output),
        "holds no *_model_states.pt": (tmp_path / "empty", output),
    }.items():
        failed(exporter(*arguments), 2, words)
    assert sorted(os.listdir(tmp_path)) == before


def test_replaced_at_once(laid_out, tmp_path):
    """Who has mapped the older file keeps it; what a killed export has left is swept away by the
    next one."""
    source = laid_out(1)
    output = tmp_path / "o" / "x.safetensors"

    def killed():
        at_event(1, lambda event, _: event == "os.rename")
        export(source, output)

    assert forked(killed)().code == -signal.SIGKILL
    assert os.listdir(output.parent) == [".x.safetensors.unfinished"]
    export(source, output)
    with open(output, "rb") as older:
        export(source, output)
        assert os.fstat(older.fileno()).st_nlink == 0
    assert os.listdir(output.parent) == [output.name] and len(load_file(output)) == 3
