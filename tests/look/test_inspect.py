"""What is in a folder of checkpoints, `python -m universal.inspect`: what a resume would take, what
is wrong and in which file, the batch, and how other ranks keep it; without torch."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support import ROOT
from tests.support.commands import command, failed, no_permission, run_python
from tests.support.files import (
    MODEL,
    SHAPES,
    data_of,
    each_state,
    edit,
    flip,
    records,
    with_bit_flipped,
)
from tests.support.lay_out import lay_out
from universal import CheckpointError, convert, inspect
from universal.advice import advice_on_batch
from universal.batch.saved import BATCH_KEYS, batch_of
from universal.batches import Share
from universal.checkpoint.describe import check_present, describe
from universal.files import torch_file
from universal.inspect import lines_of, look
from universal.write.console import short

NUMEL = 5 * 3 + 7 + 4
CONFIG = {
    "train_batch_size": 24,
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "scheduler": {"type": "WarmupLR"},
}


def inspected(*words, **options):
    return command(inspect.main, *words, **options)


def add_more(model):
    """What a script, and modules, put beside the rest: a frozen parameter among it."""
    model |= {"ds_config": CONFIG, "note": "x", "epoch": 3, "global_samples": 2400}
    model["module"]["calls"] = torch.zeros(3, dtype=torch.int64)
    model["buffer_names"] = ["calls"]
    model["module"]["frozen"] = torch.zeros(2, 5)


@pytest.fixture(params=[1, 3])
def source(request, laid_out):
    return laid_out(request.param, add_more)


def facts_in(folder, **options):
    """The facts of the one checkpoint there."""
    (found,) = look(folder, **options)["tags"].values()
    return found


def test_facts(source, tmp_path):
    """Of a ZeRO checkpoint, and of what it converts into: what was put into it."""
    stage = 3 if list(source.glob("zero_pp_rank_1_mp_rank_00_model_states.pt")) else 1
    convert(source, tmp_path / "u")
    found = facts_in(source)
    group = {"rate": 1e-4, "decay": 0.1}
    assert (
        found.items()
        >= {
            "step": 100,
            "kind": f"ZeRO-{stage}, 2 ranks",
            "deepspeed": "0.19.8",
            "batch": {"samples": 24, "micro": 2, "doubt": ""},
            "optimizer": "AdamW",
            "states": ["fp32", "exp_avg", "exp_avg_sq"],
            "groups": [group, group | {"decay": 0.0}],
            "tensors": 3,
            "elements": NUMEL,
            "client_state": ["epoch", "note"],
            "client_signs": [],
            "own_ranks_only": None,
        }.items()
    )
    of_universal = facts_in(tmp_path / "u")
    assert of_universal == found | {"kind": "universal"}


def test_command(source):
    """One screen of 100 columns for people, and what look() returns as JSON; nothing on standard
    error."""
    done = inspected(source)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 100
    for words in (
        "DeepSpeed 0.19.8",
        "24 in micro-batches of 2\n",
        "epoch, note",
        "rate 0.0001, decay 0.1",
        "26 trained (3 tensors)",
        "next steps  none\n",
        "any number of ranks",
    ):
        assert words in done.out, words
    assert json.loads(inspected(source, "--json").out) == look(source)


def test_a_reader_who_stops_early(laid_out):
    """As `head` does: no word of it."""
    line = f"{sys.executable} -m universal.inspect {laid_out(1)} | true"
    done = subprocess.run(line, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""


# --------------------------------------------------------------------------------------------------
# damage


def test_damage(source):
    """Named in one line, and exit code 2. --quick does not see a bit of a tensor, and sees a file
    that is cut off."""
    (path,) = source.glob("*rank_1*_optim_*.pt")
    flip(path)
    done = inspected(source)
    said = " ".join(done.out.split())
    assert done.code == 2 and f"DAMAGED: {path} is damaged: data/" in said, done.out
    assert "a resume would fail" in done.out
    assert inspected(source, "--quick").code == 0
    os.truncate(path, path.stat().st_size // 2)
    done = inspected(source, "--quick")
    assert done.code == 2 and str(path) in done.out and "a resume would fail" in done.out


@pytest.mark.parametrize("universal", [False, True])
def test_every_record(source, tmp_path, universal):
    """One bit of any record of any file is seen."""
    if universal:
        convert(source, tmp_path / "u")
        source = tmp_path / "u"
        (source / f"zero_pp_rank_0_{MODEL}").unlink()  # a second name
    seen = 0
    for path in source.rglob("*.pt"):
        before = path.read_bytes()
        for record in records(path, part="/"):
            position = data_of(before, record) + record.file_size - 1
            path.write_bytes(with_bit_flipped(before, position))
            found = facts_in(source)
            assert str(path) in str([found["problem"], found["unread_damage"]]), record.filename
            seen += 1
        path.write_bytes(before)
    assert seen > 30 and not facts_in(source)["problem"]


def test_a_weight_that_a_resume_does_not_read(laid_out):
    """At ZeRO-1 the weights in the model states are copies of the masters: exit code 2, and a
    resume takes the checkpoint all the same."""
    source = laid_out(1, add_more)
    (weight,) = (record for record in records(source / MODEL) if record.file_size == 2 * 15)
    flip(source / MODEL, weight)
    done = inspected(source)
    assert done.code == 2 and "a resume takes c" in done.out
    assert "complete, but for what no resume reads:\n" in done.out
    assert f"{source / MODEL} is damaged: data/" in " ".join(done.out.split())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_of_different_steps(laid_out, dtype):
    """Where nothing counts steps, and the files are of two times, the weights are compared with the
    masters, in whatever order they are stored. In one save a script may have set them."""
    masters = []

    def change(shard):
        each_state(lambda state: state.pop("step"))(shard)
        masters.extend(shard["optimizer_state_dict"]["single_partition_of_fp32_groups"])

    source = laid_out(1, shard=change, shapes=[{"a": torch.Size((4, 3, 2, 2))}])
    weight = torch.cat(masters)[:48].view(4, 3, 2, 2).to(dtype)
    other = weight + torch.eye(48, dtype=dtype)[0].view_as(weight)
    for stored in (weight, weight.contiguous(memory_format=torch.channels_last), other):
        edit(source, MODEL, lambda model, stored=stored: model["module"].update(a=stored))
        assert facts_in(source)["problem"] is None
        os.utime(min(source.glob("*_optim_states.pt")), (0, 0))
        problem = facts_in(source)["problem"]
        assert (problem is None) == (stored is not other)
        os.utime(min(source.glob("*_optim_states.pt")))
    assert "are of different steps" in problem


def test_without_permission(laid_out, tmp_path):
    """A line with the path: a resume ends with it, too, and takes no other checkpoint."""
    source = laid_out(1)
    shutil.copytree(source, tmp_path / "other")
    tmp_path.chmod(0o755)
    (path,) = source.glob("*rank_1*")
    path.chmod(0)
    done = inspected(tmp_path, before=no_permission)
    failed(done, 2, "universal.inspect: error: ", f"Permission denied: '{path}")


# --------------------------------------------------------------------------------------------------
# several tags


def test_what_a_resume_takes(laid_out, tmp_path):
    """The newest whole one, as load_checkpoint() tries them; --tag looks at one alone."""
    run = tmp_path / "run"
    run.mkdir()
    source = laid_out(1).rename(run / "c")
    other = shutil.copytree(source, run / "other")
    (run / "latest").write_text("c")
    assert look(run)["takes"] == "c"
    (shard,) = source.glob("*rank_1_*optim*")
    shard.unlink()
    done = inspected(run)
    assert done.code == 2 and f"{shard} is missing" in " ".join(done.out.split())
    assert "a resume takes other\n" in done.out
    assert inspected(run, "--tag", "other").code == 0
    assert inspected(run, "--tag", "c").code == 2
    # A checkpoint is a folder, too; and Trainer's output has one folder of them for each.
    assert look(other)["takes"] == "other"
    output = tmp_path / "output"
    for number in (9, 10, 8):
        (output / f"checkpoint-{number}").mkdir(parents=True)
        (output / f"checkpoint-{number}" / "latest").touch()
        os.utime(output / f"checkpoint-{number}" / "latest", (number, number))
    with pytest.raises(CheckpointError, match=f"look at {output}/checkpoint-10, the newest"):
        look(output)


def test_all_that_is_missing_is_named(tmp_path):
    paths = {0: tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt"}
    named = "zero_pp_rank_1_.* is missing, as are those of ranks 2, 3: .* copy them from there"
    with pytest.raises(CheckpointError, match=named):
        check_present(tmp_path, paths, 4)


def test_there_is_none(tmp_path):
    for words in ((tmp_path,), (tmp_path / "absent",), (tmp_path, "--tag", "s1")):
        failed(inspected(*words), 2, "universal.inspect: error: ", "holds no checkpoint")


def test_saved_without_zero(laid_out):
    """No damage: it says what it is, and where it goes on."""
    source = laid_out(1, model=lambda model: model.update(param_shapes=None))
    for shard in source.glob("*_optim_*"):
        shard.unlink()
    done = inspected(source.parent)
    assert done.code == 0 and "a resume takes c\n" in done.out
    assert "* c: " in done.out and "was saved without ZeRO: resume it without ZeRO" in done.out
    flip(source / MODEL)
    done = inspected(source.parent)
    assert done.code == 2 and "a resume would fail\n" in done.out and "DAMAGED" in done.out


# --------------------------------------------------------------------------------------------------
# the batch, and how other ranks keep it


def test_settings(source):
    """What to paste, in words, ends the screen; what has saved comes first."""
    lines = inspected(source, "--ranks", 5).out.split("\n\n")[-1]
    assert lines.endswith("".join(f"\n  {cure}" for cure in advice_on_batch(24, 2)) + "\n")
    assert str(Share(24, 2, 5)) in " ".join(lines.split())
    edit(source, "*_model_*", lambda model: model.update({"pytorch-lightning_version": 2}))
    (_, first, *_) = [*lines_of(look(source), 3)][-len(advice_on_batch(24, 2)) - 1 :]
    assert first.strip().startswith("with Lightning")


class Arguments:
    """What Trainer saves has the same, in a class of TRL's."""

    def __init__(self):
        self.steps_per_generation = 4
        self.gradient_accumulation_steps = 2


