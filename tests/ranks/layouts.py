"""All that holds for data-parallel ranks holds for tensor-parallel ones, and for pipeline stages:
each state of each optimizer, what is frozen, what modules add, damage, left-over files,
refusals."""

import functools
import shutil
from pathlib import Path

import stage_0
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.utils import groups
from models import Vocabulary
from optimizers import momentum
from torch import nn

import universal
from tests.support.case import Case, case, load, printed, refused
from tests.support.files import flip, records
from tests.support.toy import differences, make, same, snapshot, split_groups, train
from universal.inspect import look

# --------------------------------------------------------------------------------------------------
# tensor parallelism


class Halves(nn.Module):
    """Two tensor-parallel ranks cut `up` by its rows, and `down` by its columns."""

    frozen = ()

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)
        self.register_buffer("calls", torch.zeros(3))
        self.vocabulary = Vocabulary()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name not in self.frozen)
            parameter.use_muon = parameter.dim() == 2

    def forward(self, x):
        self.calls += self.training
        return (self.norm(self.down(self.up(x).relu())) - x.flip(-1)).float().pow(2).mean()


class PartlyFrozen(Halves):
    frozen = ("up.weight", "down.weight", "norm.bias")


class Bigger(Halves):
    def __init__(self):
        super().__init__()
        self.new = nn.Linear(8, 3)

    def forward(self, x):
        return super().forward(x) + self.new(x).mean()


CUT = {"up.weight": 0, "up.bias": 0, "down.weight": 1}  # along which dimension
SPECS = [
    {"patterns": [r".*up\.weight$"], "partition_type": "column"},
    {"patterns": [r".*down\.weight$"], "partition_type": "row"},
]

CUTS = {
    "tensor_parallel": {
        "autotp_size": 2,
        "partition_config": {"use_default_specs": False, "layer_specs": SPECS},
    }
}


def warm_up(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 7))


def two_groups(parameters):
    return torch.optim.AdamW(split_groups(parameters, 2))


KINDS = {
    "adam": {"optimizer": two_groups, "scheduler": warm_up, "clip": 0.5},
    "amsgrad": {"optimizer": lambda ps: torch.optim.AdamW(ps, lr=0.01, amsgrad=True)},
    "momentum": {"optimizer": momentum},
    "partly frozen": {"net": PartlyFrozen, "scheduler": warm_up},
    "bf16": {"bf16": {"enabled": True}},
    "Muon": {"optimizer": {"type": "Muon", "params": {"lr": 1e-2, "torch_adam": True}}},
}


def reset_mesh(degree):
    """DeepSpeed's groups for so many tensor-parallel ranks, as an mpu; None of one."""
    for name in ("mpu", "_TENSOR_MODEL_PARALLEL_GROUP", "_MODEL_PARALLEL_GROUP"):
        setattr(groups, name, None)  # of an earlier engine
    if degree == 1:
        return None
    groups._init_tp_mesh_device(degree)
    return groups


def halves(stage, degree, net=Halves, **options):
    """An engine of so many tensor-parallel ranks."""
    mpu = reset_mesh(degree)
    return make(stage, net, mpu=mpu, **options, **(CUTS if mpu else {}))


def save_halves(stage, **options):
    """At TP 2 and at DP 2. What rank 0 and 1 of the first held is the truth."""
    torch.compiler.set_stance("force_eager")
    for tag, degree in (("whole", 1), ("cut", 2)):
        engine = halves(stage, degree, **options)
        for step in (0, 1):
            train(engine, step)
        engine.save_checkpoint(".", tag, {"word": tag})
        held = [held_by(engine), [train(engine, step) for step in (2, 3)]]
        torch.save(held, f"{tag}.{dist.get_rank()}")


def held_by(engine):
    """The snapshot, without what DeepSpeed cannot gather: Muon's states, before ZeRO-3."""
    is_muon = "muon" in type(engine.optimizer.optimizer).__name__.lower()
    return snapshot(engine, states=not is_muon or engine.zero_optimization_stage() == 3)


