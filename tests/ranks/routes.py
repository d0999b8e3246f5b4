"""What no route by which a checkpoint gets into an engine may lose or accept: the shards that ranks
assemble for themselves, and DeepSpeed's own loader, on the ranks that saved."""

import contextlib
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from deepspeed.linear import LoRAConfig, OptimizedLinear
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.utils import groups
from models import Shaped
from optimizers import SliceNorm, momentum
from torch import nn

import universal
from tests.support.case import (
    PRINTED,
    case,
    check_losses,
    check_restored,
    check_weights_restored,
    degrees,
    load,
    on_own_ranks,
    printed,
    refused,
    resumed,
    saved,
    saved_with_losses,
    train_and_save,
)
from tests.support.helpers import fp16_is
from tests.support.toy import (
    BF16,
    BF16_OPTIMIZER,
    Net,
    differences,
    forward,
    is_rank_0,
    make,
    read_truth,
    save_of_rank,
    save_truth,
    snapshot,
    train,
    truths_of_ranks,
    two_groups,
)
from universal.inspect import look
from universal.load.overrides import overridden

# --------------------------------------------------------------------------------------------------
# Muon


class Matrices(Net):
    """Muon takes the matrices, and Adam the rest."""

    def __init__(self):
        super().__init__()
        for parameter in self.parameters():
            parameter.use_muon = parameter.dim() == 2


MUON = {"net": Matrices, "optimizer": {"type": "Muon", "params": {"lr": 1e-2, "torch_adam": True}}}
MUON_BF16 = MUON | BF16_OPTIMIZER
NOT_SCATTERED = {"reduce_scatter": False}
IN_PARTS = MUON | {"zero": NOT_SCATTERED}
IN_MEMORY = MUON | {"zero": NOT_SCATTERED | {"save_muon_momentum_buffer_in_memory": True}}
OFFLOADED = MUON | {"zero": NOT_SCATTERED | {"offload_optimizer": {"device": "cpu"}}}


# DeepSpeed cannot gather all states.
@case(saved_with_losses(steps=3, states=False, **IN_PARTS), quick_stages=(1, 3))
def muon_at_each_stage(stage):
    """At ZeRO-1 and 2 a rank keeps whole momenta; with offload, and at ZeRO-3, parts of them."""
    check_losses(resumed(stage, **IN_PARTS), begin=3)
    check_losses(resumed(stage, **OFFLOADED), begin=3, exact=False)
    check_losses(resumed(4 - stage, **IN_PARTS), begin=3, exact=False)


@case(saved_with_losses(steps=3, states=False, **MUON_BF16), stages=(1,), quick_ranks=(2, 3))
def muon_on_bf16_optimizer(stage):
    """It cuts the momentum like the masters; ZeRO-1 and 2 keep whole matrices."""
    check_losses(resumed(stage, **MUON_BF16), 1e-3, begin=3)


@case(saved_with_losses(steps=3, states=False, **IN_MEMORY), stages=(3,), quick_ranks=(2, 3))
def muon_with_its_momentum_in_memory(stage):
    """ZeRO-3 looks for it in a buffer of its own, which DeepSpeed's loader leaves at zero."""
    check_losses(resumed(stage, **IN_MEMORY), begin=3)
    if on_own_ranks():
        engine = unknown(make(stage, seed=5, **IN_MEMORY))  # which DeepSpeed's loader gets
        load(engine)
        check_losses(engine, begin=3)


# --------------------------------------------------------------------------------------------------
# Engines of whose state DeepSpeed saves a part


PARTLY_SAVED = {
    "ZenFlow": {"zenflow": {}},
    "SuperOffload": {"offload_optimizer": {"device": "cpu", "super_offload": True}},
}


def as_if(engine, kind):
    """An engine whose config says that it is of this kind. Both want a GPU, or minutes of building
    C++."""
    config = engine._config._param_dict
    engine.config = config | {"zero_optimization": config["zero_optimization"] | PARTLY_SAVED[kind]}
    engine._config._param_dict = engine.config
    return engine


def save_partly(stage):
    """ZenFlow's weights are ahead of its masters, which step at other times; SuperOffload's states
    are in another process."""
    for kind in PARTLY_SAVED:
        engine = as_if(make(stage), kind)
        train(engine, 0)
        states = engine.optimizer.optimizer.state
        if kind == "SuperOffload":
            states.clear()
        elif stage < 3:
            engine.module.a.weight.data += 1
            for state in states.values():
                state["step"] += 1
        engine.save_checkpoint(".", tag=kind)


