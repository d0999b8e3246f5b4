"""What the converter cannot take, or would lose, it refuses in one line that names it, and nothing
appears."""

import datetime
import errno
import os
import random

import pytest
import torch

from tests.support.commands import converter, failed
from tests.support.conversions import not_converted
from tests.support.files import MODEL, each_state, edit, states
from universal import convert
from universal.inspect import look


def permitted(source, word):
    """With strict=False it goes on, and a warning has the word. The names of the states that
    parameter a has then."""
    with pytest.warns(UserWarning, match=word):
        convert(source, source.parent / "u", check=True, strict=False)
    return {path.stem for path in (source.parent / "u" / "zero" / "a").iterdir()}


STATES = {
    "number": ("momentum_scale", 0.5),
    "text": ("kind", "adaptive"),
    "name_of_the_weights": ("fp32", torch.zeros(13)),
    "steps_of_elements": ("step", torch.zeros(13)),
    "another_length": ("exp_avg_sq", torch.zeros(26)),
    "matrix": ("exp_avg_sq", torch.zeros(13, 2)),
    "scalar_tensor": ("mu_product", torch.zeros(())),
    "another_length_of_muon": ("momentum_buffer", torch.zeros(9)),
}


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name, value", STATES.values(), ids=STATES)
def test_states_without_a_place(laid_out, stage, name, value):
    """What a universal checkpoint cannot hold is refused by its name, or left out by its name."""
    source = laid_out(stage, shard=each_state(lambda state: state.update({name: value})))
    not_converted(source, name, "--no_strict")
    left_out = {name} - {"fp32"}
    assert permitted(source, name) == {"exp_avg", "exp_avg_sq", "fp32", "step"} - left_out


@pytest.mark.parametrize("stage", [1, 3])
def test_scalars_that_differ_by_rank(laid_out, stage):
    """A norm of the slice, as LAMB keeps it, is refused by its name; the step must not differ,
    strict or not."""
    numbers = random.Random(1)

    def add(state):
        state.update(
            scale=torch.rand(()),
            same=torch.ones(()),
            best=numbers.random(),
            date=datetime.date(2026, 1, 2),
            seconds=datetime.timedelta(numbers.random()),
        )

    source = laid_out(stage, shard=each_state(add))
    not_converted(source, "best, date, same, scale, seconds", "--no_strict")
    last = max(source.glob("*_optim_*"))
    edit(source, last.name, each_state(lambda state: state["step"].add_(1)))
    not_converted(source, last.name, "is at optimizer step", strict=False)


def test_trainable_parameter_that_no_group_holds(laid_out):
    """At ZeRO-3 DeepSpeed does not save it at all: only its name is left."""
    source = laid_out(3, model=lambda model: model["module"].update(forgotten=torch.empty(0)))
    not_converted(source, "forgotten", "--no_strict")
    permitted(source, "forgotten")


@pytest.mark.parametrize("stage", [1, 3])
def test_experts(laid_out, stage):
    """With the way to go on."""
    words = ("has experts", "DeepSpeed's own converter does AutoEP's")
    layers = [{"num_experts": 4}]  # which loads on its own ranks: it is no damage
    source = laid_out(stage, lambda model: model.update(ds_autoep_layers=layers))
    not_converted(source, *words)
    (facts,) = look(source)["tags"].values()
    assert facts["refused"] and not facts["problem"]


def test_a_vocabulary_without_its_size(laid_out):
    """A line, and not a KeyError."""
    info = {"universal_checkpoint_version": 0.2, "vocabulary_parameter_patterns": ["a"]}
    source = laid_out(1, lambda model: model.update(universal_checkpoint_info=info))
    not_converted(source, "vocabulary_parameter_patterns and no original_vocab_size")


def test_flag_that_permits_it(laid_out, tmp_path):
    """With that, what is lost is only said, as it is without that the optimizer counts otherwise
    than the module: after a start with the weights alone it counts from 0."""
    source = laid_out(1, shard=each_state(lambda state: state.update(extra=1.5)))
    failed(converter(source, tmp_path / "u"), 2, "extra", "--no_strict")
    edit(source, MODEL, lambda model: model.update(global_steps=102, skipped_steps=3))
    of_step, of_state = converter(source, tmp_path / "u", "--no_strict").err.splitlines()
    for line in (of_step, of_state):
        assert line.startswith("ds_to_universal: warning: ")
    assert f"{MODEL} is of step 99, the optimizer of step [100.0]" in of_step
    assert "extra of the optimizer" in of_state


def test_another_layout(laid_out, tmp_path):
    """The shards say where they hold what. If that is not where it should be, and nothing explains
    it, nobody knows."""

    def move(shard):
        mapping = shard["optimizer_state_dict"]["param_slice_mappings"][0]
        for name in list(mapping)[:1]:
            mapping[name].start += 1

    not_converted(laid_out(1, shard=move), "is not where param_slice_mappings says")
    # With that DeepSpeed writes other slices than it holds.
    config = {"zero_optimization": {"round_robin_gradients": True}}
    convert(laid_out(1, lambda model: model.update(ds_config=config), move), tmp_path / "u")


