"""What a load costs beside its tensors, by the number of ranks: `make scale`.

    python -m measure.scale --output out/scale.png [--ranks 8 16 32 64] [--played 256 1024 4096]
        [--before REVISION]

Each load is of 723 tensors of Llama's names and of few elements, with AdamW, that as many ranks
saved, or a third more. Up to 64 ranks are processes of this machine; above, one rank of each kind
is played (played.py), without gloo's connections, which ranks with torch alone make beside it.

received: MB that the median rank receives from others. files: what all ranks list and look at of
the checkpoint. opens: of all ranks. CPU: seconds of rank 0 and of the median rank, which a busy
machine may double. memory: MB that the median rank needs for a moment.
DeepSpeed's own loader compares nothing between ranks; DCP, torch's, loads each tensor flat.
A row that the CSV beside the picture has already is not measured again. What a load cost at an
earlier revision was measured there, and is drawn beside it."""

import csv
import functools
import json
import os
import pickle
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
import torch.distributed.checkpoint as dcp
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import universal
from measure import options, played
from measure.costs import megabytes
from tests.support import ROOT, lay_out, toy
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
STAGES = {"ZeRO-1": 1, "ZeRO-3": 3, "DeepSpeed's own, ZeRO-1": 1, "DCP": None}
assert universal.load_checkpoint  # so that no rank has to import it
COLUMNS = (
    "loader",
    "saved",
    "ranks",
    "how",
    "received",
    "files",
    "opens",
    "cpu_0",
    "cpu",
    "memory",
)
DRAWN = {
    "received": "MB that a rank receives",
    "files": "files that all ranks list and look at",
    "opens": "files that all ranks open",
    "cpu_0": "CPU seconds of rank 0",
    "cpu": "CPU seconds of another rank",
    "memory": "MB of memory of another rank",
}
COLORS = dict(zip(STAGES, ("#0072B2", "#D55E00", "0.5", "#009E73"), strict=True))
OURS = ("ZeRO-1", "ZeRO-3")
MOST = {"DCP": 32}  # ranks: at 64 it takes 16 GB
SMALL = 0.01  # what is less is not drawn
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


# -----------------------------------------------------------------------------
# a load on one rank


def load(folder, loader, *rank_of_many):
    """Load on one rank, and write what that costs. rank_of_many: (rank, ranks), if it is played."""
    if rank_of_many:
        played.become(*rank_of_many)
    toy.begin()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    work = loading_by_dcp(folder) if loader == "DCP" else loading(folder, loader, ranks)
    tally = Counts(folder)
    clock = played.Clock()
    others = played.play(groups(), clock, tally.calls) if rank_of_many else None
    last, end = {}, ProcessGroup.end

    def ending(group):
        if group.handle:
            last.update(received())
        end(group)

    ProcessGroup.end = ending
    of_weights, to_weights = {}, Engine.masters_to_weights

    def without_weights(engine):  # the weights themselves are no cost beside the tensors
        begun = received()
        to_weights(engine)
        now = received()
        of_weights.update({name: now[name] - begun.get(name, 0) for name in now})

    Engine.masters_to_weights = without_weights
    Path("/proc/self/clear_refs").write_text("5")
    dist.barrier()
    before = received()
    resident = megabytes("VmRSS")
    tally.calls.clear()
    began = clock.time()
    work()
    costs = {"cpu": clock.time() - began} | tally.calls
    now = last | received()
    come = sum(now[name] - before.get(name, 0) for name in now) - sum(of_weights.values())
    costs["received"] = (others.received if others else come) / 1e6
    costs["memory"] = megabytes("VmHWM") - resident
    Path(f"costs.{rank}.json").write_text(json.dumps(costs))
    if others and rank == 0:
        played.SENT.write_bytes(pickle.dumps(others.broadcasts))
    dist.barrier()


def loading(folder, loader, ranks):
    engine = toy.make(STAGES[loader], model, optimizer, batch=ranks, **toy.BF16)
    if "own" in loader:
        return lambda: engine.load_checkpoint(folder)
    return lambda: universal.load_checkpoint(engine, folder)


