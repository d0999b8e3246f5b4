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
from typing import NamedTuple

import psutil

from measure.logs import largest, rows_of, steps
from tests.support import ROOT
from tests.support.ranks import ends_after, run

AGENT = "--nnodes 1:3 --max-restarts 100 --rdzv-id job --rdzv-backend c10d".split()
RENDEZVOUS = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=3"
QUIET = {
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONPATH": str(ROOT),
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "PET_LOCAL_ADDR": "127.0.0.1",
}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
WARM = [sys.executable, "-m", "measure.warm"]  # its workers have torch and DeepSpeed in memory
BATCH = r" on ({}) ranks?, \d+ accumulation steps? each"  # what a start prints
HEAD = (
    "step  event                    ranks        goes on at   again   "
    "seconds = torchrun  start  first step"
)


class Worker(NamedTuple):
    started: float
    process: psutil.Process


class Node:
    """An agent of torchrun and its workers. Every line that they print is kept with its time."""

    def __init__(self, command, lines, memory=None):
        """Starts nothing yet. memory: the folder that stands for this machine's memory."""
        self.memory = memory
        self.killed = []
        environment = os.environ | QUIET
        if memory:
            environment["MIRROR_ROOT"] = str(memory)
        self.agent = subprocess.Popen(
            command,
            env=environment,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
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
        """The ranks, the oldest first; what a rank starts is younger."""
        workers = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):  # it can end while it is looked at
                parent = " ".join(process.parent().cmdline())
                if "RANK" in process.environ() or "forkserver" in parent:
                    workers.append(Worker(process.create_time(), process))
        return sorted(workers, key=lambda worker: worker.started)

    def kill(self):
        """Ends the node as if the machine had lost its power: an agent that is killed by itself
        would leave its workers running."""
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
        """Removes the memory of a machine that is gone."""
        self.agent.wait(timeout=120)
        psutil.wait_procs(self.killed, timeout=10)  # one that still ends could write into it
        if self.memory:
            shutil.rmtree(self.memory, ignore_errors=True)


class Event(NamedTuple):
    """What has happened to a job."""

    what: str
    again: int  # steps of the log that were done again; not one whose copy was under way
    ranks_before: int
    ranks_after: int
    seconds: float  # to the next step


