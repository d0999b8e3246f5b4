"""Every state of every optimizer, every kind of parameter and buffer: what the live engine held, bit for bit.

The model and the training are in tests/zoo.py. One launch trains all runs of a stage; each is converted as it is saved.
"""

import functools
import json
import re
import sys
import types

import pytest
import torch
from conftest import ROOT, convert_with_deepspeed, launch, run
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


def differences(a, b, path=""):
    """Where two nests of dicts, lists and tensors are not the same, bit by bit."""
    if isinstance(a, torch.Tensor):
        return [] if isinstance(b, torch.Tensor) and same_bits(a, b) else [path]
    if isinstance(a, dict):
        found = [f"{path}/{key}" for key in a.keys() ^ b.keys()]
        return found + [d for key in a.keys() & b.keys() for d in differences(a[key], b[key], f"{path}/{key}")]
    if isinstance(a, (list, tuple)) and len(a) == len(b):
        return [d for i, pair in enumerate(zip(a, b, strict=True)) for d in differences(*pair, f"{path}[{i}]")]
    return [] if a == b else [f"{path}: {a} and {b}"]


def goes_on(folder, ranks, jobs, load_from=f"global_step{SAVED}", patch=None, **changes):
    """Resume jobs in models of another seed. Returns {name: (what was not restored, largest |loss difference|)}. What
    is compared: fp32 and every optimizer state, frozen parameters, buffers, hyper-parameters and step counts of the
    groups, scheduler, counters, loss scale."""
    label = f"on_{ranks}"
    jobs = {name: job | {"load": load_from, "label": label} | changes for name, job in jobs.items()}
    run(folder, ranks, ZOO, json.dumps(list(jobs.values())), patch=patch)
    found = {}
    for name, job in jobs.items():
        saved, restored = (load(folder / job["name"] / f"{file}.pt") for file in ("truth", label))
        for truth in (saved, restored):
            del truth["buffers"]["scratch"]
            truth["steps"] = sorted(set(map(float, truth["steps"])))  # at ZeRO-3 of every sub-group
        a, b = (json.loads((folder / job["name"] / f"{file}.json").read_text()) for file in ("losses", label))
        found[name] = differences(saved, restored), max(abs(x - y) for x, y in zip(a[SAVED:], b, strict=True))
    return found


def bound(name, same):
    return 0.0 if same else 1e-2 if "bf16" in name else 1e-5


CHANGES = [(stage, to, 2) for stage in (1, 2, 3) for to in (1, 2, 3)] + [(stage, stage, 3) for stage in (1, 2, 3)]
SLOW = [(stage, to, ranks) for stage in (1, 2, 3) for to in (1, 2, 3) for ranks in (1, 3, 4)]
SLOW = [pytest.param(*change, marks=pytest.mark.slow) for change in SLOW if change not in CHANGES]


def at_stage(jobs, stage):
    """Options of ZeRO are left out at another stage than theirs. bf16 summed in fp32 is ZeRO-1's alone."""
    return {name: job if job["stage"] == stage else job | {"stage": stage, "zero": {}} for name, job in jobs.items()}


@pytest.mark.parametrize("stage, to, ranks", [*CHANGES, *SLOW])
def test_load_checkpoint(trained, stage, to, ranks):
    """From 3 ranks to any number, from any stage to any: nothing is converted, and all is as it was saved."""
    jobs = at_stage(runs_of(stage), to)
    if stage != to:
        jobs.pop("bf16, sums in fp32", None)
    for name, (lost, difference) in goes_on(trained(stage), ranks, jobs).items():
        assert not lost, (name, lost)
        assert difference <= bound(name, (stage, 3) == (to, ranks)), (name, difference)


@pytest.mark.parametrize("stage, to, ranks", [(1, 3, 2), (2, 1, 3), (3, 2, 2)])
def test_load_checkpoint_that_is_universal(trained, stage, to, ranks):
    jobs = at_stage(runs_of(stage), to)
    jobs.pop("bf16, sums in fp32", None)
    for name, (lost, difference) in goes_on(trained(stage), ranks, jobs, "universal").items():
        assert not lost, (name, lost)
        assert difference <= bound(name, False), (name, difference)


def edited(*edits):
    """A patch for run(): universal.py with some of its code replaced, (pattern, replacement)."""

    def patch():
        source = (ROOT / "universal.py").read_text()
        for pattern, replacement in edits:
            source, count = re.subn(pattern, replacement, source)
            assert count, f"{pattern} is not in universal.py"
        module = types.ModuleType("universal")
        sys.modules["universal"] = module
        exec(compile(source, "edited universal.py", "exec"), module.__dict__)

    return patch


ADAM = ("AdamW", "amsgrad", "plain", "AdamW groups")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_mend(trained, stage):
    """After DeepSpeed's universal loader, on the ranks that saved and on others."""
    jobs = {name: runs_of(stage)[name] for name in ADAM if stage < 3 or name != "amsgrad"}  # it raises KeyError there
    for ranks in (3, 2):
        for name, (lost, difference) in goes_on(trained(stage), ranks, jobs, "universal", mended=True).items():
            assert not lost, (name, lost)
            assert difference <= bound(name, ranks == 3), (name, difference)


