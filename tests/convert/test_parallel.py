"""Tensor- and pipeline-parallel checkpoints against DeepSpeed's converter, bit by bit; and conversion by several
processes."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import ROOT, assert_equal_to_deepspeed, content, load

import universal
from harness.ranks import PORT, run

AUTOTP = [(1, 4, 2), (2, 4, 4), (3, 3, 3)]  # stage, ranks, tensor-parallel ranks; the cross product is slow
SLOW = [(stage, *others) for stage in (1, 2, 3) for others in [(4, 2), (4, 4), (3, 3)]]
SLOW = [pytest.param(*change, marks=pytest.mark.slow) for change in SLOW if change not in AUTOTP]


@pytest.mark.parametrize("stage, ranks, tensor", [*AUTOTP, *SLOW])
def test_autotp(tmp_path, stage, ranks, tensor):
    """AutoTP's affine maps: column, row, fused qkv, replicated; a width that 3 ranks do not divide evenly."""
    run(tmp_path, ranks, "tests/ranks/model_parallel.py", tmp_path / "c", "autotp", stage, tensor)
    assert_equal_to_deepspeed(tmp_path / "c" / "global_step3", tmp_path)


@pytest.fixture(scope="module")
def pipeline(work):
    run(work, 8, "tests/ranks/model_parallel.py", work / "pipeline", "pipeline", 2, 2)
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
    with pytest.raises(universal.CheckpointError, match=words):
        universal.convert(source, tmp_path / "u")
    assert not (tmp_path / "u").exists()


def test_no_description(pipeline, tmp_path):
    source = tmp_path / "c"
    shutil.copytree(pipeline, source)
    for path in source.glob("mp_rank_*_model_states.pt"):
        torch.save({k: v for k, v in load(path).items() if k != "universal_checkpoint_info"}, path)
    with pytest.raises(universal.CheckpointError, match="2 tensor-parallel ranks and no universal_checkpoint_info"):
        universal.convert(source, tmp_path / "u")


# -----------------------------------------------------------------------------
# several processes


def start(source, output, rank, ranks, *arguments):
    environment = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    command = [sys.executable, *arguments, "--input_folder", source, "--output_folder", output, "--distributed"]
    return subprocess.Popen(
        list(map(str, command)), env=environment | {"MASTER_PORT": str(PORT)}, stderr=subprocess.PIPE, text=True
    )


SLOW = [pytest.param(*more, marks=pytest.mark.slow) for more in [("torchrun", 4), ("deepspeed", 2)]]


@pytest.mark.parametrize(("launcher", "ranks"), [("torchrun", 2), ("srun", 2), *SLOW], ids=str)
def test_processes_share_the_work(pipeline, tmp_path, launcher, ranks):
    """The result is the one of a single process, byte by byte, and each process has written a part of it."""
    universal.convert(pipeline, tmp_path / "one")
    spy = tmp_path / "spy.py"  # the converter, and a line for every file that a rank writes
    spy.write_text(
        f"""import os, sys; sys.path.insert(0, {str(ROOT)!r}); import ds_to_universal
rank = os.environ.get("RANK") or os.environ["SLURM_PROCID"]
def hook(event, arguments):
    if event == "open" and ".many.unfinished/" in str(arguments[0]) and arguments[1] == "x":
        open({str(tmp_path)!r} + "/rank" + rank, "a").write(".")
sys.addaudithook(hook)
ds_to_universal.main()"""
    )
    arguments = [spy, "--input_folder", pipeline, "--output_folder", tmp_path / "many"]
    environment = os.environ | {"MASTER_PORT": str(PORT), "LOCAL_SIZE": str(ranks)}
    if launcher == "srun":  # it starts the tasks itself and says only who each is
        environment = {key: value for key, value in environment.items() if key != "MASTER_ADDR"}
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
    dies = tmp_path / "dies.py"
    dies.write_text(
        f"""import os, signal, sys; sys.path.insert(0, {str(ROOT)!r}); import ds_to_universal; written = []
def hook(event, arguments):
    if event == "open" and ".u.unfinished/" in str(arguments[0]) and arguments[1] == "x":
        written.append(arguments[0])
        if os.environ["RANK"] == "1" and len(written) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
ds_to_universal.main()"""
    )
    processes = [start(pipeline, tmp_path / "u", rank, 2, dies) for rank in (0, 1)]
    errors = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [2, -signal.SIGKILL]
    assert "ds_to_universal.py: error: another process of this conversion is gone: nothing is published" in errors[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dies.py"]
    universal.convert(pipeline, tmp_path / "u")


def test_processes_fail_together(tmp_path):
    """A mistake is said once, by rank 0, and all end with exit code 2."""
    processes = [start(tmp_path / "no", tmp_path / "u", rank, 2, ROOT / "ds_to_universal.py") for rank in (0, 1)]
    errors = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [2, 2]
    assert errors[0].endswith("no does not exist\n") and "error" not in errors[1]
