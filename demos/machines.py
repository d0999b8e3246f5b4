"""A job whose machines die and come back, on torchrun's elastic agents: `make elastic`.

    python demos/machines.py --zero_stage 1 --output out/elastic.png

It only starts torchrun agents and takes them down; the rest is `train.py --elastic`. Three "nodes", agents of this
machine with 2 ranks each, train 200 steps while the events below happen to them: once with checkpoints on the disk
alone, and once with --mirror 1. A node that is lost takes its memory with it. Then every step must be in the log once,
with the loss, validation loss and gradient norm of one rank that nothing happened to: every bit, with --exact.
"""

import argparse
import contextlib
import csv
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import matplotlib
import psutil

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
FOLDER, STEPS, PER_NODE = Path("ckpt_elastic"), 200, 2
TRAIN = "--train_batch_size 192 --train_micro_batch_size_per_gpu 8 --checkpoint_interval 20 --keep 2".split()
TRAIN += ["--steps", str(STEPS), "--checkpoint_dir", str(FOLDER), "--timeout", "10"]
AGENT = "--nnodes 1:3 --nproc-per-node 2 --max-restarts 100 --rdzv-id job --rdzv-backend c10d --local-addr "
AGENT += "127.0.0.1"
RENDEZVOUS = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=3"
QUIET = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}
QUIET |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
WARM = [sys.executable, str(ROOT / "elastic.py")]  # torchrun with workers that have torch and DeepSpeed in memory


class Node:
    """An agent of torchrun and its workers. Every line that they print is kept with its time."""

    def __init__(self, command, lines, memory=None):
        """memory: the folder that stands for this machine's memory."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
        self.memory, self.killed = memory, []
        environment = os.environ | QUIET | ({"MIRROR_ROOT": str(memory)} if memory else {})
        self.agent = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
        self.reader = threading.Thread(target=self.read, args=[lines])
        self.reader.start()

    def read(self, lines):
        for line in self.agent.stdout:
            lines.append((time.time(), line))

    def processes(self):
        try:
            return psutil.Process(self.agent.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def workers(self):
        """[(time of its start, process)] of the ranks."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):  # it can end while it is looked at
                if "RANK" in process.environ() or "forkserver" in " ".join(process.parent().cmdline()):
                    found.append((process.create_time(), process))
        return found

    def terminate(self):
        self.agent.terminate()

    def kill(self):
        """As if the machine had lost its power: an agent that is killed by itself would leave its workers running."""
        # Python's resource tracker ends by itself, and removes the semaphores that the others leave in /dev/shm.
        processes = self.processes()
        self.agent.kill()
        for process in processes:
            with contextlib.suppress(psutil.Error):  # it can end before
                if "resource_tracker" not in " ".join(process.cmdline()):
                    process.kill()
                    self.killed.append(process)

    def forget(self):
        """Of a machine that is gone: its memory is gone, too."""
        self.agent.wait()
        psutil.wait_procs(self.killed, timeout=10)  # one that still ends could write into the memory
        if self.memory:
            shutil.rmtree(self.memory, ignore_errors=True)


class Job:
    def __init__(self, launcher, train, name, endpoint="127.0.0.1:29400", rendezvous=None, memory=None):
        """rendezvous: settings of --rdzv-conf when it is not the agent of node 1 that holds it. memory: the folder with
        one for each node, of a job that mirrors its shards."""
        self.memory = memory
        self.launcher, self.train, self.log = launcher, train, Path("logs", f"{name}.csv")
        self.endpoint, self.rendezvous, self.lines, self.nodes = endpoint, rendezvous, [], {}

    def start(self, *names):
        for name in names:
            where = self.rendezvous or ("is_host=1" if name == "node 1" else "is_host=0")
            agent = [*AGENT.split(), "--rdzv-endpoint", self.endpoint, "--rdzv-conf", f"{RENDEZVOUS},{where}"]
            command = [*self.launcher, *agent, str(ROOT / "train.py"), *self.train]
            self.nodes[name] = Node(command, self.lines, self.memory and self.memory / name.replace(" ", "_"))

    def kill(self, *names):
        nodes = [self.nodes.pop(name) for name in names]
        for node in nodes:
            node.kill()
        for node in nodes:
            node.forget()

    def kill_a_rank(self, name):
        _, rank = min(self.nodes[name].workers(), key=lambda worker: worker[0])  # what a rank starts is younger
        rank.kill()

    def kill_while_it_sends(self, name):
        memory = self.nodes[name].memory
        while memory and not list(memory.glob("*/step*/*.part")):
            assert self.nodes[name].agent.poll() is None, "the job ended by itself"
        self.kill(name)

    def preempt(self, name):
        node = self.nodes.pop(name)
        node.agent.terminate()
        threading.Thread(target=node.forget).start()

    def hang(self, name):
        self.nodes[name].workers()[0][1].send_signal(signal.SIGSTOP)

    def kill_the_first(self):
        """Its agent holds the rendezvous, and without that the others end themselves. A scheduler starts them again."""
        self.kill("node 1")
        for node in self.nodes.values():
            node.agent.wait(timeout=120)
        self.nodes.clear()
        self.start("node 1", "node 2")

    def step(self):
        """The last one in the log."""
        try:
            with self.log.open(newline="") as file:
                return max((int(row["step"]) for row in csv.DictReader(file) if row["layout"]), default=0)
        except FileNotFoundError:
            return 0

    def first(self, pattern, since):
        """(time, match) of the first line since then that has the pattern; waits for it."""
        deadline = time.time() + 180
        while time.time() < deadline:
            for when, line in list(self.lines):
                if when > since and (found := re.search(pattern, line)):
                    return when, found
            if all(node.agent.poll() is not None for node in self.nodes.values()):
                break
            time.sleep(0.02)
        raise RuntimeError(f"no line has {pattern!r}:\n" + "".join(line for _, line in self.lines[-60:]))

    def close(self):
        self.kill(*self.nodes)
        if self.memory:
            shutil.rmtree(self.memory, ignore_errors=True)


