"""Every key of DeepSpeed's config: what it changes, and what becomes of it in a resume.

    python -m measure.keys > assets/keys.txt

DeepSpeed's keys are read from its config models and constants. measure/keys.csv says of each what
was found out; a key that it lacks, of a new DeepSpeed, is an error."""

import collections
import csv
import dataclasses
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import deepspeed
from deepspeed.runtime import config
from deepspeed.runtime.config_utils import DeepSpeedConfigModel

from universal.load.keys import BLOCKS, DEFAULTS

TABLE = Path(__file__).with_suffix(".csv")
# The last words of the names of modules that have keys, and what is no part of a training's config.
LAST = ("config", "constants", "schedules")
OTHER = ("autotuning", "checkpoint", "comm", "inference", "io", "launcher", "linear", "nvme")
# Where a model's keys stand in the config; those of other models have its name.
PLACES = {
    "AutoEPConfig": "expert_parallel",
    "CSVConfig": "csv_monitor",
    "CometConfig": "comet",
    "CompileConfig": "compile",
    "DeepSpeedBF16Config": "bf16",
    "DeepSpeedFP16Config": "fp16",
    "DeepSpeedThroughputTimerConfig": "timers.throughput",
    "DeepSpeedZeroConfig": "zero_optimization",
    "DeepSpeedZeroLeafModuleConfig": "zero_optimization.leaf_module",
    "DeepSpeedZeroOffloadOptimizerConfig": "zero_optimization.offload_optimizer",
    "DeepSpeedZeroOffloadParamConfig": "zero_optimization.offload_param",
    "HybridEngineConfig": "hybrid_engine",
    "TPConfig": "tensor_parallel.tp",
    "TPTrainingConfig": "tensor_parallel",
    "TensorBoardConfig": "tensorboard",
    "WandbConfig": "wandb",
    "ZenFlowConfig": "zero_optimization.zenflow",
}
OUTCOMES = {
    "right": "a resume on other ranks was run, and is right",
    "refused": "refused by name on other ranks",
    "wrong": "another gradient on other ranks",
    "DeepSpeed's own": "wrong or an error in DeepSpeed alone, on the same ranks, too",
    "removed": "DeepSpeed refuses it",
    "harmless": "by the code, it changes no number",
    "untried": "nobody has run it in a resume",
    "no key": "the name of a block or of a value",
}


def modules() -> Iterator[ModuleType]:
    """Yields DeepSpeed's modules with keys."""
    for info in pkgutil.walk_packages(deepspeed.__path__, "deepspeed.", onerror=lambda name: None):
        _, *folders, name = info.name.split(".")
        if name.rpartition("_")[2] in LAST and not {*folders} & {*OTHER}:
            yield importlib.import_module(info.name)


def keys_of(module: ModuleType) -> Iterator[str]:
    """Yields the keys of the config models that a module defines, and its constants in lower
    case: keys, and some values."""
    for name, value in vars(module).items():
        if inspect.isclass(value) and value.__module__ == module.__name__:
            place = PLACES.get(name, name)
            if issubclass(value, DeepSpeedConfigModel):
                fields = value.model_fields.items()
                yield from (f"{place}.{field.alias or key}" for key, field in fields)
            elif dataclasses.is_dataclass(value):
                yield from (f"{place}.{field.name}" for field in dataclasses.fields(value))
        elif name.isupper() and isinstance(value, str) and value.isidentifier():
            if value.islower() and not name.endswith("_DEFAULT"):
                yield value


def deepspeed_keys() -> set[str]:
    """Returns all keys of the installed DeepSpeed, and the arguments of initialize()."""
    keys = {key for module in modules() for key in keys_of(module)}
    keys |= {f"pipeline.{key}" for key in config.get_pipeline_config({})}
    keys |= {f"initialize({name}=)" for name in inspect.signature(deepspeed.initialize).parameters}
    keys |= {f"zero.Init({name}=)" for name in inspect.signature(deepspeed.zero.Init).parameters}
    removed = config._REMOVED_ZERO_CONFIG_KEYS
    return (
        keys
        | {*config._REMOVED_TOP_LEVEL_CONFIG_KEYS}
        | {f"zero_optimization.{key}" for key in removed}
    )


def read_table() -> dict[str, dict[str, str]]:
    """Returns {key: {"changes": what it changes, "outcome": one of OUTCOMES}}."""
    with open(TABLE, newline="") as file:
        return {row["key"]: row for row in csv.DictReader(file)}


def unclassified(keys: set[str], table: dict) -> list[str]:
    """Returns the keys that the table lacks."""
    return sorted(keys - table.keys())


def main():
    keys, table = deepspeed_keys(), read_table()
    if missing := unclassified(keys, table):
        sys.exit(f"{TABLE} lacks {', '.join(missing)}")
    known = {key: row for key, row in table.items() if key in keys}
    counts = collections.Counter(row["outcome"] for row in known.values())
    print(f"{len(known) - counts['no key']} keys of DeepSpeed {deepspeed.__version__}")
    for outcome, meaning in OUTCOMES.items():
        print(f"{counts[outcome]:4}  {outcome:<16}{meaning}")
    print(
        "*: if it differs from the saved run's, a load says so; so of optimizer.params, scheduler"
    )
    print()
    named = {*DEFAULTS} | {key.rpartition(".")[2] for key in DEFAULTS}
    for key, row in sorted(known.items()):
        if row["outcome"] != "no key":
            mark = "*" if key in named or key.startswith(BLOCKS) else " "
            print(f"{mark} {key:<70}{row['changes']:<36}{row['outcome']}")


if __name__ == "__main__":
    main()
