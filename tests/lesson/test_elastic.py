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

import pytest
import torch
from helpers import ROOT

import data
import saving
from demos import machines
from harness.ranks import compare, launch, run
from universal import elastic

COMMON = ("--n_embd", 32, "--seq_len", 16, "--train_batch_size", 24, "--train_micro_batch_size_per_gpu", 6, "--exact")
COMMON = (*COMMON, "--steps", 12, "--warmup_steps", 4, "--checkpoint_interval", 4)


def steps(work, run_name):
    with open(work / "logs" / f"{run_name}.csv", newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def uninterrupted(work):
    run(work, 2, "train.py", *COMMON, "--run_name", "uninterrupted", "--checkpoint_dir", "uninterrupted")


def train(work, ranks, name, *arguments, launch=launch, **options):
    command = ("train.py", *COMMON, "--elastic", "--run_name", name, "--checkpoint_dir", name, *arguments)
    return launch(work, ranks, *command, **options)


def go_on(work, name, step, ranks):
    """Start again on another number of ranks: the log has each step once."""
    out = train(work, ranks, name, launch=run)
    assert f"resumed from {name}/global_step{step}:" in out
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


@pytest.mark.parametrize("stage", [1, 3])
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
    common, stop = (argument for argument in COMMON if argument != "--exact"), at_step(6, 1, signal.SIGSTOP)
    result = launch(work, 2, "train.py", *common, "--timeout", 5, "--run_name", "hangs", patch=stop)
    assert result.code == 1 and "Timed out waiting 5000ms" in result.errors


def test_stand_by(work, uninterrupted):
    """4 micro-batches on 7 ranks: 4 train, 3 stand by, and leave when the job is done."""
    result = train(work, 7, "seven")
    assert result.code == 0, result.errors
    assert set(compare(work, "uninterrupted", "seven").values()) == {0.0}
    result = train(work, 3, "seven")  # done already: the one that stands by learns it
    assert result.code == 0 and "resumed from seven/global_step12:" in result.out
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
        (("--resume",), "leave out --resume"),
        (("--train_micro_batch_size_per_gpu", 7), "none of 1 to 2 ranks trains micro-batches of 7"),
        (("--tensor_parallel", 4), "none of 1 to 2 ranks trains micro-batches of 6, 4 ranks to each"),
        (("--seed", 1), "seed is 1337 in of_another/global_step12 and 1 here"),
    ],
)
def test_refusals(work, uninterrupted, arguments, words):
    if not (work / "of_another").exists():
        train(work, 2, "of_another", launch=run)
    result = train(work, 2, "of_another", *arguments)
    assert result.code == 2 and words in result.errors


def test_nothing_whole_is_not_a_start(work, uninterrupted):
    """A folder with checkpoints of which none is whole: a start from scratch would hide that they are lost."""
    train(work, 2, "torn", launch=run)
    for file in (work / "torn").glob("global_step*/*optim_states.pt"):
        file.write_bytes(file.read_bytes()[:-100])
    result = train(work, 2, "torn")
    assert result.code != 0 and "holds no checkpoint that is whole" in result.errors


