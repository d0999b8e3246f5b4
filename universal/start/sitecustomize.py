"""Python runs this file at its start if this folder is on PYTHONPATH.

llamafactory-cli or another command then resumes a DeepSpeed run on any number of ranks. It imports
nothing that the command itself does not import.
"""

import os
import sys
from importlib import import_module, machinery, util

FOLDER = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))


def install_universal(deepspeed):
    """Call universal.install(), unless a script is importing universal: it will do so itself."""
    sys.path.insert(0, ROOT)  # for this import only: its other modules must not shadow anyone's
    universal = import_module("universal")
    if hasattr(universal, "install"):
        universal.install()
    sys.path.remove(ROOT)


def keep_global_batch(module):
    """Let "train_batch_size" decide the accumulation steps, as in DeepSpeed.

    Trainer rejects it on other ranks. Where it does not divide, Trainer prints its error.
    """
    config_class = module.HfTrainerDeepSpeedConfig
    process = config_class.trainer_config_process

    def trainer_config_process(self, args, *rest, **options):
        batch = self.config.get("train_batch_size")
        micro_batches = args.per_device_train_batch_size * args.world_size
        if isinstance(batch, int) and batch % micro_batches == 0:
            args.gradient_accumulation_steps = batch // micro_batches
        return process(self, args, *rest, **options)

    config_class.trainer_config_process = trainer_config_process


class Hook:
    """Changes a module after its import.

    It asks only the finders behind it; another such hook does the same, so both work.
    """

    changes = {
        "deepspeed": install_universal,
        "transformers.integrations.deepspeed": keep_global_batch,
    }

    def find_spec(name, path=None, target=None):
        if name not in Hook.changes:
            return None
        for finder in sys.meta_path[sys.meta_path.index(Hook) + 1 :]:
            if spec := finder.find_spec(name, path, target):
                return Hook.followed(spec, Hook.changes[name])
        return None

    def followed(spec, change):
        """The spec of a module that is changed once it has been executed."""
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            change(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Hook)
path_behind = sys.path[sys.path.index(FOLDER) + 1 :] if FOLDER in sys.path else []
shadowed = machinery.PathFinder.find_spec("sitecustomize", path_behind)
if shadowed:
    shadowed.loader.exec_module(util.module_from_spec(shadowed))
