"""What a load costs beside its tensors, by the number of ranks: `make scale`.

    python -m measure.scale --output out/scale.png [--ranks 8 16 32 64] [--before scale_before.csv]

Each load is of a checkpoint that as many ranks saved: 723 tensors of Llama's names and of few
elements, with AdamW. A row has the bytes that the median rank received from other ranks, what all
ranks listed, looked at and opened of the checkpoint, the CPU seconds of rank 0 and of the median
rank, and the memory that the median rank needed for a moment. DeepSpeed's own loader compares
nothing between ranks. --before: the rows of another version, drawn thin."""

import argparse
import csv
import functools
import json
import os
import socket
import statistics
import struct
import sys
import tempfile
import time
from collections import Counter, OrderedDict
from pathlib import Path

import matplotlib
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import nn

import universal
from tests.support import lay_out, toy
from tests.support.ranks import run
from universal.load.collective import ProcessGroup
from universal.load.engine import Engine

LAYERS = 80
HIDDEN = 64
LAYER = {  # (rows, columns), in units of HIDDEN / 8
    "self_attn.q_proj.weight": (8, 8),
    "self_attn.k_proj.weight": (1, 8),
    "self_attn.v_proj.weight": (1, 8),
    "self_attn.o_proj.weight": (8, 8),
    "mlp.gate_proj.weight": (28, 8),
    "mlp.up_proj.weight": (28, 8),
    "mlp.down_proj.weight": (8, 28),
    "input_layernorm.weight": (8,),
    "post_attention_layernorm.weight": (8,),
}
ENDS = {"embed_tokens.weight": (32, 8), "norm.weight": (8,), "lm_head.weight": (32, 8)}
LOADERS = {"ZeRO-1": 1, "ZeRO-3": 3, "DeepSpeed's own, ZeRO-1": 1}
COLUMNS = ("loader", "ranks", "received_MB", "files", "opens", "cpu_rank_0", "cpu", "memory_MB")
DRAWN = {
    "received_MB": "MB that a rank receives",
    "files": "files that all ranks list and look at",
    "opens": "files that all ranks open",
    "cpu_rank_0": "CPU seconds of rank 0",
    "cpu": "CPU seconds of another rank",
    "memory_MB": "MB of memory of another rank",
}
COLORS = dict(zip(LOADERS, ("#0072B2", "#D55E00", "0.5"), strict=True))
matplotlib.rcParams["font.size"] = 11


# -----------------------------------------------------------------------------
# model and checkpoint