def state_for_dcp():
    """Weights and moments as flat tensors that are cut evenly, and a step of each parameter."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {}
    for name, shape in shapes().items():
        for key in ("weight", "exp_avg", "exp_avg_sq"):
            share = -(-shape.numel() // mesh.size())
            part = torch.zeros(max(0, min(share, shape.numel() - mesh.get_rank() * share)))
            whole = {"shape": torch.Size([shape.numel()]), "stride": (1,)}
            state[f"{key}.{name}"] = DTensor.from_local(part, mesh, [Shard(0)], **whole)
        state[f"step.{name}"] = torch.tensor(100.0)
    return state


def loading_by_dcp(folder):
    state = state_for_dcp()
    return lambda: dcp.load(state, checkpoint_id=folder)


def save_by_dcp(folder):
    toy.begin()
    dcp.save(state_for_dcp(), checkpoint_id=folder)
    dist.barrier()


def connect():
    """Connect ranks that have torch alone, and write what that costs."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), ranks, rank == 0)
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=store)
    before = received()
    began = time.process_time()
    group = ProcessGroup(300)
    costs = {"cpu": time.process_time() - began}
    now = received()
    costs["received"] = sum(now[name] - before.get(name, 0) for name in now) / 1e6
    Path(f"costs.{rank}.json").write_text(json.dumps(costs))
    group.meet()


# -----------------------------------------------------------------------------
# a checkpoint, and a load on all ranks


