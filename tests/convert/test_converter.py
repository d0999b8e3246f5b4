"""ds_to_universal.py against DeepSpeed's own converter, on real checkpoints: every tensor, every bit."""

import math
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from helpers import ROOT, assert_equal_to_deepspeed, edit, frozen_and_buffer, load, same_bits

import ds_to_universal
import universal
from harness.ranks import run
from universal.checkpoint import describe

MODEL = "mp_rank_00_model_states.pt"
# Parameters that divide among no number of ranks, and some smaller than it.
COMMON = ("--n_embd", 36, "--n_head", 3, "--seq_len", 14, "--train_batch_size", 12, "--steps", 3)
COMMON = (*COMMON, "--train_micro_batch_size_per_gpu", 1, "--checkpoint_interval", 3)


# Every stage, both dtypes, every number of ranks; the other combinations are slow.
CASES = [(1, "bf16", 4, frozen_and_buffer(1)), (2, "fp32", 1, None), (3, "bf16", 4, frozen_and_buffer(1))]
CASES += [(3, "fp32", 3, None)]
SLOW = [(stage, dtype, ranks, None) for stage in (1, 2, 3) for dtype in ("fp32", "bf16") for ranks in (1, 3, 4)]
SLOW += [(2, "bf16", 4, frozen_and_buffer(1))]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW if case not in CASES]


@pytest.mark.parametrize("stage, dtype, ranks, variant", CASES)
def test_bit_equal_to_deepspeed(tmp_path, stage, dtype, ranks, variant):
    """Every weight and moment; the hyper-parameters, the loss scale, and all that the model states have but weights."""
    layout = ("--zero_stage", stage, "--dtype", dtype, "--checkpoint_dir", "c")
    run(tmp_path, ranks, "train.py", *COMMON, *layout, patch=variant)
    source, ours = tmp_path / "c" / "global_step3", tmp_path / "ours"
    assert_equal_to_deepspeed(source, tmp_path)
    assert load(ours / "zero" / "wte.weight" / "step.pt").item() == 3
    a, b = (load(tmp_path / name / "zero" / "optimizer_state.pt") for name in ("ours", "theirs"))
    assert vars(a["loss_scaler"]) == vars(b["loss_scaler"]) and type(a["loss_scaler"]) is type(b["loss_scaler"])
    assert a["param_groups"] == b["param_groups"] and a["dynamic_loss_scale"] == b["dynamic_loss_scale"]
    model, original = load(ours / MODEL), load(min(source.glob(f"*{MODEL}")))
    for state in (model, original):
        del state["module"], state["frozen_param_fragments"]
    assert model == original


def test_stores_no_shard(tmp_path):
    """The global state has no tensor but the step, so no rank reads another one's shard again."""
    run(tmp_path, 2, "train.py", *COMMON, "--zero_stage", 3, "--checkpoint_dir", "c")
    universal.convert(tmp_path / "c" / "global_step3", tmp_path / "c" / "u")
    folder = tmp_path / "c" / "u"
    assert (folder / "zero" / "optimizer_state.pt").stat().st_size < 10_000
    shapes = load(folder / "mp_rank_00_model_states.pt")["param_shapes"]
    size = sum(math.prod(shape) for group in shapes for shape in group.values())
    stored = sum(path.stat().st_size for path in (folder / "zero").rglob("*.pt"))
    files = len(list((folder / "zero").rglob("*.pt")))
    assert 3 * 4 * size < stored < 3 * 4 * size + 2500 * files


@pytest.fixture(scope="module")
def checkpoint(work):
    run(work, 2, "train.py", *COMMON, "--checkpoint_dir", "converter")
    return work / "converter" / "global_step3"


@pytest.mark.parametrize("name", ["a[b]", "run+1", "with space", "trailing/"])
def test_any_folder_name(tmp_path, checkpoint, name):
    """No character in a path means anything, and a trailing slash changes nothing."""
    universal.convert(f"{checkpoint}/", f"{tmp_path}/{name}")
    name = name.strip("/")
    assert (tmp_path / "latest_universal").read_text() == name
    assert len(list((tmp_path / name / "zero").rglob("exp_avg.pt"))) == 28
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "latest_universal"])


def test_replaces_a_universal_checkpoint_and_nothing_else(tmp_path, checkpoint):
    """A second conversion replaces the first whole; another folder is left as it is, the source too."""
    output = tmp_path / "u"
    universal.convert(checkpoint, output)
    (output / "zero" / "left over").mkdir()
    universal.convert(checkpoint, output)
    assert not (output / "zero" / "left over").exists()
    before = sorted(path.name for path in checkpoint.iterdir())
    for taken in (checkpoint, tmp_path, "/"):
        with pytest.raises(universal.CheckpointError, match="is not a universal checkpoint"):
            universal.convert(checkpoint, taken)
    assert sorted(path.name for path in checkpoint.iterdir()) == before


def test_latest_universal_is_a_folder(tmp_path, checkpoint):
    (tmp_path / "latest_universal").mkdir()
    with pytest.raises(universal.CheckpointError, match="latest_universal is a folder"):
        universal.convert(checkpoint, tmp_path / "u")
    assert [path.name for path in tmp_path.iterdir()] == ["latest_universal"]


