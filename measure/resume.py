"""A model of realistic size, trained on 4 ranks and resumed on 2, in two ways: what it costs and
how close it stays.

    python -m measure.resume
    python -m measure.resume --loads    loading alone, by turns with its peers; 4 minutes
    python -m measure.resume --loads --large    353 million parameters, on 2 ranks; 4 minutes
    python -m measure.resume --loads --device cuda --ranks 1    473 million parameters, on a card

    universal   universal.load_checkpoint(), from the ZeRO checkpoint as it is
    DeepSpeed   DeepSpeed's converter and its universal loader

Seconds: of the conversion, a process of its own, and of loading, the slowest rank. Memory: the
largest of a rank while it loads, over what it had, and the converter's. Difference: the largest of
the training loss over the steps after the resume.

The peers of loading: DeepSpeed's own loader, on the ranks that saved; DCP, torch's distributed
checkpoint of FSDP2, on others; and the reads of a rank's own files into memory, with nothing else.
"""

import json
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from deepspeed.accelerator import get_accelerator
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import universal
from measure import options
from measure.cards import run_on
from measure.convert import commands
from measure.costs import Run, cost, timed
from tests.support import toy
from tests.support.lay_out import lay_out
from tests.support.ranks import deepspeed, run
from train import GPT, init_distributed, parameter_groups
from universal.files.sources import READERS
from universal.load.reader import TensorReader, describe_for_load

STAGE = 3
BATCH = 4
LENGTH = 32
SHAPE = {"n_layer": 12, "n_head": 12, "n_embd": 768}  # 86 million parameters
IS_CARD = get_accelerator().device_name() == "cuda"
if IS_CARD:
    SHAPE = {"n_layer": 24, "n_head": 20, "n_embd": 1280}
LARGE = {"n_layer": 28, "n_head": 16, "n_embd": 1024}
SAVED = 2  # steps before the save
STEPS = 12
WAYS = ("universal", "DeepSpeed")
LOADS = 2  # of a process


def make_engine(batch, micro, stage, load_universal=False):
    init_distributed()
    gpt = GPT(**SHAPE, seq_len=LENGTH, dropout=0.0)
    config = {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": micro,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": IS_CARD},
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 3e-4}},
        "checkpoint": {"load_universal": load_universal},
    }
    groups = parameter_groups(gpt)
    engine, *_ = deepspeed.initialize(model=gpt, model_parameters=groups, config=config)
    return engine


def load(engine, folder, way):
    """Returns what loading costs this rank."""
    if way == "universal":
        return cost(lambda: universal.load_checkpoint(engine, folder, "saved"))
    return cost(lambda: engine.load_checkpoint(folder, way))


def train(folder, way=None):
    """Train on every rank; rank 0 prints the losses, and what loading has cost each rank."""
    # Of other weights on each rank: what is resumed must come from the checkpoint.
    torch.manual_seed(int(os.environ["RANK"]) if way else 0)
    engine = make_engine(BATCH, 1, STAGE, way == "DeepSpeed")
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    costs = [None] * ranks
    dist.all_gather_object(costs, load(engine, folder, way) if way else None)
    losses = []
    for step in range(SAVED if way else 0, STEPS):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(256, (BATCH, LENGTH + 1), generator=generator)
        total = torch.zeros((), dtype=torch.float64)
        for row in tokens.chunk(ranks)[rank]:
            loss = engine(row[None, :-1], row[None, 1:])
            engine.backward(loss)
            engine.step()
            total += loss.item()
        dist.all_reduce(total)
        losses.append(total.item() / BATCH)
        if not way and step + 1 == SAVED:
            engine.save_checkpoint(folder, "saved")
    dist.barrier()
    print("\n" + json.dumps([losses, costs]))


def trained(work, ranks, *way):
    """The losses of train() on so many ranks, and what loading has cost each."""
    out = run(work, ranks, train, work, *way, limit=1200)
    return json.loads(out.splitlines()[-1])


# -----------------------------------------------------------------------------
# loading alone


class Frozen(nn.Module):
    """A gigabyte of frozen weights, and a few that are trained."""

    def __init__(self):
        super().__init__()
        frozen = (nn.Linear(2048, 2048, bias=False) for _ in range(64))
        self.base = nn.ModuleList(layer.requires_grad_(False) for layer in frozen)
        self.head = nn.Linear(64, 64)