def test_trl_alone(source):
    """24 completions make a step, and 48 are made at once."""
    assert "TRL alone" not in inspected(source, "--ranks", 3).out
    torch.save(Arguments(), source.parent / "training_args.bin")
    for ranks, numbers in ((3, (2, 4, 8)), (4, (2, 3, 6)), (24, (1, 1, 2))):
        names = (
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "steps_per_generation",
        )
        micro, accumulation, steps = numbers
        assert (micro * accumulation * ranks, micro * steps * ranks) == (24, 48)
        said = " ".join(inspected(source, "--ranks", ranks).out.split())
        settings = ", ".join(f"{n}={value}" for n, value in zip(names, numbers, strict=True))
        assert f"24 and the 48 completions that are made at once with {settings}, " in said
    said = " ".join(inspected(source, "--ranks", 5).out.split())
    assert (
        "at once on no 5 ranks, but on 1, 2, 3, 4, 6, 8, 12, 24; on any with `UNIVERSAL_BATCH=24"
        in said
    )
    (source.parent / "training_args.bin").write_bytes(b"not what torch saves")
    assert "TRL alone" not in inspected(source, "--ranks", 3).out


BATCHES = {  # what a config names, on 4 ranks: samples, micro, steps, data-parallel ranks
    "all_three": ((24, 2, 3), {}, (24, 2)),
    "batch_alone": ((24, None, None), {}, (24, 6)),
    "micro_alone": ((None, 2, None), {}, (8, 2)),
    "micro_and_steps": ((None, 2, 3), {}, (24, 2)),
    "batch_and_steps": ((24, None, 3), {}, (24, 2)),
    "on_any_ranks": ((None, 2, 3), {"universal_train_batch_size": 20}, (20, 2)),
    "sequence_by_its_name": ((None, 2, 3), {"sequence_parallel_size": 2}, (12, 2)),
    "sequence_without_a_name": ((None, 2, 3), {"samples": 1200.0}, None),
    "repeats_in_the_batch": ((48, 2, None), {"universal_train_batch_size": 24}, (24, 2)),
    "nothing": ((None, None, None), {}, None),
    "words": (("auto", "auto", "auto"), {}, None),
}


