"""A mixture of experts, loaded with another expert-parallel size, on other ranks."""

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import experts
import pytest
import torch
from experts import Life

from tests.support.commands import only_if
from tests.support.files import edit, flip, records
from tests.support.helpers import chosen
from tests.support.ranks import run
from universal.diff import diff
from universal.errors import CheckpointError
from universal.inspect import look
from universal.load.live_experts import check_autoep

FP32_ROUNDING = 1e-6
LIVES = {
    "stage_1": Life(stage=1),
    "stage_2": Life(stage=2),
    "data_first": Life(data_first=True),
    "bf16_optimizer": Life(stage=1, dtype="bf16", accumulate="fp32"),
    "frozen": Life(stage=1, frozen="moe.0.deepspeed_moe.experts"),
    "partly_frozen": Life(frozen="up.weight"),
    "split_groups": Life(max_group_size=300),
    "round_robin": Life(zero={"round_robin_gradients": True}),
    "sizes": Life(ep_size=(2, 1)),
    "counts": Life(ep_size=4, net={"experts": (8, 4)}),
    # Its files of experts hold what no shard does.
    "in_files": Life(net={"buffer": True}, frozen="up.weight", data_first=True),
}


class Resume(NamedTuple):
    """A life that 4 ranks have saved, loaded on other ranks. changes: to the Life."""

    life: str
    ranks: int
    ep_size: int | tuple
    changes: dict = {}


# These enter every branch that any of them enters.
QUICK = [
    # At another stage, what the files of experts alone hold, too; and half of it on another rank.
    Resume("in_files", 2, 2, {"stage": 1}),
    # The very layout: the losses that follow are the same to the bit.
    Resume("split_groups", 4, 2),
    # Fewer experts on a rank, in fewer parameter groups than were saved.
    Resume("split_groups", 4, 4),
]
LAYOUTS = ((2, 2), (2, 1), (1, 1), (4, 4), (4, 2), (3, 1))
SLOW = [
    Resume(life, *layout)
    for life in LIVES
    for layout in (LAYOUTS if life in ("stage_1", "stage_2") else ((2, 2), (1, 1), (4, 4)))
    if life not in ("sizes", "in_files")
]
SLOW += [
    Resume("frozen", 2, 1),
    Resume("sizes", 2, (2, 1)),
    Resume("sizes", 4, (4, 2)),
    Resume("data_first", 2, 2, {"data_first": False}),
    Resume("bf16_optimizer", 2, 1, {"stage": 2, "accumulate": None}),
]
RESUMES = [*QUICK, *(resume for resume in SLOW if resume not in QUICK)]


def name_of(resume):
    size = str(resume.ep_size).strip("()").replace(", ", "_")
    return "-".join([resume.life, f"{resume.ranks}_ranks", f"size_{size}", *resume.changes])


@pytest.fixture(scope="module")
def saved(tmp_path_factory, request):
    """The folder with "in_files", and with all lives that are to be resumed."""
    folder = tmp_path_factory.mktemp("saved")
    names = ["in_files", *(resume.life for (resume,) in chosen(request, "resume"))]
    run(folder, 4, experts.play, experts.save, {name: (name, LIVES[name]) for name in names})
    return folder


def load_all(folder, ranks, lives):
    """{name: the outcome on each rank}, in one launch. lives: as experts.play() takes them."""
    run(folder, ranks, experts.play, experts.load, lives, limit=1200)
    return {
        name: [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(ranks)]
        for name in lives
    }


@pytest.fixture(scope="module")
def resumed(saved, request):
    """load_all() of the resumes that are to run. Each number of ranks is one launch."""
    lives_on = {}
    for (resume,) in chosen(request, "resume"):
        life = LIVES[resume.life]._replace(ep_size=resume.ep_size, **resume.changes)
        lives_on.setdefault(resume.ranks, {})[name_of(resume)] = (resume.life, life)
    outcomes = {}
    for ranks, lives in lives_on.items():
        outcomes |= load_all(saved, ranks, lives)
    return outcomes


@pytest.mark.parametrize("resume", [only_if(r in QUICK, r, id=name_of(r)) for r in RESUMES])
def test_resume(resumed, resume):
    """Every state of every expert is equal to the bit, and the loss continues."""
    outcome = resumed[name_of(resume)][0]
    life = LIVES[resume.life]
    assert "refused" not in outcome, outcome
    assert outcome["differences"] == []
    if (resume.ranks, resume.ep_size) == (4, life.ep_size) and not resume.changes:
        assert outcome["gap"] == 0
    elif life.dtype == "fp32":
        assert outcome["gap"] < FP32_ROUNDING


def edit_models(folder, **changes):
    edit(folder, "mp_rank_*_model_states.pt", lambda models: models.update(changes))


def tear_buffer(folder):
    path = folder / EXPERT_FILE
    flip(path, records(path)[0])


def add_extra_state(folder):
    edit(folder, EXPERT_FILE, lambda content: content.update({OF_EXPERT: torch.zeros(1)}))


