"""Checkpoints damaged in 126 ways, at ZeRO 1 and 3, on the ranks that saved them and on others:
load_checkpoint() restores just what was saved, or raises one CheckpointError, the same on all
ranks, within seconds. Which of the two is written down for every damage: a loader that refuses what
is whole fails, and so does one that takes what is not."""

import functools
import json
import os
import random
import shutil
import sys
import types
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from helpers import edit, flip, load, records, with_bit_flipped

import universal
from measure.ranks import run

SCRIPT = "tests/ranks/damage.py"
DAMAGES = {}


class Damage(NamedTuple):
    """change: what to do to a folder that holds the checkpoints "t" and "later". outcome: by ZeRO
    stage, "loads", "refused", "either", or "unknowable", where nothing in the files tells it from a
    checkpoint that is right. says: a part of the line of the refusal, or of what is said while it
    loads. taken: the tag that is loaded, if one is."""

    change: object
    outcome: dict
    says: str
    taken: str


def damage(outcome, at_3=None, says="", taken="t", why=""):
    """at_3: where ZeRO-3 differs."""
    assert ("either" in (outcome, at_3)) == bool(why)

    def keep(change, name=None):
        DAMAGES[name or change.__name__] = Damage(
            change, {1: outcome, 3: at_3 or outcome}, says, taken
        )
        return change

    return keep