@pytest.fixture(scope="session")
def by_deepspeed(trained):
    """The folder of ZeRO-3 whose run "plain" DeepSpeed's own converter has made universal as well."""
    convert_with_deepspeed(trained(3) / "plain" / f"global_step{SAVED}", trained(3) / "plain" / "theirs")
    return trained(3)


@pytest.mark.parametrize(
    "edit, lost",
    [
        ((r"group\.update\(.*", "pass"), {"groups"}),  # ZeRO-3 gives every group what the first one has
        ((r"    keep\(engine, checkpoint, reader, False, share\)", "    pass"), {"frozen", "buffers"}),
        ((r"engine\.micro_steps = .*", "pass"), {"counters"}),
        ((r"state\.(pop\(\"step\"|update).*", "pass"), set()),  # one step count for all groups: seen by the loss alone
    ],
)
def test_mend_without_one_of_its_mends(by_deepspeed, edit, lost):
    """DeepSpeed's folder has no whole frozen parameters at ZeRO-3; ours leaves the loader less to get wrong."""
    folder, jobs = by_deepspeed, {"plain": runs_of(3)["plain"]}
    load_from = "universal" if "frozen" in lost or not lost else "theirs"
    ((missing, difference),) = goes_on(folder, 3, jobs, load_from, edited(edit), mended=True).values()
    whole = {"frozen"} if load_from == "theirs" else set()
    assert {path.split("/")[1].split("[")[0] for path in missing} == lost | whole
    assert difference > 1e-5 or lost == {"counters"}


# DeepSpeed's options, each of which cuts or keeps the shards in another way.
OPTIONS = {
    "offload": ((1, 2, 3), {"zero": {"offload_optimizer": {"device": "cpu"}}}),
    "parameters offloaded": ((3,), {"zero": {d: {"device": "cpu"} for d in ("offload_optimizer", "offload_param")}}),
    "round robin": ((1, 2), {"zero": {"round_robin_gradients": True}}),
    "empty groups": ((1, 2, 3), {"empty": 2}),
    "hpZ": ((3,), {"zero": {"zero_hpz_partition_size": 2}}),
    "Muon": ((3,), {"zero": {"reduce_scatter": False}, "optimizer": "Muon", "groups": 1}),
    "DeepSpeed's Adam": ((1, 3), {"optimizer": "CPUAdam"}),
}
OPTIONS = [
    pytest.param(stage, name, options, marks=[pytest.mark.slow] if "Adam" in name else [])
    for name, (stages, options) in OPTIONS.items()
    for stage in stages
]


@pytest.mark.parametrize("stage, name, options", OPTIONS)
def test_options(tmp_path, stage, name, options):
    job = {"name": "o", "stage": stage, "optimizer": "AdamW", "groups": 3} | options
    saved_on = 4 if name == "hpZ" else 3
    run(tmp_path, saved_on, ZOO, json.dumps([job]))
    for ranks in (saved_on, 2):
        ((lost, difference),) = goes_on(tmp_path, ranks, {name: job}).values()
        # What DeepSpeed says of a live engine's fp32 weights and moments is wrong with round_robin_gradients.
        assert not lost or name == "round robin" and all(path.startswith("/states") for path in lost), lost
        assert difference <= bound(name, ranks == saved_on), ranks


@pytest.mark.parametrize(
    "stage, options, edit",
    [
        (1, {}, r"engine\.optimizer\.update_lp_params\(\)"),
        (3, {"zero": {"zero_hpz_partition_size": 2}}, r"p\.ds_secondary_tensor = None"),
    ],
)
def test_load_checkpoint_without_one_of_its_lines(tmp_path, stage, options, edit):
    job = {"name": "o", "stage": stage, "optimizer": "AdamW", "groups": 3} | options
    run(tmp_path, 4, ZOO, json.dumps([job]))
    ranks = 4 if options else 2
    ((_, difference),) = goes_on(tmp_path, ranks, {"": job}, patch=edited((edit, "pass"))).values()
    assert difference > 1e-4


def test_muon_before_zero_3_is_refused(tmp_path):
    """ZeRO-1 and 2 keep the whole momentum of each matrix that a rank has a part of."""
    job = {"name": "o", "stage": 1, "optimizer": "Muon", "zero": {"reduce_scatter": False}}
    run(tmp_path, 3, ZOO, json.dumps([job]))
    for ranks in (2, 3):
        run(tmp_path, ranks, ZOO, json.dumps([job | {"load": f"global_step{SAVED}", "label": f"on_{ranks}"}]))
        assert (tmp_path / "o" / f"on_{ranks}.json").exists() == (ranks == 3)
    line = (tmp_path / "o" / "on_2.refused.1").read_text()
    assert "momentum_buffer of rows is not cut like the weights" in line


def test_parameter_without_dimensions(tmp_path):
    """DeepSpeed does not take one, at any stage; so no checkpoint has one."""
    for stage in (1, 3):
        job = {"name": "scalar", "stage": stage, "optimizer": "AdamW", "scalar": True}
        result = launch(tmp_path, 1, ZOO, json.dumps([job]))
        assert result.code == 1 and "self.dim() cannot be 0" in result.err


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
