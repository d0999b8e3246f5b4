"""Damaged checkpoints, at ZeRO 1 and 3, on the ranks that saved them and on others:
load_checkpoint() restores just what was saved, or raises one CheckpointError, the same on all
ranks, within seconds. Which of the two, every row of DAMAGES says: a loader that refuses what is
whole fails, and so does one that takes what is not.

`pytest -k shard_missing` runs the rows of that name. To add a row, write what is done to a folder
that holds the checkpoints "t" and "later" of 2 ranks, and what must come of it."""

import functools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.support.commands import only_if
from tests.support.files import flip
from tests.support.harms import (
    FIRST_MODEL,
    LAST_MODEL,
    LATER_MODELS,
    LATER_SHARD_1,
    MODELS,
    SHARD_0,
    SHARD_1,
    SHARDS,
    all_at_once,
    class_of_nobody,
    client_state,
    cut,
    each,
    edited,
    flip_all,
    flip_bit,
    flip_in_directory,
    folder_called,
    from_later,
    half_converted,
    in_order,
    link,
    load_with,
    move,
    neighbour,
    no_optimizer,
    no_second_moment,
    no_states,
    of_conversion,
    remove,
    save,
    save_half,
    save_in_old_format,
    shard_of_rank_2,
    swap,
    truncate,
    untagged,
    write,
    written_at,
)
from tests.support.helpers import run_all
from tests.support.ranks import run

SCRIPT = "tests/ranks/damage.py"


# --------------------------------------------------------------------------------------------------
# 1. what comes of it


class Outcome(NamedTuple):
    """verdict: what the loader must do. says: a part of the line in which it refuses, or of what it
    prints while it loads. tag: which checkpoint it loads."""

    verdict: str
    says: str = ""
    tag: str = "t"


def loads(tag="t", says=""):
    return Outcome("loads", says, tag)


def refused(says=""):
    return Outcome("refused", says)


def either(why):
    """Right is both, but nothing in between."""
    return Outcome("either")


def unknowable(says=""):
    """Nothing in the files tells it from a checkpoint that is right: wrong values are loaded."""
    return Outcome("unknowable", says)


class Damage(NamedTuple):
    """change(folder): what is done. at_3: the outcome at ZeRO-3, where it is another one."""

    name: str
    change: Callable
    outcome: Outcome
    at_3: Outcome | None = None

    def expected(self, stage):
        return self.at_3 or self.outcome if stage == 3 else self.outcome


# --------------------------------------------------------------------------------------------------
# 2. the damages

# Every harm to every file: shard_missing, last_model_half, ...
FILES = {
    "first_shard": SHARD_0,
    "shard": SHARD_1,
    "model": FIRST_MODEL,
    "last_model": LAST_MODEL,
}
HARMS = {
    "missing": (Path.unlink, "is missing"),
    "empty": (lambda path: cut(path, 0), "is damaged"),
    "truncated": (truncate, "is damaged"),
}
TO_FILES = [
    Damage(f"{file}_{name}", each(files, harm), refused(f"{files.suffix} {says}"))
    for file, files in FILES.items()
    for name, (harm, says) in HARMS.items()
]

NOT_ZERO = "model_states.pt does not hold what a ZeRO checkpoint does"
MAY_BELONG = "it may belong to the checkpoint, as the shards of experts do, or not"
NOBODY_MAKES = "zero/ is what tells a universal checkpoint, and nobody makes an empty one"
TRAINERS = "t/trainer_state.json t/rng_state_0.pth t/scheduler.pt t/model.safetensors t/.t.pt.swp"
STEPS = "of different steps"
OPTIMIZER_OF_STEP = unknowable("the optimizer of step")
WHOLE_FILES = [
    Damage("shards_swapped", swap, refused("and renamed")),
    Damage(
        "shards_swapped_and_saved_again",
        in_order(swap, edited(SHARDS, lambda shard: None)),
        refused(),
        at_3=unknowable(),
    ),
    Damage(
        "shard_in_the_old_format",
        each(SHARD_1, save_in_old_format),
        refused("save again without that option"),
    ),
    Damage("another_optimizer_file", write("t/other_optim_states.pt"), either(MAY_BELONG)),
    Damage("empty_zero_folder", folder_called("t/zero"), either(NOBODY_MAKES)),
    Damage("model_is_a_list", each(MODELS, save([1])), refused(NOT_ZERO)),
    Damage(
        "shard_of_another_step",
        each(SHARD_1, from_later),
        refused("rank_1_mp_rank_00_optim_states.pt is at optimizer step 4"),
    ),
    Damage(
        "last_model_of_another_step",
        each(LAST_MODEL, from_later),
        refused("step"),
        at_3=refused("model_states.pt has other global_steps"),
    ),
    Damage(
        "models_of_another_step",
        in_order(each(MODELS, from_later), all_at_once),
        refused(STEPS),
        at_3=OPTIMIZER_OF_STEP,
    ),
    Damage(
        "shards_of_another_step",
        in_order(each(SHARDS, from_later), all_at_once),
        refused(STEPS),
        at_3=OPTIMIZER_OF_STEP,
    ),
    # The save of a later step under the same name: its models are a minute younger than the shards.
    Damage(
        "killed_between_models_and_shards",
        in_order(each(MODELS, from_later), all_at_once, each(MODELS, written_at(61))),
        refused("step"),
        at_3=refused("the save was killed between the two, so name another tag"),
    ),
    # No damage.
    Damage("files_of_a_trainer", write(*TRAINERS.split()), loads()),
    Damage("tag_is_a_link", link, loads()),
    Damage("shard_of_more_ranks", shard_of_rank_2, loads(says="left over from before")),
]