def test_keep(tmp_path, monkeypatch):
    """The newest two, what was converted from them, and what `latest` names; nothing half removed has a final name."""
    monkeypatch.setattr(saving.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(saving.dist, "barrier", lambda: None)
    names = ["global_step20", "global_step40", "global_step40_universal", "global_step60", "global_step80", "mine"]
    for age, name in enumerate(names):
        (tmp_path / name / ("zero" if name.endswith("universal") else ".")).mkdir(parents=True)
        (tmp_path / name / "mp_rank_00_model_states.pt").touch()
        os.utime(tmp_path / name / "mp_rank_00_model_states.pt", (age, age))
    (tmp_path / "global_step99.unfinished").mkdir()
    (tmp_path / "global_step40.replaced").mkdir()
    (tmp_path / "global_step40.unfinished" / "zero").mkdir(parents=True)  # a save of it that was killed
    (tmp_path / "latest").write_text("global_step80")
    there = {path.name for path in tmp_path.iterdir()}
    saving.remove_old(tmp_path, None)
    assert {path.name for path in tmp_path.iterdir()} == there
    with monkeypatch.context() as patched:  # killed in the middle
        patched.setattr(shutil, "rmtree", lambda path: None)
        saving.remove_old(tmp_path, 3)
    assert {path.name for path in tmp_path.iterdir()} == there - {"global_step20"} | {"global_step20.unfinished"}
    saving.remove_old(tmp_path, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"global_step60", "global_step80", "mine", "latest"}
    (tmp_path / "latest").write_text("global_step60")
    saving.remove_old(tmp_path, 1)
    assert {path.name for path in tmp_path.iterdir()} == {"global_step60", "global_step80", "mine", "latest"}


def test_keep_while_training(work, uninterrupted):
    train(work, 2, "kept", "--keep", 1, launch=run)
    assert [path.name for path in (work / "kept").iterdir() if path.is_dir()] == ["global_step12"]


def test_pipeline(work):
    """train_3d.py, from 2 pipelines to 1: by conversion, without a word of it on the command line."""
    common = (*(a for a in COMMON if a != "--exact"), "--n_layer", 2, "--pipeline_parallel", 2, "--elastic")
    run(work, 4, "train_3d.py", *common, "--run_name", "two", "--checkpoint_dir", "pipelines")
    shutil.rmtree(work / "pipelines" / "global_step12")
    out = run(work, 3, "train_3d.py", *common, "--run_name", "one", "--checkpoint_dir", "pipelines")
    assert "resumed from pipelines/global_step8_universal" in out
    assert max(compare(work, "two", "one").values()) <= 1e-5


def play(folder, monkeypatch, events, launcher, *where):
    """Events of demos/machines.py, on nodes of 1 rank. The loss must be that of one rank without them. Returns
    [(ranks before, after, standing by)] of every event."""
    monkeypatch.chdir(folder)
    agent = machines.AGENT.replace("-per-node 2", "-per-node 1")
    for name, value in {"FOLDER": folder / "c", "STEPS": 160, "AGENT": agent, "EVENTS": events, "PER_NODE": 1}.items():
        monkeypatch.setattr(machines, name, value)
    train = "--n_embd 32 --seq_len 16 --n_layer 1 --train_batch_size 64 --train_micro_batch_size_per_gpu 1".split()
    train += ["--exact", "--steps", "160", "--checkpoint_interval", "5", "--checkpoint_dir", str(folder / "c")]
    run(folder, 1, "train.py", *train, "--run_name", "alone", "--checkpoint_dir", "alone")
    job = machines.Job(launcher, [*train, "--elastic", "--run_name", "machines"], "machines", *where)
    try:
        rows = machines.play(job)
    finally:
        job.close()
    _, worst = machines.compare(machines.read(job.log), machines.read(folder / "logs" / "alone.csv"))
    assert set(worst.values()) == {0.0}
    return [(row["before"], row["ranks"], row["spare"]) for row in rows]


def test_machines(tmp_path, monkeypatch):
    """A node dies, and two come, one more than is of use: it stands by until the end."""
    events = [
        (6, "node 2 dies", lambda job: job.kill("node 2")),
        (7, "two nodes join", lambda job: job.start("node 2", "node 3")),
    ]
    assert play(tmp_path, monkeypatch, events, machines.WARM) == [(0, 2, 0), (2, 1, 0), (1, 2, 1)]


@pytest.mark.slow
def test_preempted(tmp_path, monkeypatch):
    """SIGTERM to one agent: its ranks save and leave, and the other node goes on; under torchrun itself."""
    events = [
        (6, "node 2 is preempted", lambda job: job.preempt("node 2")),
        (9, "node 2 is back", lambda job: job.start("node 2")),
    ]
    assert play(tmp_path, monkeypatch, events, machines.TORCHRUN) == [(0, 2, 0), (2, 1, 0), (1, 2, 0)]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["a process of its own", "a file"])
