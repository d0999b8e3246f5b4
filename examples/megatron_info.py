"""Adds to a Megatron-DeepSpeed checkpoint what its universal_checkpoint_info leaves out. Run it
before you convert.

    python examples/megatron_info.py checkpoints/global_step1000
    python ds_to_universal.py --input_folder checkpoints/global_step1000

Without this, a change of the tensor-parallel degree silently goes wrong:

    query_key_value         a rank holds parts of Q, K and V; as the info stands, converters join
                            whole ranks
    dense, dense_4h_to_h    are cut along their rows; saved at degree 1, the info does not say so
    padding of the vocab    is trained, but comes back as zeros; this script keeps it, so let the
                            new run pad to the same size: keep the product of
                            --make-vocab-size-divisible-by and the degree

It rewrites *mp_rank_00_model_states.pt, the file that converters read; a second run changes
nothing. It needs neither torch nor Megatron, only the package universal: installed, or as a folder
one level up. It is for Megatron-DeepSpeed since commit 676a482c, which changed how Q, K and V are
cut, and for attention with as many heads for keys as for queries."""

import os
import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from universal.errors import CheckpointError
from universal.files import torch_file
from universal.files.sources import ByteReader
from universal.files.torch_writer import pickled, write_pt
from universal.write.console import in_one_line

ROW = ("self_attention.dense.weight", "mlp.dense_4h_to_h.weight")


def pattern(name):
    """A regular expression, as converters want it: the name, with any number in place of its
    layer's."""
    return r"\d+".join(re.escape(part) for part in re.split(r"\d+(?=\.)", name)) + "$"


def complete(info, args, names):
    """Add to `info` what is missing for the parameters `names`. Returns one line for each
    addition."""
    heads = args["num_attention_heads"]
    if args.get("num_key_value_heads", heads) != heads:
        raise CheckpointError(
            "grouped-query attention: how Q, K and V of this checkpoint are cut is not known"
        )
    degree = args["tensor_model_parallel_size"]
    hidden = args["kv_channels"] * heads
    added = []
    subs = info.setdefault("parameter_with_sub_params", [])
    widths = info.setdefault("sub_param_shard_widths", {})
    rows = info.setdefault("parameter_with_row_parallelism_patterns", [])
    for name in names:
        patterns = [*rows, *(each for sub in subs for each in sub["patterns"])]
        matched = any(re.match(each, name) for each in patterns)
        if "self_attention.query_key_value." in name and not matched:
            shape = ((hidden,) * 3,)
            if name.endswith("weight"):
                shape += (args["hidden_size"],)
            subs.append({"patterns": [pattern(name)], "shape": shape, "partition_dim": 0})
            widths[pattern(name)] = [[hidden // degree] * degree] * 3
            added.append(f"{pattern(name)}: Q, K and V, each cut by itself")
        if name.endswith(ROW) and not matched:
            rows.append(pattern(name))
            added.append(f"{pattern(name)}: cut along its rows")
    if info["original_vocab_size"] != info["padded_vocab_size"]:
        size = info["padded_vocab_size"]
        added.append(f"original_vocab_size: {size}, was {info['original_vocab_size']}")
        info["original_vocab_size"] = size
    return added


def main(folder):
    files = sorted(Path(folder).glob("*mp_rank_*_model_states.pt"))
    if not files:
        raise CheckpointError(f"{folder} holds no *mp_rank_*_model_states.pt")
    states = {path: torch_file.load(path) for path in files}
    first = next(path for path in files if "mp_rank_00" in path.name)
    if "universal_checkpoint_info" not in states[first]:
        raise CheckpointError(f"{first} has no universal_checkpoint_info")
    # Each pipeline stage lists only its own parameters.
    names = dict.fromkeys(
        name for state in states.values() for group in state["param_shapes"] for name in group
    )
    added = complete(states[first]["universal_checkpoint_info"], states[first]["args"].state, names)
    if added:
        with tempfile.TemporaryDirectory(dir=folder) as beside:
            path = Path(beside, first.name)
            write_pt(path, pickled(states[first]), ByteReader())
            os.replace(path, first)
    print("\n".join(dict.fromkeys(added)) or "nothing is missing")


if __name__ == "__main__":
    with in_one_line("megatron_info.py"):
        if len(sys.argv) != 2:
            raise CheckpointError("name the folder of a checkpoint, as global_step1000")
        main(sys.argv[1])
