"""What the converter cannot take, or would lose, it refuses in one line that names it, and nothing appears."""

import datetime
import errno
import io
import os
import random
import resource
import struct
import warnings
from pathlib import Path

import pytest
import torch
from helpers import converter, double, edit, load, pickle_file, rename_parameter, states

from universal import CheckpointError, convert

MODEL = "mp_rank_00_model_states.pt"


def refused(source, *words, **options):
    """The conversion ends in one line with these words, and nothing appears."""
    before = sorted(os.listdir(source.parent))
    with pytest.raises(CheckpointError) as error:
        convert(source, source.parent / "u", **options)
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words), error.value
    assert sorted(os.listdir(source.parent)) == before


def permitted(source, word):
    """With strict=False it goes on, and a warning has the word. The names of the states that parameter a has then."""
    with pytest.warns(UserWarning, match=word):
        convert(source, source.parent / "u", check=True, strict=False)
    return {path.stem for path in (source.parent / "u" / "zero" / "a").iterdir()}


# -----------------------------------------------------------------------------
# what would be lost


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    "name, value",
    [
        ("momentum_scale", 0.5),
        ("kind", "adaptive"),
        ("fp32", torch.zeros(13)),
        ("step", torch.zeros(13)),
        ("exp_avg_sq", torch.zeros(26)),
        ("exp_avg_sq", torch.zeros(13, 2)),
        ("mu_product", torch.zeros(())),
        ("momentum_buffer", torch.zeros(9)),  # Muon's, of another length
    ],
)
def test_states_without_a_place(laid_out, stage, name, value):
    """What a universal checkpoint cannot hold is refused by its name, or left out by its name."""
    source = laid_out(stage, shard=lambda shard: [state.update({name: value}) for state in states(shard)])
    refused(source, name, "--no_strict")
    assert permitted(source, name) == {"exp_avg", "exp_avg_sq", "fp32", "step"} - ({name} - {"fp32"})


@pytest.mark.parametrize("stage", [1, 3])
def test_scalars_that_differ_by_rank(laid_out, stage):
    """A norm of the slice, as LAMB keeps it, is refused by its name; the step must not differ, strict or not."""
    numbers = random.Random(1)

    def add(shard):
        for state in states(shard):
            state |= {"scale": torch.rand(()), "same": torch.ones(()), "best": numbers.random()}
            state |= {"date": datetime.date(2026, 1, 2), "seconds": datetime.timedelta(numbers.random())}

    source = laid_out(stage, shard=add)
    refused(source, "best, date, same, scale, seconds", "--no_strict")
    last = max(source.glob("*_optim_*"))
    edit(source, last.name, lambda shard: [state["step"].add_(1) for state in states(shard)])
    refused(source, last.name, "is at optimizer step", strict=False)


def test_trainable_parameter_that_no_group_holds(laid_out):
    """At ZeRO-3 DeepSpeed does not save it at all: only its name is left."""
    source = laid_out(3, model=lambda model: model["module"].update(forgotten=torch.empty(0)))
    refused(source, "forgotten", "--no_strict")
    permitted(source, "forgotten")


def test_patterns_that_match_nothing(laid_out):
    more = {"universal_checkpoint_info": {"tp_replicated_parameter_patterns": ["no such"]}}
    source = laid_out(1, model=lambda model: model.update(more))
    double(source)  # they count where there is something to put together
    refused(source, "patterns that match no parameter: no such", "--no_strict")
    permitted(source, "patterns that match no parameter: no such")


def test_flag_that_permits_it(laid_out, tmp_path):
    source = laid_out(1, shard=lambda shard: [state.update(extra=1.5) for state in states(shard)])
    done = converter(source, tmp_path / "u")
    assert done.code == 2 and done.err.count("\n") == 1 and "extra" in done.err and "--no_strict" in done.err
    done = converter(source, tmp_path / "u", "--no_strict")
    assert done.code == 0 and done.err.startswith("ds_to_universal: warning: ") and "extra" in done.err


def test_step_of_the_module(laid_out, tmp_path):
    """After a start with the weights alone the optimizer counts from 0: that is only said."""
    source = laid_out(1, model=lambda model: model.update(global_steps=99))
    with pytest.warns(UserWarning, match=rf"{MODEL} is of step 99, the optimizer of step \[100.0\]"):
        convert(source, tmp_path / "u")


# -----------------------------------------------------------------------------
# what does not fit together


def test_another_layout(laid_out, tmp_path):
    """The shards say where they hold what. If that is not where it should be, and nothing explains it, nobody knows."""

    def move(shard):
        mapping = shard["optimizer_state_dict"]["param_slice_mappings"][0]
        for name in list(mapping)[:1]:
            mapping[name].start += 1

    refused(laid_out(1, shard=move), "is not where param_slice_mappings says")
    round_robin = {"ds_config": {"zero_optimization": {"round_robin_gradients": True}}}  # then DeepSpeed writes others
    convert(laid_out(1, lambda model: model.update(round_robin), move), tmp_path / "u")


@pytest.mark.parametrize("place", ["fp32", "exp_avg"])
@pytest.mark.parametrize(
    "change",
    [lambda flat: flat[:-3].clone(), lambda flat: flat.repeat_interleave(2)[::2], lambda flat: flat.flip(0).bool()],
    ids=["shorter", "with gaps", "of another dtype"],
)
def test_a_slice_that_is_not_what_it_should_be(laid_out, place, change):
    """In the last shard alone. (It may be shorter by its padding.)"""
    source = laid_out(1)
    last = max(source.glob("*_optim_*")).name

    def edited(shard):
        optimizer = shard["optimizer_state_dict"]
        flats = optimizer["single_partition_of_fp32_groups"]
        holder, key = (flats, 0) if place == "fp32" else (optimizer["base_optimizer_state"]["state"][0], place)
        holder[key] = change(holder[key])

    edit(source, last, edited)
    refused(source, "_optim_states.pt")


