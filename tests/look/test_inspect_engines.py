"""What inspect and diff say of checkpoints of model-parallel engines and of experts; and that a
conversion loses no bit of them."""

import experts
import pytest

from tests.support.ranks import run
from universal import convert
from universal.diff import diff
from universal.inspect import look


def facts_in(folder):
    view = look(folder)
    facts = view["tags"][view["takes"]]
    assert facts["checked"] and not facts["problem"] and not facts["unread_damage"]
    return facts


def test_experts(work):
    run(work, 4, experts.play, experts.save, {"moe": ("moe", experts.Life(ep_size=2))})
    facts = facts_in(work / "moe")
    expert = 8 * 11 + 11 + 11 * 8
    layer = 4 * expert + 4 * 8  # with its gate
    assert facts["elements"] == 2 * layer + 2 * (8 * 8 + 8)
    assert facts["client_state"] == ["word"] and facts["batch"]["samples"] == experts.BATCH
    assert diff(work / "moe", work / "moe")["same"]


FLAGS = (
    "--zero_stage 3 --tensor_parallel 2 --n_layer 1 --n_embd 32 --n_head 4 --seq_len 16 --steps 1 "
    "--train_batch_size 8 --train_micro_batch_size_per_gpu 2 --checkpoint_dir c "
    "--checkpoint_interval 1"
).split()
LAYOUTS = {
    "ZeRO-3, 4 ranks (tensor 2 x data 2)": (4, "examples.train_tp_sp", *FLAGS),
    "ZeRO-1, 8 ranks (tensor 2 x pipeline 2 x data 2)": (8, "tests/ranks/model_parallel.py", "c"),
}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_model_parallel(tmp_path, kind):
    run(tmp_path, *LAYOUTS[kind])
    facts = facts_in(tmp_path / "c")
    assert facts["kind"] == kind
    assert facts["batch"] == {"samples": 8, "micro": facts["batch"]["micro"], "doubt": ""}
    (source,) = (tmp_path / "c").glob("global_step*")
    convert(source, tmp_path / "u")
    assert diff(source, tmp_path / "u")["same"]
