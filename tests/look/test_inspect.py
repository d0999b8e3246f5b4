"""What is in a folder of checkpoints, `python -m universal.inspect`: the facts, what a resume would
take, what is wrong and in which file, and on how many ranks it goes on; without torch."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import OrderedDict

import pytest
import torch

from tests.support import ROOT
from tests.support.commands import command, failed, no_permission, run_python
from tests.support.files import (
    MODEL,
    data_of,
    each_state,
    edit,
    flip,
    load,
    records,
    with_bit_flipped,
)
from tests.support.lay_out import lay_out
from universal import CheckpointError, convert, inspect
from universal.checkpoint import facts
from universal.checkpoint.describe import describe
from universal.inspect import look
from universal.write import screen

NUMEL = 5 * 3 + 7 + 4
STATES = 3 * 4 * NUMEL  # bytes
CONFIG = {
    "train_batch_size": 24,
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "scheduler": {"type": "WarmupLR"},
}
TRUE = {
    "universal_train_batch_size": 22,
    "train_batch_size": None,
    "gradient_accumulation_steps": 6,
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
    """Of a ZeRO checkpoint, and of what it converts into: what was put into it. At ZeRO-1, where
    DeepSpeed lists no frozen parameters, they are what the optimizer does not hold."""
    stage = 3 if list(source.glob("zero_pp_rank_1_mp_rank_00_model_states.pt")) else 1
    convert(source, tmp_path / "u")
    found = facts_in(source)
    assert found["step"] == 100 and found["stage"] == stage and found["ranks"] == 2
    assert found["layout"] == {"tensor": 1, "pipeline": 1, "sequence": 1, "expert": 1}
    assert (found["dtype"], found["deepspeed"]) == ("bf16", "0.19.8")
    batch = {"samples": 24, "micro": 2, "steps": 6, "ranks": 2, "micro_batches": 12}
    assert found["batch"] == batch
    assert found["trained"] == {"tensors": 3, "elements": NUMEL}
    assert found["frozen"] == {"tensors": 1, "elements": 10}
    assert found["buffers"] == {"tensors": 1, "elements": 3}
    assert found["client_state"] == ["epoch", "note"]
    optimizer = found["optimizer"]
    assert optimizer["type"] == "AdamW" and optimizer["states"] == ["fp32", "exp_avg", "exp_avg_sq"]
    sizes = [(group["tensors"], group["elements"]) for group in optimizer["groups"]]
    assert sizes == [(2, 22), (1, 4)] and optimizer["bytes"] == STATES
    assert [group["weight_decay"] for group in optimizer["groups"]] == [0.1, 0.0]
    assert {group["lr"] for group in optimizer["groups"]} == {1e-4}
    assert found["scheduler"] == {"type": "WarmupLR", "state": {"last_batch_iteration": 100}}
    assert found["bytes"] == sum(path.stat().st_size for path in source.glob("*.pt"))
    of_universal = facts_in(tmp_path / "u")
    assert of_universal["universal"] and not found["universal"]
    assert of_universal["optimizer"].pop("class") is None and optimizer.pop("class")
    differing = {key for key in found if found[key] != of_universal[key]}
    assert differing == {"universal", "bytes", "files"}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_types(laid_out, stage):
    """The stage is that which was saved; files tell bf16 from other dtypes by their names, and the
    weights tell fp16 from fp32."""
    source = laid_out(stage)
    checkpoint = describe(source).checkpoint
    assert checkpoint.stage == stage and checkpoint.cuts_each_parameter == (stage == 3)
    assert checkpoint.layout.dtype == "bf16" and checkpoint.layout.shards == checkpoint.ranks == 2
    layouts = [checkpoint.layout]
    for path in source.glob("bf16_*"):
        torch.save(load(path), path.with_name(path.name.removeprefix("bf16_")))
        path.unlink()
    for dtype in (torch.float16, torch.float32):

        def change(model, dtype=dtype):
            model["module"] = {name: x.to(dtype) for name, x in model["module"].items()}

        edit(source, "*_model_*", change)
        layouts.append(describe(source).checkpoint.layout)
    assert [layout.dtype for layout in layouts] == ["bf16", "fp16", "fp32"]
    assert layouts[1].reads_files_of(layouts[2]) and not layouts[1].reads_files_of(layouts[0])


def test_listed_as_frozen(laid_out):
    """Where DeepSpeed lists them, what else is in the module was added by it."""

    def change(model):
        add_more(model)
        model["frozen_param_shapes"] = {"frozen": torch.Size((2, 5))}
        model["frozen_param_fragments"] = {"frozen": torch.zeros(5)}
        model["module"]["scale"] = torch.ones(6)

    found = facts_in(laid_out(3, change))
    assert found["frozen"]["elements"] == 10 and found["added"]["elements"] == 6


def test_command(source):
    """One screen of 100 columns for people, and the same as JSON; nothing on standard error."""
    done = inspected(source, "--ranks", 5)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 100
    for words in (
        "DeepSpeed 0.19.8",
        "24 = 2 x 6 steps x 2 ranks",
        "epoch, note",
        "rate 0.0001",
        "26 trained (3 tensors), 10 frozen (1 tensor), 3 in buffers (1 tensor)",
    ):
        assert words in done.out, words
    done = inspected(source, "--ranks", 5, "--json")
    assert json.loads(done.out) == json.loads(json.dumps(look(source, ranks=5)))


@pytest.mark.parametrize("command", ["inspect {0}", "diff {0} {0} --json"])
def test_a_reader_who_stops_early(source, command):
    """As `head` does: no word of it."""
    line = f"{sys.executable} -m universal.{command.format(source)} | true"
    done = subprocess.run(line, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""


def test_documented(source):
    """The docstrings have a line for every key of the JSON, and for no other."""
    view = look(source, ranks=5)
    (of_tag,) = view["tags"].values()
    keys = re.findall(r"^    (\w+): ", inspect.__doc__ + facts.__doc__, re.M)
    assert keys == [*view, *of_tag, *view["on_ranks"]]


# --------------------------------------------------------------------------------------------------
# damage


@pytest.mark.parametrize("universal", [False, True])
def test_damage(source, tmp_path, universal):
    """Each file, in turn: named in one line, and exit code 1. --quick does not see a bit of a
    tensor, and sees a file that is cut off."""
    if universal:
        convert(source, tmp_path / "u")
        source = tmp_path / "u"
    assert inspected(source).code == 0
    for path in [*source.rglob("fp32.pt"), *source.glob("*_optim_*.pt")]:
        before = path.read_bytes()
        flip(path)
        done = inspected(source)
        said = " ".join(done.out.split())
        assert done.code == 1 and f"DAMAGED: {path} is damaged: data/" in said, done.out
        assert "a resume takes none" in done.out
        assert inspected(source, "--quick").code == 0
        os.truncate(path, len(before) // 2)
        done = inspected(source, "--quick")
        assert done.code == 1 and str(path) in done.out and "a resume takes none" in done.out
        path.write_bytes(before)
    assert inspected(source).code == 0


def test_every_record(source):
    """One bit of any record of any file is seen; of a file that is read in many spans, too."""
    pytest.MonkeyPatch().setattr(inspect, "SPAN", 16)
    seen = 0
    for path in source.glob("*.pt"):
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
    """At ZeRO-1 the weights in the model states are copies of the masters: exit code 1, and a
    resume takes the checkpoint all the same."""
    source = laid_out(1, add_more)
    (weight,) = (record for record in records(source / MODEL) if record.file_size == 2 * 15)
    flip(source / MODEL, weight)
    done = inspected(source)
    assert done.code == 1 and "a resume takes c" in done.out
    assert "complete, but for damage that a resume does not read:" in done.out
    assert f"{source / MODEL} is damaged: data/" in " ".join(done.out.split())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_of_different_steps(laid_out, dtype):
    """Where nothing counts steps, the weights are compared with the masters of every rank."""

    masters = []  # of both groups, by rank

    def change(shard):
        each_state(lambda state: state.pop("step"))(shard)
        masters.append(shard["optimizer_state_dict"]["single_partition_of_fp32_groups"])

    source = laid_out(1, shard=change)
    first, last = (torch.cat(of_group) for of_group in zip(*masters, strict=True))
    weights = {"a": first[:15].view(5, 3), "b": first[15:22], "c": last[:4]}
    weights = {name: weight.to(dtype) for name, weight in weights.items()}
    edit(source, MODEL, lambda model: model.update(module=weights))
    assert facts_in(source)["problem"] is None

    def add(shard):
        shard["optimizer_state_dict"]["single_partition_of_fp32_groups"][0].add_(0.1)

    edit(source, "*rank_1*_optim_*", add)
    assert "are of different steps" in facts_in(source)["problem"]


@pytest.mark.parametrize("harmed", ["folder", "tag", "file"])
def test_without_permission(laid_out, tmp_path, harmed):
    """A line with the path: of the folder itself exit code 2; of a file 1, and a resume takes no
    other checkpoint."""
    source = laid_out(1)
    if harmed == "file":
        shutil.copytree(source, tmp_path / "other")
    tmp_path.chmod(0o755)
    (path,) = source.glob("*rank_1*")
    target = {"folder": tmp_path, "tag": source, "file": path}[harmed]
    target.chmod(0)
    done = inspected(tmp_path, before=no_permission)
    target.chmod(0o755)
    if harmed == "file":
        assert done.code == 1 and "a resume takes none" in done.out, done
        assert f"Permission denied: '{path}'" in " ".join(done.out.split())
    else:
        failed(done, 2, f"{target} cannot be read: permission denied")


# --------------------------------------------------------------------------------------------------
# several tags


@pytest.fixture
def tags(tmp_path):
    """s1, s2, s3, saved in this order, and `latest`."""
    for tag in ("s1", "s2", "s3"):
        lay_out(tmp_path / tag, [{"a": torch.Size((5, 3))}], 2, 1)
        for path in tmp_path.glob(f"{tag}/*"):
            os.utime(path, (int(tag[1]) * 100, int(tag[1]) * 100))
    (tmp_path / "latest").write_text("s3")
    return tmp_path


def test_what_a_resume_takes(tags):
    """The newest whole one, as load_checkpoint() tries them; --tag looks at one alone."""
    shutil.copytree(tags / "s2", tags / "x")
    assert look(tags)["takes"] == "s3"
    (shard,) = tags.glob("s3/*rank_1_*optim*")
    shard.unlink()
    done = inspected(tags)
    assert done.code == 1 and f"{shard} is missing" in " ".join(done.out.split())
    assert look(tags)["takes"] not in (None, "s3")
    assert inspected(tags, "--tag", "s1").code == 0
    assert inspected(tags, "--tag", "s3").code == 1
    # A checkpoint is a folder, too; and Trainer's output has one folder of them for each.
    assert look(tags / "s1")["takes"] == "s1"
    with pytest.raises(CheckpointError, match="holds no checkpoint, but folders in it do: "):
        look(tags.parent)


def test_a_damaged_latest_is_no_absent_one(tags):
    """What is damaged is not said to be no checkpoint."""
    os.truncate(tags / "s3" / MODEL, 100)
    view = look(tags)
    assert view["takes"] in ("s1", "s2") and not any(
        "no checkpoint" in text for text in view["says"]
    )
    assert "is damaged" in view["tags"]["s3"]["problem"]


def test_left_over(laid_out):
    """Saved again by fewer ranks: the larger shards do not count, and are named."""
    source = laid_out(1)
    (shard,) = source.glob("*rank_1_*optim*")
    left = source / shard.name.replace("rank_1_", "rank_2_")
    shutil.copy(shard, left)
    found = facts_in(source)
    assert found["ranks"] == 2 and found["problem"] is None and left.name in str(found["notes"])
    assert found["files"] == 3


def test_there_is_none(tmp_path):
    for words in ((tmp_path,), (tmp_path / "absent",), (tmp_path, "--tag", "s1")):
        failed(inspected(*words), 2, "universal.inspect: error: ", "holds no checkpoint")
    for words in ((tmp_path, "--ranks", 0), (tmp_path, "--ranks", "x"), ()):
        assert inspected(*words).code == 2


# --------------------------------------------------------------------------------------------------
# where it goes on


def test_any_number_of_ranks(source):
    """1 to twice as many, each with the same batch: steps, efficiency, bytes of states."""
    shares = facts_in(source)["goes_on"]
    assert [share["ranks"] for share in shares] == [1, 2, 3, 4]
    assert [share["steps"] for share in shares] == [12, 6, 4, 3]
    assert [share["nbytes"] for share in shares] == [STATES, STATES // 2, STATES // 3, STATES // 4]
    assert {share["efficiency"] for share in shares} == {1}


@pytest.mark.parametrize("ranks, steps, exact", [(1, 12, 1), (3, 4, 3), (5, 3, 4), (13, 1, 12)])
def test_lines_of_a_config(source, ranks, steps, exact):
    """The batch is kept; where the ranks do not divide it, the key says what it is, and nothing
    calls the product the batch."""
    settings = look(source, ranks=ranks)["on_ranks"]
    assert settings["steps"] == steps and settings["efficiency"] == 12 / (steps * ranks)
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": steps}
    key = "train_batch_size" if ranks == exact else "universal_train_batch_size"
    assert settings["config"] == config | {key: 24}
    lines = inspected(source, "--ranks", ranks).out.split("\n\n")[-1]
    assert ("AnyRanks" in lines) == ("**universal.batches.config(24, 2)" in lines)
    script = "Trainer script or LLaMA-Factory's YAML, with UNIVERSAL_BATCH=24 python -m universal:"
    assert ("AnyRanks" in lines) == (script in lines) == (ranks != exact)
    assert f"per_device_train_batch_size: 2\n    gradient_accumulation_steps: {steps}\n" in lines
    assert f"gradient_accumulation_steps={steps}" in lines and f'"{key}": 24,' in lines


BATCHES = {  # what a config names, on 4 ranks: samples, micro, steps, data-parallel ranks
    "all_three": ((24, 2, 3), {}, (24, 2, 3, 4)),
    "batch_and_micro": ((24, 2, None), {}, (24, 2, 3, 4)),
    "batch_alone": ((24, None, None), {}, (24, 6, 1, 4)),
    "micro_alone": ((None, 2, None), {}, (8, 2, 1, 4)),
    "micro_and_steps": ((None, 2, 3), {}, (24, 2, 3, 4)),
    "batch_and_steps": ((24, None, 3), {}, (24, 2, 3, 4)),
    "on_any_ranks": ((None, 2, 3), {"universal_train_batch_size": 20}, (20, 2, 3, 4)),
    "sequence_by_three": ((12, 2, 3), {}, (12, 2, 3, 2)),
    "sequence_by_two": ((4, 2, None), {}, (4, 2, 1, 2)),
    "sequence_by_its_name": ((None, 2, 3), {"sequence_parallel_size": 2}, (12, 2, 3, 2)),
    "sequence_by_samples": ((None, 2, 3), {"samples": 1200.0}, (12, 2, 3, 2)),
    "parts_taken_for_sequences": ((48, 2, None), {"universal_train_batch_size": 24}, (24, 2, 6, 2)),
    "nothing": ((None, None, None), {}, None),
    "words": (("auto", "auto", "auto"), {}, None),
}


@pytest.mark.parametrize("name", BATCHES)
def test_batch(name):
    """The batch by the rules of DeepSpeed's config, or of universal_train_batch_size; ranks that
    share sequences count once."""
    numbers, more, wanted = BATCHES[name]
    config = dict(zip(facts.BATCH_KEYS, numbers, strict=True)) | more
    config = {key: value for key, value in config.items() if value is not None}
    model = {"ds_config": config, "dp_world_size": 4, "global_steps": 100}
    model["global_samples"] = config.pop("samples", None)
    batch = facts.batch_of(model)
    assert batch == wanted and (batch is None or batch.micro_batches == batch[0] // batch[1])


@pytest.mark.parametrize("key, value", [("global_samples", 2412), ("ds_config", CONFIG | TRUE)])
def test_a_batch_that_the_config_does_not_name(source, key, value):
    """set_train_batch_size() changes it; not so what any number of ranks computes in addition."""
    assert facts_in(source)["notes"] == []
    edit(source, "*_model_*", lambda model: model.update({key: value}))
    words = "its 2412 samples in 100 steps are of others"
    assert [words in note for note in facts_in(source)["notes"]] == [True] * (value == 2412)


def test_its_own_ranks_only(laid_out):
    """A state that is not cut like the weights."""
    add = each_state(lambda state: state.update(rows=torch.ones(3)))
    view = look(laid_out(1, add_more, shard=add), ranks=3)
    (found,) = view["tags"].values()
    assert [share["ranks"] for share in found["goes_on"]] == [2]
    reason = "rows of the optimizer is not cut like the weights"
    assert found["own_ranks_only"] == reason and reason in view["on_ranks"]["problem"]


# --------------------------------------------------------------------------------------------------
# numbers, many ranks, no torch


@pytest.mark.parametrize(
    "number, text",
    [
        (0, "0"),
        (9999, "9999"),
        (10000, "10 k"),
        (34688, "34.69 k"),
        (999_960, "1 M"),
        (123_456_789, "123.5 M"),
        (7e15, "7 P"),
        (0.0016749999999999998, "0.001675"),
        (8.6e-08, "8.6e-08"),
        (True, "True"),
        (None, "None"),
    ],
)
def test_short(number, text):
    assert screen.short(number) == text and len(re.findall(r"\d", text.split("e")[0])) <= 8


def test_many_ranks_fit_on_the_screen(laid_out, tmp_path):
    """64 ranks, 30 tags, long names of keys and files: at most 50 lines of at most 100 columns."""
    names = [f"{'layer.' * 12}{i}" for i in range(12)]
    shapes = [OrderedDict((name, torch.Size((64, 2))) for name in names[i::2]) for i in (0, 1)]
    lay_out(tmp_path / "s1", shapes, 64, 1)
    more = {f"key_{i}": i for i in range(30)} | {"ds_config": CONFIG | {"train_batch_size": 512}}
    edit(tmp_path / "s1", MODEL, lambda model: model.update(more))
    for i in range(30):
        (tmp_path / f"t{i}").mkdir()
        shutil.copy(tmp_path / "s1" / MODEL, tmp_path / f"t{i}")
    done = inspected(tmp_path, "--ranks", 63)
    lines = done.out.splitlines()
    assert done.code == 1 and max(map(len, lines)) <= 100 and len(lines) <= 50, done.out
    assert "512 = 2 x 4 steps x 64 ranks" in done.out and "and 23 more" in done.out
    row = next(line for line in lines if "resumes on" in line)
    assert row.split()[2:] == "1 32 56 60 62 63 64 128 ranks".split()


def test_without_torch(source):
    """Nothing of torch, DeepSpeed or numpy is imported."""
    code = (
        "import sys; from universal.inspect import look; look(sys.argv[1]);"
        "import universal.checkpoint.next_steps;"
        "print({'torch', 'deepspeed', 'numpy'} & {*sys.modules})"
    )
    done = run_python("-c", code, source)
    assert done.stdout == "set()\n", done.stderr
