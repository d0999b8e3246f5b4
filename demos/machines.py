"""A job whose machines die and come back, on torchrun's elastic agents: `make elastic`.

    python demos/machines.py --zero_stage 1 --output out/elastic.png
    python demos/machines.py --soak 60 --seed 1 --zero_stage 3

Three "nodes", agents of torchrun on this machine with 2 ranks each, train 200 steps while the events below happen to
them: once with checkpoints on the disk alone, and once with --mirror 1. A node that is lost takes its memory with it.
--soak: nodes of one rank, and for so many minutes events drawn from the seed. Then every step must be in the log once,
with the numbers of one rank that nothing happened to: every bit, with --exact. Nothing may be left over.
"""

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from harness import machines  # noqa: E402
from harness.machines import TORCHRUN, WARM, Job, compare, holder, logged, read  # noqa: E402
from harness.ranks import free_port, run  # noqa: E402

FOLDER, STEPS = Path("ckpt_elastic").resolve(), 200
MEMORY = Path(f"/dev/shm/machines_{os.getpid()}")
TRAIN = "--train_batch_size 192 --train_micro_batch_size_per_gpu 8 --checkpoint_interval 20 --keep 2".split()
TRAIN += f"--steps {STEPS} --checkpoint_dir {FOLDER} --timeout 10".split()


def new_job(launcher, train, name, mirror=0, **options):
    shutil.rmtree(FOLDER, ignore_errors=True)
    train = [*train, "--elastic", "--run_name", name, *["--mirror", str(mirror)] * bool(mirror)]
    return Job(launcher, train, name, memory=MEMORY if mirror else None, **options)


def happen(job, event, ranks=r"\d+"):
    """Let it happen. Returns the last step before it, the first one after it, how many were done again, on how many
    ranks it goes on; and seconds: of all, until new ranks were started, until they trained, until they had a step."""
    since = time.time()
    event(job)
    reached = job.step()
    began, ranks, stepped, first = job.went_on(since, ranks)
    created = job.created(since)
    seconds = stepped - since, created - since, began - created, stepped - began
    return reached, first, max(reached + 1 - first, 0), ranks, seconds


def finish(job, wanted, rounding=False):
    """Compare the log of a job with one rank's; nothing may be left over."""
    left = [*FOLDER.glob("*unfinished")] + [*(job.memory.glob("*/*") if job.memory else ())]
    assert not left, f"left over: {left}"
    _, worst = compare(read(job.log), wanted)
    print(f"{len(wanted)} steps, each once; largest difference to one rank that was never interrupted:")
    print("  " + ", ".join(f"{column} {worst[column]:.1e}" for column in worst), flush=True)
    if not rounding and any(worst.values()):
        sys.exit("demos/machines.py: the runs differ")


def train_alone(train, name, limit):
    """What a job is compared with: the same training on one rank, to which nothing happens. Returns its log."""
    run(Path.cwd(), 1, "train_elastic.py", *train, "--run_name", name, limit=limit)
    return read(logged(name))


def kill_while_it_sends(job, name):
    memory = job.nodes[name].memory
    while memory and not list(memory.glob("*/step*/*.part")):
        assert job.nodes[name].agent.poll() is None, "the job ended by itself"
    job.kill(name)


def kill_in_a_save(job, name):
    while not any(list(folder.iterdir()) for folder in FOLDER.glob("*.unfinished")):
        time.sleep(0.001)
    job.kill(name)


def kill_the_first(job):
    """Its agent holds the rendezvous, and without that the others end themselves. A scheduler starts them again."""
    job.kill("node 1")
    for node in job.nodes.values():
        node.agent.wait(timeout=120)
    job.nodes.clear()
    job.start("node 1", "node 2")


# after which step of the log, what happens
EVENTS = [
    (0, "start", lambda job: job.start("node 1", "node 2")),
    (27, "node 2 dies", lambda job: job.kill("node 2")),
    (32, "node 2 is back", lambda job: job.start("node 2")),
    (52, "node 2 dies as it sends", lambda job: kill_while_it_sends(job, "node 2")),
    (55, "node 2 is back", lambda job: job.start("node 2")),
    (75, "node 2 is preempted", lambda job: job.preempt("node 2")),
    (82, "node 2 is back", lambda job: job.start("node 2")),
    (105, "node 2 dies in a save", lambda job: kill_in_a_save(job, "node 2")),
    (105, "node 2 is back", lambda job: job.start("node 2")),
    (130, "a rank is killed", lambda job: job.kill_a_rank("node 2")),
    (133, "node 3 joins", lambda job: job.start("node 3")),
    (150, "a rank hangs", lambda job: job.hang("node 2")),
    (155, "nodes 2 and 3 die", lambda job: job.kill("node 2", "node 3")),
    (160, "node 2 is back", lambda job: job.start("node 2")),
    (182, "the first node dies", kill_the_first),
]
NEIGHBOURS = "nodes 2 and 3 die"  # at once, a shard and its copy: back to the disk