class Fsdp:
    """The GPT under FSDP2, saved and loaded by DCP."""

    def __init__(self):
        self.model = GPT(**SHAPE, seq_len=LENGTH, dropout=0.0)
        for block in self.model.blocks:
            fully_shard(block)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(parameter_groups(self.model), lr=3e-4)

    def state(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, folder):
        dcp.save(self.state(), checkpoint_id=folder)

    def load(self, folder):
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        states = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **states)
        return state


def made(frozen, stage):
    if not frozen:
        return make_engine(int(os.environ["WORLD_SIZE"]), 1, stage)
    init_distributed()
    return toy.make(stage, Frozen, toy.TORCH_ADAMW, batch=BATCH, micro=None)


def save(folder, stage, frozen, by_dcp):
    """Save on every rank. by_dcp: the same model by DCP, too."""
    engine = made(frozen, stage)
    if not frozen:
        tokens = torch.randint(256, (1, LENGTH + 1)).to(engine.device)
        engine.backward(engine(tokens[:, :-1], tokens[:, 1:]))
        engine.step()  # before it, there are no moments
        if by_dcp:
            Fsdp().save(f"{folder}/dcp")
    engine.save_checkpoint(folder, "saved")


def read_own_files(folder):
    """The shard and the model states of this rank, in threads. Returns the bytes."""
    number = f"*zero_pp_rank_{dist.get_rank()}_mp*"
    with ThreadPoolExecutor(READERS) as pool:
        return sum(map(len, pool.map(Path.read_bytes, Path(folder, "saved").glob(number))))


