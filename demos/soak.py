"""A job that mirrors its shards, under random events: python demos/soak.py --minutes 60 --seed 1

Three "machines" of one rank each, agents of this machine, are killed, preempted, hung and started again, and single
ranks are killed. What happens, to whom, and how many steps after the last event, is drawn from the seed. Then every
step must be in the log once, with every bit of one rank that nothing happened to; no step done twice, unless two
machines are lost at once, which a line says; nothing left in memory or on the disk.
"""

import argparse
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from demos import machines  # noqa: E402

TRAIN = "--n_embd 32 --seq_len 16 --n_layer 1 --train_batch_size 24 --train_micro_batch_size_per_gpu 2 --exact".split()
TRAIN += "--eval_interval 50 --checkpoint_interval 100 --keep 2 --timeout 10".split()
NODES = ["node 1", "node 2", "node 3"]
HOLDER = "import time, torch.distributed as d; s = d.TCPStore('127.0.0.1', {}, is_master=True, wait_for_workers=False)"
EVENTS = {"dies": 12, "is preempted": 6, "a rank is killed": 8, "a rank hangs": 2, "two die at once": 1}  # how often


def draw(dice, alive):
    """(steps until it happens, what, to which nodes)."""
    gap = dice.choice([0, 1, 2, 5, 20, 60])
    away = [node for node in NODES if node not in alive]
    if away and (len(alive) == 1 or dice.random() < 0.4):
        return gap, "joins", [dice.choice(away)]
    what = dice.choices([*EVENTS], EVENTS.values())[0]
    node = dice.choice(sorted(alive))
    if what == "two die at once":
        what, nodes = (what, sorted(set(NODES) - {node})) if not away else ("dies", [node])
        return gap, what, nodes
    if len(alive) == 1 and what in ("dies", "is preempted"):
        what = "a rank is killed"
    return gap, what, [node]


def happen(job, what, nodes):
    if what == "joins":
        job.start(*nodes)
    elif what in ("dies", "two die at once"):
        job.kill(*nodes)
    elif what == "is preempted":
        leaving = job.nodes[nodes[0]]
        job.preempt(*nodes)
        leaving.agent.wait(timeout=120)
    elif what == "a rank is killed":
        job.kill_a_rank(*nodes)
    else:
        job.hang(*nodes)


def soak(job, minutes, steps, seed):
    """Returns [(what happened, steps done again, seconds until the next step)]."""
    dice, rows, end = random.Random(seed), [], time.time() + 60 * minutes
    job.start(*NODES)
    reached = began(job, 0)
    while time.time() < end and reached + 100 < steps:
        gap, what, nodes = draw(dice, set(job.nodes))
        while job.step() < min(reached + gap, steps):
            assert any(node.agent.poll() is None for node in job.nodes.values()), "the job ended by itself"
            time.sleep(0.002)
        since = time.time()
        happen(job, what, nodes)
        done = job.step()
        reached = began(job, since)
        rows.append((what, max(0, done + 1 - reached), time.time() - since))
        print(f"{len(rows):4} step {done:6}  {', '.join(nodes)} {what:<18}{reached:8}{rows[-1][2]:7.1f} s", flush=True)
    return rows


def began(job, since):
    """Wait until new ranks have done a step. Returns the step."""
    when, _ = job.first(r"= \d+ per rank x", since)
    return int(job.first(r"^step +(\d+) \|", when)[1][1])


def check(job, folder, memory, steps, name):
    """Raises where something is left over, done twice, or different. Returns how often it went back to the disk."""
    log, alone = (machines.read(Path("logs", f"{run}.csv")) for run in (name, f"{name}_alone"))
    machines.STEPS = steps
    _, worst = machines.compare(log, alone)
    assert not any(worst.values()), f"the runs differ: {worst}"
    done = [int(found[1]) for _, line in job.lines if (found := re.match(r"step +(\d+) \|", line))]
    back = sum("back to the disk" in line for _, line in job.lines)
    assert len(done) == len(set(done)) or back, f"{len(done) - len(set(done))} steps were done twice"
    left = [*memory.glob("*/*"), *folder.glob("*.unfinished"), *folder.glob("*.replaced")]
    assert not left, f"left over: {left}"
    return back


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--steps", type=int, help="of the whole run; default: 100 a minute")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--zero_stage", type=int, choices=[1, 2, 3], default=1)
    parser.add_argument("--port", type=int, default=29500)
    parser.add_argument("--table", type=Path, help="also write what happened into this file")
    args = parser.parse_args()
    steps = args.steps or int(100 * args.minutes)
    head = f"seed {args.seed}, ZeRO-{args.zero_stage}, {steps} steps"
    print(f"{head}, up to {args.minutes:g} minutes of events", flush=True)
    folder, memory = Path(f"ckpt_soak_{args.port}").resolve(), Path(f"/dev/shm/soak_{os.getpid()}")
    shutil.rmtree(folder, ignore_errors=True)
    name, common = f"soak_{args.port}", [*TRAIN, "--steps", str(steps)]
    machines.AGENT = machines.AGENT.replace("-per-node 2", "-per-node 1")
    Path("logs", f"{name}.csv").unlink(missing_ok=True)
    train = ["--elastic", "--mirror", "1", "--zero_stage", str(args.zero_stage), "--checkpoint_dir", str(folder)]
    holder = subprocess.Popen([sys.executable, "-c", HOLDER.format(args.port) + "; time.sleep(1e9)"])
    where = (f"127.0.0.1:{args.port}", "is_host=0", memory)
    job = machines.Job(machines.WARM, [*common, *train, "--run_name", name], name, *where)
    try:
        start = time.time()
        rows = soak(job, args.minutes, steps, args.seed)
        head += f", {(time.time() - start) / 60:.0f} minutes of events"
        codes = [node.agent.wait(timeout=60 + steps) for node in job.nodes.values()]
        assert codes == [0] * len(codes), f"the agents ended with {codes}"
        alone = [
            "--standalone",
            "--nproc-per-node",
            "1",
            str(ROOT / "train.py"),
            *common,
            "--run_name",
            f"{name}_alone",
        ]
        command = [*machines.TORCHRUN, *alone, "--checkpoint_dir", str(folder / "alone")]
        subprocess.run(command, env=os.environ | machines.QUIET, check=True, capture_output=True, timeout=60 + steps)
        back = check(job, folder, memory, steps, name)
    except BaseException:
        print("".join(line for _, line in job.lines[-80:]))
        raise
    finally:
        job.close()
        holder.kill()
        holder.wait()
        shutil.rmtree(folder, ignore_errors=True)
    table = [head, "event               times   steps done again   seconds to the next step: median   longest"]
    for what in sorted({row[0] for row in rows}):
        again, seconds = zip(*(row[1:] for row in rows if row[0] == what), strict=True)
        table.append(
            f"{what:<18}{len(seconds):>7}{sum(again):>19}{statistics.median(seconds):>35.1f}{max(seconds):>10.1f}"
        )
    table.append(f"{len(rows)} events, {back} times back to the disk; every step once in the log, and no bit differs")
    print("\n".join(table))
    if args.table:
        args.table.write_text("\n".join(table) + "\n")


if __name__ == "__main__":
    main()
