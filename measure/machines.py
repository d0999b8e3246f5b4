"""Plays a job whose machines die and come back: each "machine" is an agent of torchrun on this one,
with its ranks. For measure/elastic.py, measure/hosts.py and the tests."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

from measure.ranks import ROOT, ends_after, rows_of, run

AGENT = "--nnodes 1:3 --max-restarts 100 --rdzv-id job --rdzv-backend c10d".split()
RENDEZVOUS = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=3"
QUIET = {
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONPATH": str(ROOT),
}
QUIET |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PET_LOCAL_ADDR": "127.0.0.1"}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
WARM = [
    sys.executable,
    "-m",
    "measure.warm",
]  # torchrun with workers that have torch and DeepSpeed in memory
HEAD = "step  event                    ranks        goes on at   again   seconds = torchrun  start  first step"


class Node:
    """An agent of torchrun and its workers. Every line that they print is kept with its time."""

    def __init__(self, command, lines, memory=None):
        """memory: the folder that stands for this machine's memory."""
        pipes = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "text": True,
            "errors": "replace",
        }
        self.memory, self.killed = memory, []
        environment = os.environ | QUIET | ({"MIRROR_ROOT": str(memory)} if memory else {})
        self.agent = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
        self.reader = threading.Thread(target=self.read, args=[lines])
        self.reader.start()

    def read(self, lines):
        for line in self.agent.stdout:
            lines.append((time.time(), line))

    def processes(self):
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.agent.pid).children(recursive=True)
        return []

    def workers(self):
        """[(time of its start, process)] of the ranks; what a rank starts is younger."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):  # it can end while it is looked at
                if "RANK" in process.environ() or "forkserver" in " ".join(
                    process.parent().cmdline()
                ):
                    found.append((process.create_time(), process))
        return sorted(found, key=lambda worker: worker[0])

    def kill(self):
        """As if the machine had lost its power: an agent that is killed by itself would leave its
        workers running."""
        # Python's resource tracker ends by itself, and removes the semaphores that the others leave
        # in /dev/shm.
        processes = self.processes()
        self.agent.kill()
        for process in processes:
            with contextlib.suppress(psutil.Error):  # it can end before
                if "resource_tracker" not in " ".join(process.cmdline()):
                    process.kill()
                    self.killed.append(process)

    def forget(self):
        """Of a machine that is gone: its memory is gone, too."""
        self.agent.wait(timeout=120)
        psutil.wait_procs(
            self.killed, timeout=10
        )  # one that still ends could write into the memory
        if self.memory:
            shutil.rmtree(self.memory, ignore_errors=True)


class Job:
    """train_elastic.py on nodes that are called "node 1", "node 2", ... `with` ends it, and says
    what it has said where an error does so."""

    patience = 180  # seconds that first() waits
    settings = RENDEZVOUS

    def __init__(
        self,
        launcher,
        train,
        name,
        ranks=1,
        endpoint="127.0.0.1:29400",
        rendezvous=None,
        memory=None,
    ):
        """ranks: of each node. rendezvous: settings of --rdzv-conf when it is not the agent of node
        1 that holds it. memory: the folder with one for each node, of a job that mirrors its
        shards."""
        self.launcher = [
            *launcher,
            *AGENT,
            "--nproc-per-node",
            str(ranks),
            "--rdzv-endpoint",
            endpoint,
            "--rdzv-conf",
        ]
        self.train = ["-m", "examples.train_elastic", *train, "--elastic", "--run_name", name]
        self.rendezvous, self.memory = rendezvous, memory
        self.inside = {}  # {node: what its command begins with}
        self.lines, self.nodes = [], {}
        self.rows = []  # (event, steps done again, ranks before, ranks after)
        self.log = Path("logs", f"{name}.csv")
        self.log.unlink(missing_ok=True)

    def start(self, *names):
        for name in names:
            held = self.rendezvous or f"is_host={int(name == 'node 1')}"
            command = [
                *self.inside.get(name, []),
                *self.launcher,
                f"{self.settings},{held}",
                *self.train,
            ]
            self.nodes[name] = Node(command, self.lines, self.memory and self.memory / name)

    def kill(self, *names):
        nodes = [self.nodes.pop(name) for name in names]
        for node in nodes:
            node.kill()
        for node in nodes:
            node.forget()

    def kill_a_rank(self, name):
        self.nodes[name].workers()[0][1].kill()

    def preempt(self, name):
        node = self.nodes.pop(name)
        node.agent.terminate()
        node.forget()

    def hang(self, name):
        self.nodes[name].workers()[0][1].suspend()

    def step(self):
        """The last one in the log."""
        return max((int(row["step"]) for row in rows_of(self.log) if row["ranks"]), default=0)

    def until(self, reached, pause=0.01):
        while not reached():
            assert any(node.agent.poll() is None for node in self.nodes.values()), (
                "the job ended by itself"
            )
            time.sleep(pause)

    def reach(self, step):
        self.until(lambda: self.step() >= step)

    def happen(self, what, event, *names, **expected):
        since = time.time()
        event(self, *names)
        return self.resumed(what, since, **expected)

    def resumed(self, what, since, ranks=r"\d+", lost=False):
        """Wait for the first step of new ranks, and print what happened: the last step before it,
        and a row of HEAD. Returns the steps done again, and the seconds of all. ranks: wait for so
        many: on a busy machine a node may be late, and joins a job that has begun. lost: steps may
        be done again."""
        reached, before = self.step(), self.rows[-1][-1] if self.rows else 0
        began, found = self.first(
            rf"= \d+ per rank x \d+ accumulation steps x ({ranks}) ranks", since
        )
        starts = [
            when for node in self.nodes.values() for when, _ in node.workers() if when > since
        ]
        after, created = int(found[1]), min(starts, default=began)
        stepped, found = self.first(r"^step +(\d+) \|", began)
        again = max(reached + 1 - int(found[1]), 0)
        self.rows.append((what, again, before, after))
        seconds = stepped - since, created - since, began - created, stepped - began
        print(f"{reached:4}  {what:<23}{before:>3} -> {after:<7}{found[1]:>12}{again:>8}", end="")
        print("{:>10.1f}{:>11.1f}{:>7.1f}{:>12.1f}".format(*seconds), flush=True)
        assert lost or not again, "steps are done again"
        return again, seconds[0]

    def wait(self, seconds=300):
        """Until all agents say that the job is done."""
        codes = [node.agent.wait(timeout=seconds) for node in self.nodes.values()]
        assert codes == [0] * len(codes), f"the agents ended with {codes}"
        for node in self.nodes.values():
            node.reader.join()  # a spare rank may say so after the others have begun to train

    def said(self, words):
        return sum(words in line for _, line in self.lines)

    def first(self, pattern, since):
        """(time, match) of the first line since then that has the pattern; waits for it."""
        deadline = time.time() + self.patience
        while time.time() < deadline:
            for when, line in list(self.lines):
                if when > since and (found := re.search(pattern, line)):
                    return when, found
            if all(node.agent.poll() is not None for node in self.nodes.values()):
                break
            time.sleep(0.02)
        raise RuntimeError(
            f"no line has {pattern!r}:\n" + "".join(line for _, line in self.lines[-60:])
        )

    def close(self):
        self.kill(*self.nodes)
        if self.memory:
            shutil.rmtree(self.memory, ignore_errors=True)

    def __enter__(self):
        return self

    def __exit__(self, error, *_):
        if error:
            print(
                "".join(line for _, line in self.lines if not line.startswith(("step", "saved")))[
                    -20000:
                ]
            )
        self.close()


def alone(train, name, steps):
    """The log of what a job is compared with: the same training on one rank, to which nothing
    happens."""
    with tempfile.TemporaryDirectory() as folder:
        train = [*train, "--run_name", name, "--checkpoint_dir", folder]
        run(
            Path.cwd(),
            1,
            "examples.train_elastic",
            *train,
            patch=ends_after(steps),
            limit=900 + steps,
        )
    return rows_of(Path("logs", f"{name}.csv"))


def compare(log, wanted):
    """The largest differences of loss, validation loss and gradient norm."""
    assert [row["step"] for row in log] == [row["step"] for row in wanted], (
        "a step is missing, or twice in the log"
    )
    worst = {}
    for column in ("loss", "val_loss", "grad_norm"):
        pairs = [
            (float(a[column]), float(b[column]))
            for a, b in zip(log, wanted, strict=True)
            if b[column]
        ]
        worst[column] = max((abs(a - b) for a, b in pairs), default=0.0)
    return worst