def test_the_rendezvous_survives(tmp_path, monkeypatch, where):
    """Node 1 dies and comes back, and the others go on meanwhile: the commands of docs/elastic.md, under torchrun."""
    text = (ROOT / "docs" / "elastic.md").read_text()
    code = re.search(r"python -c '(.*)'", text)[1]
    rendezvous = ("127.0.0.1:29400", "is_host=0") if where != "a file" else (str(tmp_path / "meet"), "store_type=file")
    assert f"{rendezvous[1]}" in text
    holder = subprocess.Popen([sys.executable, "-c", code]) if where != "a file" else None
    events = [
        (6, "node 1 dies", lambda job: job.kill("node 1")),
        (7, "node 1 is back", lambda job: job.start("node 1")),
    ]
    try:
        changes = play(tmp_path, monkeypatch, events, machines.TORCHRUN, *rendezvous)
    finally:
        if holder:
            holder.kill()
            holder.wait()
    assert changes == [(0, 2, 0), (2, 1, 0), (1, 2, 0)]


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
    result = train(work, 4, name, patch=killed_while_saving(8, moment))
    assert result.code == -signal.SIGKILL
    assert (work / name / "global_step8.unfinished").is_dir() and not (work / name / "global_step8").exists()
    go_on(work, name, 4, 2)
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


INITIALIZE = """
import os, signal, sys
import deepspeed, torch

torch.set_num_threads(1)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed()
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
config = {
    "train_batch_size": batch, "train_micro_batch_size_per_gpu": micro, "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 1e-2}},
}
engine, *_ = deepspeed.initialize(model=model, config=config)


def train_step(engine, dataset, step):
    accumulation, rank = engine.gradient_accumulation_steps(), engine.global_rank
    for m in range(rank * accumulation, (rank + 1) * accumulation):
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(100 * step + m))
        engine.backward(engine(x).square().mean())
        engine.step()
    if rank == 0:
        with open("weights", "a") as file:
            print(step, float(engine.module.weight.detach().sum()), file=file)
    if step == 5 and rank == 1 and os.environ.get("TOLD"):
        os.kill(os.getpid(), signal.SIGTERM)
"""


def test_lines_for_other_scripts(tmp_path, monkeypatch):
    """Those of docs/elastic.md: 4 ranks of which 3 divide the batch, told to stop after step 5, then 2 ranks."""
    page = (ROOT / "docs" / "elastic.md").read_text().split("## Your script")[1]
    lines = re.search(r"```python\n(.*?)```", page, re.S)[1]
    assert lines.count("...  # deepspeed.initialize()") == 1
    head = "batch, micro, steps, every, folder, dataset = 12, 2, 9, 3, 'c', None\n"
    (tmp_path / "own.py").write_text(head + lines.replace("...  # deepspeed.initialize()", INITIALIZE))

    def weights():
        lines = (tmp_path / "weights").read_text().split()
        (tmp_path / "weights").unlink()
        return dict(zip(map(int, lines[::2]), map(float, lines[1::2]), strict=True))

    launch(tmp_path, 1, tmp_path / "own.py")
    wanted = weights()
    shutil.rmtree(tmp_path / "c")
    monkeypatch.setenv("TOLD", "1")
    first = launch(tmp_path, 4, tmp_path / "own.py")
    monkeypatch.delenv("TOLD")
    second = launch(tmp_path, 2, tmp_path / "own.py")
    third = launch(tmp_path, 3, tmp_path / "own.py")  # of a job that is done
    assert (first.code, second.code, third.code) == (143, 0, 0), first.errors + second.errors + third.errors
    found = weights()
    assert list(wanted) == list(found) == list(range(1, 10))
    assert all(abs(wanted[step] - found[step]) < 1e-5 for step in found)
