"""Tensor- and pipeline-parallel checkpoints against DeepSpeed's converter, bit by bit; and conversion by several
processes."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import PORT, ROOT, convert_with_deepspeed, run

import ds_to_universal


def load(path):
    return torch.load(path, weights_only=False)


def assert_equal_to_deepspeed(source, folder):
    """Every file of DeepSpeed's zero/ but the second copy of tied weights: tensors, shapes, how to cut them."""
    theirs, ours = folder / "theirs", folder / "ours"
    convert_with_deepspeed(source, theirs)
    ds_to_universal.convert(source, ours, check=True)
    models = [load(path) for path in sorted(ours.glob("mp_rank_*_model_states.pt"))]
    tied = {name for model in models for name in model["shared_params"]}
    names = {name for model in models for group in model["param_shapes"] for name in group}
    compared = 0
    for path in sorted((theirs / "zero").rglob("*.pt")):
        name = str(path.parent.relative_to(theirs / "zero"))
        if name in tied or path.stem == "optimizer_state":
            continue
        wanted, got = load(path), load(ours / "zero" / name / path.name)
        if path.stem == "step":
            assert torch.equal(wanted, got)
            continue
        if torch.is_tensor(wanted):
            wanted = {"param": wanted.view(got["param"].shape), "cat_dim": 0}
        assert got["param"].shape == wanted["param"].shape and torch.equal(got["param"], wanted["param"]), path
        assert {k: v for k, v in got.items() if k != "param"} == {k: v for k, v in wanted.items() if k != "param"}, path
        compared += 1
    assert compared == 3 * len(names)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ranks, tensor", [(4, 2), (4, 4), (3, 3)], ids=["2x2", "4x1", "uneven-3x1"])
def test_autotp(tmp_path, stage, ranks, tensor):
    """AutoTP's affine maps: column, row, fused qkv, replicated; a width that 3 ranks do not divide evenly."""
    run(tmp_path, ranks, "tests/model_parallel.py", tmp_path / "c", "autotp", stage, tensor)
    assert_equal_to_deepspeed(tmp_path / "c" / "global_step3", tmp_path)


@pytest.fixture(scope="module")
def pipeline(work):
    run(work, 8, "tests/model_parallel.py", work / "pipeline", "pipeline", 2, 2)
    return work / "pipeline" / "global_step3"


def with_info(source, target, **changes):
    """A copy of a checkpoint whose universal_checkpoint_info is another."""
    shutil.copytree(source, target)
    for path in target.glob("mp_rank_*_model_states.pt"):
        state = load(path)
        state["universal_checkpoint_info"] |= changes
        torch.save(state, path)
    return target


def test_pipeline(pipeline, tmp_path):
    """PP 2 x TP 2 x DP 2: tied embeddings, row, column, replicated, averaged, and two sub-parameters in one."""
    assert_equal_to_deepspeed(pipeline, tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"parameter_with_sub_params": [], "parameter_with_2_sub_params_cat_dim_0": [r".*up"]},
        {"parameter_with_sub_params": [], "vocabulary_parameter_patterns": [r".*up"], "original_vocab_size": 250},
        {"parameter_with_sub_params": [{"patterns": [r".*up"], "shape": (2, -1), "partition_dim": 0}]},
        {"parameter_with_sub_params": [{"patterns": [r".*up"], "shape": ((64, 128, 64), 32), "partition_dim": 0}]},
    ],
    ids=["two-sub-params", "padded-vocabulary", "count-of-sub-params", "unequal-sub-params"],
)
def test_other_layouts(pipeline, tmp_path, changes):
    """The same bytes, declared to be cut in other ways: both converters take them alike."""
    assert_equal_to_deepspeed(with_info(pipeline, tmp_path / "c", **changes), tmp_path)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"tp_replicated_parameter_patterns": [r".*up"]}, "differs on tensor-parallel rank 1"),
        ({"vocabulary_parameter_patterns": ["no such"]}, "patterns that match no parameter: no such"),
        ({"parameter_with_row_parallelism_patterns": [r".*down", r"1\.down"]}, "matches more than one pattern"),
        ({"pipeline_replicated_parameter_patterns": []}, "in two pipeline stages and is not declared as tied"),
        ({"affine_map": {"version": 2, "params": {}}}, "affine map of version 2"),
    ],
)
def test_wrong_description(pipeline, tmp_path, changes, words):
    source = with_info(pipeline, tmp_path / "c", **changes)
    if "parameter_with_sub_params" not in changes and "up" in str(changes):
        source = with_info(source, tmp_path / "d", parameter_with_sub_params=[])
    with pytest.raises(ds_to_universal.CheckpointError, match=words):
        ds_to_universal.convert(source, tmp_path / "u")
    assert not (tmp_path / "u").exists()