SHARD_0_DAMAGED = refused(f"{SHARD_0.suffix} is damaged")
SHARD_1_DAMAGED = refused(f"{SHARD_1.suffix} is damaged")
MODEL_DAMAGED = refused("model_states.pt is damaged")
READ_FROM_SHARDS = either("at ZeRO-1 it is a weight, which is read from the shards")
NOT_NEEDED = "the end of the archive is damaged, and not what a reader needs of it"
BITS = [
    Damage("bit_of_a_tensor", each(SHARD_1, flip_bit()), SHARD_1_DAMAGED),
    Damage("bit_of_the_step", each(SHARD_0, flip_bit(number=0, at=0)), SHARD_0_DAMAGED),
    Damage("bit_of_a_pickle", each(SHARD_1, flip_bit("data.pkl")), SHARD_1_DAMAGED),
    Damage("bits_of_all_in_a_model", each(FIRST_MODEL, flip_all), MODEL_DAMAGED),
    Damage("bit_of_a_buffer_or_weight", each(FIRST_MODEL, flip), READ_FROM_SHARDS, refused()),
    Damage("bit_of_a_directory", each(SHARD_1, flip_in_directory), either(NOT_NEEDED)),
    Damage(
        "bit_of_a_converted_fp32",
        of_conversion("fp32"),
        refused("a.weight/fp32.pt is damaged"),
    ),
    Damage(
        "converted_exp_avg_missing",
        of_conversion("exp_avg", os.unlink),
        refused("not all of the state exp_avg of a.weight was saved"),
    ),
    Damage(
        "half_of_a_converted_exp_avg",
        of_conversion("exp_avg", save_half),
        refused("not all of the state exp_avg of a.weight was saved"),
    ),
]

TAGS = [
    Damage(
        "tag_absent",
        load_with(tag="nope"),
        refused("nope does not exist; in . there is: later, t"),
    ),
    Damage("tag_empty", load_with(tag=""), refused()),
    Damage("tag_a_number", load_with(move("t", "7"), tag=7), loads("7")),
    Damage(
        "folder_absent",
        load_with(tag=None, load_dir="nowhere"),
        refused("nowhere holds no checkpoint"),
    ),
    Damage("folder_none", load_with(tag=None, load_dir=None), refused()),
]

BEHIND = (1, 2, 1)  # the newest was saved, and its ranks were killed before `latest` was written
GONE = "`latest` names nope, which holds no checkpoint"
PASSED_OVER = loads(says="later is not complete, and is passed over")
IN_ORDER = (1, 2, 3)
NEIGHBOURS = {
    "without_steps": save({"global_steps": None}),
    "old": save({"global_steps": 9}, _use_new_zipfile_serialization=False),
    "half_converted": half_converted,
}
UNTAGGED = [
    *(Damage(f"neighbour_{name}", neighbour(x), loads("later")) for name, x in NEIGHBOURS.items()),
    Damage("latest_binary", untagged(latest="\xff\xfe\x00\x81"), loads("later")),
    Damage(
        "all_half_saved",
        untagged(
            in_order(each(SHARD_1, Path.unlink), each(LATER_SHARD_1, Path.unlink)),
            latest=None,
        ),
        refused("is missing"),
    ),
    Damage(
        "killed_before_it_wrote_latest",
        untagged(latest="t", hours=BEHIND),
        loads("t", "to take that one, `echo later > "),
    ),
    Damage(
        "latest_names_what_is_gone",
        untagged(latest="nope", hours=IN_ORDER),
        loads("later", GONE),
    ),
    Damage(
        "newest_lacks_a_shard",
        untagged(each(LATER_SHARD_1, Path.unlink), hours=IN_ORDER),
        PASSED_OVER,
    ),
    Damage(
        "newest_has_a_flipped_bit",
        untagged(each(LATER_SHARD_1, flip), hours=IN_ORDER),
        PASSED_OVER,
    ),
    Damage(
        "newest_has_flipped_bits_in_its_models",
        untagged(each(LATER_MODELS, flip_all), hours=IN_ORDER),
        loads(says="passed over"),
    ),
]