def while_it_saves():
    while not any(list(folder.iterdir()) for folder in FOLDER.glob("*.unfinished")):
        time.sleep(0.001)


# after which step of the log, what happens
EVENTS = [
    (27, "node 2 dies", lambda job: job.kill("node 2")),
    (32, "node 2 is back", lambda job: job.start("node 2")),
    (52, "node 2 dies as it sends", lambda job: job.kill_while_it_sends("node 2")),
    (55, "node 2 is back", lambda job: job.start("node 2")),
    (75, "node 2 is preempted", lambda job: job.preempt("node 2")),
    (82, "node 2 is back", lambda job: job.start("node 2")),
    (105, "node 2 dies in a save", lambda job: job.kill("node 2")),
    (105, "node 2 is back", lambda job: job.start("node 2")),
    (130, "a rank is killed", lambda job: job.kill_a_rank("node 2")),
    (133, "node 3 joins", lambda job: job.start("node 3")),
    (150, "a rank hangs", lambda job: job.hang("node 2")),
    (155, "nodes 2 and 3 die", lambda job: job.kill("node 2", "node 3")),
    (160, "node 2 is back", lambda job: job.start("node 2")),
    (182, "the first node dies", lambda job: job.kill_the_first()),
]
NEIGHBOURS = "nodes 2 and 3 die"  # at once, a shard and its copy: back to the disk