def saved(folder, ranks, stage):
    """Write the checkpoint that so many ranks would have saved. Zeros, so that the weights are
    those of the optimizer."""
    tag = folder / "global_step100"
    tag.mkdir(parents=True)
    (folder / "latest").write_text(tag.name)
    module = lay_out.model_states(groups(), ranks, {})
    weights = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes().items()}
    empty = {name: weight[:0].clone() for name, weight in weights.items()}
    module["module"] = empty if stage == 3 else weights
    for rank in range(ranks):
        if stage == 3:
            torch.save(module, tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        make = lay_out.shard_of_stage_3 if stage == 3 else lay_out.shard_of_stage_1
        shard = make(groups(), rank, ranks, torch.zeros)
        state = shard.get("base_optimizer_state") or shard["optimizer_state_dict"]
        for group in state["param_groups"]:
            group["amsgrad"] = False
        shard |= {"loss_scaler": lay_out.LossScaler(1.0), "dynamic_loss_scale": False}
        shard |= {"overflow": False, "zero_stage": lay_out.ZeroStageEnum(stage)}
        states = {"optimizer_state_dict": shard, "ds_config": {}, "ds_version": "0.19.8"}
        torch.save(states, tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    if stage < 3:
        torch.save(module, tag / "mp_rank_00_model_states.pt")


def costs_of(work, rank):
    return json.loads((work / f"costs.{rank}.json").read_text())


def row_of(loader, by, ranks, how):
    """Measure a load on so many ranks of what was saved by others. how: "run" or "played"."""
    with tempfile.TemporaryDirectory() as work:
        work = Path(work).resolve()
        folder = os.fspath(work / "checkpoints")
        if loader == "connecting":
            run(work, ranks, connect, limit=1500)
        elif loader == "DCP":
            run(work, by, save_by_dcp, folder, limit=1500)
        else:
            saved(work / "checkpoints", by, STAGES[loader])
        if how == "run":
            if loader != "connecting":
                run(work, ranks, load, folder, loader, limit=1500)
            of_rank = {rank: costs_of(work, rank) for rank in range(ranks)}
            others = [of_rank[rank] for rank in range(1, ranks)]
        else:
            leader = ranks // 2 // played.ON_A_MACHINE * played.ON_A_MACHINE
            for rank in (0, leader, leader + 1):
                run(work, 1, load, folder, loader, rank, ranks, limit=1500)
            machines = ranks // played.ON_A_MACHINE
            others = [costs_of(work, leader)] * (machines - 1)
            others += [costs_of(work, leader + 1)] * (ranks - machines)
        first = costs_of(work, 0)
    row = dict(zip(COLUMNS, (loader, by, ranks, how), strict=False)) | {"cpu_0": first["cpu"]}
    row |= {key: sum(cost.get(key, 0) for cost in [first, *others]) for key in ("files", "opens")}
    for key in ("received", "cpu", "memory"):
        row[key] = statistics.median(cost.get(key, 0) for cost in others)
    return {key: row[key] for key in COLUMNS}


def plan(arguments):
    """Yields the arguments of row_of()."""
    for ranks in arguments.ranks:
        for loader in STAGES:
            if ranks <= MOST.get(loader, ranks):
                yield loader, ranks, ranks, "run"
        for loader in OURS if ranks > 2 else ():  # others than rank 0 are measured
            yield loader, ranks, 3 * ranks // 4, "run"
    for ranks in arguments.connecting:
        yield "connecting", ranks, ranks, "run"
    for ranks in arguments.played:
        for loader in OURS:
            yield loader, ranks, ranks, "played"
            yield loader, ranks, 3 * ranks // 4, "played"


# -----------------------------------------------------------------------------
# table and picture


def read(path):
    if not path.exists():
        return []
    with open(path, newline="") as file:
        rows = [*csv.DictReader(file)]
    words = ("loader", "how")
    return [{key: row[key] if key in words else float(row[key]) for key in row} for row in rows]


def measured(arguments, path):
    """Returns the rows of the plan, which go into this CSV."""
    rows = read(path)
    known = {tuple(row[key] for key in COLUMNS[:4]) for row in rows}
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if not rows:
            writer.writeheader()
        for place in plan(arguments):
            if place not in known:
                rows.append(row_of(*place))
                writer.writerow(rows[-1])
                file.flush()
                print(line_of(rows[-1]), flush=True)
    return rows


def line_of(row):
    texts = [f"{row[key]:>12.3g}" if row[key] < 1000 else f"{row[key]:>12,.0f}" for key in DRAWN]
    return (
        f"{row['loader']:<24}{row['saved']:>6.0f}{row['ranks']:>6.0f}  {row['how']:<7}"
        + "".join(texts)
    )


def table_of(rows):
    heads = ("received", "files", "opens", "CPU, rank 0", "CPU", "memory")
    yield f"{'':<24}{'saved':>6}{'ranks':>6}{'':<9}" + "".join(f"{head:>12}" for head in heads)
    order = [*STAGES, "connecting"]
    for row in sorted(rows, key=lambda row: (order.index(row["loader"]), row["ranks"])):
        yield line_of(row)


def draw(rows, before, path):
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    for axes, (key, title) in zip(figure.subplots(2, 3).flat, DRAWN.items(), strict=True):
        for loader, color in COLORS.items():
            for of_version, style in ((before, ":"), (rows, "-")):
                points = sorted(
                    (row["ranks"], row[key], row["how"])
                    for row in of_version
                    if row["loader"] == loader and row["saved"] == row["ranks"] and row[key] > SMALL
                )
                if not points or of_version is before and not STAGES[loader]:
                    continue
                label = f"{loader}{', before' if style == ':' else ''}"
                ranks, values, _ = zip(*points, strict=True)
                axes.plot(ranks, values, style, color=color, label=label)
                for marker, kind in (("o", "run"), ("s", "played")):
                    own = [(x, y) for x, y, how in points if how == kind]
                    if own and style == "-":
                        axes.plot(*zip(*own, strict=True), marker, color=color, mfc="w")
        axes.set(xscale="log", yscale="log", title=title, xlabel="ranks")
        most = max(row["ranks"] for row in rows)
        ticks = [8 * 4**i for i in range(6) if 8 * 4**i <= most] if most > 64 else [8, 16, 32, 64]
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], minor=False)
        axes.set_xticks([], minor=True)
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.3, which="both")
    lines, labels = figure.axes[2].get_legend_handles_labels()  # where all are drawn
    figure.legend(lines, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=100)


def main():
    parser = options.parser(__doc__, "out/scale.png")
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 16, 32, 64])
    parser.add_argument("--played", type=int, nargs="*", default=[256, 1024, 4096])
    parser.add_argument("--connecting", type=int, nargs="*", default=[32, 64, 128, 256])
    parser.add_argument("--before", metavar="REVISION", help="draw assets/scale_REVISION.csv, too")
    arguments = parser.parse_args()
    earlier = read(ROOT / "assets" / f"scale_{arguments.before}.csv")
    if arguments.before and not earlier:
        parser.error(f"assets/ has no rows of {arguments.before}: check it out, and measure there")
    rows = measured(arguments, arguments.output.with_suffix(".csv"))
    lines = [*table_of(rows)]
    if earlier:
        lines += ["", f"before: {arguments.before}", *table_of(earlier)]
    arguments.output.with_suffix(".txt").write_text("\n".join([*lines, ""]))
    draw(rows, earlier, arguments.output)


if __name__ == "__main__":
    main()
