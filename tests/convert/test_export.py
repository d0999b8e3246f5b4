"""The weights alone, `python -m universal.safetensors`: the file against the live engine, and in
transformers; or one line, with nothing written."""

import functools
import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
import torch
from helpers import ROOT, archived, convert_with_deepspeed, forked, load, same_bits, with_bit_flipped
from safetensors.torch import load_file
from zoo import SAVED

from harness.ranks import run
from universal import CheckpointError, convert
from universal import safetensors as command
from universal.safetensors import export

MODEL = "mp_rank_00_model_states.pt"


def exporter(*words):
    """The command's exit code, and what it says."""

    def work():
        sys.argv = ["safetensors.py", *map(str, words)]
        command.main()

    return forked(work)()


# -----------------------------------------------------------------------------
# the weights of the live engine


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """trained(stage): a folder with <run>/global_step3 and <run>/truth.pt, of a model in fp32 and of one in bf16."""

    @functools.cache
    def train(stage):
        folder = tmp_path_factory.mktemp(f"zero{stage}")
        jobs = [{"name": dtype, "stage": stage, "optimizer": "AdamW", "dtype": dtype} for dtype in ("fp32", "bf16")]
        run(folder, 3, "tests/ranks/zoo.py", json.dumps([job | {"groups": 3} for job in jobs]))
        return folder

    return train


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_weights_of_the_live_engine(trained, tmp_path, stage, dtype):
    """Odd names, views, two names of one weight, frozen parameters and persistent buffers, and nothing else; from the
    ZeRO checkpoint, and the same bytes but for their order from what it converts into."""
    source, truth = trained(stage) / dtype / f"global_step{SAVED}", load(trained(stage) / dtype / "truth.pt")
    moments = ("scratch", " exp_avg", " exp_avg_sq")  # and a buffer that is not persistent
    wanted = {name: t for name, t in sorted(truth.items()) if torch.is_tensor(t) and not name.endswith(moments)}
    wanted = {name.removesuffix(" fp32"): t for name, t in wanted.items()}  # in place of the weights of the model
    wanted |= {name.replace("norm.", "same_norm."): t for name, t in wanted.items() if name.startswith("norm.")}
    assert "first.weight" in wanted and "tied.weight" not in wanted
    convert(source, tmp_path / "u")
    for folder in (source, tmp_path / "u"):
        done = export(folder, tmp_path / "model.safetensors")
        got = load_file(tmp_path / "model.safetensors")
        assert got.keys() == wanted.keys() and all(same_bits(got[name], wanted[name]) for name in wanted)
        assert done["parameters"] == len(wanted)
        assert done["bytes"] == sum(tensor.nbytes for tensor in wanted.values())


# -----------------------------------------------------------------------------
# transformers


def save_truth():
    """A patch: what the engine holds whenever it saves, and the model's config, beside the checkpoint."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    save = deepspeed.DeepSpeedEngine.save_checkpoint

    def wrapped(self, folder, *arguments, **options):
        model, truth = self.module, {}
        for name, p in model.named_parameters(remove_duplicate=False):
            with deepspeed.zero.GatheredParameters([p], enabled=hasattr(p, "ds_id")):
                truth[name] = (safe_get_full_fp32_param(p) if p.requires_grad else p.detach().float()).clone()
        if deepspeed.comm.get_rank() == 0:
            model.config.save_pretrained(folder)
            torch.save(truth, Path(folder, "truth.pt"))
        return save(self, folder, *arguments, **options)

    deepspeed.DeepSpeedEngine.save_checkpoint = wrapped


@pytest.mark.parametrize(
    "stage, dtype, tied, flags",
    [
        (3, "bf16", True, ("--freeze",)),
        pytest.param(2, "fp32", False, ("--freeze",), marks=pytest.mark.slow),
        pytest.param(1, "fp32", True, (), marks=pytest.mark.slow),
        pytest.param(3, "fp32", False, (), marks=pytest.mark.slow),
    ],
)
def test_transformers_takes_the_file(work, stage, dtype, tied, flags):
    """Trainer's folder with its config.json and this file: from_pretrained() gives the weights of the engine."""
    from transformers import AutoModelForCausalLM

    text = (ROOT / "examples" / "hf_trainer.py").read_text()
    for old, new in (
        ("24, 2, 20\n", "24, 2, 2\n"),
        ("save_steps=10", "save_steps=2"),
        ("eval_steps=10", "eval_steps=2"),
        ("use_cache=False", f"use_cache=False, tie_word_embeddings={tied}"),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (work / "short_trainer.py").write_text(text)
    name = f"trainer_{stage}_{dtype}_{tied}"
    flags = (*flags, "--zero_stage", stage, "--dtype", dtype, "--output_dir", name, "--run_name", name)
    run(work, 2, str(work / "short_trainer.py"), *flags, patch=save_truth)
    folder = work / name / "checkpoint-2"
    done = exporter(folder, folder / "model.safetensors")
    said = rf"{folder}/global_step2 -> {folder}/model.safetensors: \d+ parameters, .* bytes in"
    assert done.code == 0 and re.match(said, done.out), done.err
    model, truth = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), load(folder / "truth.pt")
    got = dict(model.named_parameters(remove_duplicate=False))
    assert got.keys() == truth.keys() and all(same_bits(got[n].detach(), truth[n]) for n in truth)
    assert ("lm_head.weight" in load_file(folder / "model.safetensors")) is not tied
    assert (got["lm_head.weight"] is got["model.embed_tokens.weight"]) is tied


