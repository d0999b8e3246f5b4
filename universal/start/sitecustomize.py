"""Python runs this at its start where this folder is on PYTHONPATH: llamafactory-cli or another command
then resumes a DeepSpeed run on any number of ranks. Nothing is imported where the command does not import it."""

import os
import sys
from importlib import import_module, machinery, util

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))


def reshard(_):
    sys.path.insert(0, ROOT)  # for this import alone: its other modules must hide nobody's
    getattr(import_module("universal"), "install", str)()  # without: a script imports it, and installs it
    sys.path.remove(ROOT)


def keep_batch(module):  # Trainer rejects a "train_batch_size" on other ranks; here it decides, as in DeepSpeed
    process = module.HfTrainerDeepSpeedConfig.trainer_config_process

    def trainer_config_process(self, args, *rest, **named):
        batch, micro_batches = self.config.get("train_batch_size"), args.per_device_train_batch_size * args.world_size
        if isinstance(batch, int) and batch % micro_batches == 0:  # otherwise it says so
            args.gradient_accumulation_steps = batch // micro_batches
        return process(self, args, *rest, **named)

    module.HfTrainerDeepSpeedConfig.trainer_config_process = trainer_config_process


class Hook:  # asks the finders behind it alone: another hook of this kind does the same, and both take part
    after = {"deepspeed": reshard, "transformers.integrations.deepspeed": keep_batch}

    def find_spec(name, path=None, target=None):
        later = sys.meta_path[sys.meta_path.index(Hook) + 1 :] if name in Hook.after else []
        if spec := next(filter(None, (finder.find_spec(name, path, target) for finder in later)), None):
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (execute(module), Hook.after[name](module))
        return spec


sys.meta_path.insert(0, Hook)
after = sys.path[sys.path.index(HERE) + 1 :] if HERE in sys.path else []
if other := machinery.PathFinder.find_spec("sitecustomize", after):  # whose place this file has taken
    other.loader.exec_module(util.module_from_spec(other))