@pytest.mark.parametrize("name", BATCHES)
def test_batch(name):
    """The batch by the rules of DeepSpeed's config, or of universal_train_batch_size; ranks that
    share sequences count once, or it is not known."""
    numbers, more, wanted = BATCHES[name]
    config = dict(zip(BATCH_KEYS[1:], numbers, strict=False)) | more
    config = {key: value for key, value in config.items() if value is not None}
    model = {"ds_config": config, "dp_world_size": 4, "global_steps": 100}
    model["global_samples"] = config.pop("samples", None)
    assert batch_of(model) == wanted


def test_a_batch_that_was_not_trained(source):
    """What the config says, and DeepSpeed's count where that says something else."""
    edit(source, "*_model_*", lambda model: model.update(global_samples=2700))
    line = "24 in micro-batches of 2 by its config; 2700 samples in 100 steps are 27 each\n"
    out = inspected(source, "--ranks", 3).out
    advice = " ".join(out.split("\n\n")[-1].split())
    assert line in out and "are 27 each: another batch was trained, too" in advice
    assert "UNIVERSAL_BATCH=BATCH " in advice and "UNIVERSAL_BATCH=24" not in advice


def test_its_own_ranks_only(laid_out):
    """A state that is not cut like the weights."""
    source = laid_out(1, add_more, shard=each_state(lambda state: state.update(rows=torch.ones(3))))
    reason = "its own ranks only: rows of the optimizer is not cut like the weights"
    assert reason in inspected(source).out
    failed(inspected(source, "--ranks", 3), 2, f"it resumes on {reason}")


