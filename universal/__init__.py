# SPDX-License-Identifier: MIT
"""Resume a DeepSpeed training run on any number of ranks and at any ZeRO stage, without converting
its checkpoint.

    import universal
    universal.install()                               # every engine.load_checkpoint() can; or
    universal.load_checkpoint(engine, "checkpoints")  # only this one

    python -m universal llamafactory-cli train full.yaml  # the same for a command without a script

convert() turns a ZeRO checkpoint into a universal checkpoint, which other tools read. The modules
elastic, mirror and exact are for jobs whose machines come and go. Each name is imported at its
first use, so convert(), which needs neither torch nor DeepSpeed, runs without them."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from universal.errors import CheckpointError
    from universal.resume import install, load_checkpoint
    from universal.write.converter import convert

__version__ = "3.5"
HOME = {"install": "resume", "load_checkpoint": "resume", "convert": "write.converter"}
HOME |= {"CheckpointError": "errors"}
__all__ = ["CheckpointError", "convert", "install", "load_checkpoint"]


def __getattr__(name):
    if name not in HOME:
        raise AttributeError(f"module 'universal' has no attribute {name!r}")
    return getattr(import_module(f"universal.{HOME[name]}"), name)


def __dir__():
    return __all__
