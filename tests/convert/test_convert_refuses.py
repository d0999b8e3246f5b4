"""What the converter cannot take, or would lose, it refuses in one line that names it, and nothing
appears."""

import datetime
import errno
import os
import random

import pytest
import torch
from helpers import converter, edit, failed, not_converted, states

from universal import convert

MODEL = "mp_rank_00_model_states.pt"


def permitted(source, word):
    """With strict=False it goes on, and a warning has the word. The names of the states that
    parameter a has then."""
    with pytest.warns(UserWarning, match=word):
        convert(source, source.parent / "u", check=True, strict=False)
    return {path.stem for path in (source.parent / "u" / "zero" / "a").iterdir()}


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
    source = laid_out(
        stage, shard=lambda shard: [state.update({name: value}) for state in states(shard)]
    )
    not_converted(source, name, "--no_strict")
    assert permitted(source, name) == {"exp_avg", "exp_avg_sq", "fp32", "step"} - (
        {name} - {"fp32"}
    )


@pytest.mark.parametrize("stage", [1, 3])
def test_scalars_that_differ_by_rank(laid_out, stage):
    """A norm of the slice, as LAMB keeps it, is refused by its name; the step must not differ,
    strict or not."""
    numbers = random.Random(1)

    def add(shard):
        for state in states(shard):
            state |= {"scale": torch.rand(()), "same": torch.ones(()), "best": numbers.random()}
            state |= {
                "date": datetime.date(2026, 1, 2),
                "seconds": datetime.timedelta(numbers.random()),
            }

    source = laid_out(stage, shard=add)
    not_converted(source, "best, date, same, scale, seconds", "--no_strict")
    last = max(source.glob("*_optim_*"))
    edit(source, last.name, lambda shard: [state["step"].add_(1) for state in states(shard)])
    not_converted(source, last.name, "is at optimizer step", strict=False)


def test_trainable_parameter_that_no_group_holds(laid_out):
    """At ZeRO-3 DeepSpeed does not save it at all: only its name is left."""
    source = laid_out(3, model=lambda model: model["module"].update(forgotten=torch.empty(0)))
    not_converted(source, "forgotten", "--no_strict")
    permitted(source, "forgotten")


@pytest.mark.parametrize("stage", [1, 3])
def test_experts(laid_out, stage):
    """With the way to go on."""
    words = "has experts", "DeepSpeed's own converter does AutoEP's"
    not_converted(
        laid_out(stage, lambda model: model.update(ds_autoep_layers=[{"num_experts": 4}])), *words
    )
    source = laid_out(stage)
    (source / "layer_0_expert_0_mp_rank_00_model_states.pt").touch()
    not_converted(source, *words)


def test_flag_that_permits_it(laid_out, tmp_path):
    """With that, what is lost is only said, as it is without that the optimizer counts otherwise
    than the module: after a start with the weights alone it counts from 0."""
    extra = lambda shard: [state.update(extra=1.5) for state in states(shard)]  # noqa: E731
    source = laid_out(1, shard=extra)
    failed(converter(source, tmp_path / "u"), 2, "extra", "--no_strict")
    edit(source, MODEL, lambda model: model.update(global_steps=99))
    told = converter(source, tmp_path / "u", "--no_strict").err.splitlines()
    assert len(told) == 2 and all(line.startswith("ds_to_universal: warning: ") for line in told)
    assert (
        f"{MODEL} is of step 99, the optimizer of step [100.0]" in told[0]
        and "extra of the optimizer" in told[1]
    )


def test_another_layout(laid_out, tmp_path):
    """The shards say where they hold what. If that is not where it should be, and nothing explains
    it, nobody knows."""

    def move(shard):
        mapping = shard["optimizer_state_dict"]["param_slice_mappings"][0]
        for name in list(mapping)[:1]:
            mapping[name].start += 1

    not_converted(laid_out(1, shard=move), "is not where param_slice_mappings says")
    round_robin = {
        "ds_config": {"zero_optimization": {"round_robin_gradients": True}}
    }  # then DeepSpeed writes others
    convert(laid_out(1, lambda model: model.update(round_robin), move), tmp_path / "u")


@pytest.mark.parametrize("place", ["fp32", "exp_avg"])
@pytest.mark.parametrize(
    "change",
    [
        lambda flat: flat[:-3].clone(),
        lambda flat: flat.repeat_interleave(2)[::2],
        lambda flat: flat.flip(0).bool(),
    ],
    ids=["shorter", "with gaps", "of another dtype"],
)
def test_a_slice_that_is_not_what_it_should_be(laid_out, place, change):
    """In the last shard alone. (It may be shorter by its padding.)"""
    source = laid_out(1)
    last = max(source.glob("*_optim_*")).name

    def edited(shard):
        optimizer = shard["optimizer_state_dict"]
        flats = optimizer["single_partition_of_fp32_groups"]
        holder, key = (
            (flats, 0)
            if place == "fp32"
            else (optimizer["base_optimizer_state"]["state"][0], place)
        )
        holder[key] = change(holder[key])

    edit(source, last, edited)
    not_converted(source, "_optim_states.pt")


@pytest.mark.parametrize("name", ["b\0", "\udc80", "..", "x/../c", "../../escaped"])
def test_names_that_lead_elsewhere(laid_out, name):
    """Of parameters and of states: no file can have them, or another place would be written."""
    not_converted(laid_out(shapes=[{name: torch.Size((7,))}]), repr(name))
    rename = lambda shard: [state.update({name: state.pop("exp_avg")}) for state in states(shard)]  # noqa: E731
    not_converted(laid_out(1, shard=rename), repr(name))


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "EIO"), PermissionError(errno.EACCES, "EACCES"), MemoryError()]
)
@pytest.mark.parametrize("call", ["pread", "preadv"])
def test_errors_of_the_system_are_not_damage(laid_out, tmp_path, error, call):
    """Whoever is told that a checkpoint is damaged deletes it."""

    def fails(*arguments, **options):
        raise error

    told = (
        "out of memory" if isinstance(error, MemoryError) else f"{error.strerror}: '{tmp_path}/c/"
    )
    done = converter(laid_out(1), tmp_path / "u", before=lambda: setattr(os, call, fails))
    failed(done, 1, told)
    assert "damaged" not in done.err


def test_what_is_no_file(laid_out):
    """A folder is no shard."""
    source = laid_out(1)
    shard = min(source.glob("*_optim_*"))
    shard.unlink()
    shard.mkdir()
    not_converted(source, f"{shard} is not a file")
