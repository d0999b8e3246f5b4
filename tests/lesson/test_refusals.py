"""A user's mistake: one clear line on standard error from one rank, exit code 2, and nothing written or lost."""

import shutil

import deepspeed
import pytest
import torch
from helpers import fp16_is

import universal
from harness.ranks import launch, run
from universal import elastic, exact

COMMON = (
    "--n_embd",
    32,
    "--seq_len",
    16,
    "--train_batch_size",
    24,
    "--train_micro_batch_size_per_gpu",
    6,
    "--steps",
    3,
)
UNIVERSAL = ("--resume", "--universal_checkpoint", "--checkpoint_tag", "global_step3_universal")
ORDINARY = ("--resume", "--checkpoint_tag", "global_step3")


@pytest.fixture(scope="module")
def trained(work):
    folder = work / "refusals"
    folder.mkdir()
    run(folder, 2, "train.py", *COMMON, "--checkpoint_dir", "c", "--checkpoint_interval", 3)
    universal.convert(folder / "c" / "global_step3", folder / "c" / "global_step3_universal")
    (folder / "short.txt").write_text("too short to cut a tenth off it")
    (folder / "other.txt").write_text("another text. " * 1000)
    return folder


def everything(folder):
    return {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in folder.rglob("*") if p.is_file() and p.name[0] != "."}


def refused(folder, ranks, *arguments, started=1):
    """Rank 0 refuses before it meets the others: they need not run, unless it is to be seen that they keep quiet."""
    before = everything(folder)
    command = ("train.py", *COMMON, "--checkpoint_dir", "c", "--run_name", "refused", *arguments)
    result = launch(folder, ranks, *command, patch=fp16_is(False), started=started, limit=60)
    assert result.code == 2, result.out + result.errors
    assert result.out == "" and result.errors.count("\n") == 1 and result.errors.startswith("train.py: error: ")
    assert everything(folder) == before and not (folder / "logs" / "refused.csv").exists()
    return result.errors


@pytest.mark.parametrize(
    "ranks, arguments, words",
    [
        (2, ("--resume", "--checkpoint_tag", "no"), ["c/no does not exist", "global_step3, global_step3_universal"]),
        (2, (*ORDINARY, "--universal_checkpoint"), ["global_step3 is an ordinary ZeRO checkpoint"]),
        (
            2,
            UNIVERSAL[:1] + UNIVERSAL[2:],
            ["global_step3_universal is a universal checkpoint: add --universal_checkpoint"],
        ),
        (
            1,
            ORDINARY,
            [
                "cut for 2 ranks at ZeRO-1, and these are 1 rank at",
                "python ds_to_universal.py --input_folder c/global_step3",
            ],
        ),
        (4, ORDINARY, ["cut for 2 ranks at ZeRO-1, and these are 4 ranks"]),
        (2, (*ORDINARY, "--zero_stage", 3), ["cut for 2 ranks at ZeRO-1, and these are 2 ranks at ZeRO-3"]),
        (3, UNIVERSAL, ["micro-batches of 6 on 3 ranks", "_size 18 or 36; ", "_per_gpu 4 or 8; ", "2 or 4 ranks"]),
        (6, ("--train_batch_size", 256, "--train_micro_batch_size_per_gpu", 8), ["_size 240 or 288; 4 or 8 ranks"]),
        (2, ("--train_micro_batch_size_per_gpu", 30), ["_size 60; --train_micro_batch_size_per_gpu 12"]),
        (2, (*UNIVERSAL, "--n_layer", 3), ["n_layer is 2", "3 here"]),
        (2, (*UNIVERSAL, "--n_embd", 64), ["n_embd is 32", "64 here"]),
        (2, (*UNIVERSAL, "--seed", 1), ["seed is 1337", "1 here"]),
        (2, (*UNIVERSAL, "--train_batch_size", 48), ["train_batch_size is 24", "48 here"]),
        (2, (*UNIVERSAL, "--train_micro_batch_size_per_gpu", 3), ["train_micro_batch_size_per_gpu is 6", "3 here"]),
        (2, (*UNIVERSAL, "--dtype", "bf16"), ["dtype is fp32", "bf16 here"]),
        (2, (*UNIVERSAL, "--steps", 30), ["steps is 3", "30 here"]),
        (2, (*UNIVERSAL, "--data", "other.txt"), ["data is ", "(14000 bytes) here"]),
        (2, ("--data", "short.txt"), ["--data: short.txt has 31 bytes, 180 are needed"]),
        (2, ("--data", "missing.txt"), ["--data: ", "missing.txt"]),
        (2, ("--data", "."), ["--data: ", "Is a directory"]),
        (2, ("--dtype", "fp16"), ["--dtype fp16 does not run on this cpu"]),
        (2, ("--exact", "--dtype", "bf16"), ["--exact needs --dtype fp32"]),
        (2, (*UNIVERSAL, "--exact"), ["exact is False", "True here"]),
        (2, (*ORDINARY, "--tensor_parallel", 2), ["and these are 2 ranks = 1 DP x 2 TP x 1 SP"]),
        (3, ("--tensor_parallel", 2), ["3 ranks do not divide by --tensor_parallel 2 x --sequence_parallel 1"]),
        (3, ("--tensor_parallel", 3), ["--n_head 4 does not divide by --tensor_parallel 3 x"]),
        (2, ("--sequence_parallel", 2, "--seq_len", 15), ["--seq_len 15 does not divide by --sequence_parallel 2"]),
        (2, ("--tensor_parallel", 2, "--exact"), ["--exact is for data parallelism"]),
        (2, ("--n_head", 5), ["--n_embd 32 does not divide into --n_head 5 heads"]),
        (2, ("--steps", 0), ["--steps", "at least 1"]),
        (2, ("--zero_stage", 0), ["--zero_stage", "invalid choice"]),
        (2, ("--checkpoint_dir", "nowhere", "--resume"), ["nowhere/latest does not exist"]),
    ],
)
def test_refused(trained, ranks, arguments, words):
    line = refused(trained, ranks, *arguments)
    for word in words:
        assert word in line, line


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--steps", 0), "at least 1"),  # all ranks complain
        (("--data", "missing.txt"), "missing.txt"),
        (("--resume", "--checkpoint_tag", "no"), "c/no does not exist"),
        (("--resume", "--checkpoint_tag", "torn"), "optim_states.pt is truncated"),  # rank 0 looks at the shards
    ],
)
def test_one_rank_speaks(trained, tmp_path, arguments, word):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    shutil.copytree(tmp_path / "c" / "global_step3", tmp_path / "c" / "torn")
    for path in (tmp_path / "c" / "torn").glob("zero_pp_rank_1_*"):
        path.write_bytes(path.read_bytes()[:1000])
    assert word in refused(tmp_path, 2, *arguments, started=2)


