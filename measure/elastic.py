"""A job whose machines die and come back, on torchrun's elastic agents: `make elastic`.

    python -m measure.elastic --zero_stage 1 --output out/elastic.png
    python -m measure.elastic --soak 60 --seed 1 --zero_stage 3

Three "nodes", agents of torchrun on this machine with 2 ranks each, train 200 steps while the
events below happen to them: once with checkpoints on the disk alone, and once with --mirror 1. A
node that is lost takes its memory with it. --soak: nodes of one rank, and for so many minutes
events drawn from the seed. Then every step must be in the log once, with the numbers of one rank
that nothing happened to: every bit, with --exact. Nothing may be left over."""

import os
import random
import shutil
import statistics
import time
from pathlib import Path

from matplotlib.figure import Figure
from torch.distributed import TCPStore

import plot
from measure import options
from measure.machines import HEAD, TORCHRUN, WARM, Job, differences, train_alone

FOLDER = Path("ckpt_elastic").resolve()
MEMORY = Path(f"/dev/shm/machines_{os.getpid()}")
STEPS = 200
TRAIN = (
    f"--train_batch_size 192 --train_micro_batch_size_per_gpu 8 --steps {STEPS} "
    f"--checkpoint_dir {FOLDER} --checkpoint_interval 20 --keep 2 --timeout 10"
).split()


def finish(job, alone, rounding=False):
    """Compare the log of a job with that of one rank; nothing may be left over."""
    left = [*FOLDER.glob(".*"), *MEMORY.glob("*/*")]
    assert not left, f"left over: {left}"
    worst = differences(job, alone)
    print(
        f"{job.step()} steps, each once; largest difference to one rank that was never interrupted:"
    )
    print("  " + ", ".join(f"{column} {worst[column]:.1e}" for column in worst), flush=True)
    assert rounding or not any(worst.values()), "the runs differ"


# -----------------------------------------------------------------------------
# the events of `make elastic`


def kill_while(job, folder, pattern):
    """Kill node 2 as soon as there is such a file. Without a mirror there is no folder of the
    memory: at once."""
    job.until(lambda: not folder.exists() or any(folder.glob(pattern)), pause=0.001)
    job.kill("node 2")


def kill_the_first(job):
    """Kill node 1, which holds the rendezvous: the other agents end themselves, and a scheduler
    starts them again."""
    job.kill("node 1")
    for node in job.nodes.values():
        node.agent.wait(timeout=120)
    job.nodes.clear()
    job.start("node 1", "node 2")


NEIGHBORS = "nodes 2 and 3 die"  # at once, a shard and its copy: back to the disk
# after which step of the log, what happens
EVENTS = [
    (0, "start", Job.start, "node 1", "node 2"),
    (27, "node 2 dies", Job.kill, "node 2"),
    (32, "node 2 is back", Job.start, "node 2"),
    (52, "node 2 dies as it sends", kill_while, MEMORY, "node 2/*/step*/*.part"),
    (55, "node 2 is back", Job.start, "node 2"),
    (75, "node 2 is preempted", Job.preempt, "node 2"),
    (82, "node 2 is back", Job.start, "node 2"),
    (105, "node 2 dies in a save", kill_while, FOLDER, ".*.saving/*"),
    (105, "node 2 is back", Job.start, "node 2"),
    (130, "a rank is killed", Job.kill_a_rank, "node 2"),
    (133, "node 3 joins", Job.start, "node 3"),
    (150, "a rank hangs", Job.hang, "node 2"),
    (155, NEIGHBORS, Job.kill, "node 2", "node 3"),
    (160, "node 2 is back", Job.start, "node 2"),
    (182, "the first node dies", kill_the_first),
]


def try_events(args):
    train = TRAIN if args.rounding else [*TRAIN, "--exact"]
    runs = {}
    train_alone(train, "elastic_one_rank", STEPS)
    for mirror in args.mirror:
        shutil.rmtree(FOLDER, ignore_errors=True)
        mirror_flag = f"--mirror {mirror}" if mirror else ""
        kind = mirror_flag or "checkpoints only"
        exact = "without --exact" if args.rounding else "with --exact"
        print(f"ZeRO-{args.zero_stage}, {kind}, torchrun, {exact}\n{HEAD}")
        flags = f"--zero_stage {args.zero_stage} {mirror_flag}".split()
        memory = MEMORY if mirror else None
        with Job(TORCHRUN, [*train, *flags], "elastic", ranks=2, memory=memory) as job:
            for step, name, event, *arguments in EVENTS:
                job.reach(step)
                what = name if mirror else name.removesuffix(" as it sends")
                ranks = r"\d+" if step else 4
                lost = not mirror or name == NEIGHBORS
                job.happen(what, event, *arguments, ranks=ranks, lost=lost)
            job.wait()
            back = job.said("back to the disk")
            assert back == bool(mirror), f"{back} times back to the disk"
            finish(job, "elastic_one_rank", args.rounding)
        runs[kind] = job.events[1:]
    if args.output:
        draw(runs, args.output)