def without(where, keys, outcome, at_3=None):
    """A row for each key, which is missing in these files."""
    files = {"models": MODELS, "shards": SHARDS, "shard_1": SHARD_1}[where]
    return [
        Damage(f"{key}_missing_in_{where}", remove(files, key), outcome, at_3)
        for key in keys.split()
    ]


OTHER_STATES = refused("exp_avg_sq of the optimizer is not on all ranks")
UINT32 = torch.tensor([1, 2], dtype=torch.uint32)
REFUSED = refused()
LOADS = loads()
CONTENTS = [
    Damage("optimizer_none", edited(SHARD_0, no_optimizer), refused(SHARD_0.suffix)),
    Damage("optimizer_none_on_rank_1", edited(SHARD_1, no_optimizer), refused(SHARD_1.suffix)),
    Damage("second_moment_missing_on_rank_1", edited(SHARD_1, no_second_moment), OTHER_STATES),
    Damage("moments_missing", edited(SHARDS, no_states), refused("there is no optimizer state of")),
    Damage("class_that_nobody_has", class_of_nobody, refused("gone_module")),
    Damage("client_state_with_uint32", client_state(UINT32), LOADS),
    # Any other entry: convert/test_convert_damage.py, which reads as a load does.
    *without("models", "param_shapes module", REFUSED),
    *without("models", "optimizer lr_scheduler global_samples", LOADS),
    # Before ZeRO-3, frozen ones are in the module.
    *without("models", "frozen_param_shapes", LOADS, at_3=REFUSED),
    *without("shards", "state", REFUSED),
    *without("shard_1", "param_groups", REFUSED),
    *without("shards", "loss_scaler", LOADS),
    # Each stage has names of its own; without those of another one nothing is missing.
    *without("shards", "base_optimizer_state", REFUSED, at_3=LOADS),
    *without("shard_1", "optimizer_state_dict", LOADS, at_3=REFUSED),
]

DAMAGES = {
    damage.name: damage for damage in [*TO_FILES, *WHOLE_FILES, *BITS, *TAGS, *UNTAGGED, *CONTENTS]
}


# --------------------------------------------------------------------------------------------------
# 3. what comes of them


def rows():
    """Every damage at each stage and on each number of ranks; `make test` has each of them once,
    or once at each stage where the outcomes differ."""
    layouts = [(stage, ranks) for stage in (1, 3) for ranks in (2, 3)]
    for number, damage in enumerate(DAMAGES.values()):
        quick = layouts[number % 2 :: 2] if damage.at_3 else [layouts[number % 4]]
        for layout in layouts:
            yield only_if(layout in quick, damage.name, *layout)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory, names_of):
    """loaded(stage, ranks): {name: error} of the loads that have not come to an end, and the folder
    with what has come of the others."""

    @functools.cache
    def saved(stage):
        folder = tmp_path_factory.mktemp(f"zero{stage}")
        run(folder, 2, SCRIPT, stage, "save")
        return folder

    @functools.cache
    def load_all(stage, ranks):
        folder = tmp_path_factory.mktemp(f"zero{stage}_on_{ranks}")
        names = names_of[stage][ranks]
        for path in saved(stage).glob("truth_*.pt"):
            shutil.copy(path, folder)
        for name in names:
            shutil.copytree(saved(stage), folder / name)
            DAMAGES[name].change(folder / name)
        return run_all(folder, ranks, SCRIPT, stage, "load", names=names), folder

    return load_all


@pytest.mark.parametrize("name, stage, ranks", list(rows()))
def test_damage(loaded, name, stage, ranks):
    errors_of, top = loaded(stage, ranks)
    assert name not in errors_of, errors_of[name]
    folder = top / name
    outcomes = [json.loads((folder / f"outcome.{r}.json").read_text()) for r in range(ranks)]
    said = (folder / "said.0").read_text()
    verdict, says, tag = DAMAGES[name].expected(stage)
    errors = {outcome["error"] for outcome in outcomes}
    assert len(errors) == 1, "not the same on all ranks"
    assert max(outcome["seconds"] for outcome in outcomes) < 10
    (error,) = errors
    if error:
        assert verdict in ("refused", "either")
        assert "\n" not in error and says in error
        return
    assert verdict != "refused"
    assert says in said
    is_right = all(outcome["tag"] == tag and not outcome["differences"] for outcome in outcomes)
    assert is_right == (verdict != "unknowable"), outcomes
