"""A job whose machines die and come back, on torchrun's elastic agents: `make elastic`.

    python demos/machines.py --zero_stage 1 --output out/elastic.png
    python demos/machines.py --soak 60 --seed 1 --zero_stage 3

harness/machines.py starts torchrun agents and takes them down; the rest is `train_elastic.py --elastic`. Three "nodes",
agents of this machine with 2 ranks each, train 200 steps while the events below happen to them: once with checkpoints
on the disk alone, and once with --mirror 1. A node that is lost takes its memory with it. --soak: nodes of one rank,
and for so many minutes events drawn from the seed. Then every step must be in the log once, with the loss, validation
loss and gradient norm of one rank that nothing happened to: every bit, with --exact. Nothing may be left over.
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

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from harness import machines  # noqa: E402
from harness.machines import HOLDER, TORCHRUN, WARM, Job, compare, read, train_alone  # noqa: E402
from harness.processes import free_port  # noqa: E402

FOLDER, STEPS = Path("ckpt_elastic").resolve(), 200
MEMORY = Path(f"/dev/shm/machines_{os.getpid()}")
TRAIN = "--train_batch_size 192 --train_micro_batch_size_per_gpu 8 --checkpoint_interval 20 --keep 2".split()
TRAIN += f"--steps {STEPS} --checkpoint_dir {FOLDER} --timeout 10".split()

# -----------------------------------------------------------------------------
# the fourteen events


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
    """Train, with the events. Returns one row per event, as printed."""
    rows, before = [], 0
    print("step  event                    ranks        goes on at   again   seconds = torchrun  start  first step")
    for at, name, event in EVENTS:
        name = name if job.memory else name.removesuffix(" as it sends")
        job.reach(at)
        since = time.time()
        event(job)
        reached = job.step()
        began, ranks, stepped, first = job.went_on(since, 4 if name == "start" else r"\d+")
        created = min(when for node in job.nodes.values() for when, _ in node.workers() if when > since)
        spare, again = job.ranks * len(job.nodes) - ranks, max(reached + 1 - first, 0)
        assert not job.memory or not again or name == NEIGHBOURS, f"{name}: steps are done again"
        print(
            f"{reached:4}  {name:<23}{before:>3} -> {ranks}{f' + {spare}' if spare else '':<6}{first:>12}{again:>8}"
            f"{stepped - since:>10.1f}{created - since:>11.1f}{began - created:>7.1f}{stepped - began:>12.1f}",
            flush=True,
        )
        rows.append({"step": reached, "event": name, "from": first - 1, "ranks": ranks, "spare": spare})
        before = ranks
    job.wait()
    spare = sum(row["spare"] for row in rows)
    assert sum("stands by" in line for _, line in job.lines) == spare, "a rank that is not needed did not stand by"
    back = sum("back to the disk" in line for _, line in job.lines)
    assert back == bool(job.memory), f"{back} times back to the disk"
    return rows


def finish(job, wanted, rounding=False):
    """Compare the log of a job with one rank's; nothing may be left over. Returns the differences of the loss."""
    left = [*FOLDER.glob("*unfinished")] + [*(job.memory.glob("*/*") if job.memory else ())]
    assert not left, f"left over: {left}"
    gaps, worst = compare(read(job.log), wanted)
    print(f"{len(wanted)} steps, each once; largest difference to one rank that was never interrupted:")
    print("  " + ", ".join(f"{column} {worst[column]:.1e}" for column in worst), flush=True)
    if not rounding and any(worst.values()):
        sys.exit("demos/machines.py: the runs differ")
    return gaps


def try_events(args):
    train = [*TRAIN, *["--exact"] * (not args.rounding)]
    alone, runs = f"elastic_one_rank{'_rounding' * args.rounding}", {}
    wanted = read(machines.logged(alone)) or train_alone(train, alone, timeout=900)
    for mirror in args.mirror:
        name = f"elastic_zero{args.zero_stage}{f'_mirror{mirror}' * bool(mirror)}{'_rounding' * args.rounding}"
        kind = f"--mirror {mirror}" if mirror else "checkpoints only"
        how = f"{'universal.elastic' if args.warm else 'torchrun'}, {'without' if args.rounding else 'with'} --exact"
        print(f"ZeRO-{args.zero_stage}, {kind}, {how}")
        options = ["--elastic", "--zero_stage", str(args.zero_stage), "--run_name", name]
        options += ["--mirror", str(mirror)] * bool(mirror)
        shutil.rmtree(FOLDER, ignore_errors=True)
        machines.logged(name).unlink(missing_ok=True)
        memory = MEMORY if mirror else None
        job = Job(WARM if args.warm else TORCHRUN, [*train, *options], name, ranks=2, memory=memory)
        try:
            rows = play(job)
            finish(job, wanted, args.rounding)
        finally:
            job.close()
        runs[kind] = read(job.log), rows
    if args.output:
        draw(wanted, runs, args.output)


# -----------------------------------------------------------------------------
# the picture