def load_repeatedly(folder, stage, frozen, way):
    """Load on a rank, into a fresh engine and again. Returns what each load costs the slowest."""
    engine = made(frozen, stage)
    fsdp = Fsdp() if way == "DCP" else None
    ways = {
        "universal": lambda: universal.load_checkpoint(engine, folder, "saved"),
        "DeepSpeed": lambda: engine.load_checkpoint(folder, "saved"),
        "DCP": lambda: fsdp.load(f"{folder}/dcp"),
        "reads": lambda: read_own_files(folder),
    }
    slowest = torch.tensor([cost(ways[way]) for _ in range(LOADS)], device=engine.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.tolist()


def load_in_turns(folder, stage, frozen, turns):
    """Load on every rank, in one way after the other. Rank 0 prints the costs."""
    torch.manual_seed(int(os.environ["RANK"]))
    costs = [load_repeatedly(folder, stage, frozen, way) for way in turns]
    print("\n" + json.dumps(costs))


def compare(device, folder, stage, frozen, ranks, peer):
    """Returns the cells of a row, each of first loads but the second ratio. On CPUs each turn has
    processes of its own; on cards they take too long to start."""
    turns = ("universal", peer, peer, "universal")
    costs = []
    for launch in [turns] if device == "cuda" else [[way] for way in turns]:
        work = (load_in_turns, folder, stage, frozen, launch)
        costs += json.loads(run_on(device, folder, ranks, *work).splitlines()[-1])
    # Means over the turns: the seconds and the megabytes of each load.
    ours, theirs = (torch.tensor(costs)[places].mean(0) for places in ([0, 3], [1, 2]))
    first, again = (ours / theirs)[:, 0].tolist()
    cells = [f"{seconds:.2f}" for seconds in (ours[0, 0], theirs[0, 0], first, again)]
    return cells + [f"{number:.0f}" for number in torch.stack((ours, theirs), 2)[0, 1:].flatten()]


def read_slowly(folder):
    """What one of 48 ranks reads of 64 ranks' files, if the storage answers after a millisecond.

    Returns: (ranges, reads, seconds, seconds if each range is read by itself in 8 threads).
    """
    group = {f"layer.{i}.weight": torch.Size((350, 350)) for i in range(700)}
    lay_out(folder, [group, {}], 64, 3)
    checkpoint, _ = describe_for_load(folder)
    share = -(-350 * 350 // 48)
    start = 17 * share
    reader = TensorReader()
    ranges = []
    for key in ("fp32", "exp_avg", "exp_avg_sq"):
        flat = torch.empty(len(group) * share)
        for part, parameter in zip(flat.split(share), checkpoint.parameters.values(), strict=True):
            reader.request(part, parameter.states[key], start)
            ranges += parameter.states[key].reads(memoryview(bytearray(4 * share)), start)
    preadv = os.preadv
    reads = []

    def slow(*read):
        time.sleep(0.001)
        reads.append(read)
        return preadv(*read)

    def read_alone(item):
        slow(reader.opened(item.record.path).fileno(), [item.buffer], item.offset)

    os.preadv = slow
    begin = time.perf_counter()
    reader.fetch()
    middle = time.perf_counter()
    os.preadv = preadv
    count = len(reads)
    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(read_alone, ranges))
    return len(ranges), count, middle - begin, time.perf_counter() - middle


def peers_of(device, ranks):
    """Yields (stage, whether a gigabyte is frozen, [(ranks, peer)])."""
    if device == "cuda" or ranks < 4:
        yield from ((stage, False, [(ranks, "DeepSpeed")]) for stage in (1, 3))
    else:
        yield from ((stage, False, [(4, "DeepSpeed"), (2, "DCP")]) for stage in (1, 3))
        yield 3, True, [(4, "reads")]


def loads(device, ranks):
    assert universal.load_checkpoint  # so that no rank has to import it
    row = "{:<22}{:>6}{:>10}{:>11}{:>8}{:>8}{:>8}{:>8}{:>10}" + "{:>10}" * (device == "cuda") * 2
    print(
        f"seconds of the slowest rank, means of 2 turns; saved on {ranks} ranks\n"
        "again: the ratio of a second load of the same process, into an engine that has loaded"
    )
    heads = ["", "ranks", "universal", "peer", "", "ratio", "again", "MB", "MB peer"]
    print(row.format(*heads, *["card MB", "MB peer"] * (device == "cuda")))
    for stage, frozen, peers in peers_of(device, ranks):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as work:
            by_dcp = any(peer == "DCP" for _, peer in peers)
            run_on(device, work, ranks, save, work, stage, frozen, by_dcp)
            for count, peer in peers:
                ours, theirs, *rest = compare(device, work, stage, frozen, count, peer)
                name = f"ZeRO-{stage}" + ", 1 GB frozen" * frozen
                print(row.format(name, count, ours, peer, theirs, *rest), flush=True)
    if device == "cuda" or ranks < 4:
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as work:
        ranges, reads, ours, alone = read_slowly(Path(work, "saved"))
    print(
        "64 ranks' files at ZeRO-3, 700 parameters, each read 1 ms late: one of 48 ranks reads "
        f"{ranges}\nranges in {reads} reads and {ours:.2f} s; one by one in {READERS} threads "
        f"they take {alone:.2f} s"
    )


def main():
    row = "{:<12}{:>12}{:>10}{:>10}{:>14}{:>14}"
    print(row.format("", "seconds of", "loading", "MB of", "MB of the", "difference"))
    print(row.format(f"ZeRO-{STAGE}", "converting", "it", "a rank", "converter", "of the loss"))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as work:
        baseline, _ = trained(work, 4)
        for way in WAYS:
            converter = Run(0.0, 0.0, "")
            if way == "DeepSpeed":
                command = commands(f"{work}/saved", f"{work}/{way}")[way]
                converter = timed(command, work)
            losses, costs = trained(work, 2, way)
            seconds, memory, _ = (max(cost) for cost in zip(*costs, strict=True))
            gap = max(abs(a - b) for a, b in zip(baseline[SAVED:], losses, strict=True))
            cells = (
                f"{converter.seconds:.2f}",
                f"{seconds:.2f}",
                f"{memory:.0f}",
                f"{converter.megabytes:.0f}",
                f"{gap:.1e}",
            )
            print(row.format(way, *cells), flush=True)


if __name__ == "__main__":
    parser = options.parser(__doc__)
    parser.add_argument("--loads", action="store_true", help="loading alone")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of --loads")
    parser.add_argument("--ranks", type=int, default=4, help="of --loads --device cuda")
    parser.add_argument("--large", action="store_true", help="a larger model, on 2 ranks of a CPU")
    args = parser.parse_args()
    if args.large:
        SHAPE.update(LARGE)
        args.ranks = 2
    loads(args.device, args.ranks) if args.loads else main()
