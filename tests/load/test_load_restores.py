"""Every state of every optimizer, every kind of parameter and buffer: what the live engine held,
bit for bit.

The model and the training are in tests/ranks/zoo.py. One launch trains all runs of a stage; each is
converted as it is saved."""

import json
import re

import pytest
import torch
from helpers import assert_equal_to_deepspeed, content, load, same_bits
from toy import same
from zoo import DTYPES, KEYS, SAVED, STATES

import universal
from measure.ranks import run

ZOO = "tests/ranks/zoo.py"
PLAIN = [key for key in KEYS if not re.search(r"[\[+*\\]", key)]


def runs_of(stage):
    """{name: job}: every optimizer, bf16, and groups that differ, at ZeRO-3 cut into sub-groups
    too."""
    runs = {name: {"optimizer": name} for name in STATES if name not in ("Muon", "CPUAdam")}
    runs["bf16"] = {"optimizer": "AdamW", "dtype": "bf16"}
    zero = {"sub_group_size": 20} if stage == 3 else {}
    for name in ("AdamW", "momentum"):
        runs[f"{name} groups"] = {"optimizer": name, "groups": 3, "zero": zero}
    runs["small groups"] = {
        "optimizer": "AdamW",
        "groups": 14,
        "zero": zero,
    }  # some ranks hold nothing of a group
    plain = {"optimizer": "AdamW", "groups": 3, "zero": zero, "keys": PLAIN}
    runs |= {"plain": plain, "plain bf16": plain | {"dtype": "bf16"}}
    if stage < 3:
        runs["aligned"] = {"optimizer": "AdamW", "groups": 3, "zero": {"parameter_alignment": True}}
    if stage == 1:  # for these DeepSpeed has an optimizer class, and a layout, of its own
        runs["bf16, sums in fp32"] = {
            "optimizer": "AdamW",
            "groups": 3,
            "dtype": "bf16",
            "accumulate": "fp32",
        }
    return {name: {"name": name, "stage": stage, **job} for name, job in runs.items()}


# What `make test` has: each kind of state and of dtype, with groups where it can; fewer at ZeRO-2,
# which cuts as ZeRO-1 does. `make test-all` has them all.
QUICK = {"small groups", "plain", "plain bf16", "aligned"}
QUICK = {
    1: QUICK | {"amsgrad", "RMSprop", "momentum groups", "bf16, sums in fp32"},
    2: QUICK,
    3: QUICK,
}
QUICK[3] = QUICK[3] | {"amsgrad", "SGD", "RMSprop", "momentum groups"}


def quick(stage):
    return [name for name in runs_of(stage) if name in QUICK[stage]]


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """trained(stage, names): the folder with <run>/global_step3, <run>/truth.pt and <run>/universal
    of these runs."""
    folders = {}

    def train(stage, names=()):
        if stage not in folders:
            folders[stage] = tmp_path_factory.mktemp(f"zero{stage}")
        folder, jobs = folders[stage], runs_of(stage)
        if missing := [
            name
            for name in {**dict.fromkeys(quick(stage)), **dict.fromkeys(names)}
            if not (folder / name).exists()
        ]:
            run(folder, 3, ZOO, json.dumps([jobs[name] for name in missing]))
            for name in missing:
                universal.convert(
                    folder / name / f"global_step{SAVED}", folder / name / "universal"
                )
        return folder

    return train


ALL = [(stage, name) for stage in (1, 2, 3) for name in runs_of(stage)]
ALL = [
    pytest.param(s, name, marks=[] if name in quick(s) else [pytest.mark.slow]) for s, name in ALL
]