def play(job):
    """Train, with the events. Returns one row per event: what happened, steps done again, ranks before and after."""
    rows, before, spares = [], 0, 0
    print("step  event                    ranks        goes on at   again   seconds = torchrun  start  first step")
    for at, name, event in EVENTS:
        name = name if job.memory else name.removesuffix(" as it sends")
        job.reach(at)
        reached, first, again, ranks, seconds = happen(job, event, 4 if name == "start" else r"\d+")
        spare = job.ranks * len(job.nodes) - ranks
        assert not job.memory or not again or name == NEIGHBOURS, f"{name}: steps are done again"
        line = f"{reached:4}  {name:<23}{before:>3} -> {ranks}{f' + {spare}' if spare else '':<6}{first:>12}{again:>8}"
        print(line + "{:>10.1f}{:>11.1f}{:>7.1f}{:>12.1f}".format(*seconds), flush=True)
        rows.append((name, again, before, ranks))
        before, spares = ranks, spares + spare
    job.wait()
    assert sum("stands by" in line for _, line in job.lines) == spares, "a rank that is not needed did not stand by"
    back = sum("back to the disk" in line for _, line in job.lines)
    assert back == bool(job.memory), f"{back} times back to the disk"
    return rows


def try_events(args):
    train, rounding = [*TRAIN, *["--exact"] * (not args.rounding)], "_rounding" * args.rounding
    alone, runs = f"elastic_one_rank{rounding}", {}
    wanted = read(logged(alone)) or train_alone(train, alone, 900)
    train += ["--zero_stage", str(args.zero_stage)]
    for mirror in args.mirror:
        name = f"elastic_zero{args.zero_stage}{f'_mirror{mirror}' * bool(mirror)}{rounding}"
        kind = f"--mirror {mirror}" if mirror else "checkpoints only"
        print(f"ZeRO-{args.zero_stage}, {kind}, torchrun, {'without' if args.rounding else 'with'} --exact")
        with new_job(TORCHRUN, train, name, mirror, ranks=2) as job:
            rows = play(job)
            finish(job, wanted, args.rounding)
        runs[kind] = read(job.log), rows
    if args.output:
        draw(wanted, runs, args.output)


def draw(wanted, runs, path):
    """runs: {name: (log, events)}, the first without a mirror, the second with one."""
    matplotlib.rcParams.update({"font.size": 11, "axes.titlesize": 11})  # to be read on a telephone
    figure = Figure(figsize=(6, 5.8), layout="constrained")
    top, below = figure.subplots(2, 1, height_ratios=[1.6, 4.2])
    looks = {"color": "#0072B2", "ls": "-"}, {"color": "#D55E00", "ls": (0, (3, 3))}
    steps = range(1, STEPS + 1)
    top.plot(steps, [float(row["loss"]) for row in wanted], color="0.8", lw=7, label="one rank, undisturbed")
    for i, ((name, (log, events)), look) in enumerate(zip(runs.items(), looks, strict=True)):
        top.plot(steps, [float(row["loss"]) for row in log], **look, lw=1.4, label=name)
        counts = [again for _, again, *_ in events[1:]]
        places = [place + 0.4 * i for place in range(len(counts))]
        below.barh(places, counts, 0.4, color=look["color"], label=f"{name}: {sum(counts)}")
        for place, count in zip(places, counts, strict=True):
            below.text(count + 0.2, place, count or "", va="center", size=9, color=look["color"])
    labels = [f"{event}, {before} to {after} ranks" for event, _, before, after in events[1:]]
    below.set(yticks=[place + 0.2 for place in range(len(labels))], yticklabels=labels, xlabel="steps done again")
    below.invert_yaxis()
    below.legend(loc="lower right", frameon=False, borderaxespad=0)
    top.set(xlabel="step", ylabel="training loss")
    figure.suptitle(f"{len(labels)} events in {STEPS} steps: the loss does not notice", size=11)
    top.legend(loc="upper right", frameon=False)
    for axis in (top, below):
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200)


SMALL = "--n_embd 32 --seq_len 16 --n_layer 1 --train_batch_size 24 --train_micro_batch_size_per_gpu 2 --exact".split()
SMALL += f"--eval_interval 50 --checkpoint_interval 100 --keep 2 --timeout 10 --checkpoint_dir {FOLDER}".split()
NODES = ["node 1", "node 2", "node 3"]
ODDS = {"dies": 12, "is preempted": 6, "a rank is killed": 8, "a rank hangs": 2, "two die at once": 1}


