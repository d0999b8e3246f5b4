"""Killed, stopped, hung, joined: the same command goes on from the newest complete checkpoint,
and no step is lost, done twice, or different in one bit."""

import os
import shutil
import signal

import pytest

from measure import machines
from measure.logs import compare, steps
from tests.support import ROOT
from tests.support.commands import forked, hang, kill, run_python, slow, told_to_stop
from tests.support.files import folders_in
from tests.support.helpers import at_step
from tests.support.ranks import launch, run
from universal import elastic
from universal.write import publish

INEXACT = (
    "--n_embd 32 --seq_len 16 --train_batch_size 24 --train_micro_batch_size_per_gpu 6 "
    "--steps 12 --warmup_steps 4 --checkpoint_interval 4"
).split()
COMMON = [*INEXACT, "--exact"]


@pytest.fixture(scope="module")
def uninterrupted(work):
    flags = "--run_name uninterrupted --checkpoint_dir uninterrupted --keep 1".split()
    run(work, 2, "examples.train_elastic", *COMMON, *flags)
    assert folders_in(work / "uninterrupted") == ["global_step12"]


def train(work, ranks, name, *arguments, patch=None):
    """All ranks' output is among the errors."""

    def output():
        os.dup2(2, 1)
        if patch:
            patch()

    flags = f"--elastic --run_name {name} --checkpoint_dir {name}".split()
    command = ("examples.train_elastic", *COMMON, *flags, *arguments)
    return launch(work, ranks, *command, patch=output)


def shards(folder):
    return len(list(folder.glob("*optim_states.pt")))


@pytest.mark.parametrize(
    "stage, moment", [(1, "stamps_of"), slow(3, "write_files"), slow(2, "stamps_of")]
)
def test_one_job(work, uninterrupted, stage, moment):
    """The same command on other ranks goes on each time, whatever has happened, and a job that is
    done is done."""
    name = f"job_{stage}_{moment}"
    folder = work / name

    def goes_on(step, ranks, code, patch=None, stage=stage):
        """From `step` to what ends it."""
        result = train(work, ranks, name, "--zero_stage", stage, patch=patch)
        assert result.code == code, result.errors
        resumed = f"resumed from {name}/global_step{step} at step {step}\n"
        assert resumed in result.errors or not step
        return result.errors

    # One of 5 ranks, for 4 micro-batches, is told to stop in step 2: all save step 2 and leave.
    output = goes_on(0, 5, 143, at_step(2, 2, told_to_stop), stage=3)
    assert "1 of these 5 is a repeat, with weight 0" in output and steps(work, name) == [1, 2]
    # Rank 1 dies in the save of step 8, before or after it has written its shard.
    goes_on(2, 4, -signal.SIGKILL, at_step(8, 1, kill, f"universal.background.{moment}"))
    assert not shards(folder / "global_step8")
    # Told to stop in the last step, the job is done: 0, or the agents would start it again and
    # again.
    goes_on(4, 2, 0, at_step(12, 1, told_to_stop))
    assert "| loss" not in goes_on(12, 1, 0)
    assert steps(work, name) == list(range(1, 13))
    assert set(compare(work, "uninterrupted", name).values()) == {0.0}
    # None of what the 4 ranks have left behind is in it.
    assert shards(folder / "global_step8") == 2
    # Gone on with from an older checkpoint, it saves the later ones again: all of the old is gone.
    older = (
        f"--resume --checkpoint_tag global_step4 --checkpoint_dir {name} --zero_stage {stage} "
        "--run_name older"
    ).split()
    run(work, 1, "examples.train_elastic", *COMMON, *older)
    assert [shards(folder / f"global_step{step}") for step in (4, 8, 12)] == [4, 1, 1]
    content = {"latest", "zero_to_fp32.py", "zero_to_torch.py"}
    content |= {f"global_step{step}" for step in (2, 4, 8, 12)}
    assert {path.name for path in folder.iterdir()} == content


def test_a_rank_that_hangs(work):
    """It is given up after --timeout seconds, not after the 30 minutes of gloo, also where
    DeepSpeed waits for it."""
    flags = [*INEXACT, *"--timeout 3 --run_name hangs".split()]
    result = launch(work, 2, "examples.train_elastic", *flags, patch=at_step(6, 1, hang))
    assert result.code == 1 and "Timed out waiting 3000ms" in result.errors


