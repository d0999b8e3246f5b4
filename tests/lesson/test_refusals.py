"""A user's mistake: one clear line on standard error from one rank, exit code 2, and nothing
written or lost."""

import sys
import time
from pathlib import Path

import deepspeed
import pytest
import torch

import train
import universal
from tests.support.commands import is_rank
from tests.support.helpers import refused
from tests.support.ranks import launch, run


@pytest.fixture
def refusal(tmp_path, monkeypatch):
    """refusal(script, ranks, arguments): what rank 0 says of them before it makes an engine; in
    this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(universal, "install", lambda: None)
    monkeypatch.setattr(deepspeed, "init_distributed", lambda: None)
    monkeypatch.setattr(deepspeed.accelerator.get_accelerator(), "is_fp16_supported", lambda: False)
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", lambda objects: None)
    monkeypatch.setattr(torch, "manual_seed", lambda seed: pytest.fail("not refused"))
    return lambda script, ranks, arguments: refused(monkeypatch, script, ranks, arguments.split())


TP = "--tensor_parallel"
PP = "--pipeline_parallel"
SP = "--sequence_parallel"
NO_LAUNCHER = "start it with a launcher: deepspeed --num_gpus 4, or torchrun --nproc-per-node 4"
NOT_WHOLE = "a batch of 256 does not divide into micro-batches of 7"
REFUSED = {
    "train.py": [
        (0, "", NO_LAUNCHER),
        (3, "--train_micro_batch_size_per_gpu 7", NOT_WHOLE),
        (2, "--n_head 5", "--n_embd 64 does not divide into --n_head 5 heads"),
        (2, "--checkpoint_interval 0", "--checkpoint_interval is 0, and must be at least 1"),
        (2, "--warmup_steps 0", "--warmup_steps is 0, and must be at least 1"),
        (2, "--steps many", "--steps: invalid int value: 'many'"),
        (2, "--zero_stage 0", "--zero_stage: invalid choice"),
        (2, "--dtype fp16", "--dtype fp16 does not run on this device"),
        (2, "--data missing.txt", "--data: missing.txt is not a file of 340 bytes or more"),
        (2, "--data .", "--data: . is not a file of 340 bytes or more"),
        (2, "--data short.txt", "--data: short.txt is not a file of 340 bytes or more"),
    ],
    "examples.train_elastic": [
        (2, "--elastic --resume", "leave out --resume"),
        (2, "--elastic --train_micro_batch_size_per_gpu 7", NOT_WHOLE),
        (0, "--elastic", "start it with a launcher"),
        (2, "--mirror 1", "--mirror is for --elastic"),
        (2, "--keep 0", "--keep: must be at least 1, not 0"),
        (2, "--exact --dtype bf16", "--exact needs --dtype fp32: sums in bf16 have too few bits"),
        (2, "--exact --offload", "--exact does not go with --offload"),
    ],
    "examples.train_tp_sp": [
        (3, f"{TP} 3", f"--n_head 4 does not divide by {TP} 3 x {SP} 1"),
        (2, f"{SP} 2 --seq_len 15", f"--seq_len 15 does not divide by {SP} 2"),
        (2, f"{TP} 4 --elastic", "2 ranks do not divide by 4"),
    ],
    "examples.train_3d": [
        (3, f"{PP} 2", "3 ranks do not divide by 2"),
        (3, f"{PP} 3", f"{PP} 3 stages want at least as many layers, not 2"),
        (3, f"{TP} 3", f"--n_head 4 does not divide by {TP} 3"),
        (1, "--zero_stage 2", "DeepSpeed's pipelines go with --zero_stage 1, not 2"),
    ],
}


@pytest.mark.parametrize(
    "script, ranks, arguments, words",
    [(script, *row) for script in REFUSED for row in REFUSED[script]],
)
def test_argument(refusal, script, ranks, arguments, words):
    Path("short.txt").write_text("too short to cut a tenth off it")
    assert words in refusal(script, ranks, arguments)


CHANGES = (
    "n_layer 3,n_head 2,n_embd 32,seq_len 16,dropout 0.2,seed 0,dtype bf16,lr 0.1,warmup_steps 9,"
    "steps 300,train_batch_size 128,train_micro_batch_size_per_gpu 32,data other.txt"
).split(",")


def described(*arguments):
    """What a resume must have in common with a run of these arguments."""
    args = train.argument_parser().parse_args(arguments)
    return train.describe_run(args, train.load_text(args.data, args.seq_len)[2])


@pytest.mark.parametrize("change", CHANGES)
def test_another_run(refusal, change):
    """What a resumed run must have in common with the first is named, before any work is done."""
    name, value = change.split()
    Path("other.txt").write_text("another text. " * 1000)
    run_before = described()
    Path("c/tag").mkdir(parents=True)
    torch.save({"run": run_before}, "c/tag/mp_rank_00_model_states.pt")
    flags = f"--resume --checkpoint_dir c --checkpoint_tag tag --{name} {value}"
    line = refusal("train.py", 2, flags)
    assert f"--{name} was {run_before[name]} in c/tag, and is " in line
    assert "here: the loss would leave its curve. Give it the old value" in line
    assert name == "data" or f"{value} here" in line


def test_another_micro_batch(refusal):
    """Dropout draws its masks by the micro-batch; without dropout, its size is free."""
    for dropout, tracked in ((0.1, True), (0.0, False)):
        run_here = described("--dropout", str(dropout))
        assert ("train_micro_batch_size_per_gpu" in run_here) == tracked


SIZE = (
    "--n_embd 32 --seq_len 16 --train_batch_size 24 --train_micro_batch_size_per_gpu 6 --steps 2"
).split()


def test_machines_with_different_text(work):
    """The rank that has another text than rank 0 says so, in the time that it leaves to rank 0."""
    (work / "other.txt").write_text("another text. " * 1000)

    def on_two_machines():
        time.sleep = lambda seconds: None
        if is_rank(1):
            sys.argv += ["--data", "other.txt"]

    result = launch(work, 2, "train.py", *SIZE, "--run_name", "apart", patch=on_two_machines)
    assert result.codes[1] == 2 and not (work / "logs" / "apart.csv").exists()
    (line,) = result.errors.splitlines()
    assert line.startswith("train.py: error: rank 1: --data was ") and " in rank 0, and is " in line


def written(folder):
    """Every file, but for hidden ones, with when it was written and its size."""
    return {
        path: (path.stat().st_mtime_ns, path.stat().st_size)
        for path in folder.rglob("*")
        if path.is_file() and path.name[0] != "."
    }


def test_one_rank_speaks(work):
    """All ranks have the same complaint, and rank 0 tells it; whatever was written before is as it
    was."""
    run(work, 2, "train.py", *SIZE, *"--checkpoint_dir c --checkpoint_interval 2".split())
    before = written(work)
    for flags, words in (
        # Which tag, the loader finds out.
        ("--seed 1", "--seed was 1337 in c/global_step2, and is 1 here"),
        ("--checkpoint_tag no", "c/no does not exist; in c there is: global_step2"),
        (
            "--checkpoint_dir nowhere",
            "nowhere has no checkpoint; without --resume the run begins at step 1",
        ),
    ):
        resume = f"--checkpoint_dir c --resume --run_name refused {flags}".split()
        result = launch(work, 2, "train.py", *SIZE, *resume, limit=100)
        assert result.code == 2 and written(work) == before, result.errors
        (line,) = (line for line in result.errors.splitlines() if "error" in line)
        assert line.startswith(f"train.py: error: {words}")
