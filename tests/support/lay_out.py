"""ZeRO checkpoints of random weights, written without a training: in DeepSpeed 0.19.8's format, as
bf16 training on so many ranks writes them. Tests change what is in small ones; benchmarks convert
large ones."""

import math
import shutil
from collections import OrderedDict

import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

MASTERS = "single_partition_of_fp32_groups"  # at ZeRO-1


def groups_of(net):
    """The parameter shapes of a model, in a decay and a no-decay group."""
    shapes = [(name, parameter.shape) for name, parameter in net.named_parameters()]
    decay = OrderedDict((name, shape) for name, shape in shapes if len(shape) > 1)
    no_decay = OrderedDict((name, shape) for name, shape in shapes if len(shape) <= 1)
    return [decay, no_decay]


def lay_out(folder, groups, ranks, stage, shared_params=None):
    """Write a checkpoint of step 100. groups: [{name: shape}], one for each parameter group. The
    same numbers in every run, others in every tensor."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.rand(shape, generator=generator)

    shapes = {name: shape for group in groups for name, shape in group.items()}
    model = model_states(groups, ranks, shared_params or {})
    if stage == 3:
        model["module"] = {name: torch.empty(0, dtype=torch.bfloat16) for name in shapes}
        for rank in range(ranks):
            torch.save(model, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    make_shard = shard_of_stage_3 if stage == 3 else shard_of_stage_1
    masters = [[] for _ in groups]
    for rank in range(ranks):
        shard = make_shard(groups, rank, ranks, random)
        for flat, of_rank in zip(masters, shard.get(MASTERS, ()), strict=False):
            flat.append(of_rank)
        shard |= {"loss_scaler": LossScaler(1.0), "dynamic_loss_scale": False, "overflow": False}
        shard["zero_stage"] = ZeroStageEnum(stage)
        content = {"optimizer_state_dict": shard, "ds_config": {}, "ds_version": "0.19.8"}
        torch.save(content, folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    if stage < 3:
        model["module"] = weights_of(groups, masters)
        torch.save(model, folder / "mp_rank_00_model_states.pt")


def weights_of(groups, masters):
    """{name: weights}. masters: of each group, its slices."""
    weights = {}
    for group, slices in zip(groups, masters, strict=True):
        parts = torch.cat(slices).bfloat16().split([shape.numel() for shape in group.values()])
        views = zip(group, parts, strict=True)
        weights |= {name: part.view(group[name]).clone() for name, part in views}
    return weights


def model_states(groups, ranks, shared_params):
    return {
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": groups,
        "frozen_param_shapes": None,
        "shared_params": shared_params,
        "frozen_param_fragments": None,
        "data_sampler": None,
        "lr_scheduler": {"last_batch_iteration": 100},
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": 100,
        "global_samples": 100,
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": "0.19.8",
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
    }


def adam(sizes, random):
    """The state of PyTorch's AdamW with flat tensors of these sizes, one for each group."""
    step = torch.tensor(100.0)
    state = {
        i: {"step": step, "exp_avg": random(n), "exp_avg_sq": random(n)}
        for i, n in enumerate(sizes)
    }
    hyper = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8}
    groups = [hyper | {"params": [i], "weight_decay": 0.0 if i else 0.1} for i in range(len(sizes))]
    return {"state": state, "param_groups": groups}


def shard_of_stage_3(groups, rank, ranks, random):
    """Every parameter is cut by itself."""
    sizes = [sum(math.ceil(shape.numel() / ranks) for shape in group.values()) for group in groups]
    fp32 = [random(size) for size in sizes]
    return {
        "partition_count": ranks,
        "fp32_flat_groups": fp32,
        "optimizer_state_dict": adam(sizes, random),
    }


def shard_of_stage_1(groups, rank, ranks, random):
    """A group's parameters are laid end to end, padded, and cut into one slice per rank."""
    sizes = []
    mappings = []
    paddings = []
    for group in groups:
        total = sum(shape.numel() for shape in group.values())
        size = 2 * math.ceil(total / (2 * ranks))
        mapping = OrderedDict()
        offset = 0
        for name, shape in group.items():
            begin = max(offset, rank * size)
            end = min(offset + shape.numel(), (rank + 1) * size)
            if begin < end:
                mapping[name] = fragment_address(start=begin - rank * size, numel=end - begin)
            offset += shape.numel()
        sizes.append(size)
        mappings.append(mapping)
        paddings.append(max(0, min(size, (rank + 1) * size - total)))
    fp32 = [random(size - padding) for size, padding in zip(sizes, paddings, strict=True)]
    return {
        "clip_grad": 1.0,
        "base_optimizer_state": adam(sizes, random),
        MASTERS: fp32,
        "group_paddings": paddings,
        "ds_version": "0.19.8",
        "partition_count": [ranks, ranks],
        "param_slice_mappings": mappings,
    }