def test_numbers_of_ranks(laid_out):
    """Whether the optimizer reads them, a load alone can ask."""
    source = laid_out(3, add_more, shard=each_state(lambda state: state.update(d=1.0)))
    edit(source, "*zero_pp_rank_1_*_optim_*", each_state(lambda state: state.update(d=2.0)))
    facts = facts_in(source)
    words = "d of the optimizer differs between ranks 0 and 1: a load on other ranks asks"
    assert facts["own_ranks_only"] is None
    assert any(note.startswith(words) for note in facts["notes"]), facts


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.update(epoch=4),
        lambda model: model["module"].update(calls=torch.ones(3, dtype=torch.int64)),
    ],
    ids=["client_state", "buffer"],
)
def test_what_differs_between_ranks(laid_out, change):
    source = laid_out(3, add_more)
    assert facts_in(source)["notes"] == []
    edit(source, f"zero_pp_rank_1_{MODEL}", change)
    words = "the client states or buffers of its ranks differ: on other ranks all get rank 0's"
    assert facts_in(source)["notes"] == [words]


def test_files_of_ranks_that_are_alike(tmp_path, monkeypatch):
    """They are unpickled once, until one differs, wherever it is; damage in any of them is seen."""
    unpickled = []

    class Counted(torch_file.Unpickler):
        def __init__(self, data, records, file):
            unpickled.append(Path(file.name).name)
            super().__init__(data, records, file)

    monkeypatch.setattr(torch_file, "Unpickler", Counted)
    folder = tmp_path / "c"
    lay_out(folder, SHAPES, 6, 3)
    path = folder / f"zero_pp_rank_4_{MODEL}"
    assert not describe(folder, workers=1).ranks_differ
    assert sum(name.endswith(MODEL) for name in unpickled) <= 3  # rank 0's is read by two
    edit(folder, path.name, lambda model: model.update(epoch=3))
    assert describe(folder, workers=1).ranks_differ
    edit(folder, path.name, lambda model: model.update(epoch=3, global_steps=7))
    with pytest.raises(CheckpointError, match="rank_4_.* has other global_steps"):
        describe(folder)
    lay_out(folder, SHAPES, 6, 3)
    flip(path, records(path, "/data.pkl")[0])
    with pytest.raises(CheckpointError, match="rank_4_"):
        describe(folder)


def test_no_batch(laid_out):
    """Named by no config, or no multiple of the micro-batch: one line, and exit code 2."""
    source = laid_out(1)
    assert "its config does not tell" in inspected(source).out
    failed(inspected(source, "--ranks", 3), 2, "its config names no batch")
    failed(inspected(source, "--ranks", 0), 2, "--ranks 0 is none")
    config = {"train_batch_size": 23, "train_micro_batch_size_per_gpu": 2}
    edit(source, "*_model_*", lambda model: model.update(ds_config=config, global_samples=2300))
    failed(inspected(source, "--ranks", 3), 2, "does not divide into micro-batches of 2")


# --------------------------------------------------------------------------------------------------
# numbers, many ranks, no torch


@pytest.mark.parametrize(
    "number, text",
    [
        (9999, "9999"),
        (10000, "10 k"),
        (999_960, "1 M"),
        (7e15, "7 P"),
        (0.0016749999999999998, "0.001675"),
        (None, "None"),
    ],
)
def test_short(number, text):
    assert short(number) == text


def test_without_torch(source):
    """Nothing of torch, DeepSpeed or numpy is imported; zlib-ng need not be there."""
    code = (
        "import sys; sys.modules['zlib_ng'] = None;"
        "from universal.inspect import look; tags = look(sys.argv[1])['tags'];"
        "import universal.proving.next_steps;"
        "print({'torch', 'deepspeed', 'numpy'} & {*sys.modules});"
        "print([facts['problem'] for facts in tags.values()])"
    )
    done = run_python("-c", code, source)
    assert done.stdout == "set()\n[None]\n", done.stderr