def joined(snapshots):
    """What one rank would hold, from what tensor-parallel ranks did."""
    whole = dict(snapshots[0])
    for key, value in whole.items():
        name = key.split()[0]
        values = [of_rank[key] for of_rank in snapshots]
        if name in CUT and torch.is_tensor(value):
            whole[key] = torch.cat(values, CUT[name])
        else:
            assert all(same(value, other) for other in values), key
    return whole


def part_of(whole, rank, degree):
    """The oracle: what one of so many tensor-parallel ranks has of it."""
    part = dict(whole)
    for key, value in whole.items():
        name = key.split()[0]
        if name in CUT and torch.is_tensor(value):
            part[key] = value.chunk(degree, CUT[name])[rank].contiguous()
    return part


def truth_of(tag):
    """(what one rank would hold, the next losses)."""
    held = [torch.load(f"{tag}.{rank}", weights_only=False) for rank in (0, 1)]
    snapshots = [of_rank[0] for of_rank in held]
    return joined(snapshots) if tag == "cut" else snapshots[0], held[0][1]


def load_halves(stage, **options):
    torch.compiler.set_stance("force_eager")
    for tag in ("cut", "whole"):
        for degree in (1, 2) if dist.get_world_size() == 2 else (1,):
            engine = halves(stage, degree, seed=5, **options)
            assert load(engine, tag)["word"] == tag
            truth, losses = truth_of(tag)
            truth = part_of(truth, dist.get_rank() % degree, degree)
            lost = differences(truth, held_by(engine))
            assert not lost, (tag, degree, lost)
            gap = max(abs(train(engine, 2 + i) - loss) for i, loss in enumerate(losses))
            # Of Muon's matrices, each tensor-parallel rank makes its part orthogonal.
            rounding = 1e-2 if "Muon" in str(options) or "bf16" in options else 1e-6
            same_layout = (tag, degree) == ("cut", 2)
            assert gap <= (0 if same_layout else rounding), (tag, degree, gap)


def kinds():
    """{name: Case}: every optimizer, by TP 2 and DP 2 into TP 2, DP 2 and DP 3."""
    cases = {}
    for name, options in KINDS.items():
        stages = (
            (1, 2) if name == "Muon" else (1, 2, 3)
        )  # DeepSpeed's Muon at ZeRO-3 wants DP alone
        quick = (3,) if name in ("amsgrad", "partly frozen") else (1,)
        quick_ranks = (2, 3) if name == "adam" else (2,)
        save = functools.partial(save_halves, **options)
        play = functools.partial(load_halves, **options)
        cases[f"tensor parallel, {name}"] = Case(save, play, stages, quick, quick_ranks)
    return cases


def tensor_parallel(stages=(1, 2, 3), quick_stages=(1,), save=save_halves, ranks=(2,)):
    return case(save, stages, quick_stages, ranks)


@tensor_parallel(quick_stages=(3,))
def parameters_new_or_gone(stage):
    for degree in (1, 2) if dist.get_world_size() == 2 else (1,):
        engine = halves(stage, degree, net=Bigger, seed=5)
        reason = "trained here, and not in the checkpoint (2): new.bias, new.weight"
        refused(engine, reason, tag="cut")
        initial = snapshot(engine, states=False)
        load(engine, "cut", load_module_strict=False)
        truth = part_of(truth_of("cut")[0], dist.get_rank() % degree, degree)
        truth |= {name: initial[name] for name in ("new.weight", "new.bias")}
        held = snapshot(engine)
        assert not differences(truth, held)
        assert torch.equal(held["new.weight fp32"], initial["new.weight"])
        assert not held["new.weight exp_avg"].any()
    engine = halves(stage, 1, net=PartlyFrozen, seed=5)
    load(engine, "cut", load_module_strict=False)
    truth, _ = truth_of("cut")
    held = snapshot(engine)
    assert all(torch.equal(held[name], truth[name]) for name in PartlyFrozen.frozen)


