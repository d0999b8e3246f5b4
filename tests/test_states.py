"""Every state of every optimizer, every kind of parameter and buffer: what the live engine held, bit for bit.

The model and the training are in tests/zoo.py. One launch trains all runs of a stage; each is converted as it is saved.
"""

import functools
import json
import re

import pytest
import torch
from conftest import launch, run
from test_mends import convert_with_deepspeed
from zoo import KEYS, SAVED, STATES

import ds_to_universal

ZOO = "tests/zoo.py"
PLAIN = [key for key in KEYS if not re.search(r"[\[+*\\]", key)]


def load(path):
    return torch.load(path, weights_only=False)


def runs_of(stage):
    """{name: job}: every optimizer, bf16, and groups that differ, at ZeRO-3 cut into sub-groups too."""
    runs = {name: {"optimizer": name} for name in STATES if name not in ("Muon", "CPUAdam", "FusedAdam")}
    runs["bf16"] = {"optimizer": "AdamW", "dtype": "bf16"}
    zero = {"sub_group_size": 20} if stage == 3 else {}
    for name in ("AdamW", "momentum", "Lion"):
        runs[f"{name} groups"] = {"optimizer": name, "groups": 3, "zero": zero}
    runs["small groups"] = {"optimizer": "AdamW", "groups": 14, "zero": zero}  # some ranks hold nothing of a group
    plain = {"optimizer": "AdamW", "groups": 3, "zero": zero, "keys": PLAIN}
    runs |= {"plain": plain, "plain bf16": plain | {"dtype": "bf16"}}
    if stage < 3:
        runs["aligned"] = {"optimizer": "AdamW", "groups": 3, "zero": {"parameter_alignment": True}}
    if stage == 1:  # for these DeepSpeed has an optimizer class, and a layout, of its own
        runs["bf16, sums in fp32"] = {"optimizer": "AdamW", "groups": 3, "dtype": "bf16", "accumulate": "fp32"}
    return {name: {"name": name, "stage": stage, **job} for name, job in runs.items()}


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """trained(stage): the folder with <run>/global_step3, <run>/truth.pt and <run>/universal of every run."""

    @functools.cache
    def train(stage):
        folder = tmp_path_factory.mktemp(f"zero{stage}")
        jobs = runs_of(stage)
        run(folder, 3, ZOO, json.dumps(list(jobs.values())))
        for name in jobs:
            ds_to_universal.convert(folder / name / f"global_step{SAVED}", folder / name / "universal")
        return folder

    return train


def same_bits(a, b):
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


ALL = [(stage, name) for stage in (1, 2, 3) for name in runs_of(stage)]


@pytest.mark.parametrize("stage, name", ALL)
def test_states_of_the_live_engine(trained, stage, name):
    """One file per parameter and state, no other, and each is what DeepSpeed gathers from the ranks; hyper-parameters
    and step counts too. Odd names, fewer elements than ranks, no gradient ever, two names of one weight."""
    folder = trained(stage) / name
    job, truth, zero = runs_of(stage)[name], load(folder / "truth.pt"), folder / "universal" / "zero"
    states, keys = STATES[job["optimizer"]], job.get("keys", KEYS)
    names = ["first.weight", "first.bias", "rows", "single", "unused", *(f"odd.{key}" for key in keys)]
    assert sorted(truth["states"]) == sorted(names)
    step = ["step"] if truth["steps"] else []
    wanted = {f"{n}/{state}.pt" for n in names for state in ("fp32", *states, *step)} | {"optimizer_state.pt"}
    assert {str(path.relative_to(zero)) for path in zero.rglob("*.pt")} == wanted
    for n in names:
        assert list(truth["states"][n]) == ["fp32", *states]
        for state, value in truth["states"][n].items():
            assert same_bits(load(zero / n / f"{state}.pt")["param"], value), (n, state)
        assert same_bits(truth["states"][n]["fp32"].to(truth["module"][n].dtype), truth["module"][n])
        assert all(same_bits(load(zero / n / "step.pt"), count) and count == SAVED for count in truth["steps"])
    assert bool(truth["steps"]) == (job["optimizer"] not in ("momentum", "SGD", "Lion"))
    if states:  # each state is one of its own, and none is empty
        values = [torch.cat([truth["states"][n][state].flatten() for n in names]) for state in ("fp32", *states)]
        assert all(a.any() and not torch.equal(a, b) for i, a in enumerate(values) for b in values[:i])

    saved = load(zero / "optimizer_state.pt")["param_groups"]
    assert [{key: value for key, value in group.items() if key != "params"} for group in saved] == truth["groups"]
    assert len({group["lr"] for group in saved}) == job.get("groups", 1)
    if stage == 3 and job.get("groups") == 3:
        shard = load(min((folder / f"global_step{SAVED}").glob("*optim_states.pt")))
        assert len(shard["optimizer_state_dict"]["fp32_flat_groups"]) > len(saved)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", ["AdamW", "bf16"])
def test_frozen_parameters_and_buffers(trained, stage, name):
    """Found under `module` in their own dtypes, and nothing else is. A buffer that is not persistent is nowhere."""
    folder = trained(stage) / name
    truth, module = load(folder / "truth.pt"), load(folder / "universal" / "mp_rank_00_model_states.pt")["module"]
    assert "scratch" in truth["buffers"]
    wanted = truth["frozen"] | {key: value for key, value in truth["buffers"].items() if key != "scratch"}
    assert {key: str(value.dtype) for key, value in wanted.items()} == {
        "frozen.weight": "torch.bfloat16" if name == "bf16" else "torch.float32",
        "frozen.bias": "torch.bfloat16" if name == "bf16" else "torch.float32",
        "norm.running_mean": "torch.float32",
        "norm.running_var": "torch.float32",
        "norm.num_batches_tracked": "torch.int64",
        "mask": "torch.bool",
    }
    assert module.keys() == wanted.keys() and all(same_bits(module[key], wanted[key]) for key in wanted)
    assert wanted["norm.num_batches_tracked"] == SAVED