# -----------------------------------------------------------------------------
# one line, or a whole file

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
    """Element by element whatever the strides, in its dtype; nothing of no elements."""

    def add(model):
        model["module"] |= VIEWS
        model["buffer_names"] += list(VIEWS)

    export(laid_out(1, add), tmp_path / "x.safetensors")
    got = load_file(tmp_path / "x.safetensors")
    assert got.keys() == VIEWS.keys() | set("abc")
    assert [name for name, tensor in VIEWS.items() if not same_bits(got[name], tensor)] == []


def test_universal_checkpoint_of_deepspeed(laid_out, tmp_path):
    """Its `module` still holds what was trained, also under its second name."""

    def tie(model):
        model["shared_params"], model["module"]["d"] = {"d": "a"}, model["module"]["a"]

    source = laid_out(1, tie)
    export(source, tmp_path / "x.safetensors")
    convert_with_deepspeed(source, tmp_path / "u")
    export(tmp_path / "u", tmp_path / "y.safetensors")
    wanted, got = load_file(tmp_path / "x.safetensors"), load_file(tmp_path / "y.safetensors")
    assert got.keys() == wanted.keys() == set("abc") and all(same_bits(got[name], wanted[name]) for name in got)


class Stranger:
    """Of a client state."""


def test_what_is_no_tensor(laid_out, tmp_path):
    """In the module: named, and left out only if that is permitted. Elsewhere it does not matter."""

    def add(model):
        model["module"].update(extra={"x": 1}, complex=torch.ones(2, dtype=torch.complex128))
        model["note"] = Stranger()

    source, output = laid_out(1, add), tmp_path / "x.safetensors"
    done = exporter(source, output)
    assert done.code == 2 and done.err.count("\n") == 1 and done.err.startswith("ds_to_safetensors: error: ")
    assert "no place for complex" in done.err and "--no_strict" in done.err and os.listdir(tmp_path) == ["c"]
    done = exporter(source, output, "--no_strict")
    assert done.code == 0 and re.findall("no place for (.*)", done.err) == ["complex", "extra"]
    assert load_file(output).keys() == set("abc")


@pytest.mark.parametrize("universal", [False, True])
def test_damage(laid_out, tmp_path, universal):
    """One bit of any weight: refused with the file's name; an older result stays, and nothing lies beside it."""
    source, output = laid_out(3), tmp_path / "o" / "x.safetensors"
    export(source, output)
    before = output.read_bytes()
    if universal:
        convert(source, tmp_path / "u" / "u")
        source = tmp_path / "u" / "u"
    for path in source.rglob("fp32.pt" if universal else "*_optim_states.pt"):
        kept = path.read_bytes()
        weights = load(path)
        weights = weights["param"] if universal else weights["optimizer_state_dict"]["fp32_flat_groups"][0]
        begin = kept.index(weights.numpy().tobytes())
        assert begin in [start for _, _, start, _ in archived(path)[0]]
        path.write_bytes(with_bit_flipped(kept, begin + weights.nbytes - 2))
        with pytest.raises(CheckpointError, match=f"{re.escape(str(path))} is damaged"):
            export(source, output)
        path.write_bytes(kept)
        assert output.read_bytes() == before and os.listdir(output.parent) == [output.name]
    export(source, output)


def test_refusals(laid_out, tmp_path):
    """Before anything is written."""
    source = laid_out(1)
    (tmp_path / "folder.safetensors").mkdir()
    convert(source, tmp_path / "parallel")
    torch.save(load(tmp_path / "parallel" / MODEL), tmp_path / "parallel" / MODEL.replace("00", "01"))
    convert(source, tmp_path / "empty")
    for path in (tmp_path / "empty").glob("*.pt"):
        path.unlink()
    before, output = sorted(os.listdir(tmp_path)), tmp_path / "x.safetensors"
    wrong = {
        "not the name of a .safetensors file": (source, source / MODEL),
        "folder.safetensors is not the name": (source, tmp_path / "folder.safetensors"),
        "does not exist": (tmp_path / "no", output),
        "has 2 model-parallel ranks or a pipeline": (tmp_path / "parallel", output),
        "holds no *_model_states.pt": (tmp_path / "empty", output),
    }
    for words, arguments in wrong.items():
        done = exporter(*arguments)
        assert (done.code, done.err.count("\n")) == (2, 1) and words in done.err, done.err
    assert sorted(os.listdir(tmp_path)) == before


def test_left_over_of_a_killed_one(laid_out, tmp_path):
    """It is swept away by the next one to the same file."""
    source, output = laid_out(1), tmp_path / "o" / "x.safetensors"

    def killed():
        sys.addaudithook(lambda event, _: os.kill(os.getpid(), signal.SIGKILL) if event == "os.rename" else None)
        export(source, output)

    assert forked(killed)().code == -signal.SIGKILL
    assert os.listdir(output.parent) == [".x.safetensors.unfinished"]
    export(source, output)
    assert os.listdir(output.parent) == [output.name] and len(load_file(output)) == 3


def test_replaced_at_once(laid_out, tmp_path, disk_fails):
    """Who has mapped the older file keeps it; and there is no newer one before all of it is on the disk."""
    source, output = laid_out(1), tmp_path / "o" / "x.safetensors"
    export(source, output)
    with open(output, "rb") as older:
        export(source, output)
        assert os.fstat(older.fileno()).st_nlink == 0
    before = os.stat(output)
    disk_fails()
    with pytest.raises(OSError, match=r"Input/output error: .*unfinished"):
        export(source, output)
    assert os.path.samestat(before, os.stat(output)) and os.listdir(output.parent) == [output.name]