EXPERT_FILE = "layer_1_expert_3_mp_rank_00_model_states.pt"
OF_EXPERT = "moe.1.deepspeed_moe.experts.deepspeed_experts.3._extra_state"
MORE_EXPERTS = {"net": {"buffer": True, "experts": (8, 4)}}
AUTOEP_LAYER = {"expert_key_prefix": "moe.0.experts", "num_experts": 4}


def make_universal(folder):
    (folder / "zero").mkdir()
    for shard in folder.glob("*_optim_*"):
        shard.unlink()


class Refusal(NamedTuple):
    """What is done to the folder of a checkpoint, and to the Life that is to load it."""

    name: str
    words: str
    spoil: Callable[[Path], object] = lambda folder: None
    changes: dict = {}


REFUSALS = [
    Refusal("expert_missing", EXPERT_FILE, lambda folder: (folder / EXPERT_FILE).unlink()),
    Refusal("expert_damaged", f"{EXPERT_FILE} is damaged", tear_buffer),
    Refusal(
        "config_is_a_path",
        "its config is 'zero.json': which ranks had the same experts is not known",
        lambda folder: edit_models(folder, ds_config="zero.json"),
    ),
    Refusal("extra_state", "extra state moe.1.deepspeed_moe", add_extra_state),
    Refusal("more_experts", "not in the checkpoint", changes=MORE_EXPERTS),
    Refusal("without_zero", "was saved with ZeRO, and this engine", changes={"stage": 0}),
    Refusal("tensor_parallel", "tensor or pipeline", lambda f: edit_models(f, mp_world_size=2)),
    Refusal("autoep", "AutoEP", lambda f: edit_models(f, ds_autoep_layers=[AUTOEP_LAYER])),
    Refusal("universal", "is not read", make_universal),
]


@pytest.fixture(scope="module")
def refused(saved, request):
    """load_all() of the refusals that are to run."""
    lives = {}
    for (refusal,) in chosen(request, "refusal"):
        shutil.copytree(saved / "in_files", saved / refusal.name)
        refusal.spoil(saved / refusal.name / "t")
        lives[refusal.name] = (refusal.name, LIVES["in_files"]._replace(**refusal.changes))
    return load_all(saved, 2, lives)


@pytest.mark.parametrize("refusal", [pytest.param(row, id=row.name) for row in REFUSALS])
def test_refusal(refused, refusal):
    """In one line, on all ranks."""
    outcome, of_rank_1 = refused[refusal.name]
    assert outcome == of_rank_1
    assert refusal.words in outcome["refused"] and "\n" not in outcome["refused"], outcome


def test_inspect_and_diff(saved):
    """What they say of a checkpoint with experts."""
    (facts,) = look(saved / "in_files")["tags"].values()
    assert facts["checked"] and not facts["problem"] and not facts["unread_damage"]
    expert = 11 + 11 * 8  # without what is frozen
    layer = 4 * expert + 4 * 8  # with its gate
    assert facts["elements"] == 2 * layer + 2 * (8 * 8 + 8)
    assert facts["client_state"] == ["word"] and facts["batch"]["samples"] == experts.BATCH
    assert diff(saved / "in_files", saved / "in_files")["same"]


@pytest.mark.slow
def test_autoep_of_another_size(tmp_path):
    """DeepSpeed loads it, and mixes up the experts in silence: install() refuses it."""
    pytest.importorskip("transformers", reason="only `make clients` installs it")
    import autoep

    run(tmp_path, 4, autoep.save, 2)
    for size in (2, 4):
        run(tmp_path, 4, autoep.load, size)
    for rank in range(4):
        assert json.loads((tmp_path / f"2.{rank}.json").read_text()) == "loaded"
        refusal = json.loads((tmp_path / f"4.{rank}.json").read_text())
        assert "for autoep_size 2, here 4: DeepSpeed would mix" in refusal


PLACES = {
    "num_experts": 4,
    "ranks": [{"rank": 0, "experts": [0, 1]}, {"rank": 1, "experts": [2, 3]}],
}
OTHER_PLACES = PLACES | {"ranks": [{"rank": 0, "experts": [0, 2]}, {"rank": 1, "experts": [1, 3]}]}


@pytest.mark.parametrize(
    "saved, said",
    [
        ({"ep_size": 2, "expert_placement": PLACES}, None),
        ({"ep_size": 2}, None),  # of an older DeepSpeed
        ({"ep_size": 2, "expert_placement": OTHER_PLACES}, "on other ranks than AutoEP here"),
        ({"ep_size": 4, "expert_placement": PLACES}, "for autoep_size 4, here 2"),
    ],
)
def test_autoep_places(saved, said):
    """As many ranks may have other experts each: DeepSpeed would mix them up, too."""
    model = torch.nn.ModuleDict({"moe": torch.nn.Module()})
    model.moe.ep_size = 2
    model.moe.expert_placement_descriptor = PLACES
    layers = [{"module_path": "moe"} | saved]
    with pytest.raises(CheckpointError, match=said) if said else contextlib.nullcontext():
        check_autoep(model, {"ds_autoep_layers": layers}, Path("t"))