class Job:
    """A run of examples/train_elastic.py on nodes that are called "node 1", "node 2", ... `with`
    ends it, and prints what it has printed where an error does so."""

    patience = 180  # seconds that wait_for() waits
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
        """Prepares a job. ranks: of each node. rendezvous: settings of --rdzv-conf when it is not
        the agent of node 1 that holds it. memory: the folder with one for each node, of a job that
        mirrors its shards."""
        flags = f"--nproc-per-node {ranks} --rdzv-endpoint {endpoint} --rdzv-conf"
        self.launcher = [*launcher, *AGENT, *flags.split()]
        self.train = ["-m", "examples.train_elastic", *train, "--elastic", "--run_name", name]
        self.rendezvous = rendezvous
        self.memory = memory
        self.inside = {}  # {node: what its command begins with}
        self.nodes = {}
        self.lines = []  # (time, text)
        self.events = []
        self.name = name
        self.log = Path("logs", f"{name}.csv")
        self.log.unlink(missing_ok=True)

    def start(self, *names):
        for name in names:
            rendezvous = self.rendezvous or f"is_host={int(name == 'node 1')}"
            launcher = [*self.inside.get(name, []), *self.launcher, f"{self.settings},{rendezvous}"]
            memory = self.memory and self.memory / name
            self.nodes[name] = Node([*launcher, *self.train], self.lines, memory)

    def kill(self, *names):
        nodes = [self.nodes.pop(name) for name in names]
        for node in nodes:
            node.kill()
        for node in nodes:
            node.forget()

    def kill_a_rank(self, name):
        self.nodes[name].workers()[0].process.kill()

    def preempt(self, name):
        node = self.nodes.pop(name)
        node.agent.terminate()
        node.forget()

    def hang(self, name):
        self.nodes[name].workers()[0].process.suspend()

    def step(self):
        """The last step in the log."""
        return max((int(row["step"]) for row in rows_of(self.log) if row["ranks"]), default=0)

    def is_over(self):
        return all(node.agent.poll() is not None for node in self.nodes.values())

    def until(self, reached, pause=0.01):
        while not reached():
            assert not self.is_over(), "the job ended by itself"
            time.sleep(pause)

    def reach(self, step):
        self.until(lambda: self.step() >= step)

    def happen(self, what, event, *names, **expected):
        since = time.time()
        event(self, *names)
        return self.resumed(what, since, **expected)

    def resumed(self, what, since, ranks=r"\d+", lost=False):
        """Wait for the first step of new ranks, and print what happened: the last step before it,
        and a row of HEAD. Returns it, an Event.

        ranks: wait for so many: on a busy machine a node may be late, and joins a job that has
        begun. lost: steps may be done again."""
        reached = self.step()
        began, batch = self.wait_for(BATCH.format(ranks), since)
        starts = [worker.started for node in self.nodes.values() for worker in node.workers()]
        created = min((start for start in starts if start > since), default=began)
        stepped, row = self.wait_for(r"^step +(\d+) \|", began)
        step = int(row[1])
        event = Event(
            what,
            again=max(reached + 1 - step, 0),
            ranks_before=self.events[-1].ranks_after if self.events else 0,
            ranks_after=int(batch[1]),
            seconds=stepped - since,
        )
        print(
            f"{reached:4}  {what:<23}{event.ranks_before:>3} -> {event.ranks_after:<7}"
            f"{step:>12}{event.again:>8}{event.seconds:>10.1f}{created - since:>11.1f}"
            f"{began - created:>7.1f}{stepped - began:>12.1f}",
            flush=True,
        )
        assert lost or not event.again, "steps are done again"
        self.events.append(event)
        return event

    def wait(self, seconds=300):
        """Waits until all agents say that the job is done."""
        codes = [node.agent.wait(timeout=seconds) for node in self.nodes.values()]
        assert not any(codes), f"the agents ended with {codes}"
        for node in self.nodes.values():
            node.reader.join()  # a spare rank may say so after the others have begun to train

    def said(self, words):
        return sum(words in line for _, line in self.lines)

    def wait_for(self, pattern, since):
        """Waits for the first line since then that has the pattern; returns its time and match."""
        deadline = time.time() + self.patience
        while time.time() < deadline:
            for when, line in list(self.lines):
                match = when > since and re.search(pattern, line)
                if match:
                    return when, match
            if self.is_over():
                break
            time.sleep(0.02)
        last = "".join(line for _, line in self.lines[-60:])
        raise RuntimeError(f"no line has {pattern!r}:\n{last}")

    def close(self):
        self.kill(*self.nodes)
        if self.memory:
            shutil.rmtree(self.memory, ignore_errors=True)

    def __enter__(self):
        return self

    def __exit__(self, error, *_):
        if error:
            lines = [line for _, line in self.lines if not line.startswith("step")]
            print("".join(lines)[-20000:])
        self.close()


def train_alone(train, name, last):
    """Train up to that step on one rank, to which nothing happens: what a job is compared with."""
    with tempfile.TemporaryDirectory() as folder:
        train = [*train, "--run_name", name, "--checkpoint_dir", folder]
        limit = 900 + last
        run(Path.cwd(), 1, "examples.train_elastic", *train, patch=ends_after(last), limit=limit)


def differences(job, name):
    """Returns, by column, the largest difference of a job from the run of that name. Each of that
    one's steps must be in the job's log, once."""
    assert steps(Path.cwd(), job.name) == steps(Path.cwd(), name), "a step is missing, or twice"
    return largest(Path.cwd(), name, job.name)
