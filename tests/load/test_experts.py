"""A mixture of experts, loaded with another expert-parallel size, on other ranks."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import experts
import pytest
import torch
from experts import Life
from helpers import edit, flip, load, records

import universal
from measure.ranks import run

FP32_ROUNDING = 1e-6
LIVES = {
    "stage_1": Life(stage=1),
    "stage_2": Life(stage=2),
    "data_first": Life(data_first=True),
    "bf16_optimizer": Life(stage=1, dtype="bf16", accumulate="fp32"),
    "frozen": Life(stage=1, frozen="moe.0.deepspeed_moe.experts"),
    "partly_frozen": Life(frozen="up.weight"),
    "buffers": Life(net={"buffer": True}),
    "residual": Life(net={"use_residual": True}),
    "two_experts_a_token": Life(net={"k": 2}),
    "clipping": Life(clip=0.05),
    "split_groups": Life(max_group_size=300),
    "round_robin": Life(zero={"round_robin_gradients": True}),
    "offload": Life(zero={"offload_optimizer": {"device": "cpu"}}),
    "aligned": Life(zero={"parameter_alignment": True}),
    "momentum": Life(optimizer="sgd"),
    "sizes": Life(ep_size=(2, 1)),
    "counts": Life(ep_size=4, net={"experts": (8, 4)}),
}


class Resume(NamedTuple):
    """A life that 4 ranks have saved, loaded on other ranks. changes: to the Life."""

    life: str
    ranks: int
    ep_size: int | tuple
    changes: dict = {}


OTHER_RANKS = ((2, 2), (2, 1), (1, 1), (4, 4), (4, 2), (3, 1))
QUICK = [
    Resume("stage_1", 2, 1),
    Resume("stage_2", 4, 4),
    Resume("stage_2", 4, 2),
    Resume("stage_2", 2, 2),
    Resume("split_groups", 4, 4),
    Resume("buffers", 2, 2),
    Resume("frozen", 2, 1),
]
SLOW = [Resume(life, *ranks) for life in ("stage_1", "stage_2") for ranks in OTHER_RANKS]
SLOW += [
    Resume(life, *ranks)
    for life in LIVES
    for ranks in ((2, 2), (1, 1), (4, 4))
    if life not in ("stage_1", "stage_2", "sizes")
]
SLOW += [
    Resume("sizes", 2, (2, 1)),
    Resume("sizes", 4, (4, 2)),
    Resume("data_first", 2, 2, {"data_first": False}),
    Resume("bf16_optimizer", 2, 1, {"stage": 2, "accumulate": None}),
]
RESUMES = [*QUICK, *(resume for resume in SLOW if resume not in QUICK)]


def name_of(resume):
    size = str(resume.ep_size).strip("()").replace(", ", "_")
    return "-".join([resume.life, f"{resume.ranks}_ranks", f"size_{size}", *resume.changes])


def marked(resume):
    marks = [] if resume in QUICK else [pytest.mark.slow]
    return pytest.param(resume, id=name_of(resume), marks=marks)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, request):
    """{name: outcome} of all the resumes that are wanted: each number of ranks is one launch."""
    prefix = f"{request.node.nodeid}::test_resume["
    wanted = [
        item.callspec.params["resume"]
        for item in request.session.items
        if item.nodeid.startswith(prefix)
    ]
    folder = tmp_path_factory.mktemp("experts")
    saves = {resume.life: (resume.life, LIVES[resume.life]) for resume in wanted}
    run(folder, 4, experts.play, experts.save, saves)
    found = {}
    for ranks in {resume.ranks for resume in wanted}:
        loads = {
            name_of(resume): (
                resume.life,
                LIVES[resume.life]._replace(ep_size=resume.ep_size, **resume.changes),
            )
            for resume in wanted
            if resume.ranks == ranks
        }
        run(folder, ranks, experts.play, experts.load, loads, limit=900)
        for name in loads:
            found[name] = json.loads((folder / f"{name}.0.json").read_text())
    return found


@pytest.mark.parametrize("resume", [marked(resume) for resume in RESUMES])
def test_resume(outcomes, resume):
    """Every state of every expert is equal to the bit, and the loss continues."""
    outcome = outcomes[name_of(resume)]
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
    smallest = records(folder / EXPERT_FILE)[0]
    flip(folder / EXPERT_FILE, smallest)


def with_experts(*counts):
    return {"net": {"buffer": True, "experts": counts}}


def add_extra_state(folder):
    edit(folder, EXPERT_FILE, lambda content: content.update({OF_EXPERT: torch.zeros(1)}))


# Its files of experts hold what no shard does.
LIFE = Life(net={"buffer": True}, frozen="up.weight")
SHARD = "zero_pp_rank_3_mp_rank_00_optim_states.pt"
EXPERT_FILE = "layer_1_expert_3_mp_rank_00_model_states.pt"
OF_EXPERT = "moe.1.deepspeed_moe.experts.deepspeed_experts.3._extra_state"
AUTOEP_LAYER = {"expert_key_prefix": "moe.0.experts", "num_experts": 4}


class Refusal(NamedTuple):
    """What is done to the folder of a checkpoint, and to the Life that is to load it."""

    name: str
    words: str
    spoil: Callable[[Path], object] = lambda folder: None
    changes: dict = {}


REFUSALS = [
    Refusal("expert_missing", EXPERT_FILE, lambda folder: (folder / EXPERT_FILE).unlink()),
    Refusal("expert_damaged", f"{EXPERT_FILE} is damaged", tear_buffer),
    Refusal("shard_damaged", f"{SHARD} is damaged", lambda folder: flip(folder / SHARD)),
    Refusal(
        "config_is_a_path",
        "its config is 'zero.json': which ranks had the same experts is not known",
        lambda folder: edit_models(folder, ds_config="zero.json"),
    ),
    Refusal("extra_state", "extra state moe.1.deepspeed_moe", add_extra_state),
    Refusal("more_experts", "not in the checkpoint", changes=with_experts(8, 4)),
    Refusal("fewer_experts", "and not here", changes=with_experts(2, 4)),
    Refusal("more_layers", "not in the checkpoint", changes=with_experts(4, 4, 4)),
    Refusal("without_zero", "of experts, only those of", changes={"stage": 0}),
    Refusal("tensor_parallel", "tensor or pipeline", lambda f: edit_models(f, mp_world_size=2)),
    Refusal("autoep", "AutoEP", lambda f: edit_models(f, ds_autoep_layers=[AUTOEP_LAYER])),
    Refusal("universal", "is not read", lambda f: (f / "zero").mkdir()),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    run(folder, 4, experts.play, experts.save, {"life": ("life", LIFE)})
    return folder


@pytest.fixture(scope="module")
def refused(saved, request):
    """{name: what each rank said} of the refusals that are wanted, in one launch."""
    prefix = f"{request.node.nodeid}::test_refusal["
    wanted = [
        item.callspec.params["refusal"]
        for item in request.session.items
        if item.nodeid.startswith(prefix)
    ]
    lives = {}
    for refusal in wanted:
        shutil.copytree(saved / "life", saved / refusal.name)
        refusal.spoil(saved / refusal.name / "t")
        lives[refusal.name] = (refusal.name, LIFE._replace(**refusal.changes))
    run(saved, 2, experts.play, experts.load, lives)
    return {
        name: [json.loads((saved / f"{name}.{rank}.json").read_text()) for rank in range(2)]
        for name in lives
    }


@pytest.mark.parametrize("refusal", [pytest.param(row, id=row.name) for row in REFUSALS])
def test_refusal(refused, refusal):
    """In one line, on all ranks."""
    first, second = refused[refusal.name]
    assert first == second
    assert refusal.words in first["refused"] and "\n" not in first["refused"], first


def test_no_conversion(saved):
    """DeepSpeed's loader reads even a right universal checkpoint of experts wrongly."""
    with pytest.raises(universal.CheckpointError, match="has experts, which are not converted"):
        universal.convert(saved / "life" / "t", saved / "life" / "u")