@pytest.mark.parametrize("stage, ranks", [(stage, ranks) for stage in (1, 2, 3) for ranks in (3, 2)])
def test_resume(trained, stage, ranks):
    """The losses go on as if nothing had happened, also for states that an optimizer makes only at its first step. The
    loader of ZeRO-3 knows Adam's states alone; that of ZeRO-1 and 2 fails on a rank without a part of a group."""
    folder = trained(stage)
    jobs = {name: job for name, job in runs_of(stage).items() if stage < 3 or job["optimizer"] == "AdamW"}
    if stage < 3:
        del jobs["small groups"]
    run(folder, ranks, ZOO, json.dumps([job | {"load": "universal", "label": "resumed"} for job in jobs.values()]))
    for name in jobs:
        losses, resumed = (json.loads((folder / name / f"{label}.json").read_text()) for label in ("losses", "resumed"))
        difference = max(abs(a - b) for a, b in zip(losses[SAVED:], resumed, strict=True))
        assert difference <= (0.0 if ranks == 3 else 1e-3 if "bf16" in name else 1e-5), name


@pytest.mark.parametrize(
    "stage, name, message",
    [
        (1, "small groups", "IndexError: list index out of range"),
        (3, "amsgrad", "KeyError: 'max_exp_avg_sq'"),
        (3, "momentum", "momentum/universal/zero/rows/exp_avg.pt"),
        (3, "Lion", "Lion/universal/zero/rows/exp_avg_sq.pt"),
    ],
)
def test_what_the_loader_of_deepspeed_cannot_restore(trained, stage, name, message):
    """It fails aloud. The folder is not to blame: where one rank holds all the groups, the first case resumes."""
    folder, job = trained(stage), runs_of(stage)[name] | {"load": "universal", "label": "failed"}
    result = launch(folder, 3, ZOO, json.dumps([job]))
    assert result.code == 1 and message in result.err.splitlines()[-1]
    if stage == 1:
        run(folder, 1, ZOO, json.dumps([job]))
        losses, resumed = (json.loads((folder / name / f"{label}.json").read_text()) for label in ("losses", "failed"))
        assert max(abs(a - b) for a, b in zip(losses[SAVED:], resumed, strict=True)) < 1e-5


def test_parameter_without_dimensions(tmp_path):
    """DeepSpeed does not take one, at any stage; so no checkpoint has one."""
    for stage in (1, 3):
        job = {"name": "scalar", "stage": stage, "optimizer": "AdamW", "scalar": True}
        result = launch(tmp_path, 1, ZOO, json.dumps([job]))
        assert result.code == 1 and "self.dim() cannot be 0" in result.err


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("aligned", [False, True])
def test_round_robin_gradients(tmp_path, stage, aligned):
    """With round_robin_gradients DeepSpeed writes a wrong map of its slices, unless they are aligned: a refusal, or
    the right tensors, never others in silence."""
    zero = {"round_robin_gradients": True, "parameter_alignment": aligned}
    job = {"name": "r", "stage": stage, "optimizer": "AdamW", "groups": 3, "zero": zero}
    run(tmp_path, 3, ZOO, json.dumps([job]))
    try:
        ds_to_universal.convert(tmp_path / "r" / f"global_step{SAVED}", tmp_path / "r" / "universal")
    except ds_to_universal.CheckpointError as error:
        assert "round_robin" in str(error)
        return
    for name, value in load(tmp_path / "r" / "truth.pt")["module"].items():
        assert torch.equal(load(tmp_path / "r" / "universal" / "zero" / name / "fp32.pt")["param"], value), name


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", ["plain", "plain bf16"])
def test_bit_equal_to_deepspeed(trained, stage, name):
    """Against DeepSpeed's own converter, over the same model without the names that it cannot convert: it takes a
    parameter's name for a pattern, so `plus+` stops it and `brackets[0]` silently loses its moments."""
    folder = trained(stage) / name
    convert_with_deepspeed(folder / f"global_step{SAVED}", folder / "theirs")
    module, compared = load(folder / "universal" / "mp_rank_00_model_states.pt")["module"], 0
    for path in (folder / "theirs" / "zero").rglob("*/*.pt"):
        file = path.relative_to(folder / "theirs" / "zero")
        parameter, theirs = str(file.parent), load(path)
        if path.stem == "step":
            assert load(folder / "universal" / "zero" / file) == theirs == SAVED
        elif parameter in module:
            assert torch.equal(module[parameter].float(), theirs["param"])
        elif parameter != "tied.weight":
            ours = load(folder / "universal" / "zero" / file)["param"]
            assert same_bits(ours, theirs["param"] if stage < 3 else theirs.view(ours.shape)), file
            compared += 1
    assert compared == 3 * (5 + len(PLAIN))


def test_shard_is_open_while_it_is_read(trained, tmp_path, monkeypatch):
    """Also when the cache of open files keeps none: another thread may have opened the shard too, or many others."""
    monkeypatch.setattr(ds_to_universal, "opened", functools.lru_cache(0)(ds_to_universal.opened.__wrapped__))
    ds_to_universal.convert(trained(1) / "AdamW" / f"global_step{SAVED}", tmp_path / "u", check=True)
