"""What is whole, and is loaded, though a module, an optimizer or a setting is peculiar; and what
cannot be restored, and is refused by the reason that is true."""

import contextlib
import functools
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_optimizer_state
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import universal
from tests.support.case import (
    PRINTED,
    case,
    check_losses,
    check_restored,
    convert,
    load,
    on_own_ranks,
    printed,
    refused,
    restored,
    resumed,
    saved,
    saved_with_losses,
    train_and_save,
)
from tests.support.files import edit, flip
from tests.support.toy import (
    BF16,
    ExtraState,
    Net,
    differences,
    falling,
    is_elementwise,
    is_rank_0,
    make,
    read_truth,
    save_truth,
    snapshot,
    train,
)

# --------------------------------------------------------------------------------------------------
# What modules do with their state


class Forgetful(nn.Module):
    """Resets what a state that it loads does not name, as detectron2's frozen BatchNorm does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.randn(8))

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        state_dict.setdefault(f"{prefix}mean", torch.zeros_like(self.mean))
        super()._load_from_state_dict(state_dict, prefix, *rest)


class ForgetfulChild(Net):
    """Its parent has an extra state, whose name comes after the child's."""

    def __init__(self):
        super().__init__()
        self.parent = PassesOn()
        self.parent.add_module("0", Forgetful())


@case(saved(net=ForgetfulChild))
def children_that_reset(stage):
    restored(stage, net=ForgetfulChild)


class PassesOn(ExtraState):
    """A layer that does nothing, and has extra state and a buffer."""

    def __init__(self):
        super().__init__({"mark": torch.uint8})

    def forward(self, x):
        return x


class Wrapped(Net):
    """torch's checkpoint_wrapper, which Accelerate uses, gives names to parameters that it takes
    back in state_dict()."""

    def __init__(self):
        super().__init__()
        block = nn.Sequential(nn.Linear(8, 8), PassesOn())
        block[0].bias.requires_grad_(False)
        self.block = checkpoint_wrapper(block)

    def forward(self, x):
        return super().forward(self.block(torch.cat([x, x + 1])))


class Inner(nn.Module):
    """Saves and loads itself as the model inside, so that others can read its files."""

    def __init__(self):
        super().__init__()
        self.model = layers()

    def forward(self, x):
        return self.model(x)

    def state_dict(self, *args, **options):
        return self.model.state_dict(*args, **options)

    def load_state_dict(self, state, strict=True):
        self.model.load_state_dict(state, strict)


def check_renamed(stage, net):
    """A model whose state_dict() has other names than its parameters comes back: from its ranks'
    files, from a conversion, and at another stage."""
    restored(stage, net=net)
    convert()
    restored(stage, "u", net=net)
    restored(4 - stage, net=net)


@case(saved(net=Wrapped))
def renamed_by_a_wrapper(stage):
    check_renamed(stage, Wrapped)


@case(saved(net=Inner))
def renamed_by_the_model(stage):
    check_renamed(stage, Inner)


class Scales:
    """What the codes of 4-bit weights are scaled by, as bitsandbytes' QuantState."""

    def __init__(self, absmax, offset):
        self.absmax = absmax
        self.offset = offset

    @classmethod
    def from_dict(cls, state, device):
        return cls(state["absmax"].to(device), state["quant_state.offset"].item())


class Linear4(nn.Module):
    """As bitsandbytes' Linear4bit: it saves the scales, and does not load them."""

    def __init__(self, scales=True):
        super().__init__()
        self.weight = nn.Parameter(torch.randint(255, (8, 4), dtype=torch.uint8), False)
        self.scales = Scales(torch.rand(4), torch.rand(1).item())
        if scales:
            self.weight.quant_state = self.scales

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = self.scales.absmax
        offset = torch.tensor(self.scales.offset, dtype=torch.float64)
        destination[f"{prefix}weight.quant_state.offset"] = offset

    def forward(self, x):
        return x @ (self.weight * self.scales.absmax - self.scales.offset)


class Adapter(Net):
    """Trains beside a frozen matrix of 4 bits."""

    def __init__(self, **options):
        super().__init__()
        self.base = Linear4(**options)

    def forward(self, x):
        return super().forward(x) + self.base(x).mean()


def scales_of(engine):
    return vars(engine.module.base.scales)