@pytest.mark.parametrize("stage, name", ALL)
def test_states_of_the_live_engine(trained, stage, name):
    """One file per parameter and state, no other, and each is what DeepSpeed gathers from the
    ranks; hyper-parameters and step counts too, frozen parameters, buffers. Odd names, fewer
    elements than ranks, no gradient ever, two names of one weight."""
    folder = trained(stage, runs_of(stage) if name not in quick(stage) else ()) / name
    job, truth, zero = (
        runs_of(stage)[name],
        load(folder / "truth.pt"),
        folder / "universal" / "zero",
    )
    states, counted = STATES[job["optimizer"]], job["optimizer"] not in ("momentum", "SGD")
    names = ["first.weight", "first.bias", "rows", "single", "unused"]
    names += [f"odd.{key}" for key in job.get("keys", KEYS)]
    assert {key.removesuffix(" fp32") for key in truth if key.endswith(" fp32")} == {*names}
    wanted = {f"{n}/{state}.pt" for n in names for state in ("fp32", *states, *["step"] * counted)}
    assert {str(path.relative_to(zero)) for path in zero.rglob("*.pt")} == wanted | {
        "optimizer_state.pt"
    }
    for n in names:
        for state in ("fp32", *states):
            assert same_bits(load(zero / n / f"{state}.pt")["param"], truth[f"{n} {state}"]), (
                n,
                state,
            )
        assert same_bits(truth[f"{n} fp32"].to(truth[n].dtype), truth[n])
        assert not counted or same_bits(load(zero / n / "step.pt"), torch.tensor(float(SAVED)))
    assert truth["steps"] == [{"step": SAVED}] * counted
    # What the optimizer does not have, in its own dtype; of buffers that persist, under each of
    # their names.
    rest = truth.keys() - {
        "scratch",
        *names,
        *(f"{n} {state}" for n in names for state in ("fp32", *states)),
    }
    rest = {key: truth[key] for key in rest if torch.is_tensor(truth[key])}
    rest |= {
        key.replace("norm.", "same_norm."): value
        for key, value in rest.items()
        if key.startswith("norm.")
    }
    module = load(folder / "universal" / "mp_rank_00_model_states.pt")["module"]
    assert module.keys() == rest.keys() and all(same_bits(module[key], rest[key]) for key in rest)
    assert {
        key: rest[f"odd_module.{key}"].dtype for key in DTYPES
    } == DTYPES and "frozen.weight" in rest
    assert rest["norm.num_batches_tracked"] == SAVED and "scratch" in truth
    # Each state is one of its own, and none is empty.
    values = [
        torch.cat([truth[f"{n} {state}"].flatten() for n in names]) for state in ("fp32", *states)
    ]
    assert all(a.any() and not torch.equal(a, b) for i, a in enumerate(values) for b in values[:i])

    saved = load(zero / "optimizer_state.pt")["param_groups"]
    assert [
        {key: value for key, value in group.items() if key != "params"} for group in saved
    ] == truth["groups"]
    assert len({group["lr"] for group in saved}) == job.get("groups", 1)
    if stage == 3 and job.get("groups") == 3:
        shard = load(min((folder / f"global_step{SAVED}").glob("*optim_states.pt")))
        assert len(shard["optimizer_state_dict"]["fp32_flat_groups"]) > len(saved)


@pytest.mark.parametrize("stage", [1, 2])
def test_without_padding(trained, tmp_path, stage):
    """elastic_checkpoint: true leaves out padding and hyper-parameters, and nothing else."""
    run(
        tmp_path,
        3,
        ZOO,
        json.dumps([runs_of(stage)["plain"] | {"zero": {"elastic_checkpoint": True}}]),
    )
    universal.convert(tmp_path / "plain" / f"global_step{SAVED}", tmp_path / "plain" / "universal")
    rigid, elastic = (
        content(folder / "plain" / "universal" / "zero") for folder in (trained(stage), tmp_path)
    )
    groups = load(tmp_path / "plain" / "universal" / "zero" / "optimizer_state.pt")["param_groups"]
    assert groups == [{"params": [i]} for i in range(3)]
    del rigid["optimizer_state.pt"], elastic["optimizer_state.pt"]
    assert rigid and rigid == elastic


def goes_on(folder, ranks, jobs, load_from=f"global_step{SAVED}", **changes):
    """Resume jobs in models of another seed. Returns {name: (what was not restored, largest |loss
    difference|)}. What is compared: fp32 and every optimizer state, frozen parameters, buffers,
    hyper-parameters and step counts of the groups, scheduler, counters, loss scale."""
    label = f"on_{ranks}"
    jobs = {name: job | {"load": load_from, "label": label} | changes for name, job in jobs.items()}
    run(folder, ranks, ZOO, json.dumps(list(jobs.values())))
    found = {}
    for name, job in jobs.items():
        saved, restored = (load(folder / job["name"] / f"{file}.pt") for file in ("truth", label))
        lost = [
            key
            for key in saved | restored
            if key != "scratch" and not same(saved.get(key), restored.get(key))
        ]
        a, b = (
            json.loads((folder / job["name"] / f"{file}.json").read_text())
            for file in ("losses", label)
        )
        found[name] = lost, max(abs(x - y) for x, y in zip(a[SAVED:], b, strict=True))
    return found