def save_of_each_rank(stage):
    engine = halves(stage, 2)
    train(engine, 0)
    engine.module.calls += dist.get_rank()
    engine.save_checkpoint(".", "t", {"rank": dist.get_rank()})


@tensor_parallel((0, 1, 2, 3), (0, 1, 3), save=save_of_each_rank)
def of_each_rank(stage):
    """On as many tensor-parallel ranks each gets its own buffers and client state."""
    reason = "calls is in no optimizer, and not the same on all tensor-parallel ranks"
    refused(halves(stage, 1), reason, "load_module_strict=False")
    load(halves(stage, 1), load_module_strict=False)
    if dist.get_world_size() == 2:
        engine = halves(stage, 2)
        rank = dist.get_rank()
        assert load(engine)["rank"] == rank
        assert engine.module.calls.tolist() == [12.0 + rank] * 3


@tensor_parallel(quick_stages=(2,))
def weights_alone(stage):
    for degree in (1, 2) if dist.get_world_size() == 2 else (1,):
        for options in ({"load_optimizer_states": False}, {"load_module_only": True}):
            engine = halves(stage, degree, seed=5)
            load(engine, "cut", **options)
            truth = part_of(truth_of("cut")[0], dist.get_rank() % degree, degree)
            kept = {key: truth[key] for key in truth if "exp_avg" not in key}
            lost = {*differences(kept, snapshot(engine))}
            assert lost <= {"groups", "steps", "scale", "scheduler", "counters"}, lost


@tensor_parallel()
def says_which_layout(stage):
    ranks = dist.get_world_size()
    load(halves(stage, 1), "cut")
    assert printed(f"written by 2 ranks (tensor 2), loaded on {ranks} without conversion")
    if ranks == 2:
        load(halves(stage, 2), "whole")
        assert printed("whole, written by 2 ranks, loaded on 2 (tensor 2) without conversion")


# --------------------------------------------------------------------------------------------------
# without ZeRO


def halves_of(kind, degree, seed=1):
    """An engine of stage_0.KINDS, of so many tensor-parallel ranks."""
    mpu = reset_mesh(degree)
    return stage_0.engine_of(kind, seed, PartlyFrozen, mpu=mpu, **(CUTS if mpu else {}))


def save_halves_of(kind):
    for tag, degree in (("whole", 1), ("cut", 2)):
        engine = halves_of(kind, degree)
        for step in (0, 1):
            train(engine, step)
        engine.save_checkpoint(".", tag, {"word": tag})
        held = [stage_0.snapshot(engine), [train(engine, step) for step in (2, 3)]]
        torch.save(held, f"{tag}.{dist.get_rank()}")


def load_halves_of(source, kinds):
    for kind in kinds:
        for tag in ("cut", "whole"):
            for degree in (1, 2) if dist.get_world_size() == 2 else (1,):
                check_halves_of(source, kind, tag, degree)


def check_halves_of(source, kind, tag, degree):
    engine = halves_of(kind, degree, seed=5)
    assert load(engine, tag)["word"] == tag
    now = stage_0.snapshot(engine)
    truth, losses = truth_of(tag)
    truth = stage_0.rounded(part_of(truth, dist.get_rank() % degree, degree), now)
    if not ("fp16" in source and "fp16" in kind):
        del truth["scale"]
    lost = differences(truth, now)
    assert not lost, (kind, tag, degree, lost)
    assert sum(name.endswith(" exp_avg") for name in truth) == 3
    gap = max(abs(train(engine, 2 + i) - loss) for i, loss in enumerate(losses))
    exact = (source, tag, degree) == (kind, "cut", 2)
    fp32 = source.endswith(" fp32") and kind.endswith(" fp32")
    assert gap <= (0 if exact else 1e-6 if fp32 else 2e-2), (kind, tag, degree, gap)