@case(save_partly, stages=(2, 3), quick_ranks=(2, 3))
def states_that_no_file_holds(stage):
    for kind in PARTLY_SAVED:
        reason = "no file holds the "
        refused(make(stage), reason, kind, "own ranks only", tag=kind)
        if on_own_ranks():
            load(as_if(make(stage), kind), kind)
            assert printed(f"WARNING: {reason}", kind)
        else:
            refused(as_if(make(stage), kind), reason, kind, "own ranks only", tag=kind)
        if is_rank_0():
            with pytest.raises(universal.CheckpointError, match=f"{reason}.*{kind}"):
                universal.convert(kind, "u")


# --------------------------------------------------------------------------------------------------
# what is compared on every route


class Tabled(torch.optim.AdamW):
    """Its groups have a tensor that is the same on all ranks."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.01)
        self.param_groups[0]["table"] = torch.arange(3.0)


@case(saved(optimizer=Tabled), stages=(1, 3))
def a_table_in_a_group(stage):
    engine = make(stage, optimizer=Tabled, seed=5)
    engine.optimizer.param_groups[0]["table"].zero_()
    load(engine)
    (table,) = [group.pop("table") for group in engine.optimizer.param_groups]
    truth = read_truth()
    assert torch.equal(table, truth["groups"][0].pop("table"))
    assert not differences(truth, snapshot(engine))


def autocast(stage, dtype, seed=1):
    fp16_is(True)()
    return make(stage, seed=seed, torch_autocast={"enabled": True, "dtype": dtype})


def save_autocast(stage):
    for dtype in ("float16", "bfloat16"):
        engine = autocast(stage, dtype)
        for step in range(12):  # the first are skipped, until the scale fits
            train(engine, step)
        engine.save_checkpoint(".", tag=dtype)


@case(save_autocast, stages=(1, 3), quick_stages=(1,), quick_ranks=(2,))
def a_scale_that_no_file_holds(stage):
    """torch's GradScaler, of which DeepSpeed saves nothing at any stage."""
    warning = "WARNING: no file holds the loss scale of torch_autocast, which is 65536 now"
    load(autocast(stage, "float16", seed=5), "bfloat16")
    load(autocast(stage, "bfloat16", seed=5), "float16")
    assert warning not in PRINTED.getvalue()
    load(autocast(stage, "float16", seed=5), "float16")
    assert printed(warning)


class Scaling(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))

    def forward(self, x):
        return x * self.weight.mean()


def pipeline(stages, *layers, zero=1, kind=PipelineModule, **options):
    """An engine of these layers and of one that follows. zero: the stage of ZeRO."""

    def net():
        module = kind(
            [*layers, LayerSpec(nn.Linear, 8, 8, bias=False)],
            num_stages=stages,
            loss_fn=lambda output, _: output.pow(2).mean(),
        )
        module.universal_checkpoint_info = {
            "universal_checkpoint_version": 0.2,
            "pipeline_replicated_parameter_patterns": ["tied_modules"],
        }
        return module

    # A pipeline leaves its mpu there, and the next engine would take it.
    with overridden(groups, mpu=None):
        return make(zero, net, **options)


def train_pipeline(engine):
    return engine.train_batch((torch.ones(1, 8), torch.ones(1, 8)) for _ in range(99))


def train_and_save_pipeline(engine, tag="t"):
    train_pipeline(engine)
    engine.save_checkpoint(".", tag=tag)
    return engine


def save_pipeline(*layers, **options):
    return train_and_save_pipeline(pipeline(2, *layers, **options))


SCALING = LayerSpec(Scaling, 2, 8)


@case(lambda stage: save_pipeline(SCALING), stages=(1,), quick_ranks=(2, 3))
def another_pipeline(stage):
    """With as many elements in another shape the shards fit; with a layer less, or another
    optimizer."""
    refused(pipeline(1), "trained in the checkpoint, and not here (1): 1.weight")
    for stages in degrees():
        for shape in ((8, 2), (4, 4)):
            engine = pipeline(stages, LayerSpec(Scaling, *shape))
            refused(engine, f"0.weight is {shape} here, and (2, 8) in the checkpoint")
        refused(pipeline(stages, SCALING, optimizer=momentum), "of another optimizer")
        load(pipeline(stages, SCALING))


def save_two_pipelines(stage):
    """Of the second one a script has set the weights; and its first layer's file is lost."""
    engine = train_and_save_pipeline(pipeline(2, SCALING), "one")
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.mul_(0.5)
    engine.save_checkpoint(".", tag="set")
    train_and_save_pipeline(engine, "two")
    if is_rank_0():
        Path("two/layer_00-model_states.pt").unlink()