def draw(wanted, runs, path):
    """runs: {name: (log, events)}, the first without a mirror, the second with one."""
    plt.rcParams.update({"font.size": 11, "axes.titlesize": 11})  # to be read on a telephone
    figure, (top, below) = plt.subplots(2, 1, figsize=(6, 5.8), height_ratios=[1.6, 4.2], layout="constrained")
    looks = {"color": "#0072B2", "ls": "-"}, {"color": "#D55E00", "ls": (0, (3, 3))}
    steps = range(1, STEPS + 1)
    top.plot(steps, [float(row["loss"]) for row in wanted], color="0.8", lw=7, label="one rank, undisturbed")
    for i, ((name, (log, events)), look) in enumerate(zip(runs.items(), looks, strict=True)):
        top.plot(steps, [float(row["loss"]) for row in log], **look, lw=1.4, label=name)
        again = [max(event["step"] - event["from"], 0) for event in events[1:]]
        places = [place + 0.4 * i for place in range(len(again))]
        below.barh(places, again, 0.4, color=look["color"], label=f"{name}: {sum(again)}")
        for place, count in zip(places, again, strict=True):
            below.text(count + 0.2, place, count or "", va="center", size=9, color=look["color"])
    ranks = [event["ranks"] for event in events]
    labels = []
    for before, event in zip(ranks, events[1:], strict=False):
        labels.append(f"{event['event']}, {before} to {event['ranks']} ranks")
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


# -----------------------------------------------------------------------------
# random events

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
    if what == "two die at once":
        return (gap, "dies", [node]) if away else (gap, what, sorted({*NODES} - {node}))
    alone = len(alive) == 1 and what in ("dies", "is preempted")
    return gap, "a rank is killed" if alone else what, [node]


def happen(job, what, nodes):
    if what == "is preempted":
        leaving = job.nodes[nodes[0]]
        job.preempt(*nodes)
        leaving.agent.wait(timeout=120)
    else:
        event = {"joins": job.start, "a rank is killed": job.kill_a_rank, "a rank hangs": job.hang}
        event.get(what, job.kill)(*nodes)


def soak(job, minutes, steps, dice):
    """Returns [(what happened, steps done again, seconds until the next step)]."""
    rows = []
    job.start(*NODES)
    *_, reached = job.went_on(0, len(NODES))
    end = time.time() + 60 * minutes
    while time.time() < end and reached + 100 < steps:
        gap, what, nodes = throw(dice, job.nodes.keys())
        job.reach(min(reached + gap, steps))
        since = time.time()
        happen(job, what, nodes)
        done = job.step()
        *_, reached = job.went_on(since)
        rows.append((what, max(0, done + 1 - reached), time.time() - since))
        print(f"{len(rows):4} step {done:6}  {', '.join(nodes)} {what:<18}{reached:8}{rows[-1][2]:7.1f} s", flush=True)
    job.wait(60 + steps)
    return rows


def try_soak(args):
    steps, name = args.steps or int(100 * args.soak), "elastic_soak"
    head = f"seed {args.seed}, ZeRO-{args.zero_stage}, {steps} steps"
    print(f"{head}, up to {args.soak:g} minutes of events", flush=True)
    shutil.rmtree(FOLDER, ignore_errors=True)
    machines.logged(name).unlink(missing_ok=True)
    train, port = [*SMALL, "--steps", str(steps)], free_port()
    holder = subprocess.Popen([sys.executable, "-c", HOLDER.format(port) + "; time.sleep(1e9)"])
    options = ["--elastic", "--mirror", "1", "--zero_stage", str(args.zero_stage), "--run_name", name]
    job = Job(WARM, [*train, *options], name, endpoint=f"127.0.0.1:{port}", rendezvous="is_host=0", memory=MEMORY)
    try:
        start = time.time()
        rows = soak(job, args.soak, steps, random.Random(args.seed))
        head += f", {(time.time() - start) / 60:.0f} minutes of events"
        finish(job, train_alone(train, f"{name}_alone", timeout=60 + steps))
    except BaseException:
        print("".join(line for _, line in job.lines[-80:]))
        raise
    finally:
        job.close()
        holder.kill()
        holder.wait()
    back = sum("back to the disk" in line for _, line in job.lines)
    assert back or not any(again for _, again, _ in rows), "steps are done again"
    print(f"{head}\nevent               times   steps done again   seconds to the next step: median   longest")
    for what in sorted({row[0] for row in rows}):
        again, seconds = zip(*(row[1:] for row in rows if row[0] == what), strict=True)
        median, longest = statistics.median(seconds), max(seconds)
        print(f"{what:<18}{len(seconds):>7}{sum(again):>19}{median:>35.1f}{longest:>10.1f}")
    print(f"{len(rows)} events, {back} times back to the disk; every step once in the log, and no bit differs")


def try_settings():
    """Seconds from the death of a node to the start of new ranks, by what the agents wait for."""
    print("interval x attempts   last call   seconds")
    for interval, attempts, last_call in ((5, 3, 30), (5, 3, 3), (1, 3, 30), (1, 3, 3), (1, 3, 1)):
        waits = f"keep_alive_interval={interval},keep_alive_max_attempt={attempts},last_call_timeout={last_call}"
        machines.RENDEZVOUS = waits
        shutil.rmtree(FOLDER, ignore_errors=True)
        job = Job(WARM, [*TRAIN, "--exact", "--elastic", "--run_name", "settings"], "settings", ranks=2)
        try:
            job.start("node 1", "node 2")
            job.first(r"^step +3 \|", 0)
            since = time.time()
            job.kill("node 2")
            job.went_on(since)
            began = min(when for when, _ in job.nodes["node 1"].workers() if when > since)
        finally:
            job.close()
        print(f"{interval:>8} s x {attempts}{last_call:>16} s{began - since:>10.1f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zero_stage", type=int, choices=[1, 2, 3], default=1)
    parser.add_argument("--rounding", action="store_true", help="without --exact: the last digits may differ")
    parser.add_argument("--warm", action="store_true", help="start the workers by universal.elastic, not by torchrun")
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
