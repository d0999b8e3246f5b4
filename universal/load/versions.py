# SPDX-License-Identifier: MIT
"""What is known of a version of DeepSpeed."""

import os

import deepspeed
from packaging.version import Version

from universal.write.console import print_line

NEWEST_TRIED = "0.19.8"  # by `make versions`
WRONG_GRADIENTS = ("0.17.6", "0.18.2")  # the first such version, and the last


def say_doubts() -> None:
    """Print on rank 0 what there is to know; there may be no process group yet."""
    text = doubts(deepspeed.__version__)
    if text and os.environ.get("RANK", "0") == "0":
        print_line(f"universal: {text}")


def doubts(version: str) -> str | None:
    """Why to take another version; None for those that are known to be right."""
    release = Version(version).release
    first, last = (Version(wrong).release for wrong in WRONG_GRADIENTS)
    if first <= release <= last:
        return (
            f"WARNING: DeepSpeed {version} computes wrong gradients at ZeRO-2 with gradient "
            "accumulation, without a checkpoint, too (DeepSpeed's issue 7718): take 0.18.3 or newer"
        )
    if release > Version(NEWEST_TRIED).release:
        return (
            f"DeepSpeed {version} is newer than {NEWEST_TRIED}, the newest that was tried; each "
            "load compares the layout that it expects with the weights"
        )
    return None