def test_modules_do_not_read_the_rank(trained):
    """The ranks are forked from here, where they are imported and there is no rank yet."""
    import launch  # noqa: F401
    import parallel  # noqa: F401

    assert "these are 4 ranks at ZeRO-1" in refused(trained, 4, *ORDINARY)


def test_what_is_too_old(trained, monkeypatch):
    """Each of the files that need one says so."""
    monkeypatch.setattr(deepspeed, "__version__", "0.16.3+cpu")
    assert "needs DeepSpeed 0.16.4 or newer, and finds 0.16.3+cpu" in refused(trained, 2)
    with pytest.raises(ValueError, match=r"exact\.py needs DeepSpeed 0\.16\.4 or newer, and finds 0\.16\.3"):
        exact.install(None)
    monkeypatch.setattr(torch, "__version__", "2.5.1+cpu")
    with pytest.raises(ValueError, match=r"elastic\.py needs torch 2\.6 or newer, and finds 2\.5\.1"):
        elastic.enlist(1, 1)


@pytest.mark.parametrize("resume", [ORDINARY, UNIVERSAL], ids=["ordinary", "universal"])
def test_any_name_of_a_folder(trained, tmp_path, resume):
    """Braces are what str.format() fills in."""
    name = "{a} {0}"
    shutil.copytree(trained / "c", tmp_path / name)
    out = run(tmp_path, 2, "train.py", *COMMON, "--checkpoint_dir", name, *resume)
    assert f"resumed from {name}/{resume[-1]}: 2 ranks" in out


@pytest.mark.parametrize("resume", [ORDINARY, UNIVERSAL], ids=["ordinary", "universal"])
@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_every_file_of_a_checkpoint(trained, tmp_path, resume, damage):
    """Each file that a resume needs, one after the other, missing and truncated: the line names it."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "c" / resume[-1]
    victims = sorted(folder.glob("*.pt"))
    if resume is UNIVERSAL:  # one of its two names is enough: both are the same file
        victims = [folder / "zero_pp_rank_0_mp_rank_00_model_states.pt", folder / "zero" / "optimizer_state.pt"]
        victims += sorted((folder / "zero" / "wte.weight").iterdir()) + [folder / "zero" / "ln_f.bias" / "exp_avg.pt"]
    for victim in victims:
        content = victim.read_bytes()
        victim.unlink()
        if damage == "truncated":
            victim.write_bytes(content[: len(content) * 2 // 3])
        elif victim.name.startswith("zero_pp_rank_0_mp_rank_00_model"):
            (folder / "mp_rank_00_model_states.pt").unlink()
            assert "mp_rank_00_model_states.pt is missing" in refused(tmp_path, 2, *resume)
            (folder / "mp_rank_00_model_states.pt").write_bytes(content)
            victim.write_bytes(content)
            continue
        line = refused(tmp_path, 2, *resume)
        assert str(victim.relative_to(tmp_path)) in line and damage in line, line
        victim.write_bytes(content)
