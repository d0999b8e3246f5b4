"""Killed and resumed: a half-written checkpoint is never taken for a whole one, and no step is lost or done twice."""

import csv
import os
import signal
import time

import pytest
import torch
from conftest import compare, launch, run

import data
import ds_to_universal

COMMON = ("--n_embd", 32, "--seq_len", 16, "--train_batch_size", 24, "--train_micro_batch_size_per_gpu", 6, "--exact")
COMMON = (*COMMON, "--steps", 12, "--warmup_steps", 4, "--checkpoint_interval", 4)


def steps(work, run_name):
    with open(work / "logs" / f"{run_name}.csv", newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def uninterrupted(work):
    run(work, 2, "train.py", *COMMON, "--run_name", "uninterrupted", "--checkpoint_dir", "uninterrupted")


def go_on(work, name, tag, ranks):
    """Convert and resume on another number of ranks, under the same name: the log has each step once."""
    assert (work / name / "latest").read_text() == tag
    ds_to_universal.convert(work / name / tag, work / name / f"{tag}_universal")
    resume = ("--resume", "--universal_checkpoint")
    run(work, ranks, "train.py", *COMMON, "--run_name", name, "--checkpoint_dir", name, *resume)
    assert steps(work, name) == list(range(1, 13))
    assert set(compare(work, "uninterrupted", name).values()) == {0.0}


def test_sigterm(work, uninterrupted):
    """One of 4 ranks gets the signal in step 6, the others later or never: all save step 6 and exit with 0."""

    def patch():
        batch = data.global_batch

        def at_step(text, seed, step, *sizes):
            if step == 6 and os.environ["RANK"] == "2":
                os.kill(os.getpid(), signal.SIGTERM)
            return batch(text, seed, step, *sizes)

        data.global_batch = at_step

    run(work, 4, "train.py", *COMMON, "--run_name", "polite", "--checkpoint_dir", "polite", patch=patch)
    assert steps(work, "polite") == list(range(1, 7))
    go_on(work, "polite", "global_step6", 2)


def killed_while_saving(at, moment):
    """Rank 1 dies in the save of step `at`, before or after it has written its shard; rank 0 dies between the two
    renames that replace an older checkpoint of the same step."""

    def patch():
        import pathlib

        from deepspeed import DeepSpeedEngine

        save, rename = DeepSpeedEngine._save_zero_checkpoint, pathlib.Path.rename
        own = int(os.environ["RANK"])

        def saving(self, folder, tag):
            here = tag.startswith(f"global_step{at}.") and own == 1
            if here and moment == "before":
                time.sleep(1)  # the others write theirs
                os.kill(os.getpid(), signal.SIGKILL)
            save(self, folder, tag)
            if here and moment == "after":
                os.kill(os.getpid(), signal.SIGKILL)

        def renaming(self, target):
            if moment == "renames" and own == 0 and self.name == f"global_step{at}.unfinished":
                os.kill(os.getpid(), signal.SIGKILL)
            return rename(self, target)

        DeepSpeedEngine._save_zero_checkpoint, pathlib.Path.rename = saving, renaming

    return patch


@pytest.mark.parametrize("moment", ["before", "after"])
def test_killed_while_saving(work, uninterrupted, moment):
    name = f"killed_{moment}"
    patch = killed_while_saving(8, moment)
    result = launch(work, 4, "train.py", *COMMON, "--run_name", name, "--checkpoint_dir", name, patch=patch)
    assert result.code == -signal.SIGKILL
    assert (work / name / "global_step8.unfinished").is_dir() and not (work / name / "global_step8").exists()
    go_on(work, name, "global_step4", 2)
    # What the 4 ranks left behind is not among the shards of the 2.
    shards = sorted(path.name for path in (work / name / "global_step8").glob("*optim_states.pt"))
    assert shards == [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)]


def test_killed_between_the_renames(work, uninterrupted):
    """The older checkpoint of the same step has lost its name, and gets it back."""
    name, common = "renames", (*COMMON, "--run_name", "renames", "--checkpoint_dir", "renames")
    run(work, 2, "train.py", *common)
    before = torch.load(work / name / "global_step12" / "zero_pp_rank_1_mp_rank_00_optim_states.pt", weights_only=False)
    resume = ("--resume", "--checkpoint_tag", "global_step8")
    (work / name / "global_step12.replaced" / "left").mkdir(parents=True)  # a kill while the replaced one was removed
    result = launch(work, 2, "train.py", *common, *resume, patch=killed_while_saving(12, "renames"))
    assert result.code == -signal.SIGKILL and not (work / name / "global_step12").exists()
    run(work, 2, "train.py", *common, "--resume")
    after = torch.load(work / name / "global_step12" / "zero_pp_rank_1_mp_rank_00_optim_states.pt", weights_only=False)
    key = "single_partition_of_fp32_groups"
    for a, b in zip(before["optimizer_state_dict"][key], after["optimizer_state_dict"][key], strict=True):
        assert torch.equal(a, b)
    assert steps(work, name) == list(range(1, 13))


def test_half_a_row_is_not_kept(tmp_path, monkeypatch):
    """A kill can leave "1" of a row of step 13: it is no row of step 1."""
    monkeypatch.chdir(tmp_path)
    row = {"loss": 1.0, "lr": 1e-3, "grad_norm": 1.0, "seconds": 1.0, "tokens_per_second": 1.0}
    log = data.Log("torn", "8 x 1 x 1")
    for step in range(1, 13):
        log.write(step=step, **row)
    with open("logs/torn.csv", "a") as file:
        file.write("1")
    data.Log("torn", "8 x 1 x 1", done=12).file.close()
    assert steps(tmp_path, "torn") == list(range(1, 13))