@pytest.mark.slow
def test_every_flipped_byte_is_noticed(saved):
    """Of every tensor of every shard, and of those in the files of experts that no shard has, such
    as buffers. The others there are not read."""
    lives = {}
    for path in sorted((saved / "life" / "t").glob("*.pt")):
        for number, record in enumerate(records(path)):
            name = f"{path.stem}.{number}"
            shutil.copytree(saved / "life", saved / name)
            flip(saved / name / "t" / path.name, record)
            lives[name] = (name, LIFE)
    run(saved, 2, experts.play, experts.load, lives, limit=1200)
    outcomes = {name: json.loads((saved / f"{name}.0.json").read_text()) for name in lives}
    unnoticed = {name for name, outcome in outcomes.items() if "refused" not in outcome}
    assert [name for name in unnoticed if outcomes[name]["differences"]] == []
    assert [name for name in unnoticed if "optim_states" in name] == []
    assert len([name for name in outcomes.keys() - unnoticed if "expert" in name]) == 2 * 8


@pytest.mark.slow
def test_a_chain_of_lives_changes_nothing(saved):
    """On 4 ranks with size 2, then on those of the chain: each loads, and saves at once."""
    chain = [(2, 1, 1), (4, 4, 2), (1, 1, 1), (4, 2, 2)]
    for number, (ranks, ep_size, stage) in enumerate(chain):
        tags = [f"t{number}" if number else "t", f"t{number + 1}"]
        life = LIFE._replace(ep_size=ep_size, stage=stage)
        run(saved, ranks, experts.play, experts.load, {"chain": ("life", life, *tags)})
    begin, end = saved / "life" / "t", saved / "life" / f"t{len(chain)}"
    names = sorted(path.name for path in begin.glob("*.pt"))
    assert names == sorted(path.name for path in end.glob("*.pt"))
    for name in names:
        assert dict(tensors_of(load(begin / name))) == dict(tensors_of(load(end / name))), name


def tensors_of(content, path=""):
    """(where, bytes) of every tensor in a nested content."""
    if isinstance(content, dict):
        content = content.items()
    elif isinstance(content, list | tuple):
        content = enumerate(content)
    elif hasattr(content, "numpy"):
        yield path, content.detach().flatten().view(torch.uint8).numpy().tobytes()
        return
    else:
        return
    for key, value in content:
        yield from tensors_of(value, f"{path}.{key}")


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
        said = json.loads((tmp_path / f"4.{rank}.json").read_text())
        assert "for autoep_size 2, here 4: DeepSpeed would mix" in said