def throw(dice, alive):
    """(steps until it happens, what, to which nodes)."""
    gap, away = dice.choice([0, 1, 2, 5, 20, 60]), [node for node in NODES if node not in alive]
    if away and (len(alive) == 1 or dice.random() < 0.4):
        return gap, "joins", [dice.choice(away)]
    (what,) = dice.choices([*ODDS], ODDS.values())
    node = dice.choice(sorted(alive))
    if what == "two die at once" and not away:
        return gap, what, sorted({*NODES} - {node})
    return gap, what.replace("two die at once", "dies"), [node]


def preempt(job, name):
    leaving = job.nodes[name]
    job.preempt(name)
    leaving.agent.wait(timeout=120)


HAPPENS = {"joins": Job.start, "is preempted": preempt, "a rank is killed": Job.kill_a_rank, "a rank hangs": Job.hang}


def soak(job, minutes, steps, dice):
    """Returns {what happened: [(steps done again, seconds until the next step)]}."""
    rows = {}
    _, done, *_ = happen(job, lambda job: job.start(*NODES), len(NODES))
    end = time.time() + 60 * minutes
    while time.time() < end and done + 100 < steps:
        gap, what, nodes = throw(dice, job.nodes.keys())
        job.reach(min(done + gap, steps))
        event = HAPPENS.get(what, Job.kill)
        reached, done, again, _, seconds = happen(job, lambda job: event(job, *nodes))  # noqa: B023
        rows.setdefault(what, []).append((again, seconds[0]))
        print(f"step {reached:6}  {', '.join(nodes)} {what:<18}{done:8}{seconds[0]:7.1f} s", flush=True)
    job.wait(60 + steps)
    return rows


def try_soak(args):
    steps, name = args.steps or int(100 * args.soak), "elastic_soak"
    head = f"seed {args.seed}, ZeRO-{args.zero_stage}, {steps} steps"
    print(f"{head}, up to {args.soak:g} minutes of events", flush=True)
    train, port, start = [*SMALL, "--steps", str(steps)], free_port(), time.time()
    where = {"endpoint": f"127.0.0.1:{port}", "rendezvous": "is_host=0"}
    meeting = subprocess.Popen(holder(port))
    try:
        with new_job(WARM, [*train, "--zero_stage", str(args.zero_stage)], name, mirror=1, **where) as job:
            rows = soak(job, args.soak, steps, random.Random(args.seed))
            head += f", {(time.time() - start) / 60:.0f} minutes of events"
            finish(job, train_alone(train, f"{name}_alone", 60 + steps))
    finally:
        meeting.kill()
        meeting.wait()
    print(f"{head}\nevent               times   steps done again   seconds to the next step: median   longest")
    for what, found in sorted(rows.items()):
        again, seconds = zip(*found, strict=True)
        median, longest = statistics.median(seconds), max(seconds)
        print(f"{what:<18}{len(seconds):>7}{sum(again):>19}{median:>35.1f}{longest:>10.1f}")
    back, found = sum("back to the disk" in line for _, line in job.lines), sum(rows.values(), [])
    assert back or not any(again for again, _ in found), "steps are done again"
    print(f"{len(found)} events, {back} times back to the disk; every step once in the log, and no bit differs")


def try_settings():
    """Seconds from the death of a node to the start of new ranks, by what the agents wait for."""
    print("interval x attempts   last call   seconds")
    for interval, attempts, last_call in ((5, 3, 30), (5, 3, 3), (1, 3, 30), (1, 3, 3), (1, 3, 1)):
        waits = f"keep_alive_interval={interval},keep_alive_max_attempt={attempts}"
        machines.RENDEZVOUS = f"{waits},last_call_timeout={last_call}"
        with new_job(WARM, [*TRAIN, "--exact"], "settings", ranks=2) as job:
            job.start("node 1", "node 2")
            job.first(r"^step +3 \|", 0)
            *_, (_, began, *_) = happen(job, lambda job: job.kill("node 2"))
        print(f"{interval:>8} s x {attempts}{last_call:>16} s{began:>10.1f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zero_stage", type=int, choices=[1, 2, 3], default=1)
    parser.add_argument("--rounding", action="store_true", help="without --exact: the last digits may differ")
    every = "hold every K-th step in memory; 0: checkpoints only; several: one run after the other"
    parser.add_argument("--mirror", type=int, nargs="+", default=[0, 1], metavar="K", help=every)
    parser.add_argument("--settings", action="store_true", help="time torchrun's settings instead, by one event")
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="random events instead, for so long")
    parser.add_argument("--steps", type=int, help="of --soak; default: 100 a minute")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--output", type=Path, help="the picture of two runs")
    args = parser.parse_args()
    if args.settings:
        try_settings()
    else:
        try_soak(args) if args.soak else try_events(args)


if __name__ == "__main__":
    main()