def draw(runs, path):
    """The steps trained twice, after each event that cost any. runs: {name: events}, the first
    without a mirror, the second with one."""
    rows = [events for events in zip(*runs.values(), strict=True) if any(e.again for e in events)]
    figure = Figure(figsize=(6, 4.4), layout="constrained")
    axis = figure.subplots()
    for i, ((name, events), color) in enumerate(zip(runs.items(), plot.COLORS, strict=False)):
        counts = [row[i].again for row in rows]
        heights = [at + 0.4 * i - 0.2 for at in range(len(rows))]
        total = sum(event.again for event in events)
        label = f"{name}: {total} steps".replace("--mirror 1", "copies in memory (--mirror 1)")
        bars = axis.barh(heights, counts, 0.4, color=color, label=label)
        axis.bar_label(bars, padding=2, fontsize=9)
    labels = [
        f"{row[-1].what}, {row[-1].ranks_before} → {row[-1].ranks_after} ranks" for row in rows
    ]
    axis.set_yticks(range(len(rows)), labels)
    axis.margins(x=0.1)
    axis.set(xlabel="steps trained twice (0: no bar)")
    figure.suptitle(
        f"When machines die: how many of {STEPS} steps are trained twice\n"
        f"({len(events) - len(rows)} more events cost none)",
        fontsize=11,
    )
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", frameon=False)
    figure.savefig(path, dpi=200)


# -----------------------------------------------------------------------------
# --soak: random ones

SMALL = (
    "--n_embd 32 --seq_len 16 --n_layer 1 --train_batch_size 24 --train_micro_batch_size_per_gpu 2 "
    "--exact --eval_interval 50 --checkpoint_interval 100 --keep 2 --timeout 10 "
    f"--checkpoint_dir {FOLDER}"
).split()
NODES = ["node 1", "node 2", "node 3"]
ODDS = {
    "dies": 12,
    "is preempted": 6,
    "a rank is killed": 8,
    "a rank hangs": 2,
    "two die at once": 1,
}
HAPPENS = {
    "joins": Job.start,
    "dies": Job.kill,
    "is preempted": Job.preempt,
    "a rank is killed": Job.kill_a_rank,
    "a rank hangs": Job.hang,
    "two die at once": Job.kill,
}


def throw(dice, alive):
    """Draws the next event: the steps until it happens, what it is, and on which nodes."""
    gap = dice.choice([0, 1, 2, 5, 20, 60])
    dead = [node for node in NODES if node not in alive]
    if dead and (len(alive) == 1 or dice.random() < 0.4):
        return gap, "joins", [dice.choice(dead)]
    (what,) = dice.choices([*ODDS], ODDS.values())
    node = dice.choice(sorted(alive))
    if what == "two die at once" and not dead:
        return gap, what, sorted({*NODES} - {node})
    return gap, what.replace("two die at once", "dies"), [node]


def try_soak(args):
    steps = int(150 * args.soak)
    head = f"seed {args.seed}, ZeRO-{args.zero_stage}, {steps} steps"
    print(f"{head}, up to {args.soak:g} minutes of events\n{HEAD}", flush=True)
    shutil.rmtree(FOLDER, ignore_errors=True)
    train = [*SMALL, "--steps", str(steps)]
    flags = f"--zero_stage {args.zero_stage} --mirror 1".split()
    # A rendezvous that no node holds.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rendezvous = {"endpoint": f"127.0.0.1:{store.port}", "rendezvous": "is_host=0"}
    dice = random.Random(args.seed)
    start = time.time()
    events = {}
    with Job(WARM, [*train, *flags], "elastic_soak", memory=MEMORY, **rendezvous) as job:
        job.happen("start", Job.start, *NODES, ranks=len(NODES))
        while time.time() < start + 60 * args.soak and job.step() + 100 < steps:
            gap, what, nodes = throw(dice, job.nodes)
            job.reach(job.step() + gap)
            event = job.happen(f"{', '.join(nodes)} {what}", HAPPENS[what], *nodes, lost=True)
            events.setdefault(what, []).append(event)
        job.wait(60 + steps)
        head += f", {(time.time() - start) / 60:.0f} minutes of events"
        train_alone(train, "elastic_soak_alone", steps)
        finish(job, "elastic_soak_alone")
    print(head)
    print_soak(job, events)


def print_soak(job, events):
    """Prints the events of each kind. events: {what: [Event]}."""
    print(
        "event               times   steps done again   seconds to the next step: median   longest"
    )
    for what, kind in sorted(events.items()):
        seconds = [event.seconds for event in kind]
        again = sum(event.again for event in kind)
        median = statistics.median(seconds)
        print(f"{what:<18}{len(kind):>7}{again:>19}{median:>35.1f}{max(seconds):>10.1f}")
    back = job.said("back to the disk")
    assert back or not any(event.again for event in job.events), "steps are done again"
    print(
        f"{len(job.events) - 1} events, {back} times back to the disk; "
        "every step once in the log, and no bit differs"
    )


def main():
    parser = options.parser(__doc__)
    parser.add_argument("--zero_stage", type=int, choices=[1, 2, 3], default=1)
    parser.add_argument(
        "--rounding", action="store_true", help="without --exact: the last digits may differ"
    )
    parser.add_argument(
        "--mirror", type=int, nargs="+", default=[0, 1], metavar="K", help="0: checkpoints only"
    )
    parser.add_argument(
        "--soak", type=float, metavar="MINUTES", help="random events instead, for so long"
    )
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--output", type=options.place, help="the picture of two runs")
    args = parser.parse_args()
    if args.soak:
        try_soak(args)
    else:
        try_events(args)


if __name__ == "__main__":
    main()