WITHOUT_ZERO = {  # {saved: loaded}
    "0 fp32": ("0 fp32", "1 fp32", "2 bf16", "3 fp32"),
    "0 bf16": ("0 bf16", "1 bf16 summed in fp32", "3 bf16"),
    "0 flat fp16": ("0 flat fp16", "0 fp32", "1 fp16"),
    "1 fp32": ("0 fp32", "0 bf16"),
    "3 fp32": ("0 fp32", "0 flat bf16"),
}


def without_zero():
    """{name: Case}: from engines without ZeRO into those with and without, and back."""
    cases = {}
    for source, kinds in WITHOUT_ZERO.items():
        save = lambda stage, source=source: save_halves_of(source)  # noqa: E731
        play = lambda stage, args=(source, kinds): load_halves_of(*args)  # noqa: E731
        quick = (0,) * (source in ("0 fp32", "0 bf16"))
        cases[f"tensor parallel without ZeRO, {source}"] = Case(save, play, (0,), quick, (2,))
    return cases


def save_and_harm_without_zero(stage):
    """Of the ranks' files, one is flipped, missing, or of an earlier save."""
    engine = halves(stage, 2)
    for step in (0, 1):
        train(engine, step)
        engine.save_checkpoint(".", tag=str(step))
    torch.save([stage_0.snapshot(engine), []], f"cut.{dist.get_rank()}")
    dist.barrier()
    if dist.get_rank() == 0:
        for tag in ("flip 0", "flip 1", "missing", "mixed"):
            shutil.copytree("1", tag)
        for i in (0, 1):
            flip(Path(f"flip {i}", f"mp_rank_0{i}_model_states.pt"))
        Path("missing", SECOND).unlink()
        shutil.copy(Path("0", SECOND), Path("mixed", SECOND))
    dist.barrier()


SECOND = "mp_rank_01_model_states.pt"
HARMS = {
    "flip 0": "mp_rank_00_model_states.pt is damaged",
    "flip 1": "mp_rank_01_model_states.pt is damaged",
    "missing": SECOND,
    "mixed": "its model-parallel ranks are of different saves: global_steps differs",
}


@tensor_parallel((0,), (0,), save=save_and_harm_without_zero)
def damage_without_zero(stage):
    """It is noticed, by inspect, too; and what is whole is told in full, and converted."""
    for kind in (0, 3):
        engine = halves(kind, 1, seed=5)
        for tag, line in HARMS.items():
            refused(engine, line, tag=tag)
        load(engine, "1")
        lost = differences(truth_of("cut")[0], stage_0.snapshot(engine))
        assert {*lost} <= {"scale"}, lost
    if dist.get_rank() == 0:
        for tag, line in HARMS.items():
            facts = look(".", tag)["tags"][tag]
            assert line in f"{facts['problem']} {facts['unread_damage']}", (tag, facts)
        facts = look(".", "1")["tags"]["1"]
        assert facts["checked"] and not facts["problem"] and facts["own_ranks_only"] is None
        assert facts["layout"]["tensor"] == 2 and len(facts["goes_on"]) == 2
        universal.convert("1", "u", check=True)
    dist.barrier()
    engine = halves(1, 1, seed=5)
    load(engine, "u")
    assert {*differences(truth_of("cut")[0], stage_0.snapshot(engine))} <= {"scale"}


# --------------------------------------------------------------------------------------------------
# damage, left-over files, and what does not belong together


