# SPDX-License-Identifier: MIT
"""Resume a DeepSpeed training run on any number of ranks and at any ZeRO stage, from its checkpoint as it is.

    import universal
    universal.install()                                     # engine.load_checkpoint() then does it; or, only here:
    universal.load_checkpoint(engine, "checkpoints")

    python -m universal llamafactory-cli train full.yaml    # the same for a command that has no script

convert() makes a universal checkpoint of a ZeRO checkpoint, which DeepSpeed's own loader reads, and mend() restores
what that loader leaves out. The modules elastic, mirror and exact are for jobs whose machines come and go. A name is
imported when it is first used: what needs neither torch nor DeepSpeed, convert() say, runs without.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from universal.converter import convert
    from universal.loader import install, load_checkpoint, mend
    from universal.torch_file import CheckpointError

__version__ = "1.0"
HOME = {"install": "loader", "load_checkpoint": "loader", "mend": "loader", "convert": "converter"}
HOME |= {"CheckpointError": "torch_file"}
__all__ = ["CheckpointError", "convert", "install", "load_checkpoint", "mend"]


def __getattr__(name):
    if name not in HOME:
        raise AttributeError(f"module 'universal' has no attribute {name!r}")
    return getattr(import_module(f"universal.{HOME[name]}"), name)


def __dir__():
    return __all__
