"""What is in a folder of checkpoints, `python -m universal.inspect`: the facts, what a resume would
take, what is wrong and in which file; without torch."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from helpers import MODEL, ROOT, failed, flip, forked

from measure.lay_out import lay_out
from universal import convert
from universal import inspect as command
from universal.inspect import look

NUMEL = 5 * 3 + 7 + 4
CONFIG = {
    "train_batch_size": 24,
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "scheduler": {"type": "WarmupLR"},
}


def inspected(*words):
    """The command's exit code, and what it says."""

    def work():
        sys.argv = ["inspect.py", *map(str, words)]
        command.main()

    return forked(work)()


def add_more(model):
    """What a script, and modules, put beside the rest."""
    model |= {"ds_config": CONFIG, "note": "x", "epoch": 3}
    model["module"]["calls"] = torch.zeros(3, dtype=torch.int64)
    model["buffer_names"] = ["calls"]


@pytest.fixture(params=[1, 3])
def source(request, laid_out):
    return laid_out(request.param, add_more)


def test_facts(source, tmp_path):
    """Of a ZeRO checkpoint, and of what it converts into: what was put into it."""
    stage = 3 if list(source.glob("zero_pp_rank_1_mp_rank_00_model_states.pt")) else 1
    convert(source, tmp_path / "u")
    facts = look(source)["tags"]["."]
    of_universal = look(tmp_path / "u")["tags"]["."]
    assert facts["step"] == 100 and facts["stage"] == stage and facts["ranks"] == 2
    assert (facts["tensor"], facts["pipeline"], facts["dtype"]) == (1, 1, "bf16")
    assert facts["deepspeed"] == "0.19.8"
    assert facts["batch"] == {"samples": 24, "micro": 2, "steps": 6}
    assert facts["parameters"] == {"tensors": 3, "elements": NUMEL}
    assert facts["frozen"]["tensors"] == 0 and facts["buffers"] == {"tensors": 1, "elements": 3}
    assert facts["client_state"] == {"note": "x", "epoch": 3}
    optimizer = facts["optimizer"]
    assert optimizer["type"] == "AdamW" and optimizer["states"] == ["exp_avg", "exp_avg_sq", "fp32"]
    assert [group["parameters"] for group in optimizer["groups"]] == [2, 1]
    assert [group["weight_decay"] for group in optimizer["groups"]] == [0.1, 0.0]
    assert {group["lr"] for group in optimizer["groups"]} == {1e-4}
    assert facts["scheduler"] == {"type": "WarmupLR", "state": {"last_batch_iteration": 100}}
    nbytes = 3 * 4 * NUMEL
    assert facts["resumes_on"] == {n: -(-nbytes // n) for n in (1, 2, 3, 4, 6, 12)}
    assert facts["bytes"] == sum(path.stat().st_size for path in source.glob("*.pt"))
    assert of_universal["universal"] and not facts["universal"]
    differing = {key for key in facts if facts[key] != of_universal[key]}
    assert differing <= {"universal", "tensor", "pipeline", "bytes", "files", "optimizer"}
    assert {key for key in optimizer if optimizer[key] != of_universal["optimizer"][key]} == {
        "class"
    }


def test_command(source):
    """One screen for people, and the same as JSON; nothing on standard error."""
    done = inspected(source)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) < 160
    for words in ("DeepSpeed 0.19.8", "24 = 2 x 6 x 2 ranks", "note, epoch", "lr 0.0001"):
        assert words in done.out
    done = inspected(source, "--json")
    assert json.loads(done.out) == json.loads(json.dumps(look(source)))


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
        assert done.code == 1 and f"NOT WHOLE: {path} is damaged" in done.out, done.out
        assert inspected(source, "--quick").code == 0
        os.truncate(path, len(before) // 2)
        done = inspected(source, "--quick")
        assert done.code == 1 and str(path) in done.out and "a resume takes none" in done.out
        path.write_bytes(before)
    assert inspected(source).code == 0


def test_what_a_resume_takes(tmp_path):
    """The newest whole one, as load_checkpoint() tries them; --tag looks at one alone."""
    shapes = [{"a": torch.Size((5, 3))}]
    for tag in ("s1", "s2", "s3"):
        lay_out(tmp_path / tag, shapes, 2, 1)
        for path in tmp_path.glob(f"{tag}/*"):
            os.utime(path, (int(tag[1]) * 100, int(tag[1]) * 100))
    (tmp_path / "latest").write_text("s3")
    shutil.copytree(tmp_path / "s2", tmp_path / "x")
    assert look(tmp_path)["takes"] == "s3"
    (shard,) = tmp_path.glob("s3/*rank_1_*optim*")
    shard.unlink()
    done = inspected(tmp_path)
    assert done.code == 1 and f"{shard} is missing" in done.out
    assert look(tmp_path)["takes"] not in (None, "s3")
    assert inspected(tmp_path, "--tag", "s1").code == 0
    assert inspected(tmp_path, "--tag", "s3").code == 1


def test_only_an_engine_can_name_the_parameters(tmp_path):
    """Saved without ZeRO, with a frozen weight of the shape of a trained one: it loads, so it is
    not said to be damaged; unless it is."""
    group = {"lr": 0.1, "params": [0]}
    state = {"state": {0: {"exp_avg": torch.ones(2, 2)}}, "param_groups": [group]}
    model = {"module": {"a": torch.ones(2, 2), "b": torch.ones(2, 2)}, "optimizer": state}
    model |= {"buffer_names": [], "param_shapes": None, "dp_world_size": 1, "mp_world_size": 1}
    path = tmp_path / "s1" / MODEL
    path.parent.mkdir()
    torch.save(model | {"global_steps": 1, "skipped_steps": 0}, path)
    done = inspected(tmp_path)
    assert done.code == 0 and "s1: whole" in done.out, done.out
    assert "load it without converting it" in done.out
    flip(path)
    assert inspected(tmp_path).code == 1


def test_there_is_none(tmp_path):
    for words in ((tmp_path,), (tmp_path / "absent",), (tmp_path, "--tag", "s1")):
        failed(inspected(*words), 2, "universal.inspect: error: ", "holds no checkpoint")


def test_without_torch(source):
    """Nothing of torch, DeepSpeed or numpy is imported."""
    code = (
        "import sys; from universal.inspect import look; look(sys.argv[1]);"
        "print({'torch', 'deepspeed', 'numpy'} & {*sys.modules})"
    )
    words = [sys.executable, "-c", code, str(source)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert done.stdout == "set()\n", done.stderr