def save_and_harm(stage):
    """In "0" to "5" a bit of a tensor-parallel rank's shard is another: where only it has the
    element, and at the end, where both have it."""
    save_halves(stage)
    dist.barrier()
    if dist.get_rank() == 0:
        for number in range(6):
            shutil.copytree("cut", str(number))
            (shard,) = Path(str(number)).glob(f"*zero_pp_rank_0_mp_rank_0{number % 2}_optim*")
            flip(shard, records(shard)[-1 - number // 2], at=0.1 if number < 3 else 0.99)
        shutil.copytree("cut", "left over")
        for shard in Path("cut").glob("*zero_pp_rank_0_mp*optim*"):
            name = shard.name.replace("pp_rank_0", "pp_rank_1")
            shutil.copy(shard, Path("left over", name))
            flip(Path("left over", name))
    dist.barrier()


@tensor_parallel(quick_stages=(1, 3), save=save_and_harm)
def damage_is_noticed(stage):
    """And called damage, also where two ranks' copies differ by it; before the weights change."""
    engine = halves(stage, 1, seed=5)
    before = snapshot(engine, states=False)
    for number in range(6):
        refused(engine, f"{number}/", "optim_states.pt is damaged", tag=str(number))
        after = snapshot(engine, states=False)
        kept = {key: before[key] for key in before if " " not in key}
        assert not differences(kept, after), number
    load(engine, "left over")
    assert printed("left over from before")
    assert not differences(truth_of("cut")[0], snapshot(engine))


def save_two_in_one(stage):
    """Of tensor-parallel rank 1 they have the shard of an earlier save."""
    for tag, options in (("steps", {}), ("no steps", {"optimizer": momentum})):
        engine = halves(stage, 2, **options)
        for step in range(2):
            train(engine, step)
            engine.save_checkpoint(".", tag=f"{tag} {step}")
        if dist.get_rank() == 0:
            (shard,) = Path(f"{tag} 0").glob("*mp_rank_01_optim_states.pt")
            shutil.copy(shard, Path(f"{tag} 1", shard.name))
    dist.barrier()


@tensor_parallel((1, 2), save=save_two_in_one)
def two_saves_in_one(stage):
    refused(halves(stage, 1), "optimizer's step of up.weight differs", tag="steps 1")
    engine = halves(stage, 1, optimizer=momentum)
    refused(engine, "model states and shards are of different steps", tag="no steps 1")


# --------------------------------------------------------------------------------------------------
# who says how the ranks cut


def save_without_info(stage):
    engine = halves(stage, 1)
    engine.save_checkpoint(".", tag="whole")
    engine = halves(stage, 2)
    engine.save_checkpoint(".", tag="cut")
    engine.module.universal_checkpoint_info = None
    engine.save_checkpoint(".", tag="silent")
    dist.barrier()


@tensor_parallel(save=save_without_info)
def a_model_that_says_nothing(stage):
    """What the checkpoint says is enough; if it says nothing either, the line names what to set."""
    cure = "tensor-parallel ranks and no universal_checkpoint_info"
    refused(halves(stage, 1), "silent has 2", cure, tag="silent")
    if dist.get_world_size() == 2:
        engine = halves(stage, 2)
        engine.module.universal_checkpoint_info = None
        refused(engine, "this engine has 2", cure, tag="whole")
        load(engine, "cut")


class Table(nn.Module):
    """Of 10 words, padded to a multiple of 4."""

    def __init__(self, rows):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, 8))
        self.universal_checkpoint_info = {
            "universal_checkpoint_version": 0.2,
            "vocabulary_parameter_patterns": ["^weight$"],
            "original_vocab_size": 10,
        }

    def forward(self, x):
        return (x @ self.weight[:10].T).pow(2).mean()


def save_table(stage):
    engine = make(stage, lambda: Table(12))
    train(engine, 0)
    engine.save_checkpoint(".", tag="t")
    torch.save(snapshot(engine), f"truth.{dist.get_rank()}")


@tensor_parallel(save=save_table)
def another_padding_of_the_vocabulary(stage):
    truth = torch.load("truth.0", weights_only=False)
    for rows in (10, 12, 20):
        engine = make(stage, functools.partial(Table, rows), seed=5)
        load(engine)
        for key, value in snapshot(engine).items():
            if torch.is_tensor(value) and key.startswith("weight"):
                assert torch.equal(value[:10], truth[key][:10]) and not value[12:].any()


