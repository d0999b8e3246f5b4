# SPDX-License-Identifier: MIT
"""The experts that a rank of an engine has, and their names among those of all ranks."""

from pathlib import Path
from types import NoneType
from typing import Any

from deepspeed.moe.utils import is_moe_param
from deepspeed.utils import groups

from universal.checkpoint.experts import expert_name
from universal.errors import CheckpointError
from universal.files.schema import expect, is_natural


def global_name(module: Any, name: str) -> str:
    """The name that a parameter would have on one rank with all experts."""
    expert = expert_name(name)
    if not expert:
        return name
    layer = module.get_submodule(expert.layer.removesuffix("."))
    rank = groups._get_expert_parallel_rank(layer.expert_group_name)
    return expert.moved(by=rank * layer.num_local_experts)


def rank_among(parameters: list, rank: int) -> int:
    """This rank's number among the ranks that share out a parameter group.

    parameters: the group's. rank: the data-parallel rank, which is the result for all but experts.
    """
    if parameters and is_moe_param(parameters[0]):
        return groups._get_expert_data_parallel_rank(parameters[0].group_name)
    return rank


AUTOEP = {"ds_autoep_layers?": (NoneType, [{"module_path": str, "ep_size?": is_natural}])}


def check_autoep(module: Any, model: dict, folder: Path) -> None:
    """Raises CheckpointError if AutoEP has placed its experts on other ranks than at the save.

    DeepSpeed does not check it, and at ZeRO-1 and 2 loads other experts' weights. model: model
    states.
    """
    modules = dict(module.named_modules())
    for layer in expect(model, AUTOEP, folder).get("ds_autoep_layers") or []:
        module = modules.get(layer["module_path"])
        size = getattr(module, "ep_size", None)
        saved_size = layer.get("ep_size", size)
        if size and size != saved_size:
            raise CheckpointError(
                f"{folder} has experts of AutoEP for autoep_size {saved_size}, here {size}: "
                "DeepSpeed would mix them up"
            )
        placement = getattr(module, "expert_placement_descriptor", None)
        if placement and (layer.get("expert_placement") or placement) != placement:
            raise CheckpointError(
                f"{folder} has the experts of {layer['module_path']} on other ranks than AutoEP "
                "here: DeepSpeed would mix them up"
            )