@pytest.mark.parametrize("name", ["b\0", "\udc80", "..", "x/../c", "../../escaped"])
def test_names_that_lead_elsewhere(laid_out, name):
    """Of parameters and of states: no file can have them, or another place would be written."""
    refused(laid_out(1, model=rename_parameter(name), shard=rename_parameter(name)), repr(name))
    rename = lambda shard: [state.update({name: state.pop("exp_avg")}) for state in states(shard)]  # noqa: E731
    refused(laid_out(1, shard=rename), repr(name))


def with_info(**info):
    return lambda model: model.update(universal_checkpoint_info=info)


SUB = {"patterns": ["a"], "shape": (0, -1), "partition_dim": 0}


@pytest.mark.parametrize(
    "change, word",
    [
        (with_info(tp_replicated_parameter_patterns=["("]), "error"),
        (with_info(parameter_with_sub_params=[SUB]), "ZeroDivisionError"),
        (with_info(parameter_to_average_patterns=5), "TypeError"),
        (lambda model: model.update(param_shapes=[list(group) for group in model["param_shapes"]]), "items"),
        (lambda model: model.update(universal_checkpoint_info=["x"]), "list"),
        (lambda model: model.update(module=["x"]), "module"),
        (lambda model: model.update(checkpoint_parallel_dimensions=["x"]), "list"),
        (lambda model: model.update(shared_params=5, module={"extra": torch.ones(1)}), "int"),
        (lambda model: model.update(skipped_steps="x"), "TypeError"),
    ],
)
def test_wrong_kind_of_value(laid_out, change, word):
    refused(laid_out(1, model=change), word)


def values(content, path=()):
    """The path of everything in nested dicts and lists."""
    if isinstance(content, (dict, list)):
        for key, inner in content.items() if isinstance(content, dict) else enumerate(content):
            yield (*path, key)
            yield from values(inner, (*path, key))


def unusual(stage):
    """A change of model states that gives them one of everything."""
    info = {"tp_replicated_parameter_patterns": ["b"], "parameter_with_row_parallelism_patterns": ["a"]}
    info |= {"parameter_with_sub_params": [{"patterns": ["c"], "shape": (2, -1), "partition_dim": 0}]}
    more = {"universal_checkpoint_info": info, "mine": {"x": [1, {"y": 2}]}, "buffer_names": ["buffer"]}
    more |= {"ds_config": {"zero_optimization": {"stage": stage, "round_robin_gradients": False}}}
    return lambda model: model.update(more, module=model["module"] | {"buffer": torch.ones(3)})


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", [1, 3])
def test_any_value_of_any_kind(laid_out, tmp_path, stage, every):
    """Every entry of every file, at any depth, replaced by something else: converted or refused in one line. `make
    test` takes one of so many."""
    source = laid_out(stage, unusual(stage))
    rng, tried, converted = random.Random(5), 0, 0
    odd = [None, -1, 10**30, 2.5, "x", b"x", [], ["x"], {}, {"x": 1}, (), torch.zeros(2, 2), torch.Size((3,)), True]
    warnings.simplefilter("ignore", UserWarning)
    for path in sorted(source.iterdir()):
        kept = path.read_bytes()
        for taken in list(values(load(path)))[::every]:
            whole = value = load(io.BytesIO(kept))
            for key in taken[:-1]:
                value = value[key]
            value[taken[-1]] = rng.choice(odd)
            torch.save(whole, path)
            tried += 1
            try:
                convert(source, tmp_path / "u")
                converted += 1
            except CheckpointError as error:
                assert "\n" not in str(error)
            except Exception as error:
                raise AssertionError(f"{path.name} {taken} = {value[taken[-1]]!r}: {error!r}") from error
        path.write_bytes(kept)
    assert tried > 140 // every and converted > 10 // every


# -----------------------------------------------------------------------------
# what is no damage, and what is no file


@pytest.mark.parametrize("error", [OSError(errno.EIO, "EIO"), PermissionError(errno.EACCES, "EACCES"), MemoryError()])
@pytest.mark.parametrize("call", ["pread", "preadv"])
def test_errors_of_the_system_are_not_damage(laid_out, tmp_path, error, call):
    """Whoever is told that a checkpoint is damaged deletes it."""

    def fails(*arguments, **options):
        raise error

    done = converter(laid_out(1), tmp_path / "u", before=lambda: setattr(os, call, fails))
    assert done.code == 1 and done.err.count("\n") == 1 and "damaged" not in done.err
    told = "out of memory" if isinstance(error, MemoryError) else f"{error.strerror}: '{tmp_path}/c/"
    assert told in done.err


def test_what_is_no_file(laid_out, tmp_path):
    """A folder is no shard."""
    source = laid_out(1)
    (shard, _) = sorted(source.glob("*_optim_*"))
    shard.unlink()
    shard.mkdir()
    refused(source, f"{shard} is not a file")
    shard.rmdir()
    refused(source, shard.name, "is missing")


def test_small_pickle_small_memory(laid_out, tmp_path):
    """300 bytes that ask for a memo of a hundred million entries, 800 MB of them."""
    source = laid_out(1)
    data = b"\x80\x02}r" + struct.pack("<I", 100_000_000) + b"." + bytes(280)
    pickle_file(source / MODEL, data)

    def limit():
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (400 << 20),) * 2)

    done = converter(source, tmp_path / "u", before=limit)
    assert done.code == 2 and f"{MODEL} is damaged" in done.err and done.err.count("\n") == 1
