"""Killed, stopped, hung, joined: the same command goes on from the newest whole checkpoint, and no step is lost, done
twice, or different in one bit."""

import csv
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import ROOT, refused

import data
from harness import machines
from harness.ranks import compare, launch, run
from universal import elastic

COMMON = ("--n_embd", 32, "--seq_len", 16, "--train_batch_size", 24, "--train_micro_batch_size_per_gpu", 6)
INEXACT = (*COMMON, "--steps", 12, "--warmup_steps", 4, "--checkpoint_interval", 4)
COMMON = (*INEXACT, "--exact")


def steps(work, run_name):
    with open(work / "logs" / f"{run_name}.csv", newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def uninterrupted(work):
    names = ("--run_name", "uninterrupted", "--checkpoint_dir", "uninterrupted")
    run(work, 2, "train_elastic.py", *COMMON, *names, "--keep", 1)
    assert [path.name for path in (work / "uninterrupted").iterdir() if path.is_dir()] == ["global_step12"]


def train(work, ranks, name, *arguments, launch=launch, **options):
    command = ("train_elastic.py", *COMMON, "--elastic", "--run_name", name, "--checkpoint_dir", name, *arguments)
    return launch(work, ranks, *command, **options)


def go_on(work, name, step, ranks):
    """Start again on another number of ranks: the log has each step once."""
    out = train(work, ranks, name, launch=run)
    assert f"resumed from {name}/global_step{step} at step {step}" in out
    assert steps(work, name) == list(range(1, 13))
    assert set(compare(work, "uninterrupted", name).values()) == {0.0}


def at_step(step, rank, signal):
    """A patch: this rank sends itself the signal while it draws the data of this step."""

    def patch():
        batch = data.global_batch

        def drawing(text, seed, number, *sizes):
            if number == step and os.environ["RANK"] == str(rank):
                os.kill(os.getpid(), signal)
            return batch(text, seed, number, *sizes)

        data.global_batch = drawing

    return patch


@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_sigterm(work, uninterrupted, stage):
    """One of 4 ranks gets the signal in step 6: all save step 6 and leave with 143; the same command goes on, on any
    ranks, and a job that is done is done."""
    name = f"polite_{stage}"
    result = train(work, 4, name, "--zero_stage", stage, patch=at_step(6, 2, signal.SIGTERM))
    assert result.code == 143 == elastic.GO_ON and steps(work, name) == list(range(1, 7))
    go_on(work, name, 6, 2)
    go_on(work, name, 12, 1)


def test_sigterm_in_the_last_step(work, uninterrupted):
    """The job is done: 0, or the agents would start it again and again."""
    assert train(work, 2, "last", patch=at_step(12, 1, signal.SIGTERM)).code == 0
    go_on(work, "last", 12, 2)


def test_a_rank_that_hangs(work):
    """It is given up after --timeout seconds, not after the 30 minutes of gloo, also where DeepSpeed waits for it."""
    stop = at_step(6, 1, signal.SIGSTOP)
    result = launch(work, 2, "train_elastic.py", *INEXACT, "--timeout", 5, "--run_name", "hangs", patch=stop)
    assert result.code == 1 and "Timed out waiting 5000ms" in result.errors


def test_stand_by(work, uninterrupted):
    """4 micro-batches on 7 ranks: 4 train, 3 stand by, and leave when the job is done."""
    result = train(work, 7, "seven")
    assert result.code == 0, result.errors
    assert set(compare(work, "uninterrupted", "seven").values()) == {0.0}
    result = train(work, 3, "seven")  # done already: the one that stands by learns it
    assert result.code == 0 and "resumed from seven/global_step12 at step 12" in result.out
    assert not re.findall(r"^step +\d+ \|", result.out, re.M) and steps(work, "seven") == list(range(1, 13))


def test_enlist(monkeypatch):
    """The largest number of ranks that divides the batch; tensor-parallel ranks count as one."""
    for present, batch, micro, model_parallel, ranks in (
        (4, 24, 6, 1, 4), (3, 24, 6, 1, 2), (7, 24, 6, 1, 4), (6, 24, 6, 2, 4), (5, 30, 2, 1, 5), (1, 8, 8, 1, 1),
    ):  # fmt: skip
        monkeypatch.setattr(os, "environ", {"RANK": "0", "WORLD_SIZE": str(present)})
        elastic.enlist(batch, micro, model_parallel)
        assert os.environ == {"RANK": "0", "WORLD_SIZE": str(ranks), "STANDING_BY": str(present - ranks)}
    for present, batch, micro, model_parallel in ((1, 24, 6, 2), (4, 24, 7, 1)):
        monkeypatch.setattr(os, "environ", {"RANK": "0", "WORLD_SIZE": str(present)})
        with pytest.raises(ValueError, match=f"none of 1 to {present} ranks"):
            elastic.enlist(batch, micro, model_parallel)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--elastic", "--resume"), "leave out --resume"),
        (("--elastic", "--train_micro_batch_size_per_gpu", 7), "none of 1 to 2 ranks trains micro-batches of 7"),
        (("--mirror", 1), "--mirror is for --elastic"),
        (("--exact", "--dtype", "bf16"), "--exact needs --dtype fp32: sums in bf16 have too few bits"),
        (("--exact", "--offload"), "--exact does not go with --offload"),
    ],
)
def test_refused(monkeypatch, arguments, words):
    assert words in refused(monkeypatch, "train_elastic.py", 2, (*INEXACT, *arguments))