@pytest.mark.parametrize("damage", ["missing", "truncated", "empty"])
def test_broken_source(tmp_path, checkpoint, damage):
    """Each file of the source in turn: one line that names it, and nothing appears."""
    source = tmp_path / "source"
    for victim in sorted(checkpoint.glob("*.pt")):
        source.mkdir()
        for path in checkpoint.glob("*.pt"):
            (source / path.name).write_bytes(path.read_bytes())
        path = source / victim.name
        if damage == "missing":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2 if damage == "truncated" else 0])
        with pytest.raises(universal.CheckpointError) as error:
            universal.convert(source, tmp_path / "u")
        assert victim.name in str(error.value) and "\n" not in str(error.value)
        for path in source.iterdir():
            path.unlink()
        source.rmdir()
        assert list(tmp_path.iterdir()) == []


def test_command_line(tmp_path, checkpoint, capfd, monkeypatch):
    """DeepSpeed's flags; one line of figures, or one line of error and exit code 2."""
    flags = ["--num_extract_workers", "4", "--num_merge_workers", "4", "--inject_missing_state"]
    command = ["ds_to_universal.py", "--input_folder", f"{checkpoint}/", "--output_folder", str(tmp_path / "u"), *flags]
    monkeypatch.setattr("sys.argv", command)
    ds_to_universal.main()
    assert "28 parameters" in capfd.readouterr().out
    monkeypatch.setattr("sys.argv", [command[0], "--input_folder", str(tmp_path / "no"), *command[3:]])
    with pytest.raises(SystemExit) as stop:
        ds_to_universal.main()
    assert stop.value.code == 2
    assert capfd.readouterr().err == f"ds_to_universal.py: error: {Path(tmp_path / 'no')} does not exist\n"


def test_map():
    """The rooms stand where the map at the top of the file says, and their entries are in them."""
    text = Path(ds_to_universal.__file__).read_text()
    lines, rooms = text.splitlines(), re.findall(r"^ +(\d+) to (\d+) +(\d)\. .*? {2,}(\S.*)$", text, re.M)
    starts = [number for number, line in enumerate(lines, 1) if re.match(r"# \d\. ", line)]
    assert [int(first) for first, *_ in rooms] == starts
    assert [int(last) for _, last, *_ in rooms] == [start - 2 for start in starts[1:]] + [len(lines)]
    for first, last, number, entries in rooms:
        room = lines[int(first) - 1 : int(last)]
        assert room[0].startswith(f"# {number}. ")
        assert all(any(line.startswith(f"def {name}(") for line in room) for name in re.findall(r"\w+", entries))


class TestZero3Before0193:
    """The universal loader of ZeRO-3 takes torch.load(path).view(-1), and since 0.19.3 the "param" of a dict, too."""

    @staticmethod
    def files(folder):
        return {path.relative_to(folder): load(path) for path in (folder / "zero").rglob("*.pt")}

    @pytest.mark.parametrize("stage", [1, 3])
    def test_writes_the_tensors_themselves(self, stage, tmp_path, laid_out):
        universal.convert(laid_out(stage), tmp_path / "u")
        command = [sys.executable, ROOT / "ds_to_universal.py", "--input_folder", laid_out(stage)]
        command += ["--output_folder", tmp_path / "bare", "--zero3_before_0_19_3", "--verify"]
        subprocess.run(command, check=True, timeout=60)
        usual, bare = self.files(tmp_path / "u"), self.files(tmp_path / "bare")
        assert usual.keys() == bare.keys()
        states = [path for path, content in usual.items() if isinstance(content, dict) and "param" in content]
        assert len(states) == 3 * 3
        for path in states:
            assert same_bits(bare[path], usual[path]["param"])
        described = describe(tmp_path / "bare")
        assert {name: p.shape for name, p in described.parameters.items()} == {"a": (5, 3), "b": (7,), "c": (4,)}

    @pytest.mark.parametrize(
        "stage, version, named, warns",
        [
            (3, "0.16.9", False, True),
            (3, "0.19.2+git1a2b3c", False, True),
            (3, "0.19.3", False, False),
            (3, "0.20.0", False, False),
            (3, "0.16.9", True, False),
            (2, "0.16.9", False, False),  # those loaders take a dict
        ],
    )
    def test_warns_where_the_loader_cannot_read_it(self, stage, version, named, warns, tmp_path, checkpoint_with):
        source = checkpoint_with(stage, version)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            universal.convert(source, tmp_path / "u", zero3_before_0_19_3=named)
        texts = [str(one.message) for one in caught if "--zero3_before_0_19_3" in str(one.message)]
        assert len(texts) == warns and all(f"DeepSpeed {version}," in text for text in texts)


@pytest.fixture
def checkpoint_with(tmp_path, laid_out):
    """checkpoint_with(stage, version): a copy that says it was saved by that version of DeepSpeed."""

    def make(stage, version):
        shutil.copytree(laid_out(stage), tmp_path / "c")
        edit(tmp_path / "c", "*_model_*", lambda model: model.update(ds_version=version))
        return tmp_path / "c"

    return make