def bound(name, same):
    # DeepSpeed's Adam for CPUs multiplies beta^step up, and takes a power at a process's first
    # step: what it resumes is the same to the bit, and the next loss is not, by DeepSpeed's own
    # loader either.
    return 0.0 if same and name != "DeepSpeed's Adam" else 1e-2 if "bf16" in name else 1e-5


# From each stage, to each stage, onto each number of ranks, and onto the very layout, of
# checkpoints as they are and converted ones: in `make test` a share of a stage's runs each, so that
# each run is in one or two of them.
ZERO, UNIVERSAL = f"global_step{SAVED}", "universal"
CHANGES = {
    1: [(3, 2, ZERO), (1, 3, ZERO), (3, 2, UNIVERSAL), (1, 2, ZERO)],
    2: [(1, 1, ZERO), (2, 3, ZERO), (1, 3, UNIVERSAL)],
    3: [(2, 4, ZERO), (3, 2, ZERO), (3, 3, ZERO), (2, 2, UNIVERSAL)],
}
SHARES = [
    (stage, *change, i) for stage, changes in CHANGES.items() for i, change in enumerate(changes)
]
ALL = [
    (stage, to, ranks, ZERO) for stage in (1, 2, 3) for to in (1, 2, 3) for ranks in (1, 2, 3, 4)
]
ALL += [
    (stage, *change)
    for stage, changes in CHANGES.items()
    for change in changes
    if UNIVERSAL in change
]
ALL = [pytest.param(*change, None, marks=pytest.mark.slow) for change in ALL]


@pytest.mark.parametrize("stage, to, ranks, kind, share", [*SHARES, *ALL])
def test_load_checkpoint(trained, stage, to, ranks, kind, share):
    """From 3 ranks to any number, from any stage to any: all is as it was saved."""
    jobs = runs_of(stage)
    if share is not None:
        jobs = {name: jobs[name] for name in quick(stage)[share :: len(CHANGES[stage])]}
    if stage != to:  # where ZeRO has other options; bf16 summed in fp32 is ZeRO-1's alone
        jobs = {
            name: job | {"stage": to, "zero": {}}
            for name, job in jobs.items()
            if "sums" not in name
        }
    for name, (lost, difference) in goes_on(trained(stage, jobs), ranks, jobs, kind).items():
        assert not lost, (name, lost)
        assert difference <= bound(name, (stage, 3, ZERO) == (to, ranks, kind)), (name, difference)


MENDED = [
    (1, 2, "amsgrad", "plain"),
    (2, 3, "plain"),
    (3, 3, "plain", "small groups"),
    (3, 2, "plain", "small groups"),
]


@pytest.mark.parametrize(
    "stage, ranks, names", [(stage, ranks, names) for stage, ranks, *names in MENDED]
)
def test_mend(trained, stage, ranks, names):
    """After DeepSpeed's universal loader, on the ranks that saved and on others."""
    jobs = {
        name: runs_of(stage)[name] for name in names
    }  # at ZeRO-3 the loader raises KeyError for amsgrad
    for name, (lost, difference) in goes_on(
        trained(stage), ranks, jobs, UNIVERSAL, how="mend"
    ).items():
        assert not lost, (name, lost)
        assert difference <= bound(name, ranks == 3), (name, difference)


def test_what_is_to_be_mended(trained):
    """The control: DeepSpeed's universal loader alone leaves out, or gets wrong, what test_mend()
    finds restored."""
    jobs = {"plain": runs_of(3)["plain"]}
    ((lost, difference),) = goes_on(trained(3), 3, jobs, UNIVERSAL, how="stock").values()
    assert {"groups", "counters", "frozen.weight", "norm.running_mean", "odd_module.SCB"} <= set(
        lost
    )
    assert difference > 1e-3


