"""Checkpoints damaged in 112 ways, at ZeRO 1 and 3, on the ranks that saved them and on others: load_checkpoint()
restores just what was saved, or raises one CheckpointError, the same on all ranks, within seconds. Which of the two is
written down for every damage: a loader that refuses what is whole fails, and so does one that takes what is not."""

import functools
import json
import os
import random
import shutil
import sys
import types
from typing import NamedTuple

import pytest
import torch
from helpers import edit, flip, load, records

from harness.ranks import run

SCRIPT = "tests/ranks/damage.py"
DAMAGES = {}
TAKEN = {}  # the tag that is loaded, where it is not "t"


class Damage(NamedTuple):
    """change: what to do to a folder that holds the checkpoints "t" and "later". outcome: by ZeRO stage, "loads",
    "refused", "either", or "unknowable", where nothing in the files tells it from a checkpoint that is right. says: a
    part of the line of the refusal, or of what is said while it loads."""

    change: object
    outcome: dict
    says: str


def damage(outcome, at_3=None, says="", why=""):
    """at_3: where ZeRO-3 differs."""
    assert ("either" in (outcome, at_3)) == bool(why)

    def keep(change, name=None):
        DAMAGES[name or change.__name__] = Damage(change, {1: outcome, 3: at_3 or outcome}, says)
        return change

    return keep


