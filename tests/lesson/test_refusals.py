"""A user's mistake: one clear line on standard error from one rank, exit code 2, and nothing written or lost."""

from pathlib import Path

import deepspeed
import pytest
import torch

import data
import train
from harness.ranks import launch, run


@pytest.fixture
def refusal(tmp_path, monkeypatch, capsys):
    """refusal(ranks, arguments): what rank 0 says of them before it makes an engine, or None; in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "init_distributed", lambda: None)
    monkeypatch.setattr(deepspeed.accelerator.get_accelerator(), "is_fp16_supported", lambda: False)
    monkeypatch.setattr(data.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(data.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(data.dist, "all_gather_object", lambda found, mine: found.__setitem__(slice(2), [mine] * 2))
    monkeypatch.setattr(train.torch, "manual_seed", lambda seed: pytest.fail("not refused"))

    def say(ranks, arguments):
        if ranks:  # a launcher has started it
            monkeypatch.setenv("RANK", "0")
            monkeypatch.setenv("WORLD_SIZE", str(ranks))
        monkeypatch.setattr("sys.argv", ["train.py", *arguments.split()])
        with pytest.raises(SystemExit) as stop:
            args = train.arguments().parse_args()
            train.check_arguments(args)
            train.start(args)
        line = capsys.readouterr().err
        assert stop.value.code == 2 and line.count("\n") == 1 and line.startswith("train.py: error: ")
        return line

    return say


@pytest.mark.parametrize(
    "ranks, arguments, words",
    [
        (0, "", "start it with a launcher: deepspeed --num_gpus 4 train.py, or torchrun --nproc-per-node 4 train.py"),
        (3, "", "micro-batches of 64 on 3 ranks; the nearest that do: --train_batch_size 192 or 384;"),
        (6, "--train_micro_batch_size_per_gpu 8", "--train_batch_size 240 or 288;"),
        (2, "--n_head 5", "--n_embd 64 does not divide into --n_head 5 heads"),
        (2, "--steps 0", "--steps: must be at least 1, not 0"),
        (2, "--zero_stage 0", "--zero_stage: invalid choice"),
        (2, "--tensorboard", "--tensorboard needs its package: pip install tensorboard"),
        (2, "--dtype fp16", "--dtype fp16 does not run on this device"),
        (2, "--data missing.txt", "--data: [Errno 2] No such file or directory: 'missing.txt'"),
        (2, "--data .", "--data: [Errno 21] Is a directory"),
        (2, "--data short.txt", "--data: short.txt has 31 bytes, 340 are needed"),
    ],
)
def test_argument(refusal, ranks, arguments, words):
    Path("short.txt").write_text("too short to cut a tenth off it")
    assert words in refusal(ranks, arguments)


CHANGES = "n_layer 3,n_head 2,n_embd 32,seq_len 16,dropout 0.2,seed 0,dtype bf16,lr 0.1,warmup_steps 9,steps 300"
CHANGES += ",train_batch_size 128,train_micro_batch_size_per_gpu 32,data other.txt"


@pytest.mark.parametrize("change", CHANGES.split(","))
def test_another_run(refusal, change):
    """What a resumed run must have in common with the first is named, before any work is done."""
    name, value = change.split()
    Path("other.txt").write_text("another text. " * 1000)
    args = train.arguments().parse_args([])
    _, run_before = data.load_run(args)
    Path("c/tag").mkdir(parents=True)
    torch.save({"run": run_before}, "c/tag/mp_rank_00_model_states.pt")
    line = refusal(2, f"--resume --checkpoint_dir c --checkpoint_tag tag --{name} {value}")
    assert f"{name} is {run_before[name]} in c/tag and " in line and "here: the loss would not go on alike" in line
    assert name == "data" or f"{value} here" in line


def test_another_micro_batch(refusal):
    """Dropout draws its masks by the micro-batch; without dropout, its size is free."""
    for dropout, tracked in ((0.1, True), (0.0, False)):
        _, run_here = data.load_run(train.arguments().parse_args(["--dropout", str(dropout)]))
        assert ("train_micro_batch_size_per_gpu" in run_here) == tracked


def test_machines_with_different_text(refusal, monkeypatch):
    gather = lambda found, mine: found.__setitem__(slice(2), [mine, "another"])  # noqa: E731
    monkeypatch.setattr(data.dist, "all_gather_object", gather)
    assert "--data is not the same on all machines: " in refusal(2, "")


SIZE = ("--n_embd", 32, "--seq_len", 16, "--train_batch_size", 24, "--train_micro_batch_size_per_gpu", 6, "--steps", 2)
RESUME = ("--checkpoint_dir", "c", "--resume", "--run_name", "refused")


@pytest.fixture(scope="module")
def trained(work):
    run(work, 2, "train.py", *SIZE, "--checkpoint_dir", "c", "--checkpoint_interval", 2)
    return work


def everything(folder):
    return {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in folder.rglob("*") if p.is_file() and p.name[0] != "."}


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--checkpoint_tag", "global_step2", "--seed", 1), "seed is 1337 in c/global_step2 and 1 here"),
        (("--seed", 1), "seed is 1337 in c/global_step2 and 1 here"),  # which tag, the loader finds out
        (("--checkpoint_tag", "no"), "c/no does not exist; in c there is: global_step2"),
        (("--checkpoint_dir", "nowhere"), "nowhere has no such checkpoint"),
    ],
)
def test_one_rank_speaks(trained, arguments, words):
    """All ranks have the same complaint, and rank 0 tells it; whatever was written before is as it was."""
    before = everything(trained)
    result = launch(trained, 2, "train.py", *SIZE, *RESUME, *arguments, limit=100)
    assert result.code == 2 and everything(trained) == before, result.errors
    (line,) = (line for line in result.errors.splitlines() if "error" in line)
    assert line.startswith(f"train.py: error: {words}")