def of_a_quantized_model(**options):
    def save(stage):
        saved(net=Adapter, **options)(stage)
        torch.manual_seed(1)
        save_truth(vars(Adapter().base.scales), "scales.pt")

    return save


@case(of_a_quantized_model(), quick_stages=(1, 3))
def codes_and_scales(stage):
    """Both come back, though the module takes no scales."""
    truth = read_truth("scales.pt")
    for strict in (True, False):
        engine = restored(stage, told={"load_module_strict": strict}, net=Adapter)
        scales = scales_of(engine)
        assert not differences(truth, scales)
    assert "left as it is" not in PRINTED.getvalue()


@case(of_a_quantized_model())
def codes_whose_scales_nobody_takes(stage):
    """Of another package: they are wrong with the scales of another model, and right with their
    own."""
    for strict in (True, False):
        engine = make(stage, lambda: Adapter(scales=False), seed=5)
        refused(engine, "no module takes base.weight.absmax", load_module_strict=strict)
    load(make(stage, lambda: Adapter(scales=False), seed=1))


@case(of_a_quantized_model(frozen=False))
def scales_without_their_codes(stage):
    """As of PEFT under a Trainer, which saves no frozen weights: the scales stay those of the codes
    in the model."""
    engine = make(stage, Adapter, seed=5)
    initial = dict(scales_of(engine))
    load(engine, load_module_strict=False)
    assert scales_of(engine) == initial
    assert printed("base.weight.absmax, base.weight.quant_state.offset: left as it is")
    load(make(stage, Adapter, seed=1), load_module_strict=False)


# --------------------------------------------------------------------------------------------------
# What optimizers and schedulers keep


def one_cycle(optimizer):
    """It keeps its bounds in the parameter groups."""
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=50)


@case(saved(scheduler=one_cycle))
def without_its_scheduler(stage):
    check_restored(resumed(stage), but=["scheduler"])


def momentum_in_one_group(parameters):
    groups = [
        {"params": parameters[:2], "momentum": 0.9},
        {"params": parameters[2:], "momentum": 0.0},
    ]
    for parameter in parameters[:2]:
        parameter.states = ["momentum_buffer"]
    return torch.optim.SGD(groups, lr=0.1)


def states_of_its_group(parameter):
    return getattr(parameter, "states", [])


IN_ONE_GROUP = {"optimizer": momentum_in_one_group, "states": states_of_its_group}


@case(saved(**IN_ONE_GROUP))
def a_group_without_states(stage):
    restored(stage, **IN_ONE_GROUP)


# --------------------------------------------------------------------------------------------------
# Settings, and folders


def float64():
    torch.set_default_dtype(torch.float64)
    net = Net()
    torch.set_default_dtype(torch.float32)
    return net


@case(saved(net=float64), quick_stages=(1, 3))
def weights_in_float64(stage):
    """At ZeRO-1 and 2 the masters have half their precision."""
    restored(stage, net=float64)


@case()
def another_default_device(stage):
    """As of a script that has called torch.set_default_device("cuda")."""
    engine = make(stage, seed=5)
    torch.set_default_device("meta")
    load(engine)
    torch.set_default_device("cpu")
    check_restored(engine)


@case(saved_with_losses(), stages=(1, 2), quick_ranks=(2, 3))
def put_away(stage):
    """By engine.offload_states(), as where another program needs the GPU between two steps."""
    engine = make(stage, seed=5)
    engine.offload_states(pin_memory=False)
    load(engine)
    check_losses(engine)
    load(engine)  # after steps
    state = safe_get_full_optimizer_state(engine.module.a.weight, "exp_avg")
    assert torch.equal(state, read_truth()["a.weight exp_avg"])
    check_restored(engine)


PRECISIONS = {"fp32": {}, "bf16": BF16}


def save_beside_damage(stage):
    for tag, options in PRECISIONS.items():
        train_and_save(stage, tag, truth=f"{tag}.pt", **options)
        if is_rank_0():
            shutil.copytree(tag, f"damaged {tag}")
            for shard in Path(f"damaged {tag}").glob("*zero_pp_rank_1_*optim_states.pt"):
                flip(shard)