def shard(folder, rank, tag="t"):
    return next((folder / tag).glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"))


def models(folder, tag="t"):
    return sorted((folder / tag).glob("*model_states.pt"))


def edit_models(folder, change):
    edit(folder / "t", "*model_states.pt", change)


def edit_shards(folder, change, ranks=(0, 1)):
    for rank in ranks:
        edit(folder / "t", f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", change)


def option(folder, **options):
    (folder / "options.json").write_text(json.dumps(options))


def inner(shard):
    """The state of PyTorch's optimizer in a shard."""
    optimizer = shard["optimizer_state_dict"]
    return optimizer.get("base_optimizer_state") or optimizer["optimizer_state_dict"]


# --- files that are missing, cut off, or not what they should be


@damage("refused", says="zero_pp_rank_1_mp_rank_00_optim_states.pt is missing")
def shard_missing(folder):
    shard(folder, 1).unlink()


@damage("refused", says="zero_pp_rank_0_mp_rank_00_optim_states.pt is missing")
def first_shard_missing(folder):
    shard(folder, 0).unlink()


@damage("refused", says="model_states.pt is missing")
def models_missing(folder):
    for path in models(folder):
        path.unlink()


@damage("refused", says="model_states.pt is missing")
def last_model_missing(folder):
    models(folder)[-1].unlink()


@damage("refused", says="rank_1_mp_rank_00_optim_states.pt is damaged")
def shard_truncated(folder):
    path = shard(folder, 1)
    path.write_bytes(path.read_bytes()[:-100])


@damage("refused", says="rank_0_mp_rank_00_optim_states.pt is damaged")
def shard_half(folder):
    content = shard(folder, 0).read_bytes()
    shard(folder, 0).write_bytes(content[: len(content) // 2])


@damage("refused", says="rank_1_mp_rank_00_optim_states.pt is damaged")
def shard_empty(folder):
    shard(folder, 1).write_bytes(b"")


@damage("refused", says="model_states.pt is damaged")
def model_empty(folder):
    models(folder)[0].write_bytes(b"")


@damage("refused", says="model_states.pt is damaged")
def model_truncated(folder):
    path = models(folder)[-1]
    path.write_bytes(path.read_bytes()[:-50])


@damage("refused", says="zero_pp_rank_1_mp_rank_00_optim_states.pt is missing")
def shard_renamed(folder):
    path = shard(folder, 1)
    path.rename(str(path).replace("rank_1_", "rank_9_"))


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


@damage("either", why="it may belong to the checkpoint, as the shards of experts do, or not")
def another_optimizer_file(folder):
    (folder / "t" / "other_optim_states.pt").write_text("x")


@damage("either", why="zero/ is what tells a universal checkpoint, and nobody makes an empty one")
def empty_zero_folder(folder):
    (folder / "t" / "zero").mkdir()


@damage("refused", says="model_states.pt does not hold what a ZeRO checkpoint does")
def model_is_a_list(folder):
    for path in models(folder):
        torch.save([1], path)


# --- one bit


@damage("refused", says="rank_1_mp_rank_00_optim_states.pt is damaged")
def bit_of_a_tensor(folder):
    flip(shard(folder, 1), records(shard(folder, 1))[-1])


@damage("refused", says="rank_1_mp_rank_00_optim_states.pt is damaged")
def bit_of_the_smallest_tensor(folder):
    flip(shard(folder, 1), records(shard(folder, 1))[0], 0)


@damage("refused", says="rank_0_mp_rank_00_optim_states.pt is damaged")
def bit_of_the_step(folder):
    flip(shard(folder, 0), records(shard(folder, 0))[0], 0)


@damage("refused", says="rank_1_mp_rank_00_optim_states.pt is damaged")
def bit_of_a_pickle(folder):
    flip(shard(folder, 1), records(shard(folder, 1), "data.pkl")[0])


@damage("refused", says="model_states.pt is damaged")
def bit_of_a_models_pickle(folder):
    flip(models(folder)[0], records(models(folder)[0], "data.pkl")[0], 0.3)


@damage("refused", says="model_states.pt is damaged")
def bit_of_the_last_models_pickle(folder):
    flip(models(folder)[-1], records(models(folder)[-1], "data.pkl")[0], 0.7)


@damage("either", "refused", why="at ZeRO-1 it is a weight, which is read from the shards")
def bit_of_a_buffer_or_weight(folder):
    flip(models(folder)[0], records(models(folder)[0])[-1])


@damage("refused", says="model_states.pt is damaged")
def bits_of_all_in_a_model(folder):
    for record in records(models(folder)[0]):
        flip(models(folder)[0], record, 0)


@damage("either", why="the end of the archive is damaged, and not what a reader needs of it")
def bit_of_a_directory(folder):
    content = bytearray(shard(folder, 1).read_bytes())
    content[-60] ^= 8
    shard(folder, 1).write_bytes(content)


# --- files of different steps


@damage("refused", says="rank_1_mp_rank_00_optim_states.pt is at optimizer step 4")
def shard_of_another_step(folder):
    shutil.copy(shard(folder, 1, "later"), shard(folder, 1))


def at_once(folder):
    """As if all files were of one save."""
    for path in (folder / "t").iterdir():
        os.utime(path, (1, 1))


@damage("refused", "unknowable", says="of different steps")
def models_of_another_step(folder):
    for path in models(folder, "later"):
        shutil.copy(path, folder / "t")
    at_once(folder)


@damage("refused", says="step")
def killed_between_models_and_shards(folder):
    """The save of a later step under the same name, and its models are a minute younger than the shards."""
    models_of_another_step(folder)
    for path in models(folder):
        os.utime(path, (61, 61))


@damage("refused", says="step")
def last_model_of_another_step(folder):
    shutil.copy(models(folder, "later")[-1], folder / "t")


@damage("refused", "unknowable", says="of different steps")
def shards_of_another_step(folder):
    for rank in (0, 1):
        shutil.copy(shard(folder, rank, "later"), folder / "t")
    at_once(folder)


# --- tags, folders, `latest`


@damage("refused", says="nope does not exist; in tag_absent there is: later, t")
def tag_absent(folder):
    option(folder, tag="nope")


@damage("refused", says="does not exist")
def tag_is_a_file(folder):
    (folder / "file").write_text("x")
    option(folder, tag="file")


@damage("refused")
def tag_empty(folder):
    option(folder, tag="")


@damage("loads")
def tag_a_number(folder):
    (folder / "t").rename(folder / "7")
    option(folder, tag=7)


@damage("loads")
def tag_with_a_slash(folder):
    (folder / "run").mkdir()
    (folder / "t").rename(folder / "run" / "t")
    option(folder, tag="run/t")


@damage("loads")
def tag_with_a_slash_beside_another(folder):
    (folder / "run").mkdir()
    (folder / "later").rename(folder / "run" / "t")
    option(folder, tag="run/t")


@damage("refused", says="nowhere holds no checkpoint that is whole")
def folder_absent(folder):
    option(folder, tag=None, load_dir="nowhere")


@damage("refused")
def folder_none(folder):
    option(folder, tag=None, load_dir=None)


def latest_with(outcome, says=""):
    """`latest` names something odd, and the newest that is whole is wanted."""

    def keep(change):
        @functools.wraps(change)
        def damaged(folder):
            (folder / "latest").unlink()
            change(folder)
            option(folder, tag=None)

        return damage(outcome, says=says)(damaged)

    return keep


latest = latest_with("loads")


@latest
def latest_absent(folder):
    pass


@latest
def latest_binary(folder):
    (folder / "latest").write_bytes(b"\xff\xfe\x00\x81")


@latest
def latest_empty(folder):
    (folder / "latest").write_bytes(b"")


@latest
def latest_a_folder(folder):
    (folder / "latest").mkdir()


@latest
def latest_half_saved(folder):
    (folder / "half").mkdir()
    shutil.copy(models(folder, "later")[0], folder / "half")
    (folder / "latest").write_text("half")


@latest
def latest_with_a_slash(folder):
    (folder / "run").mkdir()
    (folder / "later").rename(folder / "run" / "later")
    (folder / "latest").write_text("run/later")


@latest_with("refused", says="is missing")
def all_half_saved(folder):
    for tag in ("t", "later"):
        shard(folder, 1, tag).unlink()


def neighbour(change):
    """A folder x beside the checkpoints, and the newest that is whole is wanted."""

    @functools.wraps(change)
    def damaged(folder):
        (folder / "x").mkdir()
        change(folder / "x" / "mp_rank_00_model_states.pt")
        option(folder, tag=None)

    return damage("loads")(damaged)


@neighbour
def neighbour_a_list(path):
    torch.save([1, 2], path)


@neighbour
def neighbour_a_text(path):
    path.write_text("hello")


@neighbour
def neighbour_without_steps(path):
    torch.save({"global_steps": None}, path)


@neighbour
def neighbour_with_steps_in_words(path):
    torch.save({"global_steps": "nine"}, path)


@neighbour
def neighbour_a_folder(path):
    path.mkdir()


@neighbour
def neighbour_in_the_old_format(path):
    torch.save({"global_steps": 9}, path, _use_new_zipfile_serialization=False)


@neighbour
def neighbour_half_converted(path):
    torch.save({"global_steps": 9, "module": {}, "param_shapes": []}, path)
    (path.parent / "zero").mkdir()


# --- what the files hold


@damage("refused", says="rank_0_mp_rank_00_optim_states.pt")
def optimizer_none(folder):
    edit_shards(folder, lambda s: s.update(optimizer_state_dict=None), [0])


@damage("refused", says="rank_1_mp_rank_00_optim_states.pt")
def optimizer_none_on_rank_1(folder):
    edit_shards(folder, lambda s: s.update(optimizer_state_dict=None), [1])


@damage("refused", says="gone_module")
def class_that_nobody_has(folder):
    gone = sys.modules["gone_module"] = types.ModuleType("gone_module")
    gone.Gone = type("Gone", (), {"__module__": "gone_module"})
    edit_models(folder, lambda model: model.update(mine=gone.Gone()))
    del sys.modules["gone_module"]


def client_tensor(name, tensor):
    def damaged(folder):
        edit_models(folder, lambda model: model.update(mine=tensor()))

    damage("loads")(damaged, f"client_state_with_{name}")


client_tensor("uint32", lambda: torch.tensor([1, 2], dtype=torch.uint32))
client_tensor("float8", lambda: torch.ones(3).to(torch.float8_e4m3fn))
client_tensor("a_sparse_tensor", lambda: torch.eye(3).to_sparse())


@damage("refused", says="rank_1_mp_rank_00_optim_states.pt has other optimizer states")
def second_moment_missing_on_rank_1(folder):
    edit_shards(folder, lambda s: [state.pop("exp_avg_sq") for state in inner(s)["state"].values()], [1])


@damage("refused", says="there is no optimizer state of")
def moments_missing(folder):
    edit_shards(folder, lambda s: inner(s)["state"].clear())


def without(outcome, keys, ranks=None, **more):
    """A key is in none of the model states, or not in the optimizer states of these ranks."""
    for key in keys.split():

        def damaged(folder, key=key):
            if ranks is None:
                edit_models(folder, lambda model: model.pop(key, None))
            else:
                edit_shards(folder, lambda s: [d.pop(key, None) for d in (inner(s), s["optimizer_state_dict"])], ranks)

        where = "in_the_models" if ranks is None else f"on_ranks_{ranks}"
        damage(outcome, **more)(damaged, f"{key}_missing_{where}")


NEEDED = "DeepSpeed always writes it; what it says can be had without, if one cares to"
without("refused", "param_shapes global_steps skipped_steps module")
without("either", "buffer_names shared_params dp_world_size ds_config", why=NEEDED)
without("loads", "optimizer mp_world_size ds_version lr_scheduler global_samples data_sampler random_ltd")
without("loads", "checkpoint_parallel_dimensions")
without("loads", "frozen_param_shapes frozen_param_fragments", at_3="refused")  # before, frozen ones are in the module
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
    for name in ("trainer_state.json", "rng_state_0.pth", "scheduler.pt", "model.safetensors", ".t.pt.swp"):
        (folder / "t" / name).write_text("x")


@damage("loads")
def tag_is_a_link(folder):
    (folder / "t").rename(folder / "elsewhere")
    (folder / "t").symlink_to("elsewhere")


@damage("loads", says="left over from before")
def shard_of_more_ranks(folder):
    """As when it was saved by more ranks before, under the same name."""
    shutil.copy(shard(folder, 1, "later"), str(shard(folder, 1)).replace("rank_1_", "rank_2_"))


@latest
def latest_with_line_ends(folder):
    (folder / "latest").write_text("later\r\n")


# --- which is the newest that is whole


def newest(taken, says="", latest="later", hours=(1, 2, 3)):
    """No tag is given. hours: when "t", "later" and the file `latest` were written."""

    def keep(change):
        @functools.wraps(change)
        def damaged(folder):
            (folder / "latest").write_text(latest)
            change(folder)
            for name, hour in zip(("t/*.pt", "later/*.pt", "latest"), hours, strict=True):
                for path in folder.glob(name):
                    os.utime(path, (3600 * hour, 3600 * hour))
            option(folder, tag=None)

        TAKEN[change.__name__] = taken
        return damage("loads", says=says)(damaged)

    return keep


@newest("later", "was written after it", latest="t", hours=(1, 2, 1))
def killed_before_it_wrote_latest(folder):
    pass


@newest("t", latest="t")
def somebody_goes_back(folder):
    pass


@newest("t", latest="t", hours=(2, 1, 2))
def the_other_is_of_an_earlier_run(folder):
    pass


@newest("t", "later is not whole, and is passed over")
def newest_lacks_a_shard(folder):
    shard(folder, 1, "later").unlink()


@newest("t", "later is not whole, and is passed over", latest="t", hours=(1, 2, 1))
def newest_lacks_a_shard_and_latest_is_behind(folder):
    shard(folder, 1, "later").unlink()


@newest("t", "later is not whole, and is passed over")
def newest_has_a_flipped_bit(folder):
    flip(shard(folder, 1, "later"))


@newest("t", "passed over")
def newest_has_a_flipped_bit_in_a_buffer(folder):
    for path in models(folder, "later"):
        for record in records(path):
            flip(path, record, 0)


@newest("t", "passed over")
def newest_has_a_model_cut_short(folder):
    path = models(folder, "later")[-1]
    path.write_bytes(path.read_bytes()[:-50])


@newest("later", "`latest` names nope, which holds no checkpoint", latest="nope")
def latest_names_what_is_gone(folder):
    pass


@newest("t", "`latest` names nope, which holds no checkpoint", latest="nope", hours=(2, 1, 1))
def somebody_went_back_and_latest_is_gone(folder):
    pass


# --- what comes of them

TAKEN |= {
    "tag_a_number": "7", "tag_with_a_slash": "run/t", "tag_with_a_slash_beside_another": "run/t",
    "latest_with_a_slash": "run/later", "latest_a_folder": "later", "latest_absent": "later",
    "latest_binary": "later", "latest_empty": "later", "latest_half_saved": "later",
    "latest_with_line_ends": "later",
}  # fmt: skip
# A part for `make test` and four for `make test-all`, drawn by a seed, and each with its share of every outcome.
KINDS = sorted(DAMAGES)
random.Random(6).shuffle(KINDS)
KINDS.sort(key=lambda kind: sorted(DAMAGES[kind].outcome.values()))


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
        told = [json.loads((tmp_path / kind / f"told.{rank}.json").read_text()) for rank in range(ranks)]
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
    wrong = wrong or told[0]["tag"] != TAKEN.get(kind, "later" if kind.startswith("neighbour") else "t")
    if wanted == "unknowable":
        warned = "the optimizer of step" in said or "swapped" in kind
        return None if wrong and warned else "it should be wrong, and say what can be said"
    if wrong or wanted == "refused":
        return f"loaded, and wrong: {wrong}"
    return None if wanted == "either" or says in said else f"loaded without a line that says {says}"


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("part", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 5))])
def test_damage(saved, tmp_path, stage, ranks, part):
    problems = []
    for kind, told, said in outcome(saved, tmp_path, stage, ranks, KINDS[part::5]):
        if text := problem(kind, stage, told, said):
            problems.append(f"{kind}: {text}\n    {told}\n    {said}")
    assert not problems, "\n".join(problems)
