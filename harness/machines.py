"""Plays a job whose machines die and come back: each "machine" is an agent of torchrun on this one, with its ranks. For
demos/machines.py, demos/hosts.py and the tests; it only starts agents and takes them down."""

import contextlib
import csv
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
AGENT = "--nnodes 1:3 --max-restarts 100 --rdzv-id job --rdzv-backend c10d --local-addr 127.0.0.1".split()
RENDEZVOUS = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=3"
QUIET = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONPATH": str(ROOT)}
QUIET |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
WARM = [sys.executable, "-m", "harness.warm"]  # torchrun with workers that have torch and DeepSpeed in memory


def holder(port, address="127.0.0.1"):
    """The command of a rendezvous that no machine holds."""
    store = f"s = d.TCPStore('{address}', {port}, is_master=True, wait_for_workers=False)"
    return [sys.executable, "-c", f"import time, torch.distributed as d; {store}; time.sleep(1e9)"]


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
    """train_elastic.py on nodes that are called "node 1", "node 2", ... `with` ends it, and says what it has said where
    an error does so."""

    patience = 180  # seconds that first() waits

    def __init__(self, launcher, train, name, ranks=1, endpoint="127.0.0.1:29400", rendezvous=None, memory=None):
        """ranks: of each node. rendezvous: settings of --rdzv-conf when it is not the agent of node 1 that holds it.
        memory: the folder with one for each node, of a job that mirrors its shards."""
        self.launcher, self.train, self.log = [*launcher, *AGENT, "--nproc-per-node", str(ranks)], train, logged(name)
        self.endpoint, self.rendezvous, self.memory = endpoint, rendezvous, memory
        self.ranks, self.lines, self.nodes = ranks, [], {}
        self.log.unlink(missing_ok=True)

    def start(self, *names):
        for name in names:
            where = self.rendezvous or ("is_host=1" if name == "node 1" else "is_host=0")
            meet = ["--rdzv-endpoint", self.endpoint, "--rdzv-conf", f"{RENDEZVOUS},{where}"]
            command = [*self.launcher, *meet, str(ROOT / "train_elastic.py"), *self.train]
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

    def preempt(self, name):
        node = self.nodes.pop(name)
        node.agent.terminate()
        threading.Thread(target=node.forget).start()

    def hang(self, name):
        self.nodes[name].workers()[0][1].suspend()

    def step(self):
        """The last one in the log."""
        return max((int(row["step"]) for row in read(self.log) if row["layout"]), default=0)

    def reach(self, step):
        while self.step() < step:
            assert any(node.agent.poll() is None for node in self.nodes.values()), "the job ended by itself"
            time.sleep(0.01)

    def wait(self, seconds=300):
        """Until all agents say that the job is done."""
        codes = [node.agent.wait(timeout=seconds) for node in self.nodes.values()]
        assert codes == [0] * len(codes), f"the agents ended with {codes}"
        for node in self.nodes.values():
            node.reader.join()  # a spare rank may say so after the others have begun to train

    def went_on(self, since, ranks=r"\d+"):
        """(when ranks were there again, how many train, when they have done a step, which one it is). ranks: wait until
        there are so many: on a busy machine a node may be late, and joins a job that has begun."""
        began, ranks = self.first(rf"= \d+ per rank x \d+ accumulation steps x ({ranks}) ranks", since)
        stepped, step = self.first(r"^step +(\d+) \|", began)
        return began, int(ranks[1]), stepped, int(step[1])

    def created(self, since):
        """When the first process of a rank was started since then."""
        return min(when for node in self.nodes.values() for when, _ in node.workers() if when > since)

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
        raise RuntimeError(f"no line has {pattern!r}:\n" + "".join(line for _, line in self.lines[-60:]))

    def close(self):
        self.kill(*self.nodes)
        if self.memory:
            shutil.rmtree(self.memory, ignore_errors=True)

    def __enter__(self):
        return self

    def __exit__(self, error, *_):
        if error:
            print("".join(line for _, line in self.lines if not line.startswith(("step", "saved")))[-20000:])
        self.close()


def logged(name):
    return Path("logs", f"{name}.csv")


def read(log):
    """Its rows; none where there is no log yet."""
    if not log.exists():
        return []
    with log.open(newline="") as file:
        return list(csv.DictReader(file))


def compare(log, wanted):
    """([difference of the loss at every step], the largest of loss, validation loss and gradient norm)."""
    assert [row["step"] for row in log] == [row["step"] for row in wanted], "a step is missing, or twice in the log"
    gaps = {"loss": [], "val_loss": [], "grad_norm": []}
    for column, found in gaps.items():
        found += [abs(float(a[column]) - float(b[column])) for a, b in zip(log, wanted, strict=True) if b[column]]
    return gaps["loss"], {column: max(found, default=0.0) for column, found in gaps.items()}