@pytest.mark.parametrize("arguments, words", [(("--exact", "--seed", 1), "seed is 1337"), ((), "exact is True")])
def test_another_run_is_refused(work, uninterrupted, arguments, words):
    arguments = ("--elastic", "--run_name", "another", "--checkpoint_dir", "uninterrupted", *arguments)
    result = launch(work, 2, "train_elastic.py", *INEXACT, *arguments)
    assert result.code == 2 and not (work / "logs" / "another.csv").exists()
    assert result.errors.count("\n") == 1 and f"error: {words} in uninterrupted/global_step12 and" in result.errors


def test_nothing_whole_is_not_a_start(work, uninterrupted):
    """A folder with checkpoints of which none is whole: a start from scratch would hide that they are lost."""
    train(work, 2, "torn", launch=run)
    for file in (work / "torn").glob("global_step*/*optim_states.pt"):
        file.write_bytes(file.read_bytes()[:-100])
    result = train(work, 2, "torn")
    assert result.code != 0 and "holds no checkpoint that is whole" in result.errors


def test_keep(tmp_path):
    """The newest two, what was converted from them, and what `latest` names; nothing half removed has a final name."""
    names = ["global_step20", "global_step40", "global_step40_universal", "global_step60", "global_step80", "mine"]
    for age, name in enumerate(names):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mp_rank_00_model_states.pt").touch()
        os.utime(tmp_path / name / "mp_rank_00_model_states.pt", (age, age))
    for left in ("global_step99.unfinished", "global_step40.unfinished", "global_step20.3.unfinished"):
        (tmp_path / left / "zero").mkdir(parents=True)  # of a save that was killed
    (tmp_path / "latest").write_text("global_step80")
    there = {path.name for path in tmp_path.iterdir()}
    with pytest.MonkeyPatch.context() as patched:  # killed in the middle
        patched.setattr(shutil, "rmtree", lambda path, ignore_errors: os._exit(1))
        if (pid := os.fork()) == 0:
            elastic.remove_old(tmp_path, 3)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert {path.name for path in tmp_path.iterdir()} == there
    elastic.remove_old(tmp_path, 3)
    kept = there - {"global_step20", "global_step20.3.unfinished", "global_step99.unfinished"}
    assert {path.name for path in tmp_path.iterdir()} == kept
    elastic.remove_old(tmp_path, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"global_step60", "global_step80", "mine", "latest"}
    (tmp_path / "latest").write_text("global_step60")
    elastic.remove_old(tmp_path, 1)
    assert {path.name for path in tmp_path.iterdir()} == {"global_step60", "global_step80", "mine", "latest"}


def test_pipeline(work):
    """train_3d.py, from 2 pipelines to 1: by conversion, without a word of it on the command line; and told to stop."""
    common = (*INEXACT, "--n_layer", 2, "--pipeline_parallel", 2, "--elastic", "--run_name")
    run(work, 4, "train_3d.py", *common, "two", "--checkpoint_dir", "two")
    told = at_step(8, 1, signal.SIGTERM)
    assert launch(work, 4, "train_3d.py", *common, "one", "--checkpoint_dir", "one", patch=told).code == 143
    out = run(work, 3, "train_3d.py", *common, "one", "--checkpoint_dir", "one")
    assert "resumed from one/global_step8_universal at step 8" in out and steps(work, "one") == list(range(1, 13))
    assert max(compare(work, "two", "one").values()) <= 1e-5


def play(folder, monkeypatch, events, launcher, **where):
    """Events on nodes of 1 rank, and how many ranks train after each. The loss must be that of one rank without them.
    Returns what the job has printed."""
    monkeypatch.chdir(folder)
    train = "--n_embd 32 --seq_len 16 --n_layer 1 --train_batch_size 64 --train_micro_batch_size_per_gpu 2".split()
    train += ["--exact", "--steps", "160", "--checkpoint_interval", "5", "--checkpoint_dir", str(folder / "c")]
    run(folder, 1, "train_elastic.py", *train, "--run_name", "alone", "--checkpoint_dir", "alone")
    job = machines.Job(launcher, [*train, "--elastic", "--run_name", "machines"], "machines", **where)
    try:
        for at, event, ranks in ((0, lambda job: job.start("node 1", "node 2"), 2), *events):
            job.reach(at)
            since = time.time()
            event(job)
            job.went_on(since, ranks)
        job.wait()
    finally:
        job.close()
    _, worst = machines.compare(machines.read(job.log), machines.read(machines.logged("alone")))
    assert set(worst.values()) == {0.0}
    return [line for _, line in job.lines]