class Packed(nn.Module):
    """A gate and a value in one matrix; `subs` says how many are cut by themselves."""

    def __init__(self, rows, subs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, 8))
        entry = {"patterns": ["^weight$"], "shape": [subs, 8], "partition_dim": 0}
        self.universal_checkpoint_info = {
            "universal_checkpoint_version": 0.2,
            "parameter_with_sub_params": [entry] if subs else [],
        }

    def forward(self, x):
        return (x @ self.weight.T).pow(2).mean()


def packed(stage, degree, subs):
    mpu = reset_mesh(degree)
    torch.manual_seed(0)
    return make(stage, lambda: Packed(16 // degree, subs), seed=dist.get_rank(), mpu=mpu)


def save_packed(stage):
    for tag, degree, subs in (("whole", 1, 2), ("cut", 2, 2)):
        engine = packed(stage, degree, subs)
        train(engine, 0)
        engine.save_checkpoint(".", tag)
        torch.save(snapshot(engine), f"{tag}.{dist.get_rank()}")


@tensor_parallel(save=save_packed)
def a_model_that_says_something_else(stage):
    """Of another degree, its parts would be others. On the same one they are as they were."""
    line = "weight is of [] in the model's universal_checkpoint_info, and of ["
    refused(packed(stage, 1, 0), line, tag="cut")
    load(packed(stage, 1, 2), "cut")
    if dist.get_world_size() == 2:
        refused(packed(stage, 2, 0), line, tag="whole")
        engine = packed(stage, 2, 0)
        load(engine, "cut")
        truth = torch.load(f"cut.{dist.get_rank()}", weights_only=False)
        assert not differences(truth, snapshot(engine))


# --------------------------------------------------------------------------------------------------
# pipeline stages


def by_dimensions(parameters):
    """Matrices decay, and others do not: a stage may have one kind alone, and DeepSpeed drops the
    empty group."""
    matrices = [p for p in parameters if p.dim() > 1]
    others = [p for p in parameters if p.dim() < 2]
    kinds = [{"params": others, "weight_decay": 0.0}, {"params": matrices, "weight_decay": 0.1}]
    return torch.optim.AdamW([kind for kind in kinds if kind["params"]], lr=0.01)


def stages_of(stages, layers, seed=1):
    def net():
        return PipelineModule(
            layers, num_stages=stages, loss_fn=lambda out, _: out.pow(2).mean(), seed_layers=False
        )

    groups.mpu = None
    engine = make(1, net, by_dimensions, seed, scheduler=warm_up, batch=6)
    return engine


MATRICES_FIRST = [LayerSpec(nn.Linear, 8, 8, bias=False), LayerSpec(nn.LayerNorm, 8)]
LAYERS = {"norm last": MATRICES_FIRST, "norm first": MATRICES_FIRST[::-1]}


def train_stages(engine, step):
    inputs = torch.randn(1, 8, generator=torch.Generator().manual_seed(step))
    return engine.train_batch((inputs, inputs) for _ in range(99)).item()


def save_stages(_):
    for name, layers in LAYERS.items():
        engine = stages_of(2, layers)
        for step in (0, 1):
            train_stages(engine, step)
        engine.save_checkpoint(".", tag=name)
        torch.save([train_stages(engine, step) for step in (2, 3)], f"{name}.losses")
        dist.barrier()


@case(save_stages, stages=(1,), quick_ranks=(2, 3))
def a_stage_without_a_parameter_group(stage):
    """Its only group has the number of another one."""
    for name, layers in LAYERS.items():
        for stages in (1, 2) if dist.get_world_size() == 2 else (1,):
            engine = stages_of(stages, layers, seed=5)
            load(engine, name)
            for group in engine.optimizer.param_groups:
                is_matrix = engine.module is not None and group["weight_decay"] > 0
                assert group["weight_decay"] in (0.0, 0.1) and group["lr"] < 0.01, is_matrix
            losses = torch.load(f"{name}.losses")
            gaps = [abs(train_stages(engine, 2 + i) - loss) for i, loss in enumerate(losses)]
            assert max(gaps) <= (0 if stages == 2 else 1e-6), (name, stages, gaps)