@case(save_two_pipelines, stages=(1,), quick_ranks=(2, 3))
def files_of_layers(stage):
    stages = 2 if on_own_ranks() else 1
    engine = pipeline(stages, SCALING, seed=5)
    path, _ = universal.load_checkpoint(engine, ".")
    lost = "two is not complete, and is passed over: two lacks the file layer_00-*model_states.pt"
    assert path == "one" and printed(lost)
    load(engine, "set")
    assert printed("WARNING: 2 of the module's weights are not the optimizer's masters (0.weight)")


def with_ulysses(stage, seed=1):
    """An engine whose mpu, of sequence parallelism, names its own degree as the tensor-parallel."""
    parallel_state_sp._SEQUENCE_PARALLEL_GROUP = None  # or it refuses to make another
    with overridden(groups, mpu=None):
        parallel_state_sp.initialize_sequence_parallel(2)
        return make(stage, seed=seed, mpu=parallel_state_sp, batch=4, micro=1)


def train_alone(engine):
    for step in range(int(engine.gradient_accumulation_steps())):
        engine.backward(forward(engine, step))
        engine.step()
    return engine


def save_by_ulysses(stage):
    engine = train_alone(with_ulysses(stage))
    engine.save_checkpoint(".", tag="t")
    save_truth(snapshot(engine))


@case(save_by_ulysses, stages=(1, 3), quick_stages=(1, 3), quick_ranks=(2, 3))
def sequence_parallelism_of_deepspeed(stage):
    engine = with_ulysses(stage, seed=5) if on_own_ranks() else make(stage, seed=5)
    load(engine)
    check_restored(engine)


def state_of(engine):
    """By the names of one stage: the pipeline's layers, and all of their state."""
    return dict(engine.module.state_dict())


def untied(stages, zero, **options):
    """Layers 0 and 2 share the weight, and each has a bias of its own."""
    tied = TiedLayerSpec("tied", nn.Linear, 8, 8)
    engine = pipeline(stages, tied, LayerSpec(nn.Linear, 8, 8), tied, zero=zero, **options)
    info = engine.module.universal_checkpoint_info
    info["pipeline_replicated_parameter_patterns"] = [r"tied_modules\.tied\.weight"]
    return engine


def save_untied(stage):
    engine = train_and_save_pipeline(untied(2, stage))
    state = {name: tensor.clone() for name, tensor in state_of(engine).items()}
    save_of_rank([state, [train_pipeline(engine).item() for _ in range(2)]])


@case(save_untied, stages=(1,), quick_ranks=(2, 3))
def tied_layers_with_parameters_of_their_own(stage):
    """One name, and each stage trains its own: a whole checkpoint, but of its own ranks alone."""
    reason = "tied_modules.tied.bias is in two pipeline stages and is not declared as tied"
    truths = truths_of_ranks()
    biases = [state["tied_modules.tied.bias"] for state, _ in truths]
    assert not torch.equal(*biases)
    for told in ({}, {"load_module_strict": False, "load_optimizer_states": False}):
        refused(untied(1, stage, seed=5), f"{reason}: it loads on its own ranks only", **told)
    if on_own_ranks():
        truth, losses = truths[dist.get_rank()]
        for states in (False, True):
            engine = untied(2, stage, seed=5)
            load(engine, load_optimizer_states=states)
            assert not differences(truth, state_of(engine))
        assert [train_pipeline(engine).item() for _ in range(2)] == losses
    if is_rank_0():
        assert reason in look(".", "t")["tags"]["t"]["own_ranks_only"]
        with pytest.raises(universal.CheckpointError, match=reason):
            universal.convert("t", "u", strict=False)


def sharded_lora():
    config = LoRAConfig(lora_r=4, lora_alpha=4, base_weight_sharding=dist.get_world_size())
    net = nn.Sequential(OptimizedLinear(8, 8, lora_config=config, device="cpu"))
    net.forward = lambda x: net[0](x).float().pow(2).mean()
    return net


SHARDED_LORA = {"net": sharded_lora} | BF16


def save_sharded_lora(stage):
    engine = train_and_save(stage, **SHARDED_LORA)
    engine.save_checkpoint(".", tag="adapters", exclude_frozen_parameters=True)
    save_truth(engine.module[0].lora_weight_2.weight.detach())