def test_machines(tmp_path, monkeypatch):
    """A node dies, and two come, one more than is of use: it stands by until the end."""
    events = [(6, lambda job: job.kill("node 2"), 1), (7, lambda job: job.start("node 2", "node 3"), 2)]
    assert any("rank 2 stands by" in line for line in play(tmp_path, monkeypatch, events, machines.WARM))


@pytest.mark.slow
def test_preempted(tmp_path, monkeypatch):
    """SIGTERM to one agent: its ranks save and leave, and the other node goes on; under torchrun itself."""
    events = [(6, lambda job: job.preempt("node 2"), 1), (9, lambda job: job.start("node 2"), 2)]
    play(tmp_path, monkeypatch, events, machines.TORCHRUN)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["a process of its own", "a file"])
def test_the_rendezvous_survives(tmp_path, monkeypatch, where):
    """Node 1 dies and comes back, and the others go on meanwhile: the commands of docs/elastic.md, under torchrun."""
    code = re.search(r"python -c '(.*)'", (ROOT / "docs" / "elastic.md").read_text())[1]
    options = {"rendezvous": "is_host=0"}
    if where == "a file":
        options = {"endpoint": str(tmp_path / "meet"), "rendezvous": "store_type=file"}
    holder = subprocess.Popen([sys.executable, "-c", code])
    events = [(6, lambda job: job.kill("node 1"), 1), (7, lambda job: job.start("node 1"), 2)]
    try:
        play(tmp_path, monkeypatch, events, machines.TORCHRUN, **options)
    finally:
        holder.kill()
        holder.wait()


def killed_while_saving(at, moment):
    """Rank 1 dies in the save of step `at`, before or after it has written its shard."""

    def patch():
        from deepspeed import DeepSpeedEngine

        save = DeepSpeedEngine._save_zero_checkpoint

        def saving(self, folder, tag):
            here = tag.startswith(f"global_step{at}.") and os.environ["RANK"] == "1"
            if here and moment == "before":
                time.sleep(1)  # the others write theirs
                os.kill(os.getpid(), signal.SIGKILL)
            save(self, folder, tag)
            if here:
                os.kill(os.getpid(), signal.SIGKILL)

        DeepSpeedEngine._save_zero_checkpoint = saving

    return patch


@pytest.mark.parametrize("moment", ["after", pytest.param("before", marks=pytest.mark.slow)])
def test_killed_while_saving(work, uninterrupted, moment):
    name = f"killed_{moment}"
    result = train(work, 4, name, patch=killed_while_saving(8, moment))
    assert result.code == -signal.SIGKILL
    assert [*(work / name).glob("global_step8.*unfinished")] and not (work / name / "global_step8").exists()
    go_on(work, name, 4, 2)
    # What the 4 ranks left behind is not among the shards of the 2.
    assert not list((work / name).glob("*unfinished"))
    shards = sorted(path.name for path in (work / name / "global_step8").glob("*optim_states.pt"))
    assert shards == [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)]


def others_save(at):
    """In step `at` another start of the job saves into the same folder: torch's agents can split a job in two."""

    def patch():
        batch = data.global_batch

        def drawing(text, seed, number, *sizes):
            if number == at and os.environ["RANK"] == "0":
                Path("split/.last_save").write_text("theirs")
            return batch(text, seed, number, *sizes)

        data.global_batch = drawing

    return patch


def test_others_save_the_same_job(work, uninterrupted):
    """All ranks end before they write, to be started again with the others."""
    result = train(work, 2, "split", patch=others_save(6))
    assert result.code == 143, result.errors
    assert {path.name for path in (work / "split").iterdir()} == {".last_save", "global_step4", "latest"}
    go_on(work, "split", 4, 1)


@pytest.mark.slow
def test_saved_again(work, uninterrupted):
    """Gone on with from an older checkpoint, the job saves the later ones again, on fewer ranks: all of the old is
    gone."""
    train(work, 4, "again", launch=run)
    command = ("train_elastic.py", *COMMON, "--run_name", "again", "--checkpoint_dir", "again")
    run(work, 2, *command, "--resume", "--checkpoint_tag", "global_step4")
    for tag in ("global_step8", "global_step12"):
        assert len(list((work / "again" / tag).glob("*optim_states.pt"))) == 2
    assert not list((work / "again").glob("*unfinished"))
    go_on(work, "again", 12, 1)


def test_half_a_row_is_not_kept(tmp_path, monkeypatch):
    """A kill can leave "1" of a row of step 13: it is no row of step 1."""
    monkeypatch.chdir(tmp_path)
    row = {"loss": 1.0, "lr": 1e-3, "grad_norm": 1.0, "seconds": 1.0, "tokens_per_second": 1.0}
    log = data.Log("torn")
    for step in range(1, 13):
        log.write(step=step, layout="8 x 1 x 1", **row)
    with open("logs/torn.csv", "a") as file:
        file.write("1")
    data.Log("torn", done=12)
    assert steps(tmp_path, "torn") == list(range(1, 13))