def test_no_description(pipeline, tmp_path):
    source = tmp_path / "c"
    shutil.copytree(pipeline, source)
    for path in source.glob("mp_rank_*_model_states.pt"):
        torch.save({k: v for k, v in load(path).items() if k != "universal_checkpoint_info"}, path)
    with pytest.raises(
        ds_to_universal.CheckpointError, match="2 tensor-parallel ranks and no universal_checkpoint_info"
    ):
        ds_to_universal.convert(source, tmp_path / "u")


# -----------------------------------------------------------------------------
# several processes


def start(source, output, rank, ranks, *arguments):
    environment = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    command = [sys.executable, *arguments, "--input_folder", source, "--output_folder", output, "--distributed"]
    return subprocess.Popen(
        list(map(str, command)), env=environment | {"MASTER_PORT": str(PORT)}, stderr=subprocess.PIPE, text=True
    )


def content(folder):
    return {path.relative_to(folder): path.read_bytes() for path in Path(folder).rglob("*.pt")}


@pytest.mark.parametrize(
    ("launcher", "ranks"), [("torchrun", 2), ("torchrun", 4), ("deepspeed", 2), ("srun", 2)], ids=str
)
def test_processes_share_the_work(pipeline, tmp_path, launcher, ranks):
    """The result is the one of a single process, byte by byte, and each process has written a part of it."""
    ds_to_universal.convert(pipeline, tmp_path / "one")
    spy = tmp_path / "spy.py"  # the converter, and a line for every file that a rank writes
    spy.write_text(
        f"import sys, os; sys.path.insert(0, {str(ROOT)!r}); import ds_to_universal as d; write = d.write\n"
        "rank = os.environ.get('RANK') or os.environ['SLURM_PROCID']\n"
        f"def told(path, content):\n    open({str(tmp_path)!r} + '/rank' + rank, 'a').write(path.name)\n"
        "    return write(path, content)\nd.write = told; d.main()\n"
    )
    arguments = [spy, "--input_folder", pipeline, "--output_folder", tmp_path / "many"]
    environment = os.environ | {"MASTER_PORT": str(PORT), "LOCAL_SIZE": str(ranks)}
    if launcher == "srun":  # it starts the tasks itself and says only who each is
        tasks = [{"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": str(ranks)} for rank in range(ranks)]
        commands = [([sys.executable], environment | t) for t in tasks]
    elif launcher == "torchrun":
        module = ["-m", "torch.distributed.run", "--nproc-per-node", ranks, "--master-port", PORT]
        commands = [([sys.executable, *module], environment)]
    else:
        program = Path(sys.executable).with_name("deepspeed")
        commands = [([program, "--num_gpus", ranks, "--master_port", PORT], environment)]
    processes = [
        subprocess.Popen(list(map(str, command + arguments)), env=env, stderr=subprocess.PIPE, text=True)
        for command, env in commands
    ]
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert not any(process.returncode for process in processes), errors
    assert content(tmp_path / "one") == content(tmp_path / "many")
    assert all((tmp_path / f"rank{rank}").stat().st_size for rank in range(ranks))
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_dead_process(pipeline, tmp_path):
    """One of two is killed in the middle of its work: nothing is published, and the other says why and fails."""
    slow = tmp_path / "slow.py"
    slow.write_text(
        f"import sys, time; sys.path.insert(0, {str(ROOT)!r}); import ds_to_universal as d; write = d.write\n"
        "def slowly(path, content):\n    time.sleep(0.2)\n    return write(path, content)\nd.write = slowly; d.main()\n"
    )
    processes = [start(pipeline, tmp_path / "u", rank, 2, slow) for rank in (0, 1)]
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".u.unfinished.*/zero/*/*.pt")) and time.monotonic() < deadline:
        time.sleep(0.05)
    processes[1].send_signal(signal.SIGKILL)
    _, error = processes[0].communicate(timeout=60)
    processes[1].communicate(timeout=60)
    assert processes[0].returncode == 2
    assert "ds_to_universal.py: error: another process of this conversion is gone: nothing is published" in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["slow.py"]
    ds_to_universal.convert(pipeline, tmp_path / "u")


def test_processes_fail_together(tmp_path):
    """A mistake is said once, by rank 0, and all end with exit code 2."""
    processes = [start(tmp_path / "no", tmp_path / "u", rank, 2, ROOT / "ds_to_universal.py") for rank in (0, 1)]
    errors = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [2, 2]
    assert errors[0].endswith("no does not exist\n") and "error" not in errors[1]