@case(save_sharded_lora, stages=(2,), quick_ranks=(2,))
def frozen_weights_that_ranks_share(stage):
    """DeepSpeed saves rank 0's part alone, which must not become that of all."""
    if not on_own_ranks():
        return  # 8 columns do not divide by 3
    engine = make(stage, seed=5, **SHARDED_LORA)
    layer = engine.module[0]
    with torch.no_grad():
        layer.weight.fill_(dist.get_rank())
    refused(engine, "every rank has another part of 0.weight", "exclude_frozen_parameters=True")
    load(engine, "adapters", load_module_strict=False)
    assert torch.equal(layer.lora_weight_2.weight, read_truth())
    assert (layer.weight == dist.get_rank()).all()


def unknown(engine):
    """The engine, with an optimizer of a class that the loader does not know."""
    kind = type(engine.optimizer)
    engine.optimizer.__class__ = type("SuperOffloadOptimizer_Stage3", (kind,), {})
    return engine


@case(stages=(3,), quick_ranks=(2, 3))
def an_optimizer_that_nobody_knows(stage):
    """DeepSpeed's loader has it on the ranks that saved it; and the rest is compared as ever."""
    kind = "SuperOffloadOptimizer_Stage3 of DeepSpeed"
    if not on_own_ranks():
        refused(unknown(make(stage)), f"nobody has checked where the {kind}", "own ranks only")
        return
    load(unknown(make(stage)))
    unchecked = f"nobody has checked that DeepSpeed's loader restores all of the {kind}"
    assert printed(f"WARNING: {unchecked}")
    engine = unknown(make(stage))
    train(engine, 9)
    engine.save_checkpoint(".", "later")
    for told in ({"load_module_only": True}, {"load_optimizer_states": False}):
        engine = unknown(make(stage, seed=5))
        load(engine, **told)
        check_weights_restored(engine)
    for reason, options in {
        "b.weight is (7, 5) here, and (5, 7) in the checkpoint": {"net": lambda: Shaped(7, 5)},
        "of another optimizer": {"optimizer": momentum},
        "parameter groups": {"optimizer": two_groups},
    }.items():
        refused(unknown(make(stage, **options)), reason)


# --------------------------------------------------------------------------------------------------
# all ranks, or none


@case(saved(clip=1.0), stages=(1,))
def clipping_without_a_norm(stage):
    """The new config clips nothing, and that holds."""
    engine = make(stage, seed=5, zero={"compute_grad_norm": False})
    load(engine)
    assert engine.optimizer.clip_grad == 0
    assert printed("gradient_clipping is 0.0 from now on (was 1.0)")


@case(stages=(1,))
def one_load_fewer(stage):
    """A rank that has left out a load asks for what the others will load later."""
    engine = make(stage, seed=5)
    is_first = is_rank_0()
    words = "rank 0 loads with tag='t', rank 1 with tag='u': has one of them left out a load?"
    refused(engine, words, tag="t" if is_first else "u")
    words = "rank 0 loads with load_optimizer_states=True, rank 1 with load_optimizer_states=False"
    refused(engine, words, load_optimizer_states=is_first)


def save_on_the_disk_of_rank_1(stage):
    train_and_save(stage)
    Path(f"disk{dist.get_rank()}").mkdir()
    if dist.get_rank() == 1:
        os.rename("t", "disk1/t")


@case(save_on_the_disk_of_rank_1, stages=(1,), quick_ranks=(2,))
def a_disk_without_the_checkpoint(stage):
    """Rank 0's is new: a job that started over would be the end of the checkpoint."""
    engine = make(stage)
    with contextlib.chdir(f"disk{min(1, dist.get_rank())}"):
        for missing_ok in (True, False):
            cure = "it must be shared, or mirror.gather() before"
            refused(engine, ". is not the same on", cure, tag=None, missing_ok=missing_ok)


@case(saved(optimizer=SliceNorm), stages=(3,), quick_ranks=(2,))
def one_rank_fails_in_deepspeed(stage):
    """The others wait for it in a collective operation of DeepSpeed's, and end with it."""
    # A rank would wait until the one before it has loaded.
    engine = make(stage, optimizer=SliceNorm, zero={"pipeline_loading_checkpoint": True})
    load_state_dict = engine.optimizer.load_state_dict
    for rank in (0, 1) if on_own_ranks() else ():

        def fail(*arguments, rank=rank, **options):
            if dist.get_rank() == rank:
                raise ValueError("something\nodd")
            return load_state_dict(*arguments, **options)

        began = time.monotonic()
        with overridden(engine.optimizer, load_state_dict=fail):
            line = f"DeepSpeed's loader, on rank {rank}: ValueError: something odd"
            refused(engine, line, timeout=40)
        assert time.monotonic() - began < 20
        load(engine)