def shapes():
    units = {f"layers.{i}.{name}": LAYER[name] for i in range(LAYERS) for name in LAYER} | ENDS
    return {name: torch.Size(n * HIDDEN // 8 for n in unit) for name, unit in units.items()}


def groups():
    """Two parameter groups, as for decay and no decay."""
    of_model = shapes().items()
    return [
        OrderedDict((name, shape) for name, shape in of_model if (len(shape) > 1) == decays)
        for decays in (True, False)
    ]


def model():
    root = nn.Identity()
    for name, shape in shapes().items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Identity())
            module = getattr(module, part)
        module.register_parameter(last, nn.Parameter(torch.rand(shape)))
    return root


def optimizer(parameters):
    decayed = [[p for p in parameters if (p.dim() > 1) == decays] for decays in (True, False)]
    return torch.optim.AdamW([{"params": group} for group in decayed], lr=1e-4)


# -----------------------------------------------------------------------------
# counting


class Counts:
    """Counts this process's calls on files below a folder, from now on."""

    def __init__(self, folder):
        self.folder = os.fspath(folder)
        self.calls = Counter()
        sys.addaudithook(self.hook)
        for name in ("stat", "lstat"):
            setattr(os, name, functools.partial(self.look, getattr(os, name)))
        self.scandir = os.scandir
        os.scandir = self.listing

    def count(self, kind, path):
        if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(self.folder):
            self.calls[kind] += 1

    def hook(self, event, arguments):
        if event == "open":
            self.count("opens", arguments[0])

    def look(self, stat, path, **options):
        self.count("files", path)
        return stat(path, **options)

    def listing(self, path="."):
        with self.scandir(path) as entries:
            entries = [*entries]
        for entry in entries:
            self.count("files", entry.path)
        return Listing(entries)


class Listing:
    """What os.scandir() returns."""

    def __init__(self, entries):
        self.entries = iter(entries)

    def __iter__(self):
        return self.entries

    def __enter__(self):
        return self.entries

    def __exit__(self, *error):
        pass


def received():
    """Returns {socket: bytes that have come} of this process's TCP connections."""
    bytes_of = {}
    for number in os.listdir("/dev/fd"):
        try:
            name = os.readlink(f"/dev/fd/{number}")
            with socket.socket(fileno=os.dup(int(number))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
        except OSError:  # no socket, or none of TCP
            continue
        bytes_of[name] = struct.unpack_from("<Q", info, 128)[0]
    return bytes_of


def memory(kind):
    """Megabytes of this process; of its peak with VmHWM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{kind}:"))
    return int(line.split()[1]) / 1024


# -----------------------------------------------------------------------------
# a load on forked ranks


def load(folder, loader):
    """Load on one rank, and write what that costs."""
    toy.begin()
    dtype = {"bf16": {"enabled": True}}
    engine = toy.make(LOADERS[loader], model, optimizer, batch=dist.get_world_size(), **dtype)
    tally = Counts(folder)
    last = {}
    end = ProcessGroup.end

    def ending(group):
        if group.handle:
            last.update(received())
        end(group)

    ProcessGroup.end = ending
    to_weights = Engine.masters_to_weights
    of_weights = {}

    def without_weights(engine):  # the weights themselves are no cost beside the tensors
        begun = received()
        to_weights(engine)
        now = received()
        of_weights.update({name: now[name] - begun.get(name, 0) for name in now})

    Engine.masters_to_weights = without_weights
    Path("/proc/self/clear_refs").write_text("5")
    dist.barrier()
    before = received()
    resident = memory("VmRSS")
    tally.calls.clear()
    began = time.process_time()
    if "own" in loader:
        engine.load_checkpoint(folder)
    else:
        universal.load_checkpoint(engine, folder)
    costs = {"cpu": time.process_time() - began} | tally.calls
    now = last | received()
    come = sum(now[name] - before.get(name, 0) for name in now) - sum(of_weights.values())
    costs["received_MB"] = come / 1e6
    costs["memory_MB"] = memory("VmHWM") - resident
    Path(f"costs.{dist.get_rank()}.json").write_text(json.dumps(costs))
    dist.barrier()


def saved(folder, ranks, stage):
    """Write the checkpoint that so many ranks would have saved."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.rand(shape, generator=generator)

    tag = folder / "global_step100"
    tag.mkdir(parents=True)
    (folder / "latest").write_text(tag.name)
    module = lay_out.model_states(groups(), ranks, {})
    weights = {name: random(*shape).bfloat16() for name, shape in shapes().items()}
    empty = {name: weight[:0].clone() for name, weight in weights.items()}
    module["module"] = empty if stage == 3 else weights
    for rank in range(ranks):
        if stage == 3:
            torch.save(module, tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        make = lay_out.shard_of_stage_3 if stage == 3 else lay_out.shard_of_stage_1
        shard = make(groups(), rank, ranks, random)
        state = shard.get("base_optimizer_state") or shard["optimizer_state_dict"]
        for group in state["param_groups"]:
            group["amsgrad"] = False
        shard |= {"loss_scaler": lay_out.LossScaler(1.0), "dynamic_loss_scale": False}
        shard |= {"overflow": False, "zero_stage": lay_out.ZeroStageEnum(stage)}
        states = {"optimizer_state_dict": shard, "ds_config": {}, "ds_version": "0.19.8"}
        torch.save(states, tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    if stage < 3:
        torch.save(module, tag / "mp_rank_00_model_states.pt")


def row_of(loader, ranks):
    with tempfile.TemporaryDirectory() as work:
        work = Path(work).resolve()
        saved(work / "checkpoints", ranks, LOADERS[loader])
        run(work, ranks, load, os.fspath(work / "checkpoints"), loader, limit=500)
        costs = [json.loads((work / f"costs.{rank}.json").read_text()) for rank in range(ranks)]
    row = {"loader": loader, "ranks": ranks, "cpu_rank_0": costs[0]["cpu"]}
    row |= {key: sum(cost.get(key, 0) for cost in costs) for key in ("files", "opens")}
    for key in ("received_MB", "cpu", "memory_MB"):
        row[key] = statistics.median(cost[key] for cost in costs[1:])
    return {key: row[key] for key in COLUMNS}


# -----------------------------------------------------------------------------
# table and picture


def read(path):
    with open(path, newline="") as file:
        rows = [*csv.DictReader(file)]
    return [{key: row[key] if key == "loader" else float(row[key]) for key in row} for row in rows]


def draw(rows, before, path):
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    for axes, (key, title) in zip(figure.subplots(2, 3).flat, DRAWN.items(), strict=True):
        for loader, color in COLORS.items():
            for of_version, style in ((before, ":"), (rows, "o-")):
                points = [(row["ranks"], row[key]) for row in of_version if row["loader"] == loader]
                if points:
                    label = f"{loader}{', before' if style == ':' else ''}"
                    axes.plot(*zip(*points, strict=True), style, color=color, label=label)
        axes.set(xscale="log", yscale="log", title=title, xlabel="ranks")
        ticks = sorted({int(row["ranks"]) for row in rows})
        axes.set_xticks(ticks, [str(tick) for tick in ticks], minor=False)
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.3, which="both")
    figure.axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=100)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--before", type=Path)
    arguments = parser.parse_args()
    before = read(arguments.before) if arguments.before else []
    rows = []
    with open(arguments.output.with_suffix(".csv"), "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for loader in LOADERS:
            for ranks in arguments.ranks:
                rows.append(row_of(loader, ranks))
                writer.writerow(rows[-1])
                file.flush()
                values = [f"{key} {rows[-1][key]:.4g}" for key in COLUMNS[1:]]
                print(f"{loader:24}", *values, sep="  ", flush=True)
    draw(rows, before, arguments.output)


if __name__ == "__main__":
    main()
