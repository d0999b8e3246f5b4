"""Python runs this file at its start if this folder is on PYTHONPATH: llamafactory-cli or another
command then resumes a DeepSpeed run on any number of ranks. It imports nothing that the command
itself does not import."""

import os
import sys
from importlib import import_module, machinery, util

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))


def reshard(_):
    sys.path.insert(0, ROOT)  # for this import only: its other modules must not shadow anyone's
    getattr(
        import_module("universal"), "install", str
    )()  # absent while a script imports it; that script installs it
    sys.path.remove(ROOT)


def keep_batch(
    module,
):  # Trainer rejects "train_batch_size" on other ranks; here it wins, as in DeepSpeed
    process = module.HfTrainerDeepSpeedConfig.trainer_config_process

    def trainer_config_process(self, args, *rest, **named):
        batch, micro_batches = (
            self.config.get("train_batch_size"),
            args.per_device_train_batch_size * args.world_size,
        )
        if (
            isinstance(batch, int) and batch % micro_batches == 0
        ):  # otherwise Trainer prints its error
            args.gradient_accumulation_steps = batch // micro_batches
        return process(self, args, *rest, **named)

    module.HfTrainerDeepSpeedConfig.trainer_config_process = trainer_config_process


class Hook:  # asks only the finders behind it; another such hook does the same, so both work
    after = {"deepspeed": reshard, "transformers.integrations.deepspeed": keep_batch}

    def find_spec(name, path=None, target=None):
        later = sys.meta_path[sys.meta_path.index(Hook) + 1 :] if name in Hook.after else []
        if spec := next(
            filter(None, (finder.find_spec(name, path, target) for finder in later)), None
        ):
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (execute(module), Hook.after[name](module))
        return spec


sys.meta_path.insert(0, Hook)
after = sys.path[sys.path.index(HERE) + 1 :] if HERE in sys.path else []
if other := machinery.PathFinder.find_spec(
    "sitecustomize", after
):  # run the one that this file shadows
    other.loader.exec_module(util.module_from_spec(other))