def shard(folder, rank, tag="t"):
    return next((folder / tag).glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"))


def models(folder, tag="t"):
    return sorted((folder / tag).glob("*model_states.pt"))


def option(folder, **options):
    (folder / "options.json").write_text(json.dumps(options))


def inner(shard):
    """The state of PyTorch's optimizer in a shard."""
    optimizer = shard["optimizer_state_dict"]
    return optimizer.get("base_optimizer_state") or optimizer["optimizer_state_dict"]


# --- files that are missing, cut off, or not what they should be

FILES = {  # which they are, and what a refusal calls them
    "first_shard": (lambda folder: [shard(folder, 0)], "rank_0_mp_rank_00_optim_states.pt"),
    "shard": (lambda folder: [shard(folder, 1)], "rank_1_mp_rank_00_optim_states.pt"),
    "model": (lambda folder: models(folder)[:1], "model_states.pt"),
    "last_model": (lambda folder: models(folder)[-1:], "model_states.pt"),
    "models": (models, "model_states.pt"),
}


def cut(path, end):
    path.write_bytes(path.read_bytes()[:end])


def harmed(name, file, harm, says="is damaged"):
    choose, called = FILES[file]

    def change(folder):
        for path in choose(folder):
            harm(path)

    damage("refused", says=f"{called} {says}")(change, name)


for file in FILES:
    harmed(f"{file}_missing", file, Path.unlink, "is missing")
    harmed(f"{file}_renamed", file, lambda path: path.rename(f"{path}.old"), "is missing")
    harmed(f"{file}_empty", file, lambda path: cut(path, 0))
    harmed(f"{file}_half", file, lambda path: cut(path, path.stat().st_size // 2))
    harmed(f"{file}_truncated", file, lambda path: cut(path, -50))


@damage("refused", says="and renamed")
def shards_swapped(folder):
    first, second = shard(folder, 0), shard(folder, 1)
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


@damage("refused", "unknowable")
def shards_swapped_and_saved_again(folder):
    first, second = shard(folder, 0), shard(folder, 1)
    a, b = load(first), load(second)
    torch.save(b, first)
    torch.save(a, second)


@damage("either", why="whole, but DeepSpeed writes no such file, and it has no checksums")
def shard_in_the_old_format(folder):
    torch.save(load(shard(folder, 1)), shard(folder, 1), _use_new_zipfile_serialization=False)


may_belong = damage(
    "either", why="it may belong to the checkpoint, as the shards of experts do, or not"
)
may_belong(
    lambda folder: (folder / "t" / "other_optim_states.pt").write_text("x"),
    "another_optimizer_file",
)
makes_none = damage(
    "either", why="zero/ is what tells a universal checkpoint, and nobody makes an empty one"
)
makes_none(lambda folder: (folder / "t" / "zero").mkdir(), "empty_zero_folder")
no_checkpoint = "does not hold what a ZeRO checkpoint does"
harmed("model_is_a_list", "models", lambda path: torch.save([1], path), no_checkpoint)


# --- one bit


def bit_of(what, file, part="/data/", number=-1, at=0.5):
    """Of a record of an archive, counted by their sizes."""
    harmed(f"bit_of_{what}", file, lambda path: flip(path, records(path, part)[number], at))


bit_of("a_tensor", "shard")
bit_of("the_smallest_tensor", "shard", number=0, at=0)
bit_of("the_step", "first_shard", number=0, at=0)
bit_of("a_pickle", "shard", "data.pkl")
bit_of("a_models_pickle", "model", "data.pkl", at=0.3)
bit_of("the_last_models_pickle", "last_model", "data.pkl", at=0.7)
harmed(
    "bits_of_all_in_a_model",
    "model",
    lambda path: [flip(path, record, 0) for record in records(path)],
)


@damage("either", "refused", why="at ZeRO-1 it is a weight, which is read from the shards")
def bit_of_a_buffer_or_weight(folder):
    flip(models(folder)[0])


@damage("either", why="the end of the archive is damaged, and not what a reader needs of it")
def bit_of_a_directory(folder):
    path = shard(folder, 1)
    path.write_bytes(with_bit_flipped(path.read_bytes(), path.stat().st_size - 60, 3))


def bit_of_what_is_converted(state):
    def change(folder):
        universal.convert(folder / "t", folder / "u")
        flip(folder / "u" / "zero" / "a.weight" / f"{state}.pt")
        option(folder, tag="u")

    damage("refused", says=f"a.weight/{state}.pt is damaged")(change, f"bit_of_a_converted_{state}")


bit_of_what_is_converted("fp32")
bit_of_what_is_converted("exp_avg_sq")


# --- files of different steps


def from_later(path):
    shutil.copy(path.parent.with_name("later") / path.name, path)


harmed("shard_of_another_step", "shard", from_later, "is at optimizer step 4")


@damage("refused", says="step")
def last_model_of_another_step(folder):
    from_later(models(folder)[-1])


def at_once(folder):
    """As if all files were of one save."""
    for path in (folder / "t").iterdir():
        os.utime(path, (1, 1))


@damage("refused", "unknowable", says="of different steps")
def models_of_another_step(folder):
    for path in models(folder):
        from_later(path)
    at_once(folder)


@damage("refused", says="step")
def killed_between_models_and_shards(folder):
    """The save of a later step under the same name, and its models are a minute younger than the
    shards."""
    models_of_another_step(folder)
    for path in models(folder):
        os.utime(path, (61, 61))


@damage("refused", "unknowable", says="of different steps")
def shards_of_another_step(folder):
    for rank in (0, 1):
        from_later(shard(folder, rank))
    at_once(folder)


# --- tags and folders


def given(name, outcome, says="", taken="t", move=(), **options):
    """What load_checkpoint() is told. move: a checkpoint, and where it is moved before."""

    def change(folder):
        (folder / "file").write_text("x")
        if move:
            (folder / move[1]).parent.mkdir(exist_ok=True)
            (folder / move[0]).rename(folder / move[1])
        option(folder, **options)

    damage(outcome, says=says, taken=taken)(change, name)


given("tag_absent", "refused", "nope does not exist; in tag_absent there is: later, t", tag="nope")
given("tag_is_a_file", "refused", "does not exist", tag="file")
given("tag_empty", "refused", tag="")
given("tag_a_number", "loads", taken="7", move=("t", "7"), tag=7)
given("tag_with_a_slash", "loads", taken="run/t", move=("t", "run/t"), tag="run/t")
given(
    "tag_with_a_slash_beside_another", "loads", taken="run/t", move=("later", "run/t"), tag="run/t"
)
given(
    "folder_absent",
    "refused",
    "nowhere holds no checkpoint that is whole",
    tag=None,
    load_dir="nowhere",
)
given("folder_none", "refused", tag=None, load_dir=None)


# --- no tag is given: the newest that is whole


def newest(taken, says="", outcome="loads", latest="later", hours=None):
    """latest: what that file says, if there is one. hours: when "t", "later" and `latest` were
    written."""

    def keep(change, name=None):
        def changed(folder):
            (folder / "latest").unlink()
            if latest is not None:
                (folder / "latest").write_bytes(latest.encode("latin-1"))
            change(folder)
            for name, hour in zip(
                ("t/*.pt", "later/*.pt", "latest"), hours or (), strict=bool(hours)
            ):
                for path in folder.glob(name):
                    os.utime(path, (3600 * hour, 3600 * hour))
            option(folder, tag=None)

        damage(outcome, says=says, taken=taken)(changed, name or change.__name__)
        return change

    return keep


def nothing(folder):
    pass


newest("later", latest=None)(nothing, "latest_absent")
newest("later", latest="\xff\xfe\x00\x81")(nothing, "latest_binary")
newest("later", latest="")(nothing, "latest_empty")
newest("later", latest="later\r\n")(nothing, "latest_with_line_ends")


@newest("later", latest=None)
def latest_a_folder(folder):
    (folder / "latest").mkdir()


@newest("later", latest="half")
def latest_half_saved(folder):
    (folder / "half").mkdir()
    shutil.copy(models(folder, "later")[0], folder / "half")


@newest("run/later", latest="run/later")
def latest_with_a_slash(folder):
    (folder / "run").mkdir()
    (folder / "later").rename(folder / "run" / "later")


@newest(None, "is missing", "refused", latest=None)
def all_half_saved(folder):
    for tag in ("t", "later"):
        shard(folder, 1, tag).unlink()


behind = (1, 2, 1)
newest("later", "was written after it", latest="t", hours=behind)(
    nothing, "killed_before_it_wrote_latest"
)
newest("t", latest="t", hours=(1, 2, 3))(nothing, "somebody_goes_back")
newest("t", latest="t", hours=(2, 1, 2))(nothing, "the_other_is_of_an_earlier_run")
gone = "`latest` names nope, which holds no checkpoint"
newest("later", gone, latest="nope", hours=(1, 2, 3))(nothing, "latest_names_what_is_gone")
newest("t", gone, latest="nope", hours=(2, 1, 1))(nothing, "somebody_went_back_and_latest_is_gone")


def not_whole(
    what, harm, says="later is not whole, and is passed over", latest="later", hours=(1, 2, 3)
):
    newest("t", says, latest=latest, hours=hours)(harm, f"newest_{what}")


def lacks_a_shard(folder):
    shard(folder, 1, "later").unlink()


def bits_of_its_models(folder):
    for path in models(folder, "later"):
        for record in records(path):
            flip(path, record, 0)


not_whole("lacks_a_shard", lacks_a_shard)
not_whole("lacks_a_shard_and_latest_is_behind", lacks_a_shard, latest="t", hours=behind)
not_whole("has_a_flipped_bit", lambda folder: flip(shard(folder, 1, "later")))
not_whole("has_flipped_bits_in_its_models", bits_of_its_models, "passed over")
not_whole(
    "has_a_model_cut_short", lambda folder: cut(models(folder, "later")[-1], -50), "passed over"
)


def neighbour(name, put):
    """A folder x beside them, with model states that put() makes."""

    def change(folder):
        (folder / "x").mkdir()
        put(folder / "x" / "mp_rank_00_model_states.pt")

    newest("later")(change, f"neighbour_{name}")


def half_converted(path):
    torch.save({"global_steps": 9, "module": {}, "param_shapes": []}, path)
    (path.parent / "zero").mkdir()


neighbour("a_list", lambda path: torch.save([1, 2], path))
neighbour("a_text", lambda path: path.write_text("hello"))
neighbour("a_folder", Path.mkdir)
neighbour("without_steps", lambda path: torch.save({"global_steps": None}, path))
neighbour("with_steps_in_words", lambda path: torch.save({"global_steps": "nine"}, path))
neighbour(
    "old", lambda path: torch.save({"global_steps": 9}, path, _use_new_zipfile_serialization=False)
)
neighbour("half_converted", half_converted)


# --- what the files hold


def edited(name, change, outcome, ranks=None, **more):
    """All model states, or the shards of these ranks."""
    patterns = [f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in ranks or ()] or [
        "*model_states.pt"
    ]

    def damaged(folder):
        for pattern in patterns:
            edit(folder / "t", pattern, change)

    damage(outcome, **more)(damaged, name)


def no_optimizer(shard):
    shard["optimizer_state_dict"] = None


edited("optimizer_none", no_optimizer, "refused", [0], says="rank_0_mp_rank_00_optim_states.pt")
edited(
    "optimizer_none_on_rank_1",
    no_optimizer,
    "refused",
    [1],
    says="rank_1_mp_rank_00_optim_states.pt",
)


def no_second_moment(shard):
    for state in inner(shard)["state"].values():
        del state["exp_avg_sq"]


other_states = "rank_1_mp_rank_00_optim_states.pt has other optimizer states"
edited("second_moment_missing_on_rank_1", no_second_moment, "refused", [1], says=other_states)
no_moments = "there is no optimizer state of"
edited(
    "moments_missing",
    lambda shard: inner(shard)["state"].clear(),
    "refused",
    [0, 1],
    says=no_moments,
)


@damage("refused", says="gone_module")
def class_that_nobody_has(folder):
    gone = sys.modules["gone_module"] = types.ModuleType("gone_module")
    gone.Gone = type("Gone", (), {"__module__": "gone_module"})
    edit(folder / "t", "*model_states.pt", lambda model: model.update(mine=gone.Gone()))
    del sys.modules["gone_module"]


def client_state(name, tensor):
    edited(f"client_state_with_{name}", lambda model: model.update(mine=tensor), "loads")


client_state("uint32", torch.tensor([1, 2], dtype=torch.uint32))
client_state("float8", torch.ones(3).to(torch.float8_e4m3fn))
client_state("a_sparse_tensor", torch.eye(3).to_sparse())


def without(outcome, keys, ranks=None, **more):
    """A key is in none of the model states, or not in the optimizer states of these ranks."""
    for key in keys.split():

        def remove(content, key=key):
            for held in (
                [content] if ranks is None else [inner(content), content["optimizer_state_dict"]]
            ):
                held.pop(key, None)

        where = "in_the_models" if ranks is None else f"on_ranks_{ranks}"
        edited(f"{key}_missing_{where}", remove, outcome, ranks, **more)


NEEDED = "DeepSpeed always writes it; what it says can be had without, if one cares to"
without("refused", "param_shapes global_steps skipped_steps module")
without("either", "buffer_names shared_params dp_world_size ds_config", why=NEEDED)
without(
    "loads",
    "optimizer mp_world_size ds_version lr_scheduler global_samples data_sampler random_ltd",
)
without("loads", "checkpoint_parallel_dimensions")
without(
    "loads", "frozen_param_shapes frozen_param_fragments", at_3="refused"
)  # before, frozen ones are in the module
without("refused", "state param_groups", (0, 1))
without("refused", "state param_groups", (1,))
without("either", "zero_stage partition_count", (0, 1), why=NEEDED)
without("either", "zero_stage partition_count", (1,), why=NEEDED)
without("loads", "loss_scaler dynamic_loss_scale overflow clip_grad ds_version", (0, 1))
# Each stage has names of its own; without those of another one nothing is missing.
without("either", "param_slice_mappings group_paddings", (0, 1), at_3="loads", why=NEEDED)
without("refused", "base_optimizer_state single_partition_of_fp32_groups", (0, 1), at_3="loads")
without("refused", "base_optimizer_state", (1,), at_3="loads")
without("loads", "optimizer_state_dict fp32_flat_groups", (0, 1), at_3="refused")
without("loads", "optimizer_state_dict", (1,), at_3="refused")

# --- what is no damage


@damage("loads")
def files_of_a_trainer(folder):
    for name in (
        "trainer_state.json",
        "rng_state_0.pth",
        "scheduler.pt",
        "model.safetensors",
        ".t.pt.swp",
    ):
        (folder / "t" / name).write_text("x")


@damage("loads")
def tag_is_a_link(folder):
    (folder / "t").rename(folder / "elsewhere")
    (folder / "t").symlink_to("elsewhere")


@damage("loads", says="left over from before")
def shard_of_more_ranks(folder):
    """As when it was saved by more ranks before, under the same name."""
    shutil.copy(shard(folder, 1, "later"), str(shard(folder, 1)).replace("rank_1_", "rank_2_"))


# --- what comes of them

KINDS = sorted(DAMAGES)
random.Random(6).shuffle(KINDS)
KINDS.sort(key=lambda kind: sorted(DAMAGES[kind].outcome.values()))
PARTS = 8  # each has its share of every outcome
# `make test` has another part for each stage and number of ranks, and every outcome at each stage.
QUICK = [(1, 2, 0), (1, 3, 1), (3, 2, 2), (3, 3, 3)]
ALL = [(stage, ranks, part) for stage in (1, 3) for ranks in (2, 3) for part in range(PARTS)]
SLOW = [pytest.param(*one, marks=pytest.mark.slow) for one in ALL if one not in QUICK]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """saved(stage): a folder with the two checkpoints of 2 ranks."""

    @functools.cache
    def save(stage):
        folder = tmp_path_factory.mktemp(f"zero{stage}")
        run(folder, 2, SCRIPT, stage, "save")
        return folder

    return save


def outcome(saved, tmp_path, stage, ranks, kinds):
    for path in saved(stage).glob("truth_*.pt"):
        shutil.copy(path, tmp_path)
    for kind in kinds:
        shutil.copytree(saved(stage), tmp_path / kind)
        DAMAGES[kind].change(tmp_path / kind)
    run(tmp_path, ranks, SCRIPT, stage, *kinds, limit=500)
    for kind in kinds:
        told = [
            json.loads((tmp_path / kind / f"told.{rank}.json").read_text()) for rank in range(ranks)
        ]
        yield kind, told, (tmp_path / kind / "said.0").read_text()


def problem(kind, stage, told, said):
    """Why this is not what was to come of it; None if it is."""
    wanted, says = DAMAGES[kind].outcome[stage], DAMAGES[kind].says
    errors = {of_rank.get("error") for of_rank in told}
    if max(of_rank["seconds"] for of_rank in told) > 10:
        return "it took longer than 10 seconds"
    if None not in errors:
        if wanted not in ("refused", "either"):
            return "refused"
        if len(errors) > 1 or "\n" in "".join(errors) or says not in "".join(errors):
            return f"not refused in one line, the same on all ranks, that says {says}"
        return None
    wrong = len(errors) > 1 or [of_rank["wrong"] for of_rank in told if of_rank["wrong"]]
    wrong = wrong or told[0]["tag"] != DAMAGES[kind].taken
    if wanted == "unknowable":
        warned = "the optimizer of step" in said or "swapped" in kind
        return None if wrong and warned else "it should be wrong, and say what can be said"
    if wrong or wanted == "refused":
        return f"loaded, and wrong: {wrong}"
    return None if wanted == "either" or says in said else f"loaded without a line that says {says}"


@pytest.mark.parametrize("stage, ranks, part", [*QUICK, *SLOW])
def test_damage(saved, tmp_path, stage, ranks, part):
    problems = []
    for kind, told, said in outcome(saved, tmp_path, stage, ranks, KINDS[part::PARTS]):
        if text := problem(kind, stage, told, said):
            problems.append(f"{kind}: {text}\n    {told}\n    {said}")
    assert not problems, "\n".join(problems)