# DeepSpeed's options, each of which cuts or keeps the shards in another way: at which stages in
# `make test`, at which in `make test-all`, and what they are.
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
MUON = {"zero": {"reduce_scatter": False}, "optimizer": "Muon", "groups": 1}
OPTIONS = {
    "offload": ([1, 3], [1, 2, 3], {"zero": OFFLOAD}),
    "parameters offloaded": ([3], [3], {"zero": OFFLOAD | {"offload_param": {"device": "cpu"}}}),
    "round robin": ([1, 2], [1, 2], {"zero": {"round_robin_gradients": True}}),
    "empty groups": ([2, 3], [1, 2, 3], {"empty": 2}),
    "DeepSpeed's Adam": (
        [],
        [1, 3],
        {"optimizer": "CPUAdam"},
    ),  # compiled for a minute, and another one for Muon
    "Muon": ([], [1, 2, 3], MUON),
    "Muon bf16": ([], [1, 2, 3], MUON | {"dtype": "bf16"}),
    "Muon offload": ([], [1, 2, 3], MUON | {"zero": MUON["zero"] | OFFLOAD}),
}
# On 4 ranks, of which each pair has a second copy of the parameters.
HPZ = {"hpZ": ([3], [3], {"zero": {"zero_hpz_partition_size": 2}})}
SAVED_ON = [(1, 3, OPTIONS), (2, 3, OPTIONS), (3, 3, OPTIONS), (3, 4, HPZ)]
SAVED_ON = [pytest.param(*one, 0, id=f"{one[:2]}") for one in SAVED_ON] + [
    pytest.param(*one, 1, id=f"{one[:2]} all", marks=pytest.mark.slow) for one in SAVED_ON
]


@pytest.mark.parametrize("stage, saved_on, options, slow", SAVED_ON)
def test_options(tmp_path, stage, saved_on, options, slow):
    """Resumed, the engine holds what it held; and what it saves then converts into the same files.
    On 2 ranks, and, in `make test-all`, on those that saved."""
    job = {"stage": stage, "optimizer": "AdamW", "groups": 3}
    jobs = {
        name: job | {"name": name} | more
        for name, (*stages, more) in options.items()
        if stage in stages[slow]
    }
    run(tmp_path, saved_on, ZOO, json.dumps(list(jobs.values())))
    for ranks in (saved_on, 2) if slow else (2,):
        for name, (lost, difference) in goes_on(tmp_path, ranks, jobs, again=True).items():
            if (
                name == "round robin"
            ):  # what DeepSpeed says of a live engine's weights and moments is wrong then
                lost = [name for name in lost if " " not in name]
            assert not lost and difference <= bound(name, ranks == saved_on), (
                name,
                ranks,
                lost,
                difference,
            )
            files = []
            for tag in (ZERO, f"on_{ranks}_again"):
                output = tmp_path / name / f"{tag}_universal"
                universal.convert(tmp_path / name / tag, output, strict={"states", "patterns"})
                files.append(
                    {key: value for key, value in content(output / "zero").items() if "/" in key}
                )
            assert files[0] and files[0] == files[1], (name, ranks)


@pytest.mark.slow
def test_muon_at_another_stage(tmp_path):
    """Before ZeRO-3 a rank keeps the whole momentum of each matrix of which it has a part. The
    control has none."""
    jobs = {
        stage: {"optimizer": "Muon", "stage": stage, "zero": {"reduce_scatter": False}}
        for stage in (1, 3)
    }
    jobs = {f"from {stage}": job | {"name": f"from {stage}"} for stage, job in jobs.items()}
    run(tmp_path, 3, ZOO, json.dumps(list(jobs.values())))
    jobs = {name: job | {"stage": 4 - job["stage"]} for name, job in jobs.items()}
    for ranks in (3, 2):
        assert max(difference for _, difference in goes_on(tmp_path, ranks, jobs).values()) < 5e-7
    control = goes_on(tmp_path, 2, jobs, options={"load_optimizer_states": False})
    assert all(difference > 1e-4 for _, difference in control.values())


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", ["plain", "plain bf16"])
def test_bit_equal_to_deepspeed(trained, tmp_path, stage, name):
    """Against DeepSpeed's own converter, over the same model without the names that it cannot
    convert: it takes a parameter's name for a pattern, so `plus+` stops it and `brackets[0]`
    silently loses its moments."""
    assert_equal_to_deepspeed(trained(stage) / name / f"global_step{SAVED}", tmp_path)