def test_another_run_is_refused(work, uninterrupted):
    flags = [*INEXACT, *"--elastic --checkpoint_dir uninterrupted".split()]
    result = launch(work, 2, "examples.train_elastic", *flags)
    assert result.code == 2 and not (work / "logs" / "default.csv").exists()
    assert result.errors.count("\n") == 1
    assert (
        "error: --exact was True in uninterrupted/global_step12, and is None here" in result.errors
    )


def test_keep(tmp_path):
    """The newest two, what was converted from them, and what `latest` names; nothing half removed
    has a final name, and nothing that was not saved, or converted, is removed."""
    tags = (
        "global_step20 global_step40 global_step40_universal global_step60 global_step80 mine "
        "global_step20_best global_step20.bak"
    ).split()
    for age, tag in enumerate(tags):
        file = tmp_path / tag / "mp_rank_00_model_states.pt"
        file.parent.mkdir()
        file.touch()
        os.utime(file, (age, age))
    (tmp_path / "global_steps_of_my_run").touch()
    content = {path.name for path in tmp_path.iterdir()} | {"latest"}

    def killed_in_the_middle():
        shutil.rmtree = lambda *_, **options: kill()
        elastic.remove_old(tmp_path, 3)

    (tmp_path / "latest").write_text("global_step80")
    assert forked(killed_in_the_middle)().code == -signal.SIGKILL
    # Half of it is there, under another name.
    (half,) = tmp_path.glob(".*")
    assert half.name.startswith(".global_step20.") and half.suffix == ".removed"
    publish.sweep(tmp_path / "global_step100")  # as the next save does
    for keep, latest, gone in (
        (3, "global_step80", "global_step20"),
        (2, "global_step80", "global_step40 global_step40_universal"),
        (1, "./global_step60/", ""),
    ):
        (tmp_path / "latest").write_text(latest)
        elastic.remove_old(tmp_path, keep)
        content -= {*gone.split()}
        assert {path.name for path in tmp_path.iterdir()} == content


def test_pipeline(work, uninterrupted):
    """train_3d.py, from 2 pipelines to 1, without a word of it on the command line; and told to
    stop."""
    flags = "--pipeline_parallel 2 --elastic --run_name pipes --checkpoint_dir pipes"
    command = ("examples.train_3d", *INEXACT, *flags.split())
    assert launch(work, 4, *command, patch=at_step(8, 1, told_to_stop)).code == 143
    out = run(work, 2, *command)
    assert "resumed from pipes/global_step8 at step 8" in out
    assert steps(work, "pipes") == list(range(1, 13))
    assert max(compare(work, "uninterrupted", "pipes").values()) <= 1e-5


# The step after which something happens, what, to which nodes, and how many ranks then train.
EVENTS = [
    (0, "start", ["node 1", "node 2"], 2),
    (6, "kill", ["node 1"], 1),
    (7, "start", ["node 1"], 2),
    (12, "preempt", ["node 2"], 1),
    (15, "start", ["node 2"], 2),
]
LAST = 160


@pytest.mark.slow
def test_agents(tmp_path, monkeypatch):
    """Machines of 1 rank, each with an agent of torchrun, which meet in a file, die and come. The
    loss is that of one rank to which nothing happens."""
    monkeypatch.chdir(tmp_path)
    flags = (
        "--n_embd 32 --seq_len 16 --n_layer 1 --train_micro_batch_size_per_gpu 2 --exact "
        f"--train_batch_size 64 --checkpoint_interval 5 --steps {LAST} "
        f"--checkpoint_dir {tmp_path / 'c'}"
    ).split()
    where = {"rendezvous": "store_type=file", "endpoint": str(tmp_path / "meet")}
    with machines.Job(machines.TORCHRUN, flags, "machines", **where) as job:
        for at, what, nodes, ranks in EVENTS:
            job.reach(at)
            job.happen(what, getattr(machines.Job, what), *nodes, ranks=ranks, lost=True)
        job.wait()
    machines.train_alone(flags, "alone", LAST)
    assert set(machines.differences(job, "alone").values()) == {0.0}


def test_gloo_does_not_abort_a_finished_job():
    """Its threads still have tensors to release, as on a busy machine. Without exit_together() one
    exit in three aborts."""
    result = run_python(ROOT / "tests" / "ranks" / "exits.py", 5)
    assert (result.stdout, result.stderr) == ("{0: 10}\n", "")
