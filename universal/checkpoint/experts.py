# SPDX-License-Identifier: MIT
"""Expert parallelism: which rank has which experts of a mixture.

DeepSpeed numbers each rank's experts from 0, so a name alone does not tell which expert is meant.
This package gives an expert's parameter the name that it would have on one rank with all experts:
then checkpoints and engines of any expert-parallel size agree on the names. load/live_experts.py
does the same for an engine.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

from universal.errors import CheckpointError, Refused
from universal.files.schema import expect
from universal.files.torch_file import load, tensor_of

EXPERT_LIST = "deepspeed_moe.experts.deepspeed_experts"  # within deepspeed's MoE
EXPERT = re.compile(
    rf"(?P<layer>.*\.|){re.escape(EXPERT_LIST)}\.(?P<number>\d+)\.(?P<rest>.*)", re.DOTALL
)

AUTOEP_LAYERS = ("ds_autoep_layers", "autoep_layers")  # the second is the older name


class ExpertName(NamedTuple):
    """The parts of the name of an expert's parameter or buffer.

    layer: the name of the MoE layer, with a dot. number: the expert's. rest: the name within it.
    """

    layer: str
    number: int
    rest: str

    def moved(self, by: int) -> str:
        """The name with `by` added to the expert's number."""
        return f"{self.layer}{EXPERT_LIST}.{self.number + by}.{self.rest}"


def expert_name(name: str) -> ExpertName | None:
    """The parts of a name; None if it is not of an expert."""
    match = EXPERT.fullmatch(name) if EXPERT_LIST in name else None
    return match and ExpertName(match["layer"], int(match["number"]), match["rest"])


class ExpertDataGroup(NamedTuple):
    """Ranks that share out a flat tensor: all ranks, or those with the same experts.

    ranks: in the order of their slices. first_experts: {layer: number of their first expert}.

    ExpertDataGroup(range(1, 4, 2), {"moe.": 2})  # ranks 1 and 3 of 4 have the experts from 2 on
    """

    ranks: range
    first_experts: dict[str, int] = {}

    def global_name(self, name: str) -> str:
        expert = expert_name(name)
        return expert.moved(by=self.first_experts[expert.layer]) if expert else name


class Experts(NamedTuple):
    """The experts of a checkpoint.

    counts: {layer: how many on all ranks}. state: {name: value} of their files. files: the paths.
    """

    counts: dict[str, int]
    state: dict[str, Any]
    files: list[Path]


def read_experts(folder: Path, model: dict) -> Experts:
    """Read the files of experts, without their tensors' elements. model: the model states.

    Raises: CheckpointError; Refused for what is not loaded: experts of AutoEP, and experts with
        tensor or pipeline parallelism.
    """
    counts = model.get("num_experts") or []
    if any(model.get(key) for key in AUTOEP_LAYERS):
        raise Refused(
            f"{folder} has experts of AutoEP, which are not loaded on other ranks, nor converted: "
            "DeepSpeed's own converter does AutoEP's"
        )
    if counts and (model["module"] is None or model.get("mp_world_size", 1) > 1):
        raise Refused(
            f"{folder} has experts, and tensor or pipeline parallelism: it loads on its own ranks "
            "only, by DeepSpeed's own load_checkpoint()"
        )
    experts = Experts({}, {}, [])
    for layer, count in enumerate(counts):
        for number in range(count):
            path = folder / f"layer_{layer}_expert_{number}_mp_rank_00_model_states.pt"
            content = expect(load(path), {str: object}, path)
            for name, value in content.items():
                expert = expert_name(name)
                if expert is None or expert.number != number:
                    raise CheckpointError(f"{path} has {name}, which is not of expert {number}")
                if tensor_of(value) is None or name.endswith("_extra_state"):
                    raise CheckpointError(f"{path} has the extra state {name}, which is not loaded")
                experts.counts[expert.layer] = count
            experts.state.update(content)
            experts.files.append(path)
    return experts


def expert_data_groups(
    names: Any, ranks_of_group: int, ranks: int, model: dict, counts: dict
) -> list[ExpertDataGroup]:
    """The ranks that share out a parameter group, one for each expert-parallel rank.

    names: of the group's parameters, as on rank 0. ranks_of_group: the ranks that it is cut for.
        counts: as in Experts. Source: DeepSpeed's groups._create_expert_and_data_parallel().

    Raises: CheckpointError.
    """
    experts = [expert_name(name) for name in names]
    if not any(experts):
        return [ExpertDataGroup(range(ranks))]
    size = ranks // ranks_of_group
    layers = {expert and expert.layer for expert in experts}
    uneven = size * ranks_of_group != ranks or layers - counts.keys()
    if uneven or any(counts[layer] % size for layer in layers):
        raise CheckpointError(
            f"its experts are not shared out to {ranks_of_group} of {ranks} ranks"
        )
    config = model.get("ds_config")
    if not isinstance(config, dict) and 1 < size < ranks:
        raise CheckpointError(
            f"its config is {config!r}: which ranks had the same experts is not known"
        )
    data_groups = [range(i, ranks, size) for i in range(size)]
    if 1 < size < ranks and config.get("use_data_before_expert_parallelism"):
        data_groups = [range(i, i + ranks_of_group) for i in range(0, ranks, ranks_of_group)]
    return [
        ExpertDataGroup(data_group, {layer: counts[layer] // size * i for layer in layers})
        for i, data_group in enumerate(data_groups)
    ]
