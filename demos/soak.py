"""A job that mirrors its shards, under random events: python demos/soak.py --minutes 60 --seed 1

Three "machines" of one rank each, agents of this machine, are killed, preempted, hung and started again, and single
ranks are killed. What happens, to whom, and how many steps after the last event, is drawn from the seed. Then every
step must be in the log once, with every bit of one rank that nothing happened to; no step done twice, unless two
machines are lost at once, which a line says; nothing left in memory or on the disk.
"""

import argparse
import collections
import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from demos import machines  # noqa: E402

TRAIN = "--n_embd 32 --seq_len 16 --n_layer 1 --train_batch_size 24 --train_micro_batch_size_per_gpu 2 --exact".split()
TRAIN += "--eval_interval 50 --checkpoint_interval 500 --keep 2 --timeout 10".split()
NODES = ["node 1", "node 2", "node 3"]
HOLDER = "import time, torch.distributed as d; s = d.TCPStore('127.0.0.1', {}, is_master=True, wait_for_workers=False)"
EVENTS = {"dies": 6, "is preempted": 3, "a rank is killed": 4, "a rank hangs": 1}  # and how often


def draw(dice, alive):
    """(steps until it happens, what, to which node)."""
    gap, away = dice.choice([0, 1, 2, 5, 20, 60]), [node for node in NODES if node not in alive]
    if away and (len(alive) == 1 or dice.random() < 0.4):
        return gap, "joins", dice.choice(away)
    what = dice.choices([*EVENTS], EVENTS.values())[0]
    if len(alive) == 1 and what in ("dies", "is preempted"):
        what = "a rank is killed"
    return gap, what, dice.choice(sorted(alive))


def happen(job, what, node):
    if what == "joins":
        job.start(node)
    elif what == "dies":
        job.kill(node)
    elif what == "is preempted":
        leaving = job.nodes.pop(node)
        leaving.terminate()
        leaving.agent.wait(timeout=120)
        shutil.rmtree(leaving.memory, ignore_errors=True)
    elif what == "a rank is killed":
        job.kill_a_rank(node)
    else:
        job.hang(node)


def soak(job, minutes, steps, seed):
    """Returns {what happened: how often}."""
    dice, counts, end = random.Random(seed), collections.Counter(), time.time() + 60 * minutes
    job.start(*NODES)
    reached = began(job, 0)
    while time.time() < end and reached + 200 < steps:
        gap, what, node = draw(dice, set(job.nodes))
        while job.step() < min(reached + gap, steps):
            assert any(node.agent.poll() is None for node in job.nodes.values()), "the job ended by itself"
            time.sleep(0.002)
        if job.step() == steps:
            break
        since, at = time.time(), job.step()
        happen(job, what, node)
        counts[what] += 1
        reached = began(job, since)
        took = time.time() - since
        print(f"{sum(counts.values()):4} step {at:6} + {gap:2}  {node} {what:<18}{reached:8}{took:7.1f} s", flush=True)
    return counts


def began(job, since):
    """Wait until new ranks have done a step. Returns the step."""
    when, _ = job.first(r"= \d+ per GPU x", since)
    return int(job.first(r"^step +(\d+) \|", when)[1][1])


def check(job, folder, memory, steps, name):
    """What is left over, done twice or different. Returns how many steps were done twice."""
    log, alone = (machines.read(Path("logs", f"{run}.csv")) for run in (name, "soak_alone"))
    machines.STEPS = steps
    _, worst = machines.compare(log, alone)
    assert not any(worst.values()), f"the runs differ: {worst}"
    done = [int(found[1]) for _, line in job.lines if (found := re.match(r"step +(\d+) \|", line))]
    twice = len(done) - len(set(done))
    back = sum("back to the disk" in line for _, line in job.lines)
    assert not twice or back, f"{twice} steps were done twice"
    left = [*memory.glob("*/*"), *folder.glob("*.unfinished"), *folder.glob("*.replaced")]
    assert not left, f"left over: {left}"
    return twice, back


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--zero_stage", type=int, choices=[1, 2, 3], default=1)
    parser.add_argument("--port", type=int, default=29500)
    args = parser.parse_args()
    steps = int(600 * args.minutes)
    print(f"seed {args.seed}, ZeRO-{args.zero_stage}, {steps} steps, {args.minutes:g} minutes of events", flush=True)
    folder, memory = Path("ckpt_soak").resolve(), Path(f"/dev/shm/soak_{os.getpid()}")
    shutil.rmtree(folder, ignore_errors=True)
    name, common = f"soak_{args.seed}", [*TRAIN, "--steps", str(steps)]
    machines.AGENT = machines.AGENT.replace("-per-node 2", "-per-node 1")
    Path("logs", f"{name}.csv").unlink(missing_ok=True)
    train = [
        *common,
        "--elastic",
        "--mirror",
        "1",
        "--zero_stage",
        str(args.zero_stage),
        "--checkpoint_dir",
        str(folder),
    ]
    holder = subprocess.Popen([sys.executable, "-c", HOLDER.format(args.port) + "; time.sleep(1e9)"])
    endpoint = f"127.0.0.1:{args.port}"
    job = machines.Job(machines.WARM, [*train, "--run_name", name], name, endpoint, "is_host=0", memory)
    start = time.time()
    try:
        counts = soak(job, args.minutes, steps, args.seed)
        codes = [node.agent.wait(timeout=60 + steps) for node in job.nodes.values()]
        assert codes == [0] * len(codes), f"the agents ended with {codes}"
        seconds = time.time() - start
        command = [
            *machines.TORCHRUN,
            "--nproc-per-node",
            "1",
            "--master-port",
            str(args.port + 1),
            "train.py",
            *common,
        ]
        command += ["--run_name", "soak_alone", "--checkpoint_dir", str(folder / "alone")]
        subprocess.run(command, env=os.environ | machines.QUIET, check=True, capture_output=True, timeout=60 + steps)
        twice, back = check(job, folder, memory, steps, name)
    except BaseException:
        print("".join(line for _, line in job.lines[-80:]))
        raise
    finally:
        job.close()
        holder.kill()
        holder.wait()
        shutil.rmtree(folder, ignore_errors=True)
    print(
        f"{sum(counts.values())} events in {seconds / 60:.0f} minutes: "
        + ", ".join(f"{counts[k]} x {k}" for k in counts)
    )
    print(f"{steps} steps, each once in the log; {twice} done twice, {back} times back to the disk; no bit differs")


if __name__ == "__main__":
    main()