def play(job):
    """Train, with the events. Returns one row per event, as printed."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    job.log.unlink(missing_ok=True)
    rows, ranks = [], 0
    print(
        "step  event                    ranks        resumes     again   seconds = torchrun  Python  load  first step"
    )
    for at, name, event in [(0, "start", lambda job: job.start("node 1", "node 2")), *EVENTS]:
        name = name if job.memory else name.removesuffix(" as it sends")
        while job.step() < at:
            assert any(node.agent.poll() is None for node in job.nodes.values()), "the job ended by itself"
            time.sleep(0.02)
        if "save" in name:
            while_it_saves()
        since = time.time()
        event(job)
        reached = job.step()
        began, found = job.first(r"parameters, fp32, (\d+) rank", since)
        created = min(when for node in job.nodes.values() for when, _ in node.workers() if when > since)
        loaded, resumed = job.first(r"at step (\d+), weight decay", since) if at else (began, None)
        stepped, _ = job.first(r"^step +\d+ \|", loaded)
        before, ranks, saved = ranks, int(found[1]), int(resumed[1]) if resumed else 0
        spare = PER_NODE * len(job.nodes) - ranks
        seconds = [created - since, began - created, loaded - began, stepped - loaded]
        rows.append({"step": reached, "event": name, "from": saved, "before": before, "ranks": ranks, "spare": spare})
        assert not job.memory or reached <= saved or name == NEIGHBOURS, f"{name}: steps are done again"
        print(
            f"{reached:4}  {name:<23}{before:>3} -> {ranks}{f' + {spare}' if spare else '':<6}"
            f"{f'after {saved}' if at else '':>11}{max(reached - saved, 0):>8}{sum(seconds):>10.1f}"
            + "".join(f"{part:>{width}.1f}" for part, width in zip(seconds, (11, 8, 6, 6), strict=True)),
            flush=True,
        )
    codes = [node.agent.wait(timeout=300) for node in job.nodes.values()]
    assert codes == [0] * len(codes), f"the agents ended with {codes}"
    for node in job.nodes.values():
        node.reader.join()  # a spare rank may say so after the others have begun to train
    spare = sum(row["spare"] for row in rows)
    assert sum("stands by" in line for _, line in job.lines) == spare, "a rank that is not needed did not stand by"
    if job.memory:
        assert not list(job.memory.glob("*/*")), "something is left in memory"
        back = sum("back to the disk" in line for _, line in job.lines)
        assert back == sum(row["event"] == NEIGHBOURS for row in rows), f"{back} times back to the disk"
    return rows


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def compare(log, wanted):
    """[difference of the loss at every step], and the largest of loss, validation loss and gradient norm."""
    assert [int(row["step"]) for row in log] == list(range(1, STEPS + 1)), "a step is missing, or twice in the log"
    gaps = [
        {c: abs(float(a[c]) - float(b[c])) for c in ("loss", "val_loss", "grad_norm") if b[c]}
        for a, b in zip(log, wanted, strict=True)
    ]
    return [gap["loss"] for gap in gaps], {c: max(gap.get(c, 0) for gap in gaps) for c in gaps[-1]}


def draw(wanted, runs, path):
    """runs: {name: (log, events, differences of the loss)}, the first without a mirror, the second with one."""
    figure, axes = plt.subplots(3, 1, figsize=(9, 6), sharex=True, height_ratios=[5, 2, 1.6], layout="constrained")
    top, middle, below = axes
    colours = ["#2b6ca3", "#c8443f"]
    top.plot(range(1, STEPS + 1), [float(row["loss"]) for row in wanted], color="0.8", lw=7, label="one rank, no event")
    for (name, (log, _, _)), colour, style in zip(runs.items(), colours, ("-", (0, (3, 3))), strict=True):
        top.plot(range(1, STEPS + 1), [float(row["loss"]) for row in log], color=colour, lw=1.4, ls=style, label=name)
    log, events, _ = [*runs.values()][-1]
    shade(axes, [int(row["layout"].split(" x ")[2]) for row in log])
    for number, event in enumerate(events[1:], 1):
        high = 0.93 if number % 2 else 0.82
        for axis in axes:
            axis.axvline(event["step"] + 0.5, color="0.45", ls=":", lw=0.8)
        top.text(event["step"] + 0.5, high, number, transform=top.get_xaxis_transform(), ha="center", size=10,
                 bbox={"boxstyle": "circle,pad=0.15", "fc": "white", "ec": "0.45", "lw": 0.8})  # fmt: skip
    texts = ["\n".join(str(number) for number in range(1, len(events))), "\n".join(e["event"] for e in events[1:])]
    for text, x, side in zip(texts, (1.045, 1.06), ("right", "left"), strict=True):
        top.text(x, 1, text, transform=top.transAxes, va="top", ha=side, size=10, linespacing=1.35)
    for lane, ((_, events, gaps), colour) in zip((0, -1.6), zip(runs.values(), colours, strict=True), strict=True):
        again, last = 0, 0
        for event in events[1:]:
            end, start = event["step"] + 0.5, event["from"] + 0.5
            if start >= end:
                middle.plot(end, lane, "o", color=colour, ms=5)
                continue
            steps = event["step"] - event["from"]
            again += steps
            arrow = {"arrowstyle": "-|>", "color": colour, "lw": 1.8, "shrinkA": 0, "shrinkB": 0}
            high = lane if start >= last else lane - 0.5  # below the one that it would cover
            middle.annotate("", (start, high), (end, high), arrowprops=arrow)
            if start >= last:
                shift = -1.5 if steps < 5 else 0.5  # beside its neighbour's
                middle.text((start + end) / 2 + shift, lane + 0.16, steps, ha="center", size=10)
            else:
                middle.text(end + 1, high, steps, va="center", size=10)
            last = end
        middle.text(1.015, 0.72 + 0.32 * lane, f"{again} steps", transform=middle.transAxes, color=colour, size=10)
        below.plot(range(1, STEPS + 1), gaps, ".", color=colour, ms=6 + 2 * lane, clip_on=False)
    middle.set(ylim=(-2.1, 0.9), ylabel="steps\ndone again", yticks=[0, -1.6], yticklabels=[*runs])
    legend = [plt.Line2D([], [], color="0.3", lw=1.8, marker="<", label="steps done again, back to the checkpoint")]
    legend += [plt.Line2D([], [], color="0.3", ls="", marker="o", label="none")]
    middle.legend(handles=legend, frameon=False, ncols=2, loc="upper right", bbox_to_anchor=(1, 1.32), fontsize=10)
    worst = max(max(gaps) for _, _, gaps in runs.values())
    below.set_yscale("symlog", linthresh=1e-8)
    below.set(ylim=(-2e-9, 10 * max(1e-7, worst)), xlim=(0.5, STEPS + 0.5), xlabel="step")
    below.set_ylabel("|difference|\nof the loss")
    note = f"at most {worst:.1e}" if worst else "0.0 at every step of both runs, with --exact"
    below.text(0.5, 0.55, note, transform=below.transAxes, ha="center", size=10, backgroundcolor="white")
    top.set(ylabel="training loss", ylim=(1.8, None))
    top.set_title("Machines die and come back: the loss is that of one rank to which nothing happened", size=11)
    top.legend(framealpha=1, edgecolor="white", loc="upper right", bbox_to_anchor=(1, 0.76), fontsize=10)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200)


def shade(axes, ranks):
    """The number of ranks at every step, as the colour behind it."""
    ends = [0, *(i for i in range(1, STEPS) if ranks[i] != ranks[i - 1]), STEPS]
    for first, last in zip(ends, ends[1:], strict=False):
        for axis in axes:
            axis.axvspan(first + 0.5, last + 0.5, color={2: "#fdf0d5", 4: "#e3edf7", 6: "#e6f2e1"}[ranks[first]], lw=0)
        name = ranks[first] if first else f"{ranks[first]} ranks"
        axes[0].text((first + last) / 2 + 0.5, 1.9, name, ha="center", size=10, color="0.35")


def try_settings(train):
    """Seconds from the death of a node to the start of new ranks, by what the agents wait for."""
    global RENDEZVOUS
    print("interval x attempts   last call   seconds")
    for interval, attempts, last_call in ((5, 3, 30), (5, 3, 3), (1, 3, 30), (1, 3, 3), (1, 3, 1)):
        RENDEZVOUS = f"keep_alive_interval={interval},keep_alive_max_attempt={attempts},last_call_timeout={last_call}"
        shutil.rmtree(FOLDER, ignore_errors=True)
        job = Job(WARM, train, "settings")
        try:
            job.start("node 1", "node 2")
            job.first(r"^step +3 \|", 0)
            since = time.time()
            job.kill("node 2")
            job.first("parameters, fp32, 2 ranks", since)
            began = min(when for when, _ in job.nodes["node 1"].workers() if when > since)
        finally:
            job.close()
        print(f"{interval:>8} s x {attempts}{last_call:>16} s{began - since:>10.1f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zero_stage", type=int, choices=[1, 2, 3], default=1)
    parser.add_argument("--rounding", action="store_true", help="without --exact: the last digits may differ")
    parser.add_argument("--warm", action="store_true", help="start the workers by elastic.py instead of torchrun")
    every = "hold every K-th step in memory; 0: checkpoints only; several: one run after the other"
    parser.add_argument("--mirror", type=int, nargs="+", default=[0, 1], metavar="K", help=every)
    parser.add_argument("--settings", action="store_true", help="time torchrun's settings instead, by one event")
    parser.add_argument("--output", type=Path, help="the picture of two runs")
    args = parser.parse_args()
    train = [*TRAIN, *["--exact"] * (not args.rounding)]
    alone = f"elastic_one_rank{'_rounding' * args.rounding}"
    if args.settings:
        return try_settings([*train, "--elastic", "--run_name", "settings"])
    if not Path("logs", f"{alone}.csv").exists():
        command = [*TORCHRUN, "--nproc-per-node", "1", str(ROOT / "train.py"), *train, "--run_name", alone]
        subprocess.run(command, env=os.environ | QUIET, check=True, capture_output=True, timeout=600)
    wanted, runs = read(Path("logs", f"{alone}.csv")), {}
    for mirror in args.mirror:
        name = f"elastic_zero{args.zero_stage}{f'_mirror{mirror}' * bool(mirror)}{'_rounding' * args.rounding}"
        kind = f"--mirror {mirror}" if mirror else "checkpoints only"
        how = f"{'elastic.py' if args.warm else 'torchrun'}, {'without' if args.rounding else 'with'} --exact"
        print(f"ZeRO-{args.zero_stage}, {kind}, {how}")
        options = ["--elastic", "--zero_stage", str(args.zero_stage), "--run_name", name]
        options += ["--mirror", str(mirror)] * bool(mirror)
        memory = Path(f"/dev/shm/machines_{os.getpid()}") if mirror else None
        job = Job(WARM if args.warm else TORCHRUN, [*train, *options], name, memory=memory)
        try:
            events = play(job)
        finally:
            job.close()
        log = read(job.log)
        gaps, worst = compare(log, wanted)
        runs[kind] = log, events, gaps
        print(f"{STEPS} steps, each once; largest difference to one rank that was never interrupted:")
        print("  " + ", ".join(f"{column} {worst[column]:.1e}" for column in worst), flush=True)
        if not args.rounding and any(worst.values()):
            sys.exit("demos/machines.py: the runs differ")
    if args.output:
        draw(wanted, runs, args.output)


if __name__ == "__main__":
    main()
