"""What test modules share: patches, small checkpoints laid out by hand, comparisons."""

import contextlib
import io
import os
import re
import runpy
import sys
import types
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("DS_ACCELERATOR", "cpu")
ROOT = Path(__file__).resolve().parent.parent

import pytest
import torch
from deepspeed.checkpoint import ds_to_universal as deepspeed_converter

import universal


def fp16_is(supported):
    """A patch: the device has fp16, or has it not, whatever this CPU is."""

    def patch():
        from deepspeed.accelerator import get_accelerator

        get_accelerator().is_fp16_supported = lambda: supported

    return patch


def edited(*edits):
    """A patch for run(): universal/loader.py with some of its code replaced, (pattern, replacement)."""

    def patch():
        source = (ROOT / "universal" / "loader.py").read_text()
        for pattern, replacement in edits:
            source, count = re.subn(pattern, replacement, source)
            assert count, f"{pattern} is not in loader.py"
        module = types.ModuleType("universal.loader")
        module.__file__ = str(ROOT / "universal" / "loader.py")
        sys.modules["universal.loader"] = module
        exec(compile(source, "edited loader.py", "exec"), module.__dict__)

    return patch


def convert_with_deepspeed(folder, output):
    """DeepSpeed's own converter, in this process."""
    options = dict(num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=True)
    options |= dict(inject_missing_state=True, input_folder=str(folder), output_folder=str(output))
    deepspeed_converter.main(SimpleNamespace(**options))


def frozen_and_buffer(seed):
    """A GPT with a frozen layer that comes from elsewhere and a buffer that training moves."""

    def patch():
        import model

        class Variant(model.GPT):
            def __init__(self, *shape):
                super().__init__(*shape)
                torch.nn.init.normal_(self.wpe.weight, generator=torch.Generator().manual_seed(seed))
                self.wpe.weight.requires_grad_(False)
                self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

            def forward(self, *args, **options):
                self.calls += self.training
                return super().forward(*args, **options) * (1 + 0.01 * self.calls)

        model.GPT = Variant

    return patch


def refused(patched, script, ranks, arguments):
    """The line with which rank 0 of so many refuses the arguments before it meets the others; in this process."""
    said = io.StringIO()
    patched.setattr(sys, "argv", [script, *map(str, arguments)])
    patched.setattr(os, "environ", os.environ | {"RANK": "0", "WORLD_SIZE": str(ranks)})
    with pytest.raises(SystemExit) as stop, contextlib.redirect_stderr(said):
        runpy.run_path(str(ROOT / script), run_name="__main__")
    line = said.getvalue()
    assert stop.value.code == 2 and line.count("\n") == 1 and line.startswith(f"{script}: error: "), line
    return line


def load(path):
    return torch.load(path, weights_only=False)


def same_bits(a, b):
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def content(folder):
    """Every byte below a folder, by file."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def command(source, output=None, *flags):
    """The converter's, for a process of its own."""
    words = [sys.executable, ROOT / "ds_to_universal.py", "--input_folder", source, *flags]
    return list(map(str, words)) + ([] if output is None else ["--output_folder", str(output)])


def assert_equal_to_deepspeed(source, folder):
    """Convert source into folder/ours, and with DeepSpeed's converter into folder/theirs. Every file of DeepSpeed's
    zero/ but the second copy of tied weights is the same: tensors, shapes, how to cut them, step counts. Ours has the
    files of every parameter, and no others."""
    theirs, ours = folder / "theirs", folder / "ours"
    convert_with_deepspeed(source, theirs)
    universal.convert(source, ours, check=True)
    models = [load(path) for path in sorted(ours.glob("mp_rank_*_model_states.pt"))]
    tied = {name for model in models for name in model["shared_params"]}
    kept = {name: tensor for model in models for name, tensor in (model["module"] or {}).items()}
    names = {name for model in models for group in model["param_shapes"] for name in group}
    assert {str(path.parent.relative_to(ours / "zero")) for path in (ours / "zero").rglob("fp32.pt")} == names
    assert not names & {*tied, *kept}
    compared = 0
    for path in sorted((theirs / "zero").rglob("*.pt")):
        name = str(path.parent.relative_to(theirs / "zero"))
        if name in tied or path.stem == "optimizer_state":
            continue
        wanted = load(path)
        if name in kept:  # frozen parameters and buffers: the loader of zero/ never reads what DeepSpeed writes there
            assert path.stem == "fp32" and torch.equal(wanted["param"], kept[name].float()), path
            continue
        got = load(ours / "zero" / name / path.name)
        if path.stem == "step":
            assert torch.equal(wanted, got)
            continue
        if torch.is_tensor(wanted):  # ZeRO-3, without a shape
            wanted = {"param": wanted.view(got["param"].shape), "cat_dim": 0}
        assert same_bits(got.pop("param"), wanted.pop("param")) and got == wanted, path
        compared += 1
    assert compared == 3 * len(names)


SHAPES = [OrderedDict(a=torch.Size((5, 3)), b=torch.Size((7,))), OrderedDict(c=torch.Size((4,)))]


def edit(folder, pattern, change):
    for path in sorted(folder.glob(pattern)):
        whole = load(path)
        change(whole)
        torch.save(whole, path)


def states(shard):
    """The optimizer's states by parameter group, of a shard of any stage."""
    optimizer = shard["optimizer_state_dict"]
    return (optimizer.get("base_optimizer_state") or optimizer["optimizer_state_dict"])["state"].values()


def scramble(shard):
    """Numbers of its own for every rank."""
    optimizer = shard["optimizer_state_dict"]
    flats = [*(optimizer.get("fp32_flat_groups") or optimizer["single_partition_of_fp32_groups"])]
    for flat in [*flats, *(state[key] for state in states(shard) for key in ("exp_avg", "exp_avg_sq"))]:
        flat.copy_(torch.rand(flat.shape))
