"""Python runs this file at its start if this folder is on PYTHONPATH: llamafactory-cli or another
command then resumes a DeepSpeed run on any number of ranks. It imports nothing that the command
itself does not import.

UNIVERSAL_BATCH=24 keeps Trainer's global batch at 24 samples, also where the ranks do not divide
it: universal/trainer.py."""

import os
import sys
from importlib import import_module, machinery, util

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
ANY_RANKS = "UNIVERSAL_BATCH"
ACTIVE = (
    "a checkpoint of any number of ranks loads here, if the script loads one: without its resume "
    "option (Trainer: resume_from_checkpoint=True) it starts at step 1"
)


def import_ours(name):
    sys.path.insert(0, ROOT)  # for this import only: its other modules must not shadow anyone's
    module = import_module(name)
    sys.path.remove(ROOT)
    return module


def install_universal(deepspeed):
    universal = import_ours("universal")
    if hasattr(universal, "install"):  # absent while a script imports it; that script installs it
        universal.install()
        is_child = import_module(
            "multiprocessing"
        ).parent_process()  # a worker of a DataLoader, say
        if os.environ.get("RANK") == "0" and not is_child:
            print(f"universal: {ACTIVE}", flush=True)


def keep_batch(integration):
    """Let the config's "train_batch_size" decide, as in DeepSpeed, where Trainer rejects it."""
    process = integration.HfTrainerDeepSpeedConfig.trainer_config_process

    def trainer_config_process(self, args, *rest, **named):
        batch = self.config.get("train_batch_size")
        micro_batches = args.per_device_train_batch_size * args.world_size
        if ANY_RANKS in os.environ:
            config = import_ours("universal.trainer").batch_config(os.environ[ANY_RANKS], args)
            self.config.update(config)
            args.gradient_accumulation_steps = config["gradient_accumulation_steps"]
        elif isinstance(batch, int) and batch % micro_batches == 0:  # or Trainer prints its error
            args.gradient_accumulation_steps = batch // micro_batches
        return process(self, args, *rest, **named)

    integration.HfTrainerDeepSpeedConfig.trainer_config_process = trainer_config_process


def keep_any_batch(trainer):
    """Put AnyRanks before every Trainer, if UNIVERSAL_BATCH is set."""
    if ANY_RANKS in os.environ:
        import_module("deepspeed")  # before ours, of which it imports the rest
        import_ours("universal.rollouts")  # while AnyRanks is what it stands on
        ours = import_ours("universal.trainer")
        trainer.Trainer = ours.on_any_ranks(trainer.Trainer)
        ours.AnyRanks = type("AnyRanks", (), {})  # for a script that puts it before Trainer


def export_ours(runners):
    """Let DeepSpeed's launcher start the ranks of other machines with what it has itself."""
    for runner in runners.MultiNodeRunner.__subclasses__():
        runner.get_cmd = exporting(runner.get_cmd)


def exporting(get_cmd):
    """DeepSpeed exports few names, and lets files named .deepspeed_env replace their values."""

    def get_cmd_with_exports(self, *arguments):
        exports = self.exports
        if ANY_RANKS in os.environ:
            exports[ANY_RANKS] = os.environ[ANY_RANKS]
        elif ANY_RANKS in exports:
            import_ours("universal.__main__").fail(
                f"a file .deepspeed_env says {ANY_RANKS}={exports[ANY_RANKS]}, and the command "
                "nothing: type it before the command, or remove it from the file"
            )
        # In front of the working directory, which may have a sitecustomize.py; without the quotes,
        # which only pdsh's shell removes.
        paths = os.pathsep.join([HERE, exports["PYTHONPATH"].strip('"')])
        exports["PYTHONPATH"] = f'"{paths}"' if self.name == "pdsh" else paths
        return get_cmd(self, *arguments)

    return get_cmd_with_exports


def keep_any_rollouts(module):
    """Put before each of TRL's Trainers that generate, and KTO, what it needs."""
    if ANY_RANKS in os.environ:
        import_ours("universal.rollouts").put_before(module)


class AfterImport:
    """Calls a function as soon as its module is imported. It asks only the finders behind it, so
    two work together."""

    functions = {
        "deepspeed": install_universal,
        "deepspeed.launcher.multinode_runner": export_ours,
        "transformers.integrations.deepspeed": keep_batch,
        "transformers.trainer": keep_any_batch,
        "trl.trainer.distillation_trainer": keep_any_rollouts,
        "trl.trainer.grpo_trainer": keep_any_rollouts,
        "trl.trainer.kto_trainer": keep_any_rollouts,
        "trl.trainer.rloo_trainer": keep_any_rollouts,
    }

    def find_spec(self, name, path=None, target=None) -> machinery.ModuleSpec | None:
        if name not in self.functions:
            return None
        finders = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (finder.find_spec(name, path, target) for finder in finders)
        spec = next(filter(None, specs), None)
        if spec:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                self.functions[name](module)

            spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, AfterImport())
behind = sys.path[sys.path.index(HERE) + 1 :] if HERE in sys.path else []
shadowed = machinery.PathFinder.find_spec("sitecustomize", behind)
if shadowed:  # run the one that this file shadows
    shadowed.loader.exec_module(util.module_from_spec(shadowed))