def test_a_map_of_elements_that_overlap(laid_out):
    """Rows of 3 elements cannot begin at every second one of a rank's part."""
    piece = {"shape": [5, 3], "source": [0, [3, 1]], "dest": [0, [2, 1]]}
    entry = {"logical_shape": [5, 3], "ranks": {"0": {"shape": [5, 3], "pieces": [piece]}}}
    info = {"affine_map": {"version": 1, "params": {"^a$": entry}}}
    source = laid_out(1, lambda model: model.update(universal_checkpoint_info=info))
    not_converted(source, "the shards of a do not cover its elements exactly once")


CHANGES = {
    "shorter": lambda flat: flat[:-3].clone(),
    "with_gaps": lambda flat: flat.repeat_interleave(2)[::2],
    "of_another_dtype": lambda flat: flat.flip(0).bool(),
    "of fewer ranks": lambda ranks: [1, 2] if isinstance(ranks, list) else 1,
    "too few": lambda _: [[0], [0]],
}
PADDINGS = "param_alignment_paddings"
# What is said of it at ZeRO-1, and at ZeRO-3, where flat tensors are of sub-groups.
SLICES = [
    ("fp32", "shorter", ": group 0 has a slice of another", ": sub-group 0 has a slice of another"),
    ("fp32", "with_gaps", "has gaps between", "has gaps between"),
    ("fp32", "of_another_dtype", "fp32 of group 0 is not", "fp32 of sub-group 0 is not"),
    ("exp_avg", "shorter", "exp_avg of the optimizer", "exp_avg of the optimizer"),
    ("partition_count", "of fewer ranks", ": group 0 is cut for 1 ranks", "is of 2 ranks"),
    (PADDINGS, "too few", ": group 0 has another number", ": sub-group 0 has another number"),
]


@pytest.mark.parametrize("place, change, words_1, words_3", SLICES)
def test_a_slice_that_is_not_what_it_should_be(laid_out, place, change, words_1, words_3):
    """In one shard alone, or what all say of them."""

    def edited(shard):
        optimizer = shard["optimizer_state_dict"]
        masters = optimizer.get("fp32_flat_groups") or optimizer["single_partition_of_fp32_groups"]
        optimizer.setdefault(PADDINGS)
        places = {"fp32": masters, "exp_avg": next(iter(states(shard)))}
        holder = places.get(place, optimizer)
        key = 0 if holder is masters else place
        holder[key] = CHANGES[change](holder[key])

    pattern = "*_rank_1_*_optim_*" if place in ("fp32", "exp_avg") else "*_optim_*"
    for stage, words in ((1, words_1), (3, words_3)):
        source = laid_out(stage)
        edit(source, pattern, edited)
        not_converted(source, words, "_optim_states.pt")


@pytest.mark.parametrize("name", ["b\0", "\udc80", "..", "x/../c", "../../escaped"])
def test_names_that_lead_elsewhere(laid_out, name):
    """Of parameters and of states: no file can have them, or another place would be written."""
    not_converted(laid_out(shapes=[{name: torch.Size((7,))}]), repr(name))
    renamed = each_state(lambda state: state.update({name: state.pop("exp_avg")}))
    not_converted(laid_out(1, shard=renamed), repr(name))


# In place of {} the line has the folder.
ERRORS = {
    "disk": (OSError(errno.EIO, "EIO"), "EIO: '{}/c/"),
    "memory": (MemoryError(), "out of memory"),
}


@pytest.mark.parametrize("error, words", ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("call", ["pread", "preadv"])
def test_errors_of_the_system_are_not_damage(laid_out, tmp_path, error, words, call):
    """Whoever is told that a checkpoint is damaged deletes it."""

    def fails(*arguments, **options):
        raise error

    done = converter(laid_out(1), tmp_path / "u", before=lambda: setattr(os, call, fails))
    failed(done, 2, words.format(tmp_path))
    assert "damaged" not in done.err


def test_what_is_no_file(laid_out):
    """A folder is no shard."""
    source = laid_out(1)
    shard = min(source.glob("*_optim_*"))
    shard.unlink()
    shard.mkdir()
    not_converted(source, f"{shard} is not a file")


def test_a_mesh_of_sequence_parallelism(laid_out):
    """Its ranks have trained apart: nothing is damaged, and the line says what is wrong."""
    mesh = {"sequence_parallel_size": 2, "data_parallel_size": 1}
    source = laid_out(3, lambda model: model["ds_config"].update(mesh))
    not_converted(source, "data_parallel_size beside sequence_parallel_size")
    [facts] = look(source)["tags"].values()
    assert not facts["problem"] and "a mesh" in facts["refused"]