def places_of(engine):
    """The masters and states, by their addresses."""
    states = engine.optimizer.optimizer.state.items()
    tensors = [tensor for masters, state in states for tensor in (masters, *state.values())]
    return [tensor.data_ptr() for tensor in tensors if is_elementwise(tensor)]


@case(save_beside_damage, quick_stages=(1, 3), quick_ranks=(2,))
def states_stay_where_they_are(stage):
    """So that a card need not hold both. Damage leaves all as it was, in an engine that has stepped
    and in one that has not."""
    for tag, options in PRECISIONS.items():
        engine = make(stage, seed=5, **options)
        for _ in range(2):
            before = snapshot(engine)
            refused(engine, "is damaged", tag=f"damaged {tag}")
            assert not differences(before, snapshot(engine))
            train(engine, 7)
        places = places_of(engine)
        load(engine, tag)
        assert len(places) >= 3 and places_of(engine) == places
        check_restored(engine, f"{tag}.pt")


@case(stages=(1, 3), quick_stages=(1,))
def a_new_scheduler(stage):
    engine = make(stage, scheduler=falling)
    refused(engine, "no state of a scheduler in the checkpoint; load_lr_scheduler_states=False")
    load(engine, load_lr_scheduler_states=False)
    load(engine, load_module_only=True)


@case(quick_stages=(1,))
def no_such_checkpoint(stage):
    """The line says what there is, and never that one is damaged."""
    engine = make(stage, checkpoint={"load_universal": True})
    options = {"tag": None, "missing_ok": True}
    refused(engine, ". holds no universal checkpoint", "there is t", **options)
    with contextlib.chdir("t"):
        refused(make(stage), ". is a checkpoint: load_dir is the folder above", **options)


def with_int8_weights(stage):
    """As zero_quantized_nontrainable_weights saves them: of no scales."""
    train_and_save(stage)

    def change(model):
        weights = model["frozen_param_fragments"] if stage == 3 else model["module"]
        weights["frozen.weight"] = weights["frozen.weight"].to(torch.int8)

    if is_rank_0():
        edit(Path("t"), "*model_states.pt", change)


@case(with_int8_weights)
def integers_for_frozen_weights(stage):
    refused(make(stage), "frozen.weight is (4, 8) of torch.float32 here", "of torch.int8 in")


def save_on_two_disks(stage):
    """A conversion, whose folder zero/ has had more entries on one of them."""
    train_and_save(stage)
    if is_rank_0():
        universal.convert("t", "t_universal")
        for rank in (0, 1):
            shutil.copytree("t_universal", f"disk{rank}/t")
        entries = [Path(f"disk1/t/zero/{i:0150}") for i in range(2000)]
        for entry in entries:
            entry.touch()
        for entry in entries:
            entry.unlink()
        size, other_size = (Path(f"disk{rank}/t/zero").stat().st_size for rank in (0, 1))
        assert size < other_size


@case(save_on_two_disks, quick_stages=(1,))
def folders_of_another_size(stage):
    engine = make(stage, seed=5)
    with contextlib.chdir(f"disk{min(1, dist.get_rank())}"):
        load(engine)
    check_restored(engine)


def save_client_state(stage):
    """What copies of a model keep, and whoever else gives attributes to an OrderedDict."""
    average = nn.BatchNorm1d(3).state_dict()
    average.note = [average]
    make(stage).save_checkpoint(".", tag="t", client_state={"average": average})


@case(save_client_state, quick_stages=(1,))
def attributes_of_a_client_state(stage):
    convert()
    for tag in ("t", "u"):
        average = load(make(stage), tag)["average"]
        assert average._metadata == nn.BatchNorm1d(3).state_dict()._metadata
        assert average.note[0] is average


def compiled():
    return torch.compile(layers(), backend="eager")


def save_compiled(stage):
    for tag, net in {"eager": layers, "compiled": compiled}.items():
        train_and_save(stage, tag, truth=f"{tag}.pt", net=net)


@case(save_compiled, stages=(1, 2), quick_stages=(1,), quick_ranks=(2,))
def compiled_on_one_side(stage):
    """DeepSpeed trains no compiled modules at ZeRO-3."""
    cure = "torch.compile() has named them: compile the same modules here, too"
    refused(make(stage, layers), cure, tag="compiled")
    half = layers()
    half.a = torch.compile(half.a, backend="eager")
    for net in (compiled, lambda: half):
        cure = "torch.compile() names them: give DeepSpeed the model without it, model._orig_mod"
        refused(make(stage, net), cure, tag="eager", load_module_strict=False)
    check_restored(resumed(stage, "compiled", net=compiled), "compiled.pt")
    check_restored(resumed(stage, "eager", net=lambda: compiled()._orig_mod), "eager.pt")


