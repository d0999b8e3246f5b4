"""Checkpoints damaged in 99 ways, at ZeRO 1 and 3, on the ranks that saved them and on others: load_checkpoint()
restores just what was saved, or raises one CheckpointError, the same on all ranks, within seconds."""

import functools
import json
import shutil
import struct
import sys
import types
import zipfile

import pytest
import torch
from helpers import load

from harness.ranks import run

SCRIPT = "tests/ranks/damage.py"
DAMAGES = {}  # name: what to do to a folder that holds the checkpoints "t" and "later"


def damage(change):
    DAMAGES[change.__name__] = change
    return change


def shard(folder, rank, tag="t"):
    return next((folder / tag).glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"))


def models(folder, tag="t"):
    return sorted((folder / tag).glob("*model_states.pt"))


def option(folder, **options):
    (folder / "options.json").write_text(json.dumps(options))


def records(path, part="/data/"):
    """The records of a .pt file, the largest last."""
    with zipfile.ZipFile(path) as archive:
        return sorted((i for i in archive.infolist() if part in i.filename and i.file_size), key=lambda i: i.file_size)


def flip(path, record, at=0.5):
    content, header = bytearray(path.read_bytes()), record.header_offset
    names = sum(struct.unpack_from("<HH", content, header + 26))
    content[header + 30 + names + int(record.file_size * at)] ^= 16
    path.write_bytes(content)


def edit(path, change):
    whole = load(path)
    changed = change(whole)
    torch.save(whole if changed is None else changed, path)


def inner(shard):
    """The state of PyTorch's optimizer in a shard."""
    optimizer = shard["optimizer_state_dict"]
    return optimizer.get("base_optimizer_state") or optimizer["optimizer_state_dict"]


# --- files that are missing, cut off, or not what they should be


@damage
def shard_missing(folder):
    shard(folder, 1).unlink()


@damage
def first_shard_missing(folder):
    shard(folder, 0).unlink()


@damage
def models_missing(folder):
    for path in models(folder):
        path.unlink()


@damage
def last_model_missing(folder):
    models(folder)[-1].unlink()


@damage
def shard_truncated(folder):
    path = shard(folder, 1)
    path.write_bytes(path.read_bytes()[:-100])


@damage
def shard_half(folder):
    content = shard(folder, 0).read_bytes()
    shard(folder, 0).write_bytes(content[: len(content) // 2])


@damage
def shard_empty(folder):
    shard(folder, 1).write_bytes(b"")


@damage
def model_empty(folder):
    models(folder)[0].write_bytes(b"")


@damage
def model_truncated(folder):
    path = models(folder)[-1]
    path.write_bytes(path.read_bytes()[:-50])


@damage
def shard_renamed(folder):
    path = shard(folder, 1)
    path.rename(str(path).replace("rank_1_", "rank_9_"))


@damage
def shards_swapped(folder):
    first, second = shard(folder, 0), shard(folder, 1)
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


@damage
def shards_swapped_and_saved_again(folder):
    first, second = shard(folder, 0), shard(folder, 1)
    a, b = load(first), load(second)
    torch.save(b, first)
    torch.save(a, second)


@damage
def shard_in_the_old_format(folder):
    torch.save(load(shard(folder, 1)), shard(folder, 1), _use_new_zipfile_serialization=False)


@damage
def another_optimizer_file(folder):
    (folder / "t" / "other_optim_states.pt").write_text("x")


@damage
def empty_zero_folder(folder):
    (folder / "t" / "zero").mkdir()


@damage
def model_is_a_list(folder):
    for path in models(folder):
        torch.save([1], path)


# --- one bit


@damage
def bit_of_a_tensor(folder):
    flip(shard(folder, 1), records(shard(folder, 1))[-1])


@damage
def bit_of_the_smallest_tensor(folder):
    flip(shard(folder, 1), records(shard(folder, 1))[0], 0)


@damage
def bit_of_the_step(folder):
    flip(shard(folder, 0), records(shard(folder, 0))[0], 0)


@damage
def bit_of_a_pickle(folder):
    flip(shard(folder, 1), records(shard(folder, 1), "data.pkl")[0])


@damage
def bit_of_a_models_pickle(folder):
    flip(models(folder)[0], records(models(folder)[0], "data.pkl")[0], 0.3)


@damage
def bit_of_the_last_models_pickle(folder):
    flip(models(folder)[-1], records(models(folder)[-1], "data.pkl")[0], 0.7)


@damage
def bit_of_a_buffer_or_weight(folder):
    flip(models(folder)[0], records(models(folder)[0])[-1])


@damage
def bits_of_all_in_a_model(folder):
    for record in records(models(folder)[0]):
        flip(models(folder)[0], record, 0)


@damage
def bit_of_a_directory(folder):
    content = bytearray(shard(folder, 1).read_bytes())
    content[-60] ^= 8
    shard(folder, 1).write_bytes(content)


# --- files of different steps


@damage
def shard_of_another_step(folder):
    shutil.copy(shard(folder, 1, "later"), shard(folder, 1))


@damage
def models_of_another_step(folder):
    for path in models(folder, "later"):
        shutil.copy(path, folder / "t")


@damage
def last_model_of_another_step(folder):
    shutil.copy(models(folder, "later")[-1], folder / "t")


@damage
def shards_of_another_step(folder):
    for rank in (0, 1):
        shutil.copy(shard(folder, rank, "later"), folder / "t")


# --- tags, folders, `latest`


@damage
def tag_absent(folder):
    option(folder, tag="nope")


@damage
def tag_is_a_file(folder):
    (folder / "file").write_text("x")
    option(folder, tag="file")


@damage
def tag_empty(folder):
    option(folder, tag="")


@damage
def tag_a_number(folder):
    (folder / "t").rename(folder / "7")
    option(folder, tag=7)


@damage
def tag_with_a_slash(folder):
    (folder / "run").mkdir()
    (folder / "t").rename(folder / "run" / "t")
    option(folder, tag="run/t")


@damage
def tag_with_a_slash_beside_another(folder):
    (folder / "run").mkdir()
    (folder / "later").rename(folder / "run" / "t")
    option(folder, tag="run/t")


@damage
def folder_absent(folder):
    option(folder, tag=None, load_dir="nowhere")


@damage
def folder_none(folder):
    option(folder, tag=None, load_dir=None)


def latest(change):
    """`latest` names something odd, and the newest that is whole is wanted."""

    @functools.wraps(change)
    def damaged(folder):
        (folder / "latest").unlink()
        change(folder)
        option(folder, tag=None)

    return damage(damaged)


@latest
def latest_absent(folder):
    pass


@latest
def latest_gone(folder):
    (folder / "latest").write_text("nope")


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


@latest
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

    return damage(damaged)


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


@damage
def optimizer_none(folder):
    edit(shard(folder, 0), lambda s: s | {"optimizer_state_dict": None})


@damage
def optimizer_none_on_rank_1(folder):
    edit(shard(folder, 1), lambda s: s | {"optimizer_state_dict": None})


@damage
def class_that_nobody_has(folder):
    gone = sys.modules["gone_module"] = types.ModuleType("gone_module")
    gone.Gone = type("Gone", (), {"__module__": "gone_module"})
    for path in models(folder):
        edit(path, lambda model: model | {"mine": gone.Gone()})
    del sys.modules["gone_module"]


def client_tensor(name, tensor):
    def damaged(folder):
        for path in models(folder):
            edit(path, lambda model: model | {"mine": tensor()})

    DAMAGES[f"client_state_with_{name}"] = damaged


client_tensor("uint32", lambda: torch.tensor([1, 2], dtype=torch.uint32))
client_tensor("float8", lambda: torch.ones(3).to(torch.float8_e4m3fn))
client_tensor("a_sparse_tensor", lambda: torch.eye(3).to_sparse())


@damage
def second_moment_missing_on_rank_1(folder):
    edit(shard(folder, 1), lambda s: [state.pop("exp_avg_sq") for state in inner(s)["state"].values()] and None)


@damage
def moments_missing(folder):
    for rank in (0, 1):
        edit(shard(folder, rank), lambda s: inner(s)["state"].clear())


def without(key, ranks=None):
    """The key is in none of the model states, or not in the optimizer states of these ranks."""

    def damaged(folder):
        for path in models(folder) if ranks is None else []:
            edit(path, lambda model: model.pop(key, None) and None)
        for rank in ranks or ():
            edit(
                shard(folder, rank),
                lambda s: [d.pop(key, None) for d in (inner(s), s["optimizer_state_dict"])] and None,
            )

    DAMAGES[f"{key}_missing_{'in_the_models' if ranks is None else f'on_ranks_{ranks}'}"] = damaged


for key in (
    "param_shapes", "buffer_names", "shared_params", "frozen_param_shapes", "global_steps", "skipped_steps",
    "optimizer", "dp_world_size", "mp_world_size", "ds_config", "ds_version", "lr_scheduler", "global_samples",
    "data_sampler", "checkpoint_parallel_dimensions", "frozen_param_fragments", "module", "random_ltd",
):  # fmt: skip
    without(key)
for key in (
    "zero_stage", "loss_scaler", "dynamic_loss_scale", "overflow", "partition_count", "param_slice_mappings", "state",
    "group_paddings", "ds_version", "clip_grad", "base_optimizer_state", "single_partition_of_fp32_groups",
    "fp32_flat_groups", "optimizer_state_dict", "param_groups",
):  # fmt: skip
    without(key, (0, 1))
for key in ("zero_stage", "partition_count", "state", "param_groups", "base_optimizer_state", "optimizer_state_dict"):
    without(key, (1,))

# --- what comes of them

TAKEN = {  # the tag, where it is not "t"
    "tag_a_number": "7", "tag_with_a_slash": "run/t", "tag_with_a_slash_beside_another": "run/t",
    "latest_with_a_slash": "run/later", "latest_a_folder": "later", "latest_absent": "later", "latest_gone": "later",
    "latest_binary": "later", "latest_empty": "later", "latest_half_saved": "later",
}  # fmt: skip
# At ZeRO-3 nothing in the files tells these from a checkpoint that is right: no file says which rank's shard it holds,
# and an optimizer that was started anew in mid-run has counted other steps than the model, too.
UNKNOWABLE = {"shards_swapped_and_saved_again", "models_of_another_step", "shards_of_another_step"}
KINDS = sorted(DAMAGES)


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
        DAMAGES[kind](tmp_path / kind)
    run(tmp_path, ranks, SCRIPT, stage, *kinds, limit=500)
    for kind in kinds:
        told = [json.loads((tmp_path / kind / f"told.{rank}.json").read_text()) for rank in range(ranks)]
        yield kind, told, (tmp_path / kind / "said.0").read_text()


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("part", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 5))])
def test_damage(saved, tmp_path, stage, ranks, part):
    problems = []
    for kind, told, said in outcome(saved, tmp_path, stage, ranks, KINDS[part::5]):
        loaded = all("step" in of_rank for of_rank in told)
        right = loaded and not any(of_rank["wrong"] for of_rank in told)
        right = right and told[0]["tag"] == TAKEN.get(kind, "later" if kind.startswith("neighbour") else "t")
        errors = {of_rank.get("error") for of_rank in told}
        refused = len(errors) == 1 and None not in errors and "\n" not in str(errors)
        if stage == 3 and kind in UNKNOWABLE:
            assert loaded and not right and ("the optimizer of step" in said or "swapped" in kind), (kind, told, said)
        elif not (right or refused) or max(of_rank["seconds"] for of_rank in told) > 10:
            problems.append((kind, told, said))
    assert not problems, "\n".join(map(str, problems))