WITHOUT_ZIP = {"checkpoint": {"checkpoint_serialization": False}}


@case(saved(**WITHOUT_ZIP), stages=(0, 1, 2, 3), quick_stages=(0, 1), quick_ranks=(2,))
def files_of_before_torch_1_6(stage):
    refused(make(stage), "_states.pt was saved with", "save again without that option", tag=None)
    if on_own_ranks():
        engine = make(stage, seed=5)
        engine.load_checkpoint(".", "t")  # DeepSpeed's own
        engine.save_checkpoint(".", "again", save_latest=False)
        restored(stage, "again")


def save_without_checksums(stage):
    torch.serialization.set_crc32_options(False)
    train_and_save(stage)
    torch.serialization.set_crc32_options(True)


@case(save_without_checksums, quick_stages=(1,))
def files_without_checksums(stage):
    restored(stage)
    convert(check=True)
    restored(stage, "u")


@case(saved(zero_optimization=True), stages=(1,))
def zero_optimization_true(stage):
    """As DeepSpeed has it from long ago: it means ZeRO-1."""
    restored(stage)


ROUND_ROBIN = {"zero": {"round_robin_gradients": True}}


def name_config(engine):
    """As versions did that got a path. Nothing then tells that the numbers of the slices are wrong,
    as round_robin_gradients makes them."""
    engine.config = "ds_config.json"


@case(
    saved_with_losses(change=name_config, **ROUND_ROBIN),
    stages=(1, 2),
    quick_ranks=(2,),
)
def path_of_a_config(stage):
    check_losses(resumed(stage, **ROUND_ROBIN))


def save_beside_another_file(stage):
    """Without ZeRO, where DeepSpeed's loader reads files whose checksums, if any, we compare."""
    train_and_save(stage)
    if is_rank_0():
        Path("t", "mine.pt").write_text("nothing of torch")


@case(save_beside_another_file, stages=(0,))
def files_of_somebody_else(stage):
    load(make(stage))


def save_in_two_dtypes(stage):
    """Under one name."""
    train_and_save(stage)
    train_and_save(stage, seed=9, **BF16)


@case(save_in_two_dtypes, quick_stages=(1, 3))
def shards_of_two_dtypes(stage):
    refused(make(stage, seed=5, **BF16), "t was saved twice under its name", tag=None)
    if is_rank_0():
        earlier = shutil.ignore_patterns("zero_pp_*_optim_states.pt")
        shutil.copytree("t", "later", ignore=earlier, dirs_exist_ok=True)
    dist.barrier()
    restored(stage, "later", **BF16)


# --------------------------------------------------------------------------------------------------
# Names


def layers():
    """One of them has an extra state, and a tensor by a hook."""
    net = Net()
    net.block = PassesOn()
    return net


class NamedAdapter(nn.Module):
    """Beside a frozen base."""

    def __init__(self, name="default"):
        super().__init__()
        self.base = nn.Linear(8, 3).requires_grad_(False)
        self.adapters = nn.ModuleDict({name: nn.Linear(8, 3, bias=False)})

    def forward(self, x):
        (adapter,) = self.adapters.values()
        return (self.base(x) + adapter(x)).pow(2).mean()


@case(saved(net=NamedAdapter), stages=(1, 2, 3), quick_ranks=(2,))
def nothing_trained_has_its_name(stage):
    """Not with initial weights at the old step, whatever it is told; but a new adapter on weights
    that were trained before begins."""
    renamed = functools.partial(NamedAdapter, "policy")
    lists = ["here (1): adapters.policy.weight", "checkpoint (1): adapters.default.weight"]
    for options in (
        {},
        {"load_module_strict": False},
        {"load_module_strict": False, "load_optimizer_states": False},
        {"load_module_strict": False, "load_module_only": True},
    ):
        for to in {stage, 1}:
            refused(make(to, renamed, seed=5), *lists, **options)
